//! Constraints: which tokens a sequence may continue with, decided between its steps.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::TokenId;

/// The state of one constrained sequence. It belongs to its sequence alone.
pub trait Constraint: Send + fmt::Debug {
    /// Writes the set of tokens that may come next to `words`, which is cleared first: bit `id % 32` of word `id / 32`.
    ///
    /// # Errors
    /// Why no token can be chosen. The sequence ends with `FinishReason::Constraint`.
    fn mask(&mut self, words: &mut Vec<u32>) -> Result<(), String>;

    /// Adds a token of the output, or the end id that completes it.
    ///
    /// # Errors
    /// Why the token may not come here. The sequence ends with `FinishReason::Constraint`.
    fn accept(&mut self, token: TokenId) -> Result<(), String>;

    /// How many of `tokens`, from the first, could come next in a row. Adds them to the state; [`Constraint::rollback`]
    /// removes them.
    fn accept_valid(&mut self, tokens: &[TokenId]) -> usize;

    /// Removes the last `count` tokens.
    ///
    /// # Errors
    /// Why they cannot be removed. The sequence ends with `FinishReason::Constraint`.
    fn rollback(&mut self, count: usize) -> Result<(), String>;

    /// Whether the output is complete: no further token may come.
    fn is_complete(&self) -> bool;

    /// An independent copy of the state.
    fn copy(&self) -> Box<dyn Constraint>;
}

/// The constraint of a request. A clone has a state of its own.
#[derive(Debug)]
pub struct RequestConstraint(pub Box<dyn Constraint>);

impl Clone for RequestConstraint {
    fn clone(&self) -> Self {
        Self(self.0.copy())
    }
}

impl PartialEq for RequestConstraint {
    /// States cannot be compared, so no two are equal.
    fn eq(&self, _: &Self) -> bool {
        false
    }
}

/// The tokens that one sample of a step may choose.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SampleMask {
    /// The number of the plan.
    pub step: u64,
    /// Index among the samples of the plan, in plan order.
    pub sample: u32,
    /// Bit `id % 32` of word `id / 32` says that token `id` may be chosen. Missing words allow no token.
    #[serde(with = "crate::plan::words")]
    pub words: Vec<u32>,
}
