//! Loading, unloading and draining of models.

use std::sync::atomic::Ordering;
use std::time::Duration;

use serving::{ControlMode, ErrorKind, InferRequest, LoadOverrides, ModelState};

use crate::support::{ECHO, PIECES, TestRepository, eventually, floats, index, one, request, responses, with};

const ENSEMBLE: &str = r#"platform: "ensemble"
input [ { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] } ]
ensemble_scheduling { step [
  { model_name: "echo" model_version: -1 input_map { key: "INPUT0" value: "IN" } output_map { key: "OUTPUT0" value: "OUT" } }
] }"#;

#[tokio::test]
async fn a_model_that_fails_to_load_does_not_stop_the_others() {
    let repository = TestRepository::new(&[
        ("echo", ECHO),
        ("broken", &with(ECHO, "broken")),
        ("bad", "max_batch_size: x"),
        ("panics", &with(ECHO, "panic")),
    ]);
    repository.add("nosuch", &ECHO.replace("echo", "nosuch"), &["1"]);
    repository.add("empty", ECHO, &[]);
    let server = repository.server(ControlMode::None);
    let failures = server.load_all().await.unwrap_err();
    assert_eq!(
        failures.iter().map(|failure| failure.model.as_str()).collect::<Vec<_>>(),
        ["bad", "broken", "empty", "nosuch", "panics"]
    );
    assert!(failures[0].reason.contains("bad/config.pbtxt:1:17: "), "{}", failures[0].reason);
    assert_eq!(
        failures[1].reason,
        "load failed for model 'broken': version 1 is at UNAVAILABLE state: Internal: broken on purpose;"
    );
    assert_eq!(
        failures[2].reason,
        "load failed for model 'empty': at least one version must be available under the version policy of model 'empty'"
    );
    assert!(failures[3].reason.contains(
        "unable to find backend library for backend 'nosuch', try specifying runtime on the model configuration."
    ));
    assert!(failures[4].reason.contains("loading panicked: on purpose"), "{}", failures[4].reason);

    one(server.infer(request("echo", vec![floats("INPUT0", &[1.0])])).unwrap()).await;
    assert!(server.is_live() && !server.is_ready());
    assert_eq!(server.missing_models(), ["bad", "broken", "empty", "nosuch", "panics"]);
    let lines = index(&server);
    assert_eq!(
        lines[1..3],
        ["broken 1 UNAVAILABLE Internal: broken on purpose", "echo 1 READY"].map(str::to_owned)[..]
    );
    for (model, version, kind, message) in [
        ("broken", "", ErrorKind::NotFound, "has no available versions"),
        ("broken", "1", ErrorKind::Unavailable, "version 1 is not at ready state"),
        ("empty", "", ErrorKind::NotFound, "has no available versions"),
        ("empty", "1", ErrorKind::NotFound, "version 1 is not found"),
        ("bad", "1", ErrorKind::NotFound, "is not found"),
    ] {
        let refused =
            server.infer(InferRequest { model_version: version.into(), ..request(model, vec![]) }).unwrap_err();
        let message = format!("Request for unknown model: '{model}' {message}");
        assert_eq!((refused.kind, refused.message), (kind, message));
    }
}

#[tokio::test]
async fn explicit_control_loads_and_unloads_by_name() {
    let repository = TestRepository::new(&[("echo", ECHO), ("pieces", PIECES)]);
    let server = repository.explicit(&["pieces"]).await;
    assert!(server.is_ready());
    assert_eq!(index(&server), ["echo", "pieces 1 READY"]);
    assert_eq!(server.model_config("echo", "").unwrap_err().message, "Request for unknown model: 'echo' is not found");

    server.load_model("echo", LoadOverrides::default()).await.unwrap();
    server.load_model("echo", LoadOverrides::default()).await.unwrap();
    assert_eq!(
        *repository.script.loads.lock().unwrap(),
        ["pieces/1", "echo/1"],
        "an unchanged model is not loaded again"
    );
    assert!(server.model_is_ready("echo", "").unwrap());

    server.unload_model("echo", false).await.unwrap();
    server.unload_model("echo", false).await.unwrap();
    server.unload_model("nosuch", false).await.unwrap();
    assert_eq!(repository.script.dropped.load(Ordering::SeqCst), 1);
    assert_eq!(index(&server), ["echo 1 UNAVAILABLE unloaded", "pieces 1 READY"]);
    assert_eq!(
        server.infer(request("echo", vec![])).unwrap_err().message,
        "Request for unknown model: 'echo' has no available versions"
    );
    assert!(server.is_ready(), "readiness does not require an unloaded model");
    let unknown = server.load_model("nosuch", LoadOverrides::default()).await.unwrap_err();
    assert_eq!(
        (unknown.kind, unknown.message.as_str()),
        (ErrorKind::Internal, "failed to load 'nosuch', failed to poll from model repository")
    );
}

#[tokio::test]
async fn without_explicit_control_clients_cannot_load_or_unload() {
    let server = TestRepository::new(&[("echo", ECHO)]).started().await;
    for result in [server.load_model("echo", LoadOverrides::default()).await, server.unload_model("echo", false).await]
    {
        let error = result.unwrap_err();
        assert_eq!(error.kind, ErrorKind::Unavailable);
        assert!(error.message.starts_with("explicit model load / unload is not allowed if polling is enabled"));
    }
}

#[tokio::test]
async fn after_a_failed_reload_the_old_load_serves() {
    let repository = TestRepository::new(&[("echo", ECHO)]);
    let server = repository.explicit(&["echo"]).await;
    for config in
        ["{nope", r#"{"backend": "nosuch"}"#, r#"{"backend": "echo", "parameters": {"broken": {"string_value": "1"}}}"#]
    {
        let overrides = LoadOverrides { config: Some(config.into()), ..LoadOverrides::default() };
        server.load_model("echo", overrides).await.unwrap_err();
        one(server.infer(request("echo", vec![floats("INPUT0", &[1.0])])).unwrap()).await;
    }
    assert!(server.is_ready());
}

#[tokio::test]
async fn a_model_that_memory_holds_once_serves_on_if_its_new_configuration_is_wrong() {
    let repository = TestRepository::new(&[("model", &ECHO.replace("\"echo\"", "\"exclusive\""))]);
    let server = repository.explicit(&["model"]).await;
    let load = |parameter: &str| {
        let config = format!(r#"{{"backend": "exclusive", "parameters": {{"{parameter}": {{"string_value": "1"}}}}}}"#);
        server.load_model("model", LoadOverrides { config: Some(config), ..LoadOverrides::default() })
    };
    let error = load("wrong").await.unwrap_err();
    let expected =
        "load failed for model 'model': version 1 is at UNAVAILABLE state: Invalid argument: wrong on purpose;\n";
    assert_eq!(error.message, expected);
    one(server.infer(request("model", vec![floats("INPUT0", &[1.0])])).unwrap()).await;
    assert_eq!(repository.script.loads.lock().unwrap().len(), 1);
    // Whether this one can be loaded shows only without the old one.
    load("broken").await.unwrap_err();
    assert!(server.infer(request("model", vec![floats("INPUT0", &[1.0])])).is_err());
}

#[tokio::test]
async fn loading_an_ensemble_loads_its_composing_models() {
    let repository = TestRepository::new(&[("echo", ECHO), ("ens", ENSEMBLE)]);
    let server = repository.explicit(&[]).await;
    server.load_model("ens", LoadOverrides::default()).await.unwrap();
    let sent = floats("IN", &[1.0, 2.0]);
    assert_eq!(
        one(server.infer(request("ens", vec![sent.clone()])).unwrap()).await.outputs,
        [floats("OUT", &[1.0, 2.0])]
    );

    server.unload_model("echo", false).await.unwrap();
    assert!(!server.model_is_ready("ens", "").unwrap());
    assert!(server.repository_index(true).is_empty());
    assert_eq!(
        server.infer(request("ens", vec![sent])).unwrap_err().message,
        "in ensemble 'ens', Request for unknown model: 'echo' has no available versions"
    );
    server.load_model("echo", LoadOverrides::default()).await.unwrap();
    assert!(server.model_is_ready("ens", "").unwrap());
    server.unload_model("ens", true).await.unwrap();
    assert!(server.model_is_ready("echo", "").unwrap(), "it was requested by name");

    server.unload_model("echo", false).await.unwrap();
    server.load_model("ens", LoadOverrides::default()).await.unwrap();
    server.unload_model("ens", true).await.unwrap();
    assert_eq!(index(&server), ["echo 1 UNAVAILABLE unloaded", "ens 1 UNAVAILABLE unloaded"]);
}

#[tokio::test]
async fn an_ensemble_that_does_not_fit_its_models_is_refused_with_the_place() {
    for (from, to, message) in [
        ("key: \"INPUT0\"", "key: \"INPUT9\"", "`input_map` names `INPUT9`, which is no input of `echo`"),
        ("key: \"OUTPUT0\"", "key: \"OUTPUT9\"", "`output_map` names `OUTPUT9`, which is no output of `echo`"),
        (
            "name: \"IN\" data_type: TYPE_FP32",
            "name: \"IN\" data_type: TYPE_INT32",
            "input `INPUT0` of `echo` is TYPE_FP32, but input `IN`, which is the same tensor, is TYPE_INT32",
        ),
        ("input_map { key: \"INPUT0\" value: \"IN\" }", "", "the step of `echo` has no `input_map` for `INPUT0`"),
        (
            "model_name: \"echo\"",
            "model_name: \"gone\"",
            "ensemble 'ens' depends on 'gone' which has no loaded version",
        ),
    ] {
        let repository = TestRepository::new(&[("echo", ECHO), ("ens", &ENSEMBLE.replace(from, to))]);
        let failures = repository.server(ControlMode::None).load_all().await.unwrap_err();
        assert_eq!(failures[0].model, "ens");
        assert!(failures[0].reason.contains(message), "{}", failures[0].reason);
    }
}

#[tokio::test]
async fn readiness_follows_the_backend() {
    let repository = TestRepository::new(&[("echo", ECHO), ("ens", ENSEMBLE)]);
    let server = repository.server(ControlMode::None);
    assert!(!server.is_ready(), "nothing is loaded yet");
    server.load_all().await.unwrap();
    assert!(server.is_ready() && server.model_is_ready("ens", "1").unwrap());
    repository.script.unready.store(true, Ordering::SeqCst);
    assert!(!server.is_ready() && !server.model_is_ready("ens", "1").unwrap());
    assert_eq!(server.repository_index(false)[0].state, ModelState::Unavailable);
    assert!(!server.model_is_ready("nosuch", "").unwrap());
    assert_eq!(server.model_is_ready("echo", "x").unwrap_err().kind, ErrorKind::InvalidArgument);
}

#[tokio::test]
async fn an_unload_waits_for_requests_in_flight() {
    let repository = TestRepository::new(&[("gate", &ECHO.replace("echo", "gate"))]);
    let server = repository.explicit(&["gate"]).await;
    let stream = server.infer(request("gate", vec![floats("INPUT0", &[1.0])])).unwrap();
    let unloading = tokio::spawn({
        let server = server.clone();
        async move { server.unload_model("gate", false).await }
    });
    eventually("it is unloading", || index(&server) == ["gate 1 UNLOADING"]).await;
    server.infer(request("gate", vec![floats("INPUT0", &[1.0])])).unwrap_err();
    repository.script.gate.add_permits(1);
    assert_eq!(one(stream).await.outputs, [floats("OUTPUT0", &[1.0])]);
    unloading.await.unwrap().unwrap();
    assert_eq!(index(&server), ["gate 1 UNAVAILABLE unloaded"]);
}

#[tokio::test]
async fn draining_finishes_requests_in_flight_and_refuses_new_ones() {
    let repository = TestRepository::new(&[("gate", &ECHO.replace("echo", "gate"))]);
    let server = repository.started().await;
    let stream = server.infer(request("gate", vec![floats("INPUT0", &[1.0])])).unwrap();
    let draining = tokio::spawn({
        let server = server.clone();
        async move { server.drain(Duration::from_secs(5)).await }
    });
    eventually("it refuses requests", || !server.is_ready()).await;
    assert_eq!(server.infer(request("gate", vec![])).unwrap_err().kind, ErrorKind::Unavailable);
    repository.script.gate.add_permits(1);
    assert_eq!(responses(stream).await.len(), 1);
    assert_eq!(draining.await.unwrap(), 0);
    assert_eq!(repository.script.dropped.load(Ordering::SeqCst), 1, "the backend is dropped");
    // The model is unloaded, but exists: a client sends its request to the next server.
    let refusals = [
        server.infer(request("gate", vec![])).err(),
        server.is_decoupled("gate", "").err(),
        server.generator("gate", "1").err(),
    ];
    assert!(refusals.iter().flatten().all(|error| error.message == serving::STOPPING), "{refusals:?}");
    assert_eq!(refusals.iter().flatten().count(), refusals.len());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_arrives_as_the_server_begins_to_stop_is_answered_or_told_so() {
    let repository = TestRepository::new(&[("echo", ECHO), ("ens", ENSEMBLE)]);
    for round in 0..100 {
        let server = repository.started().await;
        let (sender, has_begun) = tokio::sync::oneshot::channel();
        let requests = tokio::spawn({
            let server = server.clone();
            async move {
                one(server.infer(request("ens", vec![floats("IN", &[1.0])])).unwrap()).await;
                sender.send(()).unwrap();
                loop {
                    match server.infer(request("ens", vec![floats("IN", &[1.0])])) {
                        Ok(stream) => drop(responses(stream).await.into_iter().map(Result::unwrap).collect::<Vec<_>>()),
                        Err(refused) => return refused.message,
                    }
                }
            }
        });
        has_begun.await.unwrap();
        assert_eq!(server.drain(Duration::from_secs(5)).await, 0, "round {round}");
        assert_eq!(requests.await.unwrap(), serving::STOPPING, "round {round}");
    }
}

#[tokio::test]
async fn draining_ends_at_its_timeout() {
    let repository = TestRepository::new(&[("gate", &ECHO.replace("echo", "gate"))]);
    let server = repository.started().await;
    let _stream = server.infer(request("gate", vec![floats("INPUT0", &[1.0])])).unwrap();
    assert_eq!(server.drain(Duration::from_millis(20)).await, 1);
}

#[tokio::test]
async fn a_failed_load_returns_its_reason_and_the_server_stays_ready() {
    let repository = TestRepository::new(&[("echo", ECHO), ("broken", &with(ECHO, "broken"))]);
    let server = repository.explicit(&["echo"]).await;
    let error = server.load_model("broken", LoadOverrides::default()).await.unwrap_err();
    assert_eq!(
        error.message,
        "load failed for model 'broken': version 1 is at UNAVAILABLE state: Internal: broken on purpose;\n"
    );
    assert!(server.is_ready() && !server.model_is_ready("broken", "").unwrap());
}

const WARM: &str = r#"model_warmup [
  { name: "zeros" batch_size: 2 count: 2 inputs { key: "INPUT0" value { data_type: TYPE_FP32 dims: [ 3 ] zero_data: true } } },
  { name: "off" batch_size: 0 inputs { key: "INPUT0" value { data_type: TYPE_FP32 dims: [ 3 ] zero_data: true } } },
  { name: "some" batch_size: 1 inputs { key: "INPUT0" value { data_type: TYPE_FP32 dims: [ 2 ] input_data_file: "some.bin" } } }
]"#;

#[tokio::test]
async fn warm_up_requests_run_before_the_model_serves_and_are_not_counted() {
    let repository = TestRepository::new(&[("echo", &format!("{ECHO} max_batch_size: 4 {WARM}"))]);
    let rows = ECHO.replace("\"echo\"", "\"rows\"");
    repository.add(
        "rows",
        &format!("{rows} max_batch_size: 4 {WARM} instance_group [ {{ count: 2 kind: KIND_CPU }} ]"),
        &["1"],
    );
    for model in ["echo", "rows"] {
        let dir = repository.root.path().join(model).join("warmup");
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join("some.bin"), [0; 8]).unwrap();
    }
    repository.script.gate.add_permits(6);
    let server = repository.started().await;
    assert_eq!(repository.script.echoes.load(Ordering::SeqCst), 3);
    assert_eq!(*repository.script.batches.lock().unwrap(), ["0: ", "1: ", "0: ", "1: ", "0: ", "1: "]);
    for model in ["echo", "rows"] {
        let statistics = server.model_statistics(model, "").unwrap().remove(0);
        assert_eq!((statistics.inference_count, statistics.inference.fail.count), (0, 0));
    }
}

#[tokio::test]
async fn a_model_whose_warm_up_fails_does_not_serve() {
    let config = format!("{ECHO} max_batch_size: 4 {WARM}");
    for (from, to, message) in [
        (
            "dims: [ 3 ]",
            "dims: [ -1 ]",
            "failed to run warmup sample 'zeros': input `INPUT0` has shape [2, -1]; each size must be given",
        ),
        ("key: \"INPUT0\"", "key: \"WRONG\"", "unexpected inference input 'WRONG' for model 'echo'"),
        ("some.bin", "missing.bin", "warmup/missing.bin"),
        ("some.bin", "../../secret", "is not a name below `warmup/`"),
        (" zero_data: true", "", "warmup setting expects input 'INPUT0' to have input_data_type set"),
        ("batch_size: 2", "batch_size: 5", "inference request batch-size must be <= 4 for 'echo'"),
    ] {
        let repository = TestRepository::new(&[("echo", &config.replacen(from, to, 1))]);
        let failures = repository.server(ControlMode::None).load_all().await.unwrap_err();
        assert!(failures[0].reason.contains(message), "{}", failures[0].reason);
    }
}

#[tokio::test]
async fn a_response_cache_needs_one_response_to_each_request() {
    let repository = TestRepository::new(&[("pieces", &format!("{PIECES} response_cache {{ enable: true }}"))]);
    let failures = repository.server(ControlMode::None).load_all().await.unwrap_err();
    assert!(failures[0].reason.contains("`response_cache` works for models with one answer"), "{}", failures[0].reason);
}

#[tokio::test]
async fn loading_an_ensemble_restores_the_configurations_of_its_models() {
    let repository = TestRepository::new(&[("echo", ECHO), ("ens", ENSEMBLE)]);
    let server = repository.explicit(&["echo"]).await;
    let other = r#"{"backend": "echo", "max_batch_size": 2, "input": [{"name": "INPUT0", "data_type": "TYPE_FP32", "dims": [-1]}],
                    "output": [{"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": [-1]}]}"#;
    server.load_model("echo", LoadOverrides { config: Some(other.into()), ..LoadOverrides::default() }).await.unwrap();
    assert_eq!(server.model_config("echo", "").unwrap().max_batch_size, 2);
    server.load_model("ens", LoadOverrides::default()).await.unwrap();
    assert_eq!(server.model_config("echo", "").unwrap().max_batch_size, 0);
    assert_eq!(
        one(server.infer(request("ens", vec![floats("IN", &[1.0])])).unwrap()).await.outputs,
        [floats("OUT", &[1.0])]
    );
}

#[tokio::test]
async fn ensembles_that_contain_each_other_fail_and_do_not_block() {
    let of = |model: &str| {
        ENSEMBLE
            .replace("\"echo\"", &format!("\"{model}\""))
            .replace("\"INPUT0\"", "\"IN\"")
            .replace("\"OUTPUT0\"", "\"OUT\"")
    };
    let repository = TestRepository::new(&[("a", &of("b")), ("b", &of("a")), ("c", &of("a")), ("echo", ECHO)]);
    let server = repository.server(ControlMode::None);
    let failures = tokio::time::timeout(Duration::from_secs(5), server.load_all()).await.expect("it ends").unwrap_err();
    assert_eq!(failures.iter().map(|failure| failure.model.as_str()).collect::<Vec<_>>(), ["a", "b", "c"]);
    assert!(server.model_is_ready("echo", "").unwrap());
}

#[tokio::test]
async fn labels_are_read_from_a_file_in_the_model_directory() {
    let labelled = |file: &str| {
        ECHO.replace(
            "output [ { name: \"OUTPUT0\"",
            &format!("output [ {{ label_filename: \"{file}\" name: \"OUTPUT0\""),
        )
    };
    let repository = TestRepository::new(&[
        ("good", &labelled("labels.txt")),
        ("none", &labelled("none.txt")),
        ("far", &labelled("/etc/hostname")),
    ]);
    std::fs::write(repository.root.path().join("good/labels.txt"), "ant\nbee\n").unwrap();
    let server = repository.server(ControlMode::None);
    let failures = server.load_all().await.unwrap_err();
    assert_eq!(failures.iter().map(|failure| failure.model.as_str()).collect::<Vec<_>>(), ["far", "none"]);
    assert!(failures[0].reason.contains("is not a name below the model's directory"), "{}", failures[0].reason);
    assert_eq!(server.output_labels("good", "", "OUTPUT0").unwrap()[..], ["ant", "bee"]);
    assert_eq!(server.output_labels("good", "", "OTHER"), None);
}
