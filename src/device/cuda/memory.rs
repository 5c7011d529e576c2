//! Device memory except weights, activations and KV blocks. It is allocated once, before the first step.

use std::sync::Arc;

use engine::{RowId, SampledToken, TokenId};
use kernels::cuda::decode_division::{DecodeWorkspace, Division};
use kernels::cuda::expand_blocks::{Contexts, ExpandedBlocks};
use kernels::cuda::library_gemm::LibraryGemm;
use kernels::cuda::owner_norm::MIN_SHARED_BYTES;
use kernels::cuda::paged_attention::MAX_HEAD_DIM;
use kernels::cuda::prefill_attention;
use kernels::cuda::rope_cache::HeadShape;
use kernels::cuda::sample::{ARGMAX_CHUNKS, Outputs, Work, partials_bytes};
use kernels::cuda::{CudaError, DeviceBuffer, Gpu, PinnedBuffer, Span};
use kernels::kv_codes::KvCodes;
use ops::{AttentionSpec, DeviceError, DrafterKind, LayerAttention, MemoryPlan, PipelineStage, StepLimits};

use super::cache::{Cache, shapes, table_shape};
use super::chain::{self, Chain};
use super::expert_buffers::{ExpertBuffers, ExpertSizes};
use super::graphs::largest_bucket;
use super::group::peer_bytes;
use super::guess_buffers::Guesses;
use super::host_tier::buffer_bytes;
use super::invariant::division;
use super::latent::LatentBuffers;
use super::packed::ProductScratch;
use super::rows::{MAX_TOP, Reported, Rows};
use super::step::{AdapterBounds, Layout, StepBounds};
use super::{CudaConfig, CudaDevice, device_error};
use crate::kv_elements::kv_codes;

/// Left free for CUDA graphs and the driver.
const RESERVE_BYTES: usize = 512 << 20;
/// Estimate of NCCL's memory for a group on one node.
const NCCL_BYTES: usize = 384 << 20;
/// Scratch memory for blocks that are expanded from codes, at most: 256 MiB of blocks, which are 65 536 positions of 8 KV heads of 128,
/// and 1 MiB for their places. A step with more is not expanded.
const MAX_EXPANDED_BYTES: usize = 257 << 20;

/// Buffers for sampling and its results.
pub(crate) struct Workspace {
    /// `[S, E]` bf16, the rows of the positions that sample.
    pub(crate) gathered: DeviceBuffer,
    /// `[group, S, share]` f32.
    pub(crate) logits: DeviceBuffer,
    /// `[S, V]` f32.
    pub(crate) scratch: DeviceBuffer,
    /// `[group, S, ARGMAX_CHUNKS]` u64.
    pub(crate) pairs: DeviceBuffer,
    /// Partial results of `S` samples.
    partials: DeviceBuffer,
    /// `[group, T, 2]` f32: sums of squares of q and k.
    pub(crate) squares: DeviceBuffer,
    /// [`ProductScratch`]; and, during attention, blocks that are expanded from codes.
    pub(crate) products: DeviceBuffer,
    outputs: PinnedBuffer,
    /// Number of rows of each of these buffers; samples of a step are processed in parts of this size.
    pub(crate) max_rows: usize,
    max_samples: usize,
    /// Number of tokens in a worker's share of the vocabulary.
    pub(crate) share: usize,
}

/// Number of tokens in every worker's share but the last; the same rule as in `models`.
pub(super) fn vocabulary_share(vocab: usize, group: usize) -> usize {
    vocab.div_ceil(group).next_multiple_of(8)
}

impl Workspace {
    fn sizes(limits: &StepLimits, hidden: usize, group: usize) -> [usize; 6] {
        let samples = padded_rows(limits);
        let share = vocabulary_share(limits.vocab_size, group);
        [
            samples * hidden * 2,
            group * samples * share * 4,
            samples * limits.vocab_size * 4,
            group * samples * ARGMAX_CHUNKS * 8,
            partials_bytes(samples),
            group * limits.max_tokens.max(samples) * 2 * 4,
        ]
    }

    fn new(
        gpu: &Arc<Gpu>,
        config: &CudaConfig,
        hidden: usize,
        group: usize,
        product_bytes: usize,
    ) -> Result<Self, CudaError> {
        let limits = &config.limits;
        let [gathered, logits, scratch, pairs, partials, squares] = Self::sizes(limits, hidden, group);
        let max_rows = padded_rows(limits);
        let max_samples = config.max_samples().max(max_rows);
        let releasable = |bytes: usize| DeviceBuffer::with_residence(gpu, bytes, config.activation_residence());
        Ok(Self {
            gathered: releasable(gathered)?,
            logits: releasable(logits)?,
            scratch: releasable(scratch)?,
            pairs: DeviceBuffer::new(gpu, pairs)?,
            partials: DeviceBuffer::new(gpu, partials)?,
            squares: DeviceBuffer::new(gpu, squares)?,
            products: releasable(product_bytes)?,
            outputs: PinnedBuffer::new(gpu, config.max_in_flight() * Outputs::slot_bytes(max_samples, MAX_TOP))?,
            max_rows,
            max_samples,
            share: vocabulary_share(limits.vocab_size, group),
        })
    }

    /// Large buffers without contents between steps.
    pub(crate) fn contentless(&mut self) -> [&mut DeviceBuffer; 4] {
        [&mut self.gathered, &mut self.logits, &mut self.scratch, &mut self.products]
    }

    /// Memory in which tokens are chosen with any settings.
    pub(crate) fn sampling(&self) -> Work {
        Work { logits: self.scratch.span(), partials: self.partials.span() }
    }

    /// The buffers as the sampling kernels take them, for samples from `first` on. `slot` is where the step stores the
    /// index of its slot.
    pub(crate) fn outputs(&self, slot: Span, first: usize) -> Outputs {
        Outputs { base: self.outputs.span(), slot, max_samples: self.max_samples, max_top: MAX_TOP, first }
    }

    /// The result of sample `index` of the step in `slot`. The step must have completed.
    pub(crate) fn output(&self, slot: usize, index: usize) -> Output<'_> {
        let bytes = Outputs::slot_bytes(self.max_samples, MAX_TOP);
        let words: &[u32] = bytemuck::cast_slice(&self.outputs[slot * bytes..(slot + 1) * bytes]);
        let (samples, tops) = (self.max_samples, 2 * self.max_samples);
        Output {
            token: words[index],
            logprob: words[samples + index],
            top_tokens: &words[tops + index * MAX_TOP..][..MAX_TOP],
            top_logprobs: &words[tops + (samples + index) * MAX_TOP..][..MAX_TOP],
        }
    }
}

/// Number of rows that a step may have, including the padding of graphs.
fn padded_rows(limits: &StepLimits) -> usize {
    limits.max_rows.next_multiple_of(8)
}

/// The result of a sample; floats are stored as bits.
pub(crate) struct Output<'a> {
    token: u32,
    logprob: u32,
    top_tokens: &'a [u32],
    top_logprobs: &'a [u32],
}

impl Output<'_> {
    pub(crate) fn token(&self, row: RowId, reported: Reported) -> SampledToken {
        let top = self.top_tokens.iter().zip(self.top_logprobs).take(reported.num_top);
        SampledToken {
            row,
            token: TokenId(self.token),
            logprob: reported.has_logprob.then(|| f32::from_bits(self.logprob)),
            top: top.map(|(&token, &bits)| (TokenId(token), f32::from_bits(bits))).collect(),
        }
    }
}

/// Words of a step's inputs on the device.
fn step_words(limits: &StepLimits, spec: &AttentionSpec) -> usize {
    let rows = padded_rows(limits);
    Layout::max_words(&StepBounds {
        max_tokens: limits.max_tokens.max(rows),
        max_rows: rows,
        max_samples: rows,
        num_blocks: 0,
        block_size: spec.block_size,
        tables: table_shape(limits, spec.block_size, spec.kv_windows.len()),
        max_positions: 0,
        vocab_size: 0,
        // Whether there are any is not known yet; a word for each token does not matter.
        adapters: AdapterBounds { num_slots: 1, rank: 0 },
    })
}

/// Bytes that [`CudaDevice::take_memory`] allocates besides KV blocks, without buffers of the group and of
/// measurements.
fn pending_bytes(limits: &StepLimits, hidden: usize, group: usize, spec: &AttentionSpec, division: Division) -> usize {
    let sizes = Workspace::sizes(limits, hidden, group);
    let ropes: usize = spec.ropes.iter().map(|rope| (rope.cos.len() + rope.sin.len()) * 4).sum();
    let vectors = |layer: &LayerAttention| layer.alibi_slopes.len() + layer.sinks.len() + layer.query_gains.len();
    let vectors: usize = spec.layers.iter().map(|layer| vectors(layer) * 4).sum();
    let decode = DecodeWorkspace::bytes(padded_rows(limits), &shapes(spec), division);
    let latents = LatentBuffers::bytes(spec, [limits.max_tokens, padded_rows(limits)], division);
    sizes.iter().sum::<usize>() + step_words(limits, spec) * 4 + ropes + vectors + decode + latents
}

/// Bytes of the buffers of guesses, with `rows` rows of an activation buffer.
pub(crate) fn guess_bytes(kind: DrafterKind, limits: &StepLimits, rows: usize, spec: &AttentionSpec) -> usize {
    Guesses::bytes(kind, rows, padded_rows(limits), table_shape(limits, spec.block_size, spec.kv_windows.len()))
}

/// Bytes of scratch memory for keys and values in codes that long chunks expand.
fn expanded_bytes(limits: &StepLimits, spec: &AttentionSpec) -> usize {
    if kv_codes(spec.kv_elements).is_none() {
        return 0;
    }
    let (rows, longest) = (limits.max_rows.min(limits.max_tokens), limits.max_sequence_len);
    let contexts = Contexts { sum: rows * longest, longest };
    let max_chunk = limits.max_tokens.min(longest);
    let expands = |shape: &HeadShape| prefill_attention::gains_by_expansion(*shape, max_chunk);
    let bytes = |shape| ExpandedBlocks::bytes(shape, rows, contexts).min(MAX_EXPANDED_BYTES);
    shapes(spec).into_iter().filter(expands).map(bytes).max().unwrap_or(0)
}

fn block_bytes(spec: &AttentionSpec) -> usize {
    let position_bytes = match kv_codes(spec.kv_elements) {
        Some(_) => spec.position_elements() + 2 * spec.kv_heads() * KvCodes::SCALE_BYTES,
        None => 2 * spec.position_elements(),
    };
    spec.block_size * position_bytes
}

/// Estimate of a worker's memory without its weights, made without a GPU.
pub(crate) struct Estimate {
    /// Activations and scratch buffers.
    pub(crate) workspace_bytes: usize,
    /// Buffers of the group.
    pub(crate) communicator_bytes: usize,
    /// Bytes of a KV block.
    pub(crate) block_bytes: usize,
    /// Left free for graphs and the driver.
    pub(crate) reserve_bytes: usize,
}

impl Estimate {
    /// For activation buffers with `tensor_cols` columns in total, buffers of experts, and scratch memory of products. On GPUs other than
    /// Hopper, keys and values in codes take less.
    pub(crate) fn new(
        limits: &StepLimits,
        hidden: usize,
        (tensor_cols, experts, products): (usize, ExpertSizes, ProductScratch),
        group: usize,
        stage: PipelineStage,
        (spec, division): (&AttentionSpec, Division),
    ) -> Self {
        let rows = tensor_rows(limits, largest_bucket(limits.max_rows));
        let scratch = products.bytes(rows).max(expanded_bytes(limits, spec));
        let tensors = rows * tensor_cols * 2 + experts.bytes(rows) + scratch;
        let pending = pending_bytes(limits, hidden, group, spec, division);
        let peers = if group > 1 { peer_bytes(group, hidden) } else { 0 };
        let communicators = usize::from(group > 1) + usize::from(stage.count > 1);
        Self {
            workspace_bytes: tensors + Rows::bytes(limits) + LibraryGemm::WORKSPACE_BYTES + pending,
            communicator_bytes: peers + communicators * NCCL_BYTES,
            block_bytes: block_bytes(spec),
            reserve_bytes: RESERVE_BYTES,
        }
    }
}

/// Number of rows of every activation buffer.
pub(crate) fn tensor_rows(limits: &StepLimits, largest_bucket: usize) -> usize {
    limits.max_tokens.max(largest_bucket)
}

impl CudaDevice {
    fn pending_bytes(&self, spec: &AttentionSpec) -> usize {
        let multiprocessors = self.gpu.num_multiprocessors() as usize;
        let chains = if self.can_chain() { chain::bytes(self.hidden, multiprocessors) } else { 0 };
        let peers = self.group.peer_bytes(self.hidden);
        let experts = self.expert_sizes.bytes(self.tensor_rows());
        let host = buffer_bytes([block_bytes(spec), spec.state_bytes()], self.config.host_memory_bytes);
        let limits = &self.config.limits;
        let guesses = self.drafter.map_or(0, |kind| guess_bytes(kind, limits, self.tensor_rows(), spec));
        pending_bytes(limits, self.hidden, self.group.size(), spec, division(self.config.batch_invariant))
            + guesses
            + host
            + peers
            + chains
            + experts
            + self.product_bytes(spec)
    }

    /// Bytes of [`Workspace::products`].
    fn product_bytes(&self, spec: &AttentionSpec) -> usize {
        let expanded = if self.expands_blocks() { expanded_bytes(&self.config.limits, spec) } else { 0 };
        self.product_scratch.bytes(self.tensor_rows()).max(expanded)
    }

    pub(crate) fn plan_memory(&self, spec: &AttentionSpec) -> Result<MemoryPlan, DeviceError> {
        let (free, _) = self.gpu.memory().map_err(device_error)?;
        let pending = self.pending_bytes(spec);
        let block_bytes = block_bytes(spec);
        let blocks = |reserve: usize, part: f64| {
            (free.saturating_sub(pending + reserve) as f64 * part / block_bytes.max(1) as f64) as usize
        };
        let held = |buffers: &[DeviceBuffer]| buffers.iter().map(|b| b.span().bytes()).sum::<usize>();
        let workspace = held(&self.tensors) + Rows::bytes(&self.config.limits) + LibraryGemm::WORKSPACE_BYTES + pending;
        Ok(MemoryPlan {
            weights_bytes: held(&self.weights) as u64,
            workspace_bytes: workspace as u64,
            block_bytes: block_bytes as u64,
            max_blocks: blocks(RESERVE_BYTES, self.config.kv_memory_fraction),
            max_blocks_again: blocks(RESERVE_BYTES / 2, 1.0),
        })
    }

    pub(crate) fn take_memory(&mut self, spec: &AttentionSpec, num_blocks: usize) -> Result<(), DeviceError> {
        let fits = |shape: &HeadShape| {
            shape.block_size.is_power_of_two() && shape.head_dim.is_multiple_of(16) && shape.head_dim <= MAX_HEAD_DIM
        };
        if let Some(shape) = shapes(spec).iter().find(|shape| !fits(shape)) {
            return Err(DeviceError::Unsupported {
                what: "attention".into(),
                found: format!("head_dim {}, block_size {}", shape.head_dim, shape.block_size),
                expected: format!("head_dim a multiple of 16 up to {MAX_HEAD_DIM}, block_size a power of two"),
            });
        }
        let has_latents = spec.layers.iter().any(|layer| layer.latent.is_some());
        if has_latents && !(spec.block_size.is_power_of_two() && spec.block_size >= 16) {
            return Err(DeviceError::Unsupported {
                what: "attention over latent vectors".into(),
                found: format!("block_size {}", spec.block_size),
                expected: "a power of two from 16 on".into(),
            });
        }
        self.group.open_peers(&self.gpu, self.hidden, self.can_chain())?;
        super::invariant::check_peers(&self.config, self.group.has_peers())?;
        super::invariant::check_vocab(&self.config, self.loaded_vocab)?;
        // Activation buffers as wide as a residual include those that are summed and normalized.
        let bytes: Vec<usize> = self.widths.iter().map(|&width| self.tensor_bytes(width)).collect();
        let summed: Vec<_> = self.tensors.iter().filter(|tensor| bytes.contains(&tensor.span().bytes())).collect();
        // Between stages, every worker sends all rows of the residual.
        if self.pipeline.stage.count == 1 {
            self.group.share(&self.gpu, &summed, self.config.limits.max_tokens, self.hidden)?;
        }
        self.take(spec, num_blocks).map_err(device_error)
    }

    /// Bytes of an activation buffer of `cols` columns; in a group, at least the minimum for mapping it into other
    /// workers.
    pub(crate) fn tensor_bytes(&self, cols: usize) -> usize {
        let least = if self.group.size() > 1 { MIN_SHARED_BYTES } else { 0 };
        (self.tensor_rows() * cols * 2).max(least)
    }

    pub(super) fn tensor_rows(&self) -> usize {
        tensor_rows(&self.config.limits, self.graphs.largest_bucket())
    }

    /// Clears new KV blocks where a kernel may read what was not written. A drafter does not run behind each step.
    pub(super) fn clear_cache(&self) -> Result<(), CudaError> {
        let may_read = |cache: &&Cache| cache.has_windows() || self.drafter.is_some();
        self.cache.as_ref().filter(may_read).map_or(Ok(()), |cache| cache.clear(&self.queue))
    }

    fn take(&mut self, spec: &AttentionSpec, num_blocks: usize) -> Result<(), CudaError> {
        let words = step_words(&self.config.limits, spec);
        self.step_block = DeviceBuffer::with_count::<u32>(&self.gpu, words)?;
        self.pinned_inputs = (0..self.config.max_in_flight())
            .map(|_| PinnedBuffer::new(&self.gpu, words * 4))
            .collect::<Result<_, _>>()?;
        let product_bytes = self.product_bytes(spec);
        self.workspace = Some(Workspace::new(&self.gpu, &self.config, self.hidden, self.group.size(), product_bytes)?);
        if self.can_chain() {
            self.chain = Chain::new(
                &self.gpu,
                self.hidden,
                spec.layers.iter().any(|layer| layer.num_kv_heads < layer.num_heads),
                self.product_scratch.is_needed(),
            )?;
        }
        if self.expert_sizes.has_experts() {
            let buffers = ExpertBuffers::new(
                &self.gpu,
                &self.queue,
                self.expert_sizes,
                self.tensor_rows(),
                self.config.activation_residence(),
            )?;
            self.expert_buffers = Some(buffers);
        }
        let (limits, residences) = (&self.config.limits, [self.config.residence(), self.config.activation_residence()]);
        let sizes = [limits.max_tokens, padded_rows(limits)];
        let cache = Cache::new(&self.gpu, spec, num_blocks, sizes, division(self.config.batch_invariant), residences)?;
        if let Some(kind) = self.drafter {
            let sizes = [self.tensor_rows(), padded_rows(limits), self.config.max_drafts, self.config.max_in_flight()];
            self.guesses = Some(Guesses::new(&self.gpu, kind, sizes, cache.tables(limits))?);
        }
        self.cache = Some(cache);
        self.clear_cache()
    }
}
