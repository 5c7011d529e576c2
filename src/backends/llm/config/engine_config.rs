//! The settings of the engine.

use engine::{EngineConfig, Policy, TokenId};
use repository::ModelConfig;
use serving::InferError;
use supervision::DeviceChoice;

use super::drafts::Drafts;
use super::{LlmDefaults, invalid};
use crate::llm::inter_token::InterTokenBounds;
use crate::llm::queue_policy::QueuePolicy;
use crate::parameters;

/// Rows of a tile of the matrix products on GPUs.
const GPU_TOKEN_TILE: usize = 128;

/// Prompt tokens that a step with decodes computes whatever the bound of its time, on CPUs and on GPUs. On a GPU fewer
/// would take as long.
const MIN_PROMPT_TOKENS: [usize; 2] = [16, 64];

/// The settings of the engine, besides those that follow from the workers.
pub(super) fn engine_config(
    config: &ModelConfig,
    model: &models::Config,
    defaults: &LlmDefaults,
    queue: &QueuePolicy,
    drafts: Drafts,
) -> Result<EngineConfig, InferError> {
    let max_rows = usize::try_from(config.max_batch_size).unwrap_or(0).max(1);
    let inter_token = InterTokenBounds::new(config, queue)?;
    let queue = queue.bounds(EngineConfig::default().max_queue);
    let is_cuda = matches!(defaults.worker.device, DeviceChoice::Cuda { .. });
    let experts = model.layers.iter().find_map(|layer| layer.experts.as_ref());
    let policy = match parameters::text(config, "batch_scheduler_policy") {
        None | Some("max_utilization") => Policy::MaxUtilization,
        Some("guaranteed_no_evict") => Policy::GuaranteedNoEvict,
        Some(other) => {
            let expected = "`max_utilization` or `guaranteed_no_evict`";
            return Err(invalid(config, format!("`batch_scheduler_policy` is `{other}`, expected {expected}")));
        }
    };
    let max_sequence_len = max_sequence_len(config, model.max_position_embeddings)?;
    Ok(EngineConfig {
        max_rows,
        max_step_tokens: parameters::number(config, "max_num_tokens")?
            .unwrap_or(defaults.max_step_tokens)
            .max(max_rows),
        max_sequence_len,
        block_size: parameters::number(config, "tokens_per_block")?.unwrap_or(defaults.block_size),
        max_inter_token: inter_token.all.or(defaults.max_inter_token),
        max_inter_token_of: inter_token.of,
        min_prompt_tokens: MIN_PROMPT_TOKENS[usize::from(is_cuda)],
        token_tile: if is_cuda { GPU_TOKEN_TILE } else { 1 },
        num_experts: experts.map_or(0, |experts| experts.num_experts),
        num_active_experts: experts.map_or(0, |experts| experts.routing.top_k),
        max_queue: queue.total,
        max_queue_each: queue.each,
        max_queue_of: queue.of,
        policy,
        max_joined_tokens: max_sequence_len.max(EngineConfig::default().max_joined_tokens),
        prefix_cache: parameters::flag(config, "enable_kv_cache_reuse")?.unwrap_or(true),
        max_drafts: drafts.max,
        guesses_on_device: drafts.are_of_device(),
        // How many follows from the memory.
        num_states: usize::from(model.has_recurrent_layers()),
        // Chat templates write one of them behind each message.
        message_ends: model.eos_ids.iter().copied().map(TokenId).collect(),
        windows: model.kv_groups(max_sequence_len).windows,
        ..EngineConfig::default()
    })
}

/// The length of the longest sequence of a model with this number of positions.
fn max_sequence_len(config: &ModelConfig, positions: usize) -> Result<usize, InferError> {
    match parameters::number(config, "max_sequence_len")? {
        Some(len) if len > positions => Err(invalid(
            config,
            format!(
                "`max_sequence_len` (`--max-model-len`) is {len}, more than the {positions} positions of the model; \
                 lower it, or leave it out"
            ),
        )),
        len => Ok(len.unwrap_or(positions)),
    }
}

#[cfg(test)]
mod tests {
    use repository::proto::ModelParameter;

    use super::*;

    #[test]
    fn a_sequence_has_at_most_the_positions_of_the_model() {
        let len_of = |value: Option<&str>| {
            let mut config = ModelConfig { name: "llm".to_owned(), ..ModelConfig::default() };
            let parameter = value.map(|value| ModelParameter { string_value: value.to_owned() });
            config.parameters.extend(parameter.map(|parameter| ("max_sequence_len".to_owned(), parameter)));
            max_sequence_len(&config, 2048).map_err(|error| error.to_string())
        };
        assert_eq!(len_of(None), Ok(2048));
        assert_eq!(len_of(Some("2048")), Ok(2048));
        assert_eq!(len_of(Some("100")), Ok(100));
        let error = len_of(Some("2049")).unwrap_err();
        assert!(error.contains("model `llm`: `max_sequence_len`"), "{error}");
        assert!(error.contains("is 2049, more than the 2048 positions of the model; lower it"), "{error}");
    }
}
