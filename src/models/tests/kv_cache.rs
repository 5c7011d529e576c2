//! Compares models whose keys and values are codes of 8 bits with transformers in fp32, whose cache rounds by the same formula
//! (scripts/goldens/make_kv_cache_goldens.py).

#[allow(dead_code)]
mod support;

use device::cpu::WeightPrecision;
use engine::{SampledToken, SamplingParams};
use models::Config;
use serde_json::Value;
use settings::KvCacheType::{self, Fp8, Int8};
use support::{Runner, Sequence, golden_dir, on_changed};

fn read(path: &str) -> Value {
    serde_json::from_slice(&std::fs::read(golden_dir(path)).unwrap()).unwrap()
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

/// Prompts of a case, with the logits behind them without rounding and with it.
fn goldens(case: &str, kind: KvCacheType) -> Vec<(Vec<u32>, [Vec<f64>; 2])> {
    let (plain, rounded) = (read(&format!("{case}/golden.json")), read("kv_cache.json"));
    let sequences = plain["sequences"].as_array().unwrap();
    let rounded = rounded[case][kind.name()].as_array().unwrap();
    let one = |(sequence, rounded): (&Value, &Value)| {
        let prompt = numbers(&sequence["prompt"]).into_iter().map(|token| token as u32).collect();
        (prompt, [numbers(&sequence["logits"]), numbers(rounded)])
    };
    sequences.iter().zip(rounded).map(one).collect()
}

fn sequence(prompt: &[u32], num_tokens: usize, chunk: usize) -> Sequence {
    let sampling = SamplingParams { num_logprobs: Some(1 << 10), ..SamplingParams::default() };
    Sequence { prompt: prompt.to_vec(), num_tokens, sampling, chunk, start: 0, adapter: None }
}

/// Root mean square of the errors of the log-probabilities, relative to the size of the logits.
fn error(logits: &[f64], output: &SampledToken) -> f64 {
    let max = logits.iter().copied().fold(f64::MIN, f64::max);
    let total = logits.iter().map(|x| (x - max).exp()).sum::<f64>().ln() + max;
    let count = logits.len() as f64;
    let mean = logits.iter().sum::<f64>() / count;
    let size = (logits.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / count).sqrt();
    let square = |(token, p): &(engine::TokenId, f32)| (f64::from(*p) - logits[token.0 as usize] + total).powi(2);
    assert_eq!(output.top.len(), logits.len(), "all log-probabilities are reported");
    (output.top.iter().map(square).sum::<f64>() / count).sqrt() / size
}

/// The rounding itself is part of the reference. The weights are in f32, so the order of sums remains, which moves hardly an element over the
/// border between two codes.
#[test]
fn log_probabilities_are_those_of_keys_and_values_that_are_rounded() {
    for kind in [Fp8, Int8] {
        for (prompt, [plain, rounded]) in goldens("mha_bias_f32", kind) {
            let dir = golden_dir("mha_bias_f32");
            let config = Config::from_dir(&dir).unwrap().in_kv_cache(kind);
            let mut runner = Runner::with(&dir, config, 2, None, WeightPrecision::Checkpoint);
            let output = runner.run(&[sequence(&prompt, 1, 256)]).remove(0).remove(0);
            let (error, unrounded) = (error(&rounded, &output), error(&plain, &output));
            eprintln!("{kind}, {} tokens: error {error:.4}; without rounding {unrounded:.4}", prompt.len());
            assert!(error < 0.1 * unrounded, "{kind}: error {error}, without rounding {unrounded}");
        }
    }
}

/// A token's codes depend on nothing but the token, so chunks and neighbours change no bit.
#[test]
fn tokens_are_the_same_in_chunks_and_among_others() {
    for kind in [Fp8, Int8] {
        let prompts: Vec<_> = goldens("mha_bias_f32", kind).into_iter().map(|(prompt, _)| prompt).collect();
        let run = |sequences: &[Sequence]| -> Vec<Vec<_>> {
            let dir = golden_dir("llama3_gqa");
            let config = Config::from_dir(&dir).unwrap().in_kv_cache(kind);
            let outputs = Runner::with(&dir, config, 2, None, WeightPrecision::Checkpoint).run(sequences);
            let values = |output: Vec<SampledToken>| output.into_iter().map(|token| (token.token, token.top)).collect();
            outputs.into_iter().map(values).collect()
        };
        let of = |chunk: usize| -> Vec<Sequence> { prompts.iter().map(|prompt| sequence(prompt, 12, chunk)).collect() };
        let together = run(&of(256));
        for (index, prompt) in prompts.iter().enumerate() {
            assert!(run(&[sequence(prompt, 12, 256)])[0] == together[index], "{kind}: alone, prompt {index} differs");
        }
        for chunk in [1, 5, 16] {
            assert!(run(&of(chunk)) == together, "{kind}: chunks of {chunk} differ");
        }
    }
}

/// Workers hold whole KV heads, so they make the same codes as one worker.
#[test]
fn two_workers_give_what_one_gives() {
    let (prompt, [_, rounded]) = goldens("mha_bias_f32", Fp8).remove(2);
    for size in [1, 2] {
        let output = on_changed(
            "mha_bias_f32",
            size,
            |config| config.in_kv_cache(Fp8),
            |runner| runner.run(&[sequence(&prompt, 1, 16)]).remove(0).remove(0),
        );
        let error = error(&rounded, &output);
        assert!(error < 0.003, "{size} workers: error {error}");
    }
}
