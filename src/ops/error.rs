//! Errors of a device.

use crate::Feature;

/// Why a device cannot load or compute.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // Fields are named in the messages.
pub enum DeviceError {
    /// The device, or a library it needs, is not available.
    #[error("device `{device}` is not usable: {reason}")]
    Unavailable { device: String, reason: String },
    /// There is too little memory.
    #[error("{what} needs {needed_bytes} bytes but {free_bytes} are free on device `{device}`")]
    OutOfMemory { device: String, what: String, needed_bytes: u64, free_bytes: u64 },
    /// A shape or dtype that the device does not support.
    #[error("{what} is not supported: {found}; supported: {expected}")]
    Unsupported { what: String, found: String, expected: String },
    /// A library or driver call failed.
    #[error("{call} failed: {reason}")]
    Call { call: String, reason: String },
    /// Another worker of the group did not take part in a collective in time.
    #[error("worker {tp_rank} waited {waited_ms} ms for the group in {collective}")]
    GroupTimeout { tp_rank: u32, waited_ms: u64, collective: String },
}

impl DeviceError {
    /// The error for an op that the device does not have.
    pub fn lacks(feature: Feature) -> Self {
        DeviceError::Unsupported {
            what: feature.to_string(),
            found: "a model that needs it".into(),
            expected: "models without it on this device".into(),
        }
    }
}
