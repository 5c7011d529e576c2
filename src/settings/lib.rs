//! Settings that pass through several processes: from the launcher's command line over the ranks' to the workers.
//!
//! Each is one type here, which command lines parse and print, and specs of workers carry.
#![forbid(unsafe_code)]

mod byte_size;

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

pub use byte_size::ByteSize;

/// The most seconds that a command line gives for a time: 68 years. A deadline that lies so far ahead can still be represented.
pub const MAX_SECONDS: u64 = i32::MAX as u64;

/// Which kind of device the workers use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DeviceKind {
    /// CUDA where a driver and a device are found, else the CPU.
    Auto,
    /// The CPU.
    Cpu,
    /// A CUDA device, or an error.
    Cuda,
}

/// What guesses drafts on the devices, at the end of each step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum DeviceDrafter {
    /// The head for multi-token prediction in the model's own checkpoint.
    Mtp,
    /// A smaller model with the same vocabulary, whose checkpoint is in this directory.
    Model(PathBuf),
    /// A head in the form of EAGLE-3, whose checkpoint is in this directory.
    Eagle3(PathBuf),
}

/// How the weights of linear layers are quantized while they are loaded; embeddings, norms and biases keep the checkpoint's type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ValueEnum)]
pub enum WeightPrecision {
    /// They stay as the checkpoint has them.
    #[default]
    #[value(name = "auto", alias = "none")]
    Checkpoint,
    /// e4m3 with a scale for each output. CPUs keep the rounded values in bf16.
    #[value(help = "8-bit floats; CPUs expand them to bf16")]
    Fp8,
    /// 8 bits. On GPUs a scale for each output; on CPUs a scale for each 64 weights.
    #[value(help = "8-bit integers")]
    Int8,
    /// 4 bits. On GPUs a scale and a zero point for each 128 weights; on CPUs a scale for each 64, and 8 bits for the output head.
    #[value(help = "4-bit integers")]
    Int4,
}

/// The type of keys and values in the KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum KvCacheType {
    /// What the checkpoint names for them, else [`KvCacheType::Bf16`].
    #[default]
    Auto,
    /// bf16; on CPUs f32 if the weights are wider.
    Bf16,
    /// e4m3 with a scale for each token and KV head.
    Fp8,
    /// Integers of 8 bits with a scale for each token and KV head.
    Int8,
}

impl DeviceKind {
    /// The name on command lines.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
        }
    }
}

impl WeightPrecision {
    /// The name on command lines and in model configurations.
    pub fn name(self) -> &'static str {
        match self {
            Self::Checkpoint => "auto",
            Self::Fp8 => "fp8",
            Self::Int8 => "int8",
            Self::Int4 => "int4",
        }
    }
}

impl KvCacheType {
    /// All types.
    pub const ALL: [Self; 4] = [Self::Auto, Self::Bf16, Self::Fp8, Self::Int8];

    /// The name on command lines and in model configurations.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Bf16 => "bf16",
            Self::Fp8 => "fp8",
            Self::Int8 => "int8",
        }
    }
}

impl fmt::Display for KvCacheType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for KvCacheType {
    type Err = String;

    /// Other servers' names are taken, too: `bfloat16`, `fp8_e4m3`, and TensorRT-LLM's in upper case.
    ///
    /// # Errors
    /// For an unknown name; the text lists the known ones.
    fn from_str(name: &str) -> Result<Self, String> {
        match name.to_ascii_lowercase().as_str() {
            "auto" => Ok(Self::Auto),
            "bf16" | "bfloat16" => Ok(Self::Bf16),
            "fp8" | "fp8_e4m3" => Ok(Self::Fp8),
            "int8" => Ok(Self::Int8),
            _ => {
                let also = if name.to_ascii_lowercase().ends_with("e5m2") { ", which is more exact" } else { "" };
                Err(format!(
                    "the type of the KV cache is `{name}`, expected `auto`, `bf16`, `fp8` (e4m3 with a scale for each token and head{also}) \
                     or `int8`"
                ))
            }
        }
    }
}

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for WeightPrecision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for WeightPrecision {
    type Err = String;

    /// # Errors
    /// For an unknown name; the text lists the known ones.
    fn from_str(name: &str) -> Result<Self, String> {
        ValueEnum::from_str(name, false)
            .map_err(|_| format!("the precision of weights is `{name}`, expected `none`, `fp8`, `int8` or `int4`"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_lines_parse_the_names_that_are_printed() {
        for precision in WeightPrecision::value_variants() {
            assert_eq!(precision.name().parse(), Ok(*precision));
            assert_eq!(<WeightPrecision as ValueEnum>::from_str(precision.name(), false), Ok(*precision));
        }
        for device in DeviceKind::value_variants() {
            assert_eq!(DeviceKind::from_str(device.name(), false), Ok(*device));
        }
        let error = "int2".parse::<WeightPrecision>().unwrap_err();
        assert_eq!(error, "the precision of weights is `int2`, expected `none`, `fp8`, `int8` or `int4`");
        assert_eq!("none".parse(), Ok(WeightPrecision::Checkpoint));
        for kind in KvCacheType::ALL {
            assert_eq!(kind.name().parse(), Ok(kind));
        }
        assert_eq!(["fp8_e4m3", "FP8"].map(str::parse), [Ok(KvCacheType::Fp8), Ok(KvCacheType::Fp8)]);
        let error = "fp8_e5m2".parse::<KvCacheType>().unwrap_err();
        assert!(error.contains("`fp8_e5m2`, expected `auto`, `bf16`, `fp8` (e4m3"), "{error}");
    }
}
