//! `GET /tokenizer_info`: the tokenizer's settings, as vLLM gives them. Clients count tokens and render chats with them.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use http::StatusCode;
use serde_json::{Map, Value};

use super::error::ApiError;
use super::tokens::find;
use crate::api::triton::http::reply::{JSON, Reply, reply};
use crate::state::State;
use crate::transport::large_work::block_in_place_in_turn;

/// Longest file that is read. Those of published checkpoints have at most some MiB.
const MAX_FILE_BYTES: u64 = 16 << 20;
/// Where a checkpoint was made says nothing of its tokenizer.
const PATHS: [&str; 4] = ["vocab_file", "merges_file", "tokenizer_file", "name_or_path"];

/// The settings of the model that `?model=` names, or of the server's only one.
pub(super) async fn tokenizer_info(state: &State, query: Option<&str>) -> Result<Reply, ApiError> {
    let model = query.into_iter().flat_map(|query| query.split('&')).find_map(|pair| pair.strip_prefix("model="));
    let (name, generator) = find(state, model.map(str::to_owned))?;
    let read = || info(&generator.checkpoint).map(|info| info.to_string().into_bytes());
    let body = block_in_place_in_turn(MAX_FILE_BYTES as usize, read).await.map_err(|error| {
        let words = format!("The tokenizer's settings of model `{name}` cannot be read: {error}.");
        ApiError::of_status(StatusCode::INTERNAL_SERVER_ERROR, words)
    })?;
    Ok(reply(StatusCode::OK, JSON, body))
}

/// `tokenizer_config.json` of a checkpoint, with its chat template. Tokens that the file describes by objects are their texts.
fn info(checkpoint: &Path) -> io::Result<Value> {
    let mut info: Map<String, Value> = match text(&checkpoint.join("tokenizer_config.json"))? {
        Some(text) => serde_json::from_str(&text)?,
        None => Map::new(),
    };
    PATHS.iter().for_each(|name| drop(info.remove(*name)));
    if let Some(template) = text(&checkpoint.join("chat_template.jinja"))? {
        info.insert("chat_template".to_owned(), template.into());
    }
    if let Some(template) = info.get("chat_template").and_then(default_template) {
        info.insert("chat_template".to_owned(), template);
    }
    for (_, token) in info.iter_mut().filter(|(name, _)| name.ends_with("_token")) {
        if let Some(content) = token.get_mut("content").map(Value::take) {
            *token = content;
        }
    }
    info.entry("tokenizer_class").or_insert_with(|| "PreTrainedTokenizerFast".into());
    Ok(Value::Object(info))
}

/// The template `default` of a list of named ones.
fn default_template(templates: &Value) -> Option<Value> {
    let default = templates.as_array()?.iter().find(|template| template["name"] == "default")?;
    default.get("template").cloned()
}

/// A file's text; `None` if there is none.
fn text(path: &Path) -> io::Result<Option<String>> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let mut text = String::new();
    if file.take(MAX_FILE_BYTES + 1).read_to_string(&mut text)? as u64 > MAX_FILE_BYTES {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        return Err(io::Error::other(format!("`{name}` has more than {MAX_FILE_BYTES} bytes")));
    }
    Ok(Some(text))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::json;

    use super::*;

    #[test]
    fn tokens_are_texts_and_a_file_of_the_template_comes_first() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(info(dir.path()).unwrap(), json!({"tokenizer_class": "PreTrainedTokenizerFast"}));
        let templates = json!([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]);
        let config = json!({
            "tokenizer_class": "LlamaTokenizer", "bos_token": {"__type": "AddedToken", "content": "<s>"}, "eos_token": "</s>",
            "pad_token": null, "name_or_path": "/home/x", "chat_template": templates, "model_max_length": 10,
        });
        fs::write(dir.path().join("tokenizer_config.json"), config.to_string()).unwrap();
        let found = info(dir.path()).unwrap();
        let expected = json!({
            "tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "pad_token": null,
            "chat_template": "d", "model_max_length": 10,
        });
        assert_eq!(found, expected);
        fs::write(dir.path().join("chat_template.jinja"), "file").unwrap();
        assert_eq!(info(dir.path()).unwrap()["chat_template"], "file");
    }

    #[test]
    fn a_file_that_is_too_long_or_no_json_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("tokenizer_config.json"), "{").unwrap();
        assert!(info(dir.path()).is_err());
        fs::write(dir.path().join("tokenizer_config.json"), " ".repeat(MAX_FILE_BYTES as usize + 1)).unwrap();
        assert!(info(dir.path()).unwrap_err().to_string().contains("`tokenizer_config.json` has more than"));
    }
}
