//! Ensembles: order of steps, parallel and decoupled steps, errors, shared tensors, text ensembles.

use serving::{InferRequest, InferResponse, OutputDelta, Parameter, ResponseStream, StreamItem, Tensor};

use crate::support::{PIECES, TestRepository, eventually, one, request, responses, text, text_of};

const JOIN: &str = r#"backend: "join"
input [ { name: "a" data_type: TYPE_STRING dims: [ 1 ] },
        { name: "b" data_type: TYPE_STRING dims: [ 1 ] optional: true } ]
output [ { name: "joined" data_type: TYPE_STRING dims: [ 1 ] } ]
"#;

/// An ensemble from `x` to `y` of steps "model: input=tensor … -> output=tensor".
fn ensemble(steps: &[&str]) -> String {
    let map = |kind: &str, pairs: &str| {
        let pairs = pairs.split_whitespace().map(|pair| pair.split_once('=').unwrap());
        pairs.map(|(name, tensor)| format!("{kind} {{ key: \"{name}\" value: \"{tensor}\" }} ")).collect::<String>()
    };
    let step = |step: &&str| {
        let (model, maps) = step.split_once(':').unwrap();
        let (inputs, outputs) = maps.split_once("->").unwrap();
        format!(
            "{{ model_name: \"{model}\" model_version: -1 {}{}}}",
            map("input_map", inputs),
            map("output_map", outputs)
        )
    };
    format!(
        "platform: \"ensemble\" input [ {{ name: \"x\" data_type: TYPE_STRING dims: [ 1 ] }}, \
         {{ name: \"n\" data_type: TYPE_INT32 dims: [ 1 ] optional: true }} ] \
         output [ {{ name: \"y\" data_type: TYPE_STRING dims: [ 1 ] }} ] ensemble_scheduling {{ step [ {} ] }}",
        steps.iter().map(step).collect::<Vec<_>>().join(", ")
    )
}

fn texts(responses: Vec<Result<InferResponse, serving::InferError>>) -> Vec<String> {
    let show = |response: InferResponse| {
        let text = response.outputs.first().map(text_of).unwrap_or_default();
        if response.is_final { format!("{text} (final)") } else { text }
    };
    responses.into_iter().map(|response| response.map_or_else(|error| error.message, show)).collect()
}

#[tokio::test]
async fn steps_run_in_the_order_of_their_tensors_and_not_of_the_configuration() {
    let steps = ["join: a=left b=right -> joined=y", "join: a=x b=left -> joined=right", "join: a=x -> joined=left"];
    let server = TestRepository::new(&[("join", JOIN), ("ens", &ensemble(&steps))]).started().await;
    let response = one(server.infer(request("ens", vec![text("x", "q")])).unwrap()).await;
    assert_eq!(text_of(&response.outputs[0]), "q:1!+q+q:1!:1!:1!");
    assert_eq!((response.model_name.as_str(), response.model_version.as_str()), ("ens", "1"));
    assert_eq!(response.parameters[0], ("sequence_id".into(), Parameter::Int(0)));
    assert!(!server.is_decoupled("ens", "").unwrap());
}

#[tokio::test]
async fn independent_steps_run_in_parallel() {
    let gate = JOIN.replace("\"join\"", "\"gate\"").replace("\"joined\"", "\"a\"");
    let steps = ["gate: a=x -> a=left", "gate: a=x -> a=right", "join: a=left b=right -> joined=y"];
    let repository = TestRepository::new(&[("join", JOIN), ("gate", &gate), ("ens", &ensemble(&steps))]);
    let server = repository.started().await;
    let response = tokio::spawn(one(server.infer(request("ens", vec![text("x", "q")])).unwrap()));
    let pending = || server.model_statistics("gate", "").unwrap()[0].pending;
    eventually("both wait at the gate", || pending() == 2).await;
    repository.script.gate.add_permits(2);
    assert_eq!(text_of(&response.await.unwrap().outputs[0]), "q+q:1!");
}

#[tokio::test]
async fn the_next_steps_run_for_each_response_of_a_decoupled_step() {
    let steps =
        ["join: a=x -> joined=clean", "pieces: text=clean n=n -> piece=piece", "join: a=piece b=clean -> joined=y"];
    let server = TestRepository::new(&[("join", JOIN), ("pieces", PIECES), ("ens", &ensemble(&steps))]).started().await;
    assert!(server.is_decoupled("ens", "").unwrap());
    let all = responses(server.infer(request("ens", vec![text("x", "q")])).unwrap()).await;
    // The last step keeps its state while the request runs: it counts 1, 2, 3.
    assert_eq!(texts(all), ["q:1!#0+q:1!:1", "q:1!#1+q:1!:2", "q:1!#2+q:1!:3", " (final)"]);
    let none = Tensor::from_i32("n", &[1], &[0]);
    let all = responses(server.infer(request("ens", vec![text("x", "q"), none])).unwrap()).await;
    assert_eq!(texts(all), [" (final)"]);
}

#[tokio::test]
async fn a_final_response_with_outputs_is_the_last_request_of_the_next_step() {
    let pieces = format!("{PIECES} parameters {{ key: \"final\" value {{ string_value: \"1\" }} }}");
    let steps = ["pieces: text=x n=n -> piece=piece", "join: a=piece -> joined=y"];
    let server =
        TestRepository::new(&[("join", JOIN), ("pieces", &pieces), ("ens", &ensemble(&steps))]).started().await;
    let all = responses(server.infer(request("ens", vec![text("x", "q")])).unwrap()).await;
    assert_eq!(texts(all), ["q#0:1", "q#1:2", "q#2:3! (final)"]);
}

#[tokio::test]
async fn a_decoupled_step_can_follow_another() {
    let steps = ["pieces: text=x n=n -> piece=one", "pieces: text=one n=n -> piece=y"];
    let server = TestRepository::new(&[("pieces", PIECES), ("ens", &ensemble(&steps))]).started().await;
    let two = Tensor::from_i32("n", &[1], &[2]);
    let all = responses(server.infer(request("ens", vec![text("x", "q"), two])).unwrap()).await;
    assert_eq!(texts(all), ["q#0#0", "q#0#1", "q#1#0", "q#1#1", " (final)"]);
}

#[tokio::test]
async fn responses_of_parallel_decoupled_steps_are_combined_in_rounds() {
    let branches = ["pieces: text=x -> piece=one", "pieces: text=x n=n -> piece=two"];
    let both = [branches[0], branches[1], "join: a=one b=two -> joined=y"];
    let ending = format!("{PIECES} parameters {{ key: \"final\" value {{ string_value: \"1\" }} }}");
    for (n, pieces, expected) in [
        (3, PIECES, vec!["q#0+q#0:1", "q#1+q#1:2", "q#2+q#2:3", " (final)"]),
        (3, ending.as_str(), vec!["q#0+q#0:1", "q#1+q#1:2", "q#2+q#2:3! (final)"]),
        // When one step has fewer responses, the other responses have no counterpart and are not combined.
        (1, PIECES, vec!["q#0+q#0:1", " (final)"]),
        (5, ending.as_str(), vec!["q#0+q#0:1", "q#1+q#1:2", "q#2+q#2:3", " (final)"]),
        (0, PIECES, vec![" (final)"]),
    ] {
        let repository = TestRepository::new(&[("join", JOIN), ("pieces", pieces), ("ens", &ensemble(&both))]);
        let server = repository.started().await;
        let inputs = vec![text("x", "q"), Tensor::from_i32("n", &[1], &[n])];
        let all = responses(server.infer(request("ens", inputs)).unwrap()).await;
        assert_eq!(texts(all), expected, "{n} of the second");
    }
    // Steps that need only one of them run for all of its responses.
    let steps = [branches[0], "pieces: text=x n=n -> piece=two", "join: a=one -> joined=y"];
    let server = TestRepository::new(&[("join", JOIN), ("pieces", PIECES), ("ens", &ensemble(&steps))]).started().await;
    let inputs = vec![text("x", "q"), Tensor::from_i32("n", &[1], &[1])];
    let all = responses(server.infer(request("ens", inputs)).unwrap()).await;
    assert_eq!(texts(all), ["q#0:1", "q#1:2", "q#2:3", " (final)"]);
}

#[tokio::test]
async fn an_output_that_a_later_response_lacks_is_not_repeated() {
    let output = "output [ { name: \"note\" data_type: TYPE_STRING dims: [ 1 ] } ]";
    let steps = ["pieces: text=x n=n -> piece=y note=z"];
    let ens = ensemble(&steps).replace("output [ {", "output [ { name: \"z\" data_type: TYPE_STRING dims: [ 1 ] }, {");
    let server = TestRepository::new(&[("pieces", &format!("{PIECES} {output}")), ("ens", &ens)]).started().await;
    let all = responses(server.infer(request("ens", vec![text("x", "q")])).unwrap()).await;
    let names =
        |response: &InferResponse| response.outputs.iter().map(|output| output.name.clone()).collect::<Vec<_>>();
    let names: Vec<_> = all.iter().map(|response| names(response.as_ref().unwrap()).join(" ")).collect();
    assert_eq!(names, ["z y", "y", "y", ""]);
}

#[tokio::test]
async fn steps_that_no_requested_output_needs_do_not_run() {
    let steps = ["join: a=x -> joined=y", "pieces: text=x -> piece=mid", "join: a=mid -> joined=z"];
    let ens = ensemble(&steps).replace("output [ {", "output [ { name: \"z\" data_type: TYPE_STRING dims: [ 1 ] }, {");
    let server = TestRepository::new(&[("join", JOIN), ("pieces", PIECES), ("ens", &ens)]).started().await;
    let sent = InferRequest { requested_outputs: vec!["y".into()], ..request("ens", vec![text("x", "q")]) };
    assert_eq!(texts(responses(server.infer(sent).unwrap()).await), ["q:1! (final)"]);
    let counts = ["join", "pieces"].map(|model| server.model_statistics(model, "").unwrap()[0].inference_count);
    assert_eq!(counts, [1, 0]);
    let all = responses(server.infer(request("ens", vec![text("x", "q")])).unwrap()).await;
    assert_eq!(texts(all), ["q#0:1", "q#1:2", "q#2:3", " (final)"]);
}

#[tokio::test]
async fn an_error_of_a_step_names_the_ensemble_and_is_counted() {
    let pieces = format!("{PIECES} parameters {{ key: \"fail_at\" value {{ string_value: \"1\" }} }}");
    let steps = ["pieces: text=x n=n -> piece=y"];
    let server = TestRepository::new(&[("pieces", &pieces), ("ens", &ensemble(&steps))]).started().await;
    let all = responses(server.infer(request("ens", vec![text("x", "q")])).unwrap()).await;
    assert_eq!(texts(all), ["q#0", "in ensemble 'ens', piece 1 failed"]);
    assert_eq!(server.model_statistics("ens", "").unwrap()[0].failures.backend, 1);
}

#[tokio::test]
async fn an_error_in_the_middle_of_a_stream_replaces_one_response() {
    let with =
        |parameter: &str| format!("{PIECES} parameters {{ key: \"{parameter}\" value {{ string_value: \"1\" }} }}");
    let steps = ["pieces: text=x n=n -> piece=y"];
    let server = TestRepository::new(&[("pieces", &with("error_at")), ("ens", &ensemble(&steps))]).started().await;
    let direct = responses(server.infer(request("pieces", vec![text("text", "q")])).unwrap()).await;
    assert_eq!(texts(direct), ["q#0", "piece 1 failed", "q#2", " (final)"]);
    let all = responses(server.infer(request("ens", vec![text("x", "q")])).unwrap()).await;
    assert_eq!(texts(all), ["q#0", "in ensemble 'ens', piece 1 failed", "q#2", " (final)"]);
    let pieces = &server.model_statistics("pieces", "").unwrap()[0];
    assert_eq!((pieces.inference.success.count, pieces.inference.fail.count), (0, 2));
    assert_eq!((pieces.responses[1].fail.count, pieces.responses[2].success.count), (2, 2));

    // The same where a later step fails.
    let join = format!("{JOIN} parameters {{ key: \"fail_on\" value {{ string_value: \"q#1\" }} }}");
    let steps = ["pieces: text=x n=n -> piece=piece", "join: a=piece -> joined=y"];
    let server =
        TestRepository::new(&[("join", &join), ("pieces", PIECES), ("ens", &ensemble(&steps))]).started().await;
    let all = responses(server.infer(request("ens", vec![text("x", "q")])).unwrap()).await;
    assert_eq!(texts(all), ["q#0:1", "in ensemble 'ens', no q#1", "q#2:2", " (final)"]);
}

#[tokio::test]
async fn each_response_has_the_outputs_of_all_steps_in_the_configured_order() {
    let steps =
        ["join: a=x -> joined=clean", "pieces: text=clean n=n -> piece=piece", "join: a=piece b=clean -> joined=y"];
    let output = |name: &str| format!("{{ name: \"{name}\" data_type: TYPE_STRING dims: [ 1 ] }}, ");
    let outputs = format!("output [ {}{}{{", output("piece"), output("clean"));
    let ens = ensemble(&steps).replacen("output [ {", &outputs, 1);
    {
        let server = TestRepository::new(&[("join", JOIN), ("pieces", PIECES), ("ens", &ens)]).started().await;
        let shown_outputs = |names: &[&str]| {
            let requested_outputs = names.iter().map(|name| (*name).into()).collect();
            let request = InferRequest { requested_outputs, ..request("ens", vec![text("x", "q")]) };
            let stream = server.infer(request).unwrap();
            async {
                let show = |output: &Tensor| format!("{}={}", output.name, text_of(output));
                let show = |response: InferResponse| response.outputs.iter().map(show).collect::<Vec<_>>().join(" ");
                responses(stream).await.into_iter().map(|response| show(response.unwrap())).collect::<Vec<_>>()
            }
        };
        let all = |place: usize| format!("piece=q:1!#{place} clean=q:1! y=q:1!#{place}+q:1!:{}", place + 1);
        assert_eq!(shown_outputs(&[]).await, [all(0), all(1), all(2), String::new()]);
        let some = |place: usize| format!("clean=q:1! y=q:1!#{place}+q:1!:{}", place + 1);
        assert_eq!(shown_outputs(&["y", "clean"]).await, [some(0), some(1), some(2), String::new()]);
    }
}

#[tokio::test]
async fn dropping_the_stream_of_an_ensemble_cancels_its_steps() {
    let steps = ["pieces: text=x n=n -> piece=y"];
    let repository = TestRepository::new(&[("pieces", PIECES), ("ens", &ensemble(&steps))]);
    let server = repository.started().await;
    let many = Tensor::from_i32("n", &[1], &[1_000_000]);
    let mut stream = server.infer(request("ens", vec![text("x", "q"), many])).unwrap();
    stream.next_response().await.unwrap().unwrap();
    drop(stream);
    eventually("the step is cancelled", || repository.script.cancelled.load(std::sync::atomic::Ordering::SeqCst) == 1)
        .await;
    let pending = || server.model_statistics("", "").unwrap().iter().map(|model| model.pending).sum::<u64>();
    eventually("nothing is in flight", || pending() == 0).await;
}

#[tokio::test]
async fn tensors_are_shared_and_not_copied() {
    let echo = crate::support::ECHO.replace("TYPE_FP32", "TYPE_UINT8");
    let ens = ensemble(&["echo: INPUT0=x -> OUTPUT0=mid", "echo: INPUT0=mid -> OUTPUT0=y"])
        .replace("TYPE_STRING", "TYPE_UINT8")
        .replace("dims: [ 1 ]", "dims: [ -1 ]");
    let server = TestRepository::new(&[("echo", &echo), ("ens", &ens)]).started().await;
    let sent = Tensor {
        name: "x".into(),
        datatype: serving::DataType::Uint8,
        shape: serving::Shape::from_slice(&[1 << 20]),
        data: vec![7u8; 1 << 20].into(),
    };
    let address = sent.data.as_ptr();
    let response = one(server.infer(request("ens", vec![sent])).unwrap()).await;
    assert_eq!(response.outputs[0].data.as_ptr(), address);
}

/// Each response of a stream that accepts deltas, and `is_drained` of each delta.
async fn with_deltas(mut stream: ResponseStream) -> (Vec<String>, Vec<bool>) {
    let (mut responses, mut drained, mut last) = (Vec::new(), Vec::new(), InferResponse::default());
    stream.accept_deltas();
    let mut delta = OutputDelta::default();
    while let Some(item) = stream.next_item(&mut delta).await {
        match item.unwrap() {
            StreamItem::Response(response) => last = *response,
            StreamItem::Delta(info) => {
                assert!(last.allows_delta);
                delta.iter().for_each(|(index, elements)| last.outputs[index].data = elements.to_data());
                drained.push(info.is_drained);
            }
            StreamItem::Event(event) => panic!("a request of tensors got {event:?}"),
        }
        responses.push(shown(&last));
    }
    (responses, drained)
}

fn shown(response: &InferResponse) -> String {
    let outputs = response.outputs.iter().map(|output| format!("{}={}", output.name, text_of(output)));
    format!("{} {}, {}", response.model_name, outputs.collect::<Vec<_>>().join(" "), response.is_final)
}

const GENERATOR: &str = r#"backend: "deltas"
model_transaction_policy { decoupled: true }
input [ { name: "text" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "output_ids" data_type: TYPE_STRING dims: [ 1 ] },
         { name: "sequence_length" data_type: TYPE_STRING dims: [ 1 ] },
         { name: "cum_log_probs" data_type: TYPE_STRING dims: [ 1 ] } ]
"#;

const DECODER: &str = r#"backend: "decode"
input [ { name: "TOKENS_BATCH" data_type: TYPE_STRING dims: [ 1 ] },
        { name: "SEQUENCE_LENGTH" data_type: TYPE_STRING dims: [ 1 ] },
        { name: "CUM_LOG_PROBS" data_type: TYPE_STRING dims: [ 1 ] optional: true } ]
output [ { name: "OUTPUT" data_type: TYPE_STRING dims: [ 1 ] },
         { name: "OUT_CUM_LOG_PROBS" data_type: TYPE_STRING dims: [ 1 ] } ]
"#;

#[tokio::test]
async fn a_text_ensemble_has_the_same_responses_and_statistics_with_and_without_fusion() {
    let steps = [
        "join: a=x -> joined=clean",
        "deltas: text=clean -> output_ids=_ids sequence_length=_len cum_log_probs=_sum",
        "decode: TOKENS_BATCH=_ids SEQUENCE_LENGTH=_len CUM_LOG_PROBS=_sum -> OUTPUT=y OUT_CUM_LOG_PROBS=sum",
    ];
    let outputs = |outputs: &str| ensemble(&steps).replacen("output [ {", &format!("output [ {outputs} {{"), 1);
    let output = |name: &str| format!("{{ name: \"{name}\" data_type: TYPE_STRING dims: [ 1 ] }},");
    let ens = outputs(&(output("clean") + &output("sum")));
    // With a response cache the same models are served by the general interpreter.
    let cached = DECODER.to_owned() + "response_cache { enable: true }";
    let mut seen = Vec::new();
    for decoder in [DECODER, &cached] {
        let models = [("join", JOIN), ("deltas", GENERATOR), ("decode", decoder), ("ens", &*ens)];
        let repository = TestRepository::new(&models);
        let server = repository.started().await;
        let infer = || server.infer(request("ens", vec![text("x", "q")])).unwrap();
        let whole: Vec<String> = responses(infer()).await.into_iter().map(|it| shown(&it.unwrap())).collect();
        let (from_deltas, drained) = with_deltas(infer()).await;
        assert_eq!(from_deltas, whole);
        let counts = |model: &str| {
            let it = &server.model_statistics(model, "").unwrap()[0];
            let of_responses: Vec<u64> = it.responses.iter().map(|of| of.success.count).collect();
            (it.inference.success.count, it.inference.fail.count, of_responses, it.first_response.count)
        };
        let counted = ["ens", "join", "deltas", "decode"].map(counts);
        seen.push((whole, counted, server.num_in_flight()));
        let expected = if decoder == DECODER { [false, true].repeat(4) } else { vec![] };
        assert_eq!(drained, expected, "{decoder}");
    }
    assert_eq!(seen[0].0, seen[1].0);
    assert_eq!(seen[0].0[3], "ens clean=q:1! sum=same y=#3, false");
    assert_eq!(seen[0].1[..3], seen[1].1[..3]);
    assert_eq!(seen[0].1[3].0, 20, "each text counts as a request to the detokenizer");
    assert_eq!(seen[0].2, 0);
}

#[tokio::test]
async fn a_text_ensemble_returns_the_requested_outputs() {
    let steps = [
        "deltas: text=x -> output_ids=_ids sequence_length=_len cum_log_probs=sum",
        "decode: TOKENS_BATCH=_ids SEQUENCE_LENGTH=_len -> OUTPUT=y",
    ];
    let ens =
        ensemble(&steps).replacen("output [ {", "output [ { name: \"sum\" data_type: TYPE_STRING dims: [ 1 ] }, {", 1);
    let server = TestRepository::new(&[("deltas", GENERATOR), ("decode", DECODER), ("ens", &ens)]).started().await;
    for (names, first) in
        [(&["y"][..], "ens y=#0, false"), (&["sum"], "ens sum=same, false"), (&[], "ens sum=same y=#0, false")]
    {
        let requested_outputs = names.iter().map(|name| (*name).into()).collect();
        let request = InferRequest { requested_outputs, ..request("ens", vec![text("x", "q")]) };
        let all = responses(server.infer(request).unwrap()).await;
        assert_eq!((shown(all[0].as_ref().unwrap()).as_str(), all.len()), (first, 10));
    }
}
