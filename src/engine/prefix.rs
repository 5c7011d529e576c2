//! The prefix cache: which blocks of a sequence other sequences may read, and which blocks of others it may read.
//!
//! A block is identified by its tokens and all tokens before them, compared exactly. The blocks of the prompt are
//! registered when a sequence is admitted, so that other sequences wait for them instead of computing them again. Plans
//! after the one that fills a block may read it. The blocks of the output are registered when the sequence leaves its
//! row.

use crate::BlockId;
use crate::blocks::{BlockPool, Lookup};
use crate::sequence::Sequence;

/// Writes to `found` the blocks with which a sequence joining in step `step` can start. The last token is always
/// computed. Returns false if a running sequence is computing the next block: it will be available soon.
pub(crate) fn find_prefix(
    pool: &BlockPool,
    sequence: &Sequence,
    block_size: usize,
    step: u64,
    found: &mut Vec<BlockId>,
) -> bool {
    found.clear();
    let mut parent = sequence.root;
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

/// Registers the blocks that prefill will fill. The first `num_found` are registered already.
pub(crate) fn register_prompt(pool: &mut BlockPool, sequence: &mut Sequence, block_size: usize, num_found: usize) {
    (sequence.num_registered, sequence.num_ready) = (num_found, num_found);
    if let Some(&last) = sequence.blocks[..num_found].last() {
        sequence.last_content = pool.content(last).expect("a block that was found has a content");
    }
    register_up_to(pool, sequence, block_size, sequence.join_len / block_size);
}

/// Makes the computed blocks of the prompt readable for plans from `step` on.
pub(crate) fn publish(pool: &mut BlockPool, sequence: &mut Sequence, block_size: usize, step: u64) {
    let num_filled = (sequence.num_computed / block_size).min(sequence.num_registered);
    for &block in &sequence.blocks[sequence.num_ready.min(num_filled)..num_filled] {
        pool.set_ready(block, step);
    }
    sequence.num_ready = sequence.num_ready.max(num_filled);
}

/// Registers the blocks of the output for plans from `step` on, if the prompt is computed.
pub(crate) fn register_output(pool: &mut BlockPool, sequence: &mut Sequence, block_size: usize, step: u64) {
    if sequence.num_ready < sequence.num_registered || sequence.is_prefilling() {
        return;
    }
    register_up_to(pool, sequence, block_size, sequence.num_known_blocks(block_size));
    publish(pool, sequence, block_size, step);
}

/// Stops at the first block that cannot be registered, because later blocks are found through it.
fn register_up_to(pool: &mut BlockPool, sequence: &mut Sequence, block_size: usize, end: usize) {
    for index in sequence.num_registered..end {
        let tokens = sequence.block_tokens(index, block_size);
        let Some(content) = pool.register(sequence.blocks[index], sequence.last_content, tokens) else { return };
        sequence.last_content = content;
        sequence.num_registered = index + 1;
    }
}
