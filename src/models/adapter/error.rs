//! Why an adapter cannot be used.

use std::path::PathBuf;

/// Why an adapter cannot be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // Fields are named in the messages.
pub enum AdapterError {
    /// A file is missing or unreadable.
    #[error("cannot read {}: {source}; an adapter is a folder that PEFT has saved", .path.display())]
    Read { path: PathBuf, source: std::io::Error },
    /// A field of `adapter_config.json` is invalid, or asks for what is not supported.
    #[error("{}: {reason}", .path.display())]
    Config { path: PathBuf, reason: String },
    /// The file of weights is invalid, or does not fit the model.
    #[error("{}: {reason}", .path.display())]
    Weights { path: PathBuf, reason: String },
    /// The rank is above the bound.
    #[error("{}: rank {found} is above `max_lora_rank` {max}; load the model with a larger one (at most 64)", .path.display())]
    Rank { path: PathBuf, found: usize, max: usize },
    /// The weights take more memory than is set aside for adapters.
    #[error("{} has {found} bytes, and {max} are left for adapters in host memory; raise `lora_memory_bytes`, or unload another adapter", .path.display())]
    TooLarge { path: PathBuf, found: u64, max: u64 },
    /// Tensors of a request that do not fit the model or each other.
    #[error("{reason}")]
    Tensors { reason: String },
    /// Bytes that are no adapter's.
    #[error("{len} bytes are not those of an adapter")]
    Bytes { len: usize, source: postcard::Error },
}
