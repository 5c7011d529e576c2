//! A simulated device made of hash functions, and a test world that runs an engine against it and checks all its
//! guarantees.
//!
//! The KV entry of a position is a digest of all tokens up to it. So a block that is read by the wrong sequence, too
//! early, or after it was reused is detected at once. The next token is a function of the digest, so a stream can be
//! compared with what its sequence would generate alone.
#![allow(dead_code)] // Each test binary uses only a part.

use std::collections::{HashMap, VecDeque};

use engine::{
    BeamOutput, BlockId, Drafter, Engine, EngineConfig, FinishReason, Policy, Request, RowId, RowWork, SampledToken,
    SequenceId, StepOutput, StepPlan, TokenEvent, TokenId,
};

/// Small, so that end ids and stop words occur by chance.
pub const VOCAB_SIZE: u32 = 12;

/// A generator of random numbers (SplitMix64, Steele et al. 2014), the same on every machine.
#[derive(Debug)]
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, end: u32) -> u32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (((mixed >> 32) * u64::from(end)) >> 32) as u32
    }

    pub fn one_in(&mut self, n: u32) -> bool {
        self.below(n) == 0
    }
}

fn digest(before: u64, token: TokenId) -> u64 {
    let mixed = (before ^ u64::from(token.0 + 1)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed ^ (mixed >> 29)
}

fn digests(tokens: &[TokenId]) -> impl Iterator<Item = u64> {
    tokens.iter().scan(1, |before, &token| {
        *before = digest(*before, token);
        Some(*before)
    })
}

fn next_token(digest: u64) -> TokenId {
    TokenId((digest >> 33) as u32 % VOCAB_SIZE)
}

/// The log-probability of `token`, for beam searches.
fn log_prob(before: u64, token: TokenId) -> f32 {
    let distance = (digest(before, token) >> 40) % 4096;
    -0.125 - distance as f32 / 512.0
}

/// Guesses right as often as a good draft model.
#[derive(Debug)]
pub struct Guesser(pub Random);

impl Drafter for Guesser {
    fn draft(&mut self, tokens: &[TokenId], max: usize, drafts: &mut Vec<TokenId>) {
        let mut last = digests(tokens).last().unwrap();
        for _ in 0..self.0.below(max as u32 + 1) {
            let wrong = TokenId(self.0.below(VOCAB_SIZE));
            let token = if self.0.one_in(4) { wrong } else { next_token(last) };
            last = digest(last, token);
            drafts.push(token);
        }
    }
}

/// A worker with its device. It carries out plans in order and panics if a plan breaks its contract.
pub struct Device {
    block_size: usize,
    /// `[num_blocks * block_size]`
    kv: Vec<u64>,
    rows: Vec<Option<Row>>,
    last_step: Option<u64>,
}

#[derive(Clone)]
struct Row {
    sequence: SequenceId,
    tokens: Vec<TokenId>,
    digests: Vec<u64>,
    blocks: Vec<BlockId>,
    num_computed: usize,
    /// Number of tokens when it joined.
    join_len: usize,
    beam_candidates: usize,
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
            kv: vec![0; config.num_blocks * config.block_size],
            rows: (0..config.max_rows).map(|_| None).collect(),
            last_step: None,
        }
    }

    pub fn run(&mut self, plan: &StepPlan) -> StepOutput {
        assert!(self.last_step.is_none_or(|last| plan.step == last + 1), "gap before step {}", plan.step);
        self.last_step = Some(plan.step);
        self.apply(plan);
        for work in &plan.work {
            let row = self.row(work.row);
            assert_eq!(row.num_computed, work.start as usize, "start of {work:?} in step {}", plan.step);
            self.check(work.row, work.start as usize, plan.step, "before");
        }
        plan.work.iter().for_each(|work| self.compute(work));
        for work in &plan.work {
            self.check(work.row, (work.start + work.num_tokens) as usize, plan.step, "after");
        }
        let tokens = plan.work.iter().filter(|work| work.samples).flat_map(|work| self.sample(work.row)).collect();
        StepOutput { step: plan.step, tokens }
    }

    fn apply(&mut self, plan: &StepPlan) {
        for row in &plan.left {
            assert!(self.rows[row.0 as usize].take().is_some(), "row {} leaves but is free", row.0);
        }
        for joined in &plan.joined {
            let place = &mut self.rows[joined.row.0 as usize];
            assert!(place.is_none(), "row {} is joined but taken", joined.row.0);
            *place = Some(Row {
                sequence: joined.sequence,
                tokens: joined.tokens.clone(),
                digests: digests(&joined.tokens).collect(),
                blocks: joined.blocks.clone(),
                num_computed: joined.num_computed as usize,
                join_len: joined.tokens.len(),
                beam_candidates: joined.sampling.beam_candidates as usize,
                drafts: Vec::new(),
            });
        }
        self.revise(plan);
        self.copy(plan);
        for &(row, block) in &plan.grown {
            self.rows[row.0 as usize].as_mut().expect("a growing row is taken").blocks.push(block);
        }
        for (row, drafts) in &plan.drafts {
            let row = self.rows[row.0 as usize].as_mut().expect("a verifying row is taken");
            assert!(row.drafts.is_empty() && row.beam_candidates == 0, "drafts are revised before there are others");
            row.drafts.clone_from(drafts);
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
            assert_eq!(row.blocks.last(), Some(&copied.from), "the last block is copied");
            *row.blocks.last_mut().unwrap() = copied.to;
            assert!(plan.copied.iter().all(|other| other.to != copied.from), "a copied block is read and written");
            let [from, to] = [copied.from, copied.to].map(|block| block.0 as usize * self.block_size);
            self.kv.copy_within(from..from + self.block_size, to);
        }
    }

    fn row(&self, row: RowId) -> &Row {
        self.rows[row.0 as usize].as_ref().expect("a working row is taken")
    }

    fn slot(&self, row: &Row, position: usize) -> usize {
        row.blocks[position / self.block_size].0 as usize * self.block_size + position % self.block_size
    }

    fn check(&self, row: RowId, end: usize, step: u64, when: &str) {
        let row = self.row(row);
        let digests = row.all_digests();
        assert!(end <= digests.len(), "row of sequence {} holds fewer tokens than {end}", row.sequence.0);
        for (position, digest) in digests.into_iter().enumerate().take(end) {
            let found = self.kv[self.slot(row, position)];
            assert_eq!(found, digest, "KV of position {position} of sequence {} {when} step {step}", row.sequence.0);
        }
    }

    fn compute(&mut self, work: &RowWork) {
        let (start, end) = (work.start as usize, (work.start + work.num_tokens) as usize);
        let row = self.row(work.row);
        let digests = row.all_digests();
        let writes: Vec<_> = (start..end).map(|position| (self.slot(row, position), digests[position])).collect();
        writes.into_iter().for_each(|(slot, digest)| self.kv[slot] = digest);
        self.rows[work.row.0 as usize].as_mut().unwrap().num_computed = end;
    }

    fn sample(&mut self, id: RowId) -> Vec<SampledToken> {
        let row = self.rows[id.0 as usize].as_mut().unwrap();
        let num_tokens = row.tokens.len() + row.drafts.len();
        assert_eq!(row.num_computed, num_tokens, "sequence {} samples before its end", row.sequence.0);
        let sampled = |token, top| SampledToken { row: id, token, logprob: None, top };
        let last = *row.digests.last().unwrap();
        let token = next_token(last);
        if row.beam_candidates > 0 {
            let mut all: Vec<_> = (0..VOCAB_SIZE).map(TokenId).map(|token| (token, log_prob(last, token))).collect();
            all.sort_by(|a, b| b.1.total_cmp(&a.1));
            all.truncate(row.beam_candidates);
            return vec![sampled(token, all)];
        }
        if !row.drafts.is_empty() {
            let digests = row.all_digests();
            return digests[row.tokens.len() - 1..].iter().map(|&last| sampled(next_token(last), vec![])).collect();
        }
        row.tokens.push(token);
        row.digests.push(digest(last, token));
        vec![sampled(token, vec![])]
    }
}

/// What a request generates when it runs alone, computed in the simplest way: all generated tokens, how many of them
/// are released, and why it ends.
pub fn run_alone(request: &Request, max_sequence_len: usize) -> (Vec<TokenId>, usize, FinishReason) {
    let mut last = digests(&request.prompt).last().unwrap();
    let max_tokens = (request.max_tokens as usize).min(max_sequence_len - request.prompt.len());
    let mut output = Vec::new();
    loop {
        let token = next_token(last);
        last = digest(last, token);
        if request.sampling.end_ids.contains(&token) {
            return (output.clone(), output.len(), FinishReason::EndId);
        }
        output.push(token);
        let completed = request.stop_words.iter().filter(|word| output.ends_with(word)).map(Vec::len).max();
        if let Some(len) = completed {
            return (output.clone(), output.len() - len, FinishReason::StopWord);
        }
        if output.len() == max_tokens {
            return (output.clone(), output.len(), FinishReason::Length);
        }
    }
}

/// A beam's tokens and their log-probability.
type Beam = (Vec<TokenId>, f32);

/// The outputs of a beam search that runs alone, by the rules of transformers, with every continuation scored and
/// sorted.
fn run_beams_alone(request: &Request, max_sequence_len: usize) -> Vec<Vec<TokenId>> {
    let params = request.beams.unwrap();
    let (width, max_tokens) =
        (params.width as usize, (request.max_tokens as usize).min(max_sequence_len - request.prompt.len()));
    let score = |beam: &Beam| beam.1 / (beam.0.len() as f32).powf(params.len_penalty);
    let stop_len = |tokens: &[TokenId]| match request.sampling.end_ids.contains(tokens.last().unwrap()) {
        true => Some(1),
        false => request.stop_words.iter().filter(|word| tokens.ends_with(word)).map(Vec::len).max(),
    };
    let (mut running, mut finished): (Vec<Beam>, Vec<Beam>) = (vec![(vec![], 0.0)], vec![]);
    for len in 1..=max_tokens {
        let mut all: Vec<(f32, Beam)> = Vec::new();
        for (index, (tokens, sum)) in running.iter().enumerate() {
            let last = digests(&[request.prompt.as_slice(), tokens].concat()).last().unwrap();
            let mut own: Vec<_> =
                (0..VOCAB_SIZE).map(|token| (log_prob(last, TokenId(token)), TokenId(token))).collect();
            own.sort_by(|a, b| b.0.total_cmp(&a.0));
            all.extend(own.into_iter().map(|(log_prob, token)| {
                let sum = log_prob + sum;
                (sum + params.diversity_rate * index as f32, ([tokens.as_slice(), &[token]].concat(), sum))
            }));
        }
        all.sort_by(|a, b| b.0.total_cmp(&a.0));
        let ends = |beam: &Beam| len == max_tokens || stop_len(&beam.0).is_some();
        finished.extend(all.iter().take(width).filter(|(_, beam)| ends(beam)).map(|(_, beam)| beam.clone()));
        finished.sort_by(|a, b| score(b).total_cmp(&score(a)));
        finished.truncate(width);
        running = all.into_iter().map(|(_, beam)| beam).filter(|beam| !ends(beam)).take(width).collect();
        let best = running.iter().map(score).fold(f32::NEG_INFINITY, f32::max);
        let is_full = finished.len() == width;
        if running.is_empty() || is_full && (params.early_stopping || best <= score(&finished[width - 1])) {
            break;
        }
    }
    let released = |(tokens, _): Beam| tokens[..tokens.len() - stop_len(&tokens).unwrap_or(0)].to_vec();
    finished.into_iter().map(released).collect()
}

struct Stream {
    generated: Vec<TokenId>,
    /// Number of tokens of `generated` that are released; a stop word at the end is not.
    num_released: usize,
    reason: FinishReason,
    /// Outputs of a beam search; it has no other output.
    beams: Option<Vec<Vec<TokenId>>>,
    received: usize,
    /// Set if it was asked to end early, for this reason.
    ended_early: Option<FinishReason>,
    finished: bool,
}

/// An engine, its device, and the expected output of every stream.
pub struct World {
    pub engine: Engine,
    device: Device,
    outputs: VecDeque<StepOutput>,
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
            engine: Engine::new(config).expect("a world's config is valid"),
            outputs: VecDeque::new(),
            streams: HashMap::new(),
            num_finished: 0,
            audit_every,
            num_calls: 0,
        }
    }

    /// Submits a request. Refusals are tested elsewhere.
    pub fn submit(&mut self, request: Request) -> Option<SequenceId> {
        let max_sequence_len = self.engine.config().max_sequence_len;
        let (generated, num_released, reason) = run_alone(&request, max_sequence_len);
        let beams = request.beams.map(|_| run_beams_alone(&request, max_sequence_len));
        let id = self.engine.submit(request).ok()?;
        let stream = Stream { generated, num_released, reason, beams, received: 0, ended_early: None, finished: false };
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
        let Some(plan) = self.engine.plan() else { return false };
        self.check_bounds(&plan);
        self.outputs.push_back(self.device.run(&plan));
        self.audit();
        true
    }

    /// Returns false if nothing was in flight.
    pub fn settle(&mut self) -> bool {
        let Some(output) = self.outputs.pop_front() else { return false };
        let mut events = Vec::new();
        self.engine.settle(output, &mut events).expect("the device's output fits its plan");
        self.receive(events);
        self.audit();
        true
    }

    /// All workers are lost and restarted.
    pub fn recover(&mut self) {
        self.engine.recover();
        self.outputs.clear();
        self.device = Device::new(self.engine.config());
        self.audit();
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
        assert!(decodes.iter().rev().is_sorted_by_key(|work| work.num_tokens > 1), "verification after decodes");
        let num_prefill_tokens: usize = prefills.iter().map(|work| work.num_tokens as usize).sum();
        assert!(
            decodes.is_empty() || num_prefill_tokens <= config.max_mixed_prefill_tokens,
            "step {} is too long",
            plan.step
        );
        let joined: usize = plan.joined.iter().map(|joined| joined.tokens.len()).sum();
        let one = plan.joined.len() <= 1;
        assert!(one || joined <= config.max_joined_tokens, "step {} joins {joined} tokens", plan.step);
        let mut bytes = Vec::new();
        engine::plan::encode(plan, &mut bytes);
        assert!(bytes.len() <= config.max_plan_bytes(), "step {} has {} bytes", plan.step, bytes.len());
        assert!(plan.work.iter().all(|work| work.num_tokens > 0), "empty work in {plan:?}");
    }

    /// Before the device runs the plan: a decode computes a token that was sampled in this row.
    fn is_decode(&self, plan: &StepPlan, work: &RowWork) -> bool {
        let joined = plan.joined.iter().any(|joined| joined.row == work.row);
        if plan.revised.iter().any(|revised| revised.row == work.row) {
            return true;
        }
        let row = self.device.rows[work.row.0 as usize].as_ref();
        !joined && row.is_some_and(|row| work.start as usize >= row.join_len)
    }

    fn receive(&mut self, events: Vec<TokenEvent>) {
        for event in events {
            let stream = self.streams.get_mut(&event.sequence).expect("no event comes after the last");
            for token in &event.tokens {
                let expected = stream.generated.get(stream.received);
                assert_eq!(Some(&token.token), expected, "token {} of {:?}", stream.received, event.sequence);
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
