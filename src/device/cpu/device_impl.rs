//! The [`Device`] interface of the CPU device. One file: one implementation of one trait.

use engine::{
    CopiedBlock, CopiedState, HostCopies, RevisedRow, RowId, SampleMask, SampledToken, SamplingParams, TokenId,
};
use kernels::cpu::{self as k, Buffer};
use ops::{
    Activation, AdapterSlots, AttentionSpec, Device, DeviceError, DrafterKind, ExpertSlices, Feature, HeadNorms,
    HostMemory, HostSlots, LatentWeights, LayerAttention, LinearRole, LogitSpec, LowRankPart, MemoryPlan, NormKind,
    NormSlices, PipelineStage, RecurrentWeights, StepInputs, TensorParallel, WeightSlice,
};

use super::group::Group;
use super::latent::KvBuffer;
use super::linear::Linear;
use super::weights::CpuWeight;
use super::{Cache, CpuDevice, CpuTensor, available_memory, estimate, gate, out_of_range, weights};
use crate::slices;

impl Device for CpuDevice {
    type Weight = CpuWeight;
    type Product = LowRankPart;
    type Tensor = CpuTensor;

    fn tensor_parallel(&self) -> TensorParallel {
        self.group.as_ref().map_or(TensorParallel { rank: 0, size: 1 }, Group::tensor_parallel)
    }

    fn pipeline_stage(&self) -> PipelineStage {
        self.pipeline.as_ref().map_or(PipelineStage::WHOLE, |pipeline| pipeline.stage)
    }

    fn lacks(&self) -> &'static [Feature] {
        &[]
    }

    fn begin_drafter(&mut self, _kind: DrafterKind, _vocab_size: usize) {
        self.loads_drafter = true;
    }

    fn load_linear(
        &mut self,
        role: LinearRole,
        parts: &[WeightSlice<'_>],
        bias: &[WeightSlice<'_>],
    ) -> Result<CpuWeight, DeviceError> {
        let matrix = slices::matrix(&mut self.pool, parts, bias)?;
        self.weights_bytes += bias.iter().map(|bias| (bias.cols.len() * size_of::<f32>()) as u64).sum::<u64>();
        let linear = self.add_linear(matrix, role == LinearRole::Head);
        if role == LinearRole::Head {
            let offsets = self.exchange_vocabulary_offsets(parts[0].rows.clone())?;
            return Ok(CpuWeight::Head { linear, offsets });
        }
        let statistics = self.input_statistics.as_mut().map(|all| all.begin(parts[0].name, parts[0].cols.len()));
        Ok(CpuWeight::Linear { linear, statistics, adapters: self.adapters.add_layer() })
    }

    fn load_embedding(&mut self, table: WeightSlice<'_>, first_token: u32) -> Result<CpuWeight, DeviceError> {
        let matrix = slices::matrix(&mut self.pool, &[table], &[])?;
        self.weights_bytes += matrix.bytes() as u64;
        Ok(CpuWeight::Matrix { matrix, first_row: first_token as usize })
    }

    fn tie_head(&mut self, embedding: &CpuWeight) -> Result<CpuWeight, DeviceError> {
        let (matrix, first_row) = embedding.matrix();
        let linear = self.add_linear(matrix.clone(), true);
        if let Linear::Plain(matrix) = &linear {
            self.weights_bytes -= matrix.bytes() as u64; // Counted once for both.
        }
        let offsets = self.exchange_vocabulary_offsets(first_row..first_row + matrix.rows())?;
        Ok(CpuWeight::Head { linear, offsets })
    }

    /// Slots take memory when they are filled.
    fn allocate_adapters(&mut self, _layers: &[(&CpuWeight, AdapterSlots)]) -> Result<(), DeviceError> {
        Ok(())
    }

    fn product(part: LowRankPart) -> LowRankPart {
        part
    }

    fn set_adapter(&mut self, weight: &CpuWeight, slot: u32, parts: Vec<LowRankPart>) -> Result<(), DeviceError> {
        self.adapters.set(weight.adapters(), slot, parts);
        Ok(())
    }

    fn load_draft_head(&mut self, head: WeightSlice<'_>, token_ids: Vec<u32>) -> Result<CpuWeight, DeviceError> {
        let matrix = slices::matrix(&mut self.pool, &[head], &[])?;
        let linear = self.add_linear(matrix, true);
        self.workspace_bytes += self.guesses.fit(self.config.limits.max_rows * token_ids.len()) as u64;
        Ok(CpuWeight::DraftHead { linear, token_ids })
    }

    fn load_norm(&mut self, norm: &NormSlices<'_>) -> Result<CpuWeight, DeviceError> {
        let weight = weights::norm(norm)?;
        let vectors = if norm.kind == NormKind::Layer { 2 } else { 1 };
        self.weights_bytes += (vectors * size_of_val(weight.gain())) as u64;
        Ok(weight)
    }

    fn load_positions(&mut self, table: WeightSlice<'_>) -> Result<CpuWeight, DeviceError> {
        let matrix = slices::matrix(&mut self.pool, &[table], &[])?;
        self.weights_bytes += matrix.bytes() as u64;
        Ok(CpuWeight::Matrix { matrix, first_row: 0 })
    }

    fn load_experts(&mut self, experts: &ExpertSlices<'_>) -> Result<CpuWeight, DeviceError> {
        self.load_expert_layer(experts).map(CpuWeight::Experts)
    }

    fn load_recurrent(&mut self, weights: &RecurrentWeights) -> Result<CpuWeight, DeviceError> {
        Ok(CpuWeight::Recurrent(self.load_recurrent_layer(weights)))
    }

    fn load_latent(&mut self, weights: &LatentWeights<'_>) -> Result<CpuWeight, DeviceError> {
        self.load_latent_layer(weights).map(CpuWeight::Latent)
    }

    fn tensor(&mut self, cols: usize) -> Result<CpuTensor, DeviceError> {
        let data = Buffer::new(self.config.limits.max_tokens * cols);
        self.workspace_bytes += size_of_val(&*data) as u64;
        Ok(CpuTensor { data, cols })
    }

    fn memory_plan(&self, attention: &AttentionSpec) -> Result<MemoryPlan, DeviceError> {
        let block_bytes = estimate::block_bytes(attention, self.kv_type(attention)) as u64;
        let workers = u64::from(self.tensor_parallel().size);
        let free_bytes = available_memory() / workers;
        let [first, again] =
            self.config.kv_memory_bytes.map_or([free_bytes / 2, free_bytes - free_bytes / 8], |bytes| [bytes; 2]);
        Ok(MemoryPlan {
            weights_bytes: self.weights_bytes,
            workspace_bytes: self.workspace_bytes + (self.projection.bytes() + self.expert_buffers.bytes()) as u64,
            block_bytes,
            max_blocks: (first / block_bytes) as usize,
            max_blocks_again: (again / block_bytes) as usize,
        })
    }

    fn allocate_cache(&mut self, attention: &AttentionSpec, num_blocks: usize) -> Result<(), DeviceError> {
        let block_size = attention.block_size;
        let unsupported = |what: &str, found: usize, expected: &str| {
            Err(DeviceError::Unsupported { what: what.into(), found: found.to_string(), expected: expected.into() })
        };
        let fits = |layer: &LayerAttention| {
            layer.latent.is_some() || layer.head_dim.is_multiple_of(8) && layer.head_dim <= 512
        };
        if let Some(layer) = attention.layers.iter().find(|layer| !fits(layer)) {
            return unsupported("head dim", layer.head_dim, "multiples of 8 up to 512");
        }
        if block_size == 0 || !block_size.is_multiple_of(16) {
            return unsupported("block size", block_size, "multiples of 16");
        }
        let needed_bytes = self.memory_plan(attention)?.block_bytes * num_blocks as u64;
        let free_bytes = available_memory();
        if needed_bytes > free_bytes {
            let what = format!("{num_blocks} KV blocks");
            return Err(DeviceError::OutOfMemory { device: "cpu".into(), what, needed_bytes, free_bytes });
        }
        let kv_type = self.kv_type(attention);
        let buffer = |layer: &LayerAttention| KvBuffer::new(kv_type, num_blocks, block_size, layer);
        let buffers = attention.kv_buffers().into_iter().map(buffer).collect();
        self.cache = Some(Cache { buffers, spec: attention.clone(), num_blocks });
        Ok(())
    }

    fn sleep(&mut self) -> Result<(), DeviceError> {
        self.free_cache();
        Ok(())
    }

    fn wake(&mut self) -> Result<(), DeviceError> {
        self.restore_cache()
    }

    fn allocate_states(&mut self, attention: &AttentionSpec, num_states: usize) -> Result<(), DeviceError> {
        self.take_states(attention, num_states)
    }

    fn copy_states(&mut self, copied: &[CopiedState]) -> Result<(), DeviceError> {
        self.states.copy(copied)
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
        let max_rows = self.config.limits.max_rows;
        let state = self.rows.get_mut(row.0 as usize).ok_or_else(|| out_of_range("row", row.0, max_rows))?;
        state.join(tokens, num_prompt_tokens, sampling);
        Ok(())
    }

    fn revise(&mut self, revised: &[RevisedRow], copied: &[CopiedBlock]) -> Result<(), DeviceError> {
        self.revise_rows(revised)?;
        self.copy_blocks(copied)
    }

    fn take_logits(&mut self) -> Vec<Vec<f32>> {
        std::mem::take(&mut self.collected)
    }

    fn take_guesses(&mut self) -> Vec<(RowId, Vec<TokenId>)> {
        self.guesses.done.pop_front().unwrap_or_default()
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

    fn choose(&mut self, masks: &[SampleMask]) -> Result<(), DeviceError> {
        let tokens = self.choose_among(masks)?;
        self.append(&tokens);
        self.end_step(tokens);
        Ok(())
    }

    fn collect(&mut self, _wait: bool) -> Result<Option<Vec<SampledToken>>, DeviceError> {
        let (tokens, logits) = self.results.pop_front().unzip();
        self.collected = logits.unwrap_or_default();
        Ok(tokens)
    }

    fn embed(&mut self, out: &mut CpuTensor, table: &CpuWeight, scale: f32) -> Result<(), DeviceError> {
        self.embed_tokens(out, table, scale)
    }

    fn norm(&mut self, out: &mut CpuTensor, x: &CpuTensor, weight: &CpuWeight, eps: f32) -> Result<(), DeviceError> {
        let tokens = self.num_tokens();
        k::norm(&mut self.pool, out.rows_mut(tokens), x.rows(tokens), weight.norm(), eps);
        Ok(())
    }

    fn add_positions(&mut self, out: &mut CpuTensor, table: &CpuWeight) -> Result<(), DeviceError> {
        self.add_learned_positions(out, table)
    }

    fn linear(&mut self, out: &mut CpuTensor, x: &CpuTensor, weight: &CpuWeight) -> Result<(), DeviceError> {
        let tokens = self.num_tokens();
        let (out, x) = (out.rows_mut(tokens), x.rows(tokens));
        self.observe(x, weight);
        self.projection.project(&mut self.pool, self.isa, out, x, tokens, weight.linear());
        self.adapters.add_products(&mut self.pool, &self.inputs, out, x, weight);
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
        self.observe(x.rows(tokens), weight);
        let outs = [out.rows_mut(tokens), scratch.rows_mut(tokens)];
        let by = (weight.linear(), gate(activation));
        if self.adapters.change(weight, &self.inputs) {
            let ([out, product], x) = (outs, x.rows(tokens));
            self.projection.project(&mut self.pool, self.isa, product, x, tokens, by.0);
            self.adapters.add_products(&mut self.pool, &self.inputs, product, x, weight);
            k::gate(&mut self.pool, out, product, by.0.rows() / 2, by.1);
            return Ok(());
        }
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

    fn experts(&mut self, out: &mut CpuTensor, x: &CpuTensor, experts: &CpuWeight) -> Result<(), DeviceError> {
        self.run_experts(out, x, x, experts.experts());
        Ok(())
    }

    fn experts_of(
        &mut self,
        out: &mut CpuTensor,
        x: &CpuTensor,
        routed: &CpuTensor,
        experts: &CpuWeight,
    ) -> Result<(), DeviceError> {
        self.run_experts(out, x, routed, experts.experts());
        Ok(())
    }

    fn gate_rows(&mut self, out: &mut CpuTensor, x: &CpuTensor, gate: &CpuWeight) -> Result<(), DeviceError> {
        self.run_gate_rows(out, x, gate.linear());
        Ok(())
    }

    fn head_norm(
        &mut self,
        qkv: &mut CpuTensor,
        layer: usize,
        norms: &HeadNorms<'_, CpuWeight>,
        eps: f32,
    ) -> Result<(), DeviceError> {
        self.norm_heads(qkv, layer, norms, eps)
    }

    fn rope_and_cache(&mut self, qkv: &mut CpuTensor, layer: usize) -> Result<(), DeviceError> {
        let Cache { buffers, spec, .. } =
            self.cache.as_mut().expect("`allocate_cache` is called before the first step");
        let own = &spec.layers[layer];
        let rope = own.rope.map(|rope| &spec.ropes[rope]);
        let positions = &self.inputs.positions;
        let factors: Vec<f32> =
            own.query_scale.iter().flat_map(|scale| positions.iter().map(|position| scale.at(*position))).collect();
        let tokens = k::Rotation {
            stride: qkv.cols,
            num_heads: own.num_heads,
            positions,
            slots: self.inputs.slots_of(own.kv_group),
            angles: rope.map(|rope| [&rope.cos[..], &rope.sin[..]]),
            query_gains: &own.query_gains,
            query_factors: &factors,
        };
        match own.has_shared_kv {
            true => k::rotate_queries(&mut self.pool, &mut qkv.data, own.head_dim, &tokens),
            false => buffers[own.kv_buffer].heads_mut().rotate_and_write(&mut self.pool, &mut qkv.data, &tokens),
        }
        Ok(())
    }

    fn attention(&mut self, out: &mut CpuTensor, qkv: &CpuTensor, layer: usize) -> Result<(), DeviceError> {
        let inputs = &self.inputs;
        let Cache { buffers, spec, .. } =
            self.cache.as_ref().expect("`allocate_cache` is called before the first step");
        let own = &spec.layers[layer];
        let row = |(index, starts): (usize, &[u32])| k::AttentionRow {
            first_token: starts[0] as usize,
            num_tokens: (starts[1] - starts[0]) as usize,
            first_position: inputs.positions[starts[0] as usize] as usize,
            block_table: inputs.block_table(own.kv_group, index),
        };
        let rows: Vec<_> = inputs.row_starts.windows(2).enumerate().filter(|(_, s)| s[0] < s[1]).map(row).collect();
        let attention = k::Attention {
            num_heads: own.num_heads,
            scale: own.scale,
            window: own.window,
            chunk: own.chunk,
            q_stride: qkv.cols,
            alibi_slopes: &own.alibi_slopes,
            score_cap: own.score_cap,
            sinks: &own.sinks,
            isa: self.isa,
        };
        attention.run(&mut self.pool, &mut out.data, &qkv.data, &rows, buffers[own.kv_buffer].heads());
        Ok(())
    }

    fn latent_attention(
        &mut self,
        out: &mut CpuTensor,
        inputs: [&mut CpuTensor; 2],
        layer: usize,
        weights: &CpuWeight,
    ) -> Result<(), DeviceError> {
        self.run_latent_attention(out, inputs, layer, weights.latent());
        Ok(())
    }

    fn gate(&mut self, x: &mut CpuTensor, gates: &CpuTensor) -> Result<(), DeviceError> {
        self.run_gate(x, gates);
        Ok(())
    }

    fn recurrent(
        &mut self,
        out: &mut CpuTensor,
        inputs: [&CpuTensor; 2],
        layer: usize,
        weights: &CpuWeight,
        eps: f32,
    ) -> Result<(), DeviceError> {
        self.run_recurrent(out, inputs, layer, weights.recurrent(), eps);
        Ok(())
    }

    fn kimi_delta(
        &mut self,
        out: &mut CpuTensor,
        inputs: [&CpuTensor; 3],
        layer: usize,
        weights: &CpuWeight,
        eps: f32,
    ) -> Result<(), DeviceError> {
        self.run_kimi_delta(out, inputs, layer, weights.recurrent(), eps);
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

    fn reduce_norm_add_norm(
        &mut self,
        residual: &mut CpuTensor,
        partial: &mut CpuTensor,
        branch: &CpuWeight,
        next: Option<(&mut CpuTensor, &CpuWeight)>,
        eps: f32,
    ) -> Result<(), DeviceError> {
        self.add_normed_branch(residual, partial, branch, next, eps)
    }

    fn reduce_norm(
        &mut self,
        out: &mut CpuTensor,
        partial: &CpuTensor,
        weight: &CpuWeight,
        eps: f32,
    ) -> Result<(), DeviceError> {
        self.norm_sum(out, partial, weight, eps)
    }

    fn add(&mut self, x: &mut CpuTensor, y: &CpuTensor) -> Result<(), DeviceError> {
        let tokens = self.num_tokens();
        x.rows_mut(tokens).iter_mut().zip(y.rows(tokens)).for_each(|(x, y)| *x += y);
        Ok(())
    }

    fn scale(&mut self, x: &mut CpuTensor, factor: f32) -> Result<(), DeviceError> {
        let tokens = self.num_tokens();
        x.rows_mut(tokens).iter_mut().for_each(|x| *x *= factor);
        Ok(())
    }

    fn multiply_columns(&mut self, x: &mut CpuTensor, y: &CpuTensor, first: usize) -> Result<(), DeviceError> {
        let (tokens, cols) = (self.num_tokens(), x.cols);
        let rows = x.rows_mut(tokens).chunks_exact_mut(cols).zip(y.rows(tokens).chunks_exact(y.cols));
        for (x, y) in rows {
            x.iter_mut().zip(&y[first..first + cols]).for_each(|(x, y)| *x *= y);
        }
        Ok(())
    }

    fn sample(&mut self, x: &CpuTensor, head: &CpuWeight, logits: LogitSpec) -> Result<(), DeviceError> {
        self.logit_cap = logits.cap;
        self.report_logits(x, head)?;
        if !self.inputs.masked.is_empty() {
            return self.keep_logits(x, head);
        }
        let tokens = self.choose_tokens(x, head)?;
        self.append(&tokens);
        self.end_step(tokens);
        Ok(())
    }

    fn put_columns(&mut self, out: &mut CpuTensor, x: &CpuTensor, first: usize) -> Result<(), DeviceError> {
        let tokens = self.num_tokens();
        let rows = out.data.chunks_exact_mut(out.cols).zip(x.data.chunks_exact(x.cols)).take(tokens);
        rows.for_each(|(out, x)| out[first..first + x.len()].copy_from_slice(x));
        Ok(())
    }

    fn runs_drafter(&self) -> bool {
        self.inputs.runs_drafter
    }

    fn follow(&mut self) -> Result<(), DeviceError> {
        self.follow_tokens();
        Ok(())
    }

    fn guess(&mut self, x: &CpuTensor, head: &CpuWeight, logits: LogitSpec) -> Result<(), DeviceError> {
        self.logit_cap = logits.cap;
        self.guess_tokens(x, head)
    }

    fn extend(&mut self) -> Result<(), DeviceError> {
        self.extend_tokens();
        Ok(())
    }

    fn next_guess(&mut self, hidden: Option<&mut CpuTensor>) -> Result<bool, DeviceError> {
        Ok(self.go_on_guessing(hidden))
    }

    fn recv_hidden(&mut self, out: &mut CpuTensor) -> Result<(), DeviceError> {
        let (step, tokens) = (self.inputs.step, self.num_tokens());
        let pipeline = self.pipeline.as_mut().expect("only a stage of a pipeline receives a hidden state");
        pipeline.receive(step, out.rows_mut(tokens))
    }

    fn send_hidden(&mut self, x: &CpuTensor) -> Result<(), DeviceError> {
        let (step, tokens) = (self.inputs.step, self.num_tokens());
        self.pipeline.as_mut().expect("only a stage of a pipeline sends a hidden state").send(step, x.rows(tokens))?;
        self.end_step(Vec::new());
        Ok(())
    }
}
