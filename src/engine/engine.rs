//! The engine's state, and the calls between steps.

use std::collections::VecDeque;

use crate::adapter::AdapterSlots;
use crate::blocks::BlockPool;
use crate::costs::{CostModel, StepCosts, StepLoad};
use crate::draft::{Drafter, PromptLookup};
use crate::queue::{Queue, ServiceKey};
use crate::sequence::{Sequence, SequenceState, max_num_blocks};
use crate::sequences::Sequences;
use crate::slot::{Sample, Slot};
use crate::snapshots;
use crate::weigh_drafts::DraftHistory;
use crate::{ConfigError, EngineConfig, FinishReason, Refused, Request, RowId, SequenceId, TokenEvent};

/// The scheduler of one model: a state machine without clock, thread or I/O.
///
/// One thread owns it. It repeats: pass the clients' requests to [`submit`](Self::submit) and [`cancel`](Self::cancel),
/// call [`plan`](Self::plan) until it returns `None`, pass what the workers return to [`settle`](Self::settle).
///
/// # Why blocks and rows can be reused at once
///
/// A sequence may end while a later plan that computes it is in flight. Plans made after its end may reuse its row and
/// blocks. This is safe for two reasons.
///
/// - Workers carry out plans in order. Within a plan they apply `left` before `joined` and `grown`, and all of them
///   before the forward pass. So the late pass of the ended sequence writes into its blocks before the first pass of
///   the new owner does, and the row is dropped at the latest by the plan that gives it to another sequence.
/// - Nothing that the `work` of a plan uses is reused within this plan. What is freed while a plan is made comes from
///   sequences without work in it, and the sequences that the plan completes are removed after it is made.
#[derive(Debug)]
pub struct Engine {
    pub(crate) config: EngineConfig,
    pub(crate) sequences: Sequences,
    pub(crate) queue: Queue,
    /// In the order of service; the last one is preempted first.
    pub(crate) running: Vec<(ServiceKey, Slot)>,
    pub(crate) free_rows: Vec<RowId>,
    /// Rows freed since the last plan.
    pub(crate) left: Vec<RowId>,
    pub(crate) pool: BlockPool,
    /// Number of KV groups without a window.
    pub(crate) num_full_groups: usize,
    /// Blocks of groups without a window that are reserved for running sequences and not yet allocated; 0 under
    /// [`Policy::MaxUtilization`].
    pub(crate) num_reserved: usize,
    /// Sum of [`Sequence::num_claimed`].
    pub(crate) num_claimed: usize,
    /// Oldest first.
    pub(crate) in_flight: VecDeque<InFlight>,
    /// The last settled step that had work.
    pub(crate) last_computed: Option<u64>,
    /// Sequences whose masks are to be computed before they are planned.
    pub(crate) masks_due: Vec<(Slot, SequenceId)>,
    /// The buffer of a settled step, kept for reuse.
    pub(crate) spare_samples: Vec<Sample>,
    pub(crate) next_step: u64,
    next_sequence: u64,
    /// The first sequence of the queue did not fit into this number of available blocks. It is not tried again until
    /// there are more.
    pub(crate) blocked_head: Option<(SequenceId, usize)>,
    /// Whether sequences that have not begun stay in the queue.
    pub(crate) holds_new: bool,
    pub(crate) adapters: AdapterSlots,
    pub(crate) drafter: Box<dyn Drafter>,
    pub(crate) costs: CostModel,
    pub(crate) draft_history: DraftHistory,
    /// Whether there was nothing to plan when the last step was settled.
    pub(crate) is_waiting: bool,
    /// Events that were not caused by an output.
    pub(crate) events: Vec<TokenEvent>,
    pub(crate) totals: Totals,
}

/// A plan that was sent and whose output has not arrived.
#[derive(Debug)]
pub(crate) struct InFlight {
    pub(crate) step: u64,
    /// In plan order.
    pub(crate) samples: Vec<Sample>,
    pub(crate) masks: Masks,
    pub(crate) load: StepLoad,
    /// Predicted seconds; `None` if nothing was measured before.
    pub(crate) predicted: Option<f64>,
    /// Whether all workers compute something in it.
    pub(crate) has_work: bool,
    /// Whether nothing is planned before its output is there: it has drafts, or the next plan has.
    pub(crate) is_awaited: bool,
}

/// The state of the masks of a plan in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Masks {
    /// Their jobs have not started.
    Due,
    /// Their jobs have started.
    Open,
    /// They were sent, or there are none.
    Sent,
}

/// Totals since the engine was created.
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
    pub(crate) late_masks: u64,
    pub(crate) host_hit_blocks: u64,
    pub(crate) disk_hit_blocks: u64,
    /// Of the device, the host and the disk.
    pub(crate) saved_seconds: [f64; 3],
}

/// Maximum length of the n-gram that prompt look-up searches for; transformers uses the same.
const DEFAULT_NGRAM: usize = 2;

impl Engine {
    /// Creates an idle engine.
    ///
    /// # Errors
    /// Returns the error of [`EngineConfig::validate`].
    pub fn new(config: EngineConfig) -> Result<Self, ConfigError> {
        config.validate()?;
        let (num_groups, keeps_evicted) = (config.num_groups(), config.windows[0].is_some());
        let pool = BlockPool::new(config.num_blocks, config.block_size, num_groups, keeps_evicted);
        let pool = pool.with_states(config.num_states);
        let host = [config.num_host_blocks, config.num_host_states];
        let mut pool = pool.with_host(host, [config.num_disk_blocks, config.num_disk_states]);
        pool.shares_output = config.shares_output;
        Ok(Self {
            pool,
            free_rows: all_rows(config.max_rows),
            num_full_groups: config.num_full_groups(),
            num_claimed: 0,
            costs: CostModel::new(&config),
            draft_history: DraftHistory::default(),
            is_waiting: true,
            adapters: AdapterSlots::new(config.max_adapters),
            config,
            sequences: Sequences::default(),
            queue: Queue::default(),
            running: Vec::new(),
            left: Vec::new(),
            num_reserved: 0,
            in_flight: VecDeque::new(),
            last_computed: None,
            masks_due: Vec::new(),
            spare_samples: Vec::new(),
            next_step: 0,
            next_sequence: 0,
            blocked_head: None,
            holds_new: false,
            drafter: Box::new(PromptLookup { max_ngram: DEFAULT_NGRAM }),
            events: Vec::new(),
            totals: Totals::default(),
        })
    }

    /// Creates an idle engine with the same limits, to replace this one after its state became unreliable. The numbers
    /// of steps and sequences continue, so that new ones cannot be confused with old ones.
    pub fn successor(&self) -> Self {
        let mut fresh = Self::new(self.config.clone()).expect("these bounds were valid before");
        fresh.pool.take_host_of(&self.pool);
        let Self { next_step, next_sequence, totals, draft_history, .. } = *self;
        Self { next_step, next_sequence, totals, draft_history, costs: self.costs.clone(), ..fresh }
    }

    /// Sets the source of draft tokens where they are allowed ([`EngineConfig::max_drafts`]). The default is [`PromptLookup`].
    pub fn set_drafter(&mut self, drafter: Box<dyn Drafter>) {
        self.drafter = drafter;
    }

    /// Replaces what the engine has learned about the time of steps.
    pub fn set_costs(&mut self, costs: StepCosts) {
        self.costs.set(costs);
        self.draft_history.num_steps = u32::MAX;
    }

    /// Tells the engine how many seconds the oldest step in flight took since the output before it, or since an idle device got it; call it
    /// before [`settle`](Self::settle). Returns the seconds that were predicted, or `None` if no step was measured before its plan.
    /// Durations change the sizes of later steps and whether they have drafts, and no token.
    pub fn measure(&mut self, seconds: f64) -> Option<f64> {
        let step = self.in_flight.front()?;
        self.costs.learn(&step.load, step.predicted, seconds);
        step.predicted
    }

    /// What determines the time of the oldest step in flight.
    pub fn oldest_load(&self) -> Option<StepLoad> {
        self.in_flight.front().map(|step| step.load)
    }

    /// Tells the engine how many seconds a step took before it serves requests.
    pub fn learn(&mut self, load: &StepLoad, seconds: f64) {
        self.costs.learn(load, None, seconds);
    }

    /// Forgets what an idle engine has computed and counted so far, but not how long steps take.
    pub fn forget_work(&mut self) {
        self.reset_prefix_cache();
        (self.totals, self.draft_history) = (Totals::default(), DraftHistory::default());
    }

    /// The limits this engine was created with.
    pub fn config(&self) -> &EngineConfig {
        &self.config
    }

    /// Queues a request. Each sequence ends with exactly one event that has [`TokenEvent::finished`] set.
    ///
    /// # Errors
    /// Returns an error if the request can never run or the queue is full.
    pub fn submit(&mut self, request: Request) -> Result<SequenceId, Refused> {
        let max_len = self.check(&request)?;
        let id = self.new_id();
        self.totals.prompt_tokens += request.prompt.len() as u64;
        let mut sequence = Sequence::new(id, request, max_len, self.config.max_drafts, self.config.num_groups());
        sequence.needs_token_feedback = self.config.num_stages > 1;
        sequence.acceptance = self.draft_history.acceptance;
        if self.has_states() {
            sequence.keeps_contents = true;
            sequence.prompt_snapshots.message_ends = snapshots::message_ends(&sequence.tokens, &self.config);
        }
        let slot = self.sequences.insert(sequence);
        self.queue.insert(&self.sequences[slot], slot);
        Ok(id)
    }

    pub(crate) fn new_id(&mut self) -> SequenceId {
        self.next_sequence += 1;
        SequenceId(self.next_sequence - 1)
    }

    /// Ends a sequence because the client disconnected or cancelled. Its row and blocks are free for the next plan, and
    /// its tokens in flight are discarded. Returns false if the sequence has already ended.
    pub fn cancel(&mut self, sequence: SequenceId) -> bool {
        self.end_early(sequence, FinishReason::Cancelled)
    }

    /// [Cancels](Self::cancel) every sequence.
    pub fn cancel_all(&mut self) {
        for (sequence, _) in self.sequences.in_order() {
            self.cancel(sequence);
        }
    }

    /// Ends a sequence with [`FinishReason::StopWord`], because the caller found a stop word in the text of the tokens
    /// released so far. Returns false if the sequence has already ended.
    pub fn finish(&mut self, sequence: SequenceId) -> bool {
        self.end_early(sequence, FinishReason::StopWord)
    }

    /// Whether the sequence is still waiting for its first step.
    pub fn is_new(&self, sequence: SequenceId) -> bool {
        self.sequences.find(sequence).is_some_and(|slot| !self.sequences[slot].started)
    }

    /// Moves a sequence that waits for its first step behind all others of its priority. Returns false if it is not
    /// waiting for its first step.
    pub fn delay(&mut self, sequence: SequenceId) -> bool {
        let Some(slot) = self.sequences.find(sequence).filter(|&slot| !self.sequences[slot].started) else {
            return false;
        };
        self.queue.remove(&self.sequences[slot]);
        self.sequences[slot].is_delayed = true;
        self.queue.insert(&self.sequences[slot], slot);
        true
    }

    /// Appends the events that are not caused by an output: those of [`cancel`](Self::cancel) and
    /// [`finish`](Self::finish). [`settle`](Self::settle) does this, too, before it adds its own.
    pub fn drain_events(&mut self, events: &mut Vec<TokenEvent>) {
        events.append(&mut self.events);
    }

    /// Resets the state after all workers were lost. Steps in flight are void. Running sequences return to the front of
    /// the queue in their order and will join again with their prompt and output so far, so their streams continue with
    /// the same tokens. Step numbers continue: the new workers start with the next one.
    pub fn recover(&mut self) {
        self.in_flight.clear();
        self.masks_due.clear();
        self.running.clear();
        self.left.clear();
        self.free_rows = all_rows(self.config.max_rows);
        self.pool.lose_device(self.last_complete());
        self.adapters.reset();
        (self.num_reserved, self.num_claimed) = (0, 0);
        (self.is_waiting, self.blocked_head) = (true, None);
        for (_, slot) in self.sequences.in_order() {
            let sequence = &mut self.sequences[slot];
            sequence.num_in_flight = 0;
            sequence.drafting = None;
            if sequence.state != SequenceState::Queued {
                sequence.reset_row();
                sequence.state = SequenceState::Queued;
                self.queue.insert(sequence, slot);
                self.totals.recovered += 1;
            }
        }
    }

    /// Keeps sequences that have not begun in the queue, until this is called with `false`. Others run to their end.
    pub fn hold_new(&mut self, holds: bool) {
        self.holds_new = holds;
    }

    /// Whether every sequence still waits for its first step, and no step is in flight.
    pub fn is_unbegun(&self) -> bool {
        self.sequences.len() == self.queue.num_new() && self.in_flight.is_empty()
    }

    /// Removes everything from the prefix cache, on the device, on the host and on disk. Running sequences go on, and nothing that they have
    /// computed so far is found by others.
    pub fn reset_prefix_cache(&mut self) {
        self.pool.forget_all();
        self.blocked_head = None;
    }

    /// Whether there is no live sequence and no step in flight.
    pub fn is_idle(&self) -> bool {
        self.sequences.len() == 0 && self.in_flight.is_empty()
    }

    /// Number of steps planned and not yet settled.
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
        let num_beams = request.beams.map_or(1, |beams| beams.width as usize);
        self.check_room(request.prompt.len(), max_len, num_beams, request.constraint.is_some())?;
        if self.queue.num_new() >= self.config.max_queue {
            return Err(Refused::QueueFull { max: self.config.max_queue });
        }
        let max = *self.config.max_queue_of.get(&request.priority).unwrap_or(&self.config.max_queue_each);
        if self.queue.num_new_with_priority(request.priority) >= max {
            return Err(Refused::LevelFull { max });
        }
        Ok(max_len)
    }

    /// Checks that a sequence of this length fits into the blocks.
    pub(crate) fn check_room(
        &self,
        prompt_len: usize,
        max_len: usize,
        num_beams: usize,
        is_constrained: bool,
    ) -> Result<(), Refused> {
        let EngineConfig { block_size, num_blocks, max_step_tokens, .. } = self.config;
        let each = max_num_blocks(prompt_len, max_len, num_beams, block_size);
        let num_unsettled = if is_constrained { self.config.max_in_flight } else { 0 };
        let num_new = max_step_tokens + num_unsettled;
        let needed = self.num_full_groups * each + self.config.window_blocks(each, num_beams, num_new);
        if needed > num_blocks { Err(Refused::NeverFits { needed, num_blocks }) } else { Ok(()) }
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

    /// Removes a sequence from the engine, in whatever state it is.
    pub(crate) fn end(&mut self, slot: Slot) {
        match self.sequences[slot].state {
            SequenceState::Queued => self.queue.remove(&self.sequences[slot]),
            SequenceState::Running(_) => self.release_row(slot, SequenceState::Draining),
            SequenceState::Draining => {}
        }
        self.sequences.remove(slot);
    }
}

/// All rows, in an order such that row 0 is popped first.
fn all_rows(max_rows: usize) -> Vec<RowId> {
    (0..max_rows as u32).rev().map(RowId).collect()
}
