//! The engine's counters, for metrics and for tests that look for leaks.

use std::collections::BTreeMap;
use std::fmt::Display;

use crate::engine::Engine;
use crate::sequence::SequenceState;
use crate::{Policy, RowId, SequenceId, StepCosts};

/// A snapshot for metrics.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct EngineStats {
    /// Sequences in rows.
    pub num_running: usize,
    /// Of these, sequences whose prompt is not fully computed by the plans made so far.
    pub num_prefilling: usize,
    /// Sequences in the queue, preempted ones included.
    pub num_waiting: usize,
    /// Sequences whose last token is in flight.
    pub num_draining: usize,
    /// Plans in flight.
    pub num_in_flight: usize,
    /// Blocks that running sequences use.
    pub num_blocks_used: usize,
    /// Blocks that no sequence uses and whose content can be reused.
    pub num_blocks_cached: usize,
    /// Blocks that are empty.
    pub num_blocks_unused: usize,
    /// All blocks.
    pub num_blocks: usize,
    /// Slots for recurrent states that running sequences use.
    pub num_states_used: usize,
    /// Slots that hold snapshots of recurrent states for later sequences.
    pub num_states_cached: usize,
    /// Slots of the host that hold evicted blocks.
    pub num_host_blocks_used: usize,
    /// All slots of the host for blocks.
    pub num_host_blocks: usize,
    /// Slots of the host that hold evicted snapshots.
    pub num_host_states_used: usize,
    /// All slots of the host for snapshots.
    pub num_host_states: usize,
    /// Slots on disk that hold blocks.
    pub num_disk_blocks_used: usize,
    /// All slots on disk for blocks; 0 once the disk is not used any more.
    pub num_disk_blocks: usize,
    /// Slots on disk that hold snapshots.
    pub num_disk_states_used: usize,
    /// All slots on disk for snapshots.
    pub num_disk_states: usize,
    /// Plans made.
    pub total_steps: u64,
    /// Preemptions.
    pub total_preempted: u64,
    /// Sequences that continued after their workers were lost, counted each time.
    pub total_recovered: u64,
    /// Prompt tokens of accepted requests.
    pub total_prompt_tokens: u64,
    /// Tokens settled, end ids and stop words included.
    pub total_output_tokens: u64,
    /// Tokens computed for sequences that had already ended, or whose mask was late.
    pub total_discarded_tokens: u64,
    /// Blocks found in the prefix cache.
    pub total_reused_blocks: u64,
    /// Blocks allocated.
    pub total_allocated_blocks: u64,
    /// Blocks of the prefixes with which sequences began that were on the host.
    pub total_host_hit_blocks: u64,
    /// Of these, blocks that came from the disk for the sequence.
    pub total_disk_hit_blocks: u64,
    /// Blocks copied to the host.
    pub total_stored_blocks: u64,
    /// Blocks copied from the host.
    pub total_loaded_blocks: u64,
    /// Recurrent states copied to the host.
    pub total_stored_states: u64,
    /// Recurrent states copied from the host.
    pub total_loaded_states: u64,
    /// Blocks copied from the host to the disk.
    pub total_disk_stored_blocks: u64,
    /// Blocks copied from the disk to the host.
    pub total_disk_loaded_blocks: u64,
    /// Recurrent states copied from the host to the disk.
    pub total_disk_stored_states: u64,
    /// Recurrent states copied from the disk to the host.
    pub total_disk_loaded_states: u64,
    /// Blocks and recurrent states that could not be copied from the disk.
    pub total_disk_failed: u64,
    /// Seconds of prefill that sequences did not need, because the beginning of their prompts was on the device, on the host, and on
    /// disk: what [`StepCosts::of_prompt`] says of it. What is found before a step was measured does not count.
    pub total_saved_seconds: [f64; 3],
    /// Draft tokens guessed.
    pub total_drafted_tokens: u64,
    /// Draft tokens that were correct.
    pub total_accepted_tokens: u64,
    /// What was learned about the time of steps; `None` before the first measurement.
    pub costs: Option<StepCosts>,
    /// Steps that a row sat out because its mask was not ready.
    pub total_late_masks: u64,
}

/// The resources held by each live sequence, and their sums. All values are zero when the engine is idle.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Ledger {
    /// One entry for each live sequence, in order of arrival.
    pub holdings: Vec<Holding>,
    /// Sequences in the queue.
    pub num_queued: usize,
    /// Rows in use.
    pub num_rows: usize,
    /// Blocks in use; a shared block counts once.
    pub num_blocks: usize,
    /// Blocks reserved and not yet allocated.
    pub num_reserved_blocks: usize,
    /// Plans in flight.
    pub num_in_flight: usize,
}

/// The resources of one sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Holding {
    /// The sequence.
    pub sequence: SequenceId,
    /// Its row, if it runs; in a beam search the first one.
    pub row: Option<RowId>,
    /// Number of rows in use.
    pub num_rows: usize,
    /// Whether it is in the queue.
    pub queued: bool,
    /// Number of distinct blocks that it uses.
    pub num_blocks: usize,
    /// Its tokens in flight.
    pub num_in_flight: usize,
}

impl Engine {
    /// Counts for metrics.
    pub fn stats(&self) -> EngineStats {
        let running = self.running.iter();
        let (host_blocks, host_states) = (&self.pool.hosted.slots, &self.pool.states.hosted);
        let ([total_stored_blocks, total_loaded_blocks], [total_stored_states, total_loaded_states]) =
            (host_blocks.totals, host_states.totals);
        EngineStats {
            num_running: self.running.len(),
            num_prefilling: running.filter(|&&(_, slot)| self.sequences[slot].is_prefilling()).count(),
            num_waiting: self.queue.len(),
            num_draining: self.sequences.len() - self.running.len() - self.queue.len(),
            num_in_flight: self.in_flight.len(),
            num_blocks_used: self.pool.num_used(),
            num_blocks_cached: self.pool.num_cached(),
            num_blocks_unused: self.pool.num_unused(),
            num_blocks: self.config.num_blocks,
            num_states_used: self.pool.states.num_used(),
            num_states_cached: self.pool.states.num_snapshots(),
            num_host_blocks_used: host_blocks.num_used(),
            num_host_blocks: host_blocks.num_slots(),
            num_host_states_used: host_states.num_used(),
            num_host_states: host_states.num_slots(),
            num_disk_blocks_used: host_blocks.disk.num_used(),
            num_disk_blocks: host_blocks.disk.num_slots(),
            num_disk_states_used: host_states.disk.num_used(),
            num_disk_states: host_states.disk.num_slots(),
            total_steps: self.totals.steps,
            total_preempted: self.totals.preempted,
            total_recovered: self.totals.recovered,
            total_prompt_tokens: self.totals.prompt_tokens,
            total_output_tokens: self.totals.output_tokens,
            total_discarded_tokens: self.totals.discarded_tokens,
            total_reused_blocks: self.totals.reused_blocks,
            total_allocated_blocks: self.totals.allocated_blocks,
            total_host_hit_blocks: self.totals.host_hit_blocks,
            total_disk_hit_blocks: self.totals.disk_hit_blocks,
            total_stored_blocks,
            total_loaded_blocks,
            total_stored_states,
            total_loaded_states,
            total_disk_stored_blocks: host_blocks.disk.totals[0],
            total_disk_loaded_blocks: host_blocks.disk.totals[1],
            total_disk_stored_states: host_states.disk.totals[0],
            total_disk_loaded_states: host_states.disk.totals[1],
            total_disk_failed: host_blocks.disk.num_failed + host_states.disk.num_failed,
            total_saved_seconds: self.totals.saved_seconds,
            total_drafted_tokens: self.totals.drafted_tokens,
            total_accepted_tokens: self.totals.accepted_tokens,
            costs: self.costs.costs(),
            total_late_masks: self.totals.late_masks,
        }
    }

    /// The holder of every row, block and queue entry.
    pub fn ledger(&self) -> Ledger {
        let holding = |(id, slot)| {
            let sequence = &self.sequences[slot];
            Holding {
                sequence: id,
                row: if let SequenceState::Running(row) = sequence.state { Some(row) } else { None },
                num_rows: if let SequenceState::Running(_) = sequence.state { sequence.num_rows() } else { 0 },
                queued: sequence.state == SequenceState::Queued,
                num_blocks: sequence.num_held(0..self.config.num_groups()),
                num_in_flight: sequence.num_in_flight,
            }
        };
        Ledger {
            holdings: self.sequences.in_order().into_iter().map(holding).collect(),
            num_queued: self.queue.len(),
            num_rows: self.config.max_rows - self.free_rows.len(),
            num_blocks: self.pool.num_used(),
            num_reserved_blocks: self.num_reserved(),
            num_in_flight: self.in_flight.len(),
        }
    }

    /// Recounts all resources from the sequences and compares them with the counters. For tests and debugging: the time
    /// is proportional to the number of blocks.
    ///
    /// # Errors
    /// Names the first counter that is wrong.
    pub fn audit(&self) -> Result<(), String> {
        // Names are formatted only where something is wrong: there is one for each row and block.
        fn equal(what: impl Display, counted: usize, recorded: usize) -> Result<(), String> {
            if counted == recorded { Ok(()) } else { Err(format!("{what}: counted {counted}, recorded {recorded}")) }
        }
        let ledger = self.ledger();
        let mut users = vec![0; self.config.num_blocks];
        let mut groups = vec![None; self.config.num_blocks];
        let mut rows = vec![0; self.config.max_rows];
        self.free_rows.iter().for_each(|row| rows[row.0 as usize] += 1);
        for (_, slot) in self.sequences.in_order() {
            let sequence = &self.sequences[slot];
            let tails = sequence.beams.iter().flat_map(|beams| &beams.tails);
            for (group, table) in tails.chain([&sequence.tables]).flat_map(|tables| tables.iter().enumerate()) {
                for block in table.held() {
                    users[block.0 as usize] += 1;
                    groups[block.0 as usize] = Some(group);
                }
            }
            match (sequence.state, &sequence.beams) {
                (SequenceState::Running(_), Some(beams)) => beams.rows.iter().for_each(|row| rows[row.0 as usize] += 1),
                (SequenceState::Running(row), None) => rows[row.0 as usize] += 1,
                _ => {}
            }
        }
        for (row, &count) in rows.iter().enumerate() {
            equal(format_args!("holders of row {row}"), count, 1)?;
        }
        for (block, &count) in users.iter().enumerate() {
            equal(
                format_args!("users of block {block}"),
                count,
                self.pool.num_users(crate::BlockId(block as u32)) as usize,
            )?;
        }
        for group in 0..self.config.num_groups() {
            let counted = groups.iter().filter(|&&found| found == Some(group)).count();
            equal(format_args!("blocks used by KV group {group}"), counted, self.pool.num_used_by(group..group + 1))?;
        }
        let states = self.sequences.in_order().into_iter().map(|(_, slot)| self.sequences[slot].recurrent.num_held());
        equal("recurrent states in use", states.sum(), self.pool.states.num_used())?;
        equal("blocks used", users.iter().filter(|&&count| count > 0).count(), ledger.num_blocks)?;
        equal("sequences queued", ledger.holdings.iter().filter(|holding| holding.queued).count(), ledger.num_queued)?;
        let mut new_by_priority = BTreeMap::new();
        for (_, slot) in self.sequences.in_order() {
            let sequence = &self.sequences[slot];
            if sequence.state == SequenceState::Queued && !sequence.started {
                *new_by_priority.entry(sequence.priority).or_insert(0) += 1;
            }
        }
        if new_by_priority != *self.queue.new_by_priority() {
            return Err(format!(
                "new ones by priority: counted {new_by_priority:?}, recorded {:?}",
                self.queue.new_by_priority()
            ));
        }
        equal("rows taken", ledger.holdings.iter().map(|holding| holding.num_rows).sum(), ledger.num_rows)?;
        let num_running = ledger.holdings.iter().filter(|holding| holding.row.is_some()).count();
        equal("sequences running", self.running.len(), num_running)?;
        equal("blocks reserved", self.count_reserved(), self.num_reserved)?;
        let claims = self.running.iter().map(|&(_, slot)| self.sequences[slot].num_claimed);
        equal("blocks claimed", claims.sum(), self.num_claimed)?;
        self.audit_windows()?;
        self.pool.hosted.slots.audit()?;
        self.pool.states.hosted.audit()?;
        let live_samples = self.in_flight.iter().flat_map(|step| &step.samples);
        let live = live_samples.filter(|sample| self.sequences.find(sample.sequence).is_some()).count();
        equal("tokens in flight", ledger.holdings.iter().map(|holding| holding.num_in_flight).sum(), live)?;
        if self.num_reserved() > self.pool.num_available() {
            return Err(format!(
                "{} blocks are reserved, {} available",
                self.num_reserved(),
                self.pool.num_available()
            ));
        }
        Ok(())
    }
}

impl Engine {
    fn count_reserved(&self) -> usize {
        if self.config.policy == Policy::MaxUtilization {
            return 0;
        }
        let promised = |&(_, slot): &(_, _)| {
            let sequence = &self.sequences[slot];
            let full = 0..self.num_full_groups;
            full.len() * sequence.max_num_blocks(self.config.block_size) - sequence.num_held(full)
        };
        self.running.iter().map(promised).sum()
    }

    /// Compares the blocks that sequences hold in KV groups with a window with the upper bound.
    fn audit_windows(&self) -> Result<(), String> {
        let windows = self.num_full_groups..self.config.num_groups();
        for &(_, slot) in &self.running {
            let sequence = &self.sequences[slot];
            let bound = match self.config.policy {
                Policy::GuaranteedNoEvict => sequence.num_claimed,
                Policy::MaxUtilization => {
                    let max = sequence.max_num_blocks(self.config.block_size);
                    self.config.window_blocks(max, sequence.num_rows(), self.config.max_step_tokens)
                }
            };
            let held = sequence.num_held(windows.clone());
            if held > bound {
                return Err(format!(
                    "sequence {} holds {held} blocks of windows, at most {bound} allowed",
                    sequence.id.0
                ));
            }
        }
        Ok(())
    }
}

impl Ledger {
    /// Whether no resource is held.
    pub fn is_zero(&self) -> bool {
        *self == Self::default()
    }
}
