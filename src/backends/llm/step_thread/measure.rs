//! Steps that are timed while a model loads, so that the engine knows how long steps take before the first request. Their tokens are
//! discarded; only the measured times are kept.

use std::time::{Duration, Instant};

use engine::{Engine, Request, StepLoad, TokenId};
use supervision::FromWorker;

use super::super::worker_group::{WorkerGroup, WorkerLoss};
use super::{ENGINE_EXISTS, End, POLL_INTERVAL, Running};

/// Time that the steps may take, those that load kernels apart: a tenth of the start so far, but at least and at most so much.
const MIN_TIME: Duration = Duration::from_millis(30);
const MAX_TIME: Duration = Duration::from_millis(250);

/// Each probe runs until two of its runs are alike, at most so often. Of each step the shortest time counts: whatever disturbs it makes it
/// longer.
const MAX_RUNS: usize = 4;
const MAX_RATIO: f64 = 1.25;

/// Sequences that run together.
#[derive(Clone, Copy)]
struct Probe {
    rows: usize,
    prompt: usize,
    max_tokens: usize,
    has_drafts: bool,
}

/// Each is a few times as large as the one before it, so that the time of the one before bounds its own.
const PROBES: [Probe; 7] = [
    Probe::of(1, 4, 2),
    Probe { has_drafts: true, ..Probe::of(1, 4, 6) },
    Probe::of(1, 32, 2),
    Probe::of(16, 1, 4),
    Probe::of(1, 256, 2),
    Probe::of(1, 1024, 2),
    Probe::of(1, 4096, 2),
];

impl Probe {
    const fn of(rows: usize, prompt: usize, max_tokens: usize) -> Self {
        Self { rows, prompt, max_tokens, has_drafts: false }
    }

    /// The largest that the engine takes.
    fn within(self, engine: &Engine) -> Self {
        let config = engine.config();
        let prompt = self.prompt.min(config.max_step_tokens).min(config.max_sequence_len - 1).max(1);
        Self { rows: self.rows.min(config.max_rows), prompt, ..self }
    }

    fn num_tokens(&self) -> usize {
        self.rows * (self.prompt + self.max_tokens - 1)
    }
}

impl Running {
    /// Runs steps of growing size at the first start, which has taken `start` so far, until they are large or their time is over. On slow
    /// devices only the first few run, and the engine learns the rest from requests.
    pub(super) fn measure_steps(&mut self, group: &mut WorkerGroup, start: Duration) -> Result<(), End> {
        if self.engine().stats().costs.is_some() {
            return Ok(());
        }
        let ended = self.run_probes(group, (start / 10).clamp(MIN_TIME, MAX_TIME));
        let engine = self.engine();
        if ended.is_err() {
            engine.cancel_all();
        }
        engine.forget_work();
        self.push_events();
        ended
    }

    fn run_probes(&mut self, group: &mut WorkerGroup, max_time: Duration) -> Result<(), End> {
        let mut next_token = 0;
        // The first steps load kernels.
        self.run(PROBES[0], &mut next_token, group)?;
        let began = Instant::now();
        let mut last: Option<(f64, usize)> = None;
        for probe in PROBES {
            let num_tokens = probe.within(self.engine()).num_tokens();
            if let Some((seconds, tokens)) = last {
                // A step of many tokens takes at most as long as as many steps of one.
                let longest = seconds * num_tokens as f64 / tokens as f64;
                let fits = began.elapsed().as_secs_f64() + 2.0 * longest < max_time.as_secs_f64();
                if num_tokens <= tokens || !fits {
                    break;
                }
            }
            let mut shortest = self.run(probe, &mut next_token, group)?;
            for _ in 1..MAX_RUNS {
                let steps = self.run(probe, &mut next_token, group)?;
                let is_alike = sum(&steps) < MAX_RATIO * sum(&shortest) && sum(&shortest) < MAX_RATIO * sum(&steps);
                // With drafts, later steps may differ.
                let pairs = shortest.iter_mut().zip(&steps).take_while(|(step, other)| step.0 == other.0);
                pairs.for_each(|(step, other)| step.1 = step.1.min(other.1));
                if is_alike || began.elapsed() > max_time {
                    break;
                }
            }
            let engine = self.engine.as_mut().expect(ENGINE_EXISTS);
            shortest.iter().for_each(|(load, seconds)| engine.learn(load, *seconds));
            last = Some((sum(&shortest), num_tokens));
        }
        Ok(())
    }

    /// Runs the sequences of a probe, one step after the other: the output of a second one in flight could arrive before that of the first is
    /// noticed. Returns the steps with their seconds.
    fn run(
        &mut self,
        probe: Probe,
        next_token: &mut u64,
        group: &mut WorkerGroup,
    ) -> Result<Vec<(StepLoad, f64)>, End> {
        let probe = probe.within(self.engine());
        let vocab_size = self.thread.config.vocab_size as u64;
        let max_drafts = if probe.has_drafts { self.engine().config().max_drafts as u32 } else { 0 };
        for _ in 0..probe.rows {
            // Tokens differ, so that nothing is found in the prefix cache and all experts are chosen.
            let tokens = (*next_token..).map(|n| TokenId((n * 7919 % vocab_size) as u32));
            let prompt = tokens.take(probe.prompt).collect();
            *next_token += probe.prompt as u64;
            let request = Request { prompt, max_tokens: probe.max_tokens as u32, max_drafts, ..Request::default() };
            if self.engine().submit(request).is_err() {
                break; // A short queue, or few KV blocks.
            }
        }
        let mut steps = Vec::new();
        while !self.engine().is_idle() {
            let engine = self.engine.as_mut().expect(ENGINE_EXISTS);
            if engine.num_in_flight() == 0
                && let Some(plan) = engine.plan()
            {
                self.last_progress = Instant::now();
                group.step(plan)?;
            }
            let patience = if group.doorbell().is_none() { POLL_INTERVAL } else { Duration::ZERO };
            self.handle_messages(group, patience)?;
            let Some(message) = group.next_report(POLL_INTERVAL)? else {
                self.check_watchdog()?;
                continue;
            };
            let FromWorker::Output(output) = message else {
                return Err(WorkerLoss::new("worker 0 sent something other than a step's output".to_owned()).into());
            };
            let seconds = self.last_progress.elapsed().as_secs_f64();
            let engine = self.engine.as_mut().expect(ENGINE_EXISTS);
            // The time counts from the moment when the plan was sent.
            steps.extend(engine.oldest_load().map(|load| (StepLoad { after_gap: false, ..load }, seconds)));
            let settled = engine.settle(output, &mut self.events);
            settled.map_err(|error| WorkerLoss::new(format!("worker 0 sent an unexpected output: {error}")))?;
        }
        Ok(steps)
    }
}

fn sum(steps: &[(StepLoad, f64)]) -> f64 {
    steps.iter().map(|step| step.1).sum()
}
