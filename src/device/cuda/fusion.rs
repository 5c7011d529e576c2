//! A group's sum, residual add and RMSNorm inside the products around them, in decodes of few rows.
//!
//! A partial product waits until the norm that follows it is known; then one kernel multiplies, adds to the residual and stores
//! rows that lack their scale, which every product that takes them applies.

use std::sync::Arc;

use kernels::cuda::skinny_gemm::{self, AddNorm, MAX_NORM_ROWS, RowScale};
use kernels::cuda::{CudaError, DeviceBuffer, Gpu, Span};

use super::group::ReduceAddNorm;
use super::step::StepShape;
use super::{CudaDevice, CudaWeight, device_error};
use crate::DeviceError;

/// What is between two products of the current step.
#[derive(Default)]
pub(crate) struct Fusion {
    /// `[MAX_NORM_ROWS, slices]` f32; none where products and norms stay apart.
    squares: Option<DeviceBuffer>,
    /// A partial product that no kernel has been launched for.
    deferred: Option<Deferred>,
    /// Rows that lack their scale.
    unscaled: Option<(Span, RowScale)>,
}

#[derive(Clone, Copy)]
struct Deferred {
    out: Span,
    x: Span,
    weight: CudaWeight,
}

impl Fusion {
    /// For norms of `cols` columns.
    pub(crate) fn new(gpu: &Arc<Gpu>, cols: usize) -> Result<Self, CudaError> {
        let squares = DeviceBuffer::new(gpu, squares_bytes(cols))?;
        Ok(Self { squares: Some(squares), deferred: None, unscaled: None })
    }

    /// What rows at `x` are still to be multiplied by.
    pub(crate) fn scale_of(&self, x: Span) -> Option<RowScale> {
        self.unscaled.filter(|(rows, _)| rows.address() == x.address()).map(|(_, scale)| scale)
    }

    /// Forgets what a step left; called before the first op of every step, and when other rows are stored.
    pub(crate) fn reset(&mut self) {
        self.deferred = None;
        self.unscaled = None;
    }
}

/// Bytes that [`Fusion::new`] takes.
pub(crate) fn squares_bytes(cols: usize) -> usize {
    MAX_NORM_ROWS * skinny_gemm::max_norm_slices(cols) * 4
}

impl CudaDevice {
    /// Whether products, a group's sums and norms of this model may be joined: every matrix is in the kernel's reach.
    pub(crate) fn can_fuse_norms(&self) -> bool {
        let CudaDevice { config, gpu, .. } = self;
        // Stages meet in the same exchanges, and not all of them may be able to.
        self.group.size() > 1
            && self.pipeline.stage.count == 1
            && config.use_fast_kernels
            && self.all_skinny
            && !self.has_layer_norms
            && skinny_gemm::has_norm_kernel(gpu)
    }

    /// Takes the partial product of a step of decodes for [`CudaDevice::finish_deferred`]; false if it is to run at once.
    pub(crate) fn defer(&mut self, out: Span, x: Span, weight: &CudaWeight) -> bool {
        let StepShape { tokens, prefill_rows, samples, .. } = self.current().shape;
        // Positions that sample are not gathered from such a step: scales are by token.
        let decodes = prefill_rows == 0 && samples == tokens && self.reports.positions.is_empty();
        let joins = weight.is_partial && tokens <= MAX_NORM_ROWS && decodes;
        if joins && !self.current().only_products && self.group.fused().is_some() {
            self.fusion.deferred = Some(Deferred { out, x, weight: *weight });
            return true;
        }
        false
    }

    /// Runs the deferred product together with the norm; false if none was deferred.
    pub(crate) fn finish_deferred(&mut self, norm: ReduceAddNorm) -> Result<bool, DeviceError> {
        let deferred = self.fusion.deferred.take();
        self.fusion.unscaled = None;
        let (Some(Deferred { out, x, weight }), Some(squares)) = (deferred, &self.fusion.squares) else {
            return Ok(false);
        };
        assert_eq!(out.address(), norm.partial.address(), "the norm that follows a partial product takes it");
        let linear = weight.linear();
        let squares = squares.span();
        let add = AddNorm { residual: norm.residual, gain: norm.weight, squares };
        let group = self.group.fused().expect("a product is deferred where the group sums inside products");
        skinny_gemm::peer_add_norm(&self.queue, norm.out, x, &linear, norm.rows, add, group).map_err(device_error)?;
        let slices = skinny_gemm::norm_slices(linear.n, linear.k, norm.rows);
        self.fusion.unscaled = Some((norm.out, RowScale { squares, slices, cols: norm.cols, eps: norm.eps }));
        Ok(true)
    }
}
