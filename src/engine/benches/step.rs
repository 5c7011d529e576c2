//! Rank 0's own cost of a step, as CPU time of its thread, with 1, 256 and 2048 rows. A step makes the plan and encodes
//! it for the workers, then decodes and settles their output.
//!
//! `cargo bench -p engine`
//!
//! - `decode`: every row decodes in every step; KV blocks are appended as they fill up.
//! - `serve`: rows end after 128 tokens and others join with prompts of 512 tokens; the prefix cache is on.
//! - `overload`: the same with 4096 rows and 20 000 requests of four priorities in the queue.
//!
//! Each step reports a duration to the engine, so the measured time includes learning the costs of steps.

use std::hint::black_box;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use engine::{
    Engine, EngineConfig, Policy, Request, SampledToken, SamplingParams, StepOutput, StepPlan, TokenId, plan,
};
use rustix::time::{ClockId, clock_gettime};

const ROWS: [usize; 3] = [1, 256, 2048];
/// Number of steps before the engine of a `decode` case is replaced.
const OUTPUT_LEN: u32 = 1000;

struct Bench {
    engine: Engine,
    request: Request,
    num_submitted: u32,
    num_priorities: u32,
    events: Vec<engine::TokenEvent>,
    bytes: Vec<u8>,
    output: Vec<u8>,
    total_bytes: usize,
    total_rows: usize,
    /// One entry for each step.
    times: Vec<Duration>,
}

impl Bench {
    fn new(max_rows: usize, prompt_len: usize, max_tokens: u32) -> Self {
        let max_sequence_len = prompt_len + max_tokens as usize;
        let config = EngineConfig {
            max_rows,
            max_step_tokens: 8192,
            max_sequence_len,
            num_blocks: (max_rows + 1) * max_sequence_len.div_ceil(16),
            max_queue: 32_768,
            policy: Policy::MaxUtilization,
            ..EngineConfig::default()
        };
        let request = Request {
            prompt: vec![TokenId(1); prompt_len],
            max_tokens,
            sampling: SamplingParams { end_ids: vec![TokenId(2)], ..SamplingParams::default() },
            ..Request::default()
        };
        let engine = Engine::new(config).expect("the bench's config is valid");
        Self {
            engine,
            request,
            num_submitted: 0,
            num_priorities: 1,
            events: vec![],
            bytes: vec![],
            output: vec![],
            total_bytes: 0,
            total_rows: 0,
            times: vec![],
        }
    }

    /// Prompts differ from the first token on, so that each one is computed.
    fn submit(&mut self) {
        self.request.prompt[0] = TokenId(self.num_submitted);
        self.request.priority = self.num_submitted % self.num_priorities;
        self.num_submitted += 1;
        self.engine.submit(self.request.clone()).expect("the bench's queue has room");
    }

    /// An engine in which all rows are decoding.
    fn decoding(max_rows: usize) -> Self {
        let mut bench = Self::new(max_rows, 32, OUTPUT_LEN);
        (0..max_rows).for_each(|_| bench.submit());
        while bench.engine.stats().num_waiting > 0 || bench.engine.stats().num_prefilling > 0 {
            bench.step();
        }
        bench
    }

    /// Runs one step and returns rank 0's CPU time.
    fn step(&mut self) -> Duration {
        let start = cpu_time();
        let plan = self.engine.plan().expect("there is work");
        plan::encode(black_box(&plan), &mut self.bytes);
        let planned = cpu_time() - start;
        self.total_bytes += self.bytes.len();
        self.total_rows += plan.work.len();
        encode_output(&plan, &mut self.output);
        let num_tokens: u32 = plan.work.iter().map(|work| work.num_tokens).sum();
        let seconds = 4e-3 + 4e-6 * f64::from(num_tokens);
        let start = cpu_time();
        self.engine.measure(seconds);
        let output = plan::decode(&self.output).expect("the output survives its way");
        self.engine.settle(output, &mut self.events).expect("the output is the plan's");
        black_box(&self.events);
        self.events.clear();
        let time = planned + (cpu_time() - start);
        self.times.push(time);
        time
    }

    /// Resets the counters.
    fn restart_counts(&mut self) {
        (self.total_bytes, self.total_rows) = (0, 0);
        self.times.clear();
    }

    /// The median is the cost of a step when nothing else uses the caches in between. In every 16th step of `decode`
    /// all rows take a KV block; only the mean shows this.
    fn report(&mut self, name: &str, rows: usize) {
        self.times.sort_unstable();
        let at = |share: f64| self.times[(self.times.len() as f64 * share) as usize];
        let bytes = self.total_bytes as f64 / self.total_rows as f64;
        let mean = self.times.iter().sum::<Duration>() / self.times.len() as u32;
        println!("{name}/{rows}: 10% {:?}, median {:?}, mean {mean:?}, {bytes:.2} plan bytes a row", at(0.1), at(0.5));
    }
}

/// CPU time of this thread; the load of other processes is not included.
fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn encode_output(plan: &StepPlan, bytes: &mut Vec<u8>) {
    let sampling = plan.work.iter().filter(|work| work.samples);
    let tokens = sampling.map(|work| SampledToken { row: work.row, token: TokenId(7_000), logprob: None, top: vec![] });
    plan::encode(&StepOutput { step: plan.step, tokens: tokens.collect(), guesses: vec![] }, bytes);
}

fn decode(c: &mut Criterion) {
    let mut group = c.benchmark_group("decode");
    for rows in ROWS {
        let mut bench = Bench::decoding(rows);
        let mut num_left = OUTPUT_LEN / 2;
        group.throughput(Throughput::Elements(rows as u64));
        group.bench_function(BenchmarkId::from_parameter(rows), |bencher| {
            bencher.iter_custom(|num_steps| {
                let mut elapsed = Duration::ZERO;
                for _ in 0..num_steps {
                    if num_left == 0 {
                        (bench, num_left) = (Bench::decoding(rows), OUTPUT_LEN / 2);
                    }
                    num_left -= 1;
                    elapsed += bench.step();
                }
                elapsed
            });
        });
        let mut bench = Bench::decoding(rows);
        bench.restart_counts();
        for _ in 0..OUTPUT_LEN / 2 {
            bench.step();
        }
        bench.report("decode", rows);
    }
}

fn serve(c: &mut Criterion) {
    let mut group = c.benchmark_group("serve");
    for rows in ROWS {
        let mut bench = Bench::new(rows, 512, 128);
        let step = |bench: &mut Bench| {
            while bench.engine.stats().num_waiting < rows.min(64) {
                bench.submit();
            }
            bench.step()
        };
        for _ in 0..1000 {
            step(&mut bench);
        }
        group.throughput(Throughput::Elements(rows as u64));
        group.bench_function(BenchmarkId::from_parameter(rows), |bencher| {
            bencher.iter_custom(|num_steps| (0..num_steps).map(|_| step(&mut bench)).sum());
        });
        bench.restart_counts();
        for _ in 0..1000 {
            step(&mut bench);
        }
        bench.report("serve", rows);
    }
}

fn overload(c: &mut Criterion) {
    const ROWS: usize = 4096;
    let mut group = c.benchmark_group("overload");
    let mut bench = Bench::new(ROWS, 512, 128);
    bench.num_priorities = 4;
    let step = |bench: &mut Bench| {
        while bench.engine.stats().num_waiting < 20_000 {
            bench.submit();
        }
        bench.step()
    };
    for _ in 0..500 {
        step(&mut bench);
    }
    group.throughput(Throughput::Elements(ROWS as u64));
    group.bench_function(BenchmarkId::from_parameter(ROWS), |bencher| {
        bencher.iter_custom(|num_steps| (0..num_steps).map(|_| step(&mut bench)).sum());
    });
    bench.restart_counts();
    for _ in 0..500 {
        step(&mut bench);
    }
    bench.report("overload", ROWS);
}

fn step(c: &mut Criterion) {
    decode(c);
    serve(c);
    overload(c);
}

criterion_group! {
    name = benches;
    config = Criterion::default().warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(2)).sample_size(20);
    targets = step
}
criterion_main!(benches);
