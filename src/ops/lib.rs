//! The interface between models and devices: the [`Device`] trait with its ops, and the values that they take. One file: the trait
//! is read as a whole.
//!
//! A model is a sequence of ops on a [`Device`] and does not depend on the kind of device. The device holds the state
//! that stays off the host between steps: KV blocks, and the tokens and sampling state of each row. The crate `device`
//! implements the trait.
//!
//! Dimension letters: `T` tokens of the step, `E` hidden size, `H` query heads, `K` KV heads, `D` head dimension, `V`
//! vocabulary, `S` samples. Under tensor parallelism `H`, `K`, `V` and the inner width are those of this worker's
//! shard.
#![forbid(unsafe_code)]

mod adapter;
mod attention;
mod error;
mod experts;
mod feature;
mod inputs;
mod latent;
mod memory;
mod quantized;
mod recurrent;
mod spec;

pub use adapter::{AdapterSlots, LowRankPart};
pub use attention::{AttentionSpec, KvElements, LayerAttention, QueryScale, RopeTable};
pub use error::DeviceError;
pub use experts::{ExpertGroups, ExpertSlice, ExpertSlices, GroupScore, Routing, Scoring};
pub use feature::Feature;
pub use inputs::{NO_ADAPTER, SampleInput, StepInputs, TOKEN_ON_DEVICE};
pub use latent::{LatentShape, LatentWeights};
pub use memory::{HostMemory, HostSlots, MemoryEstimate, Target};
pub use quantized::{Quantization, QuantizedRows};
pub use recurrent::{RecurrentRule, RecurrentShape, RecurrentWeights};
pub use spec::{
    Activation, DType, HeadNormSpan, HeadOrder, LinearRole, LogitSpec, MemoryPlan, NormKind, NormSlices, PipelineStage,
    RowSource, StepLimits, TensorParallel, WeightData, WeightSlice,
};

use engine::{
    CopiedBlock, CopiedState, HostCopies, RevisedRow, RowId, SampleMask, SampledToken, SamplingParams, TokenId,
};

/// Runs the forward pass of a model.
///
/// Ops act on the step passed to [`Device::run_step`] and may return before the work is done; errors of queued work are
/// returned by [`Device::collect`]. After any `Err` the device is unusable and its process must end; a new worker takes
/// over.
pub trait Device: Sized {
    /// A matrix or vector of the checkpoint, this worker's shard, in a layout chosen by the device.
    type Weight;
    /// An activation buffer `[rows, cols]`, allocated once.
    type Tensor;
    /// A part of an adapter as slots hold it.
    type Product: Send + 'static;

    /// This worker's rank in its tensor-parallel group.
    fn tensor_parallel(&self) -> TensorParallel;

    /// This worker's stage in its pipeline.
    fn pipeline_stage(&self) -> PipelineStage {
        PipelineStage::WHOLE
    }

    /// The optional ops that this device lacks. They are never called.
    fn lacks(&self) -> &'static [Feature];

    /// Weights that are loaded from now on only guess drafts, at the first `vocab_size` tokens. The type of keys and values does not
    /// follow from theirs, so that tokens are the same with and without drafts.
    fn begin_drafter(&mut self, _kind: DrafterKind, _vocab_size: usize) {}

    /// Loads a linear layer's weight `[N, K]` from slices of the checkpoint stacked along `N` (q, k, v as one; gate and
    /// up as one), with an optional bias `[N]` stacked in the same way.
    ///
    /// For [`LinearRole::Out`] and [`LinearRole::Down`] the product is this worker's partial sum.
    fn load_linear(
        &mut self,
        role: LinearRole,
        parts: &[WeightSlice<'_>],
        bias: &[WeightSlice<'_>],
    ) -> Result<Self::Weight, DeviceError>;

    /// Loads the embedding table, rows `first_token..first_token + V` of the vocabulary.
    fn load_embedding(&mut self, table: WeightSlice<'_>, first_token: u32) -> Result<Self::Weight, DeviceError>;

    /// Creates the output head from an embedding that is tied to it, without a second copy.
    fn tie_head(&mut self, embedding: &Self::Weight) -> Result<Self::Weight, DeviceError>;

    /// Loads an output head of a drafter `[Vd, E]`, whole on every worker, for [`Device::guess`]. Its output `i` is the logit of token
    /// `token_ids[i]`; the tokens of the vocabulary are below that of the step's limits ([`Feature::OwnDrafters`]).
    fn load_draft_head(&mut self, _head: WeightSlice<'_>, _token_ids: Vec<u32>) -> Result<Self::Weight, DeviceError> {
        Err(DeviceError::lacks(Feature::OwnDrafters))
    }

    /// Loads a copy of an output head in which each row has codes in e4m3 and a scale, if [`Device::guess`] is faster with it. Guesses
    /// need not be exact; tokens are chosen from the head itself.
    fn load_head_copy(&mut self, _head: &mut Self::Weight, _rounded: WeightSlice<'_>) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Loads a norm's gain and bias.
    fn load_norm(&mut self, norm: &NormSlices<'_>) -> Result<Self::Weight, DeviceError>;

    /// Loads the table of learned positions `[positions, E]` ([`Feature::LearnedPositions`]).
    fn load_positions(&mut self, _table: WeightSlice<'_>) -> Result<Self::Weight, DeviceError> {
        Err(DeviceError::lacks(Feature::LearnedPositions))
    }

    /// Loads the experts of a feed-forward and their router ([`Feature::Experts`]).
    fn load_experts(&mut self, _experts: &ExpertSlices<'_>) -> Result<Self::Weight, DeviceError> {
        Err(DeviceError::lacks(Feature::Experts))
    }

    /// Loads the weights of a layer with a recurrent state, without its projections ([`Feature::Recurrent`]).
    fn load_recurrent(&mut self, _weights: &RecurrentWeights) -> Result<Self::Weight, DeviceError> {
        Err(DeviceError::lacks(Feature::Recurrent))
    }

    /// Loads the weights of a layer whose KV blocks hold latent vectors, without its projections
    /// ([`Feature::LatentAttention`]).
    fn load_latent(&mut self, _weights: &LatentWeights<'_>) -> Result<Self::Weight, DeviceError> {
        Err(DeviceError::lacks(Feature::LatentAttention))
    }

    /// Makes a product from a part of an adapter. It takes time, and any thread may do it while steps run.
    fn product(part: LowRankPart) -> Self::Product;

    /// Bytes of the slots for adapters beside linear layers.
    fn adapter_bytes(&self, layers: &[AdapterSlots]) -> u64 {
        layers.iter().map(AdapterSlots::f32_bytes).sum::<usize>() as u64
    }

    /// Allocates the slots for adapters beside linear layers, which are empty. Called once, after [`Device::allocate_cache`], if there
    /// are any ([`Feature::Adapters`]).
    fn allocate_adapters(&mut self, _layers: &[(&Self::Weight, AdapterSlots)]) -> Result<(), DeviceError> {
        Err(DeviceError::lacks(Feature::Adapters))
    }

    /// Sets the products that an adapter slot adds to the outputs of a linear layer, in place of those that it had. Rows whose
    /// [`StepInputs::adapters`] name the slot have them from the next step on ([`Feature::Adapters`]).
    fn set_adapter(
        &mut self,
        _weight: &Self::Weight,
        _slot: u32,
        _products: Vec<Self::Product>,
    ) -> Result<(), DeviceError> {
        Err(DeviceError::lacks(Feature::Adapters))
    }

    /// Allocates an activation buffer with `cols` columns and a row for each token that a step may have.
    fn tensor(&mut self, cols: usize) -> Result<Self::Tensor, DeviceError>;

    /// The memory available for KV blocks after weights and workspace are allocated, and the size of a block.
    fn memory_plan(&self, attention: &AttentionSpec) -> Result<MemoryPlan, DeviceError>;

    /// Allocates the KV blocks and the other buffers of attention and sampling. Called once, before the
    /// first step.
    fn allocate_cache(&mut self, attention: &AttentionSpec, num_blocks: usize) -> Result<(), DeviceError>;

    /// Allocates `num_states` slots for the recurrent states of sequences, each with the states of all
    /// [`AttentionSpec::states`]. Called once, after [`Device::allocate_cache`], if the model has such layers
    /// ([`Feature::Recurrent`]).
    fn allocate_states(&mut self, _attention: &AttentionSpec, _num_states: usize) -> Result<(), DeviceError> {
        Err(DeviceError::lacks(Feature::Recurrent))
    }

    /// Bytes of host memory that [`Device::sleep`] takes.
    fn sleep_bytes(&self) -> u64 {
        0
    }

    /// Frees the memory of the device: weights move to host memory where they are not there, and the contents of KV blocks,
    /// recurrent states and activations are lost. Called while no step is queued. [`DeviceError::OutOfMemory`] says that host
    /// memory does not suffice and that nothing has changed.
    fn sleep(&mut self) -> Result<(), DeviceError> {
        Err(cannot_sleep())
    }

    /// Takes the memory again after [`Device::sleep`]; without one, nothing changes.
    fn wake(&mut self) -> Result<(), DeviceError> {
        Err(cannot_sleep())
    }

    /// Copies slots of recurrent states, one after the other, before the next step ([`Feature::Recurrent`]).
    fn copy_states(&mut self, copied: &[CopiedState]) -> Result<(), DeviceError> {
        if copied.is_empty() { Ok(()) } else { Err(DeviceError::lacks(Feature::Recurrent)) }
    }

    /// Divides host memory into slots for copies of KV blocks, then for those of recurrent states. What slots hold already counts. Called
    /// once, after [`Device::allocate_cache`] and [`Device::allocate_states`], if there are any. Returns the bytes of a slot of each.
    fn allocate_host(&mut self, _slots: HostSlots, _memory: HostMemory) -> Result<[usize; 2], DeviceError> {
        Err(DeviceError::Unsupported {
            what: "a KV cache in host memory".into(),
            found: "slots for it".into(),
            expected: "none, on this device".into(),
        })
    }

    /// Copies blocks and states to slots of the host, then others from such slots, before the next step. Nothing that the step or
    /// later copies write is read by these copies. It is called for every plan, also without copies, and returns once the copies to the
    /// host of the plan [`engine::STORES_COMPLETE_AFTER`] before it are complete.
    fn copy_with_host(&mut self, copies: &HostCopies) -> Result<(), DeviceError> {
        match copies.is_empty() {
            true => Ok(()),
            false => Err(DeviceError::Call {
                call: "copy_with_host".into(),
                reason: "this device has no slots in host memory".into(),
            }),
        }
    }

    /// A sequence takes `row`: `tokens` are those known so far, and the first `num_prompt_tokens` of them are the
    /// prompt.
    fn join_row(
        &mut self,
        row: RowId,
        tokens: &[TokenId],
        num_prompt_tokens: u32,
        sampling: &SamplingParams,
    ) -> Result<(), DeviceError>;

    /// Revises rows: they continue from tokens chosen by rank 0. Each reads its parent as it was before any of them.
    /// Then blocks are copied, all buffers of each. Only beam searches and verified drafts need it.
    fn revise(&mut self, revised: &[RevisedRow], copied: &[CopiedBlock]) -> Result<(), DeviceError> {
        match revised.is_empty() && copied.is_empty() {
            true => Ok(()),
            false => Err(DeviceError::Unsupported {
                what: "a row that goes on from chosen tokens".into(),
                found: "beam search or drafts".into(),
                expected: "neither, on this device".into(),
            }),
        }
    }

    /// Does one short piece of work that would otherwise delay a later step, while no step is queued. Returns true if
    /// more is left. `forward` is the same as in [`Device::run_step`]. It never waits for another worker.
    fn prepare(&mut self, _forward: &mut dyn FnMut(&mut Self) -> Result<(), DeviceError>) -> Result<bool, DeviceError> {
        Ok(false)
    }

    /// Raw logits `[V]` of each of [`StepInputs::logits`], in that order, for the step that [`Device::collect`]
    /// returned last.
    fn take_logits(&mut self) -> Vec<Vec<f32>> {
        Vec::new()
    }

    /// The guesses of the step that [`Device::collect`] returned last, for each row that [`StepInputs::guesses`] names.
    fn take_guesses(&mut self) -> Vec<(RowId, Vec<TokenId>)> {
        Vec::new()
    }

    /// Runs one step: makes `inputs` the current step and calls `forward`, or replays an earlier recording of the same
    /// ops. Returns after the step is queued.
    fn run_step(
        &mut self,
        inputs: &StepInputs,
        forward: &mut dyn FnMut(&mut Self) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError>;

    /// Chooses the tokens of the last step, for which [`Device::sample`] computed only logits because
    /// [`StepInputs::masked`] is not empty. `masks` has one mask for each of `masked`, in that order. The step can be
    /// collected afterwards.
    fn choose(&mut self, masks: &[SampleMask]) -> Result<(), DeviceError>;

    /// The tokens of the oldest step that was run and not yet collected. `None` if there is no such step, or if it is
    /// still running and `wait` is false.
    fn collect(&mut self, wait: bool) -> Result<Option<Vec<SampledToken>>, DeviceError>;

    // Ops, in the order in which a forward pass uses them. Each acts on all `T` tokens of the current step.

    /// `out[t, :] = scale * table[token_ids[t], :]`, summed over the group if the vocabulary is split.
    fn embed(&mut self, out: &mut Self::Tensor, table: &Self::Weight, scale: f32) -> Result<(), DeviceError>;

    /// `out[t, :] = x[t, :] * rsqrt(mean(x[t, :]^2) + eps) * gain`, or `(x[t, :] - mean) * rsqrt(variance + eps) * gain +
    /// bias`. `weight` determines the kind of norm. A row may consist of several groups as wide as `weight`, which are
    /// normalized one by one ([`Feature::PerLayerInputs`]).
    fn norm(
        &mut self,
        out: &mut Self::Tensor,
        x: &Self::Tensor,
        weight: &Self::Weight,
        eps: f32,
    ) -> Result<(), DeviceError>;

    /// `out[t, :] += table[positions[t], :]` ([`Feature::LearnedPositions`]).
    fn add_positions(&mut self, _out: &mut Self::Tensor, _table: &Self::Weight) -> Result<(), DeviceError> {
        Err(DeviceError::lacks(Feature::LearnedPositions))
    }

    /// `out = x @ weight^T + bias`.
    fn linear(&mut self, out: &mut Self::Tensor, x: &Self::Tensor, weight: &Self::Weight) -> Result<(), DeviceError>;

    /// `out = activation(gate) * up`, where `x @ weight^T` is `[gate | up]` ([`LinearRole::GateUp`]). `scratch` has
    /// room for `[gate | up]`.
    fn gated_linear(
        &mut self,
        out: &mut Self::Tensor,
        scratch: &mut Self::Tensor,
        x: &Self::Tensor,
        weight: &Self::Weight,
        activation: Activation,
    ) -> Result<(), DeviceError>;

    /// `out = activation(x @ weight^T + bias)` ([`Feature::PlainMlp`], [`LinearRole::Up`]).
    fn activated_linear(
        &mut self,
        _out: &mut Self::Tensor,
        _x: &Self::Tensor,
        _weight: &Self::Weight,
        _activation: Activation,
    ) -> Result<(), DeviceError> {
        Err(DeviceError::lacks(Feature::PlainMlp))
    }

    /// `out[t, :]` = the sum, in the order of the experts, of `probability * expert(x[t, :])` over the experts that token
    /// `t` chooses: this worker's partial sum ([`Feature::Experts`]).
    fn experts(
        &mut self,
        _out: &mut Self::Tensor,
        _x: &Self::Tensor,
        _experts: &Self::Weight,
    ) -> Result<(), DeviceError> {
        Err(DeviceError::lacks(Feature::Experts))
    }

    /// The same as [`Device::experts`], but tokens choose by `routed` instead of `x` ([`Feature::ExpertsApart`]).
    fn experts_of(
        &mut self,
        _out: &mut Self::Tensor,
        _x: &Self::Tensor,
        _routed: &Self::Tensor,
        _experts: &Self::Weight,
    ) -> Result<(), DeviceError> {
        Err(DeviceError::lacks(Feature::ExpertsApart))
    }

    /// `out[t, :] *= sigmoid(x[t, :] · gate)`, where `gate` was loaded as a linear layer with one row
    /// ([`Feature::Experts`]).
    fn gate_rows(
        &mut self,
        _out: &mut Self::Tensor,
        _x: &Self::Tensor,
        _gate: &Self::Weight,
    ) -> Result<(), DeviceError> {
        Err(DeviceError::lacks(Feature::Experts))
    }

    /// Norms in place of the q, k and v parts of `qkv [T, (H + 2K) D]` of `layer` ([`Feature::HeadNorm`],
    /// [`Feature::EachHeadNorm`], [`Feature::AllHeadsNorm`], [`Feature::ValueNorm`]).
    fn head_norm(
        &mut self,
        _qkv: &mut Self::Tensor,
        _layer: usize,
        _norms: &HeadNorms<'_, Self::Weight>,
        _eps: f32,
    ) -> Result<(), DeviceError> {
        Err(DeviceError::lacks(Feature::HeadNorm))
    }

    /// Rotates the q and k parts of `qkv [T, (H + 2K) D]` by position, and writes k and v into the KV blocks of
    /// `layer`. With [`LayerAttention::has_shared_kv`] there is only q.
    fn rope_and_cache(&mut self, qkv: &mut Self::Tensor, layer: usize) -> Result<(), DeviceError>;

    /// `out [T, H D]` = causal attention of the q part of `qkv` over each row's KV blocks of `layer`.
    fn attention(&mut self, out: &mut Self::Tensor, qkv: &Self::Tensor, layer: usize) -> Result<(), DeviceError>;

    /// A layer with [`LayerAttention::latent`], behind its projections: normalizes and rotates `latents [T, width]`, writes
    /// them into the KV blocks of `layer`, and rotates `q [T, H query_dim]`; then `out [T, H value_dim]` = causal attention
    /// over each row's KV blocks. `q` and `latents` may be changed ([`Feature::LatentAttention`]).
    fn latent_attention(
        &mut self,
        _out: &mut Self::Tensor,
        _inputs: [&mut Self::Tensor; 2],
        _layer: usize,
        _weights: &Self::Weight,
    ) -> Result<(), DeviceError> {
        Err(DeviceError::lacks(Feature::LatentAttention))
    }

    /// `x *= sigmoid(gates)`, element by element ([`Feature::OutputGate`]).
    fn gate(&mut self, _x: &mut Self::Tensor, _gates: &Self::Tensor) -> Result<(), DeviceError> {
        Err(DeviceError::lacks(Feature::OutputGate))
    }

    /// A layer with a recurrent state, behind its projections: `out [T, V DV]` from `qkvz [T, C + V DV]` (q, k and v of all
    /// heads, then the gates of the output) and `ba [T, 2 V]` (learning rates, then steps; steps alone of Mamba-2, `[T, V]`). Of a short
    /// convolution they are v and the gates of the input, and the gates of the output `[T, V DV]`. Advances the state `layer` of
    /// [`AttentionSpec::states`] in the slot of each row, which is zero at position 0. `eps` is that of the norm of the output
    /// ([`Feature::Recurrent`]; [`Feature::Mamba2`], [`Feature::ShortConv`]).
    fn recurrent(
        &mut self,
        _out: &mut Self::Tensor,
        _inputs: [&Self::Tensor; 2],
        _layer: usize,
        _weights: &Self::Weight,
        _eps: f32,
    ) -> Result<(), DeviceError> {
        Err(DeviceError::lacks(Feature::Recurrent))
    }

    /// A layer of Kimi Delta Attention behind its projections: `out [T, V DV]` from `qkvb [T, C + V]` (q, k and v of all heads, then
    /// learning rates), steps `[T, V DK]` and the gates of the output `[T, V DV]`. States are as of [`Device::recurrent`]
    /// ([`Feature::KimiDelta`]).
    fn kimi_delta(
        &mut self,
        _out: &mut Self::Tensor,
        _inputs: [&Self::Tensor; 3],
        _layer: usize,
        _weights: &Self::Weight,
        _eps: f32,
    ) -> Result<(), DeviceError> {
        Err(DeviceError::lacks(Feature::KimiDelta))
    }

    /// `residual += sum of partial over the group; out = norm(residual)`. `weight` determines the kind of norm.
    fn reduce_add_norm(
        &mut self,
        out: &mut Self::Tensor,
        residual: &mut Self::Tensor,
        partial: &Self::Tensor,
        weight: &Self::Weight,
        eps: f32,
    ) -> Result<(), DeviceError>;

    /// Makes all rows of a residual known to each worker. [`Device::reduce_add_norm`] may leave each worker with those that it adds
    /// to alone, so this comes before any other op that reads them.
    fn make_whole(&mut self, _residual: &mut Self::Tensor) -> Result<(), DeviceError> {
        Ok(())
    }

    /// `residual += norm(sum of partial over the group)`, with the norm `branch`; then, if `next` is set, its tensor
    /// becomes the norm of `residual` by its weight ([`Feature::BranchNorm`]).
    fn reduce_norm_add_norm(
        &mut self,
        _residual: &mut Self::Tensor,
        _partial: &mut Self::Tensor,
        _branch: &Self::Weight,
        _next: Option<(&mut Self::Tensor, &Self::Weight)>,
        _eps: f32,
    ) -> Result<(), DeviceError> {
        Err(DeviceError::lacks(Feature::BranchNorm))
    }

    /// `out = norm(sum of partial over the group)` ([`Feature::ExpertsApart`]).
    fn reduce_norm(
        &mut self,
        _out: &mut Self::Tensor,
        _partial: &Self::Tensor,
        _weight: &Self::Weight,
        _eps: f32,
    ) -> Result<(), DeviceError> {
        Err(DeviceError::lacks(Feature::ExpertsApart))
    }

    /// `x += y` ([`Feature::ParallelBranches`]).
    fn add(&mut self, _x: &mut Self::Tensor, _y: &Self::Tensor) -> Result<(), DeviceError> {
        Err(DeviceError::lacks(Feature::ParallelBranches))
    }

    /// `x *= factor` ([`Feature::LayerScale`]).
    fn scale(&mut self, _x: &mut Self::Tensor, _factor: f32) -> Result<(), DeviceError> {
        Err(DeviceError::lacks(Feature::LayerScale))
    }

    /// `x[t, i] *= y[t, first + i]` for all columns `i` of `x` ([`Feature::PerLayerInputs`]).
    fn multiply_columns(&mut self, _x: &mut Self::Tensor, _y: &Self::Tensor, _first: usize) -> Result<(), DeviceError> {
        Err(DeviceError::lacks(Feature::PerLayerInputs))
    }

    /// Computes the logits of the `S` sampling positions of `x` over the whole group's vocabulary, and chooses a token
    /// for each, the same on every worker. The tokens are appended to their rows on the device and returned by
    /// [`Device::collect`]. Nothing is appended to rows with [`SamplingParams::beam_candidates`], nor to those that
    /// sample more than once. With [`StepInputs::masked`] the tokens are chosen later, by [`Device::choose`].
    fn sample(&mut self, x: &Self::Tensor, head: &Self::Weight, logits: LogitSpec) -> Result<(), DeviceError>;

    /// `out[t, first + i] = x[t, i]` for all columns `i` of `x` ([`Feature::OwnDrafters`]).
    fn put_columns(&mut self, _out: &mut Self::Tensor, _x: &Self::Tensor, _first: usize) -> Result<(), DeviceError> {
        Err(DeviceError::lacks(Feature::OwnDrafters))
    }

    /// Whether what guesses drafts runs behind the current step ([`StepInputs::runs_drafter`]). Otherwise none of the ops of
    /// [`Feature::Guesses`] is called.
    fn runs_drafter(&self) -> bool {
        false
    }

    /// Runs a pass of guesses behind the step: calls `pass`, or replays an earlier recording of the same ops, in which the first pass
    /// behind a step may differ from the others ([`Feature::Guesses`]).
    fn run_guess(&mut self, pass: &mut dyn FnMut(&mut Self) -> Result<(), DeviceError>) -> Result<(), DeviceError> {
        pass(self)
    }

    /// The tokens of the step become those that follow them, after [`Device::sample`] or [`Device::choose`]: a new token, or the
    /// token of the next position. Behind a rejected draft it may be any ([`Feature::Guesses`]).
    fn follow(&mut self) -> Result<(), DeviceError> {
        Err(DeviceError::lacks(Feature::Guesses))
    }

    /// The step becomes one of a model of its own that guesses, after [`Device::sample`] or [`Device::choose`]: the same tokens without
    /// rejected drafts, and behind them the new token of each row that [`StepInputs::guesses`] names. A row has no guesses if that
    /// token would need a KV block beyond those of the step ([`Feature::OwnDrafters`]).
    fn extend(&mut self) -> Result<(), DeviceError> {
        Err(DeviceError::lacks(Feature::OwnDrafters))
    }

    /// Guesses one further token for each row that [`StepInputs::guesses`] names: that of the logits of `x` at its last position
    /// whose next token is not known, chosen as [`Device::sample`] would. `x` is the output of [`Device::norm`], because devices may
    /// leave rows of other norms without their scale ([`Feature::Guesses`]).
    fn guess(&mut self, _x: &Self::Tensor, _head: &Self::Weight, _logits: LogitSpec) -> Result<(), DeviceError> {
        Err(DeviceError::lacks(Feature::Guesses))
    }

    /// Makes the rows that need another guess the step's only ones, each with its last guess as the token that follows the
    /// position behind the last one; `hidden`, if the guesses need it, keeps their rows, in their order. Returns false if the guesses are complete, for
    /// [`Device::take_guesses`]. A row has no guess whose keys would need a KV block beyond those of the step
    /// ([`Feature::Guesses`]).
    fn next_guess(&mut self, _hidden: Option<&mut Self::Tensor>) -> Result<bool, DeviceError> {
        Err(DeviceError::lacks(Feature::Guesses))
    }

    /// Receives the hidden state. It replaces [`Device::embed`] in all stages but the first: `out` becomes the
    /// activations that the previous stage passed to [`Device::send_hidden`] in this step.
    fn recv_hidden(&mut self, _out: &mut Self::Tensor) -> Result<(), DeviceError> {
        Err(no_pipeline())
    }

    /// Sends the hidden state `x` to the next stage. It replaces [`Device::sample`] in all stages but the last: the
    /// step ends here, and [`Device::collect`] returns no tokens for it.
    fn send_hidden(&mut self, _x: &Self::Tensor) -> Result<(), DeviceError> {
        Err(no_pipeline())
    }
}

/// What guesses drafts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DrafterKind {
    /// A head, whose passes begin with [`Device::follow`].
    Head,
    /// A model, whose passes begin with [`Device::extend`].
    Model,
}

/// Norms of q and k.
#[derive(Debug)]
pub struct HeadNorms<'a, W> {
    /// What the norms are computed over.
    pub span: HeadNormSpan,
    /// Norm of q.
    pub q: &'a W,
    /// Norm of k; `None` in a layer that has no k of its own.
    pub k: Option<&'a W>,
    /// Norm of v, if it has one. Its span is a head.
    pub v: Option<&'a W>,
}

fn cannot_sleep() -> DeviceError {
    DeviceError::Unsupported {
        what: "sleep on this device".to_owned(),
        found: "a request to sleep or to wake".to_owned(),
        expected: "none".to_owned(),
    }
}

fn no_pipeline() -> DeviceError {
    DeviceError::Unsupported {
        what: "a pipeline on this device".to_owned(),
        found: "`pp` above 1".to_owned(),
        expected: "`pp` 1".to_owned(),
    }
}
