//! Simulates a world in virtual time: groups of ranks that share only rank 0.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::fmt;

use engine::{
    Engine, EngineConfig, Request, SampledToken, SequenceId, StepOutput, StepPlan, TokenEvent, TokenId, plan,
};

use rustix::time::{ClockId, clock_gettime};

use crate::{Costs, SimulateArgs, SimulateError};

/// The result for one number of ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// Ranks of the world.
    pub ranks: u32,
    /// Its nodes, each with one group.
    pub nodes: u32,
    /// Mean bytes of a plan.
    pub plan_bytes: f64,
    /// The largest plan.
    pub max_plan_bytes: usize,
    /// Microseconds until every node has the mean plan, if all nodes were one group.
    pub broadcast_us: f64,
    /// Tokens per second of all groups together.
    pub tokens_per_s: f64,
    /// `tokens_per_s` relative to a rank 0 that takes no time, from 0 to 1.
    pub share: f64,
    /// Milliseconds between two tokens of a stream: median and 99th percentile.
    pub gap_ms: [f64; 2],
    /// Mean number of busy cores of rank 0.
    pub busy_cores: f64,
    /// Utilization of the MPI thread, from 0 to 1.
    pub busy_mpi: f64,
}

impl Row {
    pub(crate) const HEADING: &str =
        "  ranks  nodes  plan B mean/max  broadcast us   tokens/s  of ideal  gap ms p50/p99  rank 0 cores  MPI thread";
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { ranks, nodes, plan_bytes, max_plan_bytes, broadcast_us, tokens_per_s, busy_cores, .. } = self;
        let [p50, p99] = self.gap_ms;
        write!(
            f,
            "{ranks:7}{nodes:7}{plan_bytes:9.0}/{max_plan_bytes:<7}{broadcast_us:13.0}{tokens_per_s:11.0}{:9.0}%{p50:9.2}/{p99:<7.2}{busy_cores:11.2}{:11.0}%",
            self.share * 100.0,
            self.busy_mpi * 100.0
        )
    }
}

/// Identical servers in the sense of queueing theory; each handles one job at a time.
struct Servers {
    /// Time from which each server is free.
    free_at: Vec<f64>,
    /// Sum of the service times.
    busy: f64,
}

impl Servers {
    fn new(count: u32) -> Self {
        Self { free_at: vec![0.0; count as usize], busy: 0.0 }
    }

    /// Assigns a job of `seconds` that arrives at `now`, and returns when it is done. Of the servers that are free at `now`, the one
    /// that became free last takes the job: calls are not ordered by `now`, and a job with an earlier `now` may need the others.
    fn serve(&mut self, now: f64, seconds: f64) -> f64 {
        let rank = |&free: &f64| if free <= now { now - free } else { 1e9 + free };
        let chosen = self.free_at.iter_mut().min_by(|one, other| rank(one).total_cmp(&rank(other)));
        let chosen = chosen.expect("there is a server");
        *chosen = chosen.max(now) + seconds;
        self.busy += seconds;
        *chosen
    }
}

/// Seconds with a total order.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Time(f64);

impl Eq for Time {}

impl PartialOrd for Time {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Time {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}

/// CPU time of this thread, which other processes of the machine do not affect.
fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// The ranks of one node; they hold one copy of the model.
struct Group {
    engine: Engine,
    is_remote: bool,
    device_free_at: f64,
    /// Sum of the times of its steps.
    computed: f64,
    /// With the seconds that their steps took.
    outputs: std::collections::VecDeque<(StepOutput, f64)>,
    last_token_at: HashMap<SequenceId, f64>,
    num_steps: u32,
}

pub(crate) struct World<'a> {
    args: &'a SimulateArgs,
    costs: Costs,
    groups: Vec<Group>,
    cores: Servers,
    mpi: Servers,
    /// When the next output of a group reaches rank 0, and the group's index.
    arrivals: BinaryHeap<Reverse<(Time, usize)>>,
    plan_bytes: Vec<usize>,
    gaps: Vec<f64>,
    num_tokens: u64,
    /// State of the generator of random numbers.
    random: u64,
    end: f64,
    events: Vec<TokenEvent>,
    bytes: Vec<u8>,
}

impl<'a> World<'a> {
    pub(crate) fn new(args: &'a SimulateArgs, nodes: u32) -> Result<Self, SimulateError> {
        let len = (args.prompt + args.output) as usize;
        let (block_size, rows) = (64, args.concurrency as usize);
        let config = EngineConfig {
            max_rows: rows,
            max_step_tokens: 8192.max(rows),
            max_sequence_len: len,
            block_size,
            num_blocks: rows * len.div_ceil(block_size) + rows,
            max_queue: rows,
            // All prompts are equal, so a prefix cache would skip their computation.
            prefix_cache: false,
            max_drafts: args.drafts as usize,
            guesses_on_device: true,
            ..EngineConfig::default()
        };
        let costs = Costs::new(args)?;
        let group = |index: u32| -> Result<Group, SimulateError> {
            let mut engine = Engine::new(config.clone())?;
            costs.first_steps(args.drafts > 0).for_each(|(load, seconds)| engine.learn(&load, seconds));
            Ok(Group {
                engine,
                is_remote: index > 0,
                device_free_at: 0.0,
                computed: 0.0,
                outputs: Default::default(),
                last_token_at: HashMap::new(),
                num_steps: 0,
            })
        };
        Ok(Self {
            args,
            groups: (0..nodes).map(group).collect::<Result<_, _>>()?,
            costs,
            cores: Servers::new(args.cores),
            mpi: Servers::new(1),
            arrivals: BinaryHeap::new(),
            plan_bytes: Vec::new(),
            gaps: Vec::new(),
            num_tokens: 0,
            random: 1,
            end: 0.0,
            events: Vec::new(),
            bytes: Vec::new(),
        })
    }

    pub(crate) fn run(mut self, ranks: u32) -> Result<Row, SimulateError> {
        for index in 0..self.groups.len() {
            for number in 0..self.args.concurrency {
                // The requests end at different times, as in a world that has served for a while.
                self.submit(index, 1 + number * self.args.output / self.args.concurrency)?;
            }
            self.plan(index, 0.0, 0.0);
        }
        while let Some(Reverse((Time(now), index))) = self.arrivals.pop() {
            self.settle(index, now)?;
        }
        Ok(self.row(ranks))
    }

    fn submit(&mut self, index: usize, max_tokens: u32) -> Result<(), SimulateError> {
        let prompt = (0..self.args.prompt).map(TokenId).collect();
        let request = Request { prompt, max_tokens, max_drafts: self.args.drafts, ..Request::default() };
        let submitted = self.groups[index].engine.submit(request);
        submitted.map(drop).map_err(|refused| SimulateError::Request {
            prompt: self.args.prompt,
            output: self.args.output,
            reason: refused.to_string(),
        })
    }

    /// Plans as many steps as may be in flight, at `now` but not before `settled`. The engine's measured CPU time is charged to the
    /// cores of rank 0.
    fn plan(&mut self, index: usize, now: f64, settled: f64) {
        loop {
            let group = &mut self.groups[index];
            if group.num_steps == self.args.steps {
                return;
            }
            let begun = cpu_seconds();
            let Some(plan) = group.engine.plan() else { return };
            plan::encode(&plan, &mut self.bytes);
            let planned = self.cores.serve(now, cpu_seconds() - begun).max(settled);
            self.plan_bytes.push(self.bytes.len());
            let arrived = match self.groups[index].is_remote {
                true => self.mpi.serve(planned, self.costs.message) + self.costs.flight(self.bytes.len()),
                false => planned,
            };
            self.compute(index, &plan, arrived);
        }
    }

    fn compute(&mut self, index: usize, plan: &StepPlan, arrived: f64) {
        let seconds = self.costs.step(plan);
        let output = self.output(plan);
        let group = &mut self.groups[index];
        group.num_steps += 1;
        group.computed += seconds;
        let began = group.device_free_at;
        group.device_free_at = group.device_free_at.max(arrived + self.costs.launch) + seconds;
        let back = if group.is_remote { self.costs.flight(output.tokens.len() * 8) } else { 0.0 };
        group.outputs.push_back((output, group.device_free_at - began));
        self.arrivals.push(Reverse((Time(group.device_free_at + back), index)));
    }

    /// Every token is the same. A guess at it is right with the probability of the flags.
    fn output(&mut self, plan: &StepPlan) -> StepOutput {
        const TOKEN: TokenId = TokenId(7);
        const WRONG: TokenId = TokenId(8);
        let (mut tokens, mut guesses, mut drafts) = (Vec::new(), Vec::new(), plan.drafts.iter().peekable());
        for work in plan.work.iter().filter(|work| work.samples) {
            let drafted = drafts.next_if(|(row, _)| *row == work.row).map_or(0, |(_, drafted)| drafted.len());
            let sampled = SampledToken { row: work.row, token: TOKEN, logprob: None, top: Vec::new() };
            tokens.extend(std::iter::repeat_n(sampled, 1 + drafted));
            if work.num_guesses > 0 {
                let guess = |_| if self.is_right() { TOKEN } else { WRONG };
                guesses.push((work.row, (0..work.num_guesses).map(guess).collect()));
            }
        }
        StepOutput { step: plan.step, tokens, guesses }
    }

    fn is_right(&mut self) -> bool {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 11) as f64 / ((1_u64 << 53) as f64) < self.args.acceptance
    }

    /// Processes a group's next output: delivers its tokens, replaces finished requests, and plans again.
    fn settle(&mut self, index: usize, mut now: f64) -> Result<(), SimulateError> {
        if self.groups[index].is_remote {
            now = self.mpi.serve(now, self.costs.message);
        }
        let group = &mut self.groups[index];
        let (output, seconds) = group.outputs.pop_front().expect("an arrival has its output");
        let begun = cpu_seconds();
        group.engine.measure(seconds);
        group.engine.settle(output, &mut self.events).expect("outputs come in the order of plans");
        let settled = self.cores.serve(now, cpu_seconds() - begun);
        let mut num_ended = 0;
        for event in self.events.drain(..) {
            let delivered = self.cores.serve(now, self.costs.token).max(settled);
            if let Some(last) = group.last_token_at.insert(event.sequence, delivered) {
                self.gaps.push(delivered - last);
            }
            if event.finished.is_some() {
                group.last_token_at.remove(&event.sequence);
                num_ended += 1;
            }
            self.num_tokens += event.tokens.len() as u64;
            self.end = self.end.max(delivered);
        }
        for _ in 0..num_ended {
            self.submit(index, self.args.output)?;
        }
        self.plan(index, now, settled);
        Ok(())
    }

    fn row(mut self, ranks: u32) -> Row {
        let nodes = self.groups.len() as u32;
        let ideal = self.groups.iter().map(|group| group.computed).fold(0.0, f64::max);
        let plan_bytes = self.plan_bytes.iter().sum::<usize>() as f64 / self.plan_bytes.len().max(1) as f64;
        self.gaps.sort_unstable_by(f64::total_cmp);
        let gap = |part: f64| self.gaps.get((self.gaps.len() as f64 * part) as usize).map_or(0.0, |gap| gap * 1e3);
        Row {
            ranks,
            nodes,
            plan_bytes,
            max_plan_bytes: self.plan_bytes.iter().copied().max().unwrap_or(0),
            broadcast_us: self.costs.broadcast(plan_bytes, nodes - 1) * 1e6,
            tokens_per_s: self.num_tokens as f64 / self.end,
            share: ideal / self.end,
            gap_ms: [gap(0.5), gap(0.99)],
            busy_cores: self.cores.busy / self.end,
            busy_mpi: self.mpi.busy / self.end,
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::{SimulateArgs, simulate};

    #[test]
    fn a_fast_rank_0_does_not_slow_its_groups() {
        let args = SimulateArgs { steps: 60, concurrency: 16, prompt: 8, token_us: 0.1, ..SimulateArgs::default() };
        let (one, two) = (simulate(&args, 8).unwrap(), simulate(&args, 16).unwrap());
        assert!(one.share > 0.5 && two.tokens_per_s > 1.5 * one.tokens_per_s, "{one:?} {two:?}");
        assert!(one.busy_mpi == 0.0 && two.busy_mpi > 0.0, "{one:?} {two:?}");
    }

    #[test]
    fn a_slow_rank_0_bounds_the_throughput() {
        let args = SimulateArgs { steps: 60, prompt: 8, token_us: 1000.0, cores: 2, ..SimulateArgs::default() };
        let row = simulate(&args, 16).unwrap();
        // Two cores deliver at most 2000 tokens per second if each takes a millisecond.
        assert!(row.tokens_per_s < 2000.0 && row.share < 0.2, "{row:?}");
    }
}
