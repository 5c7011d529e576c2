//! Compares models with adapters with transformers and PEFT in fp32 (`scripts/goldens/make_adapter_goldens.py`), and reads
//! adapters that do not fit.

#[allow(dead_code)]
mod support;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use device::cpu::WeightPrecision;
use engine::SamplingParams;
use models::{Adapter, AdapterBounds, AdapterTensors, Config};
use support::{Runner, Sequence, golden_dir, on_group};

const BOUNDS: AdapterBounds = AdapterBounds { max_rank: 16, max_bytes: 1 << 20 };

/// The adapters of one model, in the order of their slots.
const LLAMA: [&str; 3] = ["llama_qv", "llama_all", "llama_patterns"];

struct Golden {
    prompt: Vec<u32>,
    logits: Vec<f64>,
    tokens: Vec<u32>,
    margins: Vec<f64>,
}

fn adapter_dir(name: &str) -> PathBuf {
    golden_dir("adapters").join(name)
}

/// The outputs in a folder.
fn goldens(dir: &Path) -> Vec<Golden> {
    let value: serde_json::Value = serde_json::from_slice(&std::fs::read(dir.join("golden.json")).unwrap()).unwrap();
    let numbers = |value: &serde_json::Value| -> Vec<f64> {
        value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
    };
    let golden = |value: &serde_json::Value| Golden {
        prompt: numbers(&value["prompt"]).into_iter().map(|x| x as u32).collect(),
        logits: numbers(&value["logits"]),
        tokens: numbers(&value["tokens"]).into_iter().map(|x| x as u32).collect(),
        margins: numbers(&value["margins"]),
    };
    value["sequences"].as_array().unwrap().iter().map(golden).collect()
}

/// Reads an adapter as rank 0 does, and decodes it as workers do.
fn adapter(base: &str, name: &str) -> Adapter {
    let config = Config::from_dir(&golden_dir(base)).unwrap();
    let adapter = Adapter::read(&adapter_dir(name), &config, BOUNDS).unwrap();
    Adapter::from_bytes(&adapter.to_bytes()).unwrap()
}

fn sequence(golden: &Golden, adapter: Option<u32>, chunk: usize, start: usize) -> Sequence {
    let sampling = SamplingParams { num_logprobs: Some(golden.logits.len() as u32), ..SamplingParams::default() };
    Sequence { prompt: golden.prompt.clone(), num_tokens: golden.tokens.len(), sampling, chunk, start, adapter }
}

/// Checks log-probabilities and tokens. `allowed` bounds the error of a log-probability.
fn check(name: &str, golden: &Golden, output: &[engine::SampledToken], allowed: f64) {
    let max = golden.logits.iter().copied().fold(f64::MIN, f64::max);
    let total = golden.logits.iter().map(|x| (x - max).exp()).sum::<f64>().ln() + max;
    let error = |(token, p): &(engine::TokenId, f32)| (f64::from(*p) - golden.logits[token.0 as usize] + total).abs();
    let worst = output[0].top.iter().map(error).fold(0.0, f64::max);
    assert_eq!(output[0].top.len(), golden.logits.len());
    assert!(worst <= allowed, "{name}: a logit is off by {worst:.2e}, allowed {allowed:.2e}");
    let equal = output.iter().zip(&golden.tokens).take_while(|(ours, theirs)| ours.token.0 == **theirs).count();
    eprintln!("{name}: logits within {worst:.1e}, {equal} of {} tokens", golden.tokens.len());
    if let Some(margin) = golden.margins.get(equal) {
        assert!(*margin <= 2.0 * allowed, "{name}: token {equal} differs at a margin of {margin}");
    }
}

/// Logits are up to about ten, and kept with five digits; sums of some hundred terms are added in another order.
const F32_ERROR: f64 = 1e-4;
/// bf16 weights round the inputs of layers to 2^-9: see `golden_tokens.rs`.
const BF16_ERROR: f64 = 0.25;
/// Sums of weights and products are rounded to f16.
const F16_ERROR: f32 = 0.02;

#[test]
fn rows_of_three_adapters_and_of_none_agree_with_peft_in_one_step_in_any_chunks_and_world_sizes_1_and_2() {
    let base = "mha_bias_f32";
    let adapters = LLAMA.map(|name| adapter(base, name));
    let plain = goldens(&golden_dir(base));
    let changed = LLAMA.map(|name| goldens(&adapter_dir(name)));
    let all = || {
        let of_adapter =
            changed.iter().enumerate().flat_map(|(slot, goldens)| goldens.iter().map(move |it| (Some(slot), it)));
        plain.iter().map(|golden| (None, golden)).chain(of_adapter)
    };
    for size in [1, 2] {
        let (alone, among) = on_group(base, size, |runner| {
            adapters.iter().enumerate().for_each(|(slot, adapter)| runner.set_adapter(slot as u32, adapter));
            let alone: Vec<_> = all()
                .map(|(slot, golden)| runner.run(&[sequence(golden, slot.map(|it| it as u32), 256, 0)]).remove(0))
                .collect();
            let mixed = all()
                .enumerate()
                .map(|(n, (slot, golden))| sequence(golden, slot.map(|slot| slot as u32), [256, 3, 16][n % 3], n % 5));
            (alone, runner.run(&mixed.collect::<Vec<_>>()))
        });
        for ((slot, golden), (alone, among)) in all().zip(alone.iter().zip(&among)) {
            let name = slot.map_or(base, |slot| LLAMA[slot]);
            check(name, golden, among, F32_ERROR);
            let same = alone.iter().zip(among).all(|(a, b)| (a.token, &a.top) == (b.token, &b.top));
            assert!(same, "{name}: other rows change the result");
        }
        // An adapter that takes the slot of another one leaves nothing of it.
        let outputs = on_group(base, size, |runner| {
            runner.set_adapter(0, &adapters[1]);
            runner.set_adapter(0, &adapters[0]);
            changed[0].iter().map(|golden| runner.run(&[sequence(golden, Some(0), 7, 0)]).remove(0)).collect::<Vec<_>>()
        });
        changed[0].iter().zip(&outputs).for_each(|(golden, output)| check(LLAMA[0], golden, output, F32_ERROR));
    }
}

#[test]
fn adapters_of_fused_and_transposed_layers_and_of_other_head_orders_agree_with_peft() {
    ["phi3", "cohere", "gpt2"].into_iter().zip(["phi3_all", "cohere_qk", "gpt2_all"]).for_each(check_in_groups);
}

#[test]
fn adapters_of_attention_over_latent_vectors_and_of_shared_experts_agree_with_peft() {
    let bases = ["deepseek_v2", "deepseek_v3", "qwen2_moe"].into_iter();
    bases.zip(["deepseek_v2_attention", "deepseek_v3_attention", "qwen2_moe_all"]).for_each(check_in_groups);
}

#[test]
fn adapters_of_layers_with_a_recurrent_state_agree_with_peft() {
    ["qwen3_5", "qwen3_next"].into_iter().zip(["qwen3_5_all", "qwen3_next_attention"]).for_each(check_in_groups);
    check_in_groups(("granite_hybrid_dense", "granite_hybrid_mamba"));
    check_in_groups(("nemotron_h_dense", "nemotron_h_all"));
    check_in_groups(("lfm2", "lfm2_all"));
    check_in_groups(("olmo_hybrid", "olmo_hybrid_all"));
    check_in_groups(("falcon_h1", "falcon_h1_all"));
    check_in_groups(("kimi_linear", "kimi_linear_attention"));
}

#[test]
fn adapters_of_the_text_part_of_a_model_agree_with_peft() {
    check_in_groups(("phi4_multimodal", "phi4_multimodal_text"));
}

#[test]
fn adapters_of_padded_heads_agree_with_peft() {
    check_in_groups(("mimo_v2", "mimo_v2_attention"));
}

#[test]
fn adapters_of_attention_whose_gates_have_a_matrix_of_their_own_agree_with_peft() {
    check_in_groups(("afmoe", "afmoe_attention"));
}

/// Checks an adapter of a model by groups of one and, where they can share it, of two workers.
fn check_in_groups((base, name): (&str, &str)) {
    let adapter = adapter(base, name);
    let goldens = goldens(&adapter_dir(name));
    let config = Config::from_dir(&golden_dir(base)).unwrap();
    let allowed = if config.dtype == ops::DType::Bf16 { BF16_ERROR } else { F32_ERROR };
    for size in [1, 2].into_iter().filter(|&size| models::shard::check(&config, size).is_ok()) {
        let outputs = on_group(base, size, |runner| {
            runner.set_adapter(2, &adapter);
            goldens.iter().map(|it| runner.run(&[sequence(it, Some(2), 16, 0)]).remove(0)).collect::<Vec<_>>()
        });
        goldens.iter().zip(&outputs).for_each(|(golden, output)| check(name, golden, output, allowed));
    }
}

#[test]
fn rows_without_an_adapter_have_the_same_bits_beside_rows_with_one() {
    // Panels of bf16 weights fuse the gate where no row has an adapter.
    let case = "llama3_gqa";
    let mut runner = Runner::new(case, 1, None);
    let config = Config::from_dir(&golden_dir(case)).unwrap();
    let goldens = goldens(&golden_dir(case));
    let dir = rewritten("llama_qv", |_| {}, Some((&config, &["self_attn.q_proj", "mlp.up_proj", "mlp.down_proj"])));
    runner.set_adapter(0, &Adapter::read(dir.path(), &config, BOUNDS).unwrap());
    let alone: Vec<_> = goldens.iter().map(|it| runner.run(&[sequence(it, None, 256, 0)]).remove(0)).collect();
    let both = |golden| [sequence(golden, Some(0), 256, 0), sequence(golden, None, 256, 0)];
    for (golden, alone) in goldens.iter().zip(alone) {
        let outputs = runner.run(&both(golden));
        assert!(alone.iter().zip(&outputs[1]).all(|(a, b)| (a.token, &a.top) == (b.token, &b.top)));
        assert_ne!(outputs[0][0].top, outputs[1][0].top);
    }
}

#[test]
fn an_adapter_of_q_changes_the_gates_of_the_output_whose_rows_are_beside_those_of_q() {
    let base = "qwen3_next";
    let (goldens, module) = (goldens(&golden_dir(base)), "model.layers.1.self_attn.q_proj");
    let dir = rewritten("llama_qv", |_| {}, None);
    let tensor = |part: &str, shape| (format!("base_model.model.{module}.lora_{part}.weight"), shape);
    let tensors = [tensor("A", [4, 64]), tensor("B", [256, 4])];
    write_safetensors(&dir.path().join("adapter_model.safetensors"), &tensors);
    let config = Config::from_dir(&golden_dir(base)).unwrap();
    let adapter = Adapter::read(dir.path(), &config, BOUNDS).unwrap();
    // A and B are 0.1, of rank 4 and with the factor 2.
    let merged = merged(base, &format!("{module}.weight"), 0.08);
    let mut runner = Runner::of(merged.path(), 1, None, WeightPrecision::Checkpoint);
    let expected: Vec<_> = goldens.iter().map(|it| runner.run(&[sequence(it, None, 16, 0)]).remove(0)).collect();
    let error = |ours: &engine::SampledToken, theirs: &engine::SampledToken| {
        let theirs: BTreeMap<u32, f32> = theirs.top.iter().map(|(token, p)| (token.0, *p)).collect();
        ours.top.iter().map(|(token, p)| (p - theirs[&token.0]).abs()).fold(0.0, f32::max)
    };
    for size in [1, 2] {
        let outputs = on_group(base, size, |runner| {
            runner.set_adapter(0, &adapter);
            let run = |runner: &mut Runner, it, slot| runner.run(&[sequence(it, slot, 16, 0)]).remove(0).remove(0);
            goldens.iter().map(|it| [Some(0), None].map(|slot| run(runner, it, slot))).collect::<Vec<_>>()
        });
        for (expected, [adapted, plain]) in expected.iter().zip(&outputs) {
            let errors = [adapted, plain].map(|found| error(found, &expected[0]));
            assert!(errors[0] <= F16_ERROR && errors[1] > 10.0 * F16_ERROR, "{errors:?} in a group of {size}");
        }
    }
}

/// A copy of a checkpoint in f16 with `added` to each value of a tensor.
fn merged(base: &str, tensor: &str, added: f32) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(golden_dir(base).join("config.json"), dir.path().join("config.json")).unwrap();
    let mut bytes = std::fs::read(golden_dir(base).join("model.safetensors")).unwrap();
    let body = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..body]).unwrap();
    let offset = |index: usize| body + header[tensor]["data_offsets"][index].as_u64().unwrap() as usize;
    for value in bytes[offset(0)..offset(1)].as_chunks_mut().0 {
        *value = half::f16::from_f32(half::f16::from_le_bytes(*value).to_f32() + added).to_le_bytes();
    }
    std::fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
    dir
}

/// A copy of an adapter with another configuration, and with other tensors where `layout` has the modules of a model: A and B
/// are 0.1.
fn rewritten(
    name: &str,
    change: impl Fn(&mut serde_json::Value),
    layout: Option<(&Config, &[&str])>,
) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let text = std::fs::read(adapter_dir(name).join("adapter_config.json")).unwrap();
    let mut config = serde_json::from_slice(&text).unwrap();
    change(&mut config);
    std::fs::write(dir.path().join("adapter_config.json"), config.to_string()).unwrap();
    let weights = dir.path().join("adapter_model.safetensors");
    let Some((model, modules)) = layout else {
        std::fs::copy(adapter_dir(name).join("adapter_model.safetensors"), weights).unwrap();
        return dir;
    };
    let (attention, inner) = (&model.layers[0].attention, model.layers[0].mlp.unwrap().intermediate_size);
    let heads = attention.num_heads * attention.head_dim;
    let tensors = modules.iter().flat_map(|module| {
        let [rows, cols] = match *module {
            "mlp.up_proj" => [inner, model.hidden_size],
            "mlp.down_proj" => [model.hidden_size, inner],
            _ => [heads, model.hidden_size],
        };
        let tensor = |part: &str, shape: [usize; 2]| {
            (format!("base_model.model.model.layers.0.{module}.lora_{part}.weight"), shape)
        };
        [tensor("A", [4, cols]), tensor("B", [rows, 4])]
    });
    write_safetensors(&weights, &tensors.collect::<Vec<_>>());
    dir
}

/// Writes tensors full of 0.1.
fn write_safetensors(path: &Path, tensors: &[(String, [usize; 2])]) {
    write_filled(path, tensors, 0.1);
}

fn write_filled(path: &Path, tensors: &[(String, [usize; 2])], value: f32) {
    let (mut header, mut body) = (serde_json::Map::new(), Vec::new());
    for (name, shape) in tensors {
        let start = body.len();
        (0..shape[0] * shape[1]).for_each(|_| body.extend(value.to_le_bytes()));
        let entry = serde_json::json!({"dtype": "F32", "shape": shape, "data_offsets": [start, body.len()]});
        header.insert(name.clone(), entry);
    }
    let header = serde_json::Value::Object(header).to_string();
    let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &body].concat();
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn an_adapter_that_does_not_fit_is_refused_with_what_to_do() {
    let model = |case: &str| Config::from_dir(&golden_dir(case)).unwrap();
    let llama = model("mha_bias_f32");
    let error = |dir: &Path, config: &Config, bounds| Adapter::read(dir, config, bounds).unwrap_err().to_string();
    let refused = |dir: &Path| error(dir, &llama, BOUNDS);
    let missing = refused(Path::new("/no/such/adapter"));
    assert!(missing.starts_with("cannot read /no/such/adapter/adapter_config.json"), "{missing}");
    let other = error(&adapter_dir("llama_qv"), &model("llama3_gqa"), BOUNDS);
    assert!(other.contains("has shape") && other.contains("expected"), "{other}");
    let other = error(&adapter_dir("llama_qv"), &model("gpt2"), BOUNDS);
    assert!(other.contains("is none of the 2 layers of `GPT2LMHeadModel`"), "{other}");
    let large = error(&adapter_dir("llama_all"), &llama, AdapterBounds { max_rank: 7, ..BOUNDS });
    assert!(large.contains("rank 8 is above `max_lora_rank` 7"), "{large}");
    let heavy = error(&adapter_dir("llama_all"), &llama, AdapterBounds { max_bytes: 100, ..BOUNDS });
    assert!(heavy.contains("raise `lora_memory_bytes`"), "{heavy}");
    let rank = rewritten("llama_qv", |config| config["r"] = 5.into(), None);
    assert!(refused(rank.path()).contains("expected [5, 64] by the model and `adapter_config.json`"));
    let dora = rewritten("llama_qv", |config| config["use_dora"] = true.into(), None);
    assert!(refused(dora.path()).contains("field `use_dora` is true: DoRA is not served"));
    let tensors = [("base_model.model.lm_head.lora_A.weight".to_owned(), [4, 64])];
    write_safetensors(&rank.path().join("adapter_model.safetensors"), &tensors);
    assert!(refused(rank.path()).contains("adapters of heads and embeddings are not served"));
    let tensors = [("base_model.model.model.embed_tokens.lora_embedding_A".to_owned(), [4, 64])];
    write_safetensors(&rank.path().join("adapter_model.safetensors"), &tensors);
    assert!(refused(rank.path()).contains("lora_embedding_A` is not served"));
    let half = [("base_model.model.model.layers.1.mlp.up_proj.lora_A.weight".to_owned(), [5, 64])];
    write_safetensors(&rank.path().join("adapter_model.safetensors"), &half);
    assert!(refused(rank.path()).contains("layers.1.mlp.up_proj.lora_B.weight` is missing"));
    let [a, b] = ["A", "B"].map(|part| format!("base_model.model.model.layers.1.mlp.up_proj.lora_{part}.weight"));
    // Finite, but not in bf16.
    write_filled(&rank.path().join("adapter_model.safetensors"), &[(a, [5, 64]), (b, [136, 5])], f32::MAX);
    assert!(refused(rank.path()).contains("lora_A.weight` has values that are not finite"), "{}", refused(rank.path()));
    let unknown = [("base_model.model.model.layers.0.mlp.router.lora_A.weight".to_owned(), [5, 64])];
    write_safetensors(&rank.path().join("adapter_model.safetensors"), &unknown);
    let found = refused(rank.path());
    assert!(found.contains("in this layer they may change `self_attn.q_proj`, `self_attn.k_proj`"), "{found}");
    let [a, b] =
        ["A", "B"].map(|part| format!("base_model.model.model.layers.1.self_attn.kv_b_proj.lora_{part}.weight"));
    write_safetensors(&rank.path().join("adapter_model.safetensors"), &[(a, [5, 32]), (b, [128, 5])]);
    let found = error(rank.path(), &model("deepseek_v3"), BOUNDS);
    let known = "`self_attn.q_a_proj`, `self_attn.q_b_proj`, `self_attn.kv_a_proj_with_mqa`, `self_attn.o_proj`";
    assert!(
        found.contains("kv_b_proj` are not served; in this layer they may change") && found.contains(known),
        "{found}"
    );
}

#[test]
fn tensors_whose_rows_are_empty_or_too_long_to_count_are_refused() {
    let llama = Config::from_dir(&golden_dir("mha_bias_f32")).unwrap();
    for row_len in [0, 1, usize::MAX, usize::MAX / 2 + 1] {
        let tensors = AdapterTensors { config: &[[1, 0, 4]], weights: &[], dtype: ops::DType::F32, row_len };
        let error = Adapter::from_tensors(&llama, tensors, 16).unwrap_err().to_string();
        assert_eq!(error, "`lora_weights` has not the 1 rows of `lora_config`", "{row_len}");
    }
}
