//! Requests: choice of the version, checks, responses, statistics and the response cache.

use serving::{ErrorKind, InferRequest, NewWeights, Tensor};

use crate::support::{ECHO, PIECES, TestRepository, floats, one, request, responses, text};

fn batched() -> String {
    format!("{ECHO}max_batch_size: 4")
}

fn of_shape(shape: &[i64], values: &[f32]) -> Tensor {
    Tensor::from_f32("INPUT0", shape, values)
}

#[tokio::test]
async fn a_response_names_model_version_and_request() {
    let server = TestRepository::new(&[("echo", ECHO)]).started().await;
    let sent = InferRequest { id: "7".into(), ..request("echo", vec![floats("INPUT0", &[1.0, 2.0])]) };
    let response = one(server.infer(sent).unwrap()).await;
    assert_eq!(
        (response.model_name.as_str(), response.model_version.as_str(), response.id.as_str()),
        ("echo", "1", "7")
    );
    assert_eq!(response.outputs, [floats("OUTPUT0", &[1.0, 2.0])]);
    assert!(response.is_final);
}

#[tokio::test]
async fn an_error_lists_some_names_and_counts_the_others() {
    let server = TestRepository::new(&[("echo", ECHO)]).started().await;
    let many = |count: usize| {
        let input = |index: usize| Tensor { name: format!("I{index}").into(), ..floats("", &[1.0]) };
        server.infer(request("echo", (0..count).map(input).collect())).unwrap_err().message
    };
    let names = |count: usize| (0..count).map(|index| format!("'I{index}'")).collect::<Vec<_>>().join(",");
    let message = |count: usize, listed: String| {
        format!(
            "[request id: <id_unknown>] expected 1 inputs but got {count} inputs for model 'echo'. Got input(s) [{listed}], but \
             the model does not take input(s) [{listed}]."
        )
    };
    assert_eq!(many(32), message(32, names(32)));
    assert_eq!(many(1024), message(1024, names(32) + " and 992 more"));
    assert_eq!(many(1025), "request has 1025 inputs, at most 1024 are allowed (--max-request-inputs)");
}

#[tokio::test]
async fn invalid_requests_get_the_error_messages_of_triton() {
    let fixed = "backend: \"echo\" max_batch_size: 2 \
                 input [ { name: \"INPUT0\" data_type: TYPE_FP32 dims: [ 2, 3 ] }, \
                         { name: \"INPUT1\" data_type: TYPE_FP32 dims: [ 1 ] optional: true } ] \
                 output [ { name: \"OUTPUT0\" data_type: TYPE_FP32 dims: [ 2, 3 ] } ]";
    let repository = TestRepository::new(&[("echo", &batched()), ("fixed", fixed), ("flat", ECHO), ("pieces", PIECES)]);
    let server = repository.started().await;
    let four = [1.0, 2.0, 3.0, 4.0];
    let good = of_shape(&[1, 4], &four);
    let other = Tensor { name: "INPUTX".into(), ..good.clone() };
    let int = Tensor::from_i32("INPUT0", &[1, 4], &[1, 2, 3, 4]);
    let short = Tensor { data: good.data.slice(..12), ..good.clone() };
    let string = |data: &'static [u8]| Tensor { data: data.into(), ..text("text", "") };
    let note = " NOTE: Setting a non-zero max_batch_size";
    let unknown = "[request id: <id_unknown>] ";
    let cases = [
        ("nosuch", vec![good.clone()], "Request for unknown model: 'nosuch' is not found".to_owned()),
        (
            "echo",
            vec![],
            format!("{unknown}expected 1 inputs but got 0 inputs for model 'echo'. Got input(s) [], but missing required input(s) ['INPUT0']. Please provide all required input(s)."),
        ),
        (
            "echo",
            vec![other.clone(), good.clone()],
            format!("{unknown}expected 1 inputs but got 2 inputs for model 'echo'. Got input(s) ['INPUTX','INPUT0'], but the model does not take input(s) ['INPUTX']."),
        ),
        ("echo", vec![other], "unexpected inference input 'INPUTX' for model 'echo'".into()),
        ("echo", vec![good.clone(), good.clone()], format!("{unknown}input 'INPUT0' already exists in request")),
        ("echo", vec![int], format!("{unknown}inference input 'INPUT0' data-type is 'INT32', but model 'echo' expects 'FP32'")),
        ("echo", vec![of_shape(&[], &four)], format!("{unknown}input 'INPUT0' has no shape but model requires batch dimension for 'echo'")),
        ("echo", vec![of_shape(&[4], &four)], format!("{unknown}unexpected shape for input 'INPUT0' for model 'echo'. Expected [-1,-1], got [4].{note}")),
        ("echo", vec![of_shape(&[1, -4], &four)], format!("{unknown}All input dimensions should be specified for input 'INPUT0' for model 'echo', got [1,-4]")),
        ("echo", vec![of_shape(&[5, 1], &[0.0; 5])], format!("{unknown}inference request batch-size must be <= 4 for 'echo'")),
        ("echo", vec![of_shape(&[0, 4], &[])], format!("{unknown}input byte size mismatch for input 'INPUT0' for model 'echo'. Expected 16, got 0")),
        ("echo", vec![short], format!("{unknown}input byte size mismatch for input 'INPUT0' for model 'echo'. Expected 16, got 12")),
        ("echo", vec![of_shape(&[4, 1 << 62], &four)], format!("{unknown}input 'INPUT0' for model 'echo' has shape [4,4611686018427387904], more elements")),
        ("fixed", vec![of_shape(&[1, 3, 2], &[0.0; 6])], format!("{unknown}unexpected shape for input 'INPUT0' for model 'fixed'. Expected [-1,2,3], got [1,3,2].{note}")),
        (
            "fixed",
            vec![of_shape(&[1, 2, 3], &[0.0; 6]), Tensor::from_f32("INPUT1", &[2, 1], &[0.0; 2])],
            format!("{unknown}input 'INPUT1' batch size does not match other inputs for 'fixed'"),
        ),
        ("fixed", vec![], format!("{unknown}expected number of inputs between 1 and 2 but got 0 inputs for model 'fixed'.")),
        ("flat", vec![of_shape(&[1, 4], &four)], format!("{unknown}unexpected shape for input 'INPUT0' for model 'flat'. Expected [-1], got [1,4]. ")),
        ("pieces", vec![Tensor { shape: serving::Shape::from_slice(&[1]), ..Tensor::from_byte_strings("text", &[2], &["a", "b"]) }], format!("{unknown}unexpected number of string elements 2 for inference input 'text' for model 'pieces', expecting 1")),
        ("pieces", vec![string(&[255, 0, 0, 0, 97, 98])], "incomplete string data for inference input 'text', expecting string of length 255 but only 2 bytes available".into()),
        ("pieces", vec![string(&[1, 0])], format!("{unknown}incomplete string length indicator for inference input 'text' for model 'pieces', expecting 4 bytes but only 2 bytes available.")),
    ];
    for (model, inputs, expected) in cases {
        let error = server.infer(request(model, inputs)).expect_err(&expected);
        assert!(error.message.starts_with(&expected), "\n  got      {}\n  expected {expected}", error.message);
        assert_eq!(error.kind, if model == "nosuch" { ErrorKind::NotFound } else { ErrorKind::InvalidArgument });
    }
    let sent = InferRequest { requested_outputs: vec!["OUTPUTX".into()], ..request("echo", vec![good]) };
    assert_eq!(server.infer(sent).unwrap_err().message, "unexpected inference output 'OUTPUTX' for model 'echo'");
}

#[tokio::test]
async fn a_request_goes_to_the_latest_version_or_the_one_it_names() {
    let repository = TestRepository::default();
    repository.add("echo", &format!("{ECHO} version_policy {{ specific {{ versions: [ 1, 3 ] }} }}"), &["1", "2", "3"]);
    let server = repository.started().await;
    let infer = |version: &str| {
        server.infer(InferRequest { model_version: version.into(), ..request("echo", vec![floats("INPUT0", &[1.0])]) })
    };
    for (requested, version) in [("", "3"), ("1", "1"), ("3", "3")] {
        assert_eq!(one(infer(requested).unwrap()).await.model_version, version, "{requested:?}");
    }
    assert!(infer("-1").unwrap_err().message.starts_with("invalid model version specified '-1'"));
    let unknown = infer("2").unwrap_err();
    assert_eq!(
        (unknown.kind, unknown.message.as_str()),
        (ErrorKind::NotFound, "Request for unknown model: 'echo' version 2 is not found")
    );
    let wrong = infer("abc").unwrap_err();
    assert_eq!(wrong.kind, ErrorKind::InvalidArgument);
    assert!(wrong.message.contains("'abc'") && wrong.message.contains("stol"), "{wrong}");
    assert_eq!(server.model_metadata("echo", "").unwrap().versions, ["1", "3"]);
    assert!(!server.model_is_ready("echo", "2").unwrap());
}

#[tokio::test]
async fn only_requested_outputs_are_sent() {
    let two = "backend: \"echo\" \
               input [ { name: \"INPUT0\" data_type: TYPE_FP32 dims: [ -1 ] }, { name: \"INPUT1\" data_type: TYPE_FP32 dims: [ -1 ] } ] \
               output [ { name: \"OUTPUT0\" data_type: TYPE_FP32 dims: [ -1 ] }, { name: \"OUTPUT1\" data_type: TYPE_FP32 dims: [ -1 ] } ]";
    let server = TestRepository::new(&[("two", two)]).started().await;
    let sent = InferRequest {
        requested_outputs: vec!["OUTPUT1".into()],
        ..request("two", vec![floats("INPUT0", &[1.0]), floats("INPUT1", &[2.0])])
    };
    assert_eq!(one(server.infer(sent).unwrap()).await.outputs, [floats("OUTPUT1", &[2.0])]);
}

#[tokio::test]
async fn outputs_have_the_shapes_of_the_client_where_the_model_reshapes() {
    let reshaped = "backend: \"echo\" max_batch_size: 4 \
                    input [ { name: \"INPUT0\" data_type: TYPE_FP32 dims: [ 1, -1 ] reshape { shape: [ -1 ] } } ] \
                    output [ { name: \"OUTPUT0\" data_type: TYPE_FP32 dims: [ 1, -1 ] reshape { shape: [ -1 ] } } ]";
    let server = TestRepository::new(&[("reshaped", reshaped)]).started().await;
    let sent = of_shape(&[2, 1, 3], &[0.0; 6]);
    let response = one(server.infer(request("reshaped", vec![sent])).unwrap()).await;
    assert_eq!(response.outputs[0].shape[..], [2, 1, 3]);
}

#[tokio::test]
async fn successes_failures_and_cancellations_are_counted_separately() {
    let repository = TestRepository::new(&[("echo", &batched()), ("gate", &ECHO.replace("echo", "gate"))]);
    let server = repository.started().await;
    one(server.infer(request("echo", vec![of_shape(&[3, 1], &[0.0; 3])])).unwrap()).await;
    server.infer(request("echo", vec![])).unwrap_err();
    drop(server.infer(request("gate", vec![floats("INPUT0", &[1.0])])).unwrap());

    let echo = server.model_statistics("echo", "").unwrap().remove(0);
    assert_eq!((echo.inference_count, echo.execution_count, echo.inference.success.count), (3, 1, 1));
    // A request that does not fit the model is not counted.
    assert_eq!((echo.inference.fail.count, echo.failures.other, echo.pending), (0, 0, 0));
    assert_eq!((echo.batches[0].batch_size, echo.batches[0].compute_infer.count), (3, 1));
    assert!(echo.last_inference_ms > 0 && echo.inference.success.ns > 0);
    let gate = server.model_statistics("gate", "1").unwrap().remove(0);
    assert_eq!((gate.inference.success.count, gate.inference.fail.count, gate.failures.canceled), (0, 1, 1));
    assert_eq!(server.model_statistics("", "").unwrap().len(), 2);
    for (name, version, message) in [
        ("nosuch", "", "requested model 'nosuch' is not available"),
        ("echo", "9", "requested model version is not available for model 'echo'"),
    ] {
        assert_eq!(server.model_statistics(name, version).unwrap_err().message, message);
    }
}

#[tokio::test]
async fn responses_of_a_decoupled_model_are_counted_by_index() {
    let server = TestRepository::new(&[("pieces", PIECES)]).started().await;
    assert_eq!(responses(server.infer(request("pieces", vec![text("text", "a")])).unwrap()).await.len(), 4);
    let mut cancelled = server.infer(request("pieces", vec![text("text", "a")])).unwrap();
    cancelled.next_response().await.unwrap().unwrap();
    drop(cancelled);

    let pieces = server.model_statistics("pieces", "").unwrap().remove(0);
    let counts: Vec<_> =
        pieces.responses.iter().map(|r| (r.success.count, r.empty_response.count, r.cancel.count)).collect();
    assert_eq!(counts, [(2, 0, 0), (1, 0, 1), (1, 0, 0), (0, 1, 0)]);
    assert_eq!(pieces.first_response.count, 2);
    assert_eq!(pieces.failures.canceled, 1);
}

#[tokio::test]
async fn a_stream_without_a_final_response_ends_with_an_error() {
    let stops = format!(
        "{PIECES} parameters {{ key: \"fail_at\" value {{ string_value: \"9\" }} }} parameters {{ key: \"final\" value {{ string_value: \"1\" }} }}"
    );
    let server = TestRepository::new(&[("pieces", &stops)]).started().await;
    let none = Tensor::from_i32("n", &[1], &[0]);
    let all = responses(server.infer(request("pieces", vec![text("text", "a"), none])).unwrap()).await;
    assert_eq!(all.len(), 1);
    assert!(all[0].as_ref().unwrap_err().message.contains("stopped answering before its final response"));
}

#[tokio::test]
async fn an_equal_request_is_answered_from_the_cache() {
    let cached = format!("{ECHO} response_cache {{ enable: true }}");
    let repository = TestRepository::new(&[("cached", &cached), ("plain", ECHO)]);
    let server = repository.started().await;
    let infer = |model: &str, id: &str, values: &[f32]| {
        server.infer(InferRequest { id: id.into(), ..request(model, vec![floats("INPUT0", values)]) }).unwrap()
    };
    for (id, values, num_computed) in [("a", [1.0], 1), ("b", [1.0], 1), ("c", [2.0], 2), ("d", [1.0], 2)] {
        let response = one(infer("cached", id, &values)).await;
        assert_eq!(response.outputs, [floats("OUTPUT0", &values)]);
        assert_eq!((response.id.as_str(), response.model_name.as_str()), (id, "cached"));
        assert_eq!(repository.script.echoes.load(std::sync::atomic::Ordering::SeqCst), num_computed);
    }
    let statistics = server.model_statistics("cached", "").unwrap().remove(0);
    assert_eq!((statistics.inference.success.count, statistics.inference_count, statistics.execution_count), (4, 2, 2));
    assert_eq!((statistics.inference.cache_hit.count, statistics.inference.cache_miss.count), (2, 2));
    assert_eq!((statistics.inference.queue.count, statistics.inference.compute_infer.count), (4, 2));
    for _ in 0..2 {
        one(infer("plain", "", &[1.0])).await;
    }
    assert_eq!(server.model_statistics("plain", "").unwrap()[0].execution_count, 2);
}

#[tokio::test]
async fn a_model_that_is_loaded_again_does_not_use_old_cached_responses() {
    let cached = format!("{ECHO} response_cache {{ enable: true }}");
    let repository = TestRepository::new(&[("cached", &cached)]);
    let server = repository.explicit(&["cached"]).await;
    let infer = || server.infer(request("cached", vec![floats("INPUT0", &[1.0])])).unwrap();
    one(infer()).await;
    server.unload_model("cached", false).await.unwrap();
    server.load_model("cached", serving::LoadOverrides::default()).await.unwrap();
    one(infer()).await;
    assert_eq!(repository.script.echoes.load(std::sync::atomic::Ordering::SeqCst), 2);
}

#[tokio::test]
async fn a_model_with_other_weights_does_not_use_old_cached_responses_and_one_of_several_is_named() {
    let cached = format!("{ECHO} response_cache {{ enable: true }}");
    let replaceable = format!("{ECHO} parameters {{ key: \"weights\" value: {{ string_value: \"1\" }} }}");
    let repository = TestRepository::new(&[("cached", &cached), ("one", &replaceable), ("other", &replaceable)]);
    let server = repository.started().await;
    let infer = || server.infer(request("cached", vec![floats("INPUT0", &[1.0])])).unwrap();
    for _ in 0..2 {
        one(infer()).await;
    }
    let new = NewWeights { checkpoint: "a".into(), version: Some("7".to_owned()), aborts_requests: false };
    assert_eq!(server.replace_weights(Some("one"), new.clone()).await, Ok(("one".to_owned(), "7".to_owned())));
    // It may pass its requests to the model whose weights are others now.
    one(infer()).await;
    assert_eq!(repository.script.echoes.load(std::sync::atomic::Ordering::SeqCst), 2);
    let error = server.replace_weights(None, new.clone()).await.unwrap_err();
    assert_eq!(error.message, "the weights of models `one` and `other` can be replaced; name one by `?model=NAME`");
    let error = server.replace_weights(Some("cached"), new).await.unwrap_err();
    assert!(error.message.contains("`--weight-updates-dir=DIR`"), "{}", error.message);
    let versions = ["one", "cached", "nobody"].map(|model| server.weights_version(model));
    assert_eq!(versions, [Some("1".to_owned()), None, None]);
}
