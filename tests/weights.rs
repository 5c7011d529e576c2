//! `POST /update_weights_from_disk` (`--weight-updates-dir`): a model goes on with the weights of another checkpoint, and no answer is
//! computed with both.

mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use support::{Options, TestWorld, copied_repository, eventually, golden_dir, post_to, set_parameters, signal};

const PATH: &str = "/update_weights_from_disk";
/// More than one KV block of 16 positions.
const PROMPT: &str = "Once upon a time, in a land far away, there lived an old woman who had a small house at the edge of a deep, dark forest.";

/// A repository, and checkpoints that may replace the weights of its model.
struct Checkpoints {
    repository: tempfile::TempDir,
    updates: tempfile::TempDir,
}

impl Checkpoints {
    /// With the checkpoint `other`, whose tokens are different ones.
    fn new(parameters: &[(&str, &str)]) -> Self {
        let repository = copied_repository();
        set_parameters(&repository, "tensorrt_llm", parameters);
        let checkpoints = Self { repository, updates: tempfile::tempdir().unwrap() };
        checkpoints.add("other", |header| {
            for name in ["self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj", "mlp.down_proj"] {
                let [one, two] = [1, 2].map(|layer| format!("model.layers.{layer}.{name}.weight"));
                let (first, second) = (header[&one].take(), header[&two].take());
                (header[&one], header[&two]) = (second, first);
            }
        });
        checkpoints
    }

    /// The checkpoint that the model is loaded from.
    fn first(&self) -> PathBuf {
        self.repository.path().join("tensorrt_llm/1")
    }

    /// Adds a copy of it with another header of its weights.
    fn add(&self, name: &str, change: impl FnOnce(&mut Value)) -> PathBuf {
        let (dir, weights) = (self.updates.path().join(name), self.first().join("model.safetensors"));
        fs::create_dir(&dir).unwrap();
        fs::copy(self.first().join("config.json"), dir.join("config.json")).unwrap();
        let bytes = fs::read(weights).unwrap();
        let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let mut header = serde_json::from_slice(&bytes[8..8 + len]).unwrap();
        change(&mut header);
        let header = header.to_string();
        let changed = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &bytes[8 + len..]].concat();
        fs::write(dir.join("model.safetensors"), changed).unwrap();
        dir
    }

    fn start(&self, world_size: u32) -> TestWorld {
        self.start_with(world_size, Vec::new())
    }

    /// The same with further flags.
    fn start_with(&self, world_size: u32, mut args: Vec<String>) -> TestWorld {
        args.push(format!("--weight-updates-dir={}", self.updates.path().display()));
        let repository = self.repository.path().to_owned();
        TestWorld::start(Options { world_size, repository, args, ..Options::default() })
    }

    /// What a world answers that is started with the checkpoint `other` and these parameters.
    fn of_other<T>(&self, parameters: &[(&str, &str)], ask: impl FnOnce(&TestWorld) -> T) -> T {
        let repository = copied_repository();
        set_parameters(&repository, "tensorrt_llm", parameters);
        fs::copy(
            self.updates.path().join("other/model.safetensors"),
            repository.path().join("tensorrt_llm/1/model.safetensors"),
        )
        .unwrap();
        let mut world = TestWorld::start(Options { repository: repository.path().to_owned(), ..Options::default() });
        let text = ask(&world);
        assert!(world.stop().success());
        text
    }
}

/// Sends a request for other weights that succeeds. Returns the version.
fn update(world: &TestWorld, body: &Value) -> String {
    let (status, text) = world.post(PATH, body);
    assert_eq!(status, 200, "{text}\n{}", world.log_text());
    let answer: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(answer["success"], true, "{text}");
    answer["weight_version"].as_str().unwrap().to_owned()
}

/// The message of a request for other weights that fails with this status, and the field that it names.
fn failure(world: &TestWorld, body: &Value, status: u16) -> (String, Option<String>) {
    let (found, text) = world.post(PATH, body);
    assert_eq!(found, status, "{body}: {text}");
    let answer: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((&answer["success"], &answer["message"]), (&json!(false), &answer["error"]["message"]), "{text}");
    (answer["message"].as_str().unwrap().to_owned(), answer["error"]["param"].as_str().map(str::to_owned))
}

fn check_version(world: &mut TestWorld, version: &str) {
    let entry = world.get("/v1/models/ensemble").1;
    assert!(entry.contains(&format!(r#""weight_version":"{version}""#)), "{entry}");
    let (_, metrics) = world.get_metrics("/metrics");
    let info = format!(r#"weight_version="{version}"}} 1"#);
    assert!(
        metrics.lines().any(|line| line.starts_with("trireme_llm_weights_info{") && line.ends_with(&info)),
        "{metrics}"
    );
}

#[test]
fn tokens_are_those_of_a_cold_start_with_the_other_checkpoint_and_never_of_both() {
    const MAX_TOKENS: u32 = 120;
    let checkpoints = Checkpoints::new(&[]);
    let other = checkpoints.of_other(&[], |world| world.generate(PROMPT, MAX_TOKENS));
    for world_size in [1, 2] {
        let mut world = checkpoints.start(world_size);
        let first = world.generate(PROMPT, MAX_TOKENS);
        assert_ne!(first, other);
        check_version(&mut world, "1");

        // One stream has begun when the request comes, and others come while it waits and while the workers start.
        let mut running = world.stream(PROMPT, MAX_TOKENS);
        let mut text: String = running.by_ref().take(3).collect();
        let (url, generate) = (world.url(PATH), world.url("/v2/models/ensemble/generate"));
        let replacing =
            thread::spawn(move || post_to(&url, &json!({"model_path": "other", "weight_version": "step 7"})));
        let body = json!({"text_input": PROMPT, "max_tokens": MAX_TOKENS});
        let mut sent = Vec::new();
        while !replacing.is_finished() {
            if sent.len() < 40 {
                let (generate, body) = (generate.clone(), body.clone());
                sent.push(thread::spawn(move || post_to(&generate, &body)));
            }
            thread::sleep(std::time::Duration::from_millis(25));
        }
        text.extend(running);
        assert_eq!(text, first, "what has begun ends with the old weights");
        let (status, answer) = replacing.join().unwrap();
        assert_eq!(status, 200, "{answer}");
        let mut num_other = 0;
        for answer in sent {
            let (status, text) = answer.join().unwrap();
            let answer: Value = serde_json::from_str(&text).unwrap();
            let text = answer["text_output"].as_str().unwrap_or_else(|| panic!("{status}: {answer}"));
            assert!(text == first || text == other, "neither:\n{text}\n{first}\n{other}");
            num_other += usize::from(text == other);
        }
        assert!(num_other > 0, "requests waited for the new weights");
        check_version(&mut world, "step 7");

        // Nothing but the new prompts is in the prefix cache.
        assert_eq!(world.generate(PROMPT, MAX_TOKENS), other);
        let killed = world.workers()[world_size as usize - 1];
        signal(killed, Signal::SIGKILL);
        eventually("its group starts again", || {
            world.metric("trireme_llm_worker_restarts_total") == 1.0 && !world.workers().contains(&killed)
        });
        assert_eq!(world.generate(PROMPT, MAX_TOKENS), other, "a worker that dies comes back with the new weights");

        assert_eq!(update(&world, &json!({"model_path": checkpoints.first()})), "3");
        let cached = world.metric("trireme_llm_cached_prompt_tokens_total");
        assert_eq!(world.generate(PROMPT, MAX_TOKENS), first);
        assert_eq!(world.metric("trireme_llm_cached_prompt_tokens_total"), cached, "the prefix cache was forgotten");
        check_version(&mut world, "3");
        assert!(world.stop().success());
    }
}

#[test]
fn what_cannot_replace_the_weights_is_refused_by_name_and_the_model_serves_on() {
    let checkpoints = Checkpoints::new(&[]);
    let embedding = "model.embed_tokens.weight";
    checkpoints.add("shape", |header| header[embedding]["shape"] = json!([256, 3072]));
    checkpoints.add("type", |header| header[embedding]["dtype"] = json!("F16"));
    checkpoints.add("missing", |header| drop(header.as_object_mut().unwrap().remove(embedding)));
    let further = |header: &mut Value| header["model.more.weight"] = header[embedding].clone();
    checkpoints.add("further", further);
    let config = checkpoints.add("config", |_| {}).join("config.json");
    let text = fs::read_to_string(&config).unwrap().replace("10000.0", "20000.0");
    fs::write(&config, text).unwrap();
    fs::remove_file(checkpoints.add("no_weights", |_| {}).join("model.safetensors")).unwrap();
    fs::remove_file(checkpoints.add("no_config", |_| {}).join("config.json")).unwrap();
    let cut = checkpoints.add("cut", |_| {}).join("model.safetensors");
    fs::OpenOptions::new().write(true).open(&cut).unwrap().set_len(1 << 20).unwrap();

    let mut world = checkpoints.start(1);
    let first = world.generate(PROMPT, 16);
    for (path, reason) in [
        ("shape", "is BF16 [256, 3072], and BF16 [3072, 256] is served"),
        ("type", "is F16 [3072, 256], and BF16 [3072, 256] is served"),
        ("missing", "tensor `model.embed_tokens.weight` is missing in "),
        ("further", "tensor `model.more.weight` in "),
        ("config", "different: `rope_parameters`"),
        ("no_weights", "no `model.safetensors`"),
        ("no_config", "config.json: No such file"),
        ("cut", "model.safetensors is truncated"),
        ("nothing", "No such file or directory"),
        ("/etc", "/etc is not in "),
        ("../x", "../x is not in "),
    ] {
        let message = failure(&world, &json!({"model_path": path}), 400).0;
        assert!(message.contains("the weights of model `tensorrt_llm` are not replaced: "), "{path}: {message}");
        assert!(message.contains(reason), "{path}: {message}");
    }
    let other = |field: &str, value: Value| json!({"model_path": "other", field: value});
    for (field, value) in [("weights", json!("x")), ("flush_cache", json!(false)), ("load_format", json!("dummy"))] {
        assert_eq!(failure(&world, &other(field, value), 400).1.as_deref(), Some(field));
    }
    assert_eq!(failure(&world, &json!({}), 400).1.as_deref(), Some("model_path"));
    assert_eq!(world.post(&format!("{PATH}?model=nobody"), &json!({"model_path": "other"})).0, 404);
    assert_eq!(world.post(&format!("{PATH}?model=preprocessing"), &json!({"model_path": "other"})).0, 400);
    assert_eq!(world.get(PATH).0, 405);
    let workers = world.workers();
    assert_eq!(world.generate(PROMPT, 16), first);
    assert_eq!((world.metric("trireme_llm_worker_restarts_total"), world.workers()), (0.0, workers));
    check_version(&mut world, "1");
    assert!(world.stop().success());

    let mut without = TestWorld::of(1);
    assert!(failure(&without, &json!({"model_path": "other"}), 400).0.contains("`--weight-updates-dir=DIR`"));
    assert!(!without.get("/v1/models/ensemble").1.contains("weight_version"));
    assert!(without.stop().success());
}

/// Makes a tensor too short, which only a worker that loads it finds.
fn shorten(header: &mut Value) {
    let offsets = &mut header["model.layers.3.mlp.up_proj.weight"]["data_offsets"];
    offsets[1] = json!(offsets[0].as_u64().unwrap() + 2);
}

#[test]
fn weights_that_no_worker_can_load_leave_the_old_ones_in_service_and_replicas_change_together() {
    for (world_size, parameters) in [(1, &[][..]), (2, &[("tp", "1")])] {
        let checkpoints = Checkpoints::new(parameters);
        checkpoints.add("broken", shorten);
        let mut world = checkpoints.start(world_size);
        let first = world.generate(PROMPT, 16);
        let generate = world.url("/v2/models/ensemble/generate");
        let body = json!({"text_input": PROMPT, "max_tokens": 16});
        let (message, _) = failure(&world, &json!({"model_path": "broken"}), 503);
        assert!(message.contains("model.layers.3.mlp.up_proj.weight"), "{message}");
        assert!(message.ends_with("its old weights are loaded again"), "{message}");
        let texts = || {
            let sent: Vec<_> = (0..4)
                .map(|_| {
                    let (generate, body) = (generate.clone(), body.clone());
                    thread::spawn(move || post_to(&generate, &body))
                })
                .collect();
            let text = |(_, answer): (u16, String)| -> Value { serde_json::from_str(&answer).unwrap() };
            sent.into_iter().map(move |sent| text(sent.join().unwrap())["text_output"].as_str().unwrap().to_owned())
        };
        assert!(texts().all(|text| text == first));
        check_version(&mut world, "1");
        assert_eq!(update(&world, &json!({"model_path": "other"})), "2");
        assert_eq!(world.workers().len(), world_size as usize);
        let new: Vec<String> = texts().collect();
        assert!(new.iter().all(|text| *text == new[0] && *text != first), "{new:?}");
        check_version(&mut world, "2");
        assert!(world.stop().success());
    }
}

#[test]
fn requests_are_aborted_if_asked_for_and_a_model_that_sleeps_wakes_with_the_new_weights() {
    let checkpoints = Checkpoints::new(&[]);
    let args = vec![
        format!("--weight-updates-dir={}", checkpoints.updates.path().display()),
        "--enable-sleep-mode".to_owned(),
    ];
    let mut world =
        TestWorld::start(Options { repository: checkpoints.repository.path().to_owned(), args, ..Options::default() });
    let first = world.generate(PROMPT, 16);
    let mut stream = world.stream(PROMPT, 1800);
    stream.next().expect("it has begun");
    let asked = json!({"model_path": checkpoints.updates.path().join("other"), "abort_all_requests": true});
    assert_eq!(update(&world, &asked), "2");
    let last = std::iter::from_fn(|| stream.next_event()).last().expect("an event");
    assert!(last["error"].as_str().is_some_and(|error| error.contains("`abort_all_requests`")), "{last}");
    let other = world.generate(PROMPT, 16);
    assert_ne!(other, first);
    for level in [1, 2] {
        assert_eq!(world.post(&format!("/sleep?level={level}"), &json!({})).0, 200);
        let (path, expected): (&Path, _) =
            if level == 1 { (&checkpoints.first(), &first) } else { (Path::new("other"), &other) };
        update(&world, &json!({"model_path": path}));
        assert!(world.get("/is_sleeping").1.contains("false"));
        assert_eq!(world.generate(PROMPT, 16), *expected);
    }
    assert_eq!(world.metric("trireme_llm_worker_restarts_total"), 0.0);
    assert!(world.stop().success());
}

#[test]
fn copies_of_the_prefix_cache_in_host_memory_and_on_disk_are_forgotten() {
    const TIERS: [(&str, &str); 4] = [
        ("max_sequence_len", "256"),
        ("max_tokens_in_paged_kv_cache", "272"),
        ("kv_cache_host_memory_bytes", "2097152"),
        ("kv_cache_disk_bytes", "67108864"),
    ];
    let (checkpoints, directory) = (Checkpoints::new(&TIERS), tempfile::tempdir().unwrap());
    let mut world = checkpoints.start_with(1, vec![format!("--kv-cache-disk-dir={}", directory.path().display())]);
    let texts = |world: &TestWorld| -> Vec<String> {
        (0..6).map(|n| world.generate(&format!("{n}: {}", [PROMPT; 3].join(" ")), 16)).collect()
    };
    let used = ["trireme_llm_host_cache_used_bytes", "trireme_llm_disk_cache_used_bytes"];
    let first = texts(&world);
    for name in used {
        eventually("all tiers hold KV blocks", || world.metric(name) > 0.0);
    }
    update(&world, &json!({"model_path": "other"}));
    for name in used {
        eventually("all tiers are empty", || world.metric(name) == 0.0);
    }
    let other = texts(&world);
    assert_ne!(other, first);
    assert_eq!(other, checkpoints.of_other(&[], texts));
    assert!(world.stop().success());
}

#[test]
fn an_adapter_is_applied_to_the_new_weights() {
    let adapter = format!("tuned={}", golden_dir("adapters").join("demo").display());
    let parameters = [("lora_modules", adapter.as_str())];
    let checkpoints = Checkpoints::new(&parameters);
    let mut world = checkpoints.start(1);
    let texts = |world: &TestWorld| -> [Value; 2] {
        ["tuned", "ensemble"].map(|model| {
            let body =
                json!({"model": model, "prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": true});
            let (status, text) = world.post("/v1/completions", &body);
            assert_eq!(status, 200, "{text}");
            serde_json::from_str::<Value>(&text).unwrap()["choices"][0]["text"].clone()
        })
    };
    let first = texts(&world);
    update(&world, &json!({"model_path": "other"}));
    let other = texts(&world);
    assert!(other[0] != other[1] && other != first, "{first:?} {other:?}");
    assert_eq!(other, checkpoints.of_other(&parameters, texts));
    assert!(world.stop().success());
}
