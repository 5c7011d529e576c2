//! Request bodies of OpenAI's protocol, through the whole front. The first byte selects completions or chat completions.
#![no_main]

use std::sync::LazyLock;

use fuzz::{Target, expand, within};
use libfuzzer_sys::fuzz_target;

thread_local!(static TARGET: LazyLock<Target> = LazyLock::new(Target::default));

fuzz_target!(|input: &[u8]| {
    let Some((kind, body)) = input.split_first() else { return };
    let path = if kind % 2 == 0 { "/v1/completions" } else { "/v1/chat/completions" };
    let body = expand(body);
    TARGET.with(|target| {
        let _ = &target.config;
        within(body.len(), 8 << 20, 64, || {
            let (status, answer) = target.post(path, &body);
            assert!(status != 500, "{}", String::from_utf8_lossy(&answer));
        });
    });
});
