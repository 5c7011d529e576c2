//! What GPUs do not support with the parameter `batch_invariant`. The device refuses what depends on the GPU and on sizes.

use engine::EngineConfig;
use models::Config;
use repository::ModelConfig;
use serving::InferError;

use super::invalid;

/// Positions that recurrent layers compute together on GPUs, so that where a chunk ends changes the roundings.
const RECURRENT_TILE: usize = 64;

/// The limits with which GPUs compute a prompt of a model with recurrent layers in the same tiles whatever else is computed. `model`
/// runs with `batch_invariant`.
///
/// # Errors
/// When prefixes of prompts, which end with KV blocks, would end within tiles.
pub(super) fn with_whole_prompts(
    config: &ModelConfig,
    model: &Config,
    engine: EngineConfig,
) -> Result<EngineConfig, InferError> {
    if !model.has_recurrent_layers() {
        return Ok(engine);
    }
    let block_size = engine.block_size;
    if !block_size.is_multiple_of(RECURRENT_TILE) {
        let expected =
            format!("with `batch_invariant` GPUs take multiples of {RECURRENT_TILE} for a model with recurrent layers");
        return Err(invalid(config, format!("`tokens_per_block` is {block_size}; {expected}")));
    }
    Ok(EngineConfig {
        prompt_tile: RECURRENT_TILE,
        // A chunk cannot end with a tile of the step, too.
        token_tile: 1,
        min_prompt_tokens: engine.min_prompt_tokens.max(RECURRENT_TILE),
        max_step_tokens: engine.max_step_tokens.max(engine.max_rows + RECURRENT_TILE),
        ..engine
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn model(checkpoint: &str) -> Config {
        let goldens = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/goldens");
        Config::from_dir(&goldens.join(checkpoint)).expect("a model")
    }

    #[test]
    fn prompts_of_recurrent_layers_are_computed_in_whole_tiles() {
        let of = |checkpoint: &str, block_size| {
            let engine = EngineConfig { block_size, max_rows: 30, max_step_tokens: 80, ..EngineConfig::default() };
            with_whole_prompts(&ModelConfig::default(), &model(checkpoint), engine).map_err(|error| error.to_string())
        };
        let engine = of("qwen3_next", 128).unwrap();
        assert_eq!((engine.prompt_tile, engine.min_prompt_tokens, engine.max_step_tokens), (64, 64, 94));
        assert_eq!(engine.validate(), Ok(()));
        let error = of("qwen3_next", 32).unwrap_err();
        assert!(
            error.contains("`tokens_per_block` is 32; with `batch_invariant` GPUs take multiples of 64"),
            "{error}"
        );
        let plain = of("qwen3_moe", 32).unwrap();
        assert_eq!((plain.prompt_tile, plain.max_step_tokens), (1, 80));
    }
}
