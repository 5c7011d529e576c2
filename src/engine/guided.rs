//! The constraint of one sequence and its masks.

use crate::TokenId;
use crate::constraint::RequestConstraint;

/// Number of masks of a sequence that are computed before it is planned, after one of them was late.
const NUM_CAUTIOUS: u8 = 8;

/// The constraint of one sequence, and what was computed with it.
#[derive(Debug)]
pub(crate) struct Guided {
    /// `None` while a job has it.
    pub(crate) constraint: Option<RequestConstraint>,
    /// Tokens of the output that the constraint does not have yet. The next job adds them.
    pub(crate) unaccepted: Vec<TokenId>,
    /// The masks of its next samples, once they are computed.
    pub(crate) masks: Option<Vec<Vec<u32>>>,
    /// The mask of its last sample.
    pub(crate) sent: Vec<u32>,
    /// Number of masks that must be computed before the sequence is planned. Otherwise it is planned first, and its masks
    /// are computed while the step runs.
    pub(crate) caution: u8,
    /// Whether its row has sampled tokens that were discarded.
    pub(crate) needs_revision: bool,
}

impl Guided {
    pub(crate) fn new(constraint: RequestConstraint) -> Self {
        Self {
            constraint: Some(constraint),
            unaccepted: Vec::new(),
            masks: None,
            sent: Vec::new(),
            caution: 0,
            needs_revision: false,
        }
    }

    /// Adds a token that was chosen among those of the mask that was sent.
    ///
    /// # Errors
    /// When the mask does not allow it.
    pub(crate) fn push(&mut self, token: TokenId) -> Result<(), String> {
        match self.sent.get(token.0 as usize / 32).is_some_and(|word| word >> (token.0 % 32) & 1 == 1) {
            true => {
                self.unaccepted.push(token);
                Ok(())
            }
            false => Err(format!("token {} is not allowed by the constraint", token.0)),
        }
    }

    /// Adds a token to the constraint at once, and returns whether the output is complete.
    ///
    /// # Errors
    /// When the constraint does not allow it.
    pub(crate) fn accept(&mut self, token: TokenId) -> Result<bool, String> {
        let Some(RequestConstraint(constraint)) = &mut self.constraint else { return self.push(token).map(|()| false) };
        constraint.accept(token)?;
        Ok(constraint.is_complete())
    }

    /// A mask was late.
    pub(crate) fn be_cautious(&mut self) {
        self.caution = NUM_CAUTIOUS;
    }
}
