//! A text ensemble is served as one model; it answers as its models do one by one.

mod support;

use std::fs;

use serde_json::{Value, json};
use support::{Options, TestWorld, copied_repository};

/// The shipped repository with a second ensemble, `general`, which has one more step behind its detokenizer: that is served
/// step by step.
fn repository() -> tempfile::TempDir {
    let repository = copied_repository();
    let path = |model: &str| repository.path().join(model);
    let config = fs::read_to_string(path("ensemble").join("config.pbtxt")).unwrap();
    let (before, rest) = config.split_once("output_map { key: \"OUTPUT\" value: \"text_output\" }").unwrap();
    let step = r#"output_map { key: "OUTPUT" value: "text_output" }
        }, { model_name: "copy" model_version: -1
             input_map { key: "INPUT0" value: "text_output" } output_map { key: "OUTPUT0" value: "copied" }"#;
    let general = format!("{before}{step}{rest}").replacen("name: \"ensemble\"", "name: \"general\"", 1).replacen(
        "output [",
        "output [ { name: \"copied\" data_type: TYPE_STRING dims: [ -1 ] },",
        1,
    );
    let copy = r#"backend: "identity"
        input [ { name: "INPUT0" data_type: TYPE_STRING dims: [ -1 ] } ]
        output [ { name: "OUTPUT0" data_type: TYPE_STRING dims: [ -1 ] } ]"#;
    for (model, config) in [("general", general.as_str()), ("copy", copy)] {
        fs::create_dir_all(path(model).join("1")).unwrap();
        fs::write(path(model).join("config.pbtxt"), config).unwrap();
    }
    repository
}

/// The events of a stream, without what differs from request to request.
fn events(world: &TestWorld, model: &str, request: &Value) -> Vec<Value> {
    let (status, text) = world.post(&format!("/v2/models/{model}/generate_stream"), request);
    assert_eq!(status, 200, "{model}: {text}");
    let events = text.lines().filter_map(|line| line.strip_prefix("data: "));
    let mut events: Vec<Value> = events.map(|event| serde_json::from_str(event).unwrap()).collect();
    for event in &mut events {
        let event = event.as_object_mut().unwrap();
        event.retain(|key, _| !["copied", "model_name"].contains(&key.as_str()) && !key.ends_with("_time_ns"));
        assert!(event.contains_key("error") || event.contains_key("text_output"), "{event:?}");
    }
    events
}

/// How many requests, and texts for them, each model of the ensemble has counted.
fn counts(world: &TestWorld) -> Vec<u64> {
    let of_model = |model: &str| {
        let (_, text) = world.get(&format!("/v2/models/{model}/stats"));
        let stats = &serde_json::from_str::<Value>(&text).unwrap()["model_stats"][0];
        let responses = stats["response_stats"].as_object().unwrap();
        let responses = responses.values().map(|it| it["success"]["count"].as_u64().unwrap()).sum();
        let success = &stats["inference_stats"]["success"]["count"];
        [stats["inference_count"].as_u64().unwrap(), success.as_u64().unwrap(), responses]
    };
    ["preprocessing", "tensorrt_llm", "postprocessing"].into_iter().flat_map(of_model).collect()
}

#[test]
fn it_answers_and_counts_as_its_models_do_one_by_one() {
    let repository = repository();
    let mut world = TestWorld::start(Options { repository: repository.path().to_owned(), ..Options::default() });
    let line = world.await_log("steps of the ensemble are served as one");
    assert!(line.contains("ensemble") && !line.contains("general"), "{line}");
    let base = json!({"text_input": "Once upon a time", "max_tokens": 16});
    let more = [
        json!({"stream": true}),
        json!({"stream": false}),
        json!({"stream": false, "exclude_input_in_output": true}),
        json!({"stream": true, "num_return_sequences": 3, "temperature": 1.0, "top_k": 20, "seed": 3}),
        json!({"stream": false, "num_return_sequences": 3, "temperature": 1.0, "top_k": 20, "seed": 3}),
        json!({"stream": true, "return_log_probs": true, "return_num_input_tokens": true,
               "return_num_output_tokens": true}),
        json!({"stream": true, "return_generation_logits": true, "return_context_logits": true, "max_tokens": 4}),
        json!({"stream": false, "beam_width": 3, "return_log_probs": true, "return_perf_metrics": true}),
        json!({"stream": true, "temperature": 1.5, "top_k": 200, "seed": 11, "max_tokens": 60}),
        json!({"stream": true, "stop_words": ["e", "\n"]}),
        json!({"stream": false, "stop_words": ["a"]}),
    ];
    let mut num_events = 0;
    for more in more {
        let mut request = base.clone();
        request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let mut seen = Vec::new();
        // Once before, so that both find the prompt in the prefix cache.
        events(&world, "ensemble", &request);
        for model in ["general", "ensemble"] {
            let before = counts(&world);
            let events = events(&world, model, &request);
            let counted: Vec<u64> =
                counts(&world).into_iter().zip(before).map(|(after, before)| after - before).collect();
            seen.push((events, counted));
        }
        assert_eq!(seen[0], seen[1], "{request}");
        num_events += seen[0].0.len();
    }
    assert!(num_events > 100, "{num_events} events show little");
    world.stop();
}

#[test]
fn an_error_names_the_ensemble_and_a_traced_request_shows_each_model() {
    let scratch = tempfile::tempdir().unwrap();
    let trace = scratch.path().join("trace.json");
    let args = ["level=TIMESTAMPS", "rate=1", "count=1"].map(|it| format!("--trace-config={it}"));
    let args = args.into_iter().chain([format!("--trace-config=triton,file={}", trace.display())]).collect();
    let mut world = TestWorld::start(Options { args, ..Options::default() });
    let request = json!({"text_input": "Once upon a time", "max_tokens": 4, "stream": true});
    let traced: String = world.stream_request(&request).collect();
    let plain: String = world.stream_request(&request).collect();
    assert_eq!(traced, plain);
    let wrong = json!({"text_input": "Once", "max_tokens": 4, "temperature": -1.0});
    let (_, text) = world.post("/v2/models/ensemble/generate", &wrong);
    assert!(text.contains("in ensemble 'ensemble', "), "{text}");
    world.stop();
    let trace = fs::read_to_string(trace).unwrap();
    for model in ["ensemble", "preprocessing", "tensorrt_llm", "postprocessing"] {
        assert!(trace.contains(&format!("\"model_name\":\"{model}\"")), "{model}: {trace}");
    }
}
