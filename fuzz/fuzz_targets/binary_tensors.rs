//! Binary tensors after a JSON header. Input: the header's length in two bytes, then the body.
#![no_main]

use std::sync::LazyLock;

use fuzz::{Target, within};
use libfuzzer_sys::fuzz_target;

thread_local!(static TARGET: LazyLock<Target> = LazyLock::new(Target::default));

fuzz_target!(|data: &[u8]| {
    let Some((head_len, body)) = data.split_first_chunk::<2>() else { return };
    let head_len = usize::from(u16::from_le_bytes(*head_len));
    TARGET.with(|target| {
        let config = &target.config;
        within(body.len(), 4 << 20, 64, || {
            target.infer(front::fuzz::http_infer(body, Some(head_len)));
            target.infer(front::fuzz::http_raw(body, config));
        });
    });
});
