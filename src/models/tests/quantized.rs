//! Compares weights in 8 and 4 bits with transformers in fp32.
//!
//! The error of a weight is uniform within half a step, and the largest of 64 weights is about 2.5 times their typical
//! size. So the error relative to this size is 2.5 / 127 / sqrt(12) in 8 bits and 2.5 / 8 / sqrt(12) in 4. Inputs have
//! 8 bits. The errors of the four linear layers of two decoder layers and of the head add as independent errors: 0.024
//! and 0.27 of the logits' size. Errors of q and k also change the softmax; a factor of three bounds this.

#[allow(dead_code)]
mod support;

use std::path::{Path, PathBuf};

use device::cpu::WeightPrecision::{self, Int4, Int8};
use engine::{SampledToken, SamplingParams};
use support::{Runner, Sequence, golden_dir};

const CASES: [&str; 4] = ["llama3_gqa", "tied_mqa", "qwen2", "gpt2"];

struct Golden {
    prompt: Vec<u32>,
    logits: Vec<f64>,
}

fn goldens(case: &str) -> Vec<Golden> {
    let text = std::fs::read(golden_dir(case).join("golden.json")).unwrap();
    let value: serde_json::Value = serde_json::from_slice(&text).unwrap();
    let numbers = |value: &serde_json::Value| -> Vec<f64> {
        value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
    };
    let golden = |value: &serde_json::Value| Golden {
        prompt: numbers(&value["prompt"]).into_iter().map(|x| x as u32).collect(),
        logits: numbers(&value["logits"]),
    };
    value["sequences"].as_array().unwrap().iter().map(golden).collect()
}

fn sequence(prompt: &[u32], num_tokens: usize, num_logprobs: Option<u32>) -> Sequence {
    let sampling = SamplingParams { num_logprobs, ..SamplingParams::default() };
    Sequence { prompt: prompt.to_vec(), num_tokens, sampling, chunk: 256, start: 0 }
}

/// Root mean square of the errors of the log-probabilities, relative to the size of the logits.
fn error(golden: &Golden, output: &SampledToken) -> f64 {
    let max = golden.logits.iter().copied().fold(f64::MIN, f64::max);
    let total = golden.logits.iter().map(|x| (x - max).exp()).sum::<f64>().ln() + max;
    let count = golden.logits.len() as f64;
    let mean = golden.logits.iter().sum::<f64>() / count;
    let size = (golden.logits.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / count).sqrt();
    let square =
        |(token, p): &(engine::TokenId, f32)| (f64::from(*p) - golden.logits[token.0 as usize] + total).powi(2);
    (output.top.iter().map(square).sum::<f64>() / count).sqrt() / size
}

#[test]
fn logits_of_quantised_weights_are_as_close_as_their_bits_allow() {
    for case in CASES {
        for (precision, allowed) in [(Int8, 0.072), (Int4, 0.81)] {
            let mut runner = Runner::of(&golden_dir(case), 2, None, precision);
            for golden in goldens(case) {
                let sequence = sequence(&golden.prompt, 1, Some(golden.logits.len() as u32));
                let output = runner.run(&[sequence]).remove(0);
                let error = error(&golden, &output[0]);
                eprintln!("{case} {precision:?}: error {error:.4} of the logits' size");
                assert!(error <= allowed, "{case} {precision:?}: error {error}, allowed {allowed}");
            }
        }
    }
}

#[test]
fn a_quantised_model_gives_a_row_the_same_tokens_alone_and_among_others() {
    for precision in [Int8, Int4] {
        let mut runner = Runner::of(&golden_dir("llama3_gqa"), 2, None, precision);
        let sequences: Vec<Sequence> =
            goldens("llama3_gqa").iter().map(|one| sequence(&one.prompt, 12, None)).collect();
        let together = runner.run(&sequences);
        for (sequence, together) in sequences.iter().zip(together) {
            let alone = runner.run(std::slice::from_ref(sequence)).remove(0);
            let tokens = |row: &[SampledToken]| row.iter().map(|token| token.token).collect::<Vec<_>>();
            assert_eq!(tokens(&alone), tokens(&together), "{precision:?}");
        }
    }
}

/// A trained model keeps its tokens; a random one would not.
#[test]
fn the_demo_model_generates_nearly_the_same_text_in_eight_bits() {
    let equal = |precision: WeightPrecision| {
        let (mut plain, mut quantised) = (demo(WeightPrecision::Checkpoint), demo(precision));
        let (mut equal, mut all) = (0, 0);
        for seed in 0..4u32 {
            let prompt: Vec<u32> = (0..6).map(|index| 100 + (seed * 131 + index * 37) % 800).collect();
            let sequence = sequence(&prompt, 32, None);
            let (plain, other) = (
                plain.run(std::slice::from_ref(&sequence)).remove(0),
                quantised.run(std::slice::from_ref(&sequence)).remove(0),
            );
            equal += plain.iter().zip(&other).take_while(|(a, b)| a.token == b.token).count();
            all += plain.len();
        }
        eprintln!(
            "demo model {precision:?}: {equal} of {all} greedy tokens are the checkpoint's before the first that differs"
        );
        equal as f64 / all as f64
    };
    assert!(equal(Int8) > 0.5);
    equal(Int4);
}

fn demo(precision: WeightPrecision) -> Runner {
    let dir: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../model_repository/tensorrt_llm/1");
    Runner::of(&dir, 2, None, precision)
}
