//! Compares weights in 8 and 4 bits with transformers in fp32.
//!
//! First, as the CPU device holds them.//!
//! The error of a weight is uniform within half a step, and the largest of 64 weights is about 2.5 times their typical
//! size. So the error relative to this size is 2.5 / 127 / sqrt(12) in 8 bits and 2.5 / 8 / sqrt(12) in 4. Inputs have
//! 8 bits. The errors of the four linear layers of two decoder layers and of the head add as independent errors: 0.024
//! and 0.27 of the logits' size. Errors of q and k also change the softmax; a factor of three bounds this.
//!
//! Then as GPUs hold them, and CPUs expand them. In fp8 a weight's error is uniform within half a step of its own size, 1 in 16 at most
//! and 0.026 as a mean. In 4 bits with zero points it is uniform within half a step of a fifteenth of the range, which is five times the
//! weights' size: 0.096. In 8 bits the largest of a row of 64 to 256 weights is 2.5 to 3 times their size: 0.007. Eight linear layers give
//! 0.07, 0.27 and 0.02, and the same factor bounds them.

#[allow(dead_code)]
mod support;

use std::path::{Path, PathBuf};

use device::cpu::WeightPrecision::{self, Checkpoint, Fp8, Int4, Int8};
use engine::{SampledToken, SamplingParams};
use models::Config;
use ops::Target;
use support::{Runner, Sequence, golden_dir, on_changed};

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
    Sequence { prompt: prompt.to_vec(), num_tokens, sampling, chunk: 256, start: 0, adapter: None }
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
fn logits_of_weights_that_are_rounded_at_load_are_as_close_as_their_form_allows() {
    for case in CASES {
        for (precision, allowed) in [(Fp8, 0.21), (Int8, 0.06), (Int4, 0.81)] {
            let dir = golden_dir(case);
            let config = Config::from_dir(&dir).unwrap().in_precision(precision, Target::Cuda).unwrap();
            let mut runner = Runner::with(&dir, config, 2, None, Checkpoint);
            for golden in goldens(case) {
                let sequence = sequence(&golden.prompt, 1, Some(golden.logits.len() as u32));
                let output = runner.run(&[sequence]).remove(0);
                let error = error(&golden, &output[0]);
                eprintln!("{case} {precision:?} at load: error {error:.4} of the logits' size");
                // Without quantization the error is below 0.01.
                assert!(error > 0.01 && error <= allowed, "{case} {precision:?}: error {error}, allowed {allowed}");
            }
        }
    }
}

/// Workers hold parts of rows. If they rounded these on their own, scales would differ.
#[test]
fn weights_that_are_rounded_at_load_are_the_same_in_groups_of_any_size() {
    let golden = goldens("llama3_gqa").remove(0);
    for precision in [Fp8, Int8, Int4] {
        let logprobs = |size: u32| {
            let change = |config: Config| config.in_precision(precision, Target::Cuda).unwrap();
            on_changed("llama3_gqa", size, change, |runner| {
                let sequence = sequence(&golden.prompt, 1, Some(golden.logits.len() as u32));
                let mut top = runner.run(&[sequence]).remove(0).remove(0).top;
                top.sort_by_key(|(token, _)| token.0);
                top.into_iter().map(|(_, p)| p).collect::<Vec<_>>()
            })
        };
        let whole = logprobs(1);
        for size in [2, 4] {
            let parts = logprobs(size);
            let largest = whole.iter().zip(&parts).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
            // Sums of parts are rounded once more each; rounding by part would change weights by several per cent.
            assert!(largest < 0.02, "{precision:?} of {size} workers differs by {largest}");
        }
    }
}

#[test]
fn a_quantized_checkpoint_is_not_quantized_to_another_form() {
    let load = |case: &str, precision, target| {
        let config = Config::from_dir(&golden_dir(case)).unwrap();
        config.in_precision(precision, target).map(drop).map_err(|error| error.to_string())
    };
    for (case, own, other) in [
        ("llama_fp8", Fp8, Int4),
        ("phi3_fp8_channel", Fp8, Int4),
        ("llama_awq", Int4, Fp8),
        ("qwen2_gptq", Int4, Fp8),
        ("qwen3_w4a16", Int4, Fp8),
        ("phi3_w8a8", Int8, Int4),
    ] {
        assert_eq!(load(case, own, Target::Cuda), Ok(()), "{case}");
        let error = load(case, other, Target::Cuda).unwrap_err();
        assert!(error.contains("`quantization` asks for") && error.contains(other.name()), "{error}");
    }
    let nvfp4 = load("qwen3_nvfp4", Fp8, Target::Cpu).unwrap_err();
    assert!(nvfp4.contains("`quant_method` is `compressed-tensors`"), "{nvfp4}");
    // The CPU device's own integers are made of any weights.
    assert_eq!(load("llama_awq", Int8, Target::Cpu), Ok(()));
}

/// Each form that checkpoints have, as it is and with the CPU device's own 8 bits made of it.
#[test]
fn quantized_checkpoints_are_computed_as_exactly_as_their_values_in_bf16() {
    for case in [
        "llama_awq",
        "llama_fp8",
        "llama_gptq_v2",
        "llama_mxfp4",
        "mistral_w5_asym",
        "phi3_fp8_channel",
        "phi3_w8a8",
        "qwen2_gptq",
        "qwen2_modelopt",
        "qwen3_moe_fp8",
        "qwen3_nvfp4",
        "qwen3_w4a16",
        "gpt_oss_mxfp4",
        "llama_mxfp8",
        "llama_w8a16",
        "llama_gptq_sym",
        "qwen2_gptq_dynamic",
        "mistral_fp8_static",
        "phi3_modelopt_fp8",
        "qwen3_mixed",
        "qwen3_modelopt_mixed",
    ] {
        // The reference computes in fp32 with the values that the form's own program reads, rounded to bf16.
        let largest = |precision| {
            let mut runner = Runner::of(&golden_dir(case), 2, None, precision);
            let errors = goldens(case).into_iter().map(|golden| {
                let sequence = sequence(&golden.prompt, 1, Some(golden.logits.len() as u32));
                error(&golden, &runner.run(&[sequence]).remove(0)[0])
            });
            errors.fold(0f64, f64::max)
        };
        let (own, int8) = (largest(Checkpoint), largest(Int8));
        eprintln!("{case}: error {own:.4} of the logits' size, {int8:.4} in 8 bits made of it");
        // Inputs of eight layers and a head are rounded to bf16, a uniform error within 2^-9: 0.0034 in all. A factor of five bounds what the
        // softmaxes of attention and of experts make of it. 8 bits add what they add to unquantized weights.
        assert!(own <= 0.017, "{case}: error {own}");
        assert!(int8 <= 0.017 + 0.072, "{case} in 8 bits: error {int8}");
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
    assert!(equal(Fp8) > 0.2);
    equal(Int4);
}

fn demo(precision: WeightPrecision) -> Runner {
    let dir: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../model_repository/tensorrt_llm/1");
    Runner::of(&dir, 2, None, precision)
}
