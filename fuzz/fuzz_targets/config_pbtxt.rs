//! `config.pbtxt`: parsed, completed and validated. A valid configuration must survive a round trip through JSON.
#![no_main]

use std::path::PathBuf;
use std::sync::LazyLock;

use fuzz::{expand, within};
use libfuzzer_sys::fuzz_target;
use repository::Repository;

static ROOT: LazyLock<PathBuf> = LazyLock::new(|| {
    let root = fuzz::scratch("config");
    std::fs::create_dir_all(root.join("m/1")).expect("/dev/shm can be written");
    root
});

fuzz_target!(|input: &[u8]| {
    let text = expand(input);
    std::fs::write(ROOT.join("m/config.pbtxt"), &text).expect("/dev/shm can be written");
    within(text.len(), 8 << 20, 256, || {
        let repository = Repository::open(std::slice::from_ref(&ROOT)).expect("the folder is there");
        if let Ok(model) = repository.model("m") {
            let json = repository::to_json(&model.config);
            repository::from_json("m", &json).expect("its own JSON is accepted");
        }
    });
});
