//! JSON of infer and generate requests, paths, and compressed bodies.
#![no_main]

use std::sync::LazyLock;

use fuzz::Target;
use libfuzzer_sys::fuzz_target;

thread_local!(static TARGET: LazyLock<Target> = LazyLock::new(Target::default));

fuzz_target!(|body: &[u8]| {
    TARGET.with(|target| {
        target.answer(front::fuzz::http_infer(body, None));
        target.answer(front::fuzz::generate(body, &target.config));
    });
    let (path, packed) = body.split_at(body.len().min(64));
    front::fuzz::http_head(&String::from_utf8_lossy(path), packed);
});
