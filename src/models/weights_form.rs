//! What two checkpoints must have in common so that the weights of one can replace those of the other in a model that is served.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::checkpoint::{TensorForm, is_constant, tensor_forms};
use crate::{Config, ModelError, from_python_json};

/// Fields of `config.json` that are not compared: they do not change what a model computes, or only what ends a sequence.
const OTHER_FIELDS: [&str; 7] =
    ["_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "bos_token_id", "eos_token_id"];

/// Most fields that a message names.
const MAX_NAMED: usize = 8;

/// The configuration of a checkpoint and the form of its tensors, without their data.
#[derive(Debug, Clone)]
pub struct WeightsForm {
    dir: PathBuf,
    config: Config,
    tensors: BTreeMap<String, TensorForm>,
    /// `config.json`, for messages.
    fields: Map<String, Value>,
}

impl WeightsForm {
    /// Reads the form of the checkpoint in `dir`, whose configuration is `config`. No file stays open or mapped.
    ///
    /// # Errors
    /// When it has no safetensors files, or a file is missing, truncated or invalid.
    pub fn read(dir: &Path, config: Config) -> Result<Self, ModelError> {
        let path = dir.join("config.json");
        let json = std::fs::read(&path).map_err(|source| ModelError::Read { path: path.clone(), source })?;
        let fields = from_python_json(&json).map_err(|source| ModelError::Json { path, source })?;
        Ok(Self { dir: dir.into(), config, tensors: tensor_forms(dir)?, fields })
    }

    /// Why the weights of `other` cannot replace these; `None` if they can.
    pub fn difference(&self, other: &Self) -> Option<String> {
        if comparable(&self.config) != comparable(&other.config) {
            return Some(format!(
                "{} describes another model than the one that is served; {}",
                other.dir.join("config.json").display(),
                self.different_fields(other)
            ));
        }
        let (dir, is_compared) = (other.dir.display(), |name: &str| !self.is_optional(name));
        let mut served = self.tensors.iter().filter(|(name, _)| is_compared(name));
        let changed = served.find_map(|(name, form)| match other.tensors.get(name) {
            None => Some(format!("tensor `{name}` is missing in {dir}")),
            Some(found) if found != form => Some(format!(
                "tensor `{name}` in {dir} is {} {:?}, and {} {:?} is served",
                found.dtype, found.shape, form.dtype, form.shape
            )),
            Some(_) => None,
        });
        let is_new = |name: &&String| is_compared(name) && !self.tensors.contains_key(*name);
        let added = || other.tensors.keys().find(is_new);
        changed.or_else(|| added().map(|name| format!("tensor `{name}` in {dir} is not one of the served checkpoint")))
    }

    /// Whether a checkpoint of this model may have this tensor or not: constants, and a head that is the embedding.
    fn is_optional(&self, name: &str) -> bool {
        let is_head = || self.config.names.heads.iter().any(|head| name.strip_suffix(".weight") == Some(*head));
        is_constant(name) || self.config.head.is_tied && is_head()
    }

    /// The fields of `config.json` that differ.
    fn different_fields(&self, other: &Self) -> String {
        let mut names: Vec<&String> = self.fields.keys().chain(other.fields.keys()).collect();
        names.sort();
        names.dedup();
        names
            .retain(|name| !OTHER_FIELDS.contains(&name.as_str()) && self.fields.get(*name) != other.fields.get(*name));
        match names.len() {
            0 => "other files beside it differ".to_owned(),
            _ => format!(
                "different: `{}`",
                names.iter().take(MAX_NAMED).map(|it| it.as_str()).collect::<Vec<_>>().join("`, `")
            ),
        }
    }
}

/// What of a configuration must be the same. Rank 0 goes on with the end tokens of the checkpoint that the model was loaded from, and
/// types are compared for each tensor.
fn comparable(config: &Config) -> Config {
    Config { bos_id: None, eos_ids: Vec::new(), dtype: ops::DType::Bf16, notes: Vec::new(), ..config.clone() }
}
