//! Frames that a client sends to the gRPC port after the HTTP/2 preface: settings, headers, calls.
#![no_main]

use std::sync::LazyLock;

use fuzz::{Target, within};
use libfuzzer_sys::fuzz_target;

thread_local!(static TARGET: LazyLock<Target> = LazyLock::new(Target::default));

fuzz_target!(|frames: &[u8]| {
    TARGET.with(|target| {
        let _ = &target.config;
        within(frames.len(), 16 << 20, 64, || drop(target.grpc(frames)));
    });
});
