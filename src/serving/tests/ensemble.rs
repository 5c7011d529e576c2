//! Ensembles: steps side by side, decoupled steps, tensors on their way.

mod support;

use serving::{Changes, InferRequest, InferResponse, Parameter, ResponseStream, Tensor, Update};
use support::{PIECES, World, eventually, one, request, responses, text, text_of};

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
async fn steps_run_in_the_order_of_their_tensors_whatever_order_they_are_written_in() {
    let steps = ["join: a=left b=right -> joined=y", "join: a=x b=left -> joined=right", "join: a=x -> joined=left"];
    let server = World::new(&[("join", JOIN), ("ens", &ensemble(&steps))]).started().await;
    let response = one(server.infer(request("ens", vec![text("x", "q")])).unwrap()).await;
    assert_eq!(text_of(&response.outputs[0]), "q:1!+q+q:1!:1!:1!");
    assert_eq!((response.model_name.as_str(), response.model_version.as_str()), ("ens", "1"));
    assert_eq!(response.parameters[0], ("sequence_id".into(), Parameter::Int(0)));
    assert!(!server.is_decoupled("ens", "").unwrap());
}

#[tokio::test]
async fn steps_that_do_not_need_each_other_run_at_the_same_time() {
    let gate = JOIN.replace("\"join\"", "\"gate\"").replace("\"joined\"", "\"a\"");
    let steps = ["gate: a=x -> a=left", "gate: a=x -> a=right", "join: a=left b=right -> joined=y"];
    let world = World::new(&[("join", JOIN), ("gate", &gate), ("ens", &ensemble(&steps))]);
    let server = world.started().await;
    let response = tokio::spawn(one(server.infer(request("ens", vec![text("x", "q")])).unwrap()));
    let pending = || server.model_statistics("gate", "").unwrap()[0].pending;
    eventually("both wait at the gate", || pending() == 2).await;
    world.script.gate.add_permits(2);
    assert_eq!(text_of(&response.await.unwrap().outputs[0]), "q+q:1!");
}

#[tokio::test]
async fn each_response_of_a_decoupled_step_passes_the_steps_behind_it() {
    let steps =
        ["join: a=x -> joined=clean", "pieces: text=clean n=n -> piece=piece", "join: a=piece b=clean -> joined=y"];
    let server = World::new(&[("join", JOIN), ("pieces", PIECES), ("ens", &ensemble(&steps))]).started().await;
    assert!(server.is_decoupled("ens", "").unwrap());
    let all = responses(server.infer(request("ens", vec![text("x", "q")])).unwrap()).await;
    // The step behind keeps its state through the run: it counts 1, 2, 3.
    assert_eq!(texts(all), ["q:1!#0+q:1!:1", "q:1!#1+q:1!:2", "q:1!#2+q:1!:3", " (final)"]);
    let none = Tensor::from_i32("n", &[1], &[0]);
    let all = responses(server.infer(request("ens", vec![text("x", "q"), none])).unwrap()).await;
    assert_eq!(texts(all), [" (final)"]);
}

#[tokio::test]
async fn the_last_piece_is_known_as_the_last_where_the_model_says_so() {
    let pieces = format!("{PIECES} parameters {{ key: \"final\" value {{ string_value: \"1\" }} }}");
    let steps = ["pieces: text=x n=n -> piece=piece", "join: a=piece -> joined=y"];
    let server = World::new(&[("join", JOIN), ("pieces", &pieces), ("ens", &ensemble(&steps))]).started().await;
    let all = responses(server.infer(request("ens", vec![text("x", "q")])).unwrap()).await;
    assert_eq!(texts(all), ["q#0:1", "q#1:2", "q#2:3! (final)"]);
}

#[tokio::test]
async fn decoupled_steps_may_stand_behind_each_other() {
    let steps = ["pieces: text=x n=n -> piece=one", "pieces: text=one n=n -> piece=y"];
    let server = World::new(&[("pieces", PIECES), ("ens", &ensemble(&steps))]).started().await;
    let two = Tensor::from_i32("n", &[1], &[2]);
    let all = responses(server.infer(request("ens", vec![text("x", "q"), two])).unwrap()).await;
    assert_eq!(texts(all), ["q#0#0", "q#0#1", "q#1#0", "q#1#1", " (final)"]);
}

#[tokio::test]
async fn responses_of_decoupled_steps_side_by_side_belong_together_in_their_order() {
    let branches = ["pieces: text=x -> piece=one", "pieces: text=x n=n -> piece=two"];
    let both = [branches[0], branches[1], "join: a=one b=two -> joined=y"];
    let ending = format!("{PIECES} parameters {{ key: \"final\" value {{ string_value: \"1\" }} }}");
    for (n, pieces, expected) in [
        (3, PIECES, vec!["q#0+q#0:1", "q#1+q#1:2", "q#2+q#2:3", " (final)"]),
        (3, ending.as_str(), vec!["q#0+q#0:1", "q#1+q#1:2", "q#2+q#2:3! (final)"]),
        // Where one has less to say, nothing stands beside the rest of the other.
        (1, PIECES, vec!["q#0+q#0:1", " (final)"]),
        (5, ending.as_str(), vec!["q#0+q#0:1", "q#1+q#1:2", "q#2+q#2:3", " (final)"]),
        (0, PIECES, vec![" (final)"]),
    ] {
        let world = World::new(&[("join", JOIN), ("pieces", pieces), ("ens", &ensemble(&both))]);
        let server = world.started().await;
        let inputs = vec![text("x", "q"), Tensor::from_i32("n", &[1], &[n])];
        let all = responses(server.infer(request("ens", inputs)).unwrap()).await;
        assert_eq!(texts(all), expected, "{n} of the second");
    }
    // What is behind one of them alone goes on without the other.
    let steps = [branches[0], "pieces: text=x n=n -> piece=two", "join: a=one -> joined=y"];
    let server = World::new(&[("join", JOIN), ("pieces", PIECES), ("ens", &ensemble(&steps))]).started().await;
    let inputs = vec![text("x", "q"), Tensor::from_i32("n", &[1], &[1])];
    let all = responses(server.infer(request("ens", inputs)).unwrap()).await;
    assert_eq!(texts(all), ["q#0:1", "q#1:2", "q#2:3", " (final)"]);
}

#[tokio::test]
async fn what_a_later_response_lacks_is_not_repeated() {
    let output = "output [ { name: \"note\" data_type: TYPE_STRING dims: [ 1 ] } ]";
    let steps = ["pieces: text=x n=n -> piece=y note=z"];
    let ens = ensemble(&steps).replace("output [ {", "output [ { name: \"z\" data_type: TYPE_STRING dims: [ 1 ] }, {");
    let server = World::new(&[("pieces", &format!("{PIECES} {output}")), ("ens", &ens)]).started().await;
    let all = responses(server.infer(request("ens", vec![text("x", "q")])).unwrap()).await;
    let names =
        |response: &InferResponse| response.outputs.iter().map(|output| output.name.clone()).collect::<Vec<_>>();
    let names: Vec<_> = all.iter().map(|response| names(response.as_ref().unwrap()).join(" ")).collect();
    assert_eq!(names, ["z y", "y", "y", ""]);
}

#[tokio::test]
async fn steps_that_no_wanted_output_needs_do_not_run() {
    let steps = ["join: a=x -> joined=y", "pieces: text=x -> piece=mid", "join: a=mid -> joined=z"];
    let ens = ensemble(&steps).replace("output [ {", "output [ { name: \"z\" data_type: TYPE_STRING dims: [ 1 ] }, {");
    let server = World::new(&[("join", JOIN), ("pieces", PIECES), ("ens", &ens)]).started().await;
    let asked = InferRequest { requested_outputs: vec!["y".into()], ..request("ens", vec![text("x", "q")]) };
    assert_eq!(texts(responses(server.infer(asked).unwrap()).await), ["q:1! (final)"]);
    let counts = ["join", "pieces"].map(|model| server.model_statistics(model, "").unwrap()[0].inference_count);
    assert_eq!(counts, [1, 0]);
    let all = responses(server.infer(request("ens", vec![text("x", "q")])).unwrap()).await;
    assert_eq!(texts(all), ["q#0:1", "q#1:2", "q#2:3", " (final)"]);
}

#[tokio::test]
async fn an_error_of_a_step_names_the_ensemble_and_counts() {
    let pieces = format!("{PIECES} parameters {{ key: \"fail_at\" value {{ string_value: \"1\" }} }}");
    let steps = ["pieces: text=x n=n -> piece=y"];
    let server = World::new(&[("pieces", &pieces), ("ens", &ensemble(&steps))]).started().await;
    let all = responses(server.infer(request("ens", vec![text("x", "q")])).unwrap()).await;
    assert_eq!(texts(all), ["q#0", "in ensemble 'ens', piece 1 failed"]);
    assert_eq!(server.model_statistics("ens", "").unwrap()[0].failures.backend, 1);
}

#[tokio::test]
async fn an_error_in_the_middle_of_a_stream_stands_for_one_response() {
    let with =
        |parameter: &str| format!("{PIECES} parameters {{ key: \"{parameter}\" value {{ string_value: \"1\" }} }}");
    let steps = ["pieces: text=x n=n -> piece=y"];
    let server = World::new(&[("pieces", &with("stumble_at")), ("ens", &ensemble(&steps))]).started().await;
    let direct = responses(server.infer(request("pieces", vec![text("text", "q")])).unwrap()).await;
    assert_eq!(texts(direct), ["q#0", "piece 1 failed", "q#2", " (final)"]);
    let all = responses(server.infer(request("ens", vec![text("x", "q")])).unwrap()).await;
    assert_eq!(texts(all), ["q#0", "in ensemble 'ens', piece 1 failed", "q#2", " (final)"]);
    let pieces = &server.model_statistics("pieces", "").unwrap()[0];
    assert_eq!((pieces.inference.success.count, pieces.inference.fail.count), (0, 2));
    assert_eq!((pieces.responses[1].fail.count, pieces.responses[2].success.count), (2, 2));

    // The same where a step behind fails.
    let join = format!("{JOIN} parameters {{ key: \"fail_on\" value {{ string_value: \"q#1\" }} }}");
    let steps = ["pieces: text=x n=n -> piece=piece", "join: a=piece -> joined=y"];
    let server = World::new(&[("join", &join), ("pieces", PIECES), ("ens", &ensemble(&steps))]).started().await;
    let all = responses(server.infer(request("ens", vec![text("x", "q")])).unwrap()).await;
    assert_eq!(texts(all), ["q#0:1", "in ensemble 'ens', no q#1", "q#2:2", " (final)"]);
}

#[tokio::test]
async fn a_step_that_answers_at_once_is_answered_and_counted_as_any_other() {
    let fails = format!("{JOIN} parameters {{ key: \"fail_on\" value {{ string_value: \"q:1!#1\" }} }}");
    let steps =
        ["join: a=x -> joined=clean", "pieces: text=clean n=n -> piece=piece", "join: a=piece b=clean -> joined=y"];
    let mut seen = Vec::new();
    for backend in ["\"join\"", "\"call\""] {
        let join = fails.replacen("\"join\"", backend, 1);
        let world = World::new(&[("join", &join), ("pieces", PIECES), ("ens", &ensemble(&steps))]);
        let server = world.started().await;
        let all = responses(server.infer(request("ens", vec![text("x", "q")])).unwrap()).await;
        let join = &server.model_statistics("join", "").unwrap()[0];
        let counts = (join.inference.success.count, join.inference.fail.count, join.execution_count, join.failures);
        let ens = &server.model_statistics("ens", "").unwrap()[0];
        let of_responses: Vec<_> = ens.responses.iter().map(|of| (of.success.count, of.fail.count)).collect();
        seen.push((texts(all), counts, of_responses, server.num_in_flight()));
    }
    assert_eq!(seen[0], seen[1]);
    let told = ["q:1!#0+q:1!:1", "in ensemble 'ens', no q:1!#1", "q:1!#2+q:1!:2", " (final)"];
    assert_eq!(seen[1].0, told);
}

#[tokio::test]
async fn tensors_of_all_steps_come_out_with_each_response_in_the_configured_order() {
    let steps =
        ["join: a=x -> joined=clean", "pieces: text=clean n=n -> piece=piece", "join: a=piece b=clean -> joined=y"];
    let output = |name: &str| format!("{{ name: \"{name}\" data_type: TYPE_STRING dims: [ 1 ] }}, ");
    let outputs = format!("output [ {}{}{{", output("piece"), output("clean"));
    let ens = ensemble(&steps).replacen("output [ {", &outputs, 1);
    for backend in ["\"join\"", "\"call\""] {
        let join = JOIN.replacen("\"join\"", backend, 1);
        let server = World::new(&[("join", &join), ("pieces", PIECES), ("ens", &ens)]).started().await;
        let told = |asked: &[&str]| {
            let requested_outputs = asked.iter().map(|name| (*name).into()).collect();
            let request = InferRequest { requested_outputs, ..request("ens", vec![text("x", "q")]) };
            let stream = server.infer(request).unwrap();
            async {
                let show = |output: &Tensor| format!("{}={}", output.name, text_of(output));
                let show = |response: InferResponse| response.outputs.iter().map(show).collect::<Vec<_>>().join(" ");
                responses(stream).await.into_iter().map(|response| show(response.unwrap())).collect::<Vec<_>>()
            }
        };
        let all = |place: usize| format!("piece=q:1!#{place} clean=q:1! y=q:1!#{place}+q:1!:{}", place + 1);
        assert_eq!(told(&[]).await, [all(0), all(1), all(2), String::new()], "{backend}");
        let some = |place: usize| format!("clean=q:1! y=q:1!#{place}+q:1!:{}", place + 1);
        assert_eq!(told(&["y", "clean"]).await, [some(0), some(1), some(2), String::new()], "{backend}");
    }
}

#[tokio::test]
async fn leaving_an_ensemble_cancels_its_steps() {
    let steps = ["pieces: text=x n=n -> piece=y"];
    let world = World::new(&[("pieces", PIECES), ("ens", &ensemble(&steps))]);
    let server = world.started().await;
    let many = Tensor::from_i32("n", &[1], &[1_000_000]);
    let mut stream = server.infer(request("ens", vec![text("x", "q"), many])).unwrap();
    stream.next_response().await.unwrap().unwrap();
    drop(stream);
    eventually("the step is cancelled", || world.script.cancelled.load(std::sync::atomic::Ordering::SeqCst) == 1).await;
    let pending = || server.model_statistics("", "").unwrap().iter().map(|model| model.pending).sum::<u64>();
    eventually("nothing is in flight", || pending() == 0).await;
}

#[tokio::test]
async fn tensors_are_shared_not_copied() {
    let echo = support::ECHO.replace("TYPE_FP32", "TYPE_UINT8");
    let ens = ensemble(&["echo: INPUT0=x -> OUTPUT0=mid", "echo: INPUT0=mid -> OUTPUT0=y"])
        .replace("TYPE_STRING", "TYPE_UINT8")
        .replace("dims: [ 1 ]", "dims: [ -1 ]");
    let server = World::new(&[("echo", &echo), ("ens", &ens)]).started().await;
    let sent = Tensor {
        name: "x".into(),
        datatype: serving::DataType::Uint8,
        shape: serving::Shape::from_slice(&[1 << 20]),
        data: vec![7u8; 1 << 20].into(),
    };
    let place = sent.data.as_ptr();
    let response = one(server.infer(request("ens", vec![sent])).unwrap()).await;
    assert_eq!(response.outputs[0].data.as_ptr(), place);
}

/// What each response shows, where it is told as what is new; and how many were.
async fn told_as_new(mut stream: ResponseStream) -> (Vec<String>, usize) {
    let (mut told, mut num_again, mut last) = (Vec::new(), 0, InferResponse::default());
    stream.take_updates();
    let mut changes = Changes::default();
    while let Some(update) = stream.next_update(&mut changes).await {
        match update {
            Ok(Update::Response(response)) => last = *response,
            Ok(Update::Again(_)) => {
                assert!(last.may_be_repeated);
                changes.iter().for_each(|(place, elements)| last.outputs[place].data = elements.to_data());
                num_again += 1;
            }
            Err(error) => {
                told.push(error.message);
                continue;
            }
        }
        told.push(shown(&last));
    }
    (told, num_again)
}

fn shown(response: &InferResponse) -> String {
    let outputs = response.outputs.iter().map(|output| format!("{}={}", output.name, text_of(output)));
    format!("{}, {}", outputs.collect::<Vec<_>>().join(" "), response.is_final)
}

#[tokio::test]
async fn what_is_new_in_a_response_passes_the_steps_behind_it_and_comes_to_the_same_responses() {
    let repeats = PIECES
        .replace("\"pieces\"", "\"repeats\"")
        .replace("output [", "output [ { name: \"note\" data_type: TYPE_STRING dims: [ 1 ] },");
    let also = |names: [&str; 2]| {
        let outputs = names.map(|name| format!("{{ name: \"{name}\" data_type: TYPE_STRING dims: [ 1 ] }},"));
        ensemble(&["repeats: text=x n=n -> piece=p note=s", "call: a=p b=s -> joined=y"])
            .replace("output [", &format!("output [ {}", outputs.concat()))
    };
    // Where the piece is an output, too, two outputs are new each time.
    let one_output = ensemble(&["repeats: text=x n=n -> piece=p note=s", "call: a=p b=s -> joined=y"]);
    for (ensemble, fail_on, num_again) in
        [(&one_output, "", 7), (&one_output, "q#3", 5), (&also(["s", "p"]), "", 7), (&also(["s", "p"]), "q#3", 5)]
    {
        let fails = format!("parameters {{ key: \"fail_on\" value {{ string_value: \"{fail_on}\" }} }}");
        let call = JOIN.replace("\"join\"", "\"call\"") + &fails;
        let server = World::new(&[("repeats", &repeats), ("call", &call), ("ens", ensemble)]).started().await;
        let ask = || server.infer(request("ens", vec![text("x", "q")])).unwrap();
        let whole: Vec<String> = responses(ask())
            .await
            .into_iter()
            .map(|it| it.map_or_else(|error| error.message, |it| shown(&it)))
            .collect();
        let (told, num_told_again) = told_as_new(ask()).await;
        assert_eq!(told, whole);
        assert_eq!((whole.len(), num_told_again), (10, num_again));
        assert!(whole[4].contains("y=q#4+same:5,") || !fail_on.is_empty() && whole[3].contains("no q#3"), "{whole:?}");
        let counted = &server.model_statistics("ens", "").unwrap()[0].responses;
        assert_eq!(counted[4].success.count, 2, "each response counts, however it is told");
    }
}

#[tokio::test]
async fn an_ensemble_says_when_its_model_says_that_nothing_follows() {
    let told = PIECES
        .replace("\"pieces\"", "\"rests\"")
        .replace("output [", "output [ { name: \"note\" data_type: TYPE_STRING dims: [ 1 ] },");
    let ens = ensemble(&["rests: text=x -> piece=p note=s", "call: a=p b=s -> joined=y"]);
    let call = JOIN.replace("\"join\"", "\"call\"");
    let world = World::new(&[("rests", &told), ("call", &call), ("ens", &ens)]);
    let server = world.started().await;
    let mut stream = server.infer(request("ens", vec![text("x", "a")])).unwrap();
    stream.take_updates();
    let mut rests = Vec::new();
    loop {
        let mut changes = Changes::default();
        match stream.next_update(&mut changes).await {
            Some(Ok(Update::Again(repeat))) => {
                assert!(!changes.is_empty());
                rests.push(repeat.rests);
            }
            Some(Ok(Update::Response(response))) if response.is_final => break,
            Some(Ok(Update::Response(_))) => {}
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(rests, [false, true].repeat(4));
}
