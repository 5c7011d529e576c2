//! The configuration of the engine inside a layout.

use std::sync::Arc;

use repository::ModelConfig;
use repository::proto::{DataType, ModelOutput, ModelParameter};
use serving::{InferError, LoadRequest};

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

/// An output of the engine that a layout uses.
pub(super) fn engine_output(name: &str, data_type: DataType) -> ModelOutput {
    let mut output = ModelOutput { name: name.to_owned(), dims: vec![-1], ..ModelOutput::default() };
    output.set_data_type(data_type);
    output
}
