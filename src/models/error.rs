//! Why a checkpoint cannot be loaded.

use std::path::PathBuf;

use ops::DeviceError;

/// Why a model could not be read or loaded.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // Fields are named in the messages.
pub enum ModelError {
    /// A file is missing or unreadable.
    #[error("cannot read {}: {source}", .path.display())]
    Read { path: PathBuf, source: std::io::Error },
    /// A file is not JSON.
    #[error("{} is not valid JSON: {source}", .path.display())]
    Json { path: PathBuf, source: serde_json::Error },
    /// A field of `config.json` is missing or invalid.
    #[error("{}: field `{field}` must be {expected}, found {found}", .path.display())]
    Field { path: PathBuf, field: String, expected: String, found: String },
    /// `config.json` has fields that nothing reads. They might change what the model computes.
    #[error(
        "{}: {fields} is not understood for `{architecture}`, and could change what the model computes; \
         remove it if it does not",
        .path.display()
    )]
    UnknownFields { path: PathBuf, architecture: String, fields: String },
    /// The architecture is not implemented.
    #[error("{}: architecture `{found}` is not supported; supported: {known}", .path.display())]
    Architecture { path: PathBuf, found: String, known: String },
    /// The directory contains no weights.
    #[error(
        "no `model.safetensors`, `model.safetensors.index.json`, `*.safetensors`, `pytorch_model.bin` or \
         `pytorch_model.bin.index.json` in {}; copy the checkpoint's weights there, or download it again (`trireme pull ORG/NAME`)",
        .dir.display()
    )]
    NoWeights { dir: PathBuf },
    /// The directory contains no weights in the one format whose tensors can be listed without reading them.
    #[error("no `model.safetensors`, `model.safetensors.index.json` or `*.safetensors` in {}", .dir.display())]
    NoSafetensors { dir: PathBuf },
    /// A safetensors header or the entry of a tensor is invalid.
    #[error("{} is not a usable file of weights: {reason}", .path.display())]
    Header { path: PathBuf, reason: String },
    /// A file of `torch.save` is invalid.
    #[error("{} is not a usable file of `torch.save`: {reason}", .path.display())]
    TorchFile { path: PathBuf, reason: String },
    /// A file ends before the last of its tensors.
    #[error(
        "{} is truncated: tensor `{tensor}` ends at byte {needed} but the file has {found}; copy the file again",
        .path.display()
    )]
    Truncated { path: PathBuf, tensor: String, needed: u64, found: u64 },
    /// No file contains a tensor that the model needs.
    #[error("tensor `{tensor}` is missing in {}, which has {found}", .dir.display())]
    MissingTensor { tensor: String, dir: PathBuf, found: String },
    /// The shape of a tensor does not match `config.json`.
    #[error("tensor `{tensor}` in {} has shape {found:?}, expected {expected:?} by `config.json`", .path.display())]
    Shape { tensor: String, path: PathBuf, expected: Vec<usize>, found: Vec<usize> },
    /// The element type of a tensor is not supported.
    #[error("tensor `{tensor}` in {} has dtype `{found}`, expected `BF16`, `F16` or `F32`", .path.display())]
    Dtype { tensor: String, path: PathBuf, found: String },
    /// A layer cannot be divided by the size of the tensor-parallel group. `what`: what cannot.
    #[error("{what} cannot be shared by {found} workers; world sizes that would do: {usable}")]
    WorldSize { what: String, found: u32, usable: String },
    /// The experts cannot be divided among the parts of a group.
    #[error(
        "{num_experts} experts cannot be divided among `ep` {found} parts of a group of {group} workers; \
         `ep` must divide both{}",
        if *.num_experts == 0 { " (this model has no experts: remove `ep`)" } else { "" }
    )]
    ExpertGroups { num_experts: usize, group: u32, found: usize },
    /// The weights are quantized, and the deployment asks for another form.
    #[error(
        "the checkpoint's weights are quantized (`quant_method` is `{found}`), and `quantization` asks for `{asked}`; \
         remove `quantization`, or use the original checkpoint"
    )]
    AlreadyQuantized { found: String, asked: &'static str },
    /// The linear layers are stored as `[inputs, outputs]`.
    #[error(
        "architecture `{architecture}` stores its linear layers transposed, which the formats of quantized checkpoints do not know"
    )]
    Transposed { architecture: String },
    /// The architecture has no head that guesses drafts.
    #[error("architecture `{architecture}` has no MTP head that Trireme knows; remove `mtp_num_tokens`")]
    NoMtp { architecture: String },
    /// A model cannot guess drafts for another one.
    #[error("the draft model in {} {reason}", .dir.display())]
    DraftModel { dir: PathBuf, reason: String },
    /// An EAGLE-3 head cannot guess drafts for a model.
    #[error("the EAGLE-3 head in {} {reason}", .dir.display())]
    Eagle3 { dir: PathBuf, reason: String },
    /// An EAGLE-3 head cannot be read or loaded.
    #[error("EAGLE-3 head: {source}")]
    OfEagle3 { source: Box<ModelError> },
    /// A draft model cannot be read or loaded.
    #[error("draft model: {source}")]
    OfDraftModel { source: Box<ModelError> },
    /// The device lacks an op of this architecture.
    #[error(
        "architecture `{architecture}` of {} needs what this device does not have: {lacking}; \
         serve it on a CPU (`--device=cpu`)",
        .dir.display()
    )]
    DeviceLacks { dir: PathBuf, architecture: String, lacking: String },
    /// Latent vectors would be kept in 8 bits.
    #[error(
        "architecture `{architecture}` of {} keeps latent vectors in place of keys and values, and they have no form of 8 bits; set \
         `kv_cache_dtype` to `auto`",
        .dir.display()
    )]
    LatentCodes { dir: PathBuf, architecture: String },
    /// The model has parts that pipeline stages do not exchange.
    #[error("architecture `{architecture}` of {} has {what}, which a pipeline cannot divide; set `pp` to 1", .dir.display())]
    Pipeline { dir: PathBuf, architecture: String, what: &'static str },
    /// The device returned an error.
    #[error("cannot load {}", .dir.display())]
    Device { dir: PathBuf, source: DeviceError },
}
