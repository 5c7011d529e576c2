//! Moves sequences to the engine of another replica of the model, when the workers of theirs do not come back.

use crate::engine::Engine;
use crate::sequence::{Sequence, SequenceState};
use crate::{Refused, SequenceId, TokenId};

/// A sequence between two engines, with its tokens so far. It has no row and no block.
#[derive(Debug)]
pub struct MovedSequence(Box<Sequence>);

impl MovedSequence {
    /// The prompt and the settled output.
    pub fn tokens(&self) -> &[TokenId] {
        &self.0.tokens
    }

    /// Its priority.
    pub fn priority(&self) -> u32 {
        self.0.priority
    }

    /// Number of rows that it takes while it runs.
    pub fn num_rows(&self) -> usize {
        self.0.num_rows()
    }

    /// Whether it still waits for its first step.
    pub fn is_new(&self) -> bool {
        !self.0.started
    }
}

impl Engine {
    /// Removes the sequences, in order of arrival, after [`recover`](Self::recover). Those whose mask is being computed stay; call this again
    /// after [`finish_mask`](Self::finish_mask).
    pub fn take_sequences(&mut self) -> Vec<(SequenceId, MovedSequence)> {
        let mut taken = Vec::new();
        for (id, slot) in self.sequences.in_order() {
            let sequence = &self.sequences[slot];
            let is_away = sequence.guided.as_ref().is_some_and(|guided| guided.constraint.is_none());
            if is_away || sequence.state != SequenceState::Queued {
                continue;
            }
            self.queue.remove(sequence);
            taken.push((id, MovedSequence(Box::new(self.sequences.remove(slot)))));
        }
        self.blocked_head = None;
        taken
    }

    /// Queues a sequence of another engine of the same model. It goes on with the next token, also if the queue is full.
    ///
    /// # Errors
    /// When it can never run, because this engine has fewer blocks.
    pub fn adopt(&mut self, moved: MovedSequence) -> Result<SequenceId, Refused> {
        let mut sequence = *moved.0;
        let num_beams = sequence.num_rows();
        self.check_room(sequence.num_prompt_tokens, sequence.max_len, num_beams, sequence.guided.is_some())?;
        sequence.id = self.new_id();
        sequence.reset_row();
        let slot = self.sequences.insert(sequence);
        self.queue.insert(&self.sequences[slot], slot);
        Ok(self.sequences[slot].id)
    }
}
