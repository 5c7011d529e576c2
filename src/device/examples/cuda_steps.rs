//! Measures decode and prefill steps of a Llama-shaped model on a GPU, with random weights and without a checkpoint.
//!
//! `cargo run --release -p device --example cuda_steps -- [--shape llama2-7b|llama3-8b] [--layers N] [--simple] [--no-graphs]
//! [--context N] [--prefill N] [--batch N] [--weights bf16|fp8|fp8-blocks|fp8-weights-only|int4] [--kv-cache bf16|fp8|int8] [--tp-size N --rank R --exchange DIR]`
//!
//! Prints milliseconds per decode step for several batch sizes and for a mixed step, with two steps in flight, and
//! prefill tokens per second.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use device::cuda::{CudaConfig, CudaDevice, CudaTensor, CudaWeight, FileExchange};
use engine::{RowId, SamplingParams, TokenId};
use ops::{
    Activation, AttentionSpec, DType, Device, DeviceError, KvElements, LayerAttention, LinearRole, LogitSpec, NormKind,
    NormSlices, Quantization, QuantizedRows, RopeTable, RowSource, SampleInput, StepInputs, StepLimits,
    TOKEN_ON_DEVICE, TensorParallel, WeightData, WeightSlice,
};

const DIM: usize = 128;
const BLOCK: usize = 64;
const MAX_ROWS: usize = 256;
const MAX_LEN: usize = 4096;
const EPS: f32 = 1e-5;
/// Token ids of prompts are below this value for every shape.
const MAX_TOKEN: u32 = 32000;

/// Sizes of a model.
#[derive(Clone, Copy)]
struct Shape {
    name: &'static str,
    hidden: usize,
    heads: usize,
    kv_heads: usize,
    inner: usize,
    vocab: usize,
    rope_theta: f32,
}

const SHAPES: [Shape; 2] = [
    Shape {
        name: "llama2-7b",
        hidden: 4096,
        heads: 32,
        kv_heads: 32,
        inner: 11008,
        vocab: 32000,
        rope_theta: 10_000.0,
    },
    Shape {
        name: "llama3-8b",
        hidden: 4096,
        heads: 32,
        kv_heads: 8,
        inner: 14336,
        vocab: 128_256,
        rope_theta: 500_000.0,
    },
];

struct Layer {
    norms: [CudaWeight; 2],
    qkv: CudaWeight,
    out: CudaWeight,
    gate_up: CudaWeight,
    down: CudaWeight,
}

struct Model {
    embedding: CudaWeight,
    layers: Vec<Layer>,
    norm: CudaWeight,
    head: CudaWeight,
    residual: CudaTensor,
    normed: CudaTensor,
    qkv: CudaTensor,
    attended: CudaTensor,
    gate_up: CudaTensor,
    gated: CudaTensor,
    partial: CudaTensor,
}

/// Random codes of a quantized matrix, with values of size about 0.02.
#[derive(Debug)]
struct RandomRows {
    quantization: Quantization,
    has_fp8_inputs: bool,
    codes: Vec<u8>,
}

impl RandomRows {
    /// Codes for rows of up to `cols` columns.
    fn new((quantization, has_fp8_inputs): (Quantization, bool), cols: usize) -> Self {
        let is_int4 = matches!(quantization, Quantization::Int4 { .. });
        // Exponents of e4m3 up to 2^7, so that there is no NaN.
        let codes =
            random_bytes(cols + 4096).iter().map(|byte| if is_int4 { byte % 16 } else { byte & 0xf7 }).collect();
        Self { quantization, has_fp8_inputs, codes }
    }
}

impl RowSource for RandomRows {
    fn read_row(&self, _row: usize, _cols: Range<usize>, _out: &mut [u8]) {
        unreachable!("these sizes stay quantized")
    }

    fn quantized(&self) -> Option<&dyn QuantizedRows> {
        Some(self)
    }
}

impl QuantizedRows for RandomRows {
    fn quantization(&self) -> Quantization {
        self.quantization
    }

    fn read_codes(&self, row: usize, cols: Range<usize>, out: &mut [u8]) {
        let first = row * 37 % 4096 + cols.start;
        out.copy_from_slice(&self.codes[first..first + cols.len()]);
    }

    fn scale(&self, _row: usize, _col: usize) -> (f32, u8) {
        if matches!(self.quantization, Quantization::Int4 { .. }) { (0.005, 8) } else { (0.0005, 0) }
    }

    fn has_fp8_inputs(&self) -> bool {
        self.has_fp8_inputs
    }
}

/// The form of weights by its name, and whether inputs may be rounded to e4m3; `None` for bf16.
fn quantization(name: &str) -> Option<(Quantization, bool)> {
    let form = match name {
        "bf16" => return None,
        "fp8" | "fp8-weights-only" => Quantization::Fp8 { block: [1, usize::MAX] },
        "fp8-blocks" => Quantization::Fp8 { block: [128, 128] },
        "int4" => Quantization::Int4 { group: 128, has_zeros: true, scale: DType::F16 },
        other => {
            panic!("unknown form of weights `{other}`; known are bf16, fp8, fp8-blocks, fp8-weights-only and int4")
        }
    };
    Some((form, matches!(name, "fp8" | "fp8-blocks")))
}

/// Bytes of bf16 weights of size about 0.02; all matrices are slices of them.
fn random_bytes(count: usize) -> Vec<u8> {
    let mut state = 1u64;
    let mut bytes = Vec::with_capacity(count);
    while bytes.len() < count {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        let mantissa = (state >> 33) as u16;
        // Sign and mantissa are random, the exponent is that of 2^-6 or 2^-7.
        let bits = (mantissa & 0x80ff) | 0x3c00;
        bytes.extend_from_slice(&bits.to_le_bytes());
    }
    bytes
}

impl Model {
    /// This worker's shard of a model with `num_layers` layers.
    fn load(
        device: &mut CudaDevice,
        shape: Shape,
        num_layers: usize,
        quantization: Option<(Quantization, bool)>,
    ) -> Result<Self, DeviceError> {
        let tp = device.tensor_parallel();
        let size = tp.size as usize;
        let Shape { hidden, .. } = shape;
        let (heads, kv_heads) = (shape.heads / size * DIM, shape.kv_heads / size * DIM);
        let (inner, vocab) = (shape.inner / size, shape.vocab / size);
        let data = WeightData::Stored(random_bytes(shape.inner.max(shape.vocab) * hidden * 2).into());
        let ones = WeightData::Stored([0x80u8, 0x3f].repeat(hidden).into());
        let matrix = |rows: usize, cols: usize| WeightSlice {
            name: "random",
            data: data.clone(),
            dtype: DType::Bf16,
            matrix_cols: cols,
            rows: 0..rows,
            cols: 0..cols,
            head_order: None,
        };
        let product = |rows: usize, cols: usize| match quantization {
            None => matrix(rows, cols),
            Some(form) => {
                WeightSlice { data: WeightData::Computed(Arc::new(RandomRows::new(form, cols))), ..matrix(rows, cols) }
            }
        };
        let norm = NormSlices {
            kind: NormKind::Rms,
            width: hidden,
            weight: Some(WeightSlice { data: ones, rows: 0..1, ..matrix(1, hidden) }),
            bias: None,
            offset: 0.0,
            factor: 1.0,
        };
        let embedding = device.load_embedding(matrix(vocab, hidden), tp.rank * vocab as u32)?;
        let mut layers = Vec::new();
        for _ in 0..num_layers {
            let (query, key) = (product(heads, hidden), product(kv_heads, hidden));
            let gate = product(inner, hidden);
            layers.push(Layer {
                norms: [device.load_norm(&norm)?, device.load_norm(&norm)?],
                qkv: device.load_linear(LinearRole::Qkv, &[query, key.clone(), key], &[])?,
                out: device.load_linear(LinearRole::Out, &[product(hidden, heads)], &[])?,
                gate_up: device.load_linear(LinearRole::GateUp, &[gate.clone(), gate], &[])?,
                down: device.load_linear(LinearRole::Down, &[product(hidden, inner)], &[])?,
            });
        }
        Ok(Self {
            embedding,
            layers,
            norm: device.load_norm(&norm)?,
            head: device.load_linear(LinearRole::Head, &[matrix(vocab, hidden)], &[])?,
            residual: device.tensor(hidden)?,
            normed: device.tensor(hidden)?,
            qkv: device.tensor(heads + 2 * kv_heads)?,
            attended: device.tensor(heads)?,
            gate_up: device.tensor(2 * inner)?,
            gated: device.tensor(inner)?,
            partial: device.tensor(hidden)?,
        })
    }

    fn forward(&mut self, device: &mut CudaDevice) -> Result<(), DeviceError> {
        device.embed(&mut self.residual, &self.embedding, 1.0)?;
        device.norm(&mut self.normed, &self.residual, &self.layers[0].norms[0], EPS)?;
        for index in 0..self.layers.len() {
            let layer = &self.layers[index];
            device.linear(&mut self.qkv, &self.normed, &layer.qkv)?;
            device.rope_and_cache(&mut self.qkv, index)?;
            device.attention(&mut self.attended, &self.qkv, index)?;
            device.linear(&mut self.partial, &self.attended, &layer.out)?;
            let next = self.layers.get(index + 1).map_or(&self.norm, |next| &next.norms[0]);
            device.reduce_add_norm(&mut self.normed, &mut self.residual, &self.partial, &layer.norms[1], EPS)?;
            let activation = Activation::Silu;
            device.gated_linear(&mut self.gated, &mut self.gate_up, &self.normed, &layer.gate_up, activation)?;
            device.linear(&mut self.partial, &self.gated, &layer.down)?;
            device.reduce_add_norm(&mut self.normed, &mut self.residual, &self.partial, next, EPS)?;
        }
        device.sample(&self.normed, &self.head, LogitSpec::default())
    }
}

fn spec(shape: Shape, num_layers: usize, max_positions: usize, tp_size: usize) -> AttentionSpec {
    let angles = (0..max_positions)
        .flat_map(|p| (0..DIM / 2).map(move |i| p as f32 * shape.rope_theta.powf(-(2.0 * i as f32) / DIM as f32)));
    let (cos, sin) = angles.map(|a| (a.cos(), a.sin())).unzip();
    let layer = LayerAttention {
        num_heads: shape.heads / tp_size,
        num_kv_heads: shape.kv_heads / tp_size,
        head_dim: DIM,
        scale: (DIM as f32).powf(-0.5),
        rope: Some(0),
        kv_group: 0,
        kv_buffer: 0,
        window: None,
        score_cap: None,
        sinks: Vec::new(),
        chunk: None,
        query_scale: None,
        has_shared_kv: false,
        alibi_slopes: Vec::new(),
    };
    let ropes = vec![RopeTable { cos, sin }];
    let layers = (0..num_layers).map(|kv_buffer| LayerAttention { kv_buffer, ..layer.clone() }).collect();
    AttentionSpec {
        block_size: BLOCK,
        max_positions,
        ropes,
        layers,
        kv_windows: vec![None],
        kv_elements: KvElements::Plain,
        states: Vec::new(),
    }
}

/// A step of `rows` rows that each compute positions `start..start + count`.
fn step(number: u64, rows: usize, start: usize, count: usize, blocks_per_row: usize) -> StepInputs {
    let mut inputs = StepInputs { max_blocks: blocks_per_row, ..StepInputs::default() };
    inputs.clear(number);
    inputs.max_blocks = blocks_per_row;
    inputs.num_prefill_rows = if count > 1 { rows } else { 0 };
    for row in 0..rows {
        inputs.rows.push(RowId(row as u32));
        for position in start..start + count {
            inputs.token_ids.push(if count > 1 { (position * 7 + row) as u32 % MAX_TOKEN } else { TOKEN_ON_DEVICE });
            inputs.positions.push(position as u32);
            inputs.slots.push(((row * blocks_per_row + position / BLOCK) * BLOCK + position % BLOCK) as u32);
        }
        inputs.row_starts.push(inputs.token_ids.len() as u32);
        inputs.context_lens.push((start + count) as u32);
        inputs.block_tables.extend((0..blocks_per_row).map(|b| (row * blocks_per_row + b) as u32));
        inputs.samples.push(SampleInput {
            row: RowId(row as u32),
            token_index: inputs.token_ids.len() as u32 - 1,
            num_generated: 0,
        });
    }
    inputs
}

/// A decode step of `rows` rows at `start`, with a chunk of `chunk` new tokens in one more row.
fn mixed_step(number: u64, rows: usize, start: usize, chunk: usize, blocks_per_row: usize) -> StepInputs {
    let decode = step(number, rows, start, 1, blocks_per_row);
    let mut inputs = StepInputs { max_blocks: blocks_per_row, ..StepInputs::default() };
    inputs.clear(number);
    inputs.max_blocks = blocks_per_row;
    inputs.num_prefill_rows = 1;
    let first_block = rows * blocks_per_row;
    inputs.rows.push(RowId(rows as u32));
    for position in 0..chunk {
        inputs.token_ids.push(position as u32 * 7 % MAX_TOKEN);
        inputs.positions.push(position as u32);
        inputs.slots.push((first_block * BLOCK + position) as u32);
    }
    inputs.row_starts.push(chunk as u32);
    inputs.context_lens.push(chunk as u32);
    inputs.block_tables.extend((first_block..first_block + blocks_per_row).map(|block| block as u32));
    inputs.rows.extend(&decode.rows);
    inputs.token_ids.extend(&decode.token_ids);
    inputs.positions.extend(&decode.positions);
    inputs.slots.extend(&decode.slots);
    inputs.row_starts.extend(decode.row_starts[1..].iter().map(|start| start + chunk as u32));
    inputs.context_lens.extend(&decode.context_lens);
    inputs.block_tables.extend(&decode.block_tables);
    inputs.samples.push(SampleInput { row: inputs.rows[0], token_index: chunk as u32 - 1, num_generated: 0 });
    for sample in decode.samples {
        inputs.samples.push(SampleInput { token_index: sample.token_index + chunk as u32, ..sample });
    }
    inputs
}

struct Options {
    shape: Shape,
    quantization: Option<(Quantization, bool)>,
    kv_elements: KvElements,
    layers: usize,
    context: usize,
    prefill: usize,
    batch: usize,
    fast: bool,
    graphs: bool,
    tp: TensorParallel,
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
        quantization: value("--weights").and_then(|name| quantization(&name)),
        kv_elements: match value("--kv-cache").as_deref() {
            None | Some("bf16") => KvElements::Plain,
            Some("fp8") => KvElements::Fp8,
            Some("int8") => KvElements::Int8,
            Some(other) => panic!("--kv-cache {other}; expected bf16, fp8 or int8"),
        },
        layers: number("--layers", 32),
        context: number("--context", 128),
        prefill: number("--prefill", 16384),
        batch: number("--batch", 0),
        fast: !has("--simple"),
        graphs: !has("--no-graphs"),
        tp: TensorParallel { rank: number("--rank", 0) as u32, size: number("--tp-size", 1) as u32 },
        exchange: value("--exchange").unwrap_or_default().into(),
    }
}

/// Milliseconds per step of `inputs(number)`, with two in flight.
fn time_steps(
    device: &mut CudaDevice,
    model: &mut Model,
    inputs: impl Fn(usize) -> StepInputs,
) -> Result<f64, DeviceError> {
    let (warm_up, steps) = (4, 40);
    let mut start = Instant::now();
    for number in 0..warm_up + steps {
        if number == warm_up {
            while device.collect(true)?.is_some() {}
            start = Instant::now();
        }
        device.run_step(&inputs(number), &mut |device| model.forward(device))?;
        if number > 0 && number != warm_up {
            device.collect(true)?;
        }
    }
    while device.collect(true)?.is_some() {}
    Ok(start.elapsed().as_secs_f64() * 1e3 / steps as f64)
}

fn time_prefill(
    device: &mut CudaDevice,
    model: &mut Model,
    rows: usize,
    tokens: usize,
    blocks: usize,
) -> Result<f64, DeviceError> {
    let mut best = f64::MAX;
    for number in 0..3 {
        let inputs = step(number, rows, 0, tokens, blocks);
        let start = Instant::now();
        device.run_step(&inputs, &mut |device| model.forward(device))?;
        device.collect(true)?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok(best)
}

fn config(options: &Options) -> CudaConfig {
    let limits = StepLimits {
        max_tokens: options.prefill.max(MAX_ROWS),
        max_rows: MAX_ROWS,
        max_sequence_len: MAX_LEN,
        vocab_size: options.shape.vocab,
    };
    let library_dirs =
        std::env::var_os("TRIREME_CUDA_LIBS").map(|dirs| std::env::split_paths(&dirs).collect()).unwrap_or_default();
    CudaConfig {
        library_dirs,
        tensor_parallel: options.tp,
        exchange: Some(Arc::new(FileExchange::new(options.exchange.clone(), options.tp, Duration::from_secs(60)))),
        use_graphs: options.graphs,
        use_fast_kernels: options.fast,
        ..CudaConfig::new(options.tp.rank as usize, limits)
    }
}

fn main() -> Result<(), DeviceError> {
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
    let mut device = CudaDevice::new(config(&options))?;
    mark("device open");
    let mut model = Model::load(&mut device, options.shape, options.layers, options.quantization)?;
    mark("weights queued");
    let spec = AttentionSpec {
        kv_elements: options.kv_elements,
        ..spec(options.shape, options.layers, MAX_LEN, options.tp.size as usize)
    };
    let plan = device.memory_plan(&spec)?;
    mark("weights loaded");
    print_rank_0(format!("{}: {plan:?}", device.describe()));
    let decode_blocks = (options.context + 64) / BLOCK + 1;
    let num_blocks = (MAX_ROWS * decode_blocks.max(512 / BLOCK)).max(8 * 2048 / BLOCK);
    device.allocate_cache(&spec, num_blocks)?;
    for row in 0..MAX_ROWS as u32 {
        device.join_row(RowId(row), &[TokenId(1)], 1, &SamplingParams::default())?;
    }
    mark("ready");
    while device.prepare(&mut |device| model.forward(device))? {}
    mark("prepared");
    let batches = [1, 2, 4, 8, 16, 32, 64, 128, 256].into_iter().filter(|&b| options.batch == 0 || options.batch == b);
    for batch in batches {
        let inputs = |number: usize| step(number as u64, batch, options.context + number, 1, decode_blocks);
        let ms = time_steps(&mut device, &mut model, inputs)?;
        print_rank_0(format!("decode batch {batch:>4} context {}: {ms:.3} ms a step", options.context));
    }
    for chunk in [64, 256, 512].into_iter().filter(|&chunk| chunk <= options.prefill && options.batch == 0) {
        let inputs = |number: usize| {
            mixed_step(number as u64, MAX_ROWS - 1, options.context + number, chunk, decode_blocks.max(512 / BLOCK))
        };
        let ms = time_steps(&mut device, &mut model, inputs)?;
        print_rank_0(format!("mixed {} + {chunk} context {}: {ms:.3} ms a step", MAX_ROWS - 1, options.context));
    }
    let prefills = [(1, 128), (1, 512), (1, 2048), (8, 2048)];
    for (rows, tokens) in prefills.into_iter().filter(|(rows, tokens)| rows * tokens <= options.prefill) {
        let seconds = time_prefill(&mut device, &mut model, rows, tokens, 2048 / BLOCK)?;
        let rate = (rows * tokens) as f64 / seconds;
        print_rank_0(format!("prefill {rows} x {tokens}: {:.2} ms, {rate:.0} tokens/s", seconds * 1e3));
    }
    Ok(())
}
