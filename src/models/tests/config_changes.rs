//! Every number and flag of `config.json` is changed in turn, and every field is removed and set to null
//! (`scripts/goldens/make_config_goldens.py`). The changed checkpoint must be refused, or computed as transformers does: a
//! field never changes what transformers computes and leaves Trireme's results as they were.

#[allow(dead_code)]
mod support;

use std::num::NonZero;
use std::path::Path;
use std::thread;

use device::cpu::WeightPrecision;
use engine::SamplingParams;
use models::Config;
use serde_json::Value;
use support::{Runner, Sequence, golden_dir};

/// Longer than the windows of the checkpoints.
const PROMPT: [u32; 30] = [
    5, 17, 3, 99, 42, 7, 120, 61, 30, 8, 77, 23, 150, 64, 11, 91, 38, 172, 6, 55, 140, 29, 83, 12, 101, 47, 68, 133,
    19, 74,
];

/// transformers chooses between two lists of factors by the length of each sequence, Trireme once for all sequences.
const CHOSEN_AT_LOAD: (&str, &str) = ("phi3_longrope", "original_max_position_embeddings");

/// `config` with another value of the field at `path`, or without it.
fn changed(config: &Value, path: &str, value: Option<&Value>) -> Value {
    let mut config = config.clone();
    let (outer, name) = path.rsplit_once('.').unwrap_or(("", path));
    let pointer = outer.split('.').filter(|part| !part.is_empty()).map(|part| format!("/{part}")).collect::<String>();
    let object = config.pointer_mut(&pointer).and_then(Value::as_object_mut).expect("the object exists");
    let old = match value {
        Some(value) => object.insert(name.to_owned(), value.clone()),
        None => object.remove(name),
    };
    old.expect("the field exists");
    config
}

/// Log-probabilities of the first tokens after the prompt, or `None` if the checkpoint is refused.
fn run(dir: &Path) -> Option<Vec<f64>> {
    let config = Config::from_dir(dir).ok()?;
    let vocab = config.vocab_size as u32;
    let mut runner = Runner::try_of(dir, WeightPrecision::Checkpoint)?;
    let sampling = SamplingParams { num_logprobs: Some(vocab), ..SamplingParams::default() };
    let sequence = Sequence { prompt: PROMPT.to_vec(), num_tokens: 1, sampling, chunk: 256, start: 0, adapter: None };
    let mut top = runner.run(&[sequence]).remove(0).remove(0).top;
    top.sort_by_key(|(token, _)| token.0);
    Some(top.iter().map(|(_, p)| f64::from(*p)).collect())
}

/// The logits that transformers computes with a changed field. A null that it refuses must mean the same as an absent field.
fn expected<'a>(entry: &'a Value, entries: &'a [Value]) -> &'a Value {
    if !entry["logits"].is_null() || entry.get("value") != Some(&Value::Null) {
        return &entry["logits"];
    }
    let is_absent = |other: &&Value| {
        (&other["case"], &other["field"]) == (&entry["case"], &entry["field"]) && other.get("value").is_none()
    };
    &entries.iter().find(is_absent).expect("fields that are set to null are also removed")["logits"]
}

/// How many of `part` are served, and which of them differ from transformers. `entries` are all.
fn compare(part: &[Value], entries: &[Value]) -> (usize, Vec<String>) {
    let (mut served, mut wrong) = (0, Vec::new());
    for entry in part {
        let (case, field) = (entry["case"].as_str().unwrap(), entry["field"].as_str().unwrap());
        if (case, field) == CHOSEN_AT_LOAD {
            continue;
        }
        let (source, dir) = (golden_dir(case), tempfile::tempdir().unwrap());
        let config: Value = serde_json::from_slice(&std::fs::read(source.join("config.json")).unwrap()).unwrap();
        std::os::unix::fs::symlink(source.join("model.safetensors"), dir.path().join("model.safetensors")).unwrap();
        let is_bf16 = config["dtype"] == "bfloat16";
        let config = changed(&config, field, entry.get("value"));
        std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
        let Some(found) = run(dir.path()) else { continue };
        served += 1;
        // Inputs of linear layers are rounded to bf16 if the weights are bf16.
        let allowed = if is_bf16 { 0.3 } else { 0.003 };
        // Differences of logits are those of log-probabilities.
        let expected = expected(entry, entries);
        let agrees = expected.as_array().is_some_and(|expected| {
            let expected: Vec<f64> = expected.iter().map(|x| x.as_f64().unwrap()).collect();
            let differs = |(a, b): (&f64, &f64)| ((a - found[0]) - (b - expected[0])).abs() > allowed;
            !found.iter().zip(&expected).any(differs)
        });
        if !agrees {
            let change = entry.get("value").map_or("absent".to_owned(), |value| format!("= {value}"));
            let theirs = if expected.is_null() { ", which transformers refuses" } else { "" };
            wrong.push(format!("{case}: `{field}` {change}{theirs}"));
        }
    }
    (served, wrong)
}

#[test]
fn a_changed_field_refuses_the_checkpoint_or_changes_it_as_in_transformers() {
    let goldens = golden_dir("").join("config_changes.json");
    let entries: Vec<Value> = serde_json::from_slice(&std::fs::read(goldens).unwrap()).unwrap();
    let cores = thread::available_parallelism().map_or(1, NonZero::get);
    // A device of these tests has one thread.
    let parts: Vec<_> = thread::scope(|scope| {
        let (entries, parts) = (&entries, entries.chunks(entries.len().div_ceil(cores)));
        let running: Vec<_> = parts.map(|part| scope.spawn(move || compare(part, entries))).collect();
        running.into_iter().map(|part| part.join().expect("no comparison panics")).collect()
    });
    let served: usize = parts.iter().map(|(served, _)| served).sum();
    let wrong: Vec<_> = parts.into_iter().flat_map(|(_, wrong)| wrong).collect();
    assert!(served * 4 > entries.len(), "only {served} of {} changed checkpoints were served", entries.len());
    assert!(wrong.is_empty(), "{} differ from transformers:\n{}", wrong.len(), wrong.join("\n"));
}
