//! Slots of recurrent states.

use engine::{CopiedState, StateId};

/// Two slots of each row, and a spare one.
pub struct Slots {
    pub of_rows: Vec<u32>,
    /// The states before drafts.
    pub before_drafts: Vec<u32>,
    spare: u32,
}

impl Slots {
    pub fn new(num_rows: usize) -> Self {
        let (rows, count) = (num_rows as u32, 2 * num_rows as u32);
        Self { of_rows: (0..rows).rev().collect(), before_drafts: (rows..count).collect(), spare: count }
    }

    /// Number of slots.
    pub fn count(&self) -> usize {
        self.of_rows.len() + self.before_drafts.len() + 1
    }

    /// A row's state moves to the spare slot.
    pub fn rotate(&mut self, step: u64) -> CopiedState {
        let index = step as usize % self.of_rows.len();
        let from = std::mem::replace(&mut self.of_rows[index], self.spare);
        CopiedState { from: StateId(from), to: StateId(std::mem::replace(&mut self.spare, from)) }
    }

    /// A row's state becomes the one before its drafts.
    pub fn restored(&self, row: usize) -> CopiedState {
        CopiedState { from: StateId(self.before_drafts[row]), to: StateId(self.of_rows[row]) }
    }
}
