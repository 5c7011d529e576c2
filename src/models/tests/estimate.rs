//! Memory estimates made before loading equal the memory that a device uses after loading.

use std::path::{Path, PathBuf};
use std::time::Duration;

use device::Estimator;
use device::cpu::{CpuConfig, CpuDevice, GroupConfig, WeightPrecision};
use ops::{Device, KvElements, MemoryEstimate, MemoryPlan, PipelineStage, StepLimits, Target, TensorParallel};
use settings::DeviceDrafter;

const BLOCK_SIZE: usize = 16;

fn golden_dir(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/goldens").join(case)
}

#[test]
fn estimates_of_the_cpu_are_what_it_takes() {
    for case in [
        "llama3_gqa",
        "tied_mqa",
        "mha_bias_f32",
        "gpt2",
        "baichuan2_7b",
        "phi",
        "cohere",
        "gemma3",
        "qwen2_moe",
        "gemma4",
        "gemma4_shared",
        "gemma4_moe",
        "gpt_oss",
        "llama4",
        "glm4_moe",
        "llama_fp8",
        "qwen3_moe_fp8",
        "qwen2_gptq",
        "qwen3_next",
        "qwen3_5_moe_vision",
        "deepseek_v2",
        "deepseek_v3_fp8",
        "granite_moe_hybrid",
        "nemotron_h_latents",
        "nemotron_h_dense",
        "lfm2_moe",
        "falcon_h1",
        "hunyuan_moe",
        "cohere2_moe",
        "mimo_v2",
        "kimi_linear",
        "mtp_qwen3_5",
        "mtp_deepseek_v3",
        "eagle3",
    ] {
        let dir = golden_dir(case);
        let config = models::Config::from_dir(&dir).unwrap();
        let drafter = match case {
            "eagle3" => Some(DeviceDrafter::Eagle3(dir.join("speculators"))),
            case => case.starts_with("mtp").then_some(DeviceDrafter::Mtp),
        };
        let config = match drafter {
            Some(drafter) => config.with_drafter(&drafter, WeightPrecision::Checkpoint, Target::Cpu).unwrap(),
            None => config,
        };
        let limits = StepLimits { max_tokens: 64, max_rows: 4, max_sequence_len: 128, vocab_size: config.vocab_size };

        let mut cpu =
            CpuDevice::new(CpuConfig { threads: 1, limits, kv_memory_bytes: Some(1 << 24), group: None }).unwrap();
        let model = models::load(&dir, &config, &mut cpu).unwrap();
        let found = cpu.memory_plan(&model.attention_spec(BLOCK_SIZE, limits.max_sequence_len)).unwrap();

        let mut estimator = Estimator::new(Target::Cpu, TensorParallel { rank: 0, size: 1 }, limits);
        let model = models::load(&dir, &config, &mut estimator).unwrap();
        let estimated = estimator.estimate(&model.attention_spec(BLOCK_SIZE, limits.max_sequence_len));

        assert_estimate(case, &estimated, &found);
    }
}

fn assert_estimate(case: &str, estimated: &MemoryEstimate, found: &MemoryPlan) {
    let pairs = [
        ("weights", estimated.weights_bytes, found.weights_bytes),
        ("workspace", estimated.workspace_bytes, found.workspace_bytes),
        ("block", estimated.block_bytes, found.block_bytes),
    ];
    for (what, estimated, found) in pairs {
        assert!(estimated.abs_diff(found) * 50 <= found, "{case}: {what} of {found} bytes, estimated {estimated}");
    }
}

#[test]
fn estimates_of_weights_that_are_quantized_at_load_are_what_they_take() {
    use WeightPrecision::{Fp8, Int4, Int8};
    for (case, precision) in [
        ("llama3_gqa", Int8),
        ("llama3_gqa", Int4),
        ("llama3_gqa", Fp8),
        ("tied_mqa", Int8),
        ("qwen2_moe", Int4),
        ("gpt2", Fp8),
        ("llama_awq", Int4),
    ] {
        let dir = golden_dir(case);
        let config = models::Config::from_dir(&dir).unwrap().in_precision(precision, Target::Cpu).unwrap();
        let limits = StepLimits { max_tokens: 64, max_rows: 4, max_sequence_len: 128, vocab_size: config.vocab_size };
        let mut cpu =
            CpuDevice::new(CpuConfig { threads: 1, limits, kv_memory_bytes: Some(1 << 24), group: None }).unwrap();
        cpu.set_weight_precision(precision);
        let model = models::load(&dir, &config, &mut cpu).unwrap();
        let found = cpu.memory_plan(&model.attention_spec(BLOCK_SIZE, limits.max_sequence_len)).unwrap();
        let estimator = Estimator::new(Target::Cpu, TensorParallel { rank: 0, size: 1 }, limits);
        let mut estimator = estimator.in_precision(precision);
        let model = models::load(&dir, &config, &mut estimator).unwrap();
        let estimated = estimator.estimate(&model.attention_spec(BLOCK_SIZE, limits.max_sequence_len));
        assert_estimate(&format!("{case} {precision}"), &estimated, &found);
    }
}

#[test]
fn gpus_keep_weights_that_are_quantized_at_load_in_their_own_size() {
    let dir = golden_dir("../../model_repository/tensorrt_llm/1");
    let weights = |precision| {
        let config = models::Config::from_dir(&dir).unwrap().in_precision(precision, Target::Cuda).unwrap();
        let limits = StepLimits { max_tokens: 64, max_rows: 4, max_sequence_len: 128, vocab_size: config.vocab_size };
        let mut estimator = Estimator::new(Target::Cuda, TensorParallel { rank: 0, size: 1 }, limits);
        let model = models::load(&dir, &config, &mut estimator).unwrap();
        estimator.estimate(&model.attention_spec(BLOCK_SIZE, limits.max_sequence_len)).weights_bytes as f64
    };
    let config = models::Config::from_dir(&dir).unwrap();
    // The head is tied: GPUs have the table once.
    let tables = config.vocab_size * config.hidden_size * 2;
    let linear = |precision| weights(precision) - tables as f64;
    let plain = linear(WeightPrecision::Checkpoint);
    // Besides the codes there are scales and norms.
    let [fp8, int8, int4] =
        [WeightPrecision::Fp8, WeightPrecision::Int8, WeightPrecision::Int4].map(|precision| linear(precision) / plain);
    assert!((0.5..0.6).contains(&fp8) && (0.25..0.4).contains(&int4), "fp8 {fp8}, int4 {int4}");
    assert_eq!(int8, fp8);
}

#[test]
fn gpus_keep_quantized_weights_in_their_own_size() {
    // Of 64 rows and 256 columns: a scale for each 16 columns and a factor for each row, or a scale for each 32 columns. Of 128 columns: an f16
    // scale and a zero point for each 32, or a scale for each row.
    let matrices = [[256, 64], [64, 128], [256, 64], [64, 128]];
    for (case, tile_scales, matrices) in [
        ("qwen3_nvfp4", 64 * (16 + 4), matrices),
        ("llama_mxfp4", 64 * 8, matrices),
        ("llama_gptq_sym", 64 * 4 * 3, matrices),
        ("phi3_w8a8", 64 * 4, [[128, 64], [64, 64], [208, 64], [64, 104]]),
    ] {
        let dir = golden_dir(case);
        let config = models::Config::from_dir(&dir).unwrap();
        let limits = StepLimits { max_tokens: 64, max_rows: 4, max_sequence_len: 128, vocab_size: config.vocab_size };
        let mut estimator = Estimator::new(Target::Cuda, TensorParallel { rank: 0, size: 1 }, limits);
        let model = models::load(&dir, &config, &mut estimator).unwrap();
        let found = estimator.estimate(&model.attention_spec(BLOCK_SIZE, limits.max_sequence_len)).weights_bytes;
        // Rows of codes are padded to 128 bytes, and scales to 64 rows.
        let kept = |[rows, cols]: [u64; 2]| {
            assert!(cols <= 256);
            128 * rows + rows.div_ceil(64) * tile_scales
        };
        assert_eq!(found, bytes_in_bf16(&dir) + 2 * matrices.map(kept).iter().sum::<u64>(), "{case}");
    }
}

/// The tensors of a checkpoint, and their data.
fn tensors(dir: &Path) -> (serde_json::Map<String, serde_json::Value>, Vec<u8>) {
    let bytes = std::fs::read(dir.join("model.safetensors")).unwrap();
    let (length, rest) = bytes.split_first_chunk().unwrap();
    let (header, body) = rest.split_at(u64::from_le_bytes(*length) as usize);
    (serde_json::from_slice(header).unwrap(), body.to_vec())
}

/// Bytes of the tensors of a checkpoint that are bf16.
fn bytes_in_bf16(dir: &Path) -> u64 {
    let (header, _) = tensors(dir);
    let of_bf16 = header.values().filter(|entry| entry["dtype"] == "BF16");
    let offset = |entry: &serde_json::Value, index: usize| entry["data_offsets"][index].as_u64().unwrap();
    of_bf16.map(|entry| offset(entry, 1) - offset(entry, 0)).sum()
}

#[test]
fn gpus_keep_integers_in_act_order_in_their_own_size_unless_columns_are_divided() {
    let estimate = |case, size| {
        let dir = golden_dir(case);
        let config = models::Config::from_dir(&dir).unwrap();
        let limits = StepLimits { max_tokens: 64, max_rows: 4, max_sequence_len: 128, vocab_size: config.vocab_size };
        let mut estimator = Estimator::new(Target::Cuda, TensorParallel { rank: 0, size }, limits);
        let model = models::load(&dir, &config, &mut estimator).unwrap();
        estimator.estimate(&model.attention_spec(BLOCK_SIZE, limits.max_sequence_len))
    };
    let found = |size| estimate("qwen2_gptq", size).weights_bytes;
    // Rows of codes are padded to 128 bytes, and scales and zero points to 64 rows of 256 columns. Each column has a number.
    let kept = |[rows, cols]: [u64; 2]| 128 * rows + rows.div_ceil(64) * 64 * 8 * 3 + 4 * cols;
    let others = bytes_in_bf16(&golden_dir("qwen2_gptq"));
    let [qkv, out, gate_up, down] = [[128, 64], [64, 64], [256, 64], [64, 128]].map(kept);
    assert_eq!(found(1), others + 2 * (qkv + out + gate_up + down));
    // The first of two workers has 104 of 200 rows of the embedding and the head and half of the biases, and expands its columns of out and
    // down.
    let [qkv, gate_up] = [[64, 64], [128, 64]].map(kept);
    let of_other = 2 * 96 * 64 * 2 + 2 * 64 * 2;
    assert_eq!(found(2), others - of_other + 2 * (qkv + gate_up + 2 * 64 * (32 + 64)));
    // The widest inputs of 64 tokens. The other checkpoint has the same sizes, and no act order.
    let workspace = |case, size| estimate(case, size).workspace_bytes;
    let gathered = [1, 2].map(|size| workspace("qwen2_gptq", size) - workspace("qwen2_gptq_dynamic", size));
    assert_eq!(gathered, [64 * 128 * 2, 64 * 64 * 2]);
}

#[test]
fn gpus_take_memory_for_guesses_and_for_what_guesses() {
    let (dir, head) = (golden_dir("eagle3"), golden_dir("eagle3").join("speculators"));
    let plain = models::Config::from_dir(&dir).unwrap();
    let limits = StepLimits { max_tokens: 64, max_rows: 4, max_sequence_len: 128, vocab_size: plain.vocab_size };
    let estimate = |config: &models::Config| {
        let mut estimator = Estimator::new(Target::Cuda, TensorParallel { rank: 0, size: 1 }, limits);
        let model = models::load(&dir, config, &mut estimator).unwrap();
        estimator.estimate(&model.attention_spec(BLOCK_SIZE, limits.max_sequence_len))
    };
    let with = |drafter| {
        let config = plain.clone().with_drafter(&drafter, WeightPrecision::Checkpoint, Target::Cuda).unwrap();
        estimate(&config)
    };
    let (without, head) = (estimate(&plain), with(DeviceDrafter::Eagle3(head.clone())));
    // The columns of all tokens and a copy of the output head stand beside the weights in bf16, without the tables between the
    // vocabularies.
    let stored = std::fs::metadata(golden_dir("eagle3/speculators/model.safetensors")).unwrap().len();
    let weights = head.weights_bytes - without.weights_bytes - copy_bytes(120);
    assert!(weights.abs_diff(stored) * 10 < stored, "{weights} bytes of {stored}");
    // A key and a value of one more layer than six.
    assert_eq!(head.block_bytes * 6, without.block_bytes * 7);
    // Of 64 tokens the outputs of four attention projections, the state, its halves and six inner ones, and the inputs of passes.
    assert!(head.workspace_bytes > without.workspace_bytes + 64 * 2 * 8 * plain.hidden_size as u64);
    let (same, wider) = (with(DeviceDrafter::Model(golden_dir("helium"))), with(DeviceDrafter::Model(dir.clone())));
    assert!(same.block_bytes > without.block_bytes && wider.block_bytes == 2 * without.block_bytes);
}

/// Bytes of a copy of a head with inputs of 64, whose codes are padded to 128: 64 scales for each 64 rows.
fn copy_bytes(rows: usize) -> u64 {
    (rows * 128 + rows.div_ceil(64) * 64 * 4) as u64
}

/// GLM-4.5 with an MTP head whose tensors have the bytes of others, with an output head of its own or the embedding.
fn glm_with_mtp_head(is_tied: bool) -> tempfile::TempDir {
    let (dir, golden) = (tempfile::tempdir().unwrap(), golden_dir("glm4_moe"));
    std::fs::copy(golden.join("config.json"), dir.path().join("config.json")).unwrap();
    let (mut header, body) = tensors(&golden);
    if is_tied {
        header.remove("lm_head.weight");
    }
    let mut added: Vec<_> = ["enorm", "hnorm", "shared_head.norm"]
        .map(|name| (format!("model.layers.3.{name}.weight"), header["model.norm.weight"].clone()))
        .into();
    let of_last = header.iter().filter_map(|(name, entry)| Some((name.strip_prefix("model.layers.2.")?, entry)));
    added.extend(of_last.map(|(name, entry)| (format!("model.layers.3.{name}"), entry.clone())));
    let first = header["model.embed_tokens.weight"]["data_offsets"][0].as_u64().unwrap();
    let joining =
        serde_json::json!({"dtype": "F16", "shape": [64, 128], "data_offsets": [first, first + 64 * 128 * 2]});
    header.extend(added.into_iter().chain([("model.layers.3.eh_proj.weight".to_owned(), joining)]));
    let header = serde_json::Value::Object(header).to_string();
    let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &body].concat();
    std::fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
    dir
}

#[test]
fn gpus_take_memory_for_a_copy_of_the_head_from_which_drafts_are_guessed() {
    let limits = StepLimits { max_tokens: 64, max_rows: 4, max_sequence_len: 128, vocab_size: 200 };
    let weights = |dir: &Path, config: &models::Config, target, [rank, size]: [u32; 2], batch_invariant| {
        let estimator = Estimator::new(target, TensorParallel { rank, size }, limits);
        let mut estimator = estimator.with_invariant_rows(batch_invariant);
        let model = models::load(dir, config, &mut estimator).unwrap();
        estimator.estimate(&model.attention_spec(BLOCK_SIZE, limits.max_sequence_len)).weights_bytes
    };
    for is_tied in [false, true] {
        let dir = glm_with_mtp_head(is_tied);
        let mut plain = models::Config::from_dir(dir.path()).unwrap();
        plain.head.is_tied = is_tied;
        let with = plain.clone().with_drafter(&DeviceDrafter::Mtp, WeightPrecision::Checkpoint, Target::Cuda).unwrap();
        // Nothing else depends on whether rows are invariant, which a copy is not.
        let copy = |config: &models::Config, target, tp| {
            weights(dir.path(), config, target, tp, false) - weights(dir.path(), config, target, tp, true)
        };
        let of_workers = [[0, 1], [0, 2], [1, 2]].map(|tp| copy(&with, Target::Cuda, tp));
        assert_eq!(of_workers, [200, 104, 96].map(copy_bytes), "tied: {is_tied}");
        assert_eq!([copy(&plain, Target::Cuda, [0, 1]), copy(&with, Target::Cpu, [0, 1])], [0, 0]);
    }
    // Of an EAGLE-3 head its own one.
    let dir = golden_dir("eagle3");
    let drafter = DeviceDrafter::Eagle3(dir.join("specforge"));
    let config = models::Config::from_dir(&dir).unwrap();
    let config = config.with_drafter(&drafter, WeightPrecision::Checkpoint, Target::Cuda).unwrap();
    let of = |batch_invariant| weights(&dir, &config, Target::Cuda, [0, 1], batch_invariant);
    assert_eq!(of(false) - of(true), copy_bytes(120));
}

#[test]
fn experts_are_quantized_at_load_too() {
    let dir = golden_dir("gpt_oss");
    let weights = |precision| {
        let config = models::Config::from_dir(&dir).unwrap().in_precision(precision, Target::Cuda).unwrap();
        let limits = StepLimits { max_tokens: 64, max_rows: 4, max_sequence_len: 128, vocab_size: config.vocab_size };
        let mut estimator = Estimator::new(Target::Cuda, TensorParallel { rank: 0, size: 1 }, limits);
        let model = models::load(&dir, &config, &mut estimator).unwrap();
        estimator.estimate(&model.attention_spec(BLOCK_SIZE, limits.max_sequence_len)).weights_bytes
    };
    // Codes of rows of 64 inputs are padded to the size of bf16, so the scales of rows are added: 128 of gate and up and 64 of
    // down in each of six experts, 192 of q, k and v, and 64 of out, whose codes take 128 of 192 bytes.
    let added = (6 * (128 + 64) + 192 + 64) * 4 - 64 * 64;
    assert_eq!(weights(WeightPrecision::Fp8), weights(WeightPrecision::Checkpoint) + 3 * added);
}

#[test]
fn a_block_holds_the_layers_of_one_kv_group() {
    let config = models::Config::from_dir(&golden_dir("gemma3")).unwrap();
    let windows = |config: &models::Config, max_len| config.kv_groups(max_len).windows;
    assert_eq!(windows(&config, 256), [None, Some(20), Some(20)]);
    assert_eq!(windows(&config, 20), [None], "no sequence is longer than the window");
    let mut other = config.clone();
    other.layers[2].attention.num_kv_heads = 4;
    assert_eq!(windows(&other, 256), [None], "blocks of different sizes");

    let block_bytes = |max_sequence_len| {
        let limits = StepLimits { max_tokens: 64, max_rows: 4, max_sequence_len, vocab_size: config.vocab_size };
        let mut estimator = Estimator::new(Target::Cuda, TensorParallel { rank: 0, size: 1 }, limits);
        let model = models::load(&golden_dir("gemma3"), &config, &mut estimator).unwrap();
        estimator.estimate(&model.attention_spec(BLOCK_SIZE, max_sequence_len)).block_bytes
    };
    assert_eq!(block_bytes(20), 3 * block_bytes(256));
}

#[test]
fn recurrent_states_are_counted_and_divided_among_the_workers_of_a_group() {
    let bytes = |case, size| {
        let dir = golden_dir(case);
        let config = models::Config::from_dir(&dir).unwrap();
        let limits = StepLimits { max_tokens: 64, max_rows: 4, max_sequence_len: 128, vocab_size: config.vocab_size };
        let mut estimator = Estimator::new(Target::Cpu, TensorParallel { rank: 0, size }, limits);
        let model = models::load(&dir, &config, &mut estimator).unwrap();
        estimator.estimate(&model.attention_spec(BLOCK_SIZE, limits.max_sequence_len)).state_bytes
    };
    // Two layers of 3 earlier inputs for 160 channels, and matrices of 16 x 24 for 4 value heads.
    assert_eq!(bytes("qwen3_next", 1), 2 * (3 * 160 + 4 * 16 * 24) * 4);
    // Four workers have one value head each, and share the two key heads in pairs.
    assert_eq!(bytes("qwen3_next", 4), 2 * (3 * (2 * 16 + 24) + 16 * 24) * 4);
    // Two layers of 3 earlier inputs for 64 channels, without matrices.
    assert_eq!([1, 4].map(|size| bytes("lfm2", size)), [2 * 3 * 64 * 4, 2 * 3 * 16 * 4]);
}

#[test]
fn gpus_refuse_recurrent_layers_of_other_sizes_by_name() {
    let delta = ["layers with a recurrent state (Gated DeltaNet)", "keys and values of 128"];
    for (case, [what, expected]) in [
        ("qwen3_next", delta),
        ("qwen3_5", delta),
        ("qwen3_5_moe_vision", delta),
        ("granite_moe_hybrid", ["layers with a recurrent state (Mamba-2)", "a state of 128"]),
        ("lfm2", ["layers with a short convolution", "one of 3 for a multiple of 8"]),
    ] {
        let config = models::Config::from_dir(&golden_dir(case)).unwrap();
        let limits = StepLimits { max_tokens: 64, max_rows: 4, max_sequence_len: 128, vocab_size: config.vocab_size };
        let mut cuda = Estimator::new(Target::Cuda, TensorParallel { rank: 0, size: 1 }, limits);
        let error = models::load(&golden_dir(case), &config, &mut cuda).map(drop).unwrap_err();
        let error = std::error::Error::source(&error).expect("the device refuses it").to_string();
        assert!([what, expected, "--device=cpu"].into_iter().all(|words| error.contains(words)), "{error}");
    }
}

#[test]
fn gpus_refuse_what_they_lack_by_name() {
    for (case, words) in [
        ("olmo_hybrid", "layers with a recurrent state whose learning rates are up to 2"),
        ("falcon_h1", "layers with a recurrent state of Mamba-2 without a norm"),
        ("falcon_h1_normed", "layers with a recurrent state beside attention"),
        ("kimi_linear", "Kimi Delta Attention"),
    ] {
        let dir = golden_dir(case);
        let config = models::Config::from_dir(&dir).unwrap();
        let limits = StepLimits { max_tokens: 64, max_rows: 4, max_sequence_len: 128, vocab_size: config.vocab_size };
        let mut cuda = Estimator::new(Target::Cuda, TensorParallel { rank: 0, size: 1 }, limits);
        let error = models::load(&dir, &config, &mut cuda).map(drop).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn a_pipeline_stage_of_recurrent_layers_alone_is_refused() {
    let dir = golden_dir("qwen3_next");
    let config = models::Config::from_dir(&dir).unwrap();
    let limits = StepLimits { max_tokens: 64, max_rows: 4, max_sequence_len: 128, vocab_size: config.vocab_size };
    let load = |index| {
        let estimator = Estimator::new(Target::Cpu, TensorParallel { rank: 0, size: 1 }, limits);
        let mut estimator = estimator.in_stage(PipelineStage { index, count: 2 });
        models::load(&dir, &config, &mut estimator).map(drop).map_err(|error| error.to_string())
    };
    assert_eq!(load(0), Ok(()));
    assert!(load(1).unwrap_err().contains("a stage whose layers all have recurrent states, which a pipeline cannot"));
}

#[test]
fn workers_of_a_group_share_the_matrices_of_a_model_and_of_its_draft_model() {
    let dir = golden_dir("llama3_gqa");
    let plain = models::Config::from_dir(&dir).unwrap();
    let limits = StepLimits { max_tokens: 64, max_rows: 4, max_sequence_len: 128, vocab_size: plain.vocab_size };
    let norms = (2 * plain.num_layers() + 1) * plain.hidden_size * 2;
    let draft = DeviceDrafter::Model(dir.clone());
    let drafted = plain.clone().with_drafter(&draft, WeightPrecision::Checkpoint, Target::Cuda).unwrap();
    for (config, num_models) in [(plain, 1), (drafted, 2)] {
        let estimate = |rank, size| {
            let mut estimator = Estimator::new(Target::Cuda, TensorParallel { rank, size }, limits);
            let model = models::load(&dir, &config, &mut estimator).unwrap();
            estimator.estimate(&model.attention_spec(BLOCK_SIZE, limits.max_sequence_len))
        };
        let (whole, first, second) = (estimate(0, 1), estimate(0, 2), estimate(1, 2));
        assert_eq!(first.weights_bytes + second.weights_bytes, whole.weights_bytes + (num_models * norms) as u64);
        assert_eq!((first.block_bytes + second.block_bytes, whole.communicator_bytes), (whole.block_bytes, 0));
        assert!(first.communicator_bytes > 0);
    }
}

#[test]
fn estimates_of_workers_with_different_experts_or_columns_are_what_they_take() {
    let dir = golden_dir("qwen3_moe");
    let plain = models::Config::from_dir(&dir).unwrap();
    let limits = StepLimits { max_tokens: 64, max_rows: 4, max_sequence_len: 128, vocab_size: plain.vocab_size };
    let prefix: ipc::Prefix = format!("estimate{}_", std::process::id()).parse().unwrap();
    let worker = |parts: u32, rank| {
        let (config, tensor_parallel) = (plain.clone().in_expert_groups(parts), TensorParallel { rank, size: 2 });
        let (name, timeout) = (format!("parts{parts}"), Duration::from_secs(20));
        let group = Some(GroupConfig { prefix: prefix.clone(), name, tensor_parallel, timeout, spin: false });
        let mut cpu = CpuDevice::new(CpuConfig { threads: 1, limits, kv_memory_bytes: Some(1 << 24), group }).unwrap();
        let model = models::load(&dir, &config, &mut cpu).unwrap();
        let found = cpu.memory_plan(&model.attention_spec(BLOCK_SIZE, limits.max_sequence_len)).unwrap();
        let mut estimator = Estimator::new(Target::Cpu, tensor_parallel, limits);
        let model = models::load(&dir, &config, &mut estimator).unwrap();
        let estimated = estimator.estimate(&model.attention_spec(BLOCK_SIZE, limits.max_sequence_len));
        assert_estimate(&format!("worker {rank} of {parts} parts"), &estimated, &found);
        found.weights_bytes
    };
    let [columns, parts] = [1, 2].map(|parts| {
        std::thread::scope(|scope| {
            [0, 1].map(|rank| scope.spawn(move || worker(parts, rank))).map(|w| w.join().unwrap())
        })
    });
    // Columns are divided in multiples of 8, so that the first worker has more of 56.
    assert_eq!(columns.iter().sum::<u64>(), parts.iter().sum::<u64>());
    assert!(columns[0] > parts[0] && parts[1] > columns[1], "{columns:?}, {parts:?}");
}

#[test]
fn a_pipeline_of_layers_that_belong_together_is_refused() {
    let dir = golden_dir("gemma4_shared");
    let limits = StepLimits { max_tokens: 64, max_rows: 4, max_sequence_len: 128, vocab_size: 200 };
    let load = |change: fn(&mut models::Config)| {
        let mut config = models::Config::from_dir(&dir).unwrap();
        change(&mut config);
        let estimator = Estimator::new(Target::Cpu, TensorParallel { rank: 0, size: 1 }, limits);
        let mut estimator = estimator.in_stage(PipelineStage { index: 1, count: 2 });
        models::load(&dir, &config, &mut estimator).map(|_| ()).map_err(|error| error.to_string())
    };
    let error = load(|_| ()).unwrap_err();
    assert!(
        error.contains("has an embedding for each layer, which a pipeline cannot divide; set `pp` to 1"),
        "{error}"
    );
    let error = load(|config| config.per_layer_input = None).unwrap_err();
    assert!(error.contains("layers that share keys and values across stages"), "{error}");
}

#[test]
fn tensors_that_no_layer_takes_are_named() {
    let (source, dir) = (golden_dir("llama3_gqa"), tempfile::tempdir().unwrap());
    std::fs::copy(source.join("model.safetensors"), dir.path().join("model.safetensors")).unwrap();
    let config = std::fs::read_to_string(source.join("config.json")).unwrap();
    let unused = |config: &str| {
        std::fs::write(dir.path().join("config.json"), config).unwrap();
        let config = models::Config::from_dir(dir.path()).unwrap();
        let limits = StepLimits { max_tokens: 64, max_rows: 4, max_sequence_len: 128, vocab_size: config.vocab_size };
        let mut estimator = Estimator::new(Target::Cpu, TensorParallel { rank: 0, size: 1 }, limits);
        models::load(dir.path(), &config, &mut estimator).unwrap().unused_tensors().to_vec()
    };
    assert_eq!(unused(&config), Vec::<String>::new());
    let fewer = config.replace("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 1");
    let unused = unused(&fewer);
    assert_eq!((unused.len(), unused[0].as_str()), (9, "model.layers.1.input_layernorm.weight"));
}

#[test]
fn gpus_take_memory_for_keys_and_values_in_codes_that_long_chunks_expand() {
    let dir = golden_dir("llama3_gqa");
    let config = models::Config::from_dir(&dir).unwrap();
    let added = |max_tokens, max_rows, max_sequence_len| {
        let limits = StepLimits { max_tokens, max_rows, max_sequence_len, vocab_size: config.vocab_size };
        let mut estimator = Estimator::new(Target::Cuda, TensorParallel { rank: 0, size: 1 }, limits);
        let model = models::load(&dir, &config, &mut estimator).unwrap();
        let mut spec = model.attention_spec(BLOCK_SIZE, limits.max_sequence_len);
        // A size of heads that the kernels have.
        spec.layers.iter_mut().for_each(|layer| layer.head_dim = 64);
        let workspace = |kv_elements| {
            let spec = ops::AttentionSpec { kv_elements, ..spec.clone() };
            estimator.estimate(&spec).workspace_bytes
        };
        workspace(KvElements::Fp8) - workspace(KvElements::Plain)
    };
    // K and V of four heads in four rows, and a word for each block.
    let (positions, blocks) = (4 * 2048, 4 * 2048 / BLOCK_SIZE);
    assert_eq!(added(1024, 4, 2048), (positions * 2 * 4 * 64 * 2 + blocks * 4) as u64);
    assert_eq!(added(1024, 64, 1 << 20), 257 << 20);
    assert_eq!(added(64, 4, 2048), 0);
}
