//! The prefix cache: which blocks of a sequence other sequences may read, and which of theirs it may.
//!
//! Blocks are named by their tokens and all tokens before them, compared exactly. The prompt's blocks are named when a
//! sequence is admitted, so that others wait for them instead of computing them again; they can be read by the plans
//! after the one that fills them. The output's blocks are named when the sequence leaves its row.

use crate::BlockId;
use crate::blocks::{BlockPool, ContentId, Lookup};
use crate::sequence::Sequence;

/// The blocks with which a sequence that is to join in step `step` can start, into `found`; the last token is always
/// left to compute. False when a running sequence is computing the next of them: it will be found soon.
pub(crate) fn find_prefix(
    pool: &BlockPool,
    sequence: &Sequence,
    block_size: usize,
    step: u64,
    found: &mut Vec<BlockId>,
) -> bool {
    found.clear();
    let mut parent = ContentId::ROOT;
    for index in 0..(sequence.tokens.len() - 1) / block_size {
        match pool.find(parent, sequence.block_tokens(index, block_size), step) {
            Lookup::Ready(block) => {
                found.push(block);
                parent = pool.content(block).expect("a block that was found has a content");
            }
            Lookup::BeingComputed => return false,
            Lookup::Missing => break,
        }
    }
    true
}

/// Names the blocks that prefill will fill, of which the first `num_found` have a name.
pub(crate) fn name_prompt(pool: &mut BlockPool, sequence: &mut Sequence, block_size: usize, num_found: usize) {
    (sequence.num_named, sequence.num_ready) = (num_found, num_found);
    if let Some(&last) = sequence.blocks[..num_found].last() {
        sequence.last_content = pool.content(last).expect("a block that was found has a content");
    }
    name_up_to(pool, sequence, block_size, sequence.join_len / block_size);
}

/// Lets plans from `step` on read the prompt's blocks that are computed before.
pub(crate) fn publish(pool: &mut BlockPool, sequence: &mut Sequence, block_size: usize, step: u64) {
    let num_filled = (sequence.num_computed / block_size).min(sequence.num_named);
    for &block in &sequence.blocks[sequence.num_ready.min(num_filled)..num_filled] {
        pool.set_ready(block, step);
    }
    sequence.num_ready = sequence.num_ready.max(num_filled);
}

/// Names the output's blocks for plans from `step` on, if the prompt is computed.
pub(crate) fn name_output(pool: &mut BlockPool, sequence: &mut Sequence, block_size: usize, step: u64) {
    if sequence.num_ready < sequence.num_named || sequence.is_prefilling() {
        return;
    }
    name_up_to(pool, sequence, block_size, sequence.num_known_blocks(block_size));
    publish(pool, sequence, block_size, step);
}

/// Stops early when a block cannot be named, because those after it are found through it.
fn name_up_to(pool: &mut BlockPool, sequence: &mut Sequence, block_size: usize, end: usize) {
    for index in sequence.num_named..end {
        let tokens = sequence.block_tokens(index, block_size);
        let Some(content) = pool.name(sequence.blocks[index], sequence.last_content, tokens) else { return };
        sequence.last_content = content;
        sequence.num_named = index + 1;
    }
}
