//! Which files of a model are needed to serve it.
//!
//! Weights are chosen as `models::Checkpoint::open` finds them: by the index, else the single file, else every file of the kind.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::Value;

use crate::listing::{Listed, is_safe};

/// Configuration, tokenizer and chat templates.
const SMALL: [&str; 16] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "chat_template.json",
    "model.safetensors.index.json",
    "pytorch_model.bin.index.json",
];

/// Directory of further chat templates.
const TEMPLATES: &str = "additional_chat_templates/";

/// A kind of files of weights.
struct Kind {
    index: &'static str,
    single: &'static str,
    prefix: &'static str,
    suffix: &'static str,
}

/// In the order in which they are searched for.
const KINDS: [Kind; 2] = [
    Kind { index: "model.safetensors.index.json", single: "model.safetensors", prefix: "", suffix: ".safetensors" },
    Kind {
        index: "pytorch_model.bin.index.json",
        single: "pytorch_model.bin",
        prefix: "pytorch_model",
        suffix: ".bin",
    },
];

impl Kind {
    fn has(&self, name: &str) -> bool {
        name.starts_with(self.prefix) && name.ends_with(self.suffix) && !name.contains('/')
    }
}

/// The files besides the weights.
pub(crate) fn small(files: &[Listed]) -> Vec<&Listed> {
    let has_safetensors = files.iter().any(|file| KINDS[0].has(&file.name));
    let is_needed = |name: &str| match name.strip_prefix(TEMPLATES) {
        Some(template) => template.ends_with(".jinja") && !template.contains('/'),
        None => SMALL.contains(&name) && !(has_safetensors && name == KINDS[1].index),
    };
    files.iter().filter(|file| is_needed(&file.name)).collect()
}

/// The files with weights. `dir` has the files of [`small`].
///
/// # Errors
/// When there are none, or the index names others than the model has.
pub(crate) fn weights<'a>(files: &'a [Listed], dir: &Path) -> Result<Vec<&'a Listed>, String> {
    let find = |name: &str| files.iter().find(|file| file.name == name);
    for kind in &KINDS {
        if find(kind.index).is_some() {
            let named = shards(&dir.join(kind.index))?;
            let missing = |name: &String| format!("{} names `{name}`, which the model does not have", kind.index);
            return named.iter().map(|name| find(name).ok_or_else(|| missing(name))).collect();
        }
        if let Some(single) = find(kind.single) {
            return Ok(vec![single]);
        }
        let found: Vec<&Listed> = files.iter().filter(|file| kind.has(&file.name)).collect();
        if !found.is_empty() {
            return Ok(found);
        }
    }
    let has = |end: &str| files.iter().any(|file| file.name.ends_with(end));
    Err(match () {
        () if has("adapter_config.json") => "it is an adapter to another model, and adapters are not read".to_owned(),
        () if has(".gguf") => "it has GGUF files only; take the model that they were made from".to_owned(),
        () => "it has no *.safetensors and no pytorch_model*.bin".to_owned(),
    })
}

/// Whether a directory has a checkpoint with all its weights.
pub(crate) fn is_complete(dir: &Path) -> bool {
    if !dir.join("config.json").is_file() {
        return false;
    }
    for kind in &KINDS {
        let index = dir.join(kind.index);
        if index.is_file() {
            return shards(&index).is_ok_and(|names| names.iter().all(|name| dir.join(name).is_file()));
        }
        let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
        let is_weights = |name: &str| kind.has(name) && dir.join(name).is_file();
        if entries.filter_map(|entry| entry.file_name().into_string().ok()).any(|name| is_weights(&name)) {
            return true;
        }
    }
    false
}

/// The files that an index names.
fn shards(index: &Path) -> Result<BTreeSet<String>, String> {
    let wrong = |reason: String| format!("{}: {reason}", index.file_name().unwrap_or_default().to_string_lossy());
    let text = std::fs::read(index).map_err(|error| wrong(error.to_string()))?;
    let value: Value = serde_json::from_slice(&text).map_err(|error| wrong(error.to_string()))?;
    let map = value.get("weight_map").and_then(Value::as_object);
    let map = map.ok_or_else(|| wrong("it has no `weight_map`".to_owned()))?;
    let names = map.values().map(|file| match file.as_str() {
        Some(name) if is_safe(name) && !name.contains('/') => Ok(name.to_owned()),
        _ => Err(wrong(format!("{file} is no name of a file"))),
    });
    names.collect()
}
