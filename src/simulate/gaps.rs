//! The gap between the tokens of running streams against the rate of prompts that arrive beside them, for each bound of the
//! gap. The real scheduler learns the times of a modelled device and sizes its steps.

use std::collections::VecDeque;
use std::fmt;
use std::time::Duration;

use engine::{Engine, EngineConfig, Request, SampledToken, StepOutput, StepPlan, TokenEvent, TokenId};

use crate::{Costs, SimulateArgs, SimulateError};

/// Tokens of a prompt that the device computes in one tile.
pub(crate) const TILE: usize = 128;

/// The result for one bound and one rate of prompts.
#[derive(Debug, Clone, PartialEq)]
pub struct GapRow {
    /// The bound; `None` for the default.
    pub max_inter_token_ms: Option<f64>,
    /// Prompt tokens that arrive in a second.
    pub offered_per_s: f64,
    /// Prompt tokens that are computed in a second.
    pub computed_per_s: f64,
    /// Milliseconds between two tokens of a stream: median and 99th percentile.
    pub gap_ms: [f64; 2],
    /// Median time from a prompt's arrival to its token, in milliseconds.
    pub first_token_ms: f64,
    /// Mean relative error of the predicted times of steps.
    pub error: f64,
}

impl GapRow {
    pub(crate) const HEADING: &str =
        "  bound ms  prompt tokens/s offered  computed  gap ms p50/p99  first token ms p50  prediction error";
}

impl fmt::Display for GapRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bound = self.max_inter_token_ms.map_or_else(|| "default".to_owned(), |ms| ms.to_string());
        let Self { offered_per_s, computed_per_s, gap_ms: [p50, p99], first_token_ms, error, .. } = self;
        let error = error * 100.0;
        write!(
            f,
            "{bound:>10}{offered_per_s:25.0}{computed_per_s:10.0}{p50:9.2}/{p99:<6.2}{first_token_ms:20.0}{error:17.1}%"
        )
    }
}

/// Simulates a group of ranks with `--concurrency` streams and prompts of `--prompt` tokens.
///
/// # Errors
/// When the flags contradict each other.
pub fn gaps(args: &SimulateArgs, max_inter_token_ms: Option<f64>, per_s: f64) -> Result<GapRow, SimulateError> {
    let mut run = Run::new(args, max_inter_token_ms, per_s)?;
    for step in 0..args.steps {
        run.step(step >= args.steps / 4)?;
    }
    Ok(run.row(max_inter_token_ms, per_s))
}

struct Run<'a> {
    args: &'a SimulateArgs,
    costs: Costs,
    engine: Engine,
    in_flight: VecDeque<StepPlan>,
    now: f64,
    /// Seconds between two prompts.
    interval: f64,
    next_prompt: f64,
    /// When each prompt arrived, by its number: prompts are served in order.
    arrived: VecDeque<f64>,
    num_prompts: u32,
    measured_from: Option<f64>,
    computed: f64,
    gaps: Vec<f64>,
    first_tokens: Vec<f64>,
    errors: Vec<f64>,
    events: Vec<TokenEvent>,
}

impl<'a> Run<'a> {
    fn new(args: &'a SimulateArgs, max_inter_token_ms: Option<f64>, per_s: f64) -> Result<Self, SimulateError> {
        let (streams, waiting) = (args.concurrency as usize, 64);
        let len = args.prompt as usize + 2 * args.steps as usize;
        let config = EngineConfig {
            max_rows: streams + waiting,
            max_step_tokens: 8192.max(streams + waiting),
            max_sequence_len: len,
            block_size: 64,
            num_blocks: (streams + waiting) * (len.div_ceil(64) + 1),
            max_queue: 65_536,
            max_inter_token: max_inter_token_ms.map(|ms| Duration::from_secs_f64(ms.max(0.0) * 1e-3)),
            token_tile: TILE,
            min_prompt_tokens: TILE / 2,
            prefix_cache: false,
            ..EngineConfig::default()
        };
        let interval = if per_s > 0.0 { f64::from(args.prompt) / per_s } else { f64::INFINITY };
        let mut run = Self {
            args,
            costs: Costs::new(args)?,
            engine: Engine::new(config)?,
            in_flight: VecDeque::new(),
            now: 0.0,
            interval,
            next_prompt: interval,
            arrived: VecDeque::new(),
            num_prompts: 0,
            measured_from: None,
            computed: 0.0,
            gaps: Vec::new(),
            first_tokens: Vec::new(),
            errors: Vec::new(),
            events: Vec::new(),
        };
        for _ in 0..streams {
            run.submit(vec![TokenId(1); 16], 2 * args.steps)?;
        }
        Ok(run)
    }

    fn submit(&mut self, prompt: Vec<TokenId>, max_tokens: u32) -> Result<(), SimulateError> {
        let submitted = self.engine.submit(Request { prompt, max_tokens, ..Request::default() });
        submitted.map(drop).map_err(|refused| SimulateError::Request {
            prompt: self.args.prompt,
            output: max_tokens,
            reason: refused.to_string(),
        })
    }

    /// Submits the prompts that have arrived, plans, and settles the oldest step. Rank 0 takes no time.
    fn step(&mut self, is_measured: bool) -> Result<(), SimulateError> {
        while self.next_prompt <= self.now && self.arrived.len() < 1024 {
            self.submit(vec![TokenId(1); self.args.prompt as usize], 1)?;
            self.arrived.push_back(self.next_prompt);
            self.num_prompts += 1;
            self.next_prompt += self.interval;
        }
        while let Some(plan) = self.engine.plan() {
            self.in_flight.push_back(plan);
        }
        let Some(plan) = self.in_flight.pop_front() else { return Ok(()) };
        let seconds = self.costs.step(&plan);
        self.now += seconds;
        let predicted = self.engine.measure(seconds);
        let sampled = |row| SampledToken { row, token: TokenId(7), logprob: None, top: Vec::new() };
        let tokens = plan.work.iter().filter(|work| work.samples).map(|work| sampled(work.row)).collect();
        self.engine
            .settle(StepOutput { step: plan.step, tokens, guesses: vec![] }, &mut self.events)
            .expect("the oldest step is settled");
        let num_done = self.events.drain(..).filter(|event| event.finished.is_some()).count().min(self.arrived.len());
        let arrived: Vec<f64> = self.arrived.drain(..num_done).collect();
        if is_measured {
            self.measured_from.get_or_insert(self.now - seconds);
            self.computed +=
                plan.work.iter().map(|work| work.num_tokens).filter(|&len| len > 1).map(f64::from).sum::<f64>();
            self.gaps.push(seconds * 1e3);
            self.first_tokens.extend(arrived.iter().map(|arrived| (self.now - arrived) * 1e3));
            self.errors.extend(predicted.map(|predicted| (predicted - seconds).abs() / seconds));
        }
        Ok(())
    }

    fn row(mut self, max_inter_token_ms: Option<f64>, offered_per_s: f64) -> GapRow {
        let seconds = self.now - self.measured_from.unwrap_or(0.0);
        GapRow {
            max_inter_token_ms,
            offered_per_s,
            computed_per_s: self.computed / seconds,
            gap_ms: [at(&mut self.gaps, 0.5), at(&mut self.gaps, 0.99)],
            first_token_ms: at(&mut self.first_tokens, 0.5),
            error: self.errors.iter().sum::<f64>() / self.errors.len().max(1) as f64,
        }
    }
}

/// The value below which this part of the values is.
pub(crate) fn at(values: &mut [f64], part: f64) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values.get((values.len() as f64 * part) as usize).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args() -> SimulateArgs {
        SimulateArgs {
            step_ms: "1:4.0,32:4.5,128:6.1".into(),
            prefill_per_s: 42_000.0,
            concurrency: 32,
            prompt: 2000,
            steps: 400,
            ..SimulateArgs::default()
        }
    }

    #[test]
    fn the_gap_keeps_its_bound_at_every_rate_and_grows_to_it_only_under_load() {
        for per_s in [0.0, 5_000.0, 20_000.0, 60_000.0] {
            let row = gaps(&args(), Some(15.0), per_s).unwrap();
            assert!(row.gap_ms[1] <= 15.0, "{row}");
            let is_idle = per_s == 0.0;
            assert_eq!(row.gap_ms[1] < 6.0, is_idle, "{row}");
        }
    }

    #[test]
    fn a_longer_bound_computes_more_of_the_prompts_that_wait() {
        let rate = |bound| gaps(&args(), bound, 60_000.0).unwrap().computed_per_s;
        let rates = [rate(Some(10.0)), rate(Some(20.0)), rate(None)];
        assert!(rates[0] > 10_000.0 && rates[1] > 1.3 * rates[0] && rates[2] > 1.1 * rates[1], "{rates:?}");
        assert!(rates[2] > 0.85 * 42_000.0, "{rates:?}");
    }
}
