//! What the requests of each model hold at one moment: for operators, and for tests that nothing leaks.

use engine::{Engine, Ledger};

/// What the scheduler of one replica of a model holds. All counts are zero when no request runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LlmLedger {
    /// Model name.
    pub name: String,
    /// Its version.
    pub version: String,
    /// Which replica; 0 for a model that has one.
    pub replica: u32,
    /// What sequences hold; `None` while its workers start for the first time, or after it was given up.
    pub scheduler: Option<Ledger>,
    /// Sequences that have not ended.
    pub num_open_sequences: usize,
    /// The result of counting everything again, where it differs.
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
