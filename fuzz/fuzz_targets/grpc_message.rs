//! `ModelInferRequest` messages; one may end in a part that is sent many times.
#![no_main]

use std::sync::LazyLock;

use fuzz::{Target, within};
use libfuzzer_sys::fuzz_target;

thread_local!(static TARGET: LazyLock<Target> = LazyLock::new(Target::default));

/// The part that is repeated stands behind this, which is field 127 of 31 bytes elsewhere.
const AGAIN: &[u8] = b"\xfa\x07\x1f";
const TIMES: usize = 20_000;

fuzz_target!(|input: &[u8]| {
    let found = input.windows(AGAIN.len()).rposition(|bytes| bytes == AGAIN);
    let message = match found.map(|at| (&input[..at], &input[at + AGAIN.len()..])) {
        Some((once, part)) if part.len() <= 64 => [once, &part.repeat(TIMES)].concat(),
        _ => input.to_vec(),
    };
    TARGET.with(|target| {
        let _ = &target.config;
        within(message.len(), 4 << 20, 64, || target.answer(front::fuzz::grpc(&message)));
    });
});
