//! `ModelInferRequest` messages. A message may end in a part that is repeated.
#![no_main]

use std::sync::LazyLock;

use fuzz::{Target, within};
use libfuzzer_sys::fuzz_target;

thread_local!(static TARGET: LazyLock<Target> = LazyLock::new(Target::default));

/// Precedes the part to repeat. In a message it would be field 127 with 31 bytes.
const REPEAT: &[u8] = b"\xfa\x07\x1f";
const TIMES: usize = 20_000;

fuzz_target!(|input: &[u8]| {
    let found = input.windows(REPEAT.len()).rposition(|bytes| bytes == REPEAT);
    let message = match found.map(|at| (&input[..at], &input[at + REPEAT.len()..])) {
        Some((once, part)) if part.len() <= 64 => [once, &part.repeat(TIMES)].concat(),
        _ => input.to_vec(),
    };
    TARGET.with(|target| {
        let _ = &target.config;
        within(message.len(), 4 << 20, 64, || target.infer(front::fuzz::grpc(&message)));
    });
});
