//! Which architectures there are, and how each is built.

use std::path::Path;

use device::{AttentionSpec, Device, DeviceError};

use crate::llama::Llama;
use crate::shard::Shard;
use crate::{Checkpoint, Config, ModelError};

/// A loaded model: this worker's share of the weights and the activation buffers of a step.
pub trait Model<D: Device> {
    /// Attention of every layer, this worker's share, for [`Device::memory_plan`] and [`Device::allocate_cache`].
    fn attention_spec(&self, block_size: usize) -> AttentionSpec;

    /// One forward pass over the device's current step, ended by [`Device::sample`].
    ///
    /// # Errors
    /// What the device reports.
    fn forward(&mut self, device: &mut D) -> Result<(), DeviceError>;
}

/// An architecture and how it differs from Llama, of which all known ones are variants.
#[derive(Debug)]
pub(crate) struct Family {
    /// As `architectures` in `config.json` names it.
    pub(crate) architecture: &'static str,
    /// As `model_type` names it.
    pub(crate) model_type: &'static str,
    /// q, k, v have biases where `attention_bias` is absent.
    pub(crate) qkv_bias: bool,
    /// The attention output has a bias where q, k, v do.
    pub(crate) out_bias: bool,
    /// `sliding_window` counts.
    pub(crate) sliding_window: bool,
}

const FAMILIES: &[Family] = &[
    Family {
        architecture: "LlamaForCausalLM",
        model_type: "llama",
        qkv_bias: false,
        out_bias: true,
        sliding_window: false,
    },
    Family {
        architecture: "MistralForCausalLM",
        model_type: "mistral",
        qkv_bias: false,
        out_bias: false,
        sliding_window: true,
    },
];

/// Names of the known architectures.
pub fn architectures() -> Vec<&'static str> {
    FAMILIES.iter().map(|family| family.architecture).collect()
}

pub(crate) fn family(architecture: &str) -> Option<&'static Family> {
    FAMILIES.iter().find(|family| family.architecture == architecture)
}

pub(crate) fn family_of_type(model_type: &str) -> Option<&'static Family> {
    FAMILIES.iter().find(|family| family.model_type == model_type)
}

/// Maps the weights in `dir` and hands the device its share.
///
/// # Errors
/// When weights are missing or do not fit `config`, the device's group cannot share the heads, or the device refuses.
pub fn load<D: Device + 'static>(dir: &Path, config: &Config, device: &mut D) -> Result<Box<dyn Model<D>>, ModelError> {
    let shard = Shard::new(config, device.tensor_parallel())?;
    let checkpoint = Checkpoint::open(dir)?;
    Ok(Box::new(Llama::load(dir, &checkpoint, config, shard, device)?))
}
