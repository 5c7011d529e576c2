//! `ModelInferRequest` messages.
#![no_main]

use std::sync::LazyLock;

use fuzz::Target;
use libfuzzer_sys::fuzz_target;

thread_local!(static TARGET: LazyLock<Target> = LazyLock::new(Target::default));

fuzz_target!(|message: &[u8]| {
    TARGET.with(|target| target.answer(front::fuzz::grpc(message)));
});
