//! Explains the files of a repository.

use std::path::{Path, PathBuf};

use crate::fields::Kind;
use crate::{Finding, LintError, Verdict};

/// The model that files belong to.
pub(crate) struct Owner<'a> {
    pub model: &'a str,
    pub kind: Kind,
    /// Whether a native implementation replaces its code.
    pub is_native: bool,
    /// Versions that are served.
    pub versions: &'a [i64],
    /// Label files of its outputs.
    pub labels: Vec<String>,
}

/// Names of a checkpoint's files, or their ends, and what is read from them.
const CHECKPOINT: [(&str, &str); 16] = [
    ("config.json", "the checkpoint's architecture"),
    ("generation_config.json", "ids that end a sequence"),
    (".safetensors", "weights"),
    (".safetensors.index.json", "which file holds which weight"),
    ("pytorch_model.bin", "weights"),
    ("pytorch_model.bin.index.json", "which file holds which weight"),
    ("tokenizer.json", "the tokenizer"),
    ("tokenizer.model", "the tokenizer"),
    ("spiece.model", "the tokenizer"),
    ("vocab.json", "the tokenizer's vocabulary"),
    ("merges.txt", "the tokenizer's merges"),
    ("added_tokens.json", "tokens beside the tokenizer's own"),
    ("special_tokens_map.json", "tokens beside the tokenizer's own"),
    ("tokenizer_config.json", "begin and end tokens, and the chat template"),
    ("chat_template.jinja", "the chat template"),
    ("chat_template.json", "the chat template"),
];

/// The finding of a checkpoint's directory that was given in place of a repository.
pub(crate) fn checkpoint(root: &Path) -> Finding {
    let dir = root.display();
    let why = format!(
        "{dir} is a checkpoint and no repository of models; `trireme serve {dir}` serves it, `trireme doctor {dir}` checks it, and \
         `trireme init {dir}` makes a repository around it"
    );
    Finding::file(Verdict::Wrong, "", &root.join("config.json"), why)
}

/// Findings of the files beside the models.
///
/// # Errors
/// When the directory cannot be read.
pub(crate) fn files_outside_models(root: &Path) -> Result<Vec<Finding>, LintError> {
    let entries = entries(root)?.into_iter().filter(|path| !path.is_dir());
    let why = "each directory here is a model; files beside them are not read";
    Ok(entries.map(|path| Finding::file(Verdict::Ignored, "", &path, why)).collect())
}

/// Findings of the files of a model, without its configuration.
///
/// # Errors
/// When a directory cannot be read.
pub(crate) fn of_model(dir: &Path, owner: &Owner<'_>) -> Result<Vec<Finding>, LintError> {
    let mut findings = Vec::new();
    for path in entries(dir)? {
        let name = file_name(&path);
        let about = |verdict, why: String| Finding::file(verdict, owner.model, &path, why);
        match name.parse::<i64>().ok().filter(|version| path.is_dir() && *version > 0) {
            Some(version) if owner.versions.contains(&version) => findings.extend(of_version(&path, owner)?),
            Some(version) => {
                let served: Vec<String> = owner.versions.iter().map(i64::to_string).collect();
                let why = format!("version {version} is not served: `version_policy` serves {}", served.join(", "));
                findings.push(about(Verdict::Ignored, why));
            }
            None if name == "config.pbtxt" => {}
            None if owner.labels.contains(&name) => findings.push(about(Verdict::Used, "labels of an output".into())),
            None if owner.kind == Kind::Python && !owner.is_native => {
                findings.push(about(Verdict::Used, "the model's own code may read it".into()));
            }
            None => findings.push(about(Verdict::Ignored, "nothing reads it".into())),
        }
    }
    Ok(findings)
}

fn of_version(dir: &Path, owner: &Owner<'_>) -> Result<Vec<Finding>, LintError> {
    let mut findings = Vec::new();
    for path in entries(dir)? {
        // Directories of LMDeploy for a checkpoint, or for its tokenizer alone.
        if path.is_dir() && ["weights", "tokenizer"].contains(&file_name(&path).as_str()) {
            findings.extend(of_version(&path, owner)?);
            continue;
        }
        let (verdict, why) = of_file(&file_name(&path), owner);
        findings.push(Finding::file(verdict, owner.model, &path, why));
    }
    Ok(findings)
}

fn of_file(name: &str, owner: &Owner<'_>) -> (Verdict, &'static str) {
    let is_python = name.ends_with(".py");
    if is_python && owner.is_native {
        return (
            Verdict::Ignored,
            "the model is served natively in its place; parameter `native` set to `false` runs it",
        );
    }
    if owner.kind == Kind::Python {
        return (
            Verdict::Used,
            if name == "model.py" { "the model's code" } else { "the model's own code may read it" },
        );
    }
    if name.ends_with(".engine") || name.ends_with(".plan") {
        return (
            Verdict::Ignored,
            "a TensorRT engine, which only TensorRT can run; the Hugging Face checkpoint is served",
        );
    }
    let of_checkpoint =
        CHECKPOINT.iter().filter(|(end, _)| name == *end || end.starts_with('.') && name.ends_with(end));
    let sharded = name.starts_with("pytorch_model-") && name.ends_with(".bin");
    match of_checkpoint.map(|(_, what)| *what).next().or(sharded.then_some("weights")) {
        Some(what) if owner.kind == Kind::Llm => (Verdict::Used, what),
        Some(what) if name.starts_with("token") || name == "vocab.json" || name == "merges.txt" => {
            (Verdict::Used, what)
        }
        _ => (Verdict::Ignored, "nothing reads it"),
    }
}

fn file_name(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

/// The entries of a directory in order, without hidden ones.
fn entries(dir: &Path) -> Result<Vec<PathBuf>, LintError> {
    let failed = |source| LintError::Io { what: format!("reading {}", dir.display()), source };
    let mut entries = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if !file_name(&path).starts_with('.') {
            entries.push(path);
        }
    }
    entries.sort();
    Ok(entries)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_explained_by_their_reader() {
        let owner = |kind, is_native| Owner { model: "m", kind, is_native, versions: &[1], labels: Vec::new() };
        let llm = owner(Kind::Llm, true);
        assert_eq!(of_file("model-00001-of-00002.safetensors", &llm), (Verdict::Used, "weights"));
        assert_eq!(of_file("model.py", &llm).0, Verdict::Ignored);
        assert_eq!(of_file("rank0.engine", &llm).0, Verdict::Ignored);
        assert_eq!(of_file("notes.txt", &llm).0, Verdict::Ignored);
        assert_eq!(of_file("notes.txt", &owner(Kind::Python, false)).0, Verdict::Used);
    }
}
