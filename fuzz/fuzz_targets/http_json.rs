//! JSON of infer and generate requests, paths, and compressed bodies.
#![no_main]

use std::sync::LazyLock;

use fuzz::{Target, expand, within};
use libfuzzer_sys::fuzz_target;

thread_local!(static TARGET: LazyLock<Target> = LazyLock::new(Target::default));

fuzz_target!(|input: &[u8]| {
    let body = expand(input);
    TARGET.with(|target| {
        let config = &target.config;
        within(body.len(), 4 << 20, 64, || {
            target.infer(front::fuzz::http_infer(&body, None));
            target.infer(front::fuzz::generate(&body, config));
        });
    });
    let (path, packed) = input.split_at(input.len().min(64));
    front::fuzz::http_head(&String::from_utf8_lossy(path), packed);
});
