//! Messages from a process that runs a Python model.
#![no_main]

use bytes::Bytes;
use fuzz::within;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|message: &[u8]| {
    let message = Bytes::copy_from_slice(message);
    within(message.len(), 4 << 20, 128, || backends::fuzz::python_message(&message));
});
