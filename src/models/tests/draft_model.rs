//! Draft models: what they guess behind a token is what they generate alone behind the same tokens, and they change no token of the
//! model that they guess for.

#[allow(dead_code)]
mod support;

use std::fs;
use std::path::Path;

use device::Estimator;
use device::cpu::{CpuConfig, CpuDevice, WeightPrecision};
use engine::SamplingParams;
use models::Config;
use ops::{Device, StepLimits, Target, TensorParallel};
use serde_json::{Map, Value, json};
use settings::DeviceDrafter;
use support::{BLOCK_SIZE, MAX_ROWS, Runner, Sequence, golden_dir, on_changed};

const NUM_GUESSES: usize = 3;
const NUM_TOKENS: usize = 20;

/// Models and draft models: the same KV shape or another one, windows, recurrent states, learned positions, f32 beside bf16.
const PAIRS: [(&str, &str); 6] = [
    ("helium", "helium"),
    ("olmo2", "helium"),
    ("gemma3", "helium"),
    ("gemma3", "nemotron"),
    ("qwen3_5", "opt"),
    ("llama_fp8", "granite_moe"),
];

fn with_draft_model(config: Config, draft: &str) -> Config {
    let drafter = DeviceDrafter::Model(golden_dir(draft));
    config.with_drafter(&drafter, WeightPrecision::Checkpoint, Target::Cpu).unwrap()
}

fn config(case: &str) -> Config {
    Config::from_dir(&golden_dir(case)).unwrap()
}

fn sequence(prompt: Vec<u32>, num_tokens: usize, chunk: usize, start: usize) -> Sequence {
    Sequence { prompt, num_tokens, sampling: SamplingParams::default(), chunk, start, adapter: None }
}

fn prompts() -> Vec<Vec<u32>> {
    let prompt = |n: u32| (0..9 + 14 * n).map(|i| 3 + (i * 31 + n * 17) % 190).collect();
    (0..3).map(prompt).collect()
}

/// Tokens, and the guesses behind each of them.
type Output = Vec<(Vec<u32>, Vec<Vec<u32>>)>;

fn run(runner: &mut Runner, chunk: usize) -> Output {
    runner.num_guesses = NUM_GUESSES as u32;
    let sequences = prompts().into_iter().enumerate().map(|(start, prompt)| sequence(prompt, NUM_TOKENS, chunk, start));
    let outputs = runner.run(&sequences.collect::<Vec<_>>());
    let tokens = outputs.iter().map(|output| output.iter().map(|sampled| sampled.token.0).collect());
    tokens.zip(runner.take_guesses()).collect()
}

/// What a model generates alone behind each of these texts.
fn alone(case: &str, texts: &[Vec<u32>]) -> Vec<Vec<u32>> {
    let mut runner = Runner::new(case, 1, None);
    let run = |texts: &[Vec<u32>]| {
        let sequences: Vec<_> = texts.iter().map(|text| sequence(text.clone(), NUM_GUESSES, 256, 0)).collect();
        let outputs = runner.run(&sequences);
        outputs.into_iter().map(|output| output.iter().map(|sampled| sampled.token.0).collect()).collect::<Vec<_>>()
    };
    // A step takes 256 tokens.
    texts.chunks(4.min(MAX_ROWS)).flat_map(run).collect()
}

#[test]
fn guesses_are_what_the_draft_model_generates_alone_for_any_chunks_and_for_world_sizes_1_and_2() {
    for (case, draft) in PAIRS.into_iter().filter(|(case, _)| *case != "llama_fp8") {
        let mut expected: Option<Output> = None;
        for (size, chunk) in [(1, 64), (1, 5), (2, 16)] {
            let found = on_changed(case, size, |config| with_draft_model(config, draft), |runner| run(runner, chunk));
            let expected = expected.get_or_insert_with(|| {
                let texts = prompts().into_iter().zip(&found).flat_map(|(prompt, (tokens, _))| {
                    let text = move |len: usize| [&prompt[..], &tokens[..len]].concat();
                    (1..=NUM_TOKENS).map(text).collect::<Vec<_>>()
                });
                let guesses = alone(draft, &texts.collect::<Vec<_>>());
                let guesses = guesses.chunks(NUM_TOKENS).map(<[_]>::to_vec);
                found.iter().map(|(tokens, _)| tokens.clone()).zip(guesses).collect()
            });
            assert_eq!(&found, expected, "{draft} for {case}, {size} workers, chunks of {chunk}");
        }
    }
}

#[test]
fn a_draft_model_changes_no_token_whatever_its_type_and_shape() {
    for (case, draft) in PAIRS {
        let runner = |config| Runner::with(&golden_dir(case), config, 2, None, WeightPrecision::Checkpoint);
        let drawn = |(seed, prompt)| {
            let sampling = SamplingParams {
                temperature: 1.0,
                seed: seed as u64,
                num_logprobs: Some(3),
                ..SamplingParams::default()
            };
            Sequence { sampling, ..sequence(prompt, NUM_TOKENS, 16, 0) }
        };
        let sequences: Vec<Sequence> = prompts().into_iter().enumerate().map(drawn).collect();
        let without = runner(config(case)).run(&sequences);
        let mut with = runner(with_draft_model(config(case), draft));
        with.num_guesses = NUM_GUESSES as u32;
        with.steps_between_guesses = 3;
        assert_eq!(with.run(&sequences), without, "{draft} for {case}");
        let num_guesses: usize = with.take_guesses().iter().map(Vec::len).sum();
        assert!(2 * num_guesses < prompts().len() * NUM_TOKENS, "the draft model runs behind some steps");
        with.steps_between_guesses = 1;
        assert_eq!(with.run(&sequences), without, "{draft} for {case}");
        if case == draft {
            // A drawn token is guessed with the draw that will choose it.
            for (guesses, output) in with.take_guesses().iter().zip(&without) {
                let next: Vec<u32> = output[1..].iter().map(|sampled| sampled.token.0).collect();
                let first: Vec<u32> = guesses[..next.len()].iter().map(|guesses| guesses[0]).collect();
                assert_eq!(first, next);
            }
        }
    }
}

/// A checkpoint with 16 more tokens: embeddings that are twice those of the first ones, so that the model would often choose them.
fn padded(case: &str) -> tempfile::TempDir {
    const NUM_MORE: usize = 16;
    let (from, to) = (golden_dir(case), tempfile::tempdir().unwrap());
    let mut config: Value = serde_json::from_slice(&fs::read(from.join("config.json")).unwrap()).unwrap();
    assert_eq!(config["vocab_size"], 200);
    config["vocab_size"] = json!(200 + NUM_MORE);
    fs::write(to.path().join("config.json"), config.to_string()).unwrap();
    let bytes = fs::read(from.join("model.safetensors")).unwrap();
    let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Map<String, Value> = serde_json::from_slice(&bytes[8..8 + len]).unwrap();
    let (mut new, mut data) = (Map::new(), Vec::new());
    for (name, mut entry) in header.into_iter().filter(|(name, _)| name != "__metadata__") {
        let [start, end]: [usize; 2] = serde_json::from_value(entry["data_offsets"].clone()).unwrap();
        let tensor = &bytes[8 + len..][start..end];
        let first = data.len();
        data.extend(tensor);
        if entry["shape"][0] == 200 {
            assert_eq!(entry["dtype"], "F16");
            entry["shape"][0] = json!(200 + NUM_MORE);
            // The exponent becomes greater by one.
            let doubled = |pair: &[u8]| (u16::from_le_bytes([pair[0], pair[1]]) + 0x400).to_le_bytes();
            data.extend(tensor[..tensor.len() / 200 * NUM_MORE].chunks_exact(2).flat_map(doubled));
        }
        entry["data_offsets"] = json!([first, data.len()]);
        new.insert(name, entry);
    }
    let header = Value::Object(new).to_string().into_bytes();
    let file = [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat();
    fs::write(to.path().join("model.safetensors"), file).unwrap();
    to
}

#[test]
fn tokens_that_only_the_draft_model_has_are_never_guessed_and_change_nothing() {
    let padded = padded("helium");
    let with = |dir: &Path| {
        let drafter = DeviceDrafter::Model(dir.to_owned());
        move |config: Config| config.with_drafter(&drafter, WeightPrecision::Checkpoint, Target::Cpu).unwrap()
    };
    // Alone it chooses them.
    let mut alone = Runner::of(padded.path(), 1, None, WeightPrecision::Checkpoint);
    let outputs = alone.run(&[sequence(prompts().remove(2), NUM_TOKENS, 64, 0)]);
    assert!(outputs[0].iter().any(|sampled| sampled.token.0 >= 200), "{outputs:?}");
    let expected = on_changed("olmo2", 1, with(&golden_dir("helium")), |runner| run(runner, 16));
    for size in [1, 2] {
        let found = on_changed("olmo2", size, with(padded.path()), |runner| run(runner, 16));
        assert_eq!(found, expected, "{size} workers");
    }
}

#[test]
fn tokens_that_the_draft_model_lacks_are_never_guessed_and_change_nothing() {
    const CASE: &str = "llama3_gqa"; // 501 tokens
    let drawn = |(seed, prompt)| {
        let sampling = SamplingParams { temperature: 1.0, seed: seed as u64, ..SamplingParams::default() };
        Sequence { sampling, ..sequence(prompt, NUM_TOKENS, 16, 0) }
    };
    let sequences: Vec<Sequence> = prompts().into_iter().enumerate().map(drawn).collect();
    let tokens = |runner: &mut Runner| -> Vec<Vec<u32>> {
        let outputs = runner.run(&sequences);
        outputs.iter().map(|output| output.iter().map(|sampled| sampled.token.0).collect()).collect()
    };
    for size in [1, 2] {
        let without = on_changed(CASE, size, |config| config, tokens);
        let with = |runner: &mut Runner| {
            runner.num_guesses = NUM_GUESSES as u32;
            (tokens(runner), runner.take_guesses().concat().concat())
        };
        let (with, guesses) = on_changed(CASE, size, |config| with_draft_model(config, "helium"), with);
        assert_eq!(with, without, "{size} workers");
        assert!(
            without.iter().flatten().any(|&token| token >= 200),
            "the model chooses tokens that the draft model lacks"
        );
        assert_eq!(guesses.len(), NUM_GUESSES * NUM_TOKENS * sequences.len());
        assert!(guesses.iter().all(|&token| token < 200), "{guesses:?}");
    }
}

#[test]
fn an_estimate_counts_the_draft_model() {
    for (case, draft) in PAIRS {
        let config = with_draft_model(config(case), draft);
        let limits = StepLimits { max_tokens: 64, max_rows: 4, max_sequence_len: 128, vocab_size: config.vocab_size };
        let mut cpu =
            CpuDevice::new(CpuConfig { threads: 1, limits, kv_memory_bytes: Some(1 << 24), group: None }).unwrap();
        let model = models::load(&golden_dir(case), &config, &mut cpu).unwrap();
        let found = cpu.memory_plan(&model.attention_spec(BLOCK_SIZE, limits.max_sequence_len)).unwrap();
        let mut estimator = Estimator::new(Target::Cpu, TensorParallel { rank: 0, size: 1 }, limits);
        let model = models::load(&golden_dir(case), &config, &mut estimator).unwrap();
        let estimated = estimator.estimate(&model.attention_spec(BLOCK_SIZE, limits.max_sequence_len));
        assert_eq!(estimated.block_bytes, found.block_bytes, "{draft} for {case}");
        let pairs =
            [(estimated.weights_bytes, found.weights_bytes), (estimated.workspace_bytes, found.workspace_bytes)];
        for (estimated, found) in pairs {
            assert!(
                estimated.abs_diff(found) * 50 <= found,
                "{draft} for {case}: {found} bytes, estimated {estimated}"
            );
        }
    }
}

#[test]
fn a_draft_model_that_does_not_fit_is_refused_by_name() {
    let refused = |case: &str, draft: &str| {
        let drafter = DeviceDrafter::Model(golden_dir(draft));
        let error = config(case).with_drafter(&drafter, WeightPrecision::Checkpoint, Target::Cpu).unwrap_err();
        error.to_string()
    };
    for (case, draft, expected) in [
        ("helium", "qwen3_5", "has layers with a recurrent state"),
        ("helium", "deepseek_v3", "has attention over latent vectors"),
        ("helium", "nowhere", "draft model: cannot read"),
    ] {
        let error = refused(case, draft);
        assert!(error.contains(expected), "{error}");
    }
    let config = with_draft_model(config("helium"), "nemotron");
    let limits = StepLimits { max_tokens: 8, max_rows: 1, max_sequence_len: 8, vocab_size: config.vocab_size };
    let load = |target, size| {
        let mut estimator = Estimator::new(target, TensorParallel { rank: 0, size }, limits);
        models::load(&golden_dir("helium"), &config, &mut estimator).map(drop).map_err(|error| error.to_string())
    };
    assert_eq!(load(Target::Cuda, 1), Ok(()), "GPUs have it");
    let error = load(Target::Cpu, 3).unwrap_err();
    assert!(error.contains("4 heads and 2 KV heads cannot be shared by 3 workers"), "{error}");
}
