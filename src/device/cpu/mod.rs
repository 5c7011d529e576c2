//! The CPU device: bf16, f16 or f32 weights straight from the mapped checkpoint, copied where that is faster, or quantised;
//! f32 activations, threads of one pool.
//!
//! A row's tokens depend on that row alone, bit for bit: kernels have one summation order whatever else is in the
//! step (`kernels::cpu`), the group adds parts in rank order, and draws are functions of seed and position.
//! Steps run to their end inside [`Device::run_step`].

mod choose;
mod estimate;
mod group;
mod linear;
mod peers;
mod pipeline;
mod rows;
mod sampler;
mod weights;

use std::collections::VecDeque;
use std::ops::Range;

use engine::{CopiedBlock, RevisedRow, RowId, SampledToken, SamplingParams, TokenId};
use kernels::cpu::{self as k, Buffer, Isa, KvCache, KvType, Pool};

use crate::{
    Activation, AttentionSpec, Device, DeviceError, Feature, LinearRole, MemoryPlan, PipelineStage, SampleInput,
    StepInputs, StepLimits, TOKEN_ON_DEVICE, TensorParallel, WeightSlice,
};
pub(crate) use estimate::CpuEstimate;
use group::Group;
pub use group::GroupConfig;
pub use kernels::cpu::allowed_cores;
use linear::Inputs;
pub use linear::Linear;
use linear::quant_type;
pub use peers::Peers;
use peers::Use;
use pipeline::Pipeline;
use rows::Row;
pub use settings::WeightPrecision;
pub use weights::{CpuWeight, available_memory};

/// How a [`CpuDevice`] is made.
#[derive(Debug, Clone)]
pub struct CpuConfig {
    /// Threads that compute, the caller's included: cores of the node divided by its workers.
    pub threads: usize,
    /// Bounds of every step.
    pub limits: StepLimits,
    /// Bytes for KV blocks; `None` takes half of what the system has available, shared by the group's workers.
    pub kv_memory_bytes: Option<u64>,
    /// The tensor-parallel group, when there is more than one worker.
    pub group: Option<GroupConfig>,
}

/// A CPU as a [`Device`].
pub struct CpuDevice {
    config: CpuConfig,
    pool: Pool,
    isa: Isa,
    group: Option<Group>,
    pipeline: Option<Pipeline>,
    rows: Vec<Row>,
    cache: Option<Cache>,
    inputs: StepInputs,
    token_ids: Vec<u32>, // [T] of the current step, none left on the device
    projection: Inputs,  // of the linear layer at work
    precision: WeightPrecision,
    sampled: Buffer<f32>,      // [S, E]
    local_logits: Buffer<f32>, // [S, V of this worker], where the vocabulary is split
    logits: Buffer<f32>,       // [S, V], or as many as there may be rows
    reported: Vec<Vec<f32>>,   // [V] of each position that the last step reports
    vocab_offsets: Vec<usize>, // where each worker's share of the vocabulary starts, and the end
    results: VecDeque<Vec<SampledToken>>,
    weights_bytes: u64,
    workspace_bytes: u64,
    widest_weight: Option<KvType>, // what KV blocks must hold to be as exact as the weights
}

/// KV blocks and what attention needs beside them.
struct Cache {
    kv: KvCache,
    spec: AttentionSpec,
    num_blocks: usize,
}

/// An activation buffer `[max_tokens, cols]`.
pub struct CpuTensor {
    data: Buffer<f32>,
    cols: usize,
}

impl CpuTensor {
    fn rows(&self, rows: usize) -> &[f32] {
        &self.data[..rows * self.cols]
    }

    fn rows_mut(&mut self, rows: usize) -> &mut [f32] {
        &mut self.data[..rows * self.cols]
    }
}

impl CpuDevice {
    /// Ops of some architectures that this device has.
    pub(crate) const FEATURES: &[Feature] = {
        use Feature::{Alibi, HeadNorm, LayerNorm, LearnedPositions, PlainMlp};
        &[LayerNorm, LearnedPositions, PlainMlp, HeadNorm, Alibi]
    };

    /// Starts the threads and joins the group.
    ///
    /// # Errors
    /// When the group's shared memory cannot be had, or another worker does not come in time.
    pub fn new(config: CpuConfig) -> Result<Self, DeviceError> {
        let group = config.group.clone().map(Group::join).transpose()?;
        Ok(Self::with_group(config, group))
    }

    /// As [`CpuDevice::new`], for a model whose workers are on several nodes or in several pipeline stages. `hidden` is
    /// the width of what stages hand on.
    ///
    /// # Errors
    /// As `new`; and when another node cannot be reached.
    pub fn among(config: CpuConfig, peers: &Peers, hidden: usize) -> Result<Self, DeviceError> {
        let mut streams = peers.connect()?;
        let (first, nodes) = (peers.stage() * peers.tp_size(), peers.stage_nodes());
        let group = config.group.clone().map(|group| {
            let place = group.tensor_parallel.rank as usize;
            let is_first = nodes[..place].iter().all(|&node| node != nodes[place]);
            // One region a node and stage, told apart also where nodes share their memory.
            let name = format!("{}_{}_{}", group.name, peers.stage(), nodes[place]);
            Group::join_node(GroupConfig { name, ..group }, is_first, streams.take(Use::Parts), first)
        });
        let group = group.transpose()?;
        let max_floats = config.limits.max_tokens * hidden;
        let pipeline = Pipeline::join(peers, streams.take(Use::Hidden), max_floats)?;
        Ok(Self { pipeline: Some(pipeline), ..Self::with_group(config, group) })
    }

    fn with_group(config: CpuConfig, group: Option<Group>) -> Self {
        let limits = config.limits;
        let row = || Row::with_capacity(limits.max_sequence_len + 1);
        let logits = Buffer::new(limits.max_rows * limits.vocab_size);
        Self {
            pool: Pool::new(config.threads),
            isa: Isa::detect(),
            group,
            pipeline: None,
            rows: (0..limits.max_rows).map(|_| row()).collect(),
            cache: None,
            inputs: StepInputs::default(),
            token_ids: Vec::with_capacity(limits.max_tokens),
            projection: Inputs::new(limits.max_tokens),
            precision: WeightPrecision::default(),
            sampled: Buffer::new(0),
            local_logits: Buffer::new(0),
            workspace_bytes: size_of_val(&*logits) as u64,
            logits,
            reported: Vec::new(),
            vocab_offsets: Vec::new(),
            results: VecDeque::new(),
            weights_bytes: 0,
            widest_weight: None,
            config,
        }
    }

    /// Keeps each thread on a core of its own: those that this process may use, from the `first` on. The caller is one of the
    /// threads, and threads that it starts later inherit its core.
    ///
    /// # Errors
    /// When there are fewer cores, or the system refuses.
    pub fn pin_threads(&mut self, first: usize) -> Result<(), DeviceError> {
        let (cores, threads) = (k::allowed_cores(), self.pool.threads());
        let call = |reason: String| DeviceError::Call { call: format!("keeping {threads} threads on cores"), reason };
        let own = cores.get(first..first + threads);
        let own =
            own.ok_or_else(|| call(format!("cores {first} and on are wanted of {} that may be used", cores.len())))?;
        self.pool.pin(own).map_err(|error| call(error.to_string()))
    }

    /// Uses lesser instructions than the processor has, to compare them.
    pub fn set_isa(&mut self, isa: Isa) {
        self.isa = isa.min(Isa::detect());
    }

    /// Holds the weights of linear layers that are loaded from now on in fewer bits than the checkpoint has them.
    pub fn set_weight_precision(&mut self, precision: WeightPrecision) {
        self.precision = precision;
    }

    fn num_tokens(&self) -> usize {
        self.token_ids.len()
    }

    fn cache(&self) -> &Cache {
        self.cache.as_ref().expect("`allocate_cache` is called before the first step")
    }

    /// The step's tokens, with those that only this device knows filled in.
    fn resolve_tokens(&mut self) -> Result<(), DeviceError> {
        let inputs = &self.inputs;
        self.token_ids.clear();
        for (index, row) in inputs.rows.iter().enumerate() {
            let known =
                self.rows.get(row.0 as usize).ok_or_else(|| beyond("row", row.0, self.config.limits.max_rows))?;
            for token in &inputs.token_ids[inputs.row_starts[index] as usize..inputs.row_starts[index + 1] as usize] {
                let last = || known.tokens().last().copied().unwrap_or(u32::MAX);
                let token = if *token == TOKEN_ON_DEVICE { last() } else { *token };
                if token as usize >= self.config.limits.vocab_size {
                    return Err(beyond("token", token, self.config.limits.vocab_size));
                }
                self.token_ids.push(token);
            }
        }
        Ok(())
    }

    /// Refuses a step that would leave a buffer.
    fn check_inputs(&self) -> Result<(), DeviceError> {
        let (inputs, limits, cache) = (&self.inputs, &self.config.limits, self.cache());
        let tokens = inputs.num_tokens();
        let shaped = inputs.row_starts.len() == inputs.num_rows() + 1
            && inputs.row_starts[0] == 0
            && inputs.row_starts.is_sorted()
            && inputs.row_starts[inputs.num_rows()] as usize == tokens
            && inputs.positions.len() == tokens
            && inputs.slots.len() == tokens
            && inputs.block_tables.len() == inputs.num_rows() * inputs.max_blocks;
        if !shaped || tokens > limits.max_tokens || inputs.samples.len() > limits.max_tokens {
            let (found, rows) = (format!("{tokens} tokens of {} rows", inputs.num_rows()), limits.max_rows);
            let expected = format!("arrays of one length, {} tokens and {rows} rows at most", limits.max_tokens);
            return Err(DeviceError::Unsupported { what: format!("step {}", inputs.step), found, expected });
        }
        let slots = cache.num_blocks * cache.spec.block_size;
        let positions = 2 * cache.spec.rope.cos.len() / cache.spec.head_dim;
        let bound = |what: &str, values: &[u32], bound: usize| match values.iter().find(|v| **v as usize >= bound) {
            Some(value) => Err(beyond(what, *value, bound)),
            None => Ok(()),
        };
        bound("slot", &inputs.slots, slots)?;
        bound("position", &inputs.positions, positions)?;
        bound("block", &inputs.block_tables, cache.num_blocks)?;
        for (index, starts) in inputs.row_starts.windows(2).enumerate() {
            let positions = &inputs.positions[starts[0] as usize..starts[1] as usize];
            if let Some(last) = positions.last()
                && inputs.block_table(index).len() * cache.spec.block_size <= *last as usize
            {
                return Err(beyond("position", *last, inputs.max_blocks * cache.spec.block_size));
            }
        }
        bound("token index", &inputs.logits, tokens)?;
        for SampleInput { row, token_index, .. } in &inputs.samples {
            bound("row", &[row.0], limits.max_rows)?;
            bound("token index", &[*token_index], tokens)?;
        }
        Ok(())
    }

    /// Where the workers' shares of the vocabulary start, from the head's own.
    fn learn_vocabulary(&mut self, own: Range<usize>) -> Result<(), DeviceError> {
        let tp = self.tensor_parallel();
        let Some(group) = &mut self.group else {
            self.vocab_offsets = vec![0, own.len()];
            return Ok(());
        };
        let ones: Vec<usize> = (0..=tp.size as usize).collect();
        let mut starts = vec![0.0; tp.size as usize];
        // Token ids are below 2^24, so f32 holds them.
        group.gather("learning the vocabulary", &[own.start as f32], &ones, &mut starts)?;
        self.vocab_offsets = starts.iter().map(|start| *start as usize).collect();
        self.vocab_offsets.push(self.config.limits.vocab_size);
        Ok(())
    }

    /// Takes a layer's weights into account, in the precision they are to have.
    fn hold_linear(&mut self, matrix: k::Matrix, is_head: bool) -> Linear {
        if matrix.weight_type() != k::WeightType::Bf16 {
            self.widest_weight = Some(KvType::F32);
        }
        let linear = Linear::new(&mut self.pool, self.isa, matrix, quant_type(self.precision, is_head));
        self.weights_bytes += linear.bytes() as u64;
        self.projection.fit(&linear);
        linear
    }
}

fn gate(activation: Activation) -> k::Gate {
    match activation {
        Activation::Silu => k::Gate::Silu,
        Activation::GeluTanh => k::Gate::GeluTanh,
    }
}

fn beyond(what: &str, found: u32, bound: usize) -> DeviceError {
    DeviceError::Unsupported { what: what.into(), found: found.to_string(), expected: format!("below {bound}") }
}

impl Device for CpuDevice {
    type Weight = CpuWeight;
    type Tensor = CpuTensor;

    fn tensor_parallel(&self) -> TensorParallel {
        self.group.as_ref().map_or(TensorParallel { rank: 0, size: 1 }, Group::tensor_parallel)
    }

    fn pipeline_stage(&self) -> PipelineStage {
        self.pipeline.as_ref().map_or(PipelineStage::WHOLE, |pipeline| pipeline.stage)
    }

    fn features(&self) -> &'static [Feature] {
        Self::FEATURES
    }

    fn load_linear(
        &mut self,
        role: LinearRole,
        parts: &[WeightSlice<'_>],
        bias: &[WeightSlice<'_>],
    ) -> Result<CpuWeight, DeviceError> {
        let matrix = weights::matrix(parts, bias)?;
        let linear = self.hold_linear(matrix, role == LinearRole::Head);
        if role == LinearRole::Head {
            self.learn_vocabulary(parts[0].rows.clone())?;
        }
        Ok(CpuWeight::Linear(linear))
    }

    fn load_embedding(&mut self, table: WeightSlice<'_>, first_token: u32) -> Result<CpuWeight, DeviceError> {
        let matrix = weights::matrix(&[table], &[])?;
        self.weights_bytes += matrix.bytes() as u64;
        Ok(CpuWeight::Matrix { matrix, first_row: first_token as usize })
    }

    fn tie_head(&mut self, embedding: &CpuWeight) -> Result<CpuWeight, DeviceError> {
        let (matrix, first_row) = embedding.matrix();
        let linear = self.hold_linear(matrix.clone(), true);
        if let Linear::Plain(matrix) = &linear {
            self.weights_bytes -= matrix.bytes() as u64; // Counted once for both.
        }
        self.learn_vocabulary(first_row..first_row + matrix.rows())?;
        Ok(CpuWeight::Linear(linear))
    }

    fn load_vector(&mut self, vector: WeightSlice<'_>) -> Result<CpuWeight, DeviceError> {
        let vector = weights::vector(&vector)?;
        self.weights_bytes += size_of_val(&*vector) as u64;
        Ok(CpuWeight::Vector(vector))
    }

    fn load_layer_norm(&mut self, weight: WeightSlice<'_>, bias: WeightSlice<'_>) -> Result<CpuWeight, DeviceError> {
        let (weight, bias) = (weights::vector(&weight)?, weights::vector(&bias)?);
        self.weights_bytes += (size_of_val(&*weight) + size_of_val(&*bias)) as u64;
        Ok(CpuWeight::LayerNorm { weight, bias })
    }

    fn load_positions(&mut self, table: WeightSlice<'_>) -> Result<CpuWeight, DeviceError> {
        let matrix = weights::matrix(&[table], &[])?;
        self.weights_bytes += matrix.bytes() as u64;
        Ok(CpuWeight::Matrix { matrix, first_row: 0 })
    }

    fn tensor(&mut self, cols: usize) -> Result<CpuTensor, DeviceError> {
        let data = Buffer::new(self.config.limits.max_tokens * cols);
        self.workspace_bytes += size_of_val(&*data) as u64;
        Ok(CpuTensor { data, cols })
    }

    fn memory_plan(&self, attention: &AttentionSpec) -> Result<MemoryPlan, DeviceError> {
        let block_bytes = estimate::block_bytes(attention, self.kv_type()) as u64;
        let workers = u64::from(self.tensor_parallel().size);
        let kv_bytes = self.config.kv_memory_bytes.unwrap_or_else(|| weights::available_memory() / 2 / workers);
        Ok(MemoryPlan {
            weights_bytes: self.weights_bytes,
            workspace_bytes: self.workspace_bytes + self.projection.bytes() as u64,
            block_bytes,
            max_blocks: (kv_bytes / block_bytes) as usize,
        })
    }

    fn allocate_cache(&mut self, attention: &AttentionSpec, num_blocks: usize) -> Result<(), DeviceError> {
        let (head_dim, block_size) = (attention.head_dim, attention.block_size);
        let unsupported = |what: &str, found: usize, expected: &str| {
            Err(DeviceError::Unsupported { what: what.into(), found: found.to_string(), expected: expected.into() })
        };
        if !head_dim.is_multiple_of(8) || head_dim > 256 {
            return unsupported("head dim", head_dim, "multiples of 8 up to 256");
        }
        if block_size == 0 || !block_size.is_multiple_of(16) {
            return unsupported("block size", block_size, "multiples of 16");
        }
        let needed_bytes = self.memory_plan(attention)?.block_bytes * num_blocks as u64;
        let free_bytes = weights::available_memory();
        if needed_bytes > free_bytes {
            let what = format!("{num_blocks} KV blocks");
            return Err(DeviceError::OutOfMemory { device: "cpu".into(), what, needed_bytes, free_bytes });
        }
        let (layers, kv_heads) = (attention.num_layers, attention.num_kv_heads);
        let kv = KvCache::new(self.kv_type(), layers, num_blocks, kv_heads, block_size, head_dim);
        self.cache = Some(Cache { kv, spec: attention.clone(), num_blocks });
        Ok(())
    }

    fn join_row(
        &mut self,
        row: RowId,
        tokens: &[TokenId],
        num_prompt_tokens: u32,
        sampling: &SamplingParams,
    ) -> Result<(), DeviceError> {
        let max_rows = self.config.limits.max_rows;
        let state = self.rows.get_mut(row.0 as usize).ok_or_else(|| beyond("row", row.0, max_rows))?;
        state.join(tokens, num_prompt_tokens, sampling);
        Ok(())
    }

    fn revise(&mut self, revised: &[RevisedRow], copied: &[CopiedBlock]) -> Result<(), DeviceError> {
        self.revise_rows(revised)?;
        self.copy_blocks(copied)
    }

    fn take_logits(&mut self) -> Vec<Vec<f32>> {
        std::mem::take(&mut self.reported)
    }

    fn run_step(
        &mut self,
        inputs: &StepInputs,
        forward: &mut dyn FnMut(&mut Self) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        self.inputs.clone_from(inputs);
        self.check_inputs()?;
        self.resolve_tokens()?;
        forward(self)
    }

    fn collect(&mut self, _wait: bool) -> Result<Option<Vec<SampledToken>>, DeviceError> {
        Ok(self.results.pop_front())
    }

    fn embed(&mut self, out: &mut CpuTensor, table: &CpuWeight) -> Result<(), DeviceError> {
        let (matrix, first_row) = table.matrix();
        let width = out.cols;
        let out = out.rows_mut(self.token_ids.len());
        for (out, token) in out.chunks_exact_mut(width).zip(&self.token_ids) {
            match (*token as usize).checked_sub(first_row).filter(|row| *row < matrix.rows()) {
                Some(row) => matrix.read_row(row, out),
                None => out.fill(0.0),
            }
        }
        let Some(group) = &mut self.group else { return Ok(()) };
        let mine = out.to_vec();
        group.exchange_rows("summing embeddings", &mine, width, |rows, parts| {
            let out = &mut out[rows.start * width..rows.end * width];
            for (index, out) in out.iter_mut().enumerate() {
                *out = parts.iter().map(|part| part[index]).sum();
            }
        })
    }

    fn rms_norm(
        &mut self,
        out: &mut CpuTensor,
        x: &CpuTensor,
        weight: &CpuWeight,
        eps: f32,
    ) -> Result<(), DeviceError> {
        let tokens = self.num_tokens();
        k::norm(&mut self.pool, out.rows_mut(tokens), x.rows(tokens), weight.norm(), eps);
        Ok(())
    }

    fn layer_norm(
        &mut self,
        out: &mut CpuTensor,
        x: &CpuTensor,
        weight: &CpuWeight,
        eps: f32,
    ) -> Result<(), DeviceError> {
        self.rms_norm(out, x, weight, eps) // The kind is the weight's.
    }

    fn add_positions(&mut self, out: &mut CpuTensor, table: &CpuWeight) -> Result<(), DeviceError> {
        let (matrix, _) = table.matrix();
        let width = out.cols;
        let mut row = vec![0.0; width];
        for (out, position) in out.data.chunks_exact_mut(width).zip(&self.inputs.positions) {
            if *position as usize >= matrix.rows() {
                return Err(beyond("position", *position, matrix.rows()));
            }
            matrix.read_row(*position as usize, &mut row);
            out.iter_mut().zip(&row).for_each(|(out, row)| *out += row);
        }
        Ok(())
    }

    fn linear(&mut self, out: &mut CpuTensor, x: &CpuTensor, weight: &CpuWeight) -> Result<(), DeviceError> {
        let tokens = self.num_tokens();
        let (out, x) = (out.rows_mut(tokens), x.rows(tokens));
        self.projection.project(&mut self.pool, self.isa, out, x, tokens, weight.linear());
        Ok(())
    }

    fn gated_linear(
        &mut self,
        out: &mut CpuTensor,
        scratch: &mut CpuTensor,
        x: &CpuTensor,
        weight: &CpuWeight,
        activation: Activation,
    ) -> Result<(), DeviceError> {
        let tokens = self.num_tokens();
        let outs = [out.rows_mut(tokens), scratch.rows_mut(tokens)];
        let by = (weight.linear(), gate(activation));
        self.projection.project_gated(&mut self.pool, self.isa, outs, x.rows(tokens), tokens, by);
        Ok(())
    }

    fn activated_linear(
        &mut self,
        out: &mut CpuTensor,
        x: &CpuTensor,
        weight: &CpuWeight,
        activation: Activation,
    ) -> Result<(), DeviceError> {
        self.linear(out, x, weight)?;
        let tokens = self.num_tokens();
        k::activate(&mut self.pool, out.rows_mut(tokens), gate(activation));
        Ok(())
    }

    fn head_norm(
        &mut self,
        qkv: &mut CpuTensor,
        q_norm: &CpuWeight,
        k_norm: &CpuWeight,
        eps: f32,
    ) -> Result<(), DeviceError> {
        let spec = &self.cache.as_ref().expect("`allocate_cache` is called before the first step").spec;
        let (heads, tokens, stride) = ([spec.num_heads, spec.num_kv_heads], self.num_tokens(), qkv.cols);
        let weights = [q_norm.vector(), k_norm.vector()];
        k::head_norm(&mut self.pool, qkv.rows_mut(tokens), stride, heads, weights, eps);
        Ok(())
    }

    fn rope_and_cache(&mut self, qkv: &mut CpuTensor, layer: usize) -> Result<(), DeviceError> {
        let Cache { kv, spec, .. } = self.cache.as_mut().expect("`allocate_cache` is called before the first step");
        let tokens = k::Rotation {
            stride: qkv.cols,
            num_heads: spec.num_heads,
            positions: &self.inputs.positions,
            slots: &self.inputs.slots,
            cos: &spec.rope.cos,
            sin: &spec.rope.sin,
        };
        kv.rotate_and_write(&mut self.pool, layer, &mut qkv.data, &tokens);
        Ok(())
    }

    fn attention(&mut self, out: &mut CpuTensor, qkv: &CpuTensor, layer: usize) -> Result<(), DeviceError> {
        let inputs = &self.inputs;
        let Cache { kv, spec, .. } = self.cache.as_ref().expect("`allocate_cache` is called before the first step");
        let row = |(index, starts): (usize, &[u32])| k::AttentionRow {
            first_token: starts[0] as usize,
            num_tokens: (starts[1] - starts[0]) as usize,
            first_position: inputs.positions[starts[0] as usize] as usize,
            block_table: inputs.block_table(index),
        };
        let rows: Vec<_> = inputs.row_starts.windows(2).enumerate().filter(|(_, s)| s[0] < s[1]).map(row).collect();
        let attention = k::Attention {
            num_heads: spec.num_heads,
            scale: spec.scale,
            window: spec.sliding_window,
            q_stride: qkv.cols,
            alibi_slopes: &spec.alibi_slopes,
            isa: self.isa,
        };
        attention.run(&mut self.pool, &mut out.data, &qkv.data, &rows, kv, layer);
        Ok(())
    }

    fn reduce_add_norm(
        &mut self,
        out: &mut CpuTensor,
        residual: &mut CpuTensor,
        partial: &CpuTensor,
        weight: &CpuWeight,
        eps: f32,
    ) -> Result<(), DeviceError> {
        let (tokens, width, norm) = (self.num_tokens(), out.cols, weight.norm());
        let (out, residual, partial) = (out.rows_mut(tokens), residual.rows_mut(tokens), partial.rows(tokens));
        let pool = &mut self.pool;
        let Some(group) = &mut self.group else {
            k::add_norm(pool, out, residual, &[partial], norm, eps);
            return Ok(());
        };
        group.exchange_rows("summing partial products", partial, width, |rows, parts| {
            let range = rows.start * width..rows.end * width;
            k::add_norm(pool, &mut out[range.clone()], &mut residual[range], parts, norm, eps);
        })
    }

    fn sample(&mut self, x: &CpuTensor, head: &CpuWeight) -> Result<(), DeviceError> {
        self.report_logits(x, head.linear())?;
        let tokens = self.choose_tokens(x, head.linear())?;
        self.append(&tokens);
        self.results.push_back(tokens);
        Ok(())
    }

    fn take_over(&mut self, out: &mut CpuTensor) -> Result<(), DeviceError> {
        let (step, tokens) = (self.inputs.step, self.num_tokens());
        let pipeline = self.pipeline.as_mut().expect("only a stage of a pipeline takes over");
        pipeline.receive(step, out.rows_mut(tokens))
    }

    fn hand_on(&mut self, x: &CpuTensor) -> Result<(), DeviceError> {
        let (step, tokens) = (self.inputs.step, self.num_tokens());
        self.pipeline.as_mut().expect("only a stage of a pipeline hands on").send(step, x.rows(tokens))?;
        self.results.push_back(Vec::new());
        Ok(())
    }
}

impl CpuDevice {
    /// KV blocks as exact as the weights: bf16 beside bf16 weights, else f32.
    fn kv_type(&self) -> KvType {
        self.widest_weight.unwrap_or(KvType::Bf16)
    }
}
