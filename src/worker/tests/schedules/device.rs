//! A device that computes digests in place of a model: a position holds the digest of all tokens up to it, found through the
//! block tables. So a wrong block, row or position changes tokens.

use engine::{SampledToken, TokenId};
use ops::{StepInputs, TOKEN_ON_DEVICE};

use crate::tokens::{digest, next_token};

/// The digest before the first token.
const START: u64 = 1;

pub struct Device {
    /// `[num_blocks * block_size]`
    kv: Vec<u64>,
    block_size: usize,
    /// Of each row, the token that was sampled last.
    sampled: Vec<TokenId>,
}

impl Device {
    pub fn new(num_blocks: usize, block_size: usize, max_rows: usize) -> Self {
        Self { kv: vec![0; num_blocks * block_size], block_size, sampled: vec![TokenId(0); max_rows] }
    }

    /// Computes a step and returns its tokens.
    pub fn run(&mut self, inputs: &StepInputs) -> Vec<SampledToken> {
        let block_size = self.block_size;
        for (index, row) in inputs.rows.iter().enumerate() {
            let table = inputs.block_table(0, index);
            let slot = |position: usize| {
                let block = table[position / block_size];
                block as usize * block_size + position % block_size
            };
            for at in inputs.row_starts[index] as usize..inputs.row_starts[index + 1] as usize {
                let position = inputs.positions[at] as usize;
                assert_eq!(inputs.slots[at] as usize, slot(position), "the slot is that of the block table");
                let token = match inputs.token_ids[at] {
                    TOKEN_ON_DEVICE => self.sampled[row.0 as usize],
                    token => TokenId(token),
                };
                let before = if position == 0 { START } else { self.kv[slot(position - 1)] };
                self.kv[slot(position)] = digest(before, token);
            }
        }
        let sample = |sample: &ops::SampleInput| {
            let token = next_token(self.kv[inputs.slots[sample.token_index as usize] as usize]);
            self.sampled[sample.row.0 as usize] = token;
            SampledToken { row: sample.row, token, logprob: None, top: Vec::new() }
        };
        inputs.samples.iter().map(sample).collect()
    }
}

/// The tokens that follow `prompt` on a device without faults.
pub fn undisturbed(prompt: &[TokenId], num_tokens: usize) -> Vec<TokenId> {
    let mut last = prompt.iter().fold(START, |before, &token| digest(before, token));
    let mut tokens = Vec::with_capacity(num_tokens);
    for _ in 0..num_tokens {
        let token = next_token(last);
        tokens.push(token);
        last = digest(last, token);
    }
    tokens
}
