//! Explains one model key by key.

use std::path::{Path, PathBuf};

use backends::layouts::keys::Use;
use backends::layouts::{Layout, keys, recognise};
use repository::{ModelConfig, ModelSource, Repository, RepositoryError};

use crate::fields::{self, Kind};
use crate::files::{self, Owner};
use crate::key_positions::{KeyPosition, key_positions, variables};
use crate::{Finding, LintError, Verdict};

/// The findings of a model; `failure` is the reason why a server cannot load it.
///
/// # Errors
/// When its files cannot be read.
pub(crate) fn model(repository: &Repository, name: &str, failure: Option<&str>) -> Result<Vec<Finding>, LintError> {
    let roots = repository.roots().iter().map(|root| root.join(name));
    let dir = roots.into_iter().find(|dir| dir.is_dir()).unwrap_or_default();
    let path = dir.join("config.pbtxt");
    let source = match repository.model(name) {
        Ok(source) => source,
        Err(error) => return Ok(vec![unreadable(name, path, &error)]),
    };
    let text = if path.is_file() { read(&path)? } else { String::new() };
    let (positions, version) = (key_positions(&text), source.versions.last().copied().unwrap_or(1));
    let layout = recognise(&source.config, &dir, &dir.join(version.to_string()));
    let kind = Kind::of(&source.config, layout);
    let mut findings = Vec::new();
    if let Some(reason) = failure {
        findings.push(wrong(&source, &path, &positions, reason));
    }
    match text.is_empty() {
        true => {
            findings.push(Finding::file(Verdict::Used, name, &dir, "no config.pbtxt: the files tell what the model is"))
        }
        false => findings.push(Finding::file(Verdict::Used, name, &path, what_it_is(layout, kind))),
    }
    findings.extend(unset(&source, &path, &text));
    findings.extend(positions.iter().filter_map(|position| key(&source, layout, kind, &path, position)));
    let labels =
        source.config.output.iter().map(|output| output.label_filename.clone()).filter(|file| !file.is_empty());
    let is_native = layout.is_some();
    let owner = Owner { model: name, kind, is_native, versions: &source.versions, labels: labels.collect() };
    findings.extend(files::of_model(&dir, &owner)?);
    Ok(findings)
}

fn read(path: &Path) -> Result<String, LintError> {
    let failed = |source| LintError::Io { what: format!("reading {}", path.display()), source };
    std::fs::read_to_string(path).map_err(failed)
}

/// The finding of a model whose configuration is invalid.
fn unreadable(model: &str, path: PathBuf, error: &RepositoryError) -> Finding {
    let (file, line, why) = match error {
        RepositoryError::Syntax { path, line, message, .. } => (path.clone(), Some(*line), message.clone()),
        RepositoryError::Invalid { path, message } => {
            let text = std::fs::read_to_string(path).unwrap_or_default();
            (path.clone(), line_of(&key_positions(&text), message), message.clone())
        }
        error => (path, None, error.to_string()),
    };
    Finding { verdict: Verdict::Wrong, model: model.to_owned(), file, line, key: String::new(), why }
}

fn wrong(source: &ModelSource, path: &Path, positions: &[KeyPosition], reason: &str) -> Finding {
    let line = line_of(positions, reason);
    let (model, file) = (source.name.clone(), path.to_owned());
    Finding { verdict: Verdict::Wrong, model, file, line, key: String::new(), why: reason.to_owned() }
}

/// The line of the first key that an error message quotes.
fn line_of(positions: &[KeyPosition], words: &str) -> Option<usize> {
    let quoted = words.split('`').skip(1).step_by(2);
    let is_meant = |position: &&KeyPosition, word: &str| position.entry.as_deref().unwrap_or(&position.field) == word;
    quoted
        .filter_map(|word| positions.iter().find(|position| is_meant(position, word)))
        .map(|position| position.line)
        .next()
}

fn what_it_is(layout: Option<Layout>, kind: Kind) -> &'static str {
    match (layout, kind) {
        (_, Kind::Ensemble) => "an ensemble: models one after another",
        (Some(Layout::Preprocessing), _) => "text to token ids (`preprocessing`), served natively",
        (Some(Layout::Postprocessing), _) => "token ids to text (`postprocessing`), served natively",
        (Some(Layout::Engine), _) => "a language model of token ids, batched in flight",
        (Some(Layout::FixedBatch), _) => "a language model of token ids in fixed batches (TensorRT-LLM's Python `gpt`)",
        (Some(Layout::Bls), _) => "text to text through the other models (`tensorrt_llm_bls`), served natively",
        (Some(Layout::Text), _) => "text to text from a checkpoint, served natively",
        (Some(Layout::Sessions), _) => "a language model in sessions (TurboMind's `interactive`), served natively",
        (None, Kind::Python) => "a model of your own code, run in processes of its own",
        (None, _) => "a built-in model",
    }
}

fn unset(source: &ModelSource, path: &Path, text: &str) -> Vec<Finding> {
    if source.unfilled.is_empty() {
        return Vec::new();
    }
    let all = source.unfilled_words().unwrap_or_default();
    let of_variable = |(name, line): (String, usize)| Finding {
        verdict: Verdict::Unset,
        model: source.name.clone(),
        file: path.to_owned(),
        line: Some(line),
        key: format!("${{{name}}}"),
        why: "not filled in, taken as unset; `trireme init --template` fills it, or leave it so for the default"
            .to_owned(),
    };
    let whole = Finding::file(Verdict::Unset, &source.name, path, all);
    std::iter::once(whole).chain(variables(text).into_iter().map(of_variable)).collect()
}

/// The finding of a key; `None` for a field whose entries have findings of their own, and for a parameter without a value.
fn key(
    source: &ModelSource,
    layout: Option<Layout>,
    kind: Kind,
    path: &Path,
    position: &KeyPosition,
) -> Option<Finding> {
    let (name, use_) = match &position.entry {
        None if matches!(position.field.as_str(), "parameters" | "input" | "output") => return None,
        None => (position.field.clone(), fields::use_of(&position.field, kind)),
        Some(entry) => {
            (format!("{}.{entry}", position.field), entry_use(&source.config, layout, kind, &position.field, entry)?)
        }
    };
    let (verdict, why) = match use_ {
        Use::Used(why) => (Verdict::Used, why),
        Use::Ignored(why) => (Verdict::Ignored, why),
        Use::Refused(why) => (Verdict::Refused, why),
    };
    let (model, file) = (source.name.clone(), path.to_owned());
    Some(Finding { verdict, model, file, line: Some(position.line), key: name, why: why.to_owned() })
}

fn entry_use(config: &ModelConfig, layout: Option<Layout>, kind: Kind, field: &str, entry: &str) -> Option<Use> {
    const UNKNOWN: Use = Use::Ignored("no model of this layout has it");
    const NOT_GIVEN: Use = Use::Ignored("no model of this layout gives it");
    match (field, layout) {
        ("parameters", _) if config.parameter(entry).is_none() => None, // Reported as unset, or empty.
        ("parameters", Some(layout)) => Some(keys::find(layout.parameters(), entry).unwrap_or(UNKNOWN)),
        ("parameters", None) if kind == Kind::Python => Some(Use::Used("handed to the model's code")),
        ("parameters", None) => Some(keys::find(keys::TEXT_PARAMETERS, entry).unwrap_or(UNKNOWN)),
        ("input", Some(layout)) => Some(layout.input(entry).unwrap_or(UNKNOWN)),
        ("input", None) => Some(Use::Used("what requests may hold")),
        ("output", Some(layout)) => {
            let output = config.output.iter().find(|output| output.name == entry);
            Some(output.and_then(|output| layout.output(output)).unwrap_or(NOT_GIVEN))
        }
        ("output", None) => Some(Use::Used("given where the request asks for it, or for all")),
        _ => None,
    }
}
