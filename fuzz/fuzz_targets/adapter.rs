//! Adapters (LoRA): `adapter_config.json`, a zero byte, `adapter_model.safetensors`. Reading must succeed or return an error.
#![no_main]

use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use fuzz::within;
use libfuzzer_sys::fuzz_target;
use models::{Adapter, AdapterBounds, Config};

static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| fuzz::scratch("adapter"));

static MODEL: LazyLock<Config> = LazyLock::new(|| {
    let checkpoint = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/goldens/mha_bias_f32");
    Config::from_dir(&checkpoint).expect("the golden's configuration is valid")
});

fuzz_target!(|file: &[u8]| {
    let end_of_config = file.iter().position(|&byte| byte == 0).unwrap_or(file.len());
    let (config, weights) = file.split_at(end_of_config);
    let weights = weights.get(1..).unwrap_or_default();
    for (name, bytes) in [("adapter_config.json", config), ("adapter_model.safetensors", weights)] {
        std::fs::write(FOLDER.join(name), bytes).expect("/dev/shm can be written");
    }
    let model = &*MODEL;
    within(file.len(), 4 << 20, 64, || {
        let bounds = AdapterBounds { max_rank: 64, max_bytes: 1 << 20 };
        if let Ok(adapter) = Adapter::read(&FOLDER, model, bounds) {
            let copy = Adapter::from_bytes(&adapter.to_bytes()).expect("the bytes are those of an adapter");
            assert!(copy == adapter);
        }
    });
});
