//! Headers of `*.safetensors`. Reading tensors of a checkpoint that opens must succeed or return an error.
#![no_main]

use std::path::PathBuf;
use std::sync::LazyLock;

use fuzz::within;
use libfuzzer_sys::fuzz_target;
use models::Checkpoint;

static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| {
    let folder = fuzz::scratch("checkpoint");
    std::fs::write(folder.join("config.json"), "{}").expect("/dev/shm can be written");
    folder
});

fuzz_target!(|file: &[u8]| {
    let path = FOLDER.join("model.safetensors");
    let _ = std::fs::remove_file(&path); // A checkpoint that was opened may still be mapped.
    std::fs::write(&path, file).expect("/dev/shm can be written");
    within(file.len(), 4 << 20, 64, || {
        if let Ok(checkpoint) = Checkpoint::open(&FOLDER) {
            let _ = checkpoint.contains("a");
            let _ = checkpoint.vector("a", 4, 0..4).map(drop);
            let _ = checkpoint.vector("a", 4, 1..3).map(drop);
        }
    });
});
