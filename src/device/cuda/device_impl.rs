//! The [`Device`] interface of the CUDA device. One file: one implementation of one trait.

use engine::{
    CopiedBlock, CopiedState, HostCopies, RevisedRow, RowId, SampleMask, SampledToken, SamplingParams, TokenId,
};
use kernels::cuda::DeviceBuffer;
use kernels::cuda::copy_blocks::copy_blocks;
use kernels::cuda::gated_activation::GATE_GROUP;
use ops::{
    Activation, AdapterSlots, AttentionSpec, Device, DeviceError, DrafterKind, ExpertSlices, Feature, HeadNorms,
    HostMemory, HostSlots, LatentWeights, LinearRole, LogitSpec, LowRankPart, MemoryPlan, NormKind, NormSlices,
    PipelineStage, RecurrentWeights, StepInputs, TensorParallel, WeightSlice,
};

use super::adapters::CudaProduct;
use super::load::RowOrder;
use super::step::StepShape;
use super::weights::gate_order;
use super::{CudaDevice, CudaTensor, CudaWeight, device_error, queued, step, verify};

impl Device for CudaDevice {
    type Weight = CudaWeight;
    type Tensor = CudaTensor;
    type Product = CudaProduct;

    fn tensor_parallel(&self) -> TensorParallel {
        self.config.tensor_parallel
    }

    fn pipeline_stage(&self) -> PipelineStage {
        self.pipeline.stage
    }

    fn lacks(&self) -> &'static [Feature] {
        Self::LACKS
    }

    fn begin_drafter(&mut self, kind: DrafterKind, vocab_size: usize) {
        (self.drafter, self.loaded_vocab) = (Some(kind), vocab_size);
    }

    fn load_linear(
        &mut self,
        role: LinearRole,
        parts: &[WeightSlice<'_>],
        bias: &[WeightSlice<'_>],
    ) -> Result<CudaWeight, DeviceError> {
        let (order, group) = gate_order(role, parts);
        let weight = self.load_product(parts, order)?;
        let (rows, bias) = (weight.rows, self.load_row(bias, order)?);
        let is_partial = matches!(role, LinearRole::Out | LinearRole::Down);
        if is_partial {
            self.fit_hidden(rows);
        }
        let is_skinny = rows.is_multiple_of(8) && (role != LinearRole::GateUp || group == GATE_GROUP);
        self.all_skinny &= is_skinny;
        Ok(CudaWeight { bias, group, is_partial, vocab: self.loaded_vocab, ..weight })
    }

    fn load_embedding(&mut self, table: WeightSlice<'_>, first_token: u32) -> Result<CudaWeight, DeviceError> {
        let weight = self.load_matrix(&[table], RowOrder::Stacked)?;
        self.fit_hidden(weight.cols);
        Ok(CudaWeight { first_token, ..weight })
    }

    fn tie_head(&mut self, embedding: &CudaWeight) -> Result<CudaWeight, DeviceError> {
        self.all_skinny &= embedding.rows.is_multiple_of(8);
        self.check_invariant_weight(embedding.rows, embedding.cols)?;
        Ok(CudaWeight { vocab: self.loaded_vocab, ..*embedding })
    }

    fn load_draft_head(&mut self, head: WeightSlice<'_>, token_ids: Vec<u32>) -> Result<CudaWeight, DeviceError> {
        self.load_head_of_some(head, &token_ids)
    }

    fn load_head_copy(&mut self, head: &mut CudaWeight, rounded: WeightSlice<'_>) -> Result<(), DeviceError> {
        head.copy = self.copy_of_head(&rounded)?;
        Ok(())
    }

    fn load_norm(&mut self, norm: &NormSlices<'_>) -> Result<CudaWeight, DeviceError> {
        self.has_layer_norms |= norm.kind == NormKind::Layer;
        let (values, bias) = self.load_gain_and_bias(norm)?;
        Ok(CudaWeight { bias, ..CudaWeight::matrix(values, 1, norm.width) })
    }

    fn load_positions(&mut self, table: WeightSlice<'_>) -> Result<CudaWeight, DeviceError> {
        let weight = self.load_matrix(&[table], RowOrder::Stacked)?;
        self.num_positions = self.num_positions.min(weight.rows);
        Ok(weight)
    }

    fn load_experts(&mut self, experts: &ExpertSlices<'_>) -> Result<CudaWeight, DeviceError> {
        self.load_expert_layer(experts)
    }

    fn load_recurrent(&mut self, weights: &RecurrentWeights) -> Result<CudaWeight, DeviceError> {
        self.load_recurrent_layer(weights)
    }

    fn load_latent(&mut self, weights: &LatentWeights<'_>) -> Result<CudaWeight, DeviceError> {
        self.load_latent_layer(weights)
    }

    fn tensor(&mut self, cols: usize) -> Result<CudaTensor, DeviceError> {
        let residence = self.config.activation_residence();
        let buffer = DeviceBuffer::with_residence(&self.gpu, self.tensor_bytes(cols), residence);
        let buffer = buffer.map_err(device_error)?;
        let values = buffer.span();
        self.tensors.push(buffer);
        Ok(CudaTensor { values, cols })
    }

    fn memory_plan(&self, attention: &AttentionSpec) -> Result<MemoryPlan, DeviceError> {
        self.loader.borrow_mut().finish()?;
        self.group.join()?;
        self.plan_memory(attention)
    }

    fn allocate_cache(&mut self, attention: &AttentionSpec, num_blocks: usize) -> Result<(), DeviceError> {
        self.loader.get_mut().finish()?;
        self.take_memory(attention, num_blocks)?;
        self.graphs.plan_idle_work(self.config.limits.max_tokens, false, self.guesses.is_some());
        Ok(())
    }

    fn adapter_bytes(&self, layers: &[AdapterSlots]) -> u64 {
        super::adapter_bytes(layers, self.tensor_rows())
    }

    fn allocate_adapters(&mut self, layers: &[(&CudaWeight, AdapterSlots)]) -> Result<(), DeviceError> {
        self.take_adapters(layers)
    }

    fn product(part: LowRankPart) -> CudaProduct {
        CudaProduct::new(&part)
    }

    fn set_adapter(&mut self, weight: &CudaWeight, slot: u32, products: Vec<CudaProduct>) -> Result<(), DeviceError> {
        self.fill_adapter_slot(weight, slot, &products)
    }

    fn allocate_states(&mut self, attention: &AttentionSpec, num_states: usize) -> Result<(), DeviceError> {
        self.take_states(attention, num_states)
    }

    fn sleep_bytes(&self) -> u64 {
        self.saved_bytes()
    }

    fn sleep(&mut self) -> Result<(), DeviceError> {
        self.release_memory()
    }

    fn wake(&mut self) -> Result<(), DeviceError> {
        self.restore_memory()
    }

    fn copy_states(&mut self, copied: &[CopiedState]) -> Result<(), DeviceError> {
        self.copy_slots(copied)
    }

    fn allocate_host(&mut self, slots: HostSlots, memory: HostMemory) -> Result<[usize; 2], DeviceError> {
        self.take_host_memory(slots, memory)
    }

    fn copy_with_host(&mut self, copies: &HostCopies) -> Result<(), DeviceError> {
        self.copy_host_slots(copies)
    }

    fn join_row(
        &mut self,
        row: RowId,
        tokens: &[TokenId],
        num_prompt_tokens: u32,
        sampling: &SamplingParams,
    ) -> Result<(), DeviceError> {
        self.check_row("join_row", row)?;
        self.rows.join(&self.queue, row.0 as usize, tokens, num_prompt_tokens, sampling).map_err(device_error)
    }

    fn revise(&mut self, revised: &[RevisedRow], copied: &[CopiedBlock]) -> Result<(), DeviceError> {
        for row in revised.iter().flat_map(|revision| [revision.row, revision.parent]) {
            self.check_row("revise", row)?;
        }
        self.rows.revise(&self.queue, revised).map_err(device_error)?;
        if copied.is_empty() {
            return Ok(());
        }
        let pairs: Vec<_> = copied.iter().map(|copied| (copied.from.0, copied.to.0)).collect();
        for blocks in self.cache().all_blocks() {
            copy_blocks(&self.queue, blocks, &pairs).map_err(device_error)?;
        }
        Ok(())
    }

    fn take_logits(&mut self) -> Vec<Vec<f32>> {
        std::mem::take(&mut self.taken_logits)
    }

    fn take_guesses(&mut self) -> Vec<(RowId, Vec<TokenId>)> {
        std::mem::take(&mut self.taken_guesses)
    }

    fn run_step(
        &mut self,
        inputs: &StepInputs,
        forward: &mut dyn FnMut(&mut Self) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        step::check(inputs, &self.bounds()?)?;
        self.check_newest(inputs)?;
        if self.in_flight.len() == self.pinned_inputs.len() {
            return Err(DeviceError::Call {
                call: format!("step {}", inputs.step),
                reason: format!("{} steps are queued and not collected", self.in_flight.len()),
            });
        }
        self.reports.positions.clone_from(&inputs.logits);
        self.states.check(inputs)?;
        // Only rows with a recurrent state compute known tokens again, at most as many as a step with drafts had.
        let most_tokens = if inputs.states.is_empty() { 0 } else { 1 + 2 * self.config.max_drafts };
        self.first_short = verify::first_short(inputs, most_tokens);
        let split = |first| verify::split_into_decodes(inputs, first, self.config.limits.max_rows);
        let split = self.first_short.and_then(split);
        self.is_split = split.is_some();
        let inputs = [split.as_ref().unwrap_or(inputs), inputs];
        let bucket = self.graphs.bucket(inputs[0]);
        let slot = match bucket {
            Some(bucket) => self.run_recorded(inputs, bucket, forward)?,
            None => {
                let slot = self.begin_step(inputs, StepShape::of(inputs[0]))?;
                forward(self)?;
                slot
            }
        };
        if self.current().runs_drafter {
            self.begin_guesses(inputs, slot, bucket.is_some())?;
        }
        if self.current().is_masked {
            self.masked.wait(slot, inputs[0]);
            return Ok(());
        }
        self.end_step(slot, queued::indexed(inputs[0], inputs[1]))
    }

    fn choose(&mut self, masks: &[SampleMask]) -> Result<(), DeviceError> {
        self.choose_among(masks)
    }

    fn prepare(&mut self, forward: &mut dyn FnMut(&mut Self) -> Result<(), DeviceError>) -> Result<bool, DeviceError> {
        self.do_idle_work(forward)
    }

    fn collect(&mut self, wait: bool) -> Result<Option<Vec<SampledToken>>, DeviceError> {
        let Some(oldest) = self.in_flight.front() else { return Ok(None) };
        if wait {
            oldest.done.wait().map_err(device_error)?;
        } else if !oldest.done.is_done().map_err(device_error)? {
            return Ok(None);
        }
        self.group.check()?;
        let step = self.in_flight.pop_front().expect("there is an oldest step");
        let tokens = self.read_outputs(&step);
        self.taken_guesses = match (step.guessed, &mut self.guesses) {
            (Some(read), _) => read,
            (None, Some(guesses)) => guesses.read(step.slot, &step.guesses),
            (None, None) => Vec::new(),
        };
        self.taken_logits = step.logits;
        self.spare_events.push(step.done);
        Ok(Some(tokens))
    }

    fn embed(&mut self, out: &mut CudaTensor, table: &CudaWeight, scale: f32) -> Result<(), DeviceError> {
        self.op_embed(*out, table, scale)
    }

    fn norm(&mut self, out: &mut CudaTensor, x: &CudaTensor, weight: &CudaWeight, eps: f32) -> Result<(), DeviceError> {
        self.op_norm(*out, *x, weight, eps)
    }

    fn add_positions(&mut self, out: &mut CudaTensor, table: &CudaWeight) -> Result<(), DeviceError> {
        self.op_add_positions(*out, table)
    }

    fn linear(&mut self, out: &mut CudaTensor, x: &CudaTensor, weight: &CudaWeight) -> Result<(), DeviceError> {
        self.op_linear(out.values, x.values, weight)
    }

    fn gated_linear(
        &mut self,
        out: &mut CudaTensor,
        scratch: &mut CudaTensor,
        x: &CudaTensor,
        weight: &CudaWeight,
        activation: Activation,
    ) -> Result<(), DeviceError> {
        self.op_gated_linear(*out, *scratch, *x, weight, activation)
    }

    fn activated_linear(
        &mut self,
        out: &mut CudaTensor,
        x: &CudaTensor,
        weight: &CudaWeight,
        activation: Activation,
    ) -> Result<(), DeviceError> {
        self.op_activated_linear(*out, *x, weight, activation)
    }

    fn experts(&mut self, out: &mut CudaTensor, x: &CudaTensor, experts: &CudaWeight) -> Result<(), DeviceError> {
        self.op_experts(*out, *x, *x, experts)
    }

    fn experts_of(
        &mut self,
        out: &mut CudaTensor,
        x: &CudaTensor,
        routed: &CudaTensor,
        experts: &CudaWeight,
    ) -> Result<(), DeviceError> {
        self.op_experts(*out, *x, *routed, experts)
    }

    fn gate_rows(&mut self, out: &mut CudaTensor, x: &CudaTensor, gate: &CudaWeight) -> Result<(), DeviceError> {
        self.op_gate_rows(*out, *x, gate)
    }

    fn head_norm(
        &mut self,
        qkv: &mut CudaTensor,
        layer: usize,
        norms: &HeadNorms<'_, CudaWeight>,
        eps: f32,
    ) -> Result<(), DeviceError> {
        self.op_head_norm(*qkv, layer, norms, eps)
    }

    fn rope_and_cache(&mut self, qkv: &mut CudaTensor, layer: usize) -> Result<(), DeviceError> {
        self.op_rope_and_cache(*qkv, layer)
    }

    fn attention(&mut self, out: &mut CudaTensor, qkv: &CudaTensor, layer: usize) -> Result<(), DeviceError> {
        self.op_attention(*out, *qkv, layer)
    }

    fn latent_attention(
        &mut self,
        out: &mut CudaTensor,
        [q, latents]: [&mut CudaTensor; 2],
        layer: usize,
        weights: &CudaWeight,
    ) -> Result<(), DeviceError> {
        self.op_latent_attention(*out, [*q, *latents], layer, weights)
    }

    fn gate(&mut self, x: &mut CudaTensor, gates: &CudaTensor) -> Result<(), DeviceError> {
        self.op_gate(*x, *gates)
    }

    fn recurrent(
        &mut self,
        out: &mut CudaTensor,
        [inputs, steps]: [&CudaTensor; 2],
        layer: usize,
        weights: &CudaWeight,
        eps: f32,
    ) -> Result<(), DeviceError> {
        self.op_recurrent(*out, [*inputs, *steps], layer, weights, eps)
    }

    fn reduce_add_norm(
        &mut self,
        out: &mut CudaTensor,
        residual: &mut CudaTensor,
        partial: &CudaTensor,
        weight: &CudaWeight,
        eps: f32,
    ) -> Result<(), DeviceError> {
        self.op_reduce_add_norm(*out, *residual, *partial, weight, eps)
    }

    fn make_whole(&mut self, residual: &mut CudaTensor) -> Result<(), DeviceError> {
        self.op_make_whole(*residual)
    }

    fn reduce_norm_add_norm(
        &mut self,
        residual: &mut CudaTensor,
        partial: &mut CudaTensor,
        branch: &CudaWeight,
        next: Option<(&mut CudaTensor, &CudaWeight)>,
        eps: f32,
    ) -> Result<(), DeviceError> {
        self.op_reduce_norm_add_norm(*residual, *partial, branch, next.map(|(out, weight)| (*out, weight)), eps)
    }

    fn reduce_norm(
        &mut self,
        out: &mut CudaTensor,
        partial: &CudaTensor,
        weight: &CudaWeight,
        eps: f32,
    ) -> Result<(), DeviceError> {
        self.op_reduce_norm(*out, *partial, weight, eps)
    }

    fn add(&mut self, x: &mut CudaTensor, y: &CudaTensor) -> Result<(), DeviceError> {
        self.op_add(*x, *y)
    }

    fn scale(&mut self, x: &mut CudaTensor, factor: f32) -> Result<(), DeviceError> {
        self.op_scale(*x, factor)
    }

    fn multiply_columns(&mut self, x: &mut CudaTensor, y: &CudaTensor, first: usize) -> Result<(), DeviceError> {
        self.op_multiply_columns(*x, *y, first)
    }

    fn sample(&mut self, x: &CudaTensor, head: &CudaWeight, logits: LogitSpec) -> Result<(), DeviceError> {
        self.logit_cap = logits.cap;
        self.op_sample(*x, head)
    }

    fn runs_drafter(&self) -> bool {
        self.current().runs_drafter
    }

    fn run_guess(&mut self, pass: &mut dyn FnMut(&mut Self) -> Result<(), DeviceError>) -> Result<(), DeviceError> {
        self.run_pass(pass)
    }

    fn follow(&mut self) -> Result<(), DeviceError> {
        self.op_follow()
    }

    fn extend(&mut self) -> Result<(), DeviceError> {
        self.op_extend()
    }

    fn put_columns(&mut self, out: &mut CudaTensor, x: &CudaTensor, first: usize) -> Result<(), DeviceError> {
        self.op_put_columns(*out, *x, first)
    }

    fn guess(&mut self, x: &CudaTensor, head: &CudaWeight, logits: LogitSpec) -> Result<(), DeviceError> {
        self.logit_cap = logits.cap;
        self.op_guess(*x, head)
    }

    fn next_guess(&mut self, hidden: Option<&mut CudaTensor>) -> Result<bool, DeviceError> {
        self.op_next_guess(hidden.copied())
    }

    fn recv_hidden(&mut self, out: &mut CudaTensor) -> Result<(), DeviceError> {
        self.op_recv_hidden(*out)
    }

    fn send_hidden(&mut self, x: &CudaTensor) -> Result<(), DeviceError> {
        self.op_send_hidden(*x)
    }
}
