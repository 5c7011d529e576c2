//! Memory estimates made before loading equal the memory that a device uses after loading.

use std::path::{Path, PathBuf};

use device::Estimator;
use device::cpu::{CpuConfig, CpuDevice};
use ops::{Device, StepLimits, Target, TensorParallel};

const BLOCK_SIZE: usize = 16;

fn golden_dir(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/goldens").join(case)
}

#[test]
fn estimates_of_the_cpu_are_what_it_takes() {
    for case in
        ["llama3_gqa", "tied_mqa", "mha_bias_f32", "gpt2", "baichuan2_7b", "phi", "cohere", "gemma3", "qwen2_moe"]
    {
        let dir = golden_dir(case);
        let config = models::Config::from_dir(&dir).unwrap();
        let limits = StepLimits { max_tokens: 64, max_rows: 4, max_sequence_len: 128, vocab_size: config.vocab_size };

        let mut cpu =
            CpuDevice::new(CpuConfig { threads: 1, limits, kv_memory_bytes: Some(1 << 24), group: None }).unwrap();
        let model = models::load(&dir, &config, &mut cpu).unwrap();
        let found = cpu.memory_plan(&model.attention_spec(BLOCK_SIZE)).unwrap();

        let mut estimator = Estimator::new(Target::Cpu, TensorParallel { rank: 0, size: 1 }, limits);
        let model = models::load(&dir, &config, &mut estimator).unwrap();
        let told = estimator.estimate(&model.attention_spec(BLOCK_SIZE));

        let pairs = [
            ("weights", told.weights_bytes, found.weights_bytes),
            ("workspace", told.workspace_bytes, found.workspace_bytes),
            ("block", told.block_bytes, found.block_bytes),
        ];
        for (what, told, found) in pairs {
            assert!(told.abs_diff(found) * 50 <= found, "{case}: {what} of {found} bytes, told {told}");
        }
    }
}

#[test]
fn workers_of_a_group_share_the_matrices() {
    let dir = golden_dir("llama3_gqa");
    let config = models::Config::from_dir(&dir).unwrap();
    let limits = StepLimits { max_tokens: 64, max_rows: 4, max_sequence_len: 128, vocab_size: config.vocab_size };
    let estimate = |rank, size| {
        let mut estimator = Estimator::new(Target::Cuda, TensorParallel { rank, size }, limits);
        let model = models::load(&dir, &config, &mut estimator).unwrap();
        estimator.estimate(&model.attention_spec(BLOCK_SIZE))
    };
    let (whole, first, second) = (estimate(0, 1), estimate(0, 2), estimate(1, 2));
    let norms = (2 * config.num_layers() + 1) * config.hidden_size * 2;
    assert_eq!(first.weights_bytes + second.weights_bytes, whole.weights_bytes + norms as u64);
    assert_eq!((first.block_bytes + second.block_bytes, whole.communicator_bytes), (whole.block_bytes, 0));
    assert!(first.communicator_bytes > 0);
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
