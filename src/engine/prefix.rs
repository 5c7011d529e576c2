//! The prefix cache: which blocks of a sequence other sequences may read, and which blocks of others it may read.
//!
//! A block is identified by its tokens and all tokens before them, compared exactly. The blocks of the prompt are
//! registered when a sequence is admitted, so that other sequences wait for them instead of computing them again. Plans
//! after the one that fills a block may read it. The blocks of the output are registered when the sequence leaves its
//! row.
//!
//! Blocks of the first KV group are found by their tokens, one after the other. Those of the other groups are registered
//! under the content of the first group when they are filled. A prefix can be reused if each group still has the blocks
//! that the position after it can see, and if a snapshot of the recurrent state exists there (`snapshots.rs`). Blocks and
//! snapshots may be on the device, on the host (`host.rs`) or on disk (`disk.rs`).

use crate::blocks::{BlockPool, Lookup};
use crate::content::ContentId;
use crate::sequence::Sequence;
use crate::snapshots;
use crate::tables::first_visible;
use crate::{BlockId, EngineConfig};

/// Where a block of a prefix is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// In this block.
    Device(BlockId),
    /// On the host, under this content.
    Host(ContentId),
    /// On disk, under this content.
    Disk(ContentId),
    /// It is not in the cache.
    Nowhere,
}

/// A prefix that is in the cache.
#[derive(Debug, Default)]
pub(crate) struct Found {
    /// Number of blocks in a KV group without a window.
    pub(crate) len: usize,
    /// Number of blocks that are known, with those after the last snapshot and those that a running sequence computes; 0 without
    /// recurrent states.
    pub(crate) num_known: usize,
    /// The last blocks of each KV group, as many as the position after the prefix can see.
    pub(crate) tables: Vec<Vec<Place>>,
    /// Content of the last block of the prefix.
    last: ContentId,
    /// `[len]` contents of the blocks in the first group, unless it is the only one and has no window.
    contents: Vec<ContentId>,
    /// Whether a snapshot of the recurrent state exists at the end of the prefix.
    has_snapshot: bool,
}

impl Found {
    pub(crate) fn reset(&mut self, num_groups: usize) {
        (self.len, self.num_known, self.has_snapshot) = (0, 0, false);
        self.tables.resize_with(num_groups, Vec::new);
        self.tables.iter_mut().for_each(Vec::clear);
        self.contents.clear();
    }

    /// Number of blocks of the prefix that the host has, in any KV group.
    pub(crate) fn num_hosted(&self) -> usize {
        let is_hosted = |back: usize| {
            let place = |table: &Vec<Place>| table.len().checked_sub(back).map(|index| table[index]);
            self.tables.iter().filter_map(place).any(|place| matches!(place, Place::Host(_)))
        };
        (1..=self.len).filter(|&back| is_hosted(back)).count()
    }

    /// The content whose snapshot is the recurrent state at the end of the prefix; `None` at the start of a sequence.
    pub(crate) fn snapshot(&self) -> Option<ContentId> {
        self.has_snapshot.then_some(self.last)
    }
}

impl Sequence {
    /// Number of full blocks of the prefix with which it may start, without its last token: those of the prompt alone where generated
    /// tokens are computed in another way.
    pub(crate) fn num_findable_blocks(&self, config: &EngineConfig) -> usize {
        self.num_shareable(self.tokens.len() - 1, config.shares_output) / config.block_size
    }

    /// How many of its first `len` tokens others may share when they are computed as a prompt.
    pub(crate) fn num_shareable(&self, len: usize, shares_output: bool) -> usize {
        if shares_output { len } else { len.min(self.num_prompt_tokens) }
    }
}

/// Writes to `found` the longest prefix with which a sequence joining in step `step` can start. The last token is always
/// computed. What is on disk counts if `with_disk`, and must be fetched first. Returns false if a running sequence is computing the
/// next block: it will be available soon.
pub(crate) fn find_prefix(
    pool: &BlockPool,
    sequence: &Sequence,
    config: &EngineConfig,
    (step, with_disk): (u64, bool),
    found: &mut Found,
) -> bool {
    let &EngineConfig { ref windows, block_size, num_states, .. } = config;
    let mut parent = sequence.root;
    let is_plain = windows[..] == [None] && num_states == 0;
    let mut num_being_computed = 0;
    for index in 0..sequence.num_findable_blocks(config) {
        match pool.find(parent, sequence.block_tokens(index, block_size), step) {
            Lookup::Ready(block) => {
                found.tables[0].push(Place::Device(block));
                parent = pool.content(block).expect("a block that was found has a content");
            }
            Lookup::Hosted(content) => {
                found.tables[0].push(Place::Host(content));
                parent = content;
            }
            Lookup::OnDisk(content) if with_disk => {
                found.tables[0].push(Place::Disk(content));
                parent = content;
            }
            Lookup::Evicted(_) | Lookup::OnDisk(_) if is_plain => break,
            Lookup::Evicted(content) | Lookup::OnDisk(content) => {
                found.tables[0].push(Place::Nowhere);
                parent = content;
            }
            Lookup::BeingComputed(content) if num_states > 0 => {
                match without_snapshot(pool, sequence, config, (index, content), step) {
                    Some(num_blocks) => num_being_computed = num_blocks,
                    None => return false,
                }
                break;
            }
            Lookup::BeingComputed(_) => return false,
            Lookup::Missing => break,
        }
        if !is_plain {
            found.contents.push(parent);
        }
    }
    found.num_known = if num_states > 0 { found.contents.len() + num_being_computed } else { 0 };
    found.len = if is_plain { found.tables[0].len() } else { common_len(pool, config, (step, with_disk), found) };
    found.contents.truncate(found.len);
    found.last = found.contents.last().copied().unwrap_or(parent);
    found.has_snapshot = num_states > 0 && found.len > 0;
    for (table, &window) in found.tables.iter_mut().zip(windows) {
        table.truncate(found.len);
        table.drain(..first_visible(window, found.len * block_size, block_size));
    }
    is_readable(pool, found)
}

/// Whether this plan can load what was found on the host. What it copies there itself is there for the next one.
fn is_readable(pool: &BlockPool, found: &Found) -> bool {
    let places = (0..).zip(&found.tables).flat_map(|(group, table)| table.iter().map(move |&place| (group, place)));
    let mut hosted = places.filter_map(|(group, place)| match place {
        Place::Host(content) => Some((content, group)),
        Place::Device(_) | Place::Disk(_) | Place::Nowhere => None,
    });
    let states = &pool.states;
    let can_load = |content| states.hosted.is_readable(content) && states.can_load();
    hosted.all(|name| pool.hosted.slots.is_readable(name))
        && found
            .snapshot()
            .is_none_or(|content| states.has_snapshot(content) || !states.hosted.contains(content) || can_load(content))
}

/// Whether a part of what was found is on disk alone.
pub(crate) fn is_on_disk(pool: &BlockPool, found: &Found) -> bool {
    let is_there = |content| pool.states.can_start_from(content, false);
    found.tables.iter().flatten().any(|place| matches!(place, Place::Disk(_)))
        || found.snapshot().is_some_and(|content| !is_there(content))
}

/// Begins to copy what was found on disk to host memory, as much as has room there beside what was found there. Plans up to
/// `complete` are complete. Returns whether a copy is under way.
pub(crate) fn fetch(pool: &mut BlockPool, found: &Found, complete: Option<u64>) -> bool {
    let [mut room, mut room_of_states] = [pool.hosted.slots.room(), pool.states.hosted.room()];
    let places = || (0..).zip(&found.tables).flat_map(|(group, table)| table.iter().map(move |&place| (group, place)));
    for (group, place) in places() {
        if let Place::Host(content) = place {
            pool.hosted.slots.touch((content, group));
        }
    }
    let mut is_under_way = false;
    if let Some(content) = found.snapshot() {
        match pool.states.hosted.contains(content) {
            true => pool.states.hosted.touch(content),
            false => is_under_way = pool.states.hosted.fetch(content, complete, &mut room_of_states).0,
        }
    }
    // A block is of no use without those before it.
    let mut missing = places().filter_map(|(group, place)| match place {
        Place::Disk(content) => Some((content, group)),
        Place::Device(_) | Place::Host(_) | Place::Nowhere => None,
    });
    while missing.next().is_some_and(|name| pool.fetch(name, complete, &mut room)) {
        is_under_way = true;
    }
    is_under_way
}

/// Keeps what was found on the host from being overwritten by this plan.
pub(crate) fn reserve(pool: &mut BlockPool, found: &Found) {
    // A sequence finds a content through those before it, so they are used last.
    for (group, table) in (0..).zip(&found.tables) {
        for &place in table.iter().rev() {
            if let Place::Host(content) = place {
                pool.hosted.slots.reserve((content, group));
            }
        }
    }
    if let Some(content) = found.snapshot().filter(|&content| !pool.states.has_snapshot(content)) {
        pool.states.hosted.reserve(content);
    }
}

/// The length of the longest prefix of the contents found of which every group has the blocks that the position after it
/// can see, and whose recurrent state has a snapshot if the model has such states. Writes the blocks of the groups after the
/// first to `found`.
fn common_len(pool: &BlockPool, config: &EngineConfig, (step, with_disk): (u64, bool), found: &mut Found) -> usize {
    let &EngineConfig { ref windows, block_size, num_states, .. } = config;
    let mut longest = 0;
    // For each group, the first block of the run of blocks that ends with the present one.
    let mut run_starts = vec![0; windows.len()];
    for (index, &content) in found.contents.iter().enumerate() {
        let len = index + 1;
        let mut is_usable = num_states == 0 || pool.states.can_start_from(content, with_disk);
        for (group, &window) in windows.iter().enumerate() {
            if group > 0 {
                let place = match pool.find_other(content, group, step) {
                    Some(block) => Place::Device(block),
                    None if pool.hosted.contains(content, group) => Place::Host(content),
                    None if with_disk && pool.hosted.is_on_disk(content, group) => Place::Disk(content),
                    None => Place::Nowhere,
                };
                found.tables[group].push(place);
            }
            if found.tables[group][index] == Place::Nowhere {
                run_starts[group] = len;
            }
            is_usable &= run_starts[group] <= first_visible(window, len * block_size, block_size);
        }
        if is_usable {
            longest = len;
        }
    }
    longest
}

/// Number of blocks from block `index` on that a running sequence computes and both share, if it will leave no snapshot of its
/// recurrent state there. `content` is that of block `index`. `None` if it will leave one.
fn without_snapshot(
    pool: &BlockPool,
    sequence: &Sequence,
    config: &EngineConfig,
    (first, mut content): (usize, ContentId),
    step: u64,
) -> Option<usize> {
    let num_findable = sequence.num_findable_blocks(config);
    for len in first + 1.. {
        // The last full block of a prompt is taken as that of both.
        if snapshots::is_due_in_all(sequence, config, len) || len == num_findable {
            return None;
        }
        match pool.find(content, sequence.block_tokens(len, config.block_size), step) {
            Lookup::BeingComputed(next) => content = next,
            _ => return Some(len - first),
        }
    }
    unreachable!("a sequence has a last block")
}

/// Registers the blocks that prefill will fill. Those that were found are registered already.
pub(crate) fn register_prompt(pool: &mut BlockPool, sequence: &mut Sequence, block_size: usize, found: &Found) {
    (sequence.num_registered, sequence.num_ready) = (found.len, found.len);
    sequence.contents.clone_from(&found.contents);
    if found.len > 0 {
        sequence.last_content = found.last;
    }
    let len = sequence.num_shareable(sequence.join_len, pool.shares_output);
    register_up_to(pool, sequence, block_size, len / block_size);
}

/// Makes the computed blocks of the prompt readable for plans from `step` on.
pub(crate) fn publish_prompt(pool: &mut BlockPool, sequence: &mut Sequence, block_size: usize, step: u64) {
    // If the first group has a window, the blocks of this chunk did not exist when the prompt was registered.
    let len = sequence.num_shareable(sequence.num_computed, pool.shares_output);
    register_up_to(pool, sequence, block_size, len / block_size);
    publish(pool, sequence, block_size, step);
}

/// Registers the blocks of the output for plans from `step` on, if the prompt is computed.
pub(crate) fn register_output(pool: &mut BlockPool, sequence: &mut Sequence, block_size: usize, step: u64) {
    if !pool.shares_output || sequence.num_ready < sequence.num_registered || sequence.is_prefilling() {
        return;
    }
    register_up_to(pool, sequence, block_size, sequence.num_known_blocks(block_size));
    publish(pool, sequence, block_size, step);
}

/// The snapshot of the output becomes one that others can find, if its tokens are known, in place of the one before.
pub(crate) fn keep_output(pool: &mut BlockPool, sequence: &mut Sequence, block_size: usize, step: u64) {
    let Some((state, position)) = sequence.recurrent.output.take() else { return };
    register_output(pool, sequence, block_size, step);
    let len = position / block_size;
    let Some(&content) = sequence.contents.get(len - 1) else {
        return pool.states.release(state);
    };
    pool.states.keep(state, content, len - sequence.recurrent.last_snapshot);
    if let Some(before) = sequence.recurrent.kept_output.replace(content).filter(|&before| before != content) {
        pool.states.forget(before);
    }
}

fn publish(pool: &mut BlockPool, sequence: &mut Sequence, block_size: usize, step: u64) {
    let num_filled = (sequence.num_computed / block_size).min(sequence.num_registered);
    for index in sequence.num_ready..num_filled {
        if let Some(block) = sequence.tables[0].get(index) {
            pool.set_ready(block, step);
        }
        for table in &sequence.tables[1..] {
            if let Some(block) = table.get(index) {
                pool.register_other(block, sequence.contents[index], step);
            }
        }
    }
    sequence.num_ready = sequence.num_ready.max(num_filled);
}

/// Stops at the first block that cannot be registered, because later blocks are found through it.
fn register_up_to(pool: &mut BlockPool, sequence: &mut Sequence, block_size: usize, end: usize) {
    for index in sequence.num_registered..end {
        let Some(block) = sequence.tables[0].get(index) else { return };
        let tokens = sequence.block_tokens(index, block_size);
        let Some(content) = pool.register(block, sequence.last_content, tokens) else { return };
        sequence.last_content = content;
        sequence.num_registered = index + 1;
        if sequence.keeps_contents {
            sequence.contents.push(content);
        }
    }
}
