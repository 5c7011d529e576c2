//! Findings of a check, and their output as text and JSON.

use std::path::{Path, PathBuf};

use serde::Serialize;

/// How a server uses a file or a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// It has an effect.
    Used,
    /// It has no effect.
    Ignored,
    /// A template variable without a value.
    Unset,
    /// It keeps the model from serving, or requests that use it are refused.
    Wrong,
    /// Requests with this input are refused; other requests are served.
    Refused,
}

impl Verdict {
    fn name(self) -> &'static str {
        match self {
            Verdict::Used => "used",
            Verdict::Ignored => "ignored",
            Verdict::Unset => "unset",
            Verdict::Wrong => "wrong",
            Verdict::Refused => "refused",
        }
    }
}

/// One file or key of a repository.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// How it is used.
    pub verdict: Verdict,
    /// Model name; empty for a file outside of the models.
    pub model: String,
    /// The file, or the file of the key.
    pub file: PathBuf,
    /// Line of the key, from 1; `None` for a whole file.
    pub line: Option<usize>,
    /// The key, such as `parameters.tp`; empty for a whole file.
    pub key: String,
    /// Its effect, or why it has none; for an error, what to do.
    pub why: String,
}

impl Finding {
    /// A finding about a whole file.
    pub(crate) fn file(verdict: Verdict, model: &str, file: &Path, why: impl Into<String>) -> Self {
        let (model, file) = (model.to_owned(), file.to_owned());
        Self { verdict, model, file, line: None, key: String::new(), why: why.into() }
    }
}

impl std::fmt::Display for Finding {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{}", self.file.display())?;
        if let Some(line) = self.line {
            write!(formatter, ":{line}")?;
        }
        write!(formatter, ": {}: ", self.verdict.name())?;
        if !self.key.is_empty() {
            write!(formatter, "`{}`: ", self.key)?;
        }
        write!(formatter, "{}", self.why)
    }
}

/// All findings of a repository.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Report {
    /// Grouped by file, in the order of lines.
    pub findings: Vec<Finding>,
    /// Findings with an effect.
    pub used: usize,
    /// Findings without an effect.
    pub ignored: usize,
    /// Findings about template variables without a value.
    pub unset: usize,
    /// Findings that keep a model from serving.
    pub wrong: usize,
}

impl Report {
    pub(crate) fn of(findings: Vec<Finding>) -> Self {
        let count = |verdict| findings.iter().filter(|finding| finding.verdict == verdict).count();
        let (used, ignored, unset, wrong) = (
            count(Verdict::Used),
            count(Verdict::Ignored) + count(Verdict::Refused),
            count(Verdict::Unset),
            count(Verdict::Wrong),
        );
        Self { findings, used, ignored, unset, wrong }
    }

    /// One line for each finding, and a last line with the counts.
    pub(crate) fn text(&self, only_wrong: bool) -> String {
        let shown = self.findings.iter().filter(|finding| !only_wrong || finding.verdict == Verdict::Wrong);
        let lines: String = shown.map(|finding| format!("{finding}\n")).collect();
        let Self { used, ignored, unset, wrong, .. } = self;
        format!("{lines}{used} used, {ignored} ignored, {unset} unset, {wrong} wrong\n")
    }
}
