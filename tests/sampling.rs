//! Sampling of tokens, as observed through the shipped ensemble.

mod support;

use serde_json::{Value, json};
use support::{TestWorld, eventually};

const PROMPT: &str = "Once upon a time";

/// A request with sampling and the further fields `more`.
fn request(seed: u64, more: Value) -> Value {
    let mut body = json!({"text_input": PROMPT, "max_tokens": 24, "stream": true,
                          "temperature": 1.0, "top_k": 50, "seed": seed});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// The answer of `generate`.
fn generate(world: &TestWorld, body: &Value) -> Value {
    let (status, text) = world.post("/v2/models/ensemble/generate", body);
    assert_eq!(status, 200, "{text}");
    serde_json::from_str(&text).unwrap()
}

fn events(world: &TestWorld, body: &Value) -> Vec<Value> {
    let mut stream = world.stream_request(body);
    std::iter::from_fn(|| stream.next_event()).collect()
}

fn numbers(value: &Value) -> Vec<f64> {
    match value {
        Value::Array(values) => values.iter().flat_map(numbers).collect(),
        value => vec![value.as_f64().unwrap_or_else(|| panic!("no number: {value}"))],
    }
}

#[test]
fn sampled_text_is_the_same_for_world_sizes_1_2_and_4() {
    let texts = [1, 2, 4].map(|world_size| {
        let world = TestWorld::of(world_size);
        (0..4).map(|seed| world.stream_request(&request(seed, json!({}))).collect::<String>()).collect::<Vec<_>>()
    });
    assert!(texts[0].iter().any(|text| *text != texts[0][0]), "seeds make no difference: {texts:?}");
    assert_eq!(texts[0], texts[1]);
    assert_eq!(texts[0], texts[2]);
}

#[test]
fn each_of_several_sequences_equals_a_request_with_its_seed_alone() {
    let mut world = TestWorld::of(1);
    let alone: Vec<String> = (7..11).map(|seed| world.stream_request(&request(seed, json!({}))).collect()).collect();
    assert!(alone[0] != alone[1], "{alone:?}");
    for stream in [true, false] {
        let mut together = vec![String::new(); 4];
        let events = events(&world, &request(7, json!({"num_return_sequences": 4, "stream": stream})));
        assert!(stream || events.len() == 4, "one response for each sequence: {events:?}");
        for event in events {
            let index = event["sequence_index"].as_u64().unwrap_or_else(|| panic!("no index in {event}")) as usize;
            together[index] += event["text_output"].as_str().unwrap();
        }
        assert_eq!(together, alone, "stream: {stream}");
    }
    eventually("blocks are free", || world.metric("trireme_llm_kv_blocks_used") == 0.0);
}

#[test]
fn log_probabilities_belong_to_the_tokens_and_add_up() {
    let world = TestWorld::of(1);
    let greedy = json!({"text_input": PROMPT, "max_tokens": 12, "return_log_probs": true, "return_num_output_tokens": true,
                        "return_num_input_tokens": true});
    let whole = generate(&world, &greedy);
    let each = numbers(&whole["output_log_probs"]);
    assert_eq!(numbers(&whole["num_output_tokens"]), [12.0]);
    assert!(numbers(&whole["num_input_tokens"])[0] >= 1.0);
    assert_eq!(each.len(), 12, "{whole}");
    // The likeliest of `V` tokens has a probability of at least 1 / V, and no token has probability 1.
    let config = support::shipped_repository().join("tensorrt_llm/1/config.json");
    let config: Value = serde_json::from_slice(&std::fs::read(config).unwrap()).unwrap();
    let least = -config["vocab_size"].as_f64().unwrap().ln();
    assert!(each.iter().all(|p| *p < 0.0 && *p >= least), "{each:?}, least {least}");
    let sum = numbers(&whole["cum_log_probs"])[0];
    assert!((sum - each.iter().sum::<f64>()).abs() < 1e-4, "{sum} of {each:?}");

    let mut streamed = greedy.clone();
    streamed["stream"] = true.into();
    let events = events(&world, &streamed);
    let pieces: Vec<f64> = events.iter().flat_map(|event| numbers(&event["output_log_probs"])).collect();
    assert_eq!(pieces, each);
    let running: Vec<f64> = events.iter().map(|event| numbers(&event["cum_log_probs"])[0]).collect();
    assert!(running.windows(2).all(|pair| pair[1] <= pair[0]) && (running.last().unwrap() - sum).abs() < 1e-4);

    // Log-probabilities are those of the raw logits, so the greedy token has the largest one.
    let first = |body: &Value| numbers(&generate(&world, body)["output_log_probs"])[0];
    let sampled = (0..8)
        .map(|seed| first(&request(seed, json!({"stream": false, "return_log_probs": true, "temperature": 2.0}))));
    let sampled: Vec<f64> = sampled.collect();
    assert!(sampled.iter().all(|p| *p <= each[0]) && sampled.iter().any(|p| *p < each[0]), "{sampled:?} {}", each[0]);

    let silent = generate(&world, &json!({"text_input": PROMPT, "max_tokens": 4}));
    assert_eq!((&silent["output_log_probs"], &silent["num_output_tokens"]), (&Value::Null, &Value::Null), "{silent}");
}

#[test]
fn a_response_reports_the_number_of_reused_kv_blocks() {
    let world = TestWorld::of(1);
    let body = json!({"text_input": format!("{PROMPT} {}", "there was a little dog ".repeat(12)), "max_tokens": 4,
                      "return_perf_metrics": true});
    let [first, second] = [generate(&world, &body), generate(&world, &body)];
    let value = |answer: &Value, name: &str| numbers(&answer[name])[0];
    assert_eq!(value(&first, "kv_cache_reused_blocks"), 0.0);
    let reused = value(&second, "kv_cache_reused_blocks");
    assert!(reused >= 2.0, "{second}");
    let total = value(&second, "kv_cache_alloc_total_blocks");
    assert_eq!(total, reused + value(&second, "kv_cache_alloc_new_blocks"));
    assert_eq!(total, value(&first, "kv_cache_alloc_total_blocks"));
    let [arrived, joined, began, ended] =
        ["arrival", "first_scheduled", "first_token", "last_token"].map(|of| value(&second, &format!("{of}_time_ns")));
    assert!(arrived <= joined && joined < began && began <= ended, "{second}");
    assert_eq!(second["text_output"], first["text_output"]);
}

/// Stop strings that begin and end inside words, so that they match no sequence of whole tokens.
#[test]
fn a_stop_string_inside_words_ends_the_text_before_it() {
    let world = TestWorld::of(1);
    let whole = world.generate(PROMPT, 64);
    let starts: Vec<usize> = whole.char_indices().map(|(at, _)| at).filter(|at| *at > 20).step_by(7).take(10).collect();
    for start in starts {
        let Some(stop) = whole.get(start..start + 6) else { continue };
        let expected = &whole[..whole.find(stop).unwrap()];
        let body =
            |stream: bool| json!({"text_input": PROMPT, "max_tokens": 64, "stream": stream, "stop_words": [stop]});
        let streamed: String = world.stream_request(&body(true)).collect();
        // A stop word is also matched after a space, which is then removed too.
        assert_eq!(streamed.trim_end(), expected.trim_end(), "stop {stop:?}");
        let at_once = generate(&world, &body(false));
        assert_eq!(at_once["text_output"].as_str().unwrap(), streamed, "stop {stop:?}");
    }
}

#[test]
fn a_stop_string_frees_the_resources_of_the_request() {
    let mut world = TestWorld::of(1);
    let whole = world.generate(PROMPT, 32);
    let stop: String = whole.chars().skip(30).take(5).collect();
    for seed in 0..8 {
        let body = json!({"text_input": PROMPT, "max_tokens": 400, "stream": true, "stop_words": [stop], "seed": seed});
        assert!(!world.stream_request(&body).collect::<String>().contains(&stop));
    }
    eventually("blocks are free", || world.metric("trireme_llm_kv_blocks_used") == 0.0);
    assert_eq!(world.metric("trireme_llm_requests_running"), 0.0);
}

#[test]
fn unsupported_settings_are_refused_with_a_message() {
    let world = TestWorld::of(1);
    let cases = [
        (json!({"beam_width": 4}), "`streaming` is true, but beams are known only when their search has ended"),
        (json!({"beam_width": 65, "stream": false}), "beam width is 65; it must be 2 to 64"),
        (json!({"beam_width": 2_000_000_000, "stream": false}), "beam width is 2000000000; it must be 2 to 64"),
        (json!({"beam_width": i32::MAX, "stream": false}), "beam width is 2147483647; it must be 2 to 64"),
        (
            json!({"beam_width": 20_000_000, "num_return_sequences": 20_000_000, "stream": false}),
            "beam width is 20000000",
        ),
        (json!({"num_return_sequences": i32::MAX}), "`num_return_sequences` is 2147483647, expected 1 to 64"),
        (json!({"beam_width": 0}), "`beam_width` is 0, expected at least 1"),
        (json!({"num_return_sequences": 0}), "`num_return_sequences` is 0, expected 1 to 64"),
        (json!({"num_return_sequences": 65}), "`num_return_sequences` is 65, expected 1 to 64"),
        (
            json!({"return_generation_logits": true, "beam_width": 2, "stream": false}),
            "`return_generation_logits` is true, but a beam search reports log-probabilities only",
        ),
        (json!({"temperature": -1.0}), "`temperature` is -1"),
        (json!({"top_p": 1.5}), "`runtime_top_p` is 1.5"),
        (json!({"repetition_penalty": 0.0}), "`repetition_penalty` is 0"),
    ];
    for (more, message) in cases {
        let (status, text) = world.post("/v2/models/ensemble/generate_stream", &request(0, more.clone()));
        let refused = status >= 400 || text.contains("error");
        assert!(refused && text.contains(message), "{more}: {status} {text}");
    }
    let (status, text) = world.post("/v2/models/ensemble/generate_stream", &request(0, json!({"beam_width": 1})));
    assert_eq!(status, 200, "{text}");
}
