//! Compares whole models with transformers in fp32 (`scripts/goldens/make_goldens.py`), and with themselves.
//!
//! Tolerance of a log-probability with bf16 weights: the inputs of all four linear layers and q, k and v are rounded to
//! bf16, each with a relative error uniform within 2^-9. Errors of q and k also change the softmax. This gives 8
//! roundings per layer and one at the head, which add as independent errors of `2^-9 / sqrt(3)` of the logits' size.
//! The error of the likeliest logit changes the sum as well, which adds the same amount again. Six standard deviations
//! bound the maximum of some hundred values. With f16 and f32 weights the inputs are f32: the count is the same, with
//! 2^-20 for sums of some hundred terms in either order.

#[allow(dead_code)]
mod support;

use device::cpu::WeightPrecision;
use engine::{SampledToken, SamplingParams};
use models::Config;
use ops::DType;
use support::{BLOCK_SIZE, MAX_ROWS, Runner, Sequence, golden_dir, on_changed, on_group, on_parts, on_stages};

const CASES: [&str; 154] = [
    "llama3_gqa",
    "tied_mqa",
    "mha_bias_f32",
    "dim80_f16",
    "mistral_window",
    "qwen2",
    "qwen3",
    "gpt2",
    "internlm",
    "internlm2",
    "baichuan2_7b",
    "baichuan2_13b_f32",
    "gemma",
    "gemma2",
    "gemma3",
    "phi3",
    "phi3_longrope",
    "phi",
    "granite",
    "olmo",
    "olmo2",
    "olmo3",
    "cohere",
    "cohere2",
    "smollm3",
    "exaone4",
    "glm",
    "glm4",
    "stablelm",
    "stablelm_parallel",
    "gpt_neox",
    "gpt_neox_serial",
    "falcon_7b",
    "falcon_40b",
    "falcon_serial",
    "starcoder2",
    "nemotron",
    "arcee",
    "seed_oss",
    "helium",
    "ernie4_5",
    "ministral",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "granite_moe",
    "ministral3",
    "gemma4",
    "gemma4_shared",
    "gemma4_moe",
    "gpt_oss",
    "gpt_oss_mxfp4",
    "llama4",
    "apertus",
    "cwm",
    "vaultgemma",
    "hyperclovax",
    "hyperclovax_granite",
    "jais2",
    "nanochat",
    "opt",
    "bloom",
    "gptj",
    "gpt_bigcode",
    "gpt_bigcode_mha",
    "granite_moe_shared",
    "flex_olmo",
    "mellum",
    "glm4_moe",
    "dots1",
    "minimax_m2",
    "exaone_moe",
    "ernie4_5_moe",
    "llama_fp8",
    "qwen3_moe_fp8",
    "phi3_fp8_channel",
    "llama_awq",
    "qwen2_gptq",
    "llama_gptq_v2",
    "qwen3_w4a16",
    "mistral_w5_asym",
    "phi3_w8a8",
    "qwen3_nvfp4",
    "llama_mxfp4",
    "qwen2_modelopt",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_vision",
    "qwen3_5_moe",
    "qwen3_5_moe_vision",
    "qwen3_5_moe_fp8",
    "gemma3_vision",
    "mistral3_vision",
    "gemma4_vision",
    "llama4_vision",
    "qwen2_5_vl_vision",
    "qwen3_vl_vision",
    "qwen3_vl_moe_vision",
    "solar_open",
    "hy_v3",
    "afmoe",
    "granite_swa",
    "granitemoe_swa",
    "stablelm_12b",
    "deepseek_v2",
    "deepseek_v2_groups",
    "deepseek_v3",
    "deepseek_v3_halves",
    "deepseek_v3_fp8",
    "glm4_moe_lite",
    "youtu",
    "minicpm3",
    "kimi_k25_vision",
    "exaone4_5_vision",
    "glm4v_vision",
    "glm4v_moe_vision",
    "glm46v_vision",
    "gpt_neo",
    "granite_moe_hybrid",
    "granite_hybrid_dense",
    "bamba",
    "nemotron_h",
    "nemotron_h_dense",
    "nemotron_h_latents",
    "lfm2",
    "lfm2_moe",
    "lfm2_vl_vision",
    "olmo_hybrid",
    "hunyuan_dense",
    "hunyuan_moe",
    "phimoe",
    "mistral4",
    "cohere2_moe",
    "cohere2_moe_sum",
    "falcon_h1",
    "falcon_h1_normed",
    "gemma4_unified_vision",
    "phi4_multimodal",
    "phi4_mm",
    "mimo_v2",
    "mimo_v2_fp8",
    "mimo_v2_published",
    "kimi_linear",
    "kimi_linear_published",
    "llama_mxfp8",
    "llama_w8a16",
    "llama_gptq_sym",
    "qwen2_gptq_dynamic",
    "mistral_fp8_static",
    "phi3_modelopt_fp8",
    "qwen3_mixed",
    "qwen3_modelopt_mixed",
    "bailing_moe_v2",
];

/// One norm of all value heads: refused for several workers.
const UNDIVIDED: [&str; 3] = ["granite_moe_hybrid", "granite_hybrid_dense", "bamba"];

fn is_divided(case: &str, size: u32) -> bool {
    size == 1 || !UNDIVIDED.contains(&case)
}

#[test]
fn workers_do_not_share_a_norm_of_all_value_heads() {
    for case in UNDIVIDED {
        let config = models::Config::from_dir(&golden_dir(case)).unwrap();
        let error = models::shard::check(&config, 2).unwrap_err().to_string();
        assert!(error.contains("of which 4 are normed together"), "{error}");
    }
}

struct Golden {
    prompt: Vec<u32>,
    logits: Vec<f64>,
    tokens: Vec<u32>,
    margins: Vec<f64>,
}

fn goldens(case: &str) -> Vec<Golden> {
    let text = std::fs::read(golden_dir(case).join("golden.json")).unwrap();
    let value: serde_json::Value = serde_json::from_slice(&text).unwrap();
    let numbers = |value: &serde_json::Value| -> Vec<f64> {
        value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
    };
    let ids = |value: &serde_json::Value| numbers(value).into_iter().map(|x| x as u32).collect();
    let golden = |value: &serde_json::Value| Golden {
        prompt: ids(&value["prompt"]),
        logits: numbers(&value["logits"]),
        tokens: ids(&value["tokens"]),
        margins: numbers(&value["margins"]),
    };
    value["sequences"].as_array().unwrap().iter().map(golden).collect()
}

fn tolerance(case: &str, logits: &[f64]) -> f64 {
    let config = models::Config::from_dir(&golden_dir(case)).unwrap();
    let mean = logits.iter().sum::<f64>() / logits.len() as f64;
    let size = (logits.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / logits.len() as f64).sqrt();
    let roundings = 2.0 * (8.0 * config.num_layers() as f64 + 1.0);
    let unit = if config.dtype == DType::Bf16 { 2f64.powi(-9) } else { 2f64.powi(-20) };
    6.0 * unit / 3f64.sqrt() * roundings.sqrt() * size
}

fn log_softmax(logits: &[f64]) -> Vec<f64> {
    let max = logits.iter().copied().fold(f64::MIN, f64::max);
    let total = logits.iter().map(|x| (x - max).exp()).sum::<f64>().ln() + max;
    logits.iter().map(|x| x - total).collect()
}

/// Greedy sampling that reports the log-probability of the whole vocabulary at every step.
fn sequence(golden: &Golden) -> Sequence {
    let sampling = SamplingParams { num_logprobs: Some(golden.logits.len() as u32), ..SamplingParams::default() };
    Sequence {
        prompt: golden.prompt.clone(),
        num_tokens: golden.tokens.len(),
        sampling,
        chunk: 256,
        start: 0,
        adapter: None,
    }
}

/// Checks that the output agrees with the reference within rounding. Returns the number of equal tokens. `run` names what
/// was run; `scripts/goldens/error_table.py` reads the line that is printed.
fn check(case: &str, run: &str, golden: &Golden, output: &[SampledToken]) -> usize {
    let allowed = tolerance(case, &golden.logits);
    let expected = log_softmax(&golden.logits);
    let worst = output[0].top.iter().map(|(token, p)| (f64::from(*p) - expected[token.0 as usize]).abs());
    let worst = worst.fold(0.0, f64::max);
    assert_eq!(output[0].top.len(), golden.logits.len());
    assert!(worst <= allowed, "{case}, {run}: a logit is off by {worst:.2e}, allowed {allowed:.2e}");
    let equal = output.iter().zip(&golden.tokens).take_while(|(ours, theirs)| ours.token.0 == **theirs).count();
    if let Some(margin) = golden.margins.get(equal) {
        assert!(
            *margin <= 2.0 * allowed,
            "{case}, {run}: token {equal} differs at a margin of {margin}, allowed {allowed:.2e}"
        );
    }
    let tokens = golden.tokens.len();
    eprintln!("{case}, {run}: logits within {worst:.1e} of {allowed:.1e} allowed, {equal} of {tokens} tokens");
    equal
}

/// Compares a model with transformers at world sizes 1, 2 and 4; experts also in parts of a group.
fn check_case(case: &str) {
    let goldens = goldens(case);
    let config = models::Config::from_dir(&golden_dir(case)).unwrap();
    let counts: Vec<usize> =
        config.layers.iter().filter_map(|l| l.experts.map(|experts| experts.num_experts)).collect();
    let has_halves = !counts.is_empty() && counts.iter().all(|count| count.is_multiple_of(2));
    let layouts = [(1, 1), (2, 1), (4, 1), (2, 2), (4, 2)];
    let layouts = layouts.into_iter().filter(|&(size, parts)| is_divided(case, size) && (parts == 1 || has_halves));
    for (size, parts) in layouts {
        let outputs = on_parts(case, size, parts, |runner| {
            goldens.iter().map(|golden| runner.run(&[sequence(golden)]).remove(0)).collect::<Vec<_>>()
        });
        let run = format!("{size} workers in {parts} parts");
        let pairs = goldens.iter().zip(&outputs);
        let equal: usize = pairs.map(|(golden, output)| check(case, &run, golden, output)).sum();
        let all: usize = goldens.iter().map(|golden| golden.tokens.len()).sum();
        // With random weights near ties are frequent, so sequences soon differ.
        assert!(3 * equal > all, "{case}: only {equal} of {all} tokens were compared");
    }
}

#[test]
fn greedy_tokens_and_logits_agree_with_transformers_for_world_sizes_1_2_and_4() {
    let fails = |case: &&&str| std::panic::catch_unwind(|| check_case(case)).is_err();
    let failed: Vec<_> = CASES.iter().filter(fails).collect();
    assert!(failed.is_empty(), "these families differ from transformers: {failed:?}");
}

/// The same model with all layers twice.
fn doubled(mut config: Config) -> Config {
    for (index, layer) in config.layers.iter_mut().enumerate() {
        layer.numbers.get_or_insert([index; 2]);
    }
    config.layers.extend_from_within(..);
    config
}

#[test]
fn two_pipeline_stages_agree_with_transformers() {
    let mut undivided = Vec::new();
    for case in CASES {
        // A prompt in two chunks, and three tokens behind the first.
        let mut golden = goldens(case).swap_remove(0);
        golden.tokens.truncate(4);
        golden.margins.truncate(4);
        let chunked = Sequence { chunk: golden.prompt.len().div_ceil(2), ..sequence(&golden) };
        let run = |runner: &mut Runner| runner.run(std::slice::from_ref(&chunked)).remove(0);
        if let Ok(output) = on_stages(case, |config| config, run) {
            check(case, "2 stages", &golden, &output);
            continue;
        }
        // Each stage needs a layer with attention. With all layers twice both have one, and the sums are those of one worker.
        match on_stages(case, doubled, run) {
            Ok(output) => assert_eq!(output, on_changed(case, 1, doubled, run), "{case}"),
            Err(_) => undivided.push(case),
        }
    }
    // Layers that share keys and values, or have an embedding for each, stand in one stage.
    assert_eq!(undivided, ["gemma4_shared", "gemma4_unified_vision"]);
}

/// 32 sequences that join at different steps, with prompts in different chunks and different sampling.
fn mixed_sequences(goldens: &[Golden]) -> Vec<Sequence> {
    let mut mixed_sequences: Vec<Sequence> = goldens.iter().map(sequence).collect();
    while mixed_sequences.len() < MAX_ROWS {
        let n = mixed_sequences.len();
        let mut other = mixed_sequences[n % goldens.len()].clone();
        let ids = goldens[0].logits.len() as u32 - 3;
        other.prompt.iter_mut().for_each(|token| *token = (*token * 7 + n as u32) % ids + 3);
        other.prompt.truncate(1 + n * 5 % 37);
        other.sampling.num_logprobs = None;
        other.sampling.temperature = (n % 2) as f32;
        other.chunk = 1 + n % 9;
        other.start = n % 5;
        mixed_sequences.push(other);
    }
    for (n, sequence) in mixed_sequences.iter_mut().take(goldens.len()).enumerate() {
        (sequence.chunk, sequence.start) = ([256, 3, 16][n % 3], n * 2);
    }
    mixed_sequences
}

/// Computes a prompt of which an earlier run has computed whole blocks. Models with recurrent states begin with a snapshot,
/// which `tests/hybrid.rs` tests.
fn is_the_same_behind_cached_blocks(runner: &mut Runner, golden: &Golden, alone: &[SampledToken]) -> bool {
    let cached = (golden.prompt.len() - 1) / BLOCK_SIZE * BLOCK_SIZE;
    if cached == 0 || runner.has_states() {
        return true;
    }
    runner.run_cached(&[sequence(golden)], cached).remove(0).as_slice() == alone
}

#[test]
fn a_sequence_is_bit_identical_alone_and_among_32_in_any_chunks_behind_cached_blocks_on_any_number_of_threads() {
    for case in CASES {
        let goldens = goldens(case);
        for size in [1, 2].into_iter().filter(|size| is_divided(case, *size)) {
            let (alone, among) = on_group(case, size, |runner| {
                let mut alone = Vec::new();
                for golden in &goldens {
                    alone.push(runner.run(&[sequence(golden)]).remove(0));
                    assert!(is_the_same_behind_cached_blocks(runner, golden, alone.last().unwrap()), "{case}");
                }
                let mut among = runner.run(&mixed_sequences(&goldens));
                among.truncate(goldens.len());
                (alone, among)
            });
            for (alone, among) in alone.iter().zip(&among) {
                assert!(alone.iter().zip(among).all(|(a, b)| (a.token, &a.top) == (b.token, &b.top)), "{case}");
            }
        }
        let outputs: Vec<_> = [1, 2, 3]
            .map(|threads| Runner::new(case, threads, None).run(&mixed_sequences(&goldens)))
            .into_iter()
            .collect();
        assert!(outputs[0] == outputs[1] && outputs[1] == outputs[2], "{case}: threads change the result");
    }
}

#[test]
fn every_instruction_set_agrees_with_transformers() {
    for case in CASES {
        for isa in kernels::cpu::Isa::available() {
            let mut runner = Runner::new(case, 1, None);
            runner.device().set_isa(isa);
            for golden in goldens(case) {
                check(case, &format!("{isa:?}"), &golden, &runner.run(&[sequence(&golden)])[0]);
            }
        }
    }
}

/// transformers keeps a head apart whose values differ from the embedding's, whatever `tie_word_embeddings` says.
#[test]
fn a_head_of_its_own_is_used_although_the_configuration_ties_it() {
    let case = "llama3_gqa";
    let (source, dir) = (golden_dir(case), tempfile::tempdir().unwrap());
    std::fs::copy(source.join("model.safetensors"), dir.path().join("model.safetensors")).unwrap();
    let config = std::fs::read_to_string(source.join("config.json")).unwrap();
    let tied = config.replace("\"tie_word_embeddings\": false", "\"tie_word_embeddings\": true");
    assert_ne!(config, tied);
    std::fs::write(dir.path().join("config.json"), tied).unwrap();
    let mut runner = Runner::of(dir.path(), 1, None, WeightPrecision::Checkpoint);
    for golden in goldens(case) {
        check(case, "tied", &golden, &runner.run(&[sequence(&golden)])[0]);
    }
}

/// The checkpoint with its stacks of experts `[experts, rows, cols]` in the other order of rows and columns.
fn with_transposed_experts(file: &[u8]) -> Vec<u8> {
    let len = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let mut header: serde_json::Value = serde_json::from_slice(&file[8..8 + len]).unwrap();
    let mut data = file[8 + len..].to_vec();
    for (_, entry) in header.as_object_mut().unwrap().iter_mut().filter(|(name, _)| name.contains(".experts.")) {
        let [count, rows, cols]: [usize; 3] = serde_json::from_value(entry["shape"].clone()).unwrap();
        let [start, end]: [usize; 2] = serde_json::from_value(entry["data_offsets"].clone()).unwrap();
        let stored = data[start..end].to_vec();
        let element_size = stored.len() / (count * rows * cols);
        let place = |expert: usize, row: usize, col: usize| ((expert * rows + row) * cols + col) * element_size;
        let order = (0..count).flat_map(|e| (0..cols).flat_map(move |c| (0..rows).map(move |r| (e, r, c))));
        let turned: Vec<u8> = order.flat_map(|(e, r, c)| stored[place(e, r, c)..][..element_size].to_vec()).collect();
        data[start..end].copy_from_slice(&turned);
        entry["shape"] = serde_json::json!([count, cols, rows]);
    }
    let header = header.to_string().into_bytes();
    [&(header.len() as u64).to_le_bytes(), &header[..], &data].concat()
}

#[test]
fn stacks_of_experts_are_read_in_either_order_of_rows_and_columns() {
    let case = "qwen3_vl_moe_vision";
    let (source, dir) = (golden_dir(case), tempfile::tempdir().unwrap());
    let file = std::fs::read(source.join("model.safetensors")).unwrap();
    std::fs::write(dir.path().join("model.safetensors"), with_transposed_experts(&file)).unwrap();
    std::fs::copy(source.join("config.json"), dir.path().join("config.json")).unwrap();
    let mut runner = Runner::of(dir.path(), 1, None, WeightPrecision::Checkpoint);
    for golden in goldens(case) {
        check(case, "transposed", &golden, &runner.run(&[sequence(&golden)])[0]);
    }
}
