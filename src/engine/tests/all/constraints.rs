//! Constrained sequences: every token that a device chooses comes from a mask, whatever happens around the sequence.

use std::collections::{HashMap, VecDeque};

use engine::{
    Constraint, Engine, EngineConfig, FinishReason, MaskJob, Policy, Refused, Request, RequestConstraint, RowId,
    SampleMask, SampledToken, SamplingParams, SequenceId, StepOutput, StepPlan, TokenEvent, TokenId,
};

const VOCAB_SIZE: u32 = 70;

/// Each token is 1 to 3 above the one before, from 0 on. The output is complete at `last` exactly.
#[derive(Debug, Clone)]
struct Stairs {
    tokens: Vec<u32>,
    last: u32,
    /// No mask can be computed from this number of tokens on.
    breaks_at: usize,
}

impl Stairs {
    fn to(last: u32) -> Option<RequestConstraint> {
        Some(RequestConstraint(Box::new(Self { tokens: Vec::new(), last, breaks_at: usize::MAX })))
    }

    fn allows(&self, token: u32) -> bool {
        let before = self.tokens.last().copied().unwrap_or(0);
        (before + 1..=before + 3).contains(&token) && token <= self.last
    }
}

impl Constraint for Stairs {
    fn mask(&mut self, words: &mut Vec<u32>) -> Result<(), String> {
        words.clear();
        words.resize(VOCAB_SIZE.div_ceil(32) as usize, 0);
        (0..VOCAB_SIZE).filter(|&id| self.allows(id)).for_each(|id| words[id as usize / 32] |= 1 << (id % 32));
        if self.tokens.len() >= self.breaks_at { Err("the stairs are broken".to_owned()) } else { Ok(()) }
    }

    fn accept(&mut self, token: TokenId) -> Result<(), String> {
        match self.accept_valid(&[token]) {
            1 => Ok(()),
            _ => Err(format!("token {} is not allowed", token.0)),
        }
    }

    fn accept_valid(&mut self, tokens: &[TokenId]) -> usize {
        let valid = tokens.iter().take_while(|token| {
            let allowed = self.allows(token.0);
            if allowed {
                self.tokens.push(token.0);
            }
            allowed
        });
        valid.count()
    }

    fn rollback(&mut self, count: usize) -> Result<(), String> {
        self.tokens.truncate(self.tokens.len() - count);
        Ok(())
    }

    fn is_complete(&self) -> bool {
        self.tokens.last() == Some(&self.last)
    }

    fn copy(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}

/// Workers that choose by mask, or token 5 in rows without one.
struct Workers {
    engine: Engine,
    /// With each plan, the rows that were constrained when it was made.
    plans: VecDeque<(StepPlan, HashMap<RowId, bool>)>,
    masks: HashMap<(u64, u32), Vec<u32>>,
    constrained: HashMap<RowId, bool>,
    outputs: HashMap<SequenceId, Vec<u32>>,
    ends: HashMap<SequenceId, TokenEvent>,
    num_masks: usize,
    random: u32,
    /// One in so many masks is late; 0 if none is.
    late_one_in: u32,
    late: Vec<MaskJob>,
}

impl Workers {
    fn new(config: EngineConfig) -> Self {
        Self {
            engine: Engine::new(config).unwrap(),
            plans: VecDeque::new(),
            masks: HashMap::new(),
            constrained: HashMap::new(),
            outputs: HashMap::new(),
            ends: HashMap::new(),
            num_masks: 0,
            random: 1,
            late_one_in: 0,
            late: Vec::new(),
        }
    }

    fn random(&mut self, below: u32) -> u32 {
        self.random = self.random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (self.random >> 8) % below
    }

    fn plan_and_mask(&mut self) {
        while let Some(plan) = self.engine.plan() {
            for joined in &plan.joined {
                self.constrained.insert(joined.row, joined.sampling.is_constrained);
            }
            self.plans.push_back((plan, self.constrained.clone()));
        }
        let oldest = self.plans.front().map(|(plan, _)| plan.step);
        self.run_jobs();
        for SampleMask { step, sample, words } in self.engine.take_masks() {
            assert_eq!(Some(step), oldest, "masks are those of the oldest plan");
            assert!(self.masks.insert((step, sample), words).is_none(), "a mask is sent once");
            self.num_masks += 1;
        }
    }

    /// Runs the mask jobs. Late ones are done after the masks of the step are taken.
    fn run_jobs(&mut self) {
        let (mut new, mut jobs) = (self.engine.mask_jobs(), std::mem::take(&mut self.late));
        new.iter_mut().for_each(MaskJob::run);
        jobs.extend(new);
        for job in jobs {
            match self.late_one_in > 0 && self.random(self.late_one_in) == 0 {
                true => self.late.push(job),
                false => self.engine.finish_mask(job),
            }
        }
        let mut events = Vec::new();
        self.engine.drain_events(&mut events);
        self.take(events);
    }

    fn settle(&mut self) {
        let Some((plan, constrained)) = self.plans.pop_front() else { return };
        let (mut sample, mut tokens) = (0, Vec::new());
        for work in plan.work.iter().filter(|work| work.samples) {
            let drafts = plan.drafts.iter().find(|(row, _)| *row == work.row).map_or(0, |(_, drafts)| drafts.len());
            for _ in 0..=drafts {
                let token = if constrained[&work.row] {
                    let words = self.masks.remove(&(plan.step, sample)).expect("every constrained sample has a mask");
                    let allowed: Vec<u32> = (0..words.len() as u32 * 32)
                        .filter(|&id| words[id as usize / 32] >> (id % 32) & 1 == 1)
                        .collect();
                    if allowed.is_empty() { 0 } else { allowed[self.random(allowed.len() as u32) as usize] }
                } else {
                    5
                };
                tokens.push(SampledToken { row: work.row, token: TokenId(token), logprob: None, top: Vec::new() });
                sample += 1;
            }
        }
        assert!(self.masks.keys().all(|(step, _)| *step != plan.step), "no mask is left over");
        let mut events = Vec::new();
        self.engine.settle(StepOutput { step: plan.step, tokens, guesses: vec![] }, &mut events).unwrap();
        self.take(events);
    }

    fn take(&mut self, events: Vec<TokenEvent>) {
        for event in events {
            let output = self.outputs.entry(event.sequence).or_default();
            output.extend(event.tokens.iter().map(|sampled| sampled.token.0));
            if event.finished.is_some() {
                assert!(self.ends.insert(event.sequence, event).is_none(), "a sequence ends once");
            }
        }
    }

    /// Takes back jobs that have run.
    fn take_late(&mut self, jobs: VecDeque<(usize, MaskJob)>) {
        self.late.extend(jobs.into_iter().map(|(_, job)| job));
    }

    fn run(&mut self) {
        while !self.engine.is_idle() {
            self.plan_and_mask();
            self.settle();
            let mut events = Vec::new();
            self.engine.drain_events(&mut events);
            self.take(events);
        }
    }
}

fn request(constraint: Option<RequestConstraint>, max_drafts: u32) -> Request {
    let prompt = vec![TokenId(1), TokenId(2), TokenId(3), TokenId(1), TokenId(2)];
    Request { prompt, max_tokens: 100, constraint, max_drafts, ..Request::default() }
}

fn assert_stairs(output: &[u32], last: u32) {
    let steps = std::iter::once(&0).chain(output).zip(output);
    assert!(steps.clone().all(|(before, next)| (1..=3).contains(&(next - before))), "{output:?}");
    assert_eq!(output.last(), Some(&last), "{output:?}");
}

/// Few blocks, so that sequences are preempted; workers that die; clients that leave; drafts; late masks.
#[test]
fn every_output_follows_its_constraint_through_preemption_drafts_late_masks_and_lost_workers() {
    for seed in 0..40 {
        let config = EngineConfig {
            max_rows: 6,
            num_blocks: 24,
            block_size: 4,
            max_sequence_len: 96,
            max_drafts: 3,
            policy: Policy::MaxUtilization,
            max_in_flight: 1 + seed as usize % 3,
            ..EngineConfig::default()
        };
        let mut workers = Workers::new(config);
        (workers.random, workers.late_one_in) = (seed, seed % 3 * 2);
        let mut submitted = HashMap::new();
        for index in 0..20 {
            let last = (index % 3 != 2).then(|| 10 + 2 * index);
            let constraint = last.and_then(Stairs::to);
            let request = Request { max_tokens: 60, ..request(constraint, index % 4) };
            submitted.insert(workers.engine.submit(request).unwrap(), last);
        }
        let cancelled = *submitted.keys().min().unwrap();
        for turn in 0..400 {
            workers.plan_and_mask();
            if turn % 97 == 60 {
                workers.engine.recover();
                (workers.plans, workers.masks) = (VecDeque::new(), HashMap::new());
            } else if turn == 11 {
                workers.engine.cancel(cancelled);
            }
            workers.settle();
        }
        workers.run();
        assert!(workers.num_masks > 100);
        for (sequence, last) in submitted {
            let end = &workers.ends[&sequence];
            match (last, end.finished) {
                (_, Some(FinishReason::Cancelled)) => assert_eq!(sequence, cancelled),
                (Some(last), Some(FinishReason::Complete)) => assert_stairs(&workers.outputs[&sequence], last),
                (None, Some(FinishReason::Length)) => assert_eq!(workers.outputs[&sequence], vec![5; 60]),
                other => panic!("{other:?}"),
            }
        }
    }
}

#[test]
fn a_clone_of_a_request_has_a_state_of_its_own() {
    let mut workers = Workers::new(EngineConfig::default());
    let request = request(Stairs::to(30), 0);
    let sequences: Vec<_> = (0..4).map(|_| workers.engine.submit(request.clone()).unwrap()).collect();
    workers.run();
    for sequence in sequences {
        assert_stairs(&workers.outputs[&sequence], 30);
    }
}

#[test]
fn a_constraint_that_cannot_go_on_ends_its_sequence_with_the_reason_and_no_other() {
    let mut workers = Workers::new(EngineConfig::default());
    let broken = Stairs { tokens: Vec::new(), last: 60, breaks_at: 2 };
    let broken = workers.engine.submit(request(Some(RequestConstraint(Box::new(broken))), 0)).unwrap();
    let other = workers.engine.submit(request(Stairs::to(20), 0)).unwrap();
    workers.run();
    let end = &workers.ends[&broken];
    assert_eq!((end.finished, end.error.as_deref()), (Some(FinishReason::Constraint), Some("the stairs are broken")));
    assert_eq!(workers.outputs[&broken].len(), 2);
    assert_stairs(&workers.outputs[&other], 20);
}

#[test]
fn a_row_whose_masks_are_late_sits_out_and_every_step_has_a_token_of_each_other_row() {
    let mut workers = Workers::new(EngineConfig::default());
    let plain = workers.engine.submit(Request { max_tokens: 40, ..request(None, 0) }).unwrap();
    let guided = workers.engine.submit(request(Stairs::to(60), 0)).unwrap();
    let mut waiting: VecDeque<(usize, MaskJob)> = VecDeque::new();
    let mut num_planned = 0;
    workers.constrained = HashMap::from([(RowId(0), false), (RowId(1), true)]);
    for step in 1..=40 {
        while let Some(plan) = workers.engine.plan() {
            num_planned += plan.work.iter().filter(|work| work.row == RowId(1)).count();
            workers.plans.push_back((plan, workers.constrained.clone()));
        }
        for mut job in workers.engine.mask_jobs() {
            job.run();
            waiting.push_back((step + 3, job)); // Each mask takes as long as three steps.
        }
        while waiting.front().is_some_and(|(due, _)| *due <= step) {
            workers.engine.finish_mask(waiting.pop_front().unwrap().1);
        }
        let masks = workers.engine.take_masks();
        workers.masks.extend(masks.into_iter().map(|mask| ((mask.step, mask.sample), mask.words)));
        workers.settle();
        assert_eq!(workers.outputs[&plain].len(), step, "no step waits");
    }
    assert_eq!(workers.ends[&plain].finished, Some(FinishReason::Length));
    let stats = workers.engine.stats();
    // Only the first mask was missing in a step. Later ones were computed before their row was planned.
    assert_eq!((stats.total_late_masks, stats.total_discarded_tokens), (1, 2));
    let found = workers.outputs[&guided].len();
    assert!((5..=10).contains(&found) && num_planned == found + 2, "{found} tokens of {num_planned} rows");
    workers.take_late(waiting);
    workers.run();
    assert_stairs(&workers.outputs[&guided], 60);
    assert_eq!(workers.ends[&guided].finished, Some(FinishReason::Complete));
}

#[test]
fn a_token_that_the_constraint_does_not_allow_is_never_released() {
    let mut workers = Workers::new(EngineConfig::default());
    let sequence = workers.engine.submit(request(Stairs::to(20), 0)).unwrap();
    workers.plan_and_mask();
    // The device ignored the mask.
    workers.masks.values_mut().for_each(|words| *words = vec![1 << 9]);
    workers.settle();
    let end = &workers.ends[&sequence];
    assert_eq!(end.finished, Some(FinishReason::Constraint));
    assert_eq!(end.error.as_deref(), Some("token 9 is not allowed by the constraint"));
    assert!(workers.outputs[&sequence].is_empty());
}

#[test]
fn end_ids_and_lengths_end_constrained_sequences_too() {
    let mut workers = Workers::new(EngineConfig::default());
    let short = workers.engine.submit(Request { max_tokens: 4, ..request(Stairs::to(60), 0) }).unwrap();
    let sampling = SamplingParams { end_ids: (1..=3).map(TokenId).collect(), ..SamplingParams::default() };
    let ended = workers.engine.submit(Request { sampling, ..request(Stairs::to(60), 0) }).unwrap();
    workers.run();
    assert_eq!(workers.ends[&short].finished, Some(FinishReason::Length));
    assert_eq!(workers.outputs[&short].len(), 4);
    assert_eq!(workers.ends[&ended].finished, Some(FinishReason::EndId(Some(TokenId(1)))));
}

#[test]
fn a_beam_search_with_a_constraint_is_refused() {
    let beams = engine::BeamParams { width: 2, len_penalty: 0.0, early_stopping: true, diversity_rate: 0.0 };
    let request = Request { beams: Some(beams), ..request(Stairs::to(9), 0) };
    let mut engine = Engine::new(EngineConfig::default()).unwrap();
    assert_eq!(engine.submit(request), Err(Refused::ConstrainedBeams));
}
