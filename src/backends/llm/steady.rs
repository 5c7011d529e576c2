//! A sequence whose responses are the last one again with another token.
//!
//! All that such a token asks for and changes lies together here, for it is found in memory that has long not been touched.
//! What it changes of the rest, [`RequestTask`](super::request::RequestTask) takes over when something else comes.

use std::sync::Arc;

use engine::{BlockUsage, DraftUsage, SequenceId};
use serving::{Moment, Tally};
use smallvec::SmallVec;

use super::inbox::OneToken;
use super::outputs::Kind;
use super::step_thread::Shared;

/// Gaps between tokens that are counted together, at most.
const MAX_GAPS: u32 = 16;

/// What has come of the sequence since its last response that was told in full, and before.
#[repr(align(64))]
pub(crate) struct Steady {
    pub(crate) sequence: SequenceId,
    /// Which of the request's sequences it is.
    pub(crate) index: usize,
    /// The places of the outputs that change.
    pub(crate) changing: SmallVec<[(u32, Kind); 2]>,
    /// Tokens of the sequence.
    pub(crate) num_tokens: usize,
    /// Of them, those that came since.
    pub(crate) num_new: usize,
    pub(crate) cumulative_log_prob: f64,
    pub(crate) blocks: BlockUsage,
    pub(crate) drafts: DraftUsage,
    /// When the last token came.
    pub(crate) last: Moment,
    /// Times between tokens.
    pub(crate) gaps: Tally,
    pub(crate) shared: Arc<Shared>,
}

impl Steady {
    /// Takes the next token in.
    pub(crate) fn take(&mut self, token: &OneToken) {
        self.num_tokens += 1;
        self.num_new += 1;
        self.cumulative_log_prob += token.logprob.map_or(0.0, f64::from);
        (self.blocks, self.drafts) = (token.blocks, token.drafts);
        let gap = token.at.ns_since(self.last) as f64 / 1e9;
        self.last = token.at;
        let inter_token = &self.shared.figures.inter_token;
        inter_token.gather(gap, &mut self.gaps);
        if self.gaps.count() == MAX_GAPS {
            inter_token.settle(&mut self.gaps);
        }
    }
}

impl Drop for Steady {
    fn drop(&mut self) {
        self.shared.figures.inter_token.settle(&mut self.gaps);
    }
}
