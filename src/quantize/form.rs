//! The formats, and how `config.json` describes them.

use clap::ValueEnum;
use serde_json::{Value, json};

/// What linear layers become.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// 8-bit floats (e4m3), a scale for each output; servers round activations to fp8 for each token
    Fp8,
    /// 8-bit floats (e4m3), a scale for each block of 128 x 128
    Fp8Block,
    /// 8-bit integers in groups of 128 inputs
    Int8,
    /// 4-bit integers in groups of 128 inputs
    Int4,
    /// 4-bit integers in groups of 128 inputs with zero points; scales are chosen by calibration text
    Int4Awq,
}

/// How the codes of one matrix are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// e4m3, a scale for each row.
    Fp8Rows,
    /// e4m3, a scale for each block of [`BLOCK`] rows and columns.
    Fp8Blocks,
    /// Integers of `bits` bits, packed into words. Each `group` columns of a row have a scale, and a zero point if `has_zeros`.
    #[allow(missing_docs)] // Fields are named by the line above.
    Integers { bits: usize, group: usize, has_zeros: bool },
}

/// Rows and columns of a block of fp8.
pub(crate) const BLOCK: usize = 128;

impl Format {
    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fp8 => "fp8",
            Self::Fp8Block => "fp8-block",
            Self::Int8 => "int8",
            Self::Int4 => "int4",
            Self::Int4Awq => "int4-awq",
        }
    }

    pub(crate) fn needs_calibration(self) -> bool {
        self == Self::Int4Awq
    }

    /// The number of which inputs must be a multiple.
    pub(crate) fn multiple(self) -> usize {
        match self {
            Self::Fp8 => 1,
            // Programs that round the inputs of a layer in groups of 128 read no others.
            Self::Fp8Block => BLOCK,
            Self::Int8 | Self::Int4 | Self::Int4Awq => 32,
        }
    }

    /// The form of matrices with these numbers of inputs; `None` if all have another multiple. Groups are as large as possible and of one
    /// size in the whole model.
    pub(crate) fn form(self, inputs: impl Iterator<Item = usize> + Clone) -> Option<Form> {
        let usable = inputs.filter(|cols| cols.is_multiple_of(self.multiple()));
        usable.clone().next()?;
        let (bits, has_zeros) = match self {
            Self::Fp8 => return Some(Form::Fp8Rows),
            Self::Fp8Block => return Some(Form::Fp8Blocks),
            Self::Int8 => (8, false),
            Self::Int4 => (4, false),
            Self::Int4Awq => (4, true),
        };
        let group = [128, 64, 32].into_iter().find(|group| usable.clone().all(|cols| cols.is_multiple_of(*group)))?;
        Some(Form::Integers { bits, group, has_zeros })
    }
}

impl Form {
    /// Whether a matrix with this number of inputs can have the form.
    pub(crate) fn fits(self, cols: usize) -> bool {
        match self {
            Self::Fp8Rows => true,
            Self::Fp8Blocks => cols.is_multiple_of(BLOCK),
            Self::Integers { group, .. } => cols.is_multiple_of(group),
        }
    }

    /// `quantization_config` of a checkpoint whose modules `ignored` are not quantized.
    pub(crate) fn config(self, ignored: &[String]) -> Value {
        let (format, weights, activations) = match self {
            Self::Fp8Rows => (
                "float-quantized",
                json!({"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": true, "dynamic": false}),
                json!({"num_bits": 8, "type": "float", "strategy": "token", "symmetric": true, "dynamic": true}),
            ),
            Self::Fp8Blocks => (
                "float-quantized",
                json!({"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [BLOCK, BLOCK], "symmetric": true,
                       "dynamic": false}),
                json!({"num_bits": 8, "type": "float", "strategy": "group", "group_size": BLOCK, "symmetric": true, "dynamic": true}),
            ),
            Self::Integers { bits, group, has_zeros } => (
                "pack-quantized",
                json!({"num_bits": bits, "type": "int", "strategy": "group", "group_size": group, "symmetric": !has_zeros,
                       "dynamic": false}),
                Value::Null,
            ),
        };
        json!({
            "quant_method": "compressed-tensors",
            "format": format,
            "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations,
                                          "output_activations": null}},
            "ignore": ignored,
        })
    }
}
