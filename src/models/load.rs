//! Loads a model: checks the device, maps the checkpoint, and gives the device its shard.

use std::path::Path;

use ops::{Device, KvElements};

use crate::decoder::Decoder;
use crate::model::Model;
use crate::shard::Shard;
use crate::{Checkpoint, Config, ModelError};

/// Maps the weights in `dir` and gives the device its shard.
///
/// # Errors
/// Returns an error if the device lacks an op that the architecture needs, weights are missing or do not fit `config`,
/// the heads cannot be divided among the device's group, or the device returns an error.
pub fn load<D: Device + 'static>(dir: &Path, config: &Config, device: &mut D) -> Result<Box<dyn Model<D>>, ModelError> {
    let lacking: Vec<String> =
        config.features().iter().filter(|f| device.lacks().contains(f)).map(ToString::to_string).collect();
    if !lacking.is_empty() {
        let architecture = config.architecture.clone();
        return Err(ModelError::DeviceLacks { dir: dir.into(), architecture, lacking: lacking.join(", ") });
    }
    if config.has_latents() && config.kv_elements != KvElements::Plain {
        return Err(ModelError::LatentCodes { dir: dir.into(), architecture: config.architecture.clone() });
    }
    let shard = Shard::new(config, device.tensor_parallel())?;
    let checkpoint = Checkpoint::open(dir)?;
    Ok(Box::new(Decoder::load(dir, &checkpoint, config, shard, device)?))
}
