//! Measures decode and prefill steps on a GPU: of a Llama-shaped model with random weights, or of a checkpoint.
//!
//! `cargo run --release -p device --example cuda_steps -- [--shape llama2-7b|llama3-8b | --checkpoint DIR] [--layers N] [--simple] [--batch-invariant]
//! [--no-graphs] [--context N] [--prefill N] [--batch N,N,..] [--rows N] [--weights bf16|fp8|fp8-blocks|fp8-weights-only|int4|int4-act-order|int8|int8-groups|mxfp4|nvfp4] [--kv-cache bf16|fp8|int8]
//! [--tp-size N --rank R --exchange DIR [--ep N]] [--adapters N [--adapter-rank R]]
//! [--guesses N [--eagle3 DIR | --draft-model DIR]] [--sleep]`
//!
//! Prints milliseconds per decode step for several batch sizes and for a mixed step, with two steps in flight, and
//! prefill tokens per second. `--sleep` measures sleep and wake in their place. `--layers`, `--weights` and `--adapters` are for random weights, `--ep`, the
//! number of parts of the group that have different experts, is for checkpoints.
//! With `--guesses`, rows of decode steps verify N drafts, and the checkpoint's MTP head, an EAGLE-3 head or a draft model guesses N; a step
//! gives 2.5 tokens of a row, on average, if N is above 1, as `launch --benchmark-forced-acceptance=2.5` has it, and the next begins when
//! it is collected. Decodes behind which what guesses does not run are measured before them, with two steps in flight.
//! With `--adapters`, each step also runs with adapters beside all linear layers: the first row has the first, and so on.

mod inputs;
mod llama;
mod sleep;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use device::FileExchange;
use device::cuda::{CudaConfig, CudaDevice};
use engine::{RowId, SamplingParams, TokenId};
use inputs::{BLOCK, Blocks, Drafting, step, verifying};
use llama::{Llama, SHAPES, Shape, WeightForm, random_products, weight_form};
use models::Model;
use ops::{AttentionSpec, Device, DeviceError, KvElements, StepInputs, StepLimits, Target, TensorParallel};
use settings::{DeviceDrafter, WeightPrecision};

const MAX_LEN: usize = 4096;
const PREFILLS: [(usize, usize); 4] = [(1, 128), (1, 512), (1, 2048), (8, 2048)];

type AnyError = Box<dyn std::error::Error>;

struct Options {
    shape: Shape,
    checkpoint: Option<PathBuf>,
    weights: Option<WeightForm>,
    layers: usize,
    context: usize,
    prefill: usize,
    /// Rows of the decode steps to measure, and nothing else; empty for all.
    batches: Vec<usize>,
    rows: usize,
    fast: bool,
    batch_invariant: bool,
    kv_elements: KvElements,
    graphs: bool,
    sleeps: bool,
    guesses: usize,
    drafter: DeviceDrafter,
    adapters: usize,
    adapter_rank: usize,
    tp: TensorParallel,
    /// Parts of the group that have different experts.
    ep: u32,
    exchange: PathBuf,
}

fn options() -> Options {
    let arguments: Vec<String> = std::env::args().collect();
    let value = |name: &str| arguments.iter().position(|a| a == name).and_then(|at| arguments.get(at + 1).cloned());
    let number = |name: &str, default: usize| value(name).and_then(|v| v.parse().ok()).unwrap_or(default);
    let has = |name: &str| arguments.iter().any(|a| a == name);
    let name = value("--shape").unwrap_or_else(|| SHAPES[0].name.to_owned());
    Options {
        shape: *SHAPES.iter().find(|shape| shape.name == name).expect("--shape is llama2-7b or llama3-8b"),
        checkpoint: value("--checkpoint").map(PathBuf::from),
        weights: value("--weights").and_then(|name| weight_form(&name)),
        layers: number("--layers", 32),
        context: number("--context", 128),
        prefill: number("--prefill", 16384),
        batches: value("--batch").iter().flat_map(|list| list.split(',')).filter_map(|n| n.parse().ok()).collect(),
        rows: number("--rows", 256).max(8),
        fast: !has("--simple"),
        batch_invariant: has("--batch-invariant"),
        kv_elements: match value("--kv-cache").as_deref() {
            None | Some("bf16") => KvElements::Plain,
            Some("fp8") => KvElements::Fp8,
            Some("int8") => KvElements::Int8,
            Some(other) => panic!("--kv-cache {other}; expected bf16, fp8 or int8"),
        },
        graphs: !has("--no-graphs"),
        sleeps: has("--sleep"),
        guesses: number("--guesses", 0),
        drafter: match (value("--eagle3"), value("--draft-model")) {
            (Some(dir), _) => DeviceDrafter::Eagle3(dir.into()),
            (None, Some(dir)) => DeviceDrafter::Model(dir.into()),
            (None, None) => DeviceDrafter::Mtp,
        },
        adapters: number("--adapters", 0),
        adapter_rank: number("--adapter-rank", 16),
        tp: TensorParallel { rank: number("--rank", 0) as u32, size: number("--tp-size", 1) as u32 },
        ep: number("--ep", 1) as u32,
        exchange: value("--exchange").unwrap_or_default().into(),
    }
}

/// A model that is ready for steps.
struct Bench {
    device: CudaDevice,
    model: Box<dyn Model<CudaDevice>>,
    /// Number of KV groups.
    groups: usize,
    /// Whether rows have recurrent states.
    has_states: bool,
    /// Number of adapters that rows have in turn.
    adapters: usize,
}

impl Bench {
    fn blocks(&self, rows: usize, per_row: usize) -> Blocks {
        Blocks { groups: self.groups, has_states: self.has_states, rows, per_row }
    }

    fn run(&mut self, mut inputs: StepInputs) -> Result<(), DeviceError> {
        if self.adapters > 0 {
            inputs.adapters = inputs.rows.iter().map(|row| row.0 % self.adapters as u32).collect();
        }
        let model = &mut self.model;
        self.device.run_step(&inputs, &mut |device| model.forward(device))?;
        model.guess(&mut self.device)
    }

    /// Milliseconds per step in which `rows` rows verify drafts behind `context` positions, and tokens per row and step.
    fn time_drafts(
        &mut self,
        rows: usize,
        context: usize,
        num_drafts: usize,
        blocks: Blocks,
    ) -> Result<[f64; 2], DeviceError> {
        let (warm_up, steps) = (12, 40);
        let (mut start, mut known, mut tokens) = (Instant::now(), 1, 0);
        for number in 0..warm_up + steps {
            if number == warm_up {
                (start, tokens) = (Instant::now(), 0);
            }
            if known > 1 && self.has_states {
                let restored: Vec<_> = (0..rows).map(|row| blocks.restored(row)).collect();
                self.device.copy_states(&restored)?;
            }
            let inputs = verifying(number as u64, rows, Drafting { context, known, num_drafts }, blocks);
            self.run(inputs)?;
            self.device.collect(true)?;
            self.device.take_guesses();
            let accepted = (1 + number % 2).min(num_drafts);
            tokens += 1 + accepted;
            // A state that has seen a rejected draft becomes the one before the drafts, and the tokens since are computed again.
            known = if accepted < num_drafts && self.has_states { 1 + accepted } else { 1 };
        }
        Ok([start.elapsed().as_secs_f64() * 1e3 / steps as f64, tokens as f64 / steps as f64])
    }

    /// Milliseconds per step of `inputs(number)`, with two in flight.
    fn time_steps(&mut self, inputs: impl Fn(usize) -> StepInputs) -> Result<f64, DeviceError> {
        let (warm_up, steps) = (4, 40);
        let mut start = Instant::now();
        for number in 0..warm_up + steps {
            if number == warm_up {
                while self.device.collect(true)?.is_some() {}
                start = Instant::now();
            }
            self.run(inputs(number))?;
            if number > 0 && number != warm_up {
                self.device.collect(true)?;
            }
        }
        while self.device.collect(true)?.is_some() {}
        Ok(start.elapsed().as_secs_f64() * 1e3 / steps as f64)
    }

    /// The shortest of three times, in seconds.
    fn time_prefill(&mut self, rows: usize, tokens: usize) -> Result<f64, DeviceError> {
        let blocks = self.blocks(rows, 2048 / BLOCK);
        let work: Vec<_> = (0..rows).map(|row| (row, 0..tokens)).collect();
        let mut best = f64::MAX;
        for number in 0..3 {
            let inputs = step(number, &work, blocks);
            let start = Instant::now();
            self.run(inputs)?;
            self.device.collect(true)?;
            best = best.min(start.elapsed().as_secs_f64());
        }
        Ok(best)
    }
}

fn config(options: &Options, vocab_size: usize) -> CudaConfig {
    let limits = StepLimits {
        max_tokens: options.prefill.max(options.rows),
        max_rows: options.rows,
        max_sequence_len: MAX_LEN,
        vocab_size,
    };
    let library_dirs =
        std::env::var_os("TRIREME_CUDA_LIBS").map(|dirs| std::env::split_paths(&dirs).collect()).unwrap_or_default();
    CudaConfig {
        library_dirs,
        tensor_parallel: options.tp,
        exchange: Some(Arc::new(FileExchange::new(options.exchange.clone(), options.tp, Duration::from_secs(60)))),
        use_graphs: options.graphs,
        use_fast_kernels: options.fast,
        batch_invariant: options.batch_invariant,
        sleep_mode: options.sleeps,
        max_drafts: options.guesses,
        ..CudaConfig::new(options.tp.rank as usize, limits)
    }
}

/// Opens the device, loads the model and records its graphs. Reports each with `mark`.
fn prepare(options: &Options, decode_blocks: usize, mark: impl Fn(&str)) -> Result<Bench, AnyError> {
    let checkpoint = options.checkpoint.as_deref();
    let described = checkpoint.map(models::Config::from_dir).transpose()?.map(|c| c.in_expert_groups(options.ep));
    let mut device =
        CudaDevice::new(config(options, described.as_ref().map_or(options.shape.vocab, |c| c.vocab_size)))?;
    mark("device open");
    let mut adapter_slots = Vec::new();
    let mut model: Box<dyn Model<CudaDevice>> = match checkpoint.zip(described) {
        Some((dir, mut config)) => {
            if options.guesses > 0 {
                config = config.with_drafter(&options.drafter, WeightPrecision::Checkpoint, Target::Cuda)?;
            }
            models::load(dir, &config, &mut device)?
        }
        None => {
            let llama = Llama::load(&mut device, options.shape, options.layers, options.weights)?;
            let slots = llama.adapter_slots(options.adapters, options.adapter_rank);
            adapter_slots = slots.into_iter().map(|(_, slots)| slots).collect();
            Box::new(llama)
        }
    };
    mark("weights queued");
    let spec = AttentionSpec { kv_elements: options.kv_elements, ..model.attention_spec(BLOCK, MAX_LEN) };
    let plan = device.memory_plan(&spec)?;
    mark(&format!("weights loaded, {}: {plan:?},", device.describe()));
    let num_blocks = (options.rows * decode_blocks.max(512 / BLOCK)).max(8 * 2048 / BLOCK);
    device.allocate_cache(&spec, spec.kv_windows.len() * num_blocks)?;
    let has_states = !spec.states.is_empty();
    if has_states {
        device.allocate_states(&spec, 2 * options.rows)?;
    }
    for row in 0..options.rows as u32 {
        device.join_row(RowId(row), &[TokenId(1)], 1, &SamplingParams::default())?;
    }
    if options.adapters > 0 {
        let free = device.free_bytes()?;
        model.allocate_adapters(&mut device, options.adapters, options.adapter_rank)?;
        let (planned, took) = (
            model.adapter_bytes(&device, options.adapters, options.adapter_rank),
            free.saturating_sub(device.free_bytes()?),
        );
        mark(&format!("slots for adapters of {planned} bytes, which take {took},"));
        let products: Vec<_> = adapter_slots.iter().map(random_products).collect();
        for slot in 0..options.adapters as u32 {
            let products = products.clone();
            let start = Instant::now();
            model.set_products(&mut device, slot, products)?;
            mark(&format!("adapter {slot} filled in {:.1} ms,", start.elapsed().as_secs_f64() * 1e3));
        }
    }
    mark("ready");
    while device.prepare(&mut |device| model.forward(device))? {}
    mark("prepared");
    Ok(Bench { device, model, groups: spec.kv_windows.len(), has_states, adapters: 0 })
}

/// A step is measured without adapters, and then with them if there are any.
fn with_and_without(adapters: usize) -> impl Iterator<Item = usize> {
    [0, adapters].into_iter().take(if adapters > 0 { 2 } else { 1 })
}

fn named(adapters: usize) -> String {
    if adapters > 0 { format!(" with {adapters} adapters") } else { String::new() }
}

fn main() -> Result<(), AnyError> {
    let options = options();
    if device::cuda::num_gpus().unwrap_or(0) == 0 {
        println!("skipped: no CUDA device");
        return Ok(());
    }
    let begin = Instant::now();
    let print_rank_0 = |text: String| {
        if options.tp.rank == 0 {
            println!("{text}");
        }
    };
    let mark = |what: &str| print_rank_0(format!("start-up: {what} at {:.2} s", begin.elapsed().as_secs_f64()));
    let (context, rows) = (options.context, options.rows);
    let decode_blocks = (context + 64) / BLOCK + 1;
    let mut bench = prepare(&options, decode_blocks, mark)?;
    if options.sleeps {
        return bench.check_sleep(print_rank_0);
    }
    let blocks = bench.blocks(rows, decode_blocks);
    let decode = |count: usize, number: usize| (0..count).map(move |row| (row, context + number..context + number + 1));
    let measures_all = options.batches.is_empty();
    let batches = if measures_all { vec![1, 2, 4, 8, 16, 32, 64, 128, 256] } else { options.batches.clone() };
    let batches = batches.into_iter().filter(|&batch| (1..=rows).contains(&batch));
    if options.guesses > 0 {
        for batch in batches {
            let ms =
                bench.time_steps(|number| step(number as u64, &decode(batch, number).collect::<Vec<_>>(), blocks))?;
            print_rank_0(format!("decode batch {batch:>4} context {context}: {ms:.3} ms a step without guesses"));
            let [ms, tokens] = bench.time_drafts(batch, context, options.guesses, blocks)?;
            let each = ms / tokens;
            print_rank_0(format!(
                "drafts batch {batch:>4} context {context}: {ms:.3} ms a step of {tokens} tokens, {each:.3} ms a token"
            ));
        }
        return Ok(());
    }
    for batch in batches {
        let inputs = |number: usize| step(number as u64, &decode(batch, number).collect::<Vec<_>>(), blocks);
        for adapters in with_and_without(options.adapters) {
            bench.adapters = adapters;
            let ms = bench.time_steps(inputs)?;
            print_rank_0(format!("decode batch {batch:>4} context {context}: {ms:.3} ms a step{}", named(adapters)));
        }
    }
    for chunk in [64, 256, 512].into_iter().filter(|&chunk| chunk <= options.prefill && measures_all) {
        let inputs = |number: usize| {
            let work: Vec<_> = [(rows - 1, 0..chunk)].into_iter().chain(decode(rows - 1, number)).collect();
            step(number as u64, &work, Blocks { per_row: decode_blocks.max(512 / BLOCK), ..blocks })
        };
        for adapters in with_and_without(options.adapters) {
            bench.adapters = adapters;
            let ms = bench.time_steps(inputs)?;
            let name = named(adapters);
            print_rank_0(format!("mixed {} + {chunk} context {context}: {ms:.3} ms a step{name}", rows - 1));
        }
    }
    for (rows, tokens) in PREFILLS.into_iter().filter(|(rows, tokens)| rows * tokens <= options.prefill) {
        for adapters in with_and_without(options.adapters) {
            bench.adapters = adapters;
            let seconds = bench.time_prefill(rows, tokens)?;
            let (ms, rate) = (seconds * 1e3, (rows * tokens) as f64 / seconds);
            print_rank_0(format!("prefill {rows} x {tokens}: {ms:.2} ms, {rate:.0} tokens/s{}", named(adapters)));
        }
    }
    Ok(())
}
