//! A plan while it is being made.

use crate::costs::StepLoad;
use crate::plan::{CopiedBlock, CopiedState, GrownTable, JoinedRow, RestoredRow, RevisedRow, RowWork, SavedState};
use crate::slot::{Sample, Slot};
use crate::weigh_drafts::Drafting;
use crate::{RowId, TokenId};

/// A plan while it is being made.
#[derive(Default)]
pub(crate) struct PlanBuilder {
    pub(crate) joined: Vec<JoinedRow>,
    pub(crate) revised: Vec<RevisedRow>,
    pub(crate) copied: Vec<CopiedBlock>,
    pub(crate) copied_states: Vec<CopiedState>,
    pub(crate) restored: Vec<RestoredRow>,
    pub(crate) saved_states: Vec<SavedState>,
    pub(crate) grown: Vec<GrownTable>,
    pub(crate) drafts: Vec<(RowId, Vec<TokenId>)>,
    pub(crate) prefills: Vec<RowWork>,
    pub(crate) verifies: Vec<RowWork>,
    /// Generated tokens that are computed again, where that is another work than `prefills`.
    pub(crate) replays: Vec<RowWork>,
    pub(crate) decodes: Vec<RowWork>,
    pub(crate) prefill_samples: Vec<Sample>,
    pub(crate) verify_samples: Vec<Sample>,
    pub(crate) replay_samples: Vec<Sample>,
    pub(crate) decode_samples: Vec<Sample>,
    /// Number of tokens of `verifies`.
    pub(crate) num_verified: usize,
    pub(crate) drafting: Drafting,
    /// Number of draft tokens that may still be added.
    pub(crate) draft_budget: usize,
    /// Number of prefill tokens that may still be added.
    pub(crate) prefill_budget: usize,
    /// What the plan computes so far, for the cost model.
    pub(crate) load: StepLoad,
    /// The predicted time that the step may take; `None` without decodes.
    pub(crate) max_seconds: Option<f64>,
    pub(crate) num_joined_tokens: usize,
    /// Sequences whose last token is sampled by this plan.
    pub(crate) completed: Vec<Slot>,
}

impl PlanBuilder {
    /// Number of tokens of decodes, drafts included.
    pub(crate) fn num_decode_tokens(&self) -> usize {
        self.decodes.len() + self.num_verified
    }

    /// Whether tokens of prompts are computed, or generated tokens again.
    pub(crate) fn has_chunks(&self) -> bool {
        !self.prefills.is_empty() || !self.replays.is_empty()
    }

    /// Number of tokens of `verifies` and `replays` beside the first of each.
    pub(crate) fn num_further_rows(&self) -> usize {
        let num_replayed: usize = self.replays.iter().map(|work| work.num_tokens as usize).sum();
        self.num_verified + num_replayed - self.verifies.len() - self.replays.len()
    }
}
