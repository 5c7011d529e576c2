//! What clients see of a number of requests that arrive at a rate or all at once. The real scheduler learns the times of a modelled
//! device and sizes its steps.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::time::Duration;

use engine::{Engine, EngineConfig, Request, SampledToken, SequenceId, StepOutput, StepPlan, TokenEvent, TokenId};

use crate::gaps::{TILE, at};
use crate::{Costs, SimulateArgs, SimulateError};

/// The result for one bound and one rate of requests.
#[derive(Debug, Clone, PartialEq)]
pub struct LoadRow {
    /// The bound of the gap; `None` for the default.
    pub max_inter_token_ms: Option<f64>,
    /// Requests that arrive in a second; 0 if all arrive at once.
    pub requests_per_s: f64,
    /// Seconds until the last one ended.
    pub seconds: f64,
    /// Output tokens in a second.
    pub tokens_per_s: f64,
    /// Milliseconds from the arrival of a request to its first token: median and 99th percentile.
    pub first_token_ms: [f64; 2],
    /// Milliseconds between two tokens of a request: mean, median and 99th percentile.
    pub gap_ms: [f64; 3],
}

impl LoadRow {
    pub(crate) const HEADING: &str =
        "  bound ms  requests/s  seconds  output tokens/s  first token ms p50/p99  gap ms mean/p50/p99";
}

impl fmt::Display for LoadRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let or = |value: Option<f64>, none: &str| value.map_or_else(|| none.to_owned(), |value| value.to_string());
        let bound = or(self.max_inter_token_ms, "default");
        let rate = or(Some(self.requests_per_s).filter(|rate| *rate > 0.0), "at once");
        let Self { seconds, tokens_per_s, first_token_ms: [p50, p99], gap_ms: [mean, median, longest], .. } = self;
        write!(
            f,
            "{bound:>10}{rate:>12}{seconds:9.1}{tokens_per_s:17.0}{p50:15.0}/{p99:<8.0}{mean:8.2}/{median:.2}/{longest:.2}"
        )
    }
}

/// Simulates a group of ranks with `--concurrency` rows and `--requests` requests.
///
/// # Errors
/// When the flags contradict each other.
pub fn load(args: &SimulateArgs, max_inter_token_ms: Option<f64>, per_s: f64) -> Result<LoadRow, SimulateError> {
    let (rows, len) = (args.concurrency as usize, 2 * (args.prompt as usize + args.output as usize));
    let mut engine = Engine::new(EngineConfig {
        max_rows: rows,
        max_step_tokens: 8192.max(rows),
        max_sequence_len: len,
        block_size: 64,
        num_blocks: rows * (len.div_ceil(64) + 1),
        max_queue: args.requests as usize,
        max_queue_each: args.requests as usize,
        max_inter_token: max_inter_token_ms.map(|ms| Duration::from_secs_f64(ms.max(0.0) * 1e-3)),
        token_tile: TILE,
        min_prompt_tokens: TILE / 2,
        prefix_cache: false,
        ..EngineConfig::default()
    })?;
    let costs = Costs::new(args)?;
    let interval = if per_s > 0.0 { 1.0 / per_s } else { 0.0 };
    let (mut now, mut num_arrived, mut num_ended) = (0.0, 0, 0);
    // When each request had its last token, or arrived, and whether it had one.
    let mut last: HashMap<SequenceId, (f64, bool)> = HashMap::new();
    let (mut first_tokens, mut gaps, mut num_tokens) = (Vec::new(), Vec::new(), 0);
    let (mut in_flight, mut events): (VecDeque<StepPlan>, Vec<TokenEvent>) = Default::default();
    while num_ended < args.requests {
        while num_arrived < args.requests && f64::from(num_arrived) * interval <= now {
            // Lengths between a half and three halves of the mean.
            let of = |mean: u32, salt: u32| (mean / 2 + num_arrived.wrapping_mul(salt) % mean.max(1)).max(1);
            let (prompt, max_tokens) = (of(args.prompt, 7919), of(args.output, 104_729));
            let prompt = vec![TokenId(1); prompt as usize];
            let submitted = engine.submit(Request { prompt, max_tokens, ..Request::default() });
            let sequence = submitted.map_err(|refused| SimulateError::Request {
                prompt: args.prompt,
                output: args.output,
                reason: refused.to_string(),
            })?;
            last.insert(sequence, (f64::from(num_arrived) * interval, false));
            num_arrived += 1;
        }
        while let Some(plan) = engine.plan() {
            in_flight.push_back(plan);
        }
        let Some(plan) = in_flight.pop_front() else {
            now = f64::from(num_arrived) * interval;
            continue;
        };
        let seconds = costs.step(&plan);
        now += seconds;
        engine.measure(seconds);
        let sampled = |row| SampledToken { row, token: TokenId(7), logprob: None, top: Vec::new() };
        let tokens = plan.work.iter().filter(|work| work.samples).map(|work| sampled(work.row)).collect();
        let output = StepOutput { step: plan.step, tokens, guesses: vec![] };
        engine.settle(output, &mut events).expect("the oldest step is settled");
        for event in events.drain(..) {
            if let Some((before, had_one)) = last.insert(event.sequence, (now, true)) {
                let times = if had_one { &mut gaps } else { &mut first_tokens };
                times.push((now - before) * 1e3);
            }
            num_tokens += event.tokens.len();
            num_ended += u32::from(event.finished.is_some());
        }
    }
    let mean = gaps.iter().sum::<f64>() / gaps.len().max(1) as f64;
    Ok(LoadRow {
        max_inter_token_ms,
        requests_per_s: per_s,
        seconds: now,
        tokens_per_s: num_tokens as f64 / now,
        first_token_ms: [at(&mut first_tokens, 0.5), at(&mut first_tokens, 0.99)],
        gap_ms: [mean, at(&mut gaps, 0.5), at(&mut gaps, 0.99)],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lower_bound_gives_shorter_gaps_and_later_first_tokens() {
        let args = SimulateArgs {
            step_ms: "1:4.0,32:4.5,128:6.1".into(),
            prefill_per_s: 42_000.0,
            prompt: 2000,
            output: 100,
            requests: 100,
            ..SimulateArgs::default()
        };
        for per_s in [0.0, 8.0] {
            let [low, default] = [Some(15.0), None].map(|bound| load(&args, bound, per_s).unwrap());
            assert!(low.gap_ms[2] < default.gap_ms[2], "{low}, {default}");
            assert!(low.first_token_ms[0] > default.first_token_ms[0], "{low}, {default}");
            assert!(default.seconds > 100.0 * per_s.min(1.0) / 8.0 * 0.99, "{default}");
        }
    }
}
