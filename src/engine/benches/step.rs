//! Rank 0's own cost of a step: plan, encode and settle, with 1, 256 and 2048 rows.
//!
//! `cargo bench -p engine`
//!
//! - `decode`: every row decodes in every step; KV blocks are appended as they fill.
//! - `decode_encode`: the same, and the plan is turned into the bytes that workers get.
//! - `serve_encode`: rows end after 128 tokens and others join with prompts of 512, prefix cache on.

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use engine::{
    Engine, EngineConfig, Policy, Request, SampledToken, SamplingParams, StepOutput, StepPlan, TokenId, plan,
};

const ROWS: [usize; 3] = [1, 256, 2048];
/// Steps before an engine of the `decode` cases is made anew.
const OUTPUT_LEN: u32 = 1000;

struct Bench {
    engine: Engine,
    request: Request,
    num_submitted: u32,
    events: Vec<engine::TokenEvent>,
    bytes: Vec<u8>,
    total_bytes: usize,
    total_rows: usize,
}

impl Bench {
    fn new(max_rows: usize, prompt_len: usize, max_tokens: u32) -> Self {
        let max_sequence_len = prompt_len + max_tokens as usize;
        let config = EngineConfig {
            max_rows,
            max_step_tokens: 8192,
            max_mixed_prefill_tokens: 8192,
            max_sequence_len,
            num_blocks: (max_rows + 1) * max_sequence_len.div_ceil(16),
            max_queue: 2 * max_rows,
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
        Self { engine, request, num_submitted: 0, events: vec![], bytes: vec![], total_bytes: 0, total_rows: 0 }
    }

    /// Prompts differ from their first token on, so that each is computed.
    fn submit(&mut self) {
        self.request.prompt[0] = TokenId(self.num_submitted);
        self.num_submitted += 1;
        self.engine.submit(self.request.clone()).expect("the bench's queue has room");
    }

    /// All rows decode from here on.
    fn decoding(max_rows: usize) -> Self {
        let mut bench = Self::new(max_rows, 32, OUTPUT_LEN);
        (0..max_rows).for_each(|_| bench.submit());
        while bench.engine.stats().num_waiting > 0 || bench.engine.stats().num_prefilling > 0 {
            bench.step(true);
        }
        bench
    }

    /// One step and its own time.
    fn step(&mut self, encode: bool) -> Duration {
        let start = Instant::now();
        let plan = self.engine.plan().expect("there is work");
        if encode {
            plan::encode(black_box(&plan), &mut self.bytes);
        }
        let planned = start.elapsed();
        self.total_bytes += self.bytes.len();
        self.total_rows += plan.work.len();
        let output = output(&plan);
        let start = Instant::now();
        self.engine.settle(output, &mut self.events).expect("the output is the plan's");
        black_box(&self.events);
        self.events.clear();
        planned + start.elapsed()
    }
}

fn output(plan: &StepPlan) -> StepOutput {
    let sampling = plan.work.iter().filter(|work| work.samples);
    let tokens = sampling.map(|work| SampledToken { row: work.row, token: TokenId(7), logprob: None, top: vec![] });
    StepOutput { step: plan.step, tokens: tokens.collect() }
}

fn decode(c: &mut Criterion, name: &str, encode: bool) {
    let mut group = c.benchmark_group(name);
    for rows in ROWS {
        let (mut total_bytes, mut total_rows) = (0, 0);
        group.throughput(Throughput::Elements(rows as u64));
        group.bench_function(BenchmarkId::from_parameter(rows), |bencher| {
            bencher.iter_custom(|num_steps| {
                let mut elapsed = Duration::ZERO;
                let mut done = 0;
                while done < num_steps {
                    let mut bench = Bench::decoding(rows);
                    (bench.total_bytes, bench.total_rows) = (0, 0);
                    let batch = (num_steps - done).min(u64::from(OUTPUT_LEN) / 2);
                    elapsed += (0..batch).map(|_| bench.step(encode)).sum::<Duration>();
                    done += batch;
                    total_bytes += bench.total_bytes;
                    total_rows += bench.total_rows;
                }
                elapsed
            });
        });
        if encode && total_rows > 0 {
            println!("{name}/{rows}: {:.2} plan bytes a row", total_bytes as f64 / total_rows as f64);
        }
    }
}

fn serve(c: &mut Criterion) {
    let mut group = c.benchmark_group("serve_encode");
    for rows in ROWS {
        let mut bench = Bench::new(rows, 512, 128);
        let step = |bench: &mut Bench| {
            while bench.engine.stats().num_waiting < rows {
                bench.submit();
            }
            bench.step(true)
        };
        for _ in 0..1000 {
            step(&mut bench);
        }
        group.throughput(Throughput::Elements(rows as u64));
        group.bench_function(BenchmarkId::from_parameter(rows), |bencher| {
            bencher.iter_custom(|num_steps| (0..num_steps).map(|_| step(&mut bench)).sum());
        });
        println!("serve_encode/{rows}: {:.2} plan bytes a row", bench.total_bytes as f64 / bench.total_rows as f64);
    }
}

fn step(c: &mut Criterion) {
    decode(c, "decode", false);
    decode(c, "decode_encode", true);
    serve(c);
}

criterion_group! {
    name = benches;
    config = Criterion::default().warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(2)).sample_size(20);
    targets = step
}
criterion_main!(benches);
