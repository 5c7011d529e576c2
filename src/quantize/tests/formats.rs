//! Checkpoints that `trireme quantize` writes, against what transformers reads from them and against the original model.

#[allow(dead_code)]
#[path = "../../models/tests/support/mod.rs"]
mod support;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use device::cpu::WeightPrecision;
use engine::{SampledToken, SamplingParams};
use models::Checkpoint;
use quantize::{Format, QuantizeArgs, run};
use support::{Runner, Sequence, golden_dir};

const DEMO: &str = "../../model_repository/tensorrt_llm/1";

fn args(checkpoint: PathBuf, format: Format, out: PathBuf) -> QuantizeArgs {
    QuantizeArgs { checkpoint, format, out, calibration: None, calibration_tokens: 1024, max_shard_size: 4768 }
}

/// Log-probabilities of all tokens after a prompt.
fn logprobs(dir: &Path, prompt: &[u32]) -> Vec<f64> {
    all_logprobs(dir, &[prompt]).remove(0)
}

/// The same after each of some prompts.
fn all_logprobs(dir: &Path, prompts: &[&[u32]]) -> Vec<Vec<f64>> {
    let config = models::Config::from_dir(dir).unwrap();
    let sampling = SamplingParams { num_logprobs: Some(config.vocab_size as u32), ..SamplingParams::default() };
    let sequence = |(start, prompt): (usize, &&[u32])| {
        let (prompt, sampling) = (prompt.to_vec(), sampling.clone());
        Sequence { prompt, num_tokens: 1, sampling, chunk: 256, start, adapter: None }
    };
    let sequences: Vec<Sequence> = prompts.iter().enumerate().map(sequence).collect();
    let outputs = Runner::of(dir, 2, None, WeightPrecision::Checkpoint).run(&sequences);
    let sorted = |mut output: Vec<SampledToken>| {
        let mut top = output.remove(0).top;
        top.sort_by_key(|(token, _)| token.0);
        top.into_iter().map(|(_, p)| f64::from(p)).collect()
    };
    outputs.into_iter().map(sorted).collect()
}

/// Root of the mean square of differences, weighted by the probabilities of `expected`.
fn difference(found: &[f64], expected: &[f64]) -> f64 {
    let square = |(a, b): (&f64, &f64)| b.exp() * (a - b).powi(2);
    found.iter().zip(expected).map(square).sum::<f64>().sqrt()
}

fn log_softmax(logits: &[f64]) -> Vec<f64> {
    let max = logits.iter().copied().fold(f64::MIN, f64::max);
    let total = logits.iter().map(|x| (x - max).exp()).sum::<f64>().ln() + max;
    logits.iter().map(|x| x - total).collect()
}

fn format(name: &str) -> Format {
    let all = [Format::Fp8, Format::Fp8Block, Format::Int8, Format::Int4, Format::Int4Awq];
    all.into_iter().find(|format| format.name() == name).unwrap()
}

#[test]
fn transformers_computes_the_same_from_what_is_written() {
    let goldens = fs::read(golden_dir("").join("quantize.json")).unwrap();
    let goldens: Vec<serde_json::Value> = serde_json::from_slice(&goldens).unwrap();
    assert_eq!(goldens.len(), 7);
    for golden in goldens {
        let (case, name) = (golden["case"].as_str().unwrap(), golden["format"].as_str().unwrap());
        let numbers = |value: &serde_json::Value| -> Vec<f64> {
            value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
        };
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("out");
        run(&args(golden_dir(case), format(name), out.clone())).unwrap();
        let bytes = fs::read(out.join("model.safetensors")).unwrap();
        let digest = ring::digest::digest(&ring::digest::SHA256, &bytes);
        let hex: String = digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
        let again = "make the goldens again with scripts/goldens/make_quantize_goldens.py";
        assert_eq!(hex, golden["sha256"], "{case} in {name} differs from what transformers has read; {again}");
        let prompt: Vec<u32> = numbers(&golden["prompt"]).into_iter().map(|token| token as u32).collect();
        let found = logprobs(&out, &prompt);
        let (same, original) = (log_softmax(&numbers(&golden["logits"])), logprobs(&golden_dir(case), &prompt));
        let (error, cost) = (difference(&found, &same), difference(&found, &original));
        eprintln!("{case} {name}: {error:.1e} from transformers, {cost:.1e} from the original");
        // Inputs of layers are rounded to bf16, as with unquantized weights.
        assert!(error < 0.03, "{case} {name}: log-probabilities differ by {error}");
        assert!(cost > 1e-4 && cost < 1.0, "{case} {name}: {cost} from the original");
    }
}

/// Architectures name and stack their linear layers in many ways.
#[test]
fn what_is_written_for_each_architecture_is_read_again() {
    let dir = tempfile::tempdir().unwrap();
    let mut num_read = 0;
    for entry in fs::read_dir(golden_dir("")).unwrap().flatten() {
        let (case, out) = (entry.file_name().into_string().unwrap(), dir.path().join(entry.file_name()));
        if !entry.path().join("config.json").is_file() || run(&args(entry.path(), Format::Int8, out.clone())).is_err() {
            continue;
        }
        let prompt = [5, 17, 3, 99, 42, 7, 120, 61];
        let (found, original) = (logprobs(&out, &prompt), logprobs(&entry.path(), &prompt));
        let cost = difference(&found, &original);
        // Where a token chooses experts, a small change may let it choose another, which in a random model computes something else.
        let config = fs::read_to_string(entry.path().join("config.json")).unwrap();
        // What a layer with a state computes is a product of several products of its input.
        let is_recurrent = ["linear_conv_kernel_dim", "conv_L_cache", "mamba_n_heads", "mamba_num_heads"];
        let allowed = match config.contains("expert") {
            true => 1.5,
            false if is_recurrent.into_iter().any(|name| config.contains(name)) => 0.4,
            false => 0.2,
        };
        assert!(cost < allowed, "{case}: {cost} from the original, {allowed} allowed");
        num_read += 1;
        fs::remove_dir_all(out).unwrap();
    }
    // Those that are quantized already, or transposed, are refused.
    assert!(num_read >= 70, "only {num_read} architectures were quantized");
}

#[test]
fn everything_but_weights_is_copied_and_weights_may_be_in_several_files() {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("source");
    fs::create_dir_all(source.join("additional_chat_templates")).unwrap();
    for entry in fs::read_dir(golden_dir(DEMO)).unwrap().flatten() {
        fs::copy(entry.path(), source.join(entry.file_name())).unwrap();
    }
    fs::write(source.join("additional_chat_templates/tool_use.jinja"), "{{ messages }}").unwrap();
    fs::write(source.join("pytorch_model.bin"), "old weights").unwrap();
    let (one, many) = (dir.path().join("one"), dir.path().join("many"));
    run(&args(source.clone(), Format::Fp8, one.clone())).unwrap();
    run(&QuantizeArgs { max_shard_size: 1, ..args(source.clone(), Format::Fp8, many.clone()) }).unwrap();

    let index: serde_json::Value =
        serde_json::from_slice(&fs::read(many.join("model.safetensors.index.json")).unwrap()).unwrap();
    let files: std::collections::BTreeSet<_> =
        index["weight_map"].as_object().unwrap().values().map(|file| file.as_str().unwrap()).collect();
    assert!(files.len() >= 4 && files.iter().all(|file| many.join(file).is_file()), "{files:?}");
    let tensors = |dir: &Path| -> BTreeMap<String, (String, Vec<usize>, Vec<u8>)> {
        let checkpoint = Checkpoint::open(dir).unwrap();
        let tensors = checkpoint.stored_tensors().unwrap();
        tensors.iter().map(|t| (t.name.into(), (t.dtype.into(), t.shape.into(), t.data.into()))).collect()
    };
    assert_eq!(tensors(&one), tensors(&many));
    for file in ["tokenizer.json", "generation_config.json", "additional_chat_templates/tool_use.jinja"] {
        assert_eq!(fs::read(one.join(file)).unwrap(), fs::read(source.join(file)).unwrap());
    }
    assert!(!one.join("pytorch_model.bin").exists());
    // Nothing is left beside the new directories.
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 3);
}

#[test]
fn what_cannot_be_quantized_is_refused_with_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let refused = |case: &str, format, calibration: Option<&str>| {
        let calibration = calibration.map(|text| {
            let file = dir.path().join("text");
            fs::write(&file, text).unwrap();
            file
        });
        let error = run(&QuantizeArgs { calibration, ..args(golden_dir(case), format, out.clone()) }).unwrap_err();
        assert!(!out.exists());
        error.to_string()
    };
    for (case, format, calibration, expected) in [
        ("llama_awq", Format::Fp8, None, "is quantized already (`quant_method` is `awq`); use the original checkpoint"),
        ("gpt2", Format::Int8, None, "stores its linear layers transposed"),
        ("none", Format::Int8, None, "config.json"),
        (
            "qwen2",
            Format::Fp8Block,
            None,
            "no linear layer can be quantized to fp8-block: its inputs are no multiple of 128",
        ),
        (DEMO, Format::Int4Awq, None, "`--calibration FILE`; `int4` needs none"),
        (DEMO, Format::Int4, Some("text"), "uses no calibration text; leave out `--calibration`"),
        (DEMO, Format::Int4Awq, Some("too short"), "calibration needs 512 at least"),
    ] {
        let error = refused(case, format, calibration);
        assert!(error.contains(expected), "{case}: {error}");
    }
    fs::create_dir(&out).unwrap();
    let error = run(&args(golden_dir(DEMO), Format::Fp8, out.clone())).unwrap_err().to_string();
    assert!(error.contains("exists; name a new directory, or remove it"), "{error}");
    assert_eq!(fs::read_dir(&out).unwrap().count(), 0);
    // No unfinished directory is left.
    let names: Vec<_> = fs::read_dir(dir.path()).unwrap().flatten().map(|entry| entry.file_name()).collect();
    assert_eq!(names.len(), 2, "{names:?}");
}

/// What the demo model writes after some beginnings.
fn stories() -> String {
    let tokenizer = text::Tokenizer::from_dir(&golden_dir(DEMO)).unwrap();
    let animals = ["fox", "bear", "cat", "dog", "robot", "dragon", "mouse", "bird"];
    let begin = |animal: &&str| {
        [format!("Once upon a time there was a {animal}"), format!("Tell me a story about a brave {animal}.")]
    };
    let sequence = |text: String| {
        let prompt = tokenizer.encode(&text, true).unwrap();
        Sequence { prompt, num_tokens: 90, sampling: SamplingParams::default(), chunk: 256, start: 0, adapter: None }
    };
    let sequences: Vec<Sequence> = animals.iter().flat_map(begin).map(sequence).collect();
    let written = Runner::of(&golden_dir(DEMO), 2, None, WeightPrecision::Checkpoint).run(&sequences);
    let texts = sequences.iter().zip(written).map(|(sequence, written)| {
        let ids: Vec<u32> = sequence.prompt.iter().copied().chain(written.iter().map(|token| token.token.0)).collect();
        tokenizer.decode(&ids, true)
    });
    texts.collect::<Vec<_>>().join("\n\n")
}

#[test]
fn calibration_text_makes_four_bits_more_exact() {
    let dir = tempfile::tempdir().unwrap();
    let text = dir.path().join("text");
    fs::write(&text, stories()).unwrap();
    let (plain, aware) = (dir.path().join("plain"), dir.path().join("aware"));
    run(&args(golden_dir(DEMO), Format::Int4, plain.clone())).unwrap();
    let with_text = QuantizeArgs { calibration: Some(text), ..args(golden_dir(DEMO), Format::Int4Awq, aware.clone()) };
    run(&with_text).unwrap();
    // Other texts than those of the calibration, up to each of their words.
    let tokenizer = text::Tokenizer::from_dir(&golden_dir(DEMO)).unwrap();
    let text = "Long ago, in a far land, there lived a lonely queen named Anna. She had a golden lamp and a small garden. One day \
        a captain came to the castle with a letter.";
    let words = tokenizer.encode(text, true).unwrap();
    let prompts: Vec<&[u32]> = (8..words.len()).take(28).map(|end| &words[..end]).collect();
    let original = all_logprobs(&golden_dir(DEMO), &prompts);
    let cost = |dir: &Path| {
        let found = all_logprobs(dir, &prompts);
        let squares = found.iter().zip(&original).map(|(a, b)| difference(a, b).powi(2));
        (squares.sum::<f64>() / prompts.len() as f64).sqrt()
    };
    let (plain, aware) = (cost(&plain), cost(&aware));
    eprintln!("errors of log-probabilities: {plain:.3} in int4, {aware:.3} in int4-awq");
    assert!(aware < plain, "{aware} with calibration, {plain} without");
}

#[test]
fn layers_with_a_recurrent_state_are_calibrated_and_quantized() {
    let dir = tempfile::tempdir().unwrap();
    let (source, out, text) = (dir.path().join("source"), dir.path().join("out"), dir.path().join("text"));
    fs::create_dir(&source).unwrap();
    for (from, names) in [
        (golden_dir("nemotron_h_dense"), ["config.json", "model.safetensors"]),
        (golden_dir(DEMO), ["tokenizer.json", "tokenizer_config.json"]),
    ] {
        names.iter().for_each(|name| _ = fs::copy(from.join(name), source.join(name)).unwrap());
    }
    // Bytes alone: the vocabulary of the model has no other tokens of the demo's.
    fs::write(&text, "0123456789~#%&@".repeat(80)).unwrap();
    run(&QuantizeArgs { calibration: Some(text), ..args(source.clone(), Format::Int4Awq, out.clone()) }).unwrap();
    let plain = dir.path().join("plain");
    run(&args(source.clone(), Format::Int4, plain.clone())).unwrap();
    let config = fs::read_to_string(out.join("config.json")).unwrap();
    assert!(!config.contains("mixer.in_proj") && config.contains("lm_head"), "{config}");
    let prompt = [5, 17, 3, 99, 42, 7, 120, 61];
    let [aware, plain] = [out, plain].map(|dir| difference(&logprobs(&dir, &prompt), &logprobs(&source, &prompt)));
    eprintln!("errors of log-probabilities: {plain:.3} in int4, {aware:.3} in int4-awq");
    // The text is none that the model knows, so it may cost something.
    assert!(aware > 1e-4 && aware < 1.5 * plain, "{aware} with calibration, {plain} without");
}
