//! The parameters of adapters in `config.pbtxt`.

use std::path::{Path, PathBuf};

use models::MAX_ADAPTER_RANK;
use repository::ModelConfig;
use serving::InferError;

use crate::parameters;

/// Slots of a model that names adapters and not their number.
const DEFAULT_SLOTS: usize = 4;

/// Most slots of a model.
const MAX_SLOTS: usize = 1024;

/// Default of the largest rank, as in vLLM.
const DEFAULT_RANK: usize = 16;

/// Default of the bytes of host memory for adapters.
const DEFAULT_BYTES: u64 = 4 << 30;

/// Settings of a model's adapters.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct AdapterSettings {
    /// Slots of each worker; 0 if the model takes no adapters.
    pub(crate) num_slots: usize,
    /// Largest rank.
    pub(crate) max_rank: usize,
    /// Bytes of host memory for the weights of all adapters.
    pub(crate) memory_bytes: u64,
    /// Adapters that are loaded with the model.
    pub(crate) modules: Vec<AdapterModule>,
}

/// An adapter, and where its files are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AdapterModule {
    /// The name by which requests choose it.
    pub(crate) name: String,
    /// The folder that PEFT has saved.
    pub(crate) path: PathBuf,
}

impl AdapterSettings {
    /// Reads `max_loras`, `max_lora_rank`, `lora_memory_bytes` and `lora_modules`. Relative paths start at `model_dir`.
    pub(crate) fn new(config: &ModelConfig, model_dir: &Path) -> Result<Self, InferError> {
        let invalid = |message: String| InferError::invalid(format!("model `{}`: {message}", config.name));
        let modules = match parameters::text(config, "lora_modules") {
            Some(text) => modules(text).map_err(|error| invalid(format!("parameter `lora_modules`: {error}")))?,
            None => Vec::new(),
        };
        let default = if modules.is_empty() { 0 } else { DEFAULT_SLOTS };
        let num_slots = parameters::number(config, "max_loras")?.unwrap_or(default);
        let max_rank = parameters::number(config, "max_lora_rank")?.unwrap_or(DEFAULT_RANK);
        if num_slots > MAX_SLOTS {
            return Err(invalid(format!("`max_loras` is {num_slots}, expected 0 to {MAX_SLOTS}")));
        }
        if num_slots == 0 && !modules.is_empty() {
            return Err(invalid("`max_loras` is 0, and `lora_modules` names adapters; remove one of them".to_owned()));
        }
        if !(1..=MAX_ADAPTER_RANK).contains(&max_rank) {
            return Err(invalid(format!("`max_lora_rank` is {max_rank}, expected 1 to {MAX_ADAPTER_RANK}")));
        }
        let modules = modules.into_iter().map(|it| AdapterModule { path: model_dir.join(it.path), ..it }).collect();
        let memory_bytes = parameters::number(config, "lora_memory_bytes")?.unwrap_or(DEFAULT_BYTES);
        Ok(Self { num_slots, max_rank, memory_bytes, modules })
    }
}

/// `NAME=PATH`, separated by commas.
fn modules(text: &str) -> Result<Vec<AdapterModule>, String> {
    let entry = |entry: &str| match entry.trim().split_once('=') {
        Some((name, path)) if !name.is_empty() && !path.is_empty() => {
            Ok(AdapterModule { name: name.to_owned(), path: path.into() })
        }
        _ => Err(format!("`{entry}` is not of the form NAME=PATH")),
    };
    text.split(',').map(entry).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(parameters: &[(&str, &str)]) -> Result<AdapterSettings, String> {
        let mut config = ModelConfig { name: "llm".to_owned(), ..ModelConfig::default() };
        for (key, value) in parameters {
            let value = repository::proto::ModelParameter { string_value: (*value).to_owned() };
            config.parameters.insert((*key).to_owned(), value);
        }
        AdapterSettings::new(&config, Path::new("/models/llm")).map_err(|error| error.message)
    }

    #[test]
    fn adapters_are_named_as_pairs() {
        let found = settings(&[("lora_modules", "a=x/a, b=/b")]).unwrap();
        let paths: Vec<_> = found.modules.iter().map(|it| (it.name.as_str(), it.path.to_str().unwrap())).collect();
        assert_eq!(paths, [("a", "/models/llm/x/a"), ("b", "/b")]);
        assert_eq!((found.num_slots, found.max_rank), (4, 16));
        let found = settings(&[("lora_modules", "a=/a"), ("max_loras", "2"), ("max_lora_rank", "64")]).unwrap();
        assert_eq!((found.num_slots, found.max_rank, found.modules.len()), (2, 64, 1));
        assert_eq!(settings(&[]).unwrap().num_slots, 0);
    }

    #[test]
    fn settings_out_of_range_are_refused_by_name() {
        let refused = |parameters| settings(parameters).unwrap_err();
        assert!(refused(&[("max_lora_rank", "65")]).ends_with("`max_lora_rank` is 65, expected 1 to 64"));
        assert!(refused(&[("lora_modules", "a")]).contains("`a` is not of the form NAME=PATH"));
        assert!(refused(&[("lora_modules", "a=b"), ("max_loras", "0")]).contains("`max_loras` is 0"));
    }
}
