//! The CPU device. Weights are bf16, f16 or f32 in the mapped checkpoint, copied if that is faster, or quantized.
//! Activations are f32. One thread pool computes.
//!
//! The tokens of a row depend only on that row, bit for bit: kernels sum in one order whatever else is in the step
//! (`kernels::cpu`), the group adds parts in rank order, and random draws are functions of seed and position.
//! [`Device::run_step`] returns after the step is complete.

mod adapters;
mod choose;
mod device_impl;
mod embeddings;
mod estimate;
mod experts;
mod group;
mod guesses;
mod handshake;
mod host_memory;
mod host_tier;
mod latent;
mod linear;
mod norms;
mod peers;
mod pipeline;
mod recurrent;
mod rows;
mod sampler;
mod sleep;
mod statistics;
mod streams;
mod weights;

use std::collections::VecDeque;
use std::ops::Range;

use engine::SampledToken;
use kernels::cpu::{self as k, Buffer, Isa, KvType, Pool};
use ops::{Activation, AttentionSpec, Device, DeviceError, SampleInput, StepInputs, StepLimits, TOKEN_ON_DEVICE};

use adapters::Adapters;
pub(crate) use estimate::CpuEstimate;
pub(crate) use experts::ExpertBuffers;
use group::Group;
pub use group::GroupConfig;
use guesses::Guesses;
pub use host_memory::available_memory;
use host_tier::HostTier;
pub use kernels::cpu::allowed_cores;
use latent::KvBuffer;
use linear::Inputs;
pub use linear::Linear;
use linear::quant_type;
pub(crate) use linear::{Widest, quantized_bytes};
pub use peers::Peers;
use pipeline::Pipeline;
use recurrent::States;
use rows::Row;
pub use settings::WeightPrecision;
use sleep::Asleep;
pub use statistics::{InputStatistics, LayerInputs, MAX_SAMPLES};
use streams::StreamKind;
pub use weights::CpuWeight;

/// Settings of a [`CpuDevice`].
#[derive(Debug, Clone)]
pub struct CpuConfig {
    /// Number of threads that compute, including the caller's: the cores of the node divided by its workers.
    pub threads: usize,
    /// Limits of every step.
    pub limits: StepLimits,
    /// Bytes for KV blocks; `None` takes half of the system's available memory, divided by the workers of the group.
    pub kv_memory_bytes: Option<u64>,
    /// The tensor-parallel group, if it has more than one worker.
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
    states: States,
    asleep: Option<Asleep>,
    host: HostTier,
    inputs: StepInputs,
    token_ids: Vec<u32>, // [T] tokens of the current step, with those from the device filled in
    projection: Inputs,  // of the current linear layer
    precision: WeightPrecision,
    adapters: Adapters,
    sampled: Buffer<f32>,      // [S, E]
    local_logits: Buffer<f32>, // [S, V of this worker], if the vocabulary is split
    logits: Buffer<f32>,       // [S, V], at most as many as there are rows
    unchosen: Vec<f32>,        // [S, V] of a step whose tokens wait for masks
    reported: Vec<Vec<f32>>,   // [V] of each position that the current step reports
    collected: Vec<Vec<f32>>,  // the same of the step that was collected last
    logit_cap: Option<f32>,    // of the current step
    branch: Buffer<f32>,       // [T, E], the norm of a branch
    expert_buffers: ExpertBuffers,
    results: VecDeque<(Vec<SampledToken>, Vec<Vec<f32>>)>, // of each step that is not collected, with the logits that it reports
    guesses: Guesses,
    weights_bytes: u64,
    workspace_bytes: u64,
    input_statistics: Option<InputStatistics>,
    loads_drafter: bool,           // whether weights that are loaded now belong to one
    widest_weight: Option<KvType>, // type that KV blocks need to be as exact as the weights
}

/// KV blocks and the parameters of attention.
struct Cache {
    buffers: Vec<KvBuffer>,
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
    /// Starts the threads and joins the group.
    ///
    /// # Errors
    /// Returns an error if the group's shared memory cannot be opened, or if another worker does not arrive in time.
    pub fn new(config: CpuConfig) -> Result<Self, DeviceError> {
        let group = config.group.clone().map(Group::join).transpose()?;
        Ok(Self::with_group(config, group))
    }

    /// Like [`CpuDevice::new`], for a model whose workers are on several nodes or in several pipeline stages. `hidden`
    /// is the width of the activations sent between stages.
    ///
    /// # Errors
    /// Returns an error in the cases of `new`, or if another node cannot be reached.
    pub fn new_distributed(config: CpuConfig, peers: &Peers, hidden: usize) -> Result<Self, DeviceError> {
        let mut streams = peers.connect()?;
        let (first, nodes) = (peers.stage() * peers.tp_size(), peers.stage_nodes());
        let group = config.group.clone().map(|group| {
            let place = group.tensor_parallel.rank as usize;
            let is_first = nodes[..place].iter().all(|&node| node != nodes[place]);
            // One region for each node and stage. The name contains both, because nodes may share their memory.
            let name = format!("{}_{}_{}", group.name, peers.stage(), nodes[place]);
            Group::join_node(GroupConfig { name, ..group }, is_first, streams.take(StreamKind::Parts), first)
        });
        let group = group.transpose()?;
        let max_floats = config.limits.max_tokens * hidden;
        let pipeline = Pipeline::join(peers, streams.take(StreamKind::Hidden), max_floats)?;
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
            states: States::default(),
            asleep: None,
            host: HostTier::default(),
            inputs: StepInputs::default(),
            token_ids: Vec::with_capacity(limits.max_tokens),
            projection: Inputs::new(limits.max_tokens),
            precision: WeightPrecision::default(),
            adapters: Adapters::default(),
            sampled: Buffer::new(0),
            local_logits: Buffer::new(0),
            workspace_bytes: size_of_val(&*logits) as u64,
            logits,
            unchosen: Vec::new(),
            logit_cap: None,
            branch: Buffer::new(0),
            expert_buffers: ExpertBuffers::default(),
            reported: Vec::new(),
            collected: Vec::new(),
            results: VecDeque::new(),
            guesses: Guesses::default(),
            weights_bytes: 0,
            input_statistics: None,
            loads_drafter: false,
            widest_weight: None,
            config,
        }
    }

    /// Pins each thread to its own core, starting with core `first` of those that this process may use. The caller is
    /// one of the threads, and threads that it starts later inherit its core.
    ///
    /// # Errors
    /// Returns an error if there are too few cores, or if the system refuses.
    pub fn pin_threads(&mut self, first: usize) -> Result<(), DeviceError> {
        let (cores, threads) = (k::allowed_cores(), self.pool.threads());
        let call = |reason: String| DeviceError::Call { call: format!("keeping {threads} threads on cores"), reason };
        let own = cores.get(first..first + threads);
        let own =
            own.ok_or_else(|| call(format!("cores {first} and on are wanted of {} that may be used", cores.len())))?;
        self.pool.pin(own).map_err(|error| call(error.to_string()))
    }

    /// Uses a smaller instruction set than the processor has, for comparisons.
    pub fn set_isa(&mut self, isa: Isa) {
        self.isa = isa.min(Isa::detect());
    }

    /// Sets the precision of linear layers' weights that are loaded from now on.
    pub fn set_weight_precision(&mut self, precision: WeightPrecision) {
        self.precision = precision;
    }

    fn num_tokens(&self) -> usize {
        self.token_ids.len()
    }

    fn cache(&self) -> &Cache {
        self.cache.as_ref().expect("`allocate_cache` is called before the first step")
    }

    /// Collects the step's tokens; those that are known only to this device are filled in.
    fn resolve_tokens(&mut self) -> Result<(), DeviceError> {
        let inputs = &self.inputs;
        self.token_ids.clear();
        for (index, row) in inputs.rows.iter().enumerate() {
            let known =
                self.rows.get(row.0 as usize).ok_or_else(|| out_of_range("row", row.0, self.config.limits.max_rows))?;
            for token in &inputs.token_ids[inputs.row_starts[index] as usize..inputs.row_starts[index + 1] as usize] {
                let last = || known.tokens().last().copied().unwrap_or(u32::MAX);
                let token = if *token == TOKEN_ON_DEVICE { last() } else { *token };
                if token as usize >= self.config.limits.vocab_size {
                    return Err(out_of_range("token", token, self.config.limits.vocab_size));
                }
                self.token_ids.push(token);
            }
        }
        Ok(())
    }

    /// Refuses a step with an index outside a buffer.
    fn check_inputs(&self) -> Result<(), DeviceError> {
        let (inputs, limits, cache) = (&self.inputs, &self.config.limits, self.cache());
        let tokens = inputs.num_tokens();
        let shaped = inputs.row_starts.len() == inputs.num_rows() + 1
            && inputs.row_starts[0] == 0
            && inputs.row_starts.is_sorted()
            && inputs.row_starts[inputs.num_rows()] as usize == tokens
            && inputs.positions.len() == tokens
            && inputs.slots.len() == cache.spec.kv_windows.len() * tokens
            && inputs.block_tables.len() == cache.spec.kv_windows.len() * inputs.num_rows() * inputs.max_blocks;
        if !shaped || tokens > limits.max_tokens || inputs.samples.len() > limits.max_tokens {
            let (found, rows) = (format!("{tokens} tokens of {} rows", inputs.num_rows()), limits.max_rows);
            let expected = format!("arrays of one length, {} tokens and {rows} rows at most", limits.max_tokens);
            return Err(DeviceError::Unsupported { what: format!("step {}", inputs.step), found, expected });
        }
        let slots = cache.num_blocks * cache.spec.block_size;
        let positions = cache.spec.max_positions;
        let bound = |what: &str, values: &[u32], bound: usize| match values.iter().find(|v| **v as usize >= bound) {
            Some(value) => Err(out_of_range(what, *value, bound)),
            None => Ok(()),
        };
        bound("slot", &inputs.slots, slots)?;
        bound("position", &inputs.positions, positions)?;
        bound("block", &inputs.block_tables, cache.num_blocks)?;
        for starts in inputs.row_starts.windows(2) {
            let positions = &inputs.positions[starts[0] as usize..starts[1] as usize];
            if let Some(last) = positions.last()
                && inputs.max_blocks * cache.spec.block_size <= *last as usize
            {
                return Err(out_of_range("position", *last, inputs.max_blocks * cache.spec.block_size));
            }
        }
        self.states.check(inputs)?;
        bound("token index", &inputs.logits, tokens)?;
        for SampleInput { row, token_index, .. } in &inputs.samples {
            bound("row", &[row.0], limits.max_rows)?;
            bound("token index", &[*token_index], tokens)?;
        }
        Ok(())
    }

    /// Exchanges the starts of the workers' shares of a head's vocabulary, and its end.
    fn exchange_vocabulary_offsets(&mut self, own: Range<usize>) -> Result<Vec<usize>, DeviceError> {
        let size = self.tensor_parallel().size as usize;
        let Some(group) = &mut self.group else { return Ok(vec![0, own.len()]) };
        let pairs: Vec<usize> = (0..=size).map(|rank| 2 * rank).collect();
        let mut shares = vec![0.0; 2 * size];
        // Token ids are below 2^24, so f32 holds them.
        group.gather("learning the vocabulary", &[own.start as f32, own.end as f32], &pairs, &mut shares)?;
        let starts = shares.iter().step_by(2).chain(shares.last());
        Ok(starts.map(|start| *start as usize).collect())
    }

    /// Registers a layer's weights, in the precision that was set.
    fn add_linear(&mut self, matrix: k::Matrix, is_head: bool) -> Linear {
        if matrix.weight_type() != k::WeightType::Bf16 && !self.loads_drafter {
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
        Activation::Gelu => k::Gate::Gelu,
        Activation::Relu => k::Gate::Relu,
        Activation::ReluSquared => k::Gate::ReluSquared,
        Activation::Xielu { positive, negative, slope, edge } => {
            k::Gate::Xielu(k::Xielu { positive, negative, slope, edge })
        }
        Activation::ClampedSwiglu { alpha, limit } => k::Gate::Clamped { alpha, limit },
    }
}

fn out_of_range(what: &str, found: u32, bound: usize) -> DeviceError {
    DeviceError::Unsupported { what: what.into(), found: found.to_string(), expected: format!("below {bound}") }
}

impl CpuDevice {
    /// The type of KV blocks: codes, or as exact as the weights, so bf16 with bf16 weights, else f32.
    fn kv_type(&self, attention: &AttentionSpec) -> KvType {
        estimate::kv_type(attention.kv_elements, self.widest_weight.unwrap_or(KvType::Bf16))
    }
}
