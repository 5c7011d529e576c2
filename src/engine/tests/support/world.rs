//! The test world: an engine with its device, and the expected output of every stream.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use engine::{
    BeamOutput, DiskCopy, DiskDirection, Engine, EngineConfig, FinishReason, MaskJob, Policy, Request,
    RequestConstraint, RowWork, SequenceId, StepPlan, TokenEvent, TokenId,
};

use super::device::{Device, Row};
use super::expected::Expected;
use super::reference::logprobs_alone;
use super::reference::run_alone;
use super::reference::run_beams_alone;
use super::tokens::Random;

/// Most prompt tokens of a step with decodes, in an engine of [`super::new_engine`].
fn max_prompt_tokens(config: &EngineConfig) -> usize {
    let of_priorities = config.max_inter_token_of.values();
    let seconds = |bound: &Duration| bound.as_secs() as usize;
    let most = match &config.max_inter_token {
        Some(bound) => of_priorities.chain([bound]).map(seconds).max().unwrap_or(0),
        None => 128,
    };
    most.max(config.min_prompt_tokens)
}

struct Stream {
    generated: Vec<TokenId>,
    /// Number of tokens of `generated` that are released; a stop word at the end is not.
    num_released: usize,
    reason: FinishReason,
    /// Of each token of `generated`, if the request wants them.
    logprobs: Vec<Option<f32>>,
    /// Outputs of a beam search; it has no other output.
    beams: Option<Vec<Vec<TokenId>>>,
    received: usize,
    /// Set if it must end early, for this reason.
    ended_early: Option<FinishReason>,
    finished: bool,
}

/// An engine, its device, and the expected output of every stream.
pub struct World {
    pub engine: Engine,
    device: Device,
    /// Plans that the device has not run. It runs a plan when its masks are known.
    plans: VecDeque<StepPlan>,
    late: Vec<MaskJob>,
    /// Copies to and from the disk that have not begun.
    disk_copies: VecDeque<DiskCopy>,
    /// One of so many copies from the disk fails; 0: none.
    pub disk_fails: u32,
    random: Random,
    streams: HashMap<SequenceId, Stream>,
    pub num_finished: usize,
    /// The engine's counters are audited after this number of calls.
    audit_every: u64,
    num_calls: u64,
}

impl World {
    pub fn new(config: EngineConfig, audit_every: u64) -> Self {
        Self {
            device: Device::new(&config),
            engine: super::new_engine(config),
            plans: VecDeque::new(),
            late: Vec::new(),
            disk_copies: VecDeque::new(),
            disk_fails: 0,
            random: Random(7),
            streams: HashMap::new(),
            num_finished: 0,
            audit_every,
            num_calls: 0,
        }
    }

    /// Submits a request. Refusals are tested elsewhere.
    ///
    /// A constraint of the request is replaced by one that allows the device's tokens only.
    pub fn submit(&mut self, mut request: Request) -> Option<SequenceId> {
        let max_sequence_len = self.engine.config().max_sequence_len;
        let (generated, num_released, reason) = run_alone(&request, max_sequence_len);
        if request.constraint.is_some() {
            let expected = Expected { tokens: generated.clone(), len: 0, ends: reason != FinishReason::Length };
            request.constraint = Some(RequestConstraint(Box::new(expected)));
        }
        let logprobs = logprobs_alone(&request, &generated);
        let beams = request.beams.map(|_| run_beams_alone(&request, max_sequence_len));
        let id = self.engine.submit(request).ok()?;
        let stream = Stream {
            generated,
            num_released,
            reason,
            logprobs,
            beams,
            received: 0,
            ended_early: None,
            finished: false,
        };
        assert!(self.streams.insert(id, stream).is_none(), "sequence {} twice", id.0);
        self.audit();
        Some(id)
    }

    pub fn cancel(&mut self, id: SequenceId) {
        let live = self.engine.cancel(id);
        self.ended_early(id, live, FinishReason::Cancelled);
    }

    pub fn finish(&mut self, id: SequenceId) {
        let live = self.engine.finish(id);
        self.ended_early(id, live, FinishReason::StopWord);
    }

    fn ended_early(&mut self, id: SequenceId, live: bool, reason: FinishReason) {
        let stream = self.streams.get_mut(&id);
        assert_eq!(live, stream.is_some(), "sequence {} lives or not", id.0);
        if let Some(stream) = stream {
            stream.ended_early = Some(reason);
        }
        let mut events = Vec::new();
        self.engine.drain_events(&mut events);
        self.receive(events);
        self.audit();
    }

    /// A deadline has passed: a sequence that has had no step yet is cancelled, any other continues.
    pub fn expire(&mut self, id: SequenceId) {
        if self.engine.is_new(id) {
            self.cancel(id);
        }
    }

    /// A deadline has passed: a sequence that has had no step yet is moved behind the others.
    pub fn delay(&mut self, id: SequenceId) {
        let waits = self.engine.is_new(id);
        assert_eq!(self.engine.delay(id), waits);
        self.audit();
    }

    /// Returns false if there was nothing to plan.
    pub fn plan(&mut self) -> bool {
        self.plan_tokens() > 0
    }

    /// Returns the number of positions that the plan computes; 0 if there was nothing to plan.
    pub fn plan_tokens(&mut self) -> usize {
        let Some(plan) = self.engine.plan() else { return 0 };
        let filled = self.engine.take_filled();
        assert!(plan.adapters.iter().map(|it| it.adapter).eq(filled.iter().map(|(_, adapter)| adapter.id)));
        let num_tokens = plan.work.iter().map(|work| work.num_tokens as usize).sum();
        self.plans.push_back(plan);
        self.audit();
        num_tokens
    }

    /// Returns false if nothing was in flight.
    pub fn settle(&mut self) -> bool {
        let has_jobs = self.run_disk() | self.run_mask_jobs();
        let Some(plan) = self.plans.pop_front() else { return has_jobs };
        let masks = self.engine.take_masks();
        self.check_bounds(&plan);
        let output = self.device.run(&plan, &masks);
        let mut events = Vec::new();
        self.engine.settle(output, &mut events).expect("the device's output fits its plan");
        self.receive(events);
        self.audit();
        true
    }

    /// Runs the mask jobs; some stay late, so that their rows sit out the step. Returns false if there were none.
    fn run_mask_jobs(&mut self) -> bool {
        let (mut new, mut jobs) = (self.engine.mask_jobs(), std::mem::take(&mut self.late));
        new.iter_mut().for_each(MaskJob::run);
        jobs.extend(new);
        let has_jobs = !jobs.is_empty();
        for job in jobs {
            match self.random.one_in(3) {
                true => self.late.push(job),
                false => self.engine.finish_mask(job),
            }
        }
        let mut events = Vec::new();
        self.engine.drain_events(&mut events);
        self.receive(events);
        has_jobs
    }

    /// Carries out some copies to and from the disk. Returns whether there were any.
    fn run_disk(&mut self) -> bool {
        self.disk_copies.extend(self.engine.take_disk_copies());
        if self.disk_copies.is_empty() {
            return false;
        }
        let num = self.random.below(4) as usize;
        let copies: Vec<DiskCopy> = self.disk_copies.drain(..num.min(self.disk_copies.len())).collect();
        for &copy in &copies {
            let fails =
                copy.direction == DiskDirection::Load && self.disk_fails > 0 && self.random.one_in(self.disk_fails);
            if !fails {
                self.device.copy_with_disk(copy);
            }
            self.engine.finish_disk_copy(copy, !fails);
        }
        self.audit();
        true
    }

    /// Nothing is stored or found on disk afterwards.
    pub fn close_disk(&mut self) {
        self.engine.close_disk();
        assert_eq!(self.engine.stats().num_disk_blocks_used + self.engine.stats().num_disk_states_used, 0);
        self.audit();
    }

    /// Nothing is found in the prefix cache afterwards.
    pub fn reset_prefix_cache(&mut self) {
        self.engine.reset_prefix_cache();
        let stats = self.engine.stats();
        let cached = stats.num_blocks_cached + stats.num_states_cached + stats.num_disk_blocks_used;
        let cached = cached + stats.num_disk_states_used;
        assert_eq!(cached + stats.num_host_blocks_used + stats.num_host_states_used, 0);
        self.audit();
    }

    /// All workers are lost and restarted. Their host memory is kept.
    pub fn recover(&mut self) {
        self.engine.recover();
        let lost = std::mem::replace(&mut self.device, Device::new(self.engine.config()));
        self.device = lost.successor(self.engine.config(), &self.plans);
        self.plans.clear();
        self.audit();
    }

    /// The same with new host memory.
    pub fn recover_without_host(&mut self) {
        self.engine.recover();
        self.engine.forget_host();
        self.plans.clear();
        let lost = std::mem::replace(&mut self.device, Device::new(self.engine.config()));
        self.device = lost.successor_without_host(self.engine.config());
        self.audit();
    }

    /// The model sleeps and wakes: the workers start again, perhaps with other weights, and no copy counts any longer.
    pub fn sleep(&mut self) {
        self.engine.recover();
        self.engine.forget_copies();
        self.plans.clear();
        self.device = Device::new(self.engine.config());
        self.audit();
    }

    /// The workers are lost for good: another engine takes the sequences. Returns their new ids.
    pub fn move_sequences(&mut self) -> HashMap<SequenceId, SequenceId> {
        self.engine.recover();
        self.plans.clear();
        self.disk_copies.clear();
        let waiting = self.engine.take_sequences();
        for job in std::mem::take(&mut self.late) {
            self.engine.finish_mask(job);
        }
        let mut events = Vec::new();
        self.engine.drain_events(&mut events);
        self.receive(events);
        let config = self.engine.config().clone();
        self.device = Device::new(&config);
        let mut before = std::mem::replace(&mut self.engine, super::new_engine(config));
        let moved: Vec<_> = waiting.into_iter().chain(before.take_sequences()).collect();
        assert!(before.is_idle() && before.ledger().is_zero(), "left behind: {:?}", before.ledger());
        before.audit().unwrap();
        let mut streams = std::mem::take(&mut self.streams);
        let adopt = |(id, sequence)| {
            let new = self.engine.adopt(sequence).expect("an engine with the same limits has room for it");
            self.streams.insert(new, streams.remove(&id).expect("a live sequence has a stream"));
            (id, new)
        };
        let ids = moved.into_iter().map(adopt).collect();
        assert!(streams.is_empty());
        self.audit();
        ids
    }

    /// Plans and settles until the engine is idle.
    pub fn run_to_idle(&mut self) {
        while !self.engine.is_idle() {
            let planned = self.plan();
            let settled = self.settle();
            assert!(planned || settled, "the engine is stuck: {:?}", self.engine.stats());
        }
        assert!(self.streams.is_empty(), "{} streams never ended", self.streams.len());
        assert!(self.engine.ledger().is_zero(), "held when idle: {:?}", self.engine.ledger());
        self.engine.audit().unwrap();
    }

    fn check_bounds(&self, plan: &StepPlan) {
        let config = self.engine.config();
        let num_tokens: usize = plan.work.iter().map(|work| work.num_tokens as usize).sum();
        assert!(!plan.work.is_empty(), "step {} has no work", plan.step);
        assert!(num_tokens <= config.max_step_tokens, "step {} has {num_tokens} tokens", plan.step);
        let num_prefills = plan.work.iter().take_while(|work| !self.is_decode(plan, work)).count();
        let (prefills, decodes) = plan.work.split_at(num_prefills);
        assert!(decodes.iter().all(|work| self.is_decode(plan, work)), "decodes before prefills in {plan:?}");
        let (replays, decodes): (Vec<&RowWork>, Vec<&RowWork>) =
            decodes.iter().partition(|work| self.is_replay(plan, work));
        assert!(decodes.iter().rev().is_sorted_by_key(|work| work.num_tokens > 1), "verification after decodes");
        if !config.shares_output {
            let generated = replays.iter().chain(&decodes).map(|work| work.num_tokens as usize);
            let num_rows = prefills.len() + generated.sum::<usize>();
            assert!(num_rows <= config.max_rows, "a generated token has no row in {plan:?}");
            let ends_with_prompt =
                |work: &RowWork| work.start + work.num_tokens <= self.lens(plan, work).map_or(u32::MAX, |lens| lens[0]);
            assert!(prefills.iter().all(ends_with_prompt), "generated tokens among those of a prompt in {plan:?}");
        }
        for work in prefills {
            let end = work.start + work.num_tokens;
            let is_whole = end.is_multiple_of(config.prompt_tile as u32)
                || self.lens(plan, work).is_none_or(|[prompt, _]| end >= prompt);
            assert!(is_whole, "a chunk ends within a tile in {plan:?}");
        }
        let num_prefill_tokens: usize = prefills.iter().map(|work| work.num_tokens as usize).sum();
        assert!(
            decodes.is_empty() || num_prefill_tokens <= max_prompt_tokens(config),
            "step {} is too long",
            plan.step
        );
        // Each row has room for what a step with drafts gives it.
        let long = plan.revised.iter().map(|row| row.tokens.len()).filter(|&len| len > 1 + config.max_drafts);
        let joined: Vec<usize> = plan.joined.iter().map(|joined| joined.tokens.len()).chain(long).collect();
        let (one, joined) = (joined.len() <= 1, joined.iter().sum::<usize>());
        assert!(one || joined <= config.max_joined_tokens, "step {} joins {joined} tokens", plan.step);
        let mut bytes = Vec::new();
        engine::plan::encode(plan, &mut bytes);
        assert!(bytes.len() <= config.max_plan_bytes(), "step {} has {} bytes", plan.step, bytes.len());
        assert!(plan.work.iter().all(|work| work.num_tokens > 0), "empty work in {plan:?}");
        // A token after a late mask is chosen again by a decode.
        let is_revised = |work: &RowWork| plan.revised.iter().any(|revised| revised.row == work.row);
        let needs_drafter = !prefills.is_empty()
            || replays.iter().any(|work| !is_revised(work))
            || !plan.drafts.is_empty()
            || plan.work.iter().any(|work| work.num_guesses > 0);
        assert!(plan.runs_drafter || !(config.guesses_on_device && needs_drafter), "no drafter runs in {plan:?}");
        assert!(config.guesses_on_device || !plan.runs_drafter, "there is no drafter on devices in {plan:?}");
    }

    /// Before the device runs the plan: a decode computes a token that was sampled in this row.
    fn is_decode(&self, plan: &StepPlan, work: &RowWork) -> bool {
        let joined = plan.joined.iter().any(|joined| joined.row == work.row);
        if plan.revised.iter().any(|revised| revised.row == work.row) || self.is_replay(plan, work) {
            return true;
        }
        let row = self.device.rows[work.row.0 as usize].as_ref();
        !joined && row.is_some_and(|row| work.start as usize >= row.join_len)
    }

    /// Before the device runs the plan: a generated token is computed again in the way of its first time.
    fn is_replay(&self, plan: &StepPlan, work: &RowWork) -> bool {
        let generated = self.lens(plan, work).is_some_and(|[prompt, joined]| (prompt..joined).contains(&work.start));
        generated && !self.engine.config().shares_output
    }

    /// Before the device runs the plan: numbers of tokens of the row's prompt, and of all when it joined.
    fn lens(&self, plan: &StepPlan, work: &RowWork) -> Option<[u32; 2]> {
        let joined = plan.joined.iter().find(|joined| joined.row == work.row);
        let row = self.device.rows[work.row.0 as usize].as_ref();
        let lens = |row: &Row| [row.num_prompt_tokens, row.join_len as u32];
        joined.map(|joined| [joined.num_prompt_tokens, joined.tokens.len() as u32]).or(row.map(lens))
    }

    fn receive(&mut self, events: Vec<TokenEvent>) {
        for event in events {
            let stream = self.streams.get_mut(&event.sequence).expect("no event comes after the last");
            for token in &event.tokens {
                let expected = stream.generated.get(stream.received);
                assert_eq!(Some(&token.token), expected, "token {} of {:?}", stream.received, event.sequence);
                assert_eq!(token.logprob, stream.logprobs[stream.received], "that of {:?}", event.sequence);
                stream.received += 1;
            }
            // A cancelled stream may receive the start of a stop word; no other stream may.
            if event.finished != Some(FinishReason::Cancelled) {
                assert!(stream.received <= stream.num_released, "{:?} receives its stop word", event.sequence);
            }
            let Some(reason) = event.finished else { continue };
            if stream.ended_early.is_none()
                && let Some(expected) = stream.beams.take()
            {
                let tokens = |beam: &BeamOutput| beam.tokens.iter().map(|&(token, _)| token).collect::<Vec<_>>();
                assert_eq!(event.beams.iter().map(tokens).collect::<Vec<_>>(), expected, "{:?}", event.sequence);
                stream.num_released = 0;
                stream.reason = reason;
            }
            assert_eq!(reason, stream.ended_early.unwrap_or(stream.reason), "{:?}", event.sequence);
            if stream.ended_early.is_none() {
                assert_eq!(stream.received, stream.num_released, "{:?} ended early", event.sequence);
            }
            self.streams.remove(&event.sequence);
            self.num_finished += 1;
        }
    }

    fn audit(&mut self) {
        self.num_calls += 1;
        if self.num_calls.is_multiple_of(self.audit_every) {
            self.engine.audit().unwrap();
            let stats = self.engine.stats();
            assert!(
                self.engine.config().policy == Policy::MaxUtilization || stats.total_preempted == 0,
                "preempted under a guarantee"
            );
        }
    }
}
