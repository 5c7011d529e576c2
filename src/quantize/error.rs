//! Why a checkpoint cannot be quantized.

use std::path::PathBuf;

use models::ModelError;
use ops::DeviceError;
use text::TextError;

/// Why a checkpoint cannot be quantized.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // Fields are named in the messages.
pub enum QuantizeError {
    /// The checkpoint cannot be read.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The tokenizer cannot be read, or refuses the calibration text.
    #[error(transparent)]
    Text(#[from] TextError),
    /// The CPU device cannot run the model.
    #[error("the CPU device cannot run the model: {0}")]
    Device(#[from] DeviceError),
    /// The goal is there already.
    #[error("{} exists; name a new directory, or remove it", .0.display())]
    Exists(PathBuf),
    /// The weights are quantized.
    #[error("{} is quantized already (`quant_method` is `{method}`); use the original checkpoint", .dir.display())]
    AlreadyQuantized { dir: PathBuf, method: String },
    /// No matrix can have the format.
    #[error("no linear layer can be quantized to {format}: its inputs are no multiple of {multiple}")]
    NothingFits { format: &'static str, multiple: usize },
    /// A format needs text.
    #[error("`--format int4-awq` needs text like that of the model's users: `--calibration FILE`; `int4` needs none")]
    NoCalibration,
    /// Text is given and not used.
    #[error("`--format {format}` uses no calibration text; leave out `--calibration`, or use `int4-awq`")]
    UnusedCalibration { format: &'static str },
    /// The text is too short.
    #[error("{} has {found} tokens; calibration needs {needed} at least", .path.display())]
    ShortText { path: PathBuf, found: usize, needed: usize },
    /// A matrix has another type or shape than a linear layer's.
    #[error("tensor `{tensor}` is {dtype} {shape:?}; a linear layer is a matrix in bf16, f16 or f32")]
    NotLinear { tensor: String, dtype: String, shape: Vec<usize> },
    /// A file cannot be read or written.
    #[error("{what} {}: {source}", .path.display())]
    Io { what: &'static str, path: PathBuf, source: std::io::Error },
    /// `config.json` is no JSON object.
    #[error("{} is no JSON object", .0.display())]
    Config(PathBuf),
}

/// Names what failed, and the file.
pub(crate) fn io(what: &'static str, path: &std::path::Path) -> impl FnOnce(std::io::Error) -> QuantizeError + use<> {
    let path = path.to_owned();
    move |source| QuantizeError::Io { what, path, source }
}
