//! The parameter `batch_invariant`, and what GPUs do not support with it.

use models::Config;
use ops::Target;
use repository::ModelConfig;
use serving::InferError;
use supervision::WeightPrecision;

use super::drafts::Drafts;
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
    let refused = [
        (model.has_recurrent_layers(), "recurrent layers"),
        (
            Drafts::new(config, model, Target::Cuda)?.max > 0,
            "drafts; remove `prompt_lookup_num_tokens` or the number of another source",
        ),
    ];
    match refused.into_iter().find(|&(is_refused, _)| is_refused) {
        Some((_, what)) => Err(invalid(config, format!("`batch_invariant` on GPUs does not support {what}"))),
        None => {
            if model.stored_quantization().is_some() || precision != WeightPrecision::Checkpoint {
                let name = &config.name;
                tracing::warn!(model = %name, "with `batch_invariant`, GPUs expand quantized weights to bf16, and take its memory and time");
            }
            Ok(true)
        }
    }
}

#[cfg(test)]
mod tests {
    use repository::proto::ModelParameter;
    use supervision::DeviceChoice;

    use super::super::tests::{llm_config, llm_defaults};
    use super::*;

    const CONFIG: &str = r#"{"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5, "architectures": ["LlamaForCausalLM"]}"#;

    /// With the parameter, and another one.
    fn checked((key, value): (&str, &str), device: DeviceChoice) -> Result<bool, String> {
        let mut config = ModelConfig::default();
        for (key, value) in [("batch_invariant", "true"), (key, value)] {
            config.parameters.insert(key.to_owned(), ModelParameter { string_value: value.to_owned() });
        }
        let worker = supervision::WorkerSettings { device, ..llm_config().worker };
        let defaults = LlmDefaults { worker, ..llm_defaults() };
        let dir = tempfile::tempdir().expect("a folder");
        std::fs::write(dir.path().join("config.json"), CONFIG).expect("a file");
        let model = Config::from_dir(dir.path()).expect("a model");
        batch_invariant(&config, &model, &defaults, WeightPrecision::Checkpoint).map_err(|error| error.to_string())
    }

    #[test]
    fn gpus_refuse_by_name_what_depends_on_other_rows() {
        let cuda = DeviceChoice::Cuda { ordinal: 0 };
        assert_eq!(checked(("tp", "1"), cuda), Ok(true));
        let error = checked(("prompt_lookup_num_tokens", "4"), cuda).unwrap_err();
        assert!(error.contains("remove `prompt_lookup_num_tokens`"), "{error}");
    }

    #[test]
    fn cpus_support_everything() {
        let cpu = DeviceChoice::Cpu { threads: 1, first_core: None };
        assert_eq!(checked(("prompt_lookup_num_tokens", "4"), cpu), Ok(true));
    }
}
