//! Settings that pass through several processes: from the launcher's command line over the ranks' to the workers.
//!
//! Each is one type here, which command lines parse and print, and specs of workers carry.
#![forbid(unsafe_code)]

use std::fmt;
use std::str::FromStr;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

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

/// How the weights of linear layers are stored; embeddings, norms and biases keep the checkpoint's type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ValueEnum)]
pub enum WeightPrecision {
    /// As the checkpoint has them.
    #[default]
    #[value(name = "auto")]
    Checkpoint,
    /// 8 bits, and one scale for each 64 weights.
    #[value(help = "8 bits")]
    Int8,
    /// 4 bits, and one scale for each 64 weights; the output head has 8 bits.
    #[value(help = "4 bits")]
    Int4,
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
            Self::Int8 => "int8",
            Self::Int4 => "int4",
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
        let found = Self::value_variants().iter().copied().find(|precision| precision.name() == name);
        found.ok_or_else(|| format!("`weight_only_precision` is `{name}`, expected `auto`, `int8` or `int4`"))
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
        assert_eq!(error, "`weight_only_precision` is `int2`, expected `auto`, `int8` or `int4`");
    }
}
