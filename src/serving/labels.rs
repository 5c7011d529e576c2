//! Names of classes, for the classification extension: it returns the largest values of an output with their names.

use std::collections::BTreeMap;
use std::path::{Component, Path};
use std::sync::Arc;

use repository::ModelConfig;

use crate::InferError;

/// Labels by output name.
pub(crate) type Labels = BTreeMap<String, Arc<[String]>>;

/// Reads the label files of a model. Each line is one label.
///
/// # Errors
/// When a file is not below the model's directory or cannot be read.
pub(crate) fn read(config: &ModelConfig, model_dir: &Path) -> Result<Labels, InferError> {
    let named = config.output.iter().filter(|output| !output.label_filename.is_empty());
    let labels = named.map(|output| {
        let file = Path::new(&output.label_filename);
        if !file.components().all(|part| matches!(part, Component::Normal(_))) {
            let location = format!("`label_filename` `{}` of output `{}`", file.display(), output.name);
            return Err(InferError::invalid(format!("{location} is not a name below the model's directory")));
        }
        let path = model_dir.join(file);
        let text = std::fs::read_to_string(&path).map_err(|error| {
            InferError::invalid(format!("cannot read labels of output `{}`, {}: {error}", output.name, path.display()))
        })?;
        Ok((output.name.clone(), text.lines().map(str::to_owned).collect()))
    });
    labels.collect()
}
