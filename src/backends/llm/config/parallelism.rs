//! The ranks that the workers of a model take.

use repository::ModelConfig;
use serving::InferError;

use super::{LlmDefaults, invalid};
use crate::parameters;

/// The assignment of a model to the ranks of a world.
pub(super) struct Parallelism {
    pub(super) tp_size: u32,
    pub(super) pp_size: u32,
    pub(super) ep_size: u32,
    pub(super) num_replicas: u32,
}

impl Parallelism {
    /// Reads the parameters `tp`, `pp`, `ep` and `replicas`. The default of `tp` is all ranks of the world. The default of `replicas` is
    /// the number that fits into the world.
    pub(super) fn new(
        config: &ModelConfig,
        model: &models::Config,
        defaults: &LlmDefaults,
    ) -> Result<Self, InferError> {
        let (world_size, num_layers) = (defaults.world_size, model.num_layers());
        let pp_size = match parameters::number::<u32>(config, "pp")? {
            None => parameters::number(config, "pipeline_parallelism")?.unwrap_or(1),
            Some(pp) => pp,
        };
        let replicas: Option<u32> = parameters::number(config, "replicas")?;
        let left = world_size / pp_size.max(1) / replicas.unwrap_or(1).max(1);
        let tp_size = parameters::number(config, "tp")?.unwrap_or(left);
        if pp_size == 0 || pp_size as usize > num_layers {
            let message = format!("`pp` is {pp_size}, expected 1 to {num_layers}, the layers of the model");
            return Err(invalid(config, message));
        }
        let min_replicas = replicas.unwrap_or(1);
        let needed = tp_size.max(1).saturating_mul(pp_size).saturating_mul(min_replicas.max(1));
        if tp_size == 0 || min_replicas == 0 || needed > world_size {
            let copies = replicas.map_or_else(String::new, |count| format!(" x `replicas` {count}"));
            let message = format!("`tp` {tp_size} x `pp` {pp_size}{copies} workers need as many ranks");
            return Err(invalid(
                config,
                format!("{message}, and world_size is {world_size}; start with `--world_size={needed}`"),
            ));
        }
        let num_replicas = replicas.unwrap_or(world_size / (tp_size * pp_size));
        let num_idle = world_size - num_replicas * tp_size * pp_size;
        if num_idle > 0 {
            tracing::warn!(model = %config.name, "{num_idle} of {world_size} ranks have no worker of this model");
        }
        let ep_size = parameters::number(config, "ep")?.unwrap_or(1);
        Ok(Self { tp_size, pp_size, ep_size, num_replicas })
    }
}

/// Checks that `tp` workers can share `model` and what guesses its drafts.
///
/// # Errors
/// When the number of heads is not divisible by `tp`. The message has the sizes that work.
pub(super) fn check_shares(config: &ModelConfig, model: &models::Config, tp: u32) -> Result<(), InferError> {
    models::shard::check(model, tp).map_err(|error| InferError::invalid(format!("model `{}`: {error}", config.name)))
}
