//! Drafts that devices guess, by MTP heads and draft models: tokens are the same with and without them, in whatever order requests
//! run. The heads of `scripts/goldens/make_mtp_goldens.py` are often right, and a model that guesses for itself always.

mod support;

use std::collections::BTreeMap;
use std::path::Path;
use std::{fs, thread};

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use support::{Options, TestWorld, golden_dir, golden_repository, post_to, shipped_repository, signal};

/// Two of the longest sequences do not fit at once, so sequences preempt each other.
const SMALL_POOL: [(&str, &str); 2] = [("max_tokens_in_paged_kv_cache", "480"), ("max_num_tokens", "64")];
const MTP: (&str, &str) = ("mtp_num_tokens", "3");

fn world(golden: &str, world_size: u32, parameters: &[(&str, &str)]) -> (TestWorld, tempfile::TempDir) {
    let repository = golden_repository(golden, parameters);
    let options = Options { world_size, repository: repository.path().to_owned(), ..Options::default() };
    (TestWorld::start(options), repository)
}

/// The parameters of a draft model.
fn draft_model(golden: &str) -> [(&'static str, String); 2] {
    let dir = golden_dir(golden).display().to_string();
    [("draft_model_num_tokens", "3".to_owned()), ("draft_model_path", dir)]
}

/// Greedy and drawn requests, with log-probabilities, an end and several outputs.
fn requests() -> Vec<Value> {
    let prompt = |n: u64| -> Vec<u64> {
        (0..50).map(|i| 3 + (i * 7) % 190).chain((0..10 + n).map(|i| 3 + (i * 31 + n * 17) % 190)).collect()
    };
    let fields = [
        json!({}),
        json!({"return_log_probs": true}),
        json!({"temperature": 0.8, "runtime_top_k": 4, "random_seed": 7}),
        json!({"temperature": 1.0, "runtime_top_p": 0.9, "random_seed": 8, "return_log_probs": true}),
        json!({"temperature": 1.0, "runtime_top_k": 20, "random_seed": 9, "num_return_sequences": 2}),
        json!({"end_id": 128}),
        // A penalty depends on the output, so there are no drafts.
        json!({"frequency_penalty": 0.5}),
    ];
    let request = |(n, fields): (usize, Value)| {
        let prompt = prompt(n as u64);
        let mut request =
            json!({"input_ids": prompt, "input_lengths": prompt.len(), "request_output_len": 140, "end_id": -1});
        request.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        request
    };
    fields.into_iter().enumerate().map(request).collect()
}

/// What a client gets, without numbers that may depend on the order of steps.
fn answer(url: &str, request: &Value) -> Value {
    let (status, text) = post_to(url, request);
    assert_eq!(status, 200, "{text}");
    let answer: Value = serde_json::from_str(&text).unwrap();
    json!([answer["output_ids"], answer["output_log_probs"], answer["sequence_length"]])
}

fn together(url: &str, requests: &[Value]) -> Vec<Value> {
    thread::scope(|scope| {
        let tasks: Vec<_> = requests.iter().map(|request| scope.spawn(|| answer(url, request))).collect();
        tasks.into_iter().map(|task| task.join().unwrap()).collect()
    })
}

/// The answers to requests one after the other, without drafts and prefix cache.
fn expected(golden: &str, world_size: u32) -> Vec<Value> {
    let (world, _repository) = world(golden, world_size, &[("enable_kv_cache_reuse", "false")]);
    let url = world.url("/v2/models/tensorrt_llm/generate");
    requests().iter().map(|request| answer(&url, request)).collect()
}

fn drafts(world: &mut TestWorld) -> [f64; 2] {
    ["trireme_llm_drafted_tokens_total", "trireme_llm_accepted_draft_tokens_total"].map(|name| world.metric(name))
}

#[test]
fn drafts_of_a_head_change_no_token_and_many_are_accepted() {
    for golden in ["mtp_qwen3_5", "mtp_deepseek_v3"] {
        for world_size in [1, 2] {
            let tp = world_size.to_string();
            let (mut world, _repository) = world(golden, world_size, &[&SMALL_POOL[..], &[MTP, ("tp", &tp)]].concat());
            let url = world.url("/v2/models/tensorrt_llm/generate");
            assert_eq!(together(&url, &requests()), expected(golden, world_size), "{golden}, {world_size} workers");
            let [drafted, accepted] = drafts(&mut world);
            assert!(accepted > 0.2 * drafted && accepted < drafted, "{golden}: {accepted} of {drafted} drafts");
            let off = json!({"input_ids": [5, 6, 7], "input_lengths": 3, "request_output_len": 20, "end_id": -1,
                             "parameters": {"mtp_num_tokens": 0}});
            answer(&url, &off);
            assert_eq!(drafts(&mut world), [drafted, accepted]);
        }
    }
}

#[test]
fn drafts_of_another_model_change_no_token_and_those_of_the_same_model_are_accepted() {
    let (recurrent, mut num_drafted) = ("qwen3_5", 0.0);
    for (golden, draft, world_size) in
        [("olmo2", "olmo2", 1), ("olmo2", "helium", 2), ("gemma3", "nemotron", 1), (recurrent, "opt", 1)]
    {
        let (tp, [count, path]) = (world_size.to_string(), draft_model(draft));
        let parameters = [("tp", &tp[..]), (count.0, &count.1), (path.0, &path.1)];
        let (mut world, _repository) = world(golden, world_size, &[&SMALL_POOL[..], &parameters].concat());
        let url = world.url("/v2/models/tensorrt_llm/generate");
        // The first steps of a model have drafts. The prefix cache has the keys and values of both models.
        let mut short = requests().remove(0);
        short["request_output_len"] = json!(14);
        assert_eq!(answer(&url, &short), answer(&url, &short));
        let [drafted, accepted] = drafts(&mut world);
        assert!(world.metric("trireme_llm_prefix_cache_reused_blocks_total") > 0.0);
        assert!(drafted > 5.0, "{drafted} drafts");
        assert!(golden != draft || accepted == drafted, "{accepted} of {drafted} drafts");
        // Later it may have no keys and values of tokens whose steps had no drafts.
        let expected = expected(golden, world_size);
        assert_eq!(together(&url, &requests()), expected, "{draft} for {golden}");
        assert_eq!(requests().iter().map(|request| answer(&url, request)).collect::<Vec<_>>(), expected);
        let [drafted, accepted] = drafts(&mut world);
        assert!(
            golden == draft || drafted < 20.0 || accepted < drafted,
            "{draft} for {golden}: {accepted} of {drafted}"
        );
        num_drafted += drafted;
    }
    // As many as are worth their time, which depends on the machine.
    assert!(num_drafted > 20.0, "{num_drafted} drafts");
}

#[test]
fn drafts_of_eagle3_heads_change_no_token() {
    for (head, world_size) in [("specforge", 1), ("speculators", 2)] {
        let (tp, path) = (world_size.to_string(), golden_dir("eagle3").join(head).display().to_string());
        let parameters = [("tp", &tp[..]), ("eagle3_num_tokens", "3"), ("eagle3_path", &path)];
        let (mut world, _repository) = world("eagle3", world_size, &[&SMALL_POOL[..], &parameters].concat());
        let url = world.url("/v2/models/tensorrt_llm/generate");
        assert_eq!(together(&url, &requests()), expected("eagle3", world_size), "{head}");
        // The heads are random, so they are seldom right.
        let [drafted, accepted] = drafts(&mut world);
        assert!(drafted > 20.0 && accepted < drafted, "{head}: {accepted} of {drafted} drafts");
    }
}

#[test]
fn guides_and_stop_words_have_the_same_answers_with_drafts() {
    let head = golden_dir("eagle3").join("specforge").display().to_string();
    let cases: [(&str, &[(&str, &str)]); 2] =
        [("mtp_qwen3_5", &[MTP]), ("eagle3", &[("eagle3_num_tokens", "3"), ("eagle3_path", &head)])];
    let start = |golden: &str, parameters: &[(&str, &str)]| {
        let repository = golden_repository(golden, parameters);
        // Its first tokens are bytes, with all of ASCII but the space.
        let tokenizer = shipped_repository().join("tensorrt_llm/1/tokenizer.json");
        fs::copy(tokenizer, repository.path().join("tensorrt_llm/1/tokenizer.json")).unwrap();
        let options = Options { repository: repository.path().to_owned(), ..Options::default() };
        (TestWorld::start(options), repository)
    };
    for (golden, parameters) in cases {
        let (without, _repository) = start(golden, &[]);
        let url = without.url("/v2/models/tensorrt_llm/generate");
        let mut requests: Vec<Value> = requests().into_iter().take(3).collect();
        let stopped = |request: &Value| {
            // Two tokens of the answer, the second one of which may have been a draft.
            let answer = answer(&url, request);
            let mut request = request.clone();
            request["stop_words_list"] = json!([answer[0][30], answer[0][31], 2, -1]);
            request
        };
        let stopped: Vec<Value> = requests.iter().map(stopped).collect();
        let guided = |request: &Value| {
            let mut request = request.clone();
            (request["end_id"], request["request_output_len"]) = (json!(2), json!(50));
            request["guided_decoding_guide_type"] = json!("json_schema");
            request["guided_decoding_guide"] = json!(
                r#"{"type": "object", "properties": {"name": {"type": "string", "pattern": "^[a-z]{4,30}$"}, "ages": {"type": "array", "items": {"type": "integer"}}}, "required": ["name", "ages"]}"#
            );
            request
        };
        // The second one is drawn.
        let guided = [guided(&requests[0]), guided(&requests[2])];
        requests = [&requests[..], &stopped, &guided].concat();
        let expected: Vec<Value> = requests.iter().map(|request| answer(&url, request)).collect();
        assert!(expected[3..6].iter().all(|answer| answer[0].as_array().unwrap().len() <= 31), "{expected:?}");
        assert!(
            expected[6..].iter().all(|answer| answer[0][0] == json!(93)),
            "an object begins with a brace: {expected:?}"
        );
        let (mut world, _repository) = start(golden, parameters);
        assert_eq!(together(&world.url("/v2/models/tensorrt_llm/generate"), &requests), expected, "{golden}");
        let [drafted, _] = drafts(&mut world);
        assert!(drafted > 0.0, "{golden}");
    }
}

#[test]
fn a_text_with_drafts_survives_the_death_of_a_worker() {
    let draft = draft_model("olmo2");
    let draft = draft.each_ref().map(|(key, value)| (*key, &value[..]));
    for (golden, parameters) in [("mtp_qwen3_5", &[MTP][..]), ("olmo2", &draft)] {
        let (world, _repository) = world(golden, 2, parameters);
        let request = requests().remove(0);
        let mut found = Vec::new();
        for (index, event) in world.stream_of("tensorrt_llm", &request).events().enumerate() {
            if index == 20 {
                signal(world.workers()[1], Signal::SIGKILL);
            }
            found.extend(event["output_ids"].as_array().unwrap_or_else(|| panic!("{event}")).clone());
        }
        assert_eq!(Value::Array(found), expected(golden, 2)[0][0], "{golden}");
    }
}

/// The tensors of a file, with their type and shape.
fn tensors(path: &Path) -> BTreeMap<String, (Value, Vec<u8>)> {
    let bytes = fs::read(path).unwrap();
    let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: BTreeMap<String, Value> = serde_json::from_slice(&bytes[8..8 + len]).unwrap();
    let data = &bytes[8 + len..];
    let tensor = |(name, entry): (String, Value)| {
        let [start, end]: [usize; 2] = serde_json::from_value(entry["data_offsets"].clone()).unwrap();
        (name, (entry, data[start..end].to_vec()))
    };
    header.into_iter().filter(|(name, _)| name != "__metadata__").map(tensor).collect()
}

/// Adds the head of one checkpoint to another.
fn add_head(path: &Path) {
    let mut all = tensors(path);
    let head = tensors(&golden_dir("mtp_qwen3_5").join("model.safetensors"));
    all.extend(head.into_iter().filter(|(name, _)| name.starts_with("mtp.")));
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, (mut entry, bytes)) in all {
        entry["data_offsets"] = json!([data.len(), data.len() + bytes.len()]);
        data.extend(bytes);
        header.insert(name, entry);
    }
    let header = Value::Object(header).to_string().into_bytes();
    fs::write(path, [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat()).unwrap();
}

#[test]
fn recurrent_states_go_back_behind_rejected_drafts_of_a_head() {
    // The head was made for another model, so it is seldom right.
    let expected = expected("qwen3_5", 1);
    let repository = golden_repository("qwen3_5", &[&SMALL_POOL[..], &[MTP]].concat());
    add_head(&repository.path().join("tensorrt_llm/1/model.safetensors"));
    let options = Options { repository: repository.path().to_owned(), ..Options::default() };
    let mut world = TestWorld::start(options);
    assert_eq!(together(&world.url("/v2/models/tensorrt_llm/generate"), &requests()), expected);
    let [drafted, accepted] = drafts(&mut world);
    assert!(drafted > 20.0 && accepted < drafted, "{accepted} of {drafted} drafts");
}

/// What `trireme plan` prints.
fn plan(golden: &str, parameters: &[(&str, &str)], args: &[&str]) -> String {
    let repository = golden_repository(golden, parameters);
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_trireme"));
    command.args(["plan", "--device=cpu"]).args(args);
    let output = command.arg("--model-repository").arg(repository.path()).output().unwrap();
    String::from_utf8([output.stdout, output.stderr].concat()).unwrap()
}

#[test]
fn a_plan_counts_what_guesses_and_a_pipeline_is_refused() {
    let (one, two) = (["--world-size=1"], ["--world-size=2"]);
    let stages = [("pp", "2"), ("tp", "1")];
    let [count, path] = draft_model("helium");
    let draft = [(count.0, &count.1[..]), (path.0, &path.1[..])];
    assert_ne!(plan("mtp_qwen3_5", &[], &one), plan("mtp_qwen3_5", &[MTP], &one));
    assert_ne!(plan("olmo2", &[], &one), plan("olmo2", &draft, &one));
    let refused = plan("mtp_qwen3_5", &[&[MTP], &stages[..]].concat(), &two);
    assert!(refused.contains("an MTP head that guesses drafts, which a pipeline cannot divide"), "{refused}");
    let refused = plan("olmo2", &[&draft, &stages[..]].concat(), &two);
    assert!(refused.contains("a draft model or an EAGLE-3 head, which a pipeline cannot divide"), "{refused}");
    let refused = plan("olmo2", &[("draft_model_num_tokens", "3"), ("draft_model_path", "nowhere")], &one);
    assert!(refused.contains("`draft_model_path` is `nowhere`, but"), "{refused}");
}

#[test]
fn a_draft_model_with_another_tokenizer_is_refused_with_the_token_that_differs() {
    let repository = golden_repository("olmo2", &[("draft_model_num_tokens", "3"), ("draft_model_path", "1/draft")]);
    let version = repository.path().join("tensorrt_llm/1");
    fs::create_dir(version.join("draft")).unwrap();
    for file in ["config.json", "model.safetensors"] {
        fs::copy(golden_dir("olmo2").join(file), version.join("draft").join(file)).unwrap();
    }
    let tokenizer = fs::read(shipped_repository().join("tensorrt_llm/1/tokenizer.json")).unwrap();
    let plan = |of_draft: &[u8]| {
        fs::write(version.join("tokenizer.json"), &tokenizer).unwrap();
        fs::write(version.join("draft/tokenizer.json"), of_draft).unwrap();
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_trireme"));
        command.args(["plan", "--device=cpu", "--world-size=1", "--model-repository"]).arg(repository.path());
        let output = command.output().unwrap();
        String::from_utf8([output.stdout, output.stderr].concat()).unwrap()
    };
    let accepted = plan(&tokenizer);
    assert!(!accepted.contains("tokenizer"), "{accepted}");
    let mut other: Value = serde_json::from_slice(&tokenizer).unwrap();
    let tokens = other["model"]["vocab"].as_object_mut().unwrap();
    let swapped: Vec<(String, Value)> = tokens.iter().take(2).map(|(token, id)| (token.clone(), id.clone())).collect();
    tokens.insert(swapped[0].0.clone(), swapped[1].1.clone());
    tokens.insert(swapped[1].0.clone(), swapped[0].1.clone());
    let refused = plan(other.to_string().as_bytes());
    assert!(refused.contains("has another tokenizer: token "), "{refused}");
}

#[test]
fn a_draft_model_whose_vocabulary_has_another_size_guesses_where_the_tokens_are_the_same() {
    // The model has 501 tokens, the draft model 200.
    let parameters = [("draft_model_num_tokens", "3"), ("draft_model_path", "1/draft")];
    let repository = golden_repository("llama3_gqa", &[&SMALL_POOL[..], &parameters].concat());
    let version = repository.path().join("tensorrt_llm/1");
    fs::create_dir(version.join("draft")).unwrap();
    for file in ["config.json", "model.safetensors"] {
        fs::copy(golden_dir("helium").join(file), version.join("draft").join(file)).unwrap();
    }
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_trireme"));
    command.args(["plan", "--device=cpu", "--world-size=1", "--model-repository"]).arg(repository.path());
    let output = command.output().unwrap();
    let text = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
    let expected_words = "has a vocabulary of 200 tokens, and the model one of 501; both must have the same tokens";
    assert!(text.contains(expected_words), "{text}");

    let tokenizer = shipped_repository().join("tensorrt_llm/1/tokenizer.json");
    for dir in [version.clone(), version.join("draft")] {
        fs::copy(&tokenizer, dir.join("tokenizer.json")).unwrap();
    }
    let without = golden_repository("llama3_gqa", &SMALL_POOL);
    fs::copy(&tokenizer, without.path().join("tensorrt_llm/1/tokenizer.json")).unwrap();
    let start = |repository: &tempfile::TempDir| {
        TestWorld::start(Options { repository: repository.path().to_owned(), ..Options::default() })
    };
    let answers = |world: &TestWorld| together(&world.url("/v2/models/tensorrt_llm/generate"), &requests());
    let (without, mut world) = (start(&without), start(&repository));
    assert_eq!(answers(&world), answers(&without));
    let [drafted, accepted] = drafts(&mut world);
    assert!(drafted > 20.0 && accepted < drafted, "{accepted} of {drafted} drafts");
}

#[test]
fn a_benchmark_forces_how_many_drafts_are_accepted_and_says_that_the_output_is_wrong() {
    const PROMPTS: usize = 2;
    let flag = |tokens: &str| vec![format!("--benchmark-forced-acceptance={tokens}")];
    for drafts in [MTP, ("prompt_lookup_num_tokens", "3")] {
        let repository = golden_repository("mtp_qwen3_5", &[drafts]);
        let options = Options { repository: repository.path().to_owned(), args: flag("2.5"), ..Options::default() };
        let mut world = TestWorld::start(options);
        let url = world.url("/v2/models/tensorrt_llm/generate");
        for prompt in 0..PROMPTS {
            // A token of the prompt's step, and 25 pairs of steps with 2 and 3 tokens.
            answer(
                &url,
                &json!({"input_ids": [5 + prompt, 6, 7], "input_lengths": 3, "request_output_len": 126, "end_id": -1}),
            );
        }
        let counts = ["trireme_llm_output_tokens_total", "trireme_llm_accepted_draft_tokens_total"];
        assert_eq!(
            counts.map(|name| world.metric(name)),
            [126.0, 75.0].map(|each| each * PROMPTS as f64),
            "{drafts:?}"
        );
        assert!(world.log_text().contains("THE OUTPUT IS WRONG"), "{}", world.log_text());
    }
    let refused = |parameters: &[(&str, &str)], tokens: &str| {
        plan("mtp_qwen3_5", parameters, &["--world-size=1", &flag(tokens)[0]])
    };
    let text = refused(&[], "2.5");
    assert!(text.contains("`--benchmark-forced-acceptance` is 2.5, but the model has no drafts"), "{text}");
    let text = refused(&[MTP], "4.5");
    assert!(text.contains("`--benchmark-forced-acceptance` is 4.5, expected 1 to 4"), "{text}");
}
