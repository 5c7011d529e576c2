//! Estimates the memory of a worker before anything is loaded, with a device that counts instead of computing.
//! One file: one implementation of one trait.

use engine::{RowId, SampleMask, SampledToken, SamplingParams, TokenId};
use kernels::cuda::quantized_gemm::PackedFormat;
use ops::{
    Activation, AdapterSlots, AttentionSpec, DType, Device, DeviceError, DrafterKind, ExpertSlices, Feature,
    LatentWeights, LinearRole, LogitSpec, LowRankPart, MemoryEstimate, MemoryPlan, NormKind, NormSlices, PipelineStage,
    RecurrentWeights, StepInputs, StepLimits, Target, TensorParallel, WeightSlice,
};
use settings::WeightPrecision;

use crate::cpu::{CpuEstimate, ExpertBuffers, Widest, quantized_bytes};
use crate::cuda::{
    self, CudaDevice, Estimate, ExpertSizes, ProductScratch, RecurrentKernel, check_latent_shape, copy_format,
    division, expert_formats, fp8_expert_cols, gate_order, guess_bytes, has_fp8_inputs, input_order, largest_bucket,
    packed_format, tensor_rows,
};
use crate::slices::is_computed;

/// Counts the memory that a [`CpuDevice`](crate::cpu::CpuDevice) or [`CudaDevice`] needs for a model, from the shapes of its weights alone.
#[derive(Debug)]
pub struct Estimator {
    target: Target,
    tp: TensorParallel,
    stage: PipelineStage,
    limits: StepLimits,
    hidden: usize,
    weights_bytes: usize,
    /// Part of the weights that a CPU uses directly in the checkpoint.
    mapped_bytes: usize,
    /// Columns of all activation buffers.
    tensor_cols: usize,
    /// Columns of a CPU's buffers of experts.
    expert_cols: usize,
    /// Sizes of a GPU's buffers of experts.
    expert_sizes: ExpertSizes,
    /// A GPU's scratch memory for quantized matrices and recurrent layers.
    product_scratch: ProductScratch,
    /// Inputs of the widest linear layers of a CPU.
    widest: Widest,
    has_wide_weights: bool,
    /// The drafter to which weights that are counted now belong.
    drafter: Option<DrafterKind>,
    /// Outputs of a drafter's own head.
    draft_outputs: usize,
    /// Precision of a CPU's linear layers.
    precision: WeightPrecision,
    /// Whether a row's results must not depend on other rows. GPUs then expand some quantized weights.
    batch_invariant: bool,
}

/// The properties of a weight that an [`Estimator`] needs.
#[derive(Debug, Clone, Copy)]
pub struct EstimatedWeight {
    rows: usize,
    cols: usize,
    bytes: usize,
    is_bf16: bool,
    /// Whether the rows are copied when they are read.
    is_computed: bool,
}

impl Estimator {
    /// An estimator for the worker `tp` of its group.
    pub fn new(target: Target, tp: TensorParallel, limits: StepLimits) -> Self {
        Self {
            target,
            tp,
            stage: PipelineStage::WHOLE,
            limits,
            hidden: 0,
            weights_bytes: 0,
            mapped_bytes: 0,
            tensor_cols: 0,
            expert_cols: 0,
            expert_sizes: ExpertSizes::default(),
            product_scratch: ProductScratch::default(),
            widest: Widest::default(),
            has_wide_weights: false,
            drafter: None,
            draft_outputs: 0,
            precision: WeightPrecision::default(),
            batch_invariant: false,
        }
    }

    /// The same for linear layers that a CPU loads in this precision.
    pub fn in_precision(self, precision: WeightPrecision) -> Self {
        Self { precision, ..self }
    }

    /// The same for a device on which a row's results do not depend on other rows.
    pub fn with_invariant_rows(self, batch_invariant: bool) -> Self {
        Self { batch_invariant, ..self }
    }

    /// The same for one stage of a pipeline.
    pub fn in_stage(self, stage: PipelineStage) -> Self {
        Self { stage, ..self }
    }

    /// The estimate, given the attention of the model that was loaded.
    pub fn estimate(&self, attention: &AttentionSpec) -> MemoryEstimate {
        let (limits, group) = (&self.limits, self.tp.size as usize);
        let weights_bytes = self.weights_bytes as u64;
        match self.target {
            Target::Cpu => {
                let cols = self.tensor_cols + self.expert_cols;
                let cpu = CpuEstimate::new(limits, cols, self.widest, self.has_wide_weights, attention);
                let outputs_bytes = limits.max_rows * self.draft_outputs * size_of::<f32>();
                MemoryEstimate {
                    weights_bytes,
                    mapped_bytes: self.mapped_bytes as u64,
                    workspace_bytes: (cpu.workspace_bytes + outputs_bytes) as u64,
                    host_buffer_bytes: 0,
                    communicator_bytes: 0,
                    reserve_bytes: 0,
                    block_bytes: cpu.block_bytes as u64,
                    state_bytes: attention.state_bytes() as u64,
                }
            }
            Target::Cuda => {
                let sizes = (self.tensor_cols, self.expert_sizes, self.product_scratch);
                let attends = (attention, division(self.batch_invariant));
                let mut cuda = Estimate::new(limits, self.hidden, sizes, group, self.stage, attends);
                if let Some(kind) = self.drafter {
                    let rows = tensor_rows(limits, largest_bucket(limits.max_rows));
                    cuda.workspace_bytes += guess_bytes(kind, limits, rows, attention);
                }
                MemoryEstimate {
                    weights_bytes,
                    mapped_bytes: 0,
                    workspace_bytes: cuda.workspace_bytes as u64,
                    host_buffer_bytes: 0,
                    communicator_bytes: cuda.communicator_bytes as u64,
                    reserve_bytes: cuda.reserve_bytes as u64,
                    block_bytes: cuda.block_bytes as u64,
                    state_bytes: attention.state_bytes() as u64,
                }
            }
        }
    }

    fn count_matrix(&mut self, parts: &[WeightSlice<'_>]) -> EstimatedWeight {
        let elements: usize = parts.iter().map(|part| part.rows.len() * part.cols.len()).sum();
        let dtype = parts.first().map_or(DType::Bf16, |part| part.dtype);
        let bytes = match self.target {
            Target::Cpu => elements * dtype.size(),
            Target::Cuda => elements * 2,
        };
        self.weights_bytes += bytes;
        let is_bf16 = dtype == DType::Bf16;
        self.has_wide_weights |= !is_bf16 && self.drafter.is_none();
        let is_computed = parts.iter().any(is_computed);
        let rows = parts.iter().map(|part| part.rows.len()).sum();
        EstimatedWeight { rows, cols: parts.first().map_or(0, |part| part.cols.len()), bytes, is_bf16, is_computed }
    }

    /// Counts a matrix of each expert, which a GPU may keep quantized.
    fn count_experts(&mut self, experts: &[&[WeightSlice<'_>]], packed: Option<PackedFormat>) {
        for parts in experts {
            let weight = self.count_matrix(parts);
            self.count_use(&weight, false);
            if let Some(format) = packed {
                self.count_packed(&weight, format);
                self.product_scratch.count(experts.len() * weight.rows, weight.cols, false);
            }
        }
    }

    /// Counts what a CPU needs for products with a weight.
    fn count_use(&mut self, weight: &EstimatedWeight, is_head: bool) {
        self.fit_linear(weight, is_head);
        if let Some(bytes) = self.quantized_bytes(weight, is_head) {
            self.weights_bytes = self.weights_bytes + bytes - weight.bytes;
        } else if !weight.is_computed && !self.is_copied(weight) {
            self.mapped_bytes += weight.bytes;
        }
    }

    /// Bytes of a weight that a CPU quantizes.
    fn quantized_bytes(&self, weight: &EstimatedWeight, is_head: bool) -> Option<usize> {
        match self.target {
            Target::Cpu => quantized_bytes(self.precision, is_head, [weight.rows, weight.cols]),
            Target::Cuda => None,
        }
    }

    /// Counts a matrix of products, which a GPU may keep quantized.
    fn count_product(&mut self, role: LinearRole, parts: &[WeightSlice<'_>]) -> EstimatedWeight {
        let packed = match self.target {
            Target::Cuda => packed_format(parts, gate_order(role, parts).0),
            Target::Cpu => None,
        };
        let weight = self.count_matrix(parts);
        let Some(format) = packed else { return weight };
        self.product_scratch.count(weight.rows, weight.cols, has_fp8_inputs(parts));
        if let Some(order) = input_order(parts) {
            self.product_scratch.count_gathered(order.len());
            self.weights_bytes += size_of_val(order);
        }
        EstimatedWeight { bytes: self.count_packed(&weight, format), ..weight }
    }

    /// Counts a weight in the form in which a GPU keeps it instead of bf16. Returns its bytes; rows that are short take more.
    fn count_packed(&mut self, weight: &EstimatedWeight, format: PackedFormat) -> usize {
        let bytes = format.codes_bytes(weight.rows, weight.cols) + format.scales_bytes(weight.rows, weight.cols);
        self.weights_bytes = self.weights_bytes - weight.bytes + bytes;
        bytes
    }

    /// Whether a CPU copies the weights of this layer.
    fn is_copied(&self, weight: &EstimatedWeight) -> bool {
        self.target == Target::Cpu && weight.is_bf16 && CpuEstimate::copies_bf16()
    }

    fn fit_linear(&mut self, weight: &EstimatedWeight, is_head: bool) {
        let (is_quantized, is_copied) = (self.quantized_bytes(weight, is_head).is_some(), self.is_copied(weight));
        let widest = match () {
            () if is_quantized => &mut self.widest.quantized,
            () if is_copied => &mut self.widest.panels,
            () => &mut self.widest.plain,
        };
        *widest = weight.cols.max(*widest);
    }

    /// The width of the hidden state, with a drafter that of the widest one.
    fn fit_hidden(&mut self, width: usize) {
        self.hidden = if self.drafter.is_some() { self.hidden.max(width) } else { width };
    }

    fn count_vectors(&mut self, vectors: &[WeightSlice<'_>]) -> EstimatedWeight {
        self.count_elements(vectors.iter().map(|vector| vector.cols.len()).sum())
    }

    /// Counts elements of vectors.
    fn count_elements(&mut self, elements: usize) -> EstimatedWeight {
        let bytes = match self.target {
            Target::Cpu => elements * 4,
            Target::Cuda => elements * 2,
        };
        self.weights_bytes += bytes;
        EstimatedWeight { rows: 1, cols: elements, bytes, is_bf16: false, is_computed: true }
    }
}

/// The error of ops that an estimator lacks.
fn computes_nothing() -> DeviceError {
    DeviceError::Unsupported {
        what: "an estimate".to_owned(),
        found: "a step".to_owned(),
        expected: "loading alone".to_owned(),
    }
}

impl Device for Estimator {
    type Weight = EstimatedWeight;
    type Tensor = ();
    type Product = ();

    fn tensor_parallel(&self) -> TensorParallel {
        self.tp
    }

    fn pipeline_stage(&self) -> PipelineStage {
        self.stage
    }

    fn lacks(&self) -> &'static [Feature] {
        match self.target {
            Target::Cpu => &[],
            Target::Cuda => CudaDevice::LACKS,
        }
    }

    fn begin_drafter(&mut self, kind: DrafterKind, _vocab_size: usize) {
        self.drafter = Some(kind);
    }

    fn load_linear(
        &mut self,
        role: LinearRole,
        parts: &[WeightSlice<'_>],
        bias: &[WeightSlice<'_>],
    ) -> Result<EstimatedWeight, DeviceError> {
        self.count_vectors(bias);
        let weight = self.count_product(role, parts);
        if matches!(role, LinearRole::Out | LinearRole::Down) {
            self.fit_hidden(parts.iter().map(|part| part.rows.len()).sum());
        }
        self.count_use(&weight, role == LinearRole::Head);
        Ok(weight)
    }

    fn load_embedding(&mut self, table: WeightSlice<'_>, _first_token: u32) -> Result<EstimatedWeight, DeviceError> {
        self.fit_hidden(table.cols.len());
        self.load_positions(table)
    }

    fn tie_head(&mut self, embedding: &EstimatedWeight) -> Result<EstimatedWeight, DeviceError> {
        self.fit_linear(embedding, true);
        if let Some(bytes) = self.quantized_bytes(embedding, true) {
            self.weights_bytes += bytes;
        } else if self.is_copied(embedding) {
            self.weights_bytes += embedding.bytes;
        }
        Ok(*embedding)
    }

    fn load_draft_head(&mut self, head: WeightSlice<'_>, token_ids: Vec<u32>) -> Result<EstimatedWeight, DeviceError> {
        let weight = self.count_product(LinearRole::Head, &[head]);
        self.count_use(&weight, true);
        self.draft_outputs = token_ids.len();
        if self.target == Target::Cuda {
            self.weights_bytes += self.limits.vocab_size * size_of::<u32>();
        }
        Ok(weight)
    }

    fn load_head_copy(&mut self, head: &mut EstimatedWeight, rounded: WeightSlice<'_>) -> Result<(), DeviceError> {
        let format = match self.target {
            Target::Cuda => copy_format(&rounded, self.batch_invariant),
            Target::Cpu => None,
        };
        let bytes =
            |format: PackedFormat| format.codes_bytes(head.rows, head.cols) + format.scales_bytes(head.rows, head.cols);
        self.weights_bytes += format.map_or(0, bytes);
        Ok(())
    }

    fn product(_part: LowRankPart) {}

    fn adapter_bytes(&self, layers: &[AdapterSlots]) -> u64 {
        match self.target {
            Target::Cpu => layers.iter().map(AdapterSlots::f32_bytes).sum::<usize>() as u64,
            Target::Cuda => {
                cuda::adapter_bytes(layers, tensor_rows(&self.limits, largest_bucket(self.limits.max_rows)))
            }
        }
    }

    fn allocate_adapters(&mut self, layers: &[(&EstimatedWeight, AdapterSlots)]) -> Result<(), DeviceError> {
        match self.target {
            Target::Cpu => Ok(()),
            Target::Cuda => layers.iter().try_for_each(|(_, slots)| cuda::check_slots(slots)),
        }
    }

    fn load_norm(&mut self, norm: &NormSlices<'_>) -> Result<EstimatedWeight, DeviceError> {
        let vectors = if norm.kind == NormKind::Layer { 2 } else { 1 };
        Ok(self.count_elements(vectors * norm.width))
    }

    fn load_positions(&mut self, table: WeightSlice<'_>) -> Result<EstimatedWeight, DeviceError> {
        let weight = self.count_matrix(&[table]);
        self.mapped_bytes += weight.bytes;
        Ok(weight)
    }

    fn load_experts(&mut self, layer: &ExpertSlices<'_>) -> Result<EstimatedWeight, DeviceError> {
        let (count, hidden) = (layer.router.rows.len(), layer.router.cols.len());
        let inner = layer.experts.first().map_or(0, |expert| expert.down.cols.len());
        let router = EstimatedWeight { cols: hidden, ..self.count_elements(count * hidden) };
        // It is computed in f32 in every precision.
        self.widest.plain = self.widest.plain.max(hidden);
        let gate_ups: Vec<&[WeightSlice<'_>]> = layer.experts.iter().map(|expert| &expert.gate_up[..]).collect();
        let downs: Vec<_> = layer.experts.iter().map(|expert| std::slice::from_ref(&expert.down)).collect();
        let formats = match self.target {
            Target::Cuda => expert_formats(layer),
            Target::Cpu => [None; 2],
        };
        self.count_experts(&gate_ups, formats[0]);
        self.count_experts(&downs, formats[1]);
        if let Some(cols) = fp8_expert_cols(layer, formats) {
            self.product_scratch.count_expert_inputs(layer.routing.top_k, cols);
        }
        for expert in &layer.experts {
            self.count_vectors(&expert.gate_up_bias);
            self.count_vectors(expert.down_bias.as_slice());
        }
        self.count_vectors(layer.router_bias.as_slice());
        self.count_vectors(layer.selection_bias.as_slice());
        self.count_elements(layer.scales.as_ref().map_or(0, |scales| scales.cols.len()));
        // The buffers are those of the largest layer.
        self.expert_cols = self.expert_cols.max(ExpertBuffers::cols(count, layer.width(), inner));
        self.expert_sizes = self.expert_sizes.fitting(layer);
        Ok(router)
    }

    fn load_recurrent(&mut self, weights: &RecurrentWeights) -> Result<EstimatedWeight, DeviceError> {
        let RecurrentWeights { shape, conv, conv_bias, a_log, dt_bias, skip, norm } = weights;
        if self.target == Target::Cuda {
            self.product_scratch.count_recurrent(RecurrentKernel::new(shape)?);
        }
        let cols = [conv, conv_bias, a_log, dt_bias, skip, norm].into_iter().map(Vec::len).sum();
        // All devices keep them in f32.
        let bytes = cols * size_of::<f32>();
        self.weights_bytes += bytes;
        Ok(EstimatedWeight { rows: 1, cols, bytes, is_bf16: false, is_computed: true })
    }

    fn load_latent(&mut self, weights: &LatentWeights<'_>) -> Result<EstimatedWeight, DeviceError> {
        if self.target == Target::Cuda {
            check_latent_shape(&weights.shape)?;
        }
        self.count_vectors(std::slice::from_ref(&weights.norm));
        let up = self.count_matrix(std::slice::from_ref(&weights.up));
        if !up.is_computed {
            self.mapped_bytes += up.bytes;
        }
        Ok(up)
    }

    fn tensor(&mut self, cols: usize) -> Result<(), DeviceError> {
        self.tensor_cols += cols;
        Ok(())
    }

    fn memory_plan(&self, attention: &AttentionSpec) -> Result<MemoryPlan, DeviceError> {
        let estimate = self.estimate(attention);
        Ok(MemoryPlan {
            weights_bytes: estimate.weights_bytes,
            workspace_bytes: estimate.workspace_bytes,
            block_bytes: estimate.block_bytes,
            max_blocks: 0,
            max_blocks_again: 0,
        })
    }

    fn allocate_cache(&mut self, _attention: &AttentionSpec, _num_blocks: usize) -> Result<(), DeviceError> {
        Err(computes_nothing())
    }

    fn join_row(
        &mut self,
        _row: RowId,
        _tokens: &[TokenId],
        _num_prompt_tokens: u32,
        _sampling: &SamplingParams,
    ) -> Result<(), DeviceError> {
        Err(computes_nothing())
    }

    fn run_step(
        &mut self,
        _inputs: &StepInputs,
        _forward: &mut dyn FnMut(&mut Self) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        Err(computes_nothing())
    }

    fn choose(&mut self, _masks: &[SampleMask]) -> Result<(), DeviceError> {
        Err(computes_nothing())
    }

    fn collect(&mut self, _wait: bool) -> Result<Option<Vec<SampledToken>>, DeviceError> {
        Err(computes_nothing())
    }

    fn embed(&mut self, _out: &mut (), _table: &EstimatedWeight, _scale: f32) -> Result<(), DeviceError> {
        Err(computes_nothing())
    }

    fn norm(&mut self, _out: &mut (), _x: &(), _weight: &EstimatedWeight, _eps: f32) -> Result<(), DeviceError> {
        Err(computes_nothing())
    }

    fn linear(&mut self, _out: &mut (), _x: &(), _weight: &EstimatedWeight) -> Result<(), DeviceError> {
        Err(computes_nothing())
    }

    fn gated_linear(
        &mut self,
        _out: &mut (),
        _scratch: &mut (),
        _x: &(),
        _weight: &EstimatedWeight,
        _activation: Activation,
    ) -> Result<(), DeviceError> {
        Err(computes_nothing())
    }

    fn rope_and_cache(&mut self, _qkv: &mut (), _layer: usize) -> Result<(), DeviceError> {
        Err(computes_nothing())
    }

    fn attention(&mut self, _out: &mut (), _qkv: &(), _layer: usize) -> Result<(), DeviceError> {
        Err(computes_nothing())
    }

    fn reduce_add_norm(
        &mut self,
        _out: &mut (),
        _residual: &mut (),
        _partial: &(),
        _weight: &EstimatedWeight,
        _eps: f32,
    ) -> Result<(), DeviceError> {
        Err(computes_nothing())
    }

    fn sample(&mut self, _x: &(), _head: &EstimatedWeight, _logits: LogitSpec) -> Result<(), DeviceError> {
        Err(computes_nothing())
    }
}
