//! Where a checkpoint keeps its chat templates, and what is read from a template's source.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::operators;
use crate::TextError;

/// Longest source of a template in bytes.
pub(super) const MAX_SOURCE_BYTES: usize = 1 << 20;
/// Most templates of one checkpoint.
const MAX_TEMPLATES: usize = 64;
/// The file of the template `default`.
pub(super) const FILE: &str = "chat_template.jinja";
/// The folder of the other templates, each with its name.
pub(super) const DIR: &str = "additional_chat_templates";

/// Sources of templates by name, each with the file it is from.
pub(super) type Sources = BTreeMap<String, (PathBuf, String)>;

/// The templates of a checkpoint directory: its files of templates, else those of `tokenizer_config.json`.
///
/// # Errors
/// When a file cannot be read, or exceeds a limit.
pub(super) fn of_dir(dir: &Path, config: &Value) -> Result<Sources, TextError> {
    let mut sources = of_files(dir)?;
    if sources.is_empty() {
        let path = dir.join("tokenizer_config.json");
        match config.get("chat_template") {
            Some(Value::String(text)) => drop(sources.insert("default".to_owned(), (path.clone(), text.clone()))),
            Some(Value::Array(list)) => {
                let named = list
                    .iter()
                    .filter_map(|one| Some((one["name"].as_str()?, one["template"].as_str()?)))
                    .map(|(name, text)| (name.to_owned(), (path.clone(), text.to_owned())));
                sources.extend(named);
            }
            _ => {}
        }
    }
    let too_much = |path: &Path, reason: String| Err(TextError::ChatTemplate { origin: origin(path), reason });
    if sources.len() > MAX_TEMPLATES {
        return too_much(dir, format!("there are {} templates, expected at most {MAX_TEMPLATES}", sources.len()));
    }
    match sources.values().find(|(_, text)| text.len() > MAX_SOURCE_BYTES) {
        Some((path, _)) => too_much(path, format!("it has more than {MAX_SOURCE_BYTES} bytes")),
        None => Ok(sources),
    }
}

/// How errors name a template that is read from a file.
pub(super) fn origin(path: &Path) -> String {
    format!("of `{}`", path.display())
}

fn of_files(dir: &Path) -> Result<Sources, TextError> {
    let mut sources = Sources::new();
    if let Some(text) = read(&dir.join(FILE))? {
        sources.insert("default".to_owned(), (dir.join(FILE), text));
    }
    let Ok(entries) = std::fs::read_dir(dir.join(DIR)) else { return Ok(sources) };
    for path in entries.filter_map(|entry| Some(entry.ok()?.path())).take(MAX_TEMPLATES) {
        let Some(name) = path.file_name().and_then(|name| name.to_str()?.strip_suffix(".jinja")) else { continue };
        if let Some(text) = read(&path)? {
            sources.insert(name.to_owned(), (path.clone(), text));
        }
    }
    Ok(sources)
}

/// A file's text; `None` if there is no such file.
fn read(path: &Path) -> Result<Option<String>, TextError> {
    let too_long = std::fs::metadata(path).is_ok_and(|file| file.len() > MAX_SOURCE_BYTES as u64);
    if too_long {
        let reason = format!("it has more than {MAX_SOURCE_BYTES} bytes");
        return Err(TextError::ChatTemplate { origin: origin(path), reason });
    }
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(TextError::Read { path: path.to_owned(), source }),
    }
}

/// The source as it is compiled: with line feeds at the ends of lines, and without the tags of generations.
pub(super) fn compiled(source: &str) -> String {
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    operators::rewritten(&without_generation_tags(&source))
}

/// The source with `{% with %}` and `{% endwith %}` for `{% generation %}` and `{% endgeneration %}`, which mark the model's
/// text for training, and which keep the variables set within to themselves too.
fn without_generation_tags(source: &str) -> Cow<'_, str> {
    let mut text = Cow::Borrowed("");
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at + 2);
        let end = tag.find("%}").unwrap_or(tag.len());
        let statement = &tag[..end];
        let new = match word(statement) {
            "generation" => Some(statement.replacen("generation", "with", 1)),
            "endgeneration" => Some(statement.replacen("endgeneration", "endwith", 1)),
            _ => None,
        };
        text += before;
        match new {
            Some(new) => text += Cow::Owned(new),
            None => text += statement,
        }
        rest = &tag[end..];
    }
    if matches!(text, Cow::Borrowed("")) {
        return Cow::Borrowed(source);
    }
    text += rest;
    text
}

/// The statement between `{%` and `%}` without its marks for white space.
fn trimmed(statement: &str) -> &str {
    statement.trim_start_matches(['-', '+']).trim_end_matches(['-', '+']).trim()
}

/// The only word of a statement; empty if there are more.
fn word(statement: &str) -> &str {
    let statement = trimmed(statement);
    if statement.bytes().all(|byte| byte.is_ascii_alphabetic()) { statement } else { "" }
}

/// Whether a template iterates over a message's content, so that it reads content in parts.
pub(super) fn iterates_content(source: &str) -> bool {
    let statements = || source.split("{%").skip(1).filter_map(|tag| Some(trimmed(tag.split_once("%}")?.0)));
    let mut names = HashSet::from(["content"]);
    for statement in statements() {
        let Some((name, value)) = statement.strip_prefix("set ").and_then(|set| set.split_once('=')) else { continue };
        if is_content(value, &names) {
            names.insert(name.trim());
        }
    }
    statements().any(|statement| {
        let list = statement.strip_prefix("for ").and_then(|of| of.split_once(" in "));
        list.is_some_and(|(_, list)| is_content(list, &names))
    })
}

/// Whether an expression is a message's content: a variable of `names`, or an item `content`, perhaps with filters or a condition.
fn is_content(expression: &str, names: &HashSet<&str>) -> bool {
    let mut rest = expression.trim_start_matches(|c: char| c == '(' || c.is_whitespace());
    let first = identifier(rest);
    rest = rest[first.len()..].trim_start();
    let mut is_content = names.contains(first);
    loop {
        if let Some(key) = rest.strip_prefix('.') {
            let name = identifier(key);
            rest = key[name.len()..].trim_start();
            is_content = name == "content";
            let Some(arguments) = rest.strip_prefix('(') else { continue };
            let Some((arguments, behind)) = arguments.split_once(')') else { return false };
            rest = behind.trim_start();
            let first = arguments.split(',').next().unwrap_or_default();
            is_content = name == "get" && quoted(first) == "content";
        } else if let Some(key) = rest.strip_prefix('[') {
            let Some((key, behind)) = key.split_once(']') else { return false };
            rest = behind.trim_start();
            is_content = quoted(key) == "content" || (is_content && key.contains(':'));
        } else {
            return is_content && !first.is_empty();
        }
    }
}

/// The name that a text begins with.
fn identifier(text: &str) -> &str {
    let end = text.find(|c: char| !(c.is_alphanumeric() || c == '_')).unwrap_or(text.len());
    &text[..end]
}

/// The text of a string literal; empty for another expression.
fn quoted(literal: &str) -> &str {
    let literal = literal.trim();
    let inner = |quote: char| literal.strip_prefix(quote)?.strip_suffix(quote);
    inner('\'').or_else(|| inner('"')).unwrap_or_default()
}
