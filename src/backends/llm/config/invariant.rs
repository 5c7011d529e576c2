//! The parameter `batch_invariant`, and what GPUs do not support with it. The device refuses what depends on the GPU and on sizes.

use models::Config;
use ops::Target;
use repository::ModelConfig;
use serving::InferError;
use supervision::WeightPrecision;

use super::{LlmDefaults, invalid, target};
use crate::parameters;

/// Whether tokens of a request must not depend on what runs beside it.
///
/// # Errors
/// When the GPU kernels for a part of the model depend on other rows. CPUs support everything: their sums never do.
pub(super) fn batch_invariant(
    config: &ModelConfig,
    model: &Config,
    defaults: &LlmDefaults,
    precision: WeightPrecision,
) -> Result<bool, InferError> {
    let is_wanted = parameters::flag(config, "batch_invariant")?.unwrap_or(defaults.worker.batch_invariant);
    if !is_wanted || target(defaults.worker.device) == Target::Cpu {
        return Ok(is_wanted);
    }
    if model.has_recurrent_layers() {
        return Err(invalid(config, "`batch_invariant` on GPUs does not support recurrent layers".to_owned()));
    }
    if model.stored_quantization().is_some() || precision != WeightPrecision::Checkpoint {
        let name = &config.name;
        tracing::warn!(model = %name, "with `batch_invariant`, GPUs expand quantized weights to bf16, and take its memory and time");
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use repository::proto::ModelParameter;
    use supervision::DeviceChoice;

    use super::super::tests::{llm_config, llm_defaults};
    use super::*;

    /// With the parameter, for a checkpoint of the tests.
    fn checked(checkpoint: &str, device: DeviceChoice) -> Result<bool, String> {
        let mut config = ModelConfig::default();
        config.parameters.insert("batch_invariant".into(), ModelParameter { string_value: "true".into() });
        let worker = supervision::WorkerSettings { device, ..llm_config().worker };
        let defaults = LlmDefaults { worker, ..llm_defaults() };
        let goldens = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/goldens");
        let model = Config::from_dir(&goldens.join(checkpoint)).expect("a model");
        batch_invariant(&config, &model, &defaults, WeightPrecision::Checkpoint).map_err(|error| error.to_string())
    }

    #[test]
    fn gpus_refuse_by_name_what_depends_on_other_rows() {
        let cuda = DeviceChoice::Cuda { ordinal: 0 };
        assert_eq!(checked("qwen3_moe", cuda), Ok(true));
        let error = checked("qwen3_next", cuda).unwrap_err();
        assert!(error.contains("does not support recurrent layers"), "{error}");
    }

    #[test]
    fn cpus_support_everything() {
        let cpu = DeviceChoice::Cpu { threads: 1, first_core: None };
        assert_eq!(checked("qwen3_next", cpu), Ok(true));
    }
}
