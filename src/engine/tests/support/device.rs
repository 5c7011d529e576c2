//! The simulated device.

use std::collections::VecDeque;

use engine::{
    AdapterId, BlockId, DiskCopy, DiskDirection, EngineConfig, GrownTable, HostCopies, HostSlot, JoinedTable, RowId,
    RowWork, STORES_COMPLETE_AFTER, SampleMask, SampledToken, SequenceId, SlotKind, StepOutput, StepPlan, TokenId,
};

use super::tokens::Guesser;
use super::tokens::Random;
use super::tokens::VOCAB_SIZE;
use super::tokens::digest;
use super::tokens::digests;
use super::tokens::log_prob;
use super::tokens::next_token;

/// A worker with its device. It carries out plans in order and panics if a plan breaks its contract.
pub struct Device {
    block_size: usize,
    windows: Vec<Option<usize>>,
    /// `[num_blocks * block_size]`, the digest of a position in its KV group
    kv: Vec<u64>,
    /// Whether generated tokens are computed in another way than prompts.
    is_output_apart: bool,
    /// Of each slot for a recurrent state, the digest of the last position and the number of positions.
    states: Vec<(u64, usize)>,
    /// `[num_host_blocks * block_size]` and `[num_host_states]`, copies of both in slots of the host.
    host: (Vec<u64>, Vec<(u64, usize)>),
    /// The same on disk.
    disk: (Vec<u64>, Vec<(u64, usize)>),
    pub rows: Vec<Option<Row>>,
    /// What each slot for adapters holds.
    adapters: Vec<Option<AdapterId>>,
    /// Guesses tokens if plans ask for them.
    guesser: Guesser,
    last_step: Option<u64>,
    /// The last step with work.
    last_computed: Option<u64>,
    /// The slots of the host for blocks and states that the last plans have filled, with their steps.
    filled: VecDeque<(u64, [Vec<u32>; 2])>,
}

#[derive(Clone)]
pub struct Row {
    sequence: SequenceId,
    tokens: Vec<TokenId>,
    digests: Vec<u64>,
    /// For each KV group; `None` before the blocks that were sent.
    tables: Vec<Vec<Option<BlockId>>>,
    num_computed: usize,
    /// The slot of its recurrent state.
    state: Option<usize>,
    /// The slot of its adapter.
    adapter: Option<usize>,
    /// The seed of its request. In these tests it stands for the salt, which workers do not know.
    seed: u64,
    /// Whether its request wants log-probabilities.
    has_logprobs: bool,
    /// Number of tokens when it joined.
    pub join_len: usize,
    pub num_prompt_tokens: u32,
    beam_candidates: usize,
    is_constrained: bool,
    /// Draft tokens to verify in this step.
    drafts: Vec<TokenId>,
}

impl Row {
    /// The digests of all tokens, drafts included.
    fn all_digests(&self) -> Vec<u64> {
        let last = *self.digests.last().unwrap();
        let drafted = self.drafts.iter().scan(last, |before, &token| {
            *before = digest(*before, token);
            Some(*before)
        });
        self.digests.iter().copied().chain(drafted).collect()
    }
}

impl Device {
    pub fn new(config: &EngineConfig) -> Self {
        Self {
            block_size: config.block_size,
            windows: config.windows.clone(),
            is_output_apart: !config.shares_output,
            kv: vec![0; config.num_blocks * config.block_size],
            states: vec![(0, usize::MAX); config.num_states],
            host: (vec![0; config.num_host_blocks * config.block_size], vec![(0, usize::MAX); config.num_host_states]),
            disk: (vec![0; config.num_disk_blocks * config.block_size], vec![(0, usize::MAX); config.num_disk_states]),
            rows: (0..config.max_rows).map(|_| None).collect(),
            adapters: vec![None; config.max_adapters],
            guesser: Guesser(Random(11)),
            last_step: None,
            last_computed: None,
            filled: VecDeque::new(),
        }
    }

    /// The device of new workers. They have the host memory, but what the last plans have stored there is incomplete, as are the copies
    /// of `sent` plans, which the lost workers may have begun.
    pub fn successor(mut self, config: &EngineConfig, sent: &VecDeque<StepPlan>) -> Self {
        let is_complete = |step: u64| self.last_computed.is_some_and(|last| step + STORES_COMPLETE_AFTER <= last);
        let filled = std::mem::take(&mut self.filled).into_iter().filter(|&(step, _)| !is_complete(step));
        for [blocks, states] in filled.map(|(_, slots)| slots).chain(sent.iter().map(filled_slots)) {
            for slot in blocks {
                self.host.0[slot as usize * self.block_size..][..self.block_size].fill(u64::MAX);
            }
            states.into_iter().for_each(|slot| self.host.1[slot as usize] = (u64::MAX, 0));
        }
        Self { host: self.host, disk: self.disk, ..Self::new(config) }
    }

    /// The device of new workers with new host memory. The disk is the same.
    pub fn successor_without_host(self, config: &EngineConfig) -> Self {
        Self { disk: self.disk, ..Self::new(config) }
    }

    /// Copies between host memory and disk. Plans may have been sent and not run.
    pub fn copy_with_disk(&mut self, copy: DiskCopy) {
        let size = self.block_size;
        let range = |slot: u32| slot as usize * size..(slot as usize + 1) * size;
        let (host, disk) = (copy.host.0, copy.disk.0);
        match (copy.kind, copy.direction) {
            (SlotKind::Block, DiskDirection::Store) => {
                self.disk.0[range(disk)].copy_from_slice(&self.host.0[range(host)]);
            }
            (SlotKind::Block, DiskDirection::Load) => {
                self.host.0[range(host)].copy_from_slice(&self.disk.0[range(disk)]);
            }
            (SlotKind::State, DiskDirection::Store) => self.disk.1[disk as usize] = self.host.1[host as usize],
            (SlotKind::State, DiskDirection::Load) => self.host.1[host as usize] = self.disk.1[disk as usize],
        }
    }

    /// Rows with an empty mask sample a wrong token.
    pub fn run(&mut self, plan: &StepPlan, masks: &[SampleMask]) -> StepOutput {
        assert!(self.last_step.is_none_or(|last| plan.step == last + 1), "gap before step {}", plan.step);
        self.last_step = Some(plan.step);
        if !plan.work.is_empty() {
            self.last_computed = Some(plan.step);
        }
        self.filled.push_back((plan.step, filled_slots(plan)));
        self.apply(plan);
        for work in &plan.work {
            let row = self.row(work.row);
            assert_eq!(row.num_computed, work.start as usize, "start of {work:?} in step {}", plan.step);
            self.check(work, work.start as usize, plan.step, "before");
        }
        for work in &plan.work {
            let saved = plan.saved_states.iter().find(|saved| saved.row == work.row);
            self.compute(work);
            if let Some(saved) = saved {
                let (end, digests) = ((work.start + saved.num_tokens) as usize, self.results(self.row(work.row)));
                self.states[saved.to.0 as usize] = (digests[end - 1], end);
            }
        }
        for work in &plan.work {
            self.check(work, (work.start + work.num_tokens) as usize, plan.step, "after");
        }
        let mut masks = masks.iter().peekable();
        let (mut tokens, mut guesses) = (Vec::new(), Vec::new());
        for work in plan.work.iter().filter(|work| work.samples) {
            let num_samples =
                if self.row(work.row).beam_candidates > 0 { 1 } else { 1 + self.row(work.row).drafts.len() };
            let own = tokens.len()..tokens.len() + num_samples;
            let is_constrained = self.row(work.row).is_constrained;
            let own_masks: Vec<_> =
                own.filter_map(|index| masks.next_if(|mask| mask.sample as usize == index)).collect();
            assert_eq!(own_masks.len(), if is_constrained { num_samples } else { 0 }, "a mask for each sample");
            assert!(own_masks.iter().all(|mask| mask.step == plan.step), "masks are those of the step");
            let sampled = self.sample(work.row, own_masks.first().is_some_and(|mask| mask.words.is_empty()));
            if work.num_guesses > 0 {
                guesses.push((work.row, self.guess(work, &sampled)));
            }
            tokens.extend(sampled);
        }
        assert!(masks.next().is_none(), "no mask is left over");
        StepOutput { step: plan.step, tokens, guesses }
    }

    /// Guesses behind the tokens of a row up to and including the first that is not its draft.
    fn guess(&mut self, work: &RowWork, sampled: &[SampledToken]) -> Vec<TokenId> {
        let row = self.row(work.row);
        let num_right = row.drafts.iter().zip(sampled).take_while(|(draft, sampled)| **draft == sampled.token).count();
        let known = if row.drafts.is_empty() { row.tokens.len() - 1 } else { row.tokens.len() };
        let new = sampled[..=num_right].iter().map(|sampled| sampled.token);
        let tokens: Vec<TokenId> = row.tokens[..known].iter().copied().chain(new).collect();
        let mut guesses = Vec::new();
        engine::Drafter::draft(&mut self.guesser, &tokens, work.num_guesses as usize, &mut guesses);
        guesses
    }

    fn apply(&mut self, plan: &StepPlan) {
        for row in &plan.left {
            assert!(self.rows[row.0 as usize].take().is_some(), "row {} leaves but is free", row.0);
        }
        for filled in &plan.adapters {
            self.adapters[filled.slot.0 as usize] = Some(filled.adapter);
        }
        for joined in &plan.joined {
            let place = &mut self.rows[joined.row.0 as usize];
            assert!(place.is_none(), "row {} is joined but taken", joined.row.0);
            assert_eq!(joined.tables.len(), self.windows.len(), "a table for each KV group");
            assert!(joined.num_computed == 0 || !joined.sampling.context_logits, "the logits of a prefix are missing");
            let table = |table: &JoinedTable| {
                let released = std::iter::repeat_n(None, table.first as usize);
                released.chain(table.blocks.iter().copied().map(Some)).collect()
            };
            *place = Some(Row {
                sequence: joined.sequence,
                tokens: joined.tokens.clone(),
                digests: digests(&joined.tokens).collect(),
                tables: joined.tables.iter().map(table).collect(),
                num_computed: joined.num_computed as usize,
                state: joined.state.map(|state| state.0 as usize),
                adapter: joined.adapter.map(|slot| slot.0 as usize),
                seed: joined.sampling.seed,
                has_logprobs: joined.sampling.num_logprobs.is_some(),
                join_len: joined.tokens.len(),
                num_prompt_tokens: joined.num_prompt_tokens,
                beam_candidates: joined.sampling.beam_candidates as usize,
                is_constrained: joined.sampling.is_constrained,
                drafts: Vec::new(),
            });
        }
        for restored in &plan.restored {
            let state = self.row(restored.row).state.expect("a restored row has a state");
            self.states[state] = self.states[restored.from.0 as usize];
        }
        self.copy_with_host(plan);
        self.revise(plan);
        self.copy(plan);
        for copied in &plan.copied_states {
            self.states[copied.to.0 as usize] = self.states[copied.from.0 as usize];
        }
        for restored in &plan.restored {
            let row = self.rows[restored.row.0 as usize].as_mut().expect("a restored row is taken");
            assert!(restored.position as usize <= row.num_computed, "a restored row goes back");
            row.num_computed = restored.position as usize;
        }
        for &GrownTable { row, group, block } in &plan.grown {
            let row = self.rows[row.0 as usize].as_mut().expect("a growing row is taken");
            row.tables[group as usize].push(Some(block));
        }
        for (row, drafts) in &plan.drafts {
            let row = self.rows[row.0 as usize].as_mut().expect("a verifying row is taken");
            assert!(row.drafts.is_empty() && row.beam_candidates == 0, "drafts are revised before there are others");
            row.drafts.clone_from(drafts);
        }
    }

    /// In the order of the lists. No slot is in two entries, and no block or state is read or written twice in the same direction.
    fn copy_with_host(&mut self, plan: &StepPlan) {
        let copies = &plan.host;
        let blocks =
            |copies: &[(BlockId, HostSlot)]| copies.iter().map(|copy| (copy.0.0, copy.1.0)).collect::<Vec<_>>();
        let [stored, loaded] = [&copies.stored, &copies.loaded].map(|copies| blocks(copies));
        let states = [&copies.stored_states, &copies.loaded_states];
        let [stored_states, loaded_states] =
            states.map(|copies| copies.iter().map(|copy| (copy.0.0, copy.1.0)).collect::<Vec<_>>());
        for lists in [[&stored, &loaded], [&stored_states, &loaded_states]] {
            let slots: std::collections::HashSet<_> =
                lists.iter().flat_map(|list| list.iter().map(|copy| copy.1)).collect();
            assert_eq!(slots.len(), lists[0].len() + lists[1].len(), "a slot is in two entries of step {}", plan.step);
            for list in lists {
                let places: std::collections::HashSet<_> = list.iter().map(|copy| copy.0).collect();
                assert_eq!(places.len(), list.len(), "a place is copied twice in step {}", plan.step);
            }
        }
        let size = self.block_size;
        let range = |slot: u32| slot as usize * size..(slot as usize + 1) * size;
        for (block, slot) in stored {
            self.host.0[range(slot)].copy_from_slice(&self.kv[range(block)]);
        }
        for (block, slot) in loaded {
            self.kv[range(block)].copy_from_slice(&self.host.0[range(slot)]);
        }
        for (state, slot) in stored_states {
            self.host.1[slot as usize] = self.states[state as usize];
        }
        for (state, slot) in loaded_states {
            self.states[state as usize] = self.host.1[slot as usize];
        }
    }

    fn revise(&mut self, plan: &StepPlan) {
        let parents: Vec<Row> = plan.revised.iter().map(|revised| self.row(revised.parent).clone()).collect();
        for (revised, mut row) in plan.revised.iter().zip(parents) {
            assert!(revised.row == revised.parent || row.beam_candidates > 0, "only beams continue others");
            row.tokens.truncate(revised.num_kept as usize);
            assert_eq!(row.tokens.len(), revised.num_kept as usize, "kept tokens are there");
            row.tokens.extend_from_slice(&revised.tokens);
            row.digests = digests(&row.tokens).collect();
            row.num_computed = row.tokens.len() - 1;
            row.drafts.clear();
            self.rows[revised.row.0 as usize] = Some(row);
        }
    }

    fn copy(&mut self, plan: &StepPlan) {
        for copied in &plan.copied {
            let row = self.rows[copied.row.0 as usize].as_mut().expect("a row whose block is copied is taken");
            let last = row.tables[copied.group as usize].last_mut().unwrap();
            assert_eq!(*last, Some(copied.from), "the last block is copied");
            *last = Some(copied.to);
            assert!(plan.copied.iter().all(|other| other.to != copied.from), "a copied block is read and written");
            let [from, to] = [copied.from, copied.to].map(|block| block.0 as usize * self.block_size);
            self.kv.copy_within(from..from + self.block_size, to);
        }
    }

    fn row(&self, row: RowId) -> &Row {
        self.rows[row.0 as usize].as_ref().expect("a working row is taken")
    }

    fn slot(&self, row: &Row, group: usize, position: usize) -> usize {
        let block = row.tables[group][position / self.block_size].expect("a position that is used has a block");
        block.0 as usize * self.block_size + position % self.block_size
    }

    /// What the device keeps of each position: another result with each adapter, salt, and, with `is_output_apart`, for generated tokens.
    fn results(&self, row: &Row) -> Vec<u64> {
        let adapter = row.adapter.map_or(0, |slot| self.adapters[slot].expect("the slot of a row is filled").0);
        let (apart, mark) = (row.num_prompt_tokens as usize, mark(adapter, row.seed));
        let is_apart = |index: usize| self.is_output_apart && index >= apart;
        let result = |(index, digest): (usize, u64)| if is_apart(index) { !digest ^ mark } else { digest ^ mark };
        row.all_digests().into_iter().enumerate().map(result).collect()
    }

    /// Checks the positions before `end` that the work can see.
    fn check(&self, work: &RowWork, end: usize, step: u64, when: &str) {
        let row = self.row(work.row);
        let digests = self.results(row);
        assert!(end <= digests.len(), "row of sequence {} holds fewer tokens than {end}", row.sequence.0);
        for (group, window) in self.windows.iter().enumerate() {
            let first = window.map_or(0, |window| (work.start as usize + 1).saturating_sub(window));
            for (position, &digest) in digests.iter().enumerate().take(end).skip(first) {
                let (found, sequence) = (self.kv[self.slot(row, group, position)], row.sequence.0);
                let expected = in_group(digest, group);
                assert_eq!(found, expected, "KV of position {position}, group {group}, {sequence} {when} step {step}");
            }
        }
    }

    fn compute(&mut self, work: &RowWork) {
        let (start, end) = (work.start as usize, (work.start + work.num_tokens) as usize);
        let row = self.row(work.row);
        let digests = self.results(row);
        let groups = 0..self.windows.len();
        let write = &|group, position: usize| (self.slot(row, group, position), in_group(digests[position], group));
        let writes: Vec<_> =
            groups.flat_map(|group| (start..end).map(move |position| write(group, position))).collect();
        if !self.states.is_empty() {
            let slot = row.state.expect("a row has a slot for its recurrent state");
            if start > 0 {
                let expected = (digests[start - 1], start);
                assert_eq!(self.states[slot], expected, "state of sequence {} at position {start}", row.sequence.0);
            }
            self.states[slot] = (digests[end - 1], end);
        }
        writes.into_iter().for_each(|(slot, digest)| self.kv[slot] = digest);
        self.rows[work.row.0 as usize].as_mut().unwrap().num_computed = end;
    }

    fn sample(&mut self, id: RowId, is_wrong: bool) -> Vec<SampledToken> {
        let row = self.rows[id.0 as usize].as_mut().unwrap();
        let num_tokens = row.tokens.len() + row.drafts.len();
        assert_eq!(row.num_computed, num_tokens, "sequence {} samples before its end", row.sequence.0);
        let has_logprobs = row.has_logprobs;
        let sampled = |last, token, top| SampledToken {
            row: id,
            token,
            logprob: has_logprobs.then(|| log_prob(last, token)),
            top,
        };
        let last = *row.digests.last().unwrap();
        let wrong = u32::from(is_wrong);
        let token = TokenId((next_token(last).0 + wrong) % VOCAB_SIZE);
        if row.beam_candidates > 0 {
            let mut all: Vec<_> = (0..VOCAB_SIZE).map(TokenId).map(|token| (token, log_prob(last, token))).collect();
            all.sort_by(|a, b| b.1.total_cmp(&a.1));
            all.truncate(row.beam_candidates);
            return vec![sampled(last, token, all)];
        }
        if !row.drafts.is_empty() {
            let digests = row.all_digests();
            return digests[row.tokens.len() - 1..]
                .iter()
                .map(|&last| sampled(last, TokenId((next_token(last).0 + wrong) % VOCAB_SIZE), vec![]))
                .collect();
        }
        row.tokens.push(token);
        row.digests.push(digest(last, token));
        vec![sampled(last, token, vec![])]
    }
}

/// The slots for blocks and states that a plan fills.
fn filled_slots(plan: &StepPlan) -> [Vec<u32>; 2] {
    let HostCopies { stored, stored_states, .. } = &plan.host;
    [stored.iter().map(|copy| copy.1.0).collect(), stored_states.iter().map(|copy| copy.1.0).collect()]
}

/// What an adapter and a salt change; 0 without both.
fn mark(adapter: u64, seed: u64) -> u64 {
    adapter.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ seed.rotate_left(40)
}

/// What the layers of a KV group store for a position.
fn in_group(digest: u64, group: usize) -> u64 {
    digest.rotate_left(group as u32) ^ group as u64
}
