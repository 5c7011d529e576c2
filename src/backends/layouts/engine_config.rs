//! The configuration of the engine inside a layout.

use std::sync::Arc;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use repository::ModelConfig;
use repository::proto::{DataType, ModelOutput, ModelParameter};
use serving::{BackendFactory, InferError, LoadRequest};

use crate::checkpoint;

/// The request to load the engine: that of the model with its checkpoint, and with the configuration changed by `change`.
///
/// # Errors
/// When the model has no checkpoint.
pub(super) fn with_checkpoint(
    model: &LoadRequest,
    change: impl FnOnce(&mut ModelConfig),
) -> Result<LoadRequest, InferError> {
    let dir = checkpoint::find(&model.config, &model.model_dir, &model.version_dir)
        .map_err(|message| InferError::invalid(format!("model `{}`: {message}", model.config.name)))?;
    // The engine would resolve a relative path against another directory.
    let dir = std::path::absolute(&dir).unwrap_or(dir);
    let mut config = ModelConfig::clone(&model.config);
    let dir = ModelParameter { string_value: dir.display().to_string() };
    config.parameters.insert("gpt_model_path".to_owned(), dir);
    change(&mut config);
    Ok(LoadRequest { config: Arc::new(config), ..model.clone() })
}

/// Checks the engine inside a model, whose load is `engine`.
pub(super) fn check_engine(
    llm: &Arc<dyn BackendFactory>,
    engine: Result<LoadRequest, InferError>,
) -> BoxFuture<'static, Result<(), InferError>> {
    match engine {
        Ok(engine) => llm.check(engine),
        Err(error) => std::future::ready(Err(error)).boxed(),
    }
}

/// Names the tokenizer of a model in the configuration of its engine, where the checkpoint has none.
///
/// # Errors
/// When the model has no tokenizer either.
pub(super) fn with_tokenizer(engine: LoadRequest) -> Result<LoadRequest, InferError> {
    let checkpoint = engine.config.parameter("gpt_model_path").unwrap_or_default();
    if checkpoint::has_tokenizer(checkpoint.as_ref()) {
        return Ok(engine);
    }
    let dir = checkpoint::tokenizer_dir(&engine.config, &engine.model_dir, &engine.version_dir)
        .map_err(|message| InferError::invalid(format!("model `{}`: {message}", engine.config.name)))?;
    let mut config = ModelConfig::clone(&engine.config);
    let dir = std::path::absolute(&dir).unwrap_or(dir);
    config.parameters.insert("tokenizer_dir".to_owned(), ModelParameter { string_value: dir.display().to_string() });
    Ok(LoadRequest { config: Arc::new(config), ..engine })
}

/// An output of the engine that a layout uses.
pub(super) fn engine_output(name: &str, data_type: DataType) -> ModelOutput {
    let mut output = ModelOutput { name: name.to_owned(), dims: vec![-1], ..ModelOutput::default() };
    output.set_data_type(data_type);
    output
}
