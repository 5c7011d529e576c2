//! The command line of `trireme quantize`.

use std::path::PathBuf;

use clap::Args;

use crate::Format;

/// `trireme quantize`
#[derive(Debug, Clone, Args)]
pub struct QuantizeArgs {
    /// Directory of a Hugging Face checkpoint in bf16, f16 or f32
    #[arg(value_name = "CHECKPOINT")]
    pub checkpoint: PathBuf,
    /// What the weights of linear layers become
    #[arg(long, value_enum)]
    pub format: Format,
    /// Directory of the new checkpoint, which must not exist yet
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// Text like that which the model will read and write, for int4-awq: the model computes it, and the inputs of its layers decide which
    /// weights are rounded with most care
    #[arg(long, value_name = "FILE")]
    pub calibration: Option<PathBuf>,
    /// Most tokens of the calibration text that are used
    #[arg(long, value_name = "TOKENS", default_value_t = 16_384, value_parser = clap::value_parser!(u32).range(512..=1 << 20))]
    pub calibration_tokens: u32,
    /// Size at which a further file of weights is begun, in MiB
    #[arg(long, value_name = "MIB", default_value_t = 4768, value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    pub max_shard_size: u64,
}

impl QuantizeArgs {
    pub(crate) fn max_shard_bytes(&self) -> u64 {
        self.max_shard_size << 20
    }
}
