//! Resources that the requests of each model use, for operators and for tests that nothing leaks.

use engine::{Engine, Ledger};

/// Resources of one replica of a model that requests use. All counts are zero when no request runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LlmLedger {
    /// Model name.
    pub name: String,
    /// Its version.
    pub version: String,
    /// Index of the replica; 0 for a model with one replica.
    pub replica: u32,
    /// Resources of sequences; `None` until its workers have started for the first time.
    pub scheduler: Option<Ledger>,
    /// Sequences that have not ended.
    pub num_open_sequences: usize,
    /// The differences that a full recount found, if any.
    pub wrong: Option<String>,
}

/// The step thread's part of a [`LlmLedger`].
#[derive(Debug, Default)]
pub(crate) struct Report {
    pub(crate) scheduler: Option<Ledger>,
    pub(crate) num_open_sequences: usize,
    pub(crate) wrong: Option<String>,
}

impl Report {
    pub(crate) fn new(engine: Option<&Engine>, num_open_sequences: usize) -> Self {
        let scheduler = engine.map(Engine::ledger);
        Self { scheduler, num_open_sequences, wrong: engine.and_then(|engine| engine.audit().err()) }
    }
}
