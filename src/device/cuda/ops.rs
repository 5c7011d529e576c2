//! The ops of a forward pass. Each is queued for the tokens of the current step.

use kernels::cuda::embed::{Table, TokenSource};
use kernels::cuda::fp8_gemm::{Fp8Split, fp8_gemm};
use kernels::cuda::gather_columns::gather_columns;
use kernels::cuda::layer_norm::layer_norm;
use kernels::cuda::library_gemm::{GemmBuffers, GemmShape};
use kernels::cuda::quantize_rows::{FP8_SLICE, Fp8Rows, quantize_rows};
use kernels::cuda::quantized_gemm::PackedWeight;
use kernels::cuda::rms_norm::add_rms_norm_fp8;
use kernels::cuda::skinny_gemm::{self, Epilogue, LinearWeight};
use kernels::cuda::sum_order::SumOrder;
use kernels::cuda::wide_gemm::{self, wide_gemm};
use kernels::cuda::{CudaError, Span, embed, gated_activation, quantized_gemm, rms_norm};
use ops::{Activation, DeviceError};

use super::cache::Cache;
use super::decoder_ops::gate_activation;
use super::group::ReduceAddNorm;
use super::memory::Workspace;
use super::{CudaDevice, CudaTensor, CudaWeight, device_error};

/// Up to this number of rows it is faster to expand quantized weights in the product than before it (kernels/README.md).
const MAX_QUANTIZED_ROWS: usize = 1024;

/// Up to this number of rows it is faster to expand weights in e4m3 in the product than to round its inputs to e4m3, too.
const MAX_BF16_INPUTS: usize = 32;

/// Rows that a norm has stored in e4m3 besides, in the scratch memory of products, for the product that follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RoundedRows {
    /// The address of the rows in bf16.
    x: u64,
    rows: usize,
    cols: usize,
}

impl CudaWeight {
    pub(crate) fn linear(&self) -> LinearWeight {
        LinearWeight { weight: self.values, bias: self.bias, n: self.rows, k: self.cols }
    }
}

impl CudaDevice {
    pub(super) fn num_tokens(&self) -> usize {
        self.current().shape.tokens
    }

    pub(crate) fn cache(&self) -> &Cache {
        self.cache.as_ref().expect("a step runs after the cache is allocated")
    }

    pub(crate) fn workspace(&self) -> &Workspace {
        self.workspace.as_ref().expect("a step runs after the workspace is allocated")
    }

    pub(crate) fn op_embed(&mut self, out: CudaTensor, table: &CudaWeight, scale: f32) -> Result<(), DeviceError> {
        self.chain.reset();
        self.unsummed = None;
        self.row_gate = None;
        self.rounded = None;
        self.rotated_norms = None;
        if self.current().only_products {
            return Ok(());
        }
        let spans = self.current().spans;
        let tokens = TokenSource {
            token_ids: spans.token_ids,
            token_rows: spans.token_rows,
            last_tokens: self.rows.state().last_tokens,
        };
        let count = self.num_tokens();
        self.keep_tokens(tokens, count)?;
        let rows = Table { values: table.values, first_token: table.first_token, cols: table.cols, scale };
        embed::embed(&self.queue, out.values, rows, tokens, count).map_err(device_error)?;
        self.group.all_reduce(&self.queue, out.values, count, table.cols)
    }

    pub(crate) fn op_norm(
        &mut self,
        out: CudaTensor,
        x: CudaTensor,
        weight: &CudaWeight,
        eps: f32,
    ) -> Result<(), DeviceError> {
        // A row may consist of several groups.
        let rows = self.num_tokens() * (x.cols / weight.cols);
        self.run_deferred()?;
        self.flush()?;
        if self.current().only_products {
            return Ok(());
        }
        if let Some(norm) = weight.layer_norm() {
            return layer_norm(&self.queue, out.values, x.values, norm, rows, weight.cols, eps).map_err(device_error);
        }
        rms_norm::rms_norm(&self.queue, out.values, x.values, weight.values, rows, weight.cols, eps)
            .map_err(device_error)
    }

    pub(crate) fn op_linear(&mut self, out: Span, x: Span, weight: &CudaWeight) -> Result<(), DeviceError> {
        // Outputs of experts of another width than the model are projected.
        self.sum_experts()?;
        if self.defer(out, x, weight)? {
            return Ok(());
        }
        self.adapted_product(out, x, weight, Epilogue::Store)
    }

    /// This worker's part of a sum of products.
    pub(super) fn partial_product(&mut self, out: Span, x: Span, weight: &CudaWeight) -> Result<(), DeviceError> {
        self.product(out, x, weight, self.num_tokens(), weight.rows, Epilogue::Store)
    }

    /// `out [m, stride]` = `x [m, K]` @ weight^T, by an own kernel or by the library, which has no activation.
    pub(super) fn product(
        &mut self,
        out: Span,
        x: Span,
        weight: &CudaWeight,
        m: usize,
        stride: usize,
        epilogue: Epilogue,
    ) -> Result<(), DeviceError> {
        // Of this product alone: it may overwrite the memory of the rounded rows.
        let rounded = self.rounded.take();
        if !self.current().only_products && self.link(out, x, weight, stride, epilogue)? {
            return Ok(());
        }
        if self.config.batch_invariant && weight.packed.is_none() {
            return self.invariant_product(out, x, weight, m, stride, epilogue);
        }
        let x = self.ordered_inputs(x, weight, m)?;
        let is_gated = matches!(epilogue, Epilogue::Gated(_));
        if stride == weight.rows && (self.is_own(m, weight) || is_gated) {
            if self.current().only_products {
                return Ok(());
            }
            self.flush()?;
            return match weight.packed_weight() {
                Some(packed) if self.rounds_inputs(m, weight) => {
                    self.fp8_product(out, x, &packed, m, epilogue, rounded)
                }
                Some(packed) if self.config.batch_invariant => {
                    quantized_gemm::quantized_gemm_in_order(&self.queue, out, x, &packed, m, epilogue)
                }
                Some(packed) if m > skinny_gemm::MAX_ROWS => {
                    quantized_gemm::quantized_wide_gemm(&self.queue, out, x, &packed, m, epilogue)
                }
                Some(packed) => quantized_gemm::quantized_gemm(&self.queue, out, x, &packed, m, epilogue),
                None if m > skinny_gemm::MAX_ROWS => {
                    let linear = weight.linear();
                    wide_gemm(&self.queue, out, x, &linear, m, epilogue, SumOrder::for_shape(linear.n, linear.k))
                }
                None => skinny_gemm::skinny_gemm(&self.queue, out, x, &weight.linear(), m, epilogue),
            }
            .map_err(device_error);
        }
        self.flush()?;
        let to_f32 = epilogue == Epilogue::StoreF32;
        let shape = GemmShape { m, n: weight.rows, k: weight.cols, stride, to_f32 };
        let buffers = GemmBuffers { y: out, x, w: self.expanded(weight)?, bias: weight.bias };
        self.gemm.run(&self.queue, shape, buffers).map_err(device_error)
    }

    /// The inputs `[m, K]` in the order of the weight's columns: if that is not their own, gathered into a buffer that the next product may
    /// overwrite.
    pub(super) fn ordered_inputs(&mut self, x: Span, weight: &CudaWeight, m: usize) -> Result<Span, DeviceError> {
        let Some(order) = weight.packed.and_then(|packed| packed.inputs) else { return Ok(x) };
        let gathered = self.product_scratch.gathered(self.workspace().products.span(), m, weight.cols);
        if !self.current().only_products {
            self.flush()?;
            gather_columns(&self.queue, gathered, x, order, m, weight.cols).map_err(device_error)?;
        }
        Ok(gathered)
    }

    /// The weight in bf16: if it is quantized, expanded into a buffer that the next product may overwrite.
    fn expanded(&self, weight: &CudaWeight) -> Result<Span, DeviceError> {
        let Some(packed) = weight.packed_weight() else { return Ok(weight.values) };
        let buffer = self.workspace().products.span().part(0, weight.rows * weight.cols * 2);
        if !self.current().only_products {
            quantized_gemm::dequantize(&self.queue, buffer, &packed).map_err(device_error)?;
        }
        Ok(buffer)
    }

    /// Whether inputs are rounded to e4m3: many rows, whose products the tensor cores limit, or any if that must not depend on them.
    fn rounds_inputs(&self, m: usize, weight: &CudaWeight) -> bool {
        weight.packed.is_some_and(|packed| packed.has_fp8_inputs) && self.rounds_rows(m)
    }

    fn rounds_rows(&self, m: usize) -> bool {
        let are_many = m > MAX_BF16_INPUTS || self.config.batch_invariant;
        are_many && quantized_gemm::has_hopper_kernel(&self.gpu)
    }

    /// Where a norm stores its rows in e4m3, too, if a product with such inputs may follow.
    fn rounded_by_norm(&self, norm: &ReduceAddNorm) -> Option<Fp8Rows> {
        let ReduceAddNorm { rows, cols, layer_norm, .. } = *norm;
        let is_wanted = self.product_scratch.has_fp8_inputs(cols) && self.rounds_rows(rows);
        let is_possible = layer_norm.is_none() && self.group.size() == 1 && cols.is_multiple_of(FP8_SLICE);
        (is_wanted && is_possible).then(|| Fp8Rows::in_buffer(self.workspace().products.span(), rows, cols))
    }

    /// A product whose inputs are rounded to e4m3 first, unless the norm before it did so.
    fn fp8_product(
        &self,
        out: Span,
        x: Span,
        weight: &PackedWeight,
        m: usize,
        epilogue: Epilogue,
        rounded: Option<RoundedRows>,
    ) -> Result<(), CudaError> {
        let scratch = self.workspace().products.span();
        let rows = Fp8Rows::in_buffer(scratch, m, weight.k);
        if rounded != Some(RoundedRows { x: x.address(), rows: m, cols: weight.k }) {
            quantize_rows(&self.queue, rows, x, m, weight.k)?;
        }
        let choose = if self.config.batch_invariant { Fp8Split::invariant } else { Fp8Split::for_shape };
        let split = choose(weight.n, weight.k, weight.format, m, self.gpu.num_multiprocessors() as usize);
        fp8_gemm(&self.queue, out, rows, weight, m, epilogue, split)
    }

    /// Whether an own kernel computes this product, and not the library.
    fn is_own(&self, m: usize, weight: &CudaWeight) -> bool {
        if self.config.batch_invariant {
            return true;
        }
        let most = match weight.packed {
            Some(_) if self.rounds_inputs(m, weight) => usize::MAX,
            Some(_) if quantized_gemm::has_hopper_kernel(&self.gpu) => MAX_QUANTIZED_ROWS,
            _ => skinny_gemm::MAX_ROWS,
        };
        self.config.use_fast_kernels && m <= most && weight.rows.is_multiple_of(8)
    }

    /// The same for gate and up with their activation.
    fn is_own_gated(&self, m: usize, weight: &CudaWeight) -> bool {
        let is_wide = || weight.packed.is_none() && wide_gemm::is_fastest_gated(&self.gpu, &weight.linear(), m);
        self.is_own(m, weight) || self.config.use_fast_kernels && is_wide()
    }

    pub(crate) fn op_gated_linear(
        &mut self,
        out: CudaTensor,
        scratch: CudaTensor,
        x: CudaTensor,
        weight: &CudaWeight,
        activation: Activation,
    ) -> Result<(), DeviceError> {
        let activation = gate_activation(activation);
        let (rows, cols) = (self.num_tokens(), weight.rows / 2);
        let is_fused = activation.is_fused() && !self.splits_activation(rows, weight);
        if weight.group == gated_activation::GATE_GROUP && self.is_own_gated(rows, weight) && is_fused {
            return self.adapted_product(out.values, x.values, weight, Epilogue::Gated(activation));
        }
        self.op_linear(scratch.values, x.values, weight)?;
        if self.current().only_products {
            return Ok(());
        }
        self.flush()?;
        gated_activation::gated_activation(
            &self.queue,
            out.values,
            scratch.values,
            activation,
            rows,
            cols,
            weight.group,
        )
        .map_err(device_error)
    }

    pub(crate) fn op_reduce_add_norm(
        &mut self,
        out: CudaTensor,
        residual: CudaTensor,
        partial: CudaTensor,
        weight: &CudaWeight,
        eps: f32,
    ) -> Result<(), DeviceError> {
        if self.current().only_products {
            return Ok(());
        }
        let operands = ReduceAddNorm {
            out: out.values,
            residual: residual.values,
            partial: partial.values,
            weight: weight.values,
            layer_norm: weight.layer_norm(),
            rows: self.num_tokens(),
            cols: weight.cols,
            eps,
        };
        if self.finish_deferred(operands)? || self.sum_experts_add_norm(&operands)? {
            return Ok(());
        }
        self.flush()?;
        if let Some(codes) = self.rounded_by_norm(&operands) {
            let ReduceAddNorm { out, residual, partial, weight, rows, cols, eps, .. } = operands;
            self.rounded = Some(RoundedRows { x: out.address(), rows, cols });
            return add_rms_norm_fp8(&self.queue, out, residual, partial, weight, codes, rows, cols, eps)
                .map_err(device_error);
        }
        self.group.reduce_add_norm(&self.queue, operands)
    }

    pub(crate) fn op_make_whole(&mut self, residual: CudaTensor) -> Result<(), DeviceError> {
        let rows = self.num_tokens();
        if self.current().only_products || !self.group.has_owners(rows, residual.cols) {
            return Ok(());
        }
        self.run_deferred()?;
        self.flush()?;
        self.group.make_whole(&self.queue, residual.values, rows, residual.cols)
    }
}
