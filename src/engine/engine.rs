//! The engine's state, and what is asked of it between steps.

use std::collections::VecDeque;

use crate::blocks::BlockPool;
use crate::draft::{Drafter, PromptLookup};
use crate::queue::{Queue, Turn, turn};
use crate::sequence::{Place, Sequence, num_blocks_in_all};
use crate::sequences::{Sequences, Slot};
use crate::{ConfigError, EngineConfig, FinishReason, Policy, Refused, Request, RowId, SequenceId, TokenEvent};

/// The scheduler of one model: a state machine without clock, thread or I/O.
///
/// One thread owns it and repeats: [`submit`](Self::submit) and [`cancel`](Self::cancel) what clients ask,
/// [`plan`](Self::plan) while it gives plans, [`settle`](Self::settle) what workers return.
///
/// # Why blocks and rows can be handed on at once
///
/// A sequence may end while a later plan that computes it is in flight. Its row and blocks are free from that
/// moment on, for plans made from then on. Workers carry out plans in the order of their numbers, and within a
/// plan apply `left` before `joined` and `grown`, and all of them before the forward pass. So the late pass writes
/// into the blocks before the new owner's first pass does, and the row is dropped by the plan that hands it on, at
/// the latest. Within one plan nothing that its `work` uses is handed on: what is freed while a plan is made comes
/// from sequences without work in it, and sequences that the plan completes are taken out after it is made.
#[derive(Debug)]
pub struct Engine {
    pub(crate) config: EngineConfig,
    pub(crate) sequences: Sequences,
    pub(crate) queue: Queue,
    /// In the order of service; the last is preempted first.
    pub(crate) running: Vec<(Turn, Slot)>,
    pub(crate) free_rows: Vec<RowId>,
    /// Rows freed since the last plan.
    pub(crate) left: Vec<RowId>,
    pub(crate) pool: BlockPool,
    /// Blocks promised to running sequences and not yet allocated; 0 under [`Policy::MaxUtilization`].
    pub(crate) num_reserved: usize,
    /// Oldest first.
    pub(crate) in_flight: VecDeque<InFlight>,
    /// A settled step's memory.
    pub(crate) spare_samples: Vec<Sample>,
    pub(crate) next_step: u64,
    next_sequence: u64,
    /// The queue's head did not fit into so many blocks; it is not tried again until there are more.
    pub(crate) did_not_fit: Option<(SequenceId, usize)>,
    pub(crate) drafter: Box<dyn Drafter>,
    /// News that no output brought.
    pub(crate) events: Vec<TokenEvent>,
    pub(crate) totals: Totals,
}

/// A plan that workers have and whose output did not come yet.
#[derive(Debug)]
pub(crate) struct InFlight {
    pub(crate) step: u64,
    /// In plan order.
    pub(crate) samples: Vec<Sample>,
}

/// A token that a plan samples.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sample {
    pub(crate) slot: Slot,
    /// Whose it is; by the time it is settled the slot may be another's.
    pub(crate) sequence: SequenceId,
    pub(crate) row: RowId,
}

/// Counts since the engine was made.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Totals {
    pub(crate) steps: u64,
    pub(crate) preempted: u64,
    pub(crate) recovered: u64,
    pub(crate) prompt_tokens: u64,
    pub(crate) output_tokens: u64,
    pub(crate) discarded_tokens: u64,
    pub(crate) reused_blocks: u64,
    pub(crate) allocated_blocks: u64,
    pub(crate) drafted_tokens: u64,
    pub(crate) accepted_tokens: u64,
}

/// Tokens that prompt look-up looks for, as in transformers.
const DEFAULT_NGRAM: usize = 2;

impl Engine {
    /// An idle engine.
    ///
    /// # Errors
    /// When [`EngineConfig::validate`] does.
    pub fn new(config: EngineConfig) -> Result<Self, ConfigError> {
        config.validate()?;
        Ok(Self {
            pool: BlockPool::new(config.num_blocks, config.block_size),
            free_rows: all_rows(config.max_rows),
            config,
            sequences: Sequences::default(),
            queue: Queue::default(),
            running: Vec::new(),
            left: Vec::new(),
            num_reserved: 0,
            in_flight: VecDeque::new(),
            spare_samples: Vec::new(),
            next_step: 0,
            next_sequence: 0,
            did_not_fit: None,
            drafter: Box::new(PromptLookup { max_ngram: DEFAULT_NGRAM }),
            events: Vec::new(),
            totals: Totals::default(),
        })
    }

    /// An idle engine of the same bounds in the place of this one, whose state nobody trusts any more. Its steps and sequences
    /// are numbered on from here, so that nobody takes one of them for an old one.
    pub fn successor(&self) -> Self {
        let fresh = Self::new(self.config.clone()).expect("these bounds were valid before");
        Self { next_step: self.next_step, next_sequence: self.next_sequence, totals: self.totals, ..fresh }
    }

    /// Lets `drafter` guess tokens, where a request and [`EngineConfig::max_drafts`] allow it; at first it is
    /// [`PromptLookup`].
    pub fn set_drafter(&mut self, drafter: Box<dyn Drafter>) {
        self.drafter = drafter;
    }

    /// The bounds it was made with.
    pub fn config(&self) -> &EngineConfig {
        &self.config
    }

    /// Queues a request. Each sequence ends by exactly one event with [`TokenEvent::finished`].
    ///
    /// # Errors
    /// When it can never run or the queue is full.
    pub fn submit(&mut self, request: Request) -> Result<SequenceId, Refused> {
        let max_len = self.check(&request)?;
        let id = SequenceId(self.next_sequence);
        self.next_sequence += 1;
        self.totals.prompt_tokens += request.prompt.len() as u64;
        let mut sequence = Sequence::new(id, request, max_len, self.config.max_drafts);
        sequence.is_told = self.config.num_stages > 1;
        let slot = self.sequences.insert(sequence);
        self.queue.insert(&self.sequences[slot], slot);
        Ok(id)
    }

    /// The client left or asked to stop: frees row and blocks, for the next plan. Tokens in flight are discarded.
    /// False when the sequence has ended before.
    pub fn cancel(&mut self, sequence: SequenceId) -> bool {
        self.end_early(sequence, FinishReason::Cancelled)
    }

    /// A stop word was found in the text of tokens told so far: ends the sequence with [`FinishReason::StopWord`].
    /// False when it has ended before.
    pub fn finish(&mut self, sequence: SequenceId) -> bool {
        self.end_early(sequence, FinishReason::StopWord)
    }

    /// Whether the sequence waits for its first step.
    pub fn is_new(&self, sequence: SequenceId) -> bool {
        self.sequences.find(sequence).is_some_and(|slot| !self.sequences[slot].started)
    }

    /// Lets all others of its priority be served before a sequence that waits for its first step. False when it does not.
    pub fn delay(&mut self, sequence: SequenceId) -> bool {
        let Some(slot) = self.sequences.find(sequence).filter(|&slot| !self.sequences[slot].started) else {
            return false;
        };
        self.queue.remove(&self.sequences[slot]);
        self.sequences[slot].is_delayed = true;
        self.queue.insert(&self.sequences[slot], slot);
        true
    }

    /// Appends the events that no output brings: those of [`cancel`](Self::cancel) and [`finish`](Self::finish).
    /// [`settle`](Self::settle) does so first.
    pub fn drain_events(&mut self, events: &mut Vec<TokenEvent>) {
        events.append(&mut self.events);
    }

    /// All workers were lost: steps in flight are void, running sequences return to the queue's head in their order,
    /// and join again with prompt and output so far. Their streams go on with the tokens that would have come.
    /// Step numbers go on, too; the new workers start with the next.
    pub fn recover(&mut self) {
        self.in_flight.clear();
        self.running.clear();
        self.left.clear();
        self.free_rows = all_rows(self.config.max_rows);
        self.pool.reset();
        self.num_reserved = 0;
        self.did_not_fit = None;
        for (_, slot) in self.sequences.in_order() {
            let sequence = &mut self.sequences[slot];
            sequence.num_in_flight = 0;
            sequence.drafting = None;
            if sequence.place != Place::Queued {
                sequence.reset_row();
                sequence.place = Place::Queued;
                self.queue.insert(sequence, slot);
                self.totals.recovered += 1;
            }
        }
    }

    /// Whether no sequence lives and no step is in flight.
    pub fn is_idle(&self) -> bool {
        self.sequences.len() == 0 && self.in_flight.is_empty()
    }

    /// Steps planned and not yet settled.
    pub fn num_in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// The number of the next plan.
    pub fn next_step(&self) -> u64 {
        self.next_step
    }

    /// Length at which the request's sequence is complete.
    fn check(&self, request: &Request) -> Result<usize, Refused> {
        let max_len = self.config.check(request)?;
        let EngineConfig { block_size, num_blocks, max_queue, .. } = self.config;
        let num_beams = request.beams.map_or(1, |beams| beams.width as usize);
        let needed = num_blocks_in_all(request.prompt.len(), max_len, num_beams, block_size);
        if needed > num_blocks {
            return Err(Refused::NeverFits { needed, num_blocks });
        }
        if self.queue.num_new() >= max_queue {
            return Err(Refused::QueueFull { max: max_queue });
        }
        let max = *self.config.max_queue_of.get(&request.priority).unwrap_or(&self.config.max_queue_each);
        if self.queue.num_new_of(request.priority) >= max {
            return Err(Refused::LevelFull { max });
        }
        Ok(max_len)
    }

    fn end_early(&mut self, id: SequenceId, reason: FinishReason) -> bool {
        let Some(slot) = self.sequences.find(id) else { return false };
        let mut tokens = self.sequences[slot].take_held();
        if reason == FinishReason::StopWord {
            tokens.clear();
        }
        let event = self.sequences[slot].event(tokens, Some(reason));
        self.end(slot);
        self.events.push(event);
        true
    }

    /// Takes a sequence out of wherever it is.
    pub(crate) fn end(&mut self, slot: Slot) {
        match self.sequences[slot].place {
            Place::Queued => self.queue.remove(&self.sequences[slot]),
            Place::Running(_) => self.leave(slot, Place::Draining),
            Place::Draining => {}
        }
        self.sequences.remove(slot);
    }

    /// Takes a running sequence out of its row. Row and blocks go to plans made from now on.
    pub(crate) fn leave(&mut self, slot: Slot, place: Place) {
        let (block_size, step) = (self.config.block_size, self.next_step);
        let index = self.running.binary_search_by_key(&turn(&self.sequences[slot]), |&(turn, _)| turn);
        self.running.remove(index.expect("a running sequence is in the running list"));
        let sequence = &mut self.sequences[slot];
        let Place::Running(row) = sequence.place else { panic!("only a running sequence leaves its row") };
        match &sequence.beams {
            None => {
                self.left.push(row);
                self.free_rows.push(row);
            }
            Some(beams) => {
                self.left.extend_from_slice(&beams.rows[..beams.num_live_rows]);
                self.free_rows.extend_from_slice(&beams.rows);
            }
        }
        if self.config.policy == Policy::GuaranteedNoEvict {
            self.num_reserved -= sequence.num_blocks_in_all(block_size) - sequence.num_held();
        }
        if self.config.prefix_cache {
            for &block in &sequence.blocks[sequence.num_ready.min(sequence.num_named)..sequence.num_named] {
                self.pool.forget(block);
            }
            crate::prefix::name_output(&mut self.pool, sequence, block_size, step);
        }
        for &block in sequence.beams.iter().flat_map(|beams| &beams.tails).flatten() {
            self.pool.release(block);
        }
        for &block in sequence.blocks.iter().rev() {
            self.pool.release(block);
        }
        sequence.reset_row();
        sequence.place = place;
    }
}

/// Row 0 is taken first.
fn all_rows(max_rows: usize) -> Vec<RowId> {
    (0..max_rows as u32).rev().map(RowId).collect()
}
