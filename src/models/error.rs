//! Why a checkpoint cannot be served.

use std::path::PathBuf;

use device::DeviceError;

/// Why a model could not be read or loaded.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // Fields are named by their messages.
pub enum ModelError {
    /// A file is missing or unreadable.
    #[error("cannot read {}", .path.display())]
    Read { path: PathBuf, source: std::io::Error },
    /// A file is not JSON.
    #[error("{} is not valid JSON", .path.display())]
    Json { path: PathBuf, source: serde_json::Error },
    /// A field of `config.json` is missing or cannot be used.
    #[error("{}: field `{field}` must be {expected}, found {found}", .path.display())]
    Field { path: PathBuf, field: String, expected: String, found: String },
    /// No code for this architecture.
    #[error("{}: architecture `{found}` is not supported; supported: {known}", .path.display())]
    Architecture { path: PathBuf, found: String, known: String },
    /// The directory holds no weights.
    #[error(
        "no `model.safetensors`, `model.safetensors.index.json`, `*.safetensors`, `pytorch_model.bin` or \
         `pytorch_model.bin.index.json` in {}",
        .dir.display()
    )]
    NoWeights { dir: PathBuf },
    /// A safetensors header, or a tensor's entry, cannot be used.
    #[error("{} is not a usable file of weights: {reason}", .path.display())]
    Header { path: PathBuf, reason: String },
    /// A file of `torch.save` cannot be used.
    #[error("{} is not a usable file of `torch.save`: {reason}", .path.display())]
    TorchFile { path: PathBuf, reason: String },
    /// A file ends before its tensors do.
    #[error(
        "{} is truncated: tensor `{tensor}` ends at byte {needed} but the file has {found}; copy the file again",
        .path.display()
    )]
    Truncated { path: PathBuf, tensor: String, needed: u64, found: u64 },
    /// A tensor that the model needs is in no file.
    #[error("tensor `{tensor}` is missing in {}", .dir.display())]
    MissingTensor { tensor: String, dir: PathBuf },
    /// A tensor's shape does not fit `config.json`.
    #[error("tensor `{tensor}` in {} has shape {found:?}, expected {expected:?} by `config.json`", .path.display())]
    Shape { tensor: String, path: PathBuf, expected: Vec<usize>, found: Vec<usize> },
    /// A tensor's element type has no code.
    #[error("tensor `{tensor}` in {} has dtype `{found}`, expected `BF16`, `F16` or `F32`", .path.display())]
    Dtype { tensor: String, path: PathBuf, found: String },
    /// The group's size does not divide the heads.
    #[error(
        "{num_heads} heads and {num_kv_heads} KV heads cannot be shared by {found} workers; \
         world sizes that would do: {usable}"
    )]
    WorldSize { num_heads: usize, num_kv_heads: usize, found: u32, usable: String },
    /// The device has no code for an op of this architecture.
    #[error(
        "architecture `{architecture}` of {} needs what this device does not have: {lacking}; \
         serve it on a CPU (`--device=cpu`)",
        .dir.display()
    )]
    DeviceLacks { dir: PathBuf, architecture: String, lacking: String },
    /// The device refused.
    #[error("cannot load {}", .dir.display())]
    Device { dir: PathBuf, source: DeviceError },
}
