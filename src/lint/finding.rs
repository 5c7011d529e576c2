//! What is found, and how it is printed.

use std::path::{Path, PathBuf};

use serde::Serialize;

/// What becomes of a file or a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// It has its effect.
    Used,
    /// It has none, and nothing changes for it.
    Ignored,
    /// A template variable that nobody filled in.
    Unset,
    /// With it the model does not serve, or requests that use it are refused.
    Wrong,
    /// Requests with this input are refused; others are served.
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
    /// What becomes of it.
    pub verdict: Verdict,
    /// Model name; empty for what belongs to none.
    pub model: String,
    /// The file, or the one that the key is in.
    pub file: PathBuf,
    /// The key's line, from 1; `None` for a whole file.
    pub line: Option<usize>,
    /// The key, such as `parameters.tp`; empty for a whole file.
    pub key: String,
    /// Its effect, or why it has none, and what to do where something is wrong.
    pub why: String,
}

impl Finding {
    /// About a whole file.
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

/// All of a repository.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Report {
    /// File by file, keys in the order of their lines.
    pub findings: Vec<Finding>,
    /// Findings with an effect.
    pub used: usize,
    /// Findings without.
    pub ignored: usize,
    /// Template variables that are not filled in.
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

    /// A line for each finding, and one that counts them.
    pub(crate) fn text(&self, only_wrong: bool) -> String {
        let shown = self.findings.iter().filter(|finding| !only_wrong || finding.verdict == Verdict::Wrong);
        let lines: String = shown.map(|finding| format!("{finding}\n")).collect();
        let Self { used, ignored, unset, wrong, .. } = self;
        format!("{lines}{used} used, {ignored} ignored, {unset} unset, {wrong} wrong\n")
    }
}
