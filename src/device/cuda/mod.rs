//! The CUDA device: one GPU of a worker, with NVIDIA's libraries loaded at run time.
//!
//! [`CudaDevice`] queues all ops on one stream and waits only for completed steps. The inputs of a step are uploaded in
//! one copy, tokens stay on the GPU, and results are read from pinned memory after the step's event. Decode steps are
//! recorded as CUDA graphs, one for each number of rows in a list of buckets.

mod adapters;
mod attention;
mod cache;
mod chain;
mod config;
mod decoder_ops;
mod device_impl;
mod drafters;
mod expert_buffers;
mod expert_sums;
mod experts;
mod graphs;
mod group;
mod guess_buffers;
mod guesses;
mod head_copy;
mod host_tier;
pub mod invariant;
mod latent;
mod load;
mod logits;
mod masked;
mod memory;
mod nccl;
mod nccl_rate;
mod ops;
mod packed;
mod pipeline;
mod queued;
mod recurrent;
mod rows;
mod sampling;
mod sleep;
mod step;
mod verify;
mod weights;

use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::Arc;

use ::ops::{DeviceError, DrafterKind, Feature};
use engine::{RowId, TokenId};
use kernels::cuda::decode_attention::RotatedNorms;
use kernels::cuda::library_gemm::{FirstUse, LibraryGemm};
use kernels::cuda::{CudaError, DeviceBuffer, Event, Gpu, PinnedBuffer, Queue, Span};

use self::ops::RoundedRows;
use adapters::Adapters;
pub use adapters::CudaProduct;
pub(crate) use adapters::{adapter_bytes, check_slots};
use cache::Cache;
use chain::Chain;
pub use config::CudaConfig;
use expert_buffers::ExpertBuffers;
pub(crate) use expert_buffers::ExpertSizes;
use expert_sums::{RowGate, Unsummed};
use experts::ExpertLayer;
use graphs::Graphs;
pub(crate) use graphs::largest_bucket;
use group::Group;
use guess_buffers::Guesses;
use head_copy::HeadCopy;
pub(crate) use head_copy::copy_format;
use host_tier::HostTier;
pub use host_tier::buffer_bytes as host_buffer_bytes;
pub(crate) use invariant::division;
use latent::LatentLayer;
pub(crate) use latent::check_latent_shape;
use load::Loader;
use logits::Reports;
use masked::MaskedStep;
use memory::Workspace;
pub(crate) use memory::{Estimate, guess_bytes, tensor_rows};
pub use nccl_rate::{NcclRate, nccl_rate};
use packed::Packed;
pub(crate) use packed::{ProductScratch, expert_formats, fp8_expert_cols, has_fp8_inputs, input_order, packed_format};
use pipeline::Pipeline;
use queued::{Current, InFlight};
pub(crate) use recurrent::RecurrentKernel;
use recurrent::{RecurrentLayer, States};
use rows::Rows;
pub(crate) use weights::gate_order;

pub use kernels::cuda::client_memory::ClientMemory;

/// Number of GPUs that this process can use; 0 without a driver.
///
/// # Errors
/// Returns why a driver that is there cannot be used, and what to do.
pub fn num_gpus() -> Result<usize, String> {
    Gpu::count().map_err(|error| error.to_string())
}

/// Name and free bytes of a GPU that this process has not opened yet. The context that is opened for this query uses
/// part of the memory.
///
/// # Errors
/// Returns an error without a driver or that GPU.
pub fn free_memory(ordinal: usize) -> Result<(String, u64), DeviceError> {
    let gpu = Gpu::open(ordinal).map_err(device_error)?;
    let (free, _) = gpu.memory().map_err(device_error)?;
    Ok((format!("GPU {ordinal} {}", gpu.name()), free as u64))
}

/// A matrix or vector on the GPU.
#[derive(Debug, Clone, Copy)]
pub struct CudaWeight {
    values: Span,
    bias: Span,
    rows: usize,
    cols: usize,
    /// For an embedding: the token of its first row.
    first_token: u32,
    /// For an output head: the number of tokens, of which a group of workers divides the rows.
    vocab: usize,
    /// For gate/up: number of alternating columns of gate and up.
    group: usize,
    /// Whether products with it are partial sums, which are summed by a norm.
    is_partial: bool,
    /// If set, `values` are codes.
    packed: Option<Packed>,
    /// For a router: its experts.
    experts: Option<ExpertLayer>,
    /// For a layer with a recurrent state: its weights besides its projections.
    recurrent: Option<RecurrentLayer>,
    /// For a layer with latent vectors: what it has besides its projections and `values`.
    latent: Option<LatentLayer>,
    /// For an output head: a copy for guesses.
    copy: Option<HeadCopy>,
    /// For a drafter's own head: the columns of tokens, as `kernels::cuda::guess` takes them.
    token_columns: Option<Span>,
}

impl CudaWeight {
    /// A matrix `[rows, cols]` in bf16 without a bias.
    fn matrix(values: Span, rows: usize, cols: usize) -> Self {
        let (bias, packed, experts, recurrent, latent) = (Span::NULL, None, None, None, None);
        Self {
            values,
            bias,
            rows,
            cols,
            first_token: 0,
            vocab: 0,
            group: 0,
            is_partial: false,
            packed,
            experts,
            recurrent,
            latent,
            copy: None,
            token_columns: None,
        }
    }
}

/// An activation buffer `[max_tokens, cols]` bf16.
#[derive(Debug, Clone, Copy)]
pub struct CudaTensor {
    values: Span,
    cols: usize,
}

/// One GPU of a worker.
///
/// Fields are dropped in this order: graphs before what they use, buffers last.
pub struct CudaDevice {
    graphs: Graphs,
    loader: RefCell<Loader>,
    in_flight: VecDeque<InFlight>,
    spare_events: Vec<Event>,
    current: Option<Current>,
    group: Group,
    pipeline: Pipeline,
    gemm: LibraryGemm,
    chain: Chain,
    /// Whether the kernels for few rows support every matrix loaded so far.
    all_skinny: bool,
    product_scratch: ProductScratch,
    adapters: Adapters,
    /// Whether the current step comes from [`verify::split_into_decodes`], whose rows read keys and values that other rows write, or is
    /// a pass of guesses, whose inputs the pass before it has made.
    is_split: bool,
    /// The first row of the current step whose positions are decodes of their own, if there is room for them.
    first_short: Option<usize>,
    /// The drafter that was loaded.
    drafter: Option<DrafterKind>,
    /// Tokens of the output heads that are loaded.
    loaded_vocab: usize,
    /// `None` without a drafter.
    guesses: Option<Guesses>,
    /// Guesses of the step that was collected last.
    taken_guesses: Vec<(RowId, Vec<TokenId>)>,
    /// Whether a layer norm was loaded.
    has_layer_norms: bool,
    /// Caps the logits of the current step.
    logit_cap: Option<f32>,
    /// Number of rows of the table of learned positions; the maximum value if there is none.
    num_positions: usize,
    step_block: DeviceBuffer,
    pinned_inputs: Vec<PinnedBuffer>,
    next_slot: usize,
    cache: Option<Cache>,
    states: States,
    /// Slots in host memory, if there are any.
    host: Option<HostTier>,
    expert_sizes: ExpertSizes,
    /// `None` if the model has no experts.
    expert_buffers: Option<ExpertBuffers>,
    unsummed: Option<Unsummed>,
    row_gate: Option<RowGate>,
    /// Rows in e4m3 of the op before, if it was a norm.
    rounded: Option<RoundedRows>,
    /// Norms of q and k that the attention behind them applies.
    rotated_norms: Option<RotatedNorms>,
    workspace: Option<Workspace>,
    rows: Rows,
    reports: Reports,
    masked: MaskedStep,
    /// Logits of the step that was collected last.
    taken_logits: Vec<Vec<f32>>,
    /// Width of the hidden state; with a drafter, of the wider one.
    hidden: usize,
    /// Widths of the hidden states that are loaded.
    widths: Vec<usize>,
    weights: Vec<DeviceBuffer>,
    /// While the device sleeps: those weights that were released, each with its index.
    saved: Vec<(usize, PinnedBuffer)>,
    tensors: Vec<DeviceBuffer>,
    config: CudaConfig,
    queue: Arc<Queue>,
    gpu: Arc<Gpu>,
}

/// Converts an error of the kernels crate.
fn device_error(error: CudaError) -> DeviceError {
    match error {
        CudaError::NoGpu { reason } => DeviceError::Unavailable { device: "cuda".into(), reason },
        CudaError::OutOfMemory { bytes, free, .. } => DeviceError::OutOfMemory {
            device: "cuda".into(),
            what: "a buffer".into(),
            needed_bytes: bytes as u64,
            free_bytes: free as u64,
        },
        CudaError::Driver { call, name, text, .. } => DeviceError::Call { call, reason: format!("{name} ({text})") },
        CudaError::Library { call, reason } => DeviceError::Call { call, reason },
        other => DeviceError::Call { call: "a CUDA op".into(), reason: other.to_string() },
    }
}

impl CudaDevice {
    /// Optional ops that this device lacks.
    pub(crate) const LACKS: &[Feature] =
        &[Feature::DoubledRates, Feature::UnnormedMamba2, Feature::RecurrentBeside, Feature::KimiDelta];

    /// Opens the GPU and joins the group. From now on only the calling thread may use the device.
    ///
    /// # Errors
    /// Returns an error if the driver, the GPU or a library is missing, memory does not suffice, or another worker does
    /// not arrive.
    pub fn new(config: CudaConfig) -> Result<Self, DeviceError> {
        let gpu = Gpu::open(config.ordinal).map_err(device_error)?;
        let queue = Arc::new(Queue::new(&gpu).map_err(device_error)?);
        let mut gemm = LibraryGemm::new(&gpu, &config.library_dirs, config.cache_dir.as_ref()).map_err(device_error)?;
        // Requests never wait for a measurement: products are measured while no step waits, and when a graph is
        // recorded.
        gemm.set_first_use(FirstUse::Guess);
        // Before the first thread starts: the group sets environment variables for NCCL.
        let group = Group::new(&config, &gpu)?;
        let pipeline = Pipeline::new(&config, &group, &gpu, &queue)?;
        let loader = Loader::new(&gpu).map_err(device_error)?;
        let rows = Rows::new(&gpu, config.limits).map_err(device_error)?;
        invariant::check(&config, &gpu)?;
        Ok(Self {
            graphs: Graphs::new(config.use_graphs, config.limits.max_rows),
            loader: RefCell::new(loader),
            in_flight: VecDeque::new(),
            spare_events: Vec::new(),
            current: None,
            group,
            pipeline,
            gemm,
            chain: Chain::default(),
            all_skinny: true,
            product_scratch: ProductScratch::default(),
            adapters: Adapters::new(),
            is_split: false,
            first_short: None,
            drafter: None,
            loaded_vocab: config.limits.vocab_size,
            guesses: None,
            taken_guesses: Vec::new(),
            has_layer_norms: false,
            logit_cap: None,
            num_positions: usize::MAX,
            step_block: DeviceBuffer::new(&gpu, 0).map_err(device_error)?,
            pinned_inputs: Vec::new(),
            next_slot: 0,
            cache: None,
            states: States::default(),
            host: None,
            expert_sizes: ExpertSizes::default(),
            expert_buffers: None,
            unsummed: None,
            row_gate: None,
            rounded: None,
            rotated_norms: None,
            workspace: None,
            rows,
            reports: Reports::default(),
            masked: MaskedStep::default(),
            taken_logits: Vec::new(),
            hidden: 0,
            widths: Vec::new(),
            weights: Vec::new(),
            saved: Vec::new(),
            tensors: Vec::new(),
            config,
            queue,
            gpu,
        })
    }

    /// Bytes of the GPU's memory that no process uses.
    ///
    /// # Errors
    /// When the driver does not answer.
    pub fn free_bytes(&self) -> Result<u64, DeviceError> {
        let (free, _) = self.gpu.memory().map_err(device_error)?;
        Ok(free as u64)
    }

    /// Changes the host memory for what is evicted, before the device's memory is planned.
    pub fn set_host_memory_bytes(&mut self, bytes: u64) {
        self.config.host_memory_bytes = bytes;
    }

    /// The GPU's name and compute capability, for logs.
    pub fn describe(&self) -> String {
        let (major, minor) = self.gpu.capability();
        format!("{} (compute capability {major}.{minor})", self.gpu.name())
    }

    fn check_row(&self, call: &str, row: RowId) -> Result<(), DeviceError> {
        match row.0 as usize {
            index if index < self.config.limits.max_rows => Ok(()),
            index => Err(DeviceError::Call {
                call: call.into(),
                reason: format!("row {index} of {}", self.config.limits.max_rows),
            }),
        }
    }

    fn current(&self) -> &Current {
        self.current.as_ref().expect("ops run inside a step")
    }
}
