//! The products of a decode step of few rows, collected until something else is to run, then launched as one kernel.
//!
//! A partial product waits until the norm that follows it is known: one link multiplies, sums over the group, adds to the
//! residual and stores rows that lack their scale, which every product that takes them applies.

use std::ops::RangeInclusive;
use std::sync::Arc;

use kernels::cuda::linear_chain::{
    AddNorm, ChainScratch, Link, LinkEnd, MAX_LINKS, MAX_ROWS, RowScale, has_kernel, linear_chain, norm_slices,
};
use kernels::cuda::skinny_gemm::Epilogue;
use kernels::cuda::{CudaError, DeviceBuffer, Gpu, Span};

use super::group::ReduceAddNorm;
use super::step::StepShape;
use super::{CudaDevice, CudaWeight, device_error};
use crate::DeviceError;

/// Rows of a decode that is quicker this way on one GPU, by measurement (kernels/README.md). In a group, sums over it come in.
const PAYING_ROWS: RangeInclusive<usize> = 2..=8;
/// The same where several query heads share keys and values.
const PAYING_ROWS_OF_GROUPED_QUERIES: RangeInclusive<usize> = 1..=8;

/// What is between two products of the current step.
#[derive(Default)]
pub(crate) struct Chain {
    /// None where products are launched one by one.
    memory: Option<Memory>,
    /// A partial product whose norm has not come.
    deferred: Option<Deferred>,
    /// Rows that lack their scale.
    unscaled: Option<(Span, RowScale)>,
    /// Products that no kernel has been launched for.
    links: Vec<Link>,
}

struct Memory {
    /// Rows for which one GPU joins products.
    paying_rows: RangeInclusive<usize>,
    scratch: ChainScratch,
    /// `[MAX_ROWS, slices]` f32.
    squares: DeviceBuffer,
}

#[derive(Clone, Copy)]
struct Deferred {
    out: Span,
    x: Span,
    weight: CudaWeight,
}

impl Chain {
    /// For norms of `cols` columns; `has_grouped_queries` where several query heads share keys and values.
    pub(crate) fn new(gpu: &Arc<Gpu>, cols: usize, has_grouped_queries: bool) -> Result<Self, CudaError> {
        let paying_rows = if has_grouped_queries { PAYING_ROWS_OF_GROUPED_QUERIES } else { PAYING_ROWS };
        let squares = DeviceBuffer::new(gpu, squares_bytes(cols))?;
        let memory = Memory { paying_rows, scratch: ChainScratch::new(gpu)?, squares };
        Ok(Self { memory: Some(memory), ..Self::default() })
    }

    /// What rows at `x` are still to be multiplied by.
    pub(crate) fn scale_of(&self, x: Span) -> Option<RowScale> {
        self.unscaled.filter(|(rows, _)| rows.address() == x.address()).map(|(_, scale)| scale)
    }

    /// Forgets what a step left; called before the first op of every step.
    pub(crate) fn reset(&mut self) {
        self.deferred = None;
        self.unscaled = None;
        self.links.clear();
    }
}

fn squares_bytes(cols: usize) -> usize {
    MAX_ROWS * norm_slices(cols) * 4
}

/// Bytes that [`Chain::new`] takes on a GPU of `multiprocessors`.
pub(crate) fn bytes(cols: usize, multiprocessors: usize) -> usize {
    squares_bytes(cols) + ChainScratch::bytes(multiprocessors)
}

impl CudaDevice {
    /// Whether products, a group's sums and norms of this model may be joined: every matrix is in the kernel's reach.
    pub(crate) fn can_chain(&self) -> bool {
        let CudaDevice { config, gpu, .. } = self;
        // Stages meet in the same exchanges, and not all of them may be able to.
        self.pipeline.stage.count == 1
            && config.use_fast_kernels
            && self.all_skinny
            && !self.has_layer_norms
            && has_kernel(gpu)
    }

    /// Whether products of the current step are collected.
    fn chains(&self) -> bool {
        let StepShape { tokens, prefill_rows, samples, .. } = self.current().shape;
        // Positions that sample are not gathered from such a step: scales are by token.
        let decodes = prefill_rows == 0 && samples == tokens && self.reports.positions.is_empty();
        let pays = |memory: &Memory| match self.group.size() {
            1 => memory.paying_rows.contains(&tokens),
            _ => tokens <= MAX_ROWS && self.group.fused().is_some(),
        };
        self.chain.memory.as_ref().is_some_and(pays) && decodes && !self.current().only_products
    }

    /// Takes the partial product for [`CudaDevice::finish_deferred`]; false if it is to run at once.
    pub(crate) fn defer(&mut self, out: Span, x: Span, weight: &CudaWeight) -> bool {
        let joins = weight.is_partial && self.chains();
        if joins {
            self.chain.deferred = Some(Deferred { out, x, weight: *weight });
        }
        joins
    }

    /// Makes the deferred product and the norm a link; false if none was deferred.
    pub(crate) fn finish_deferred(&mut self, norm: ReduceAddNorm) -> Result<bool, DeviceError> {
        let deferred = self.chain.deferred.take();
        self.chain.unscaled = None;
        let (Some(Deferred { out, x, weight }), Some(memory)) = (deferred, &self.chain.memory) else {
            return Ok(false);
        };
        assert_eq!(out.address(), norm.partial.address(), "the norm that follows a partial product takes it");
        let squares = memory.squares.span();
        let end = LinkEnd::AddNorm(AddNorm { residual: norm.residual, gain: norm.weight, squares });
        self.add_link(Link { y: norm.out, pitch: norm.cols, x, linear: weight.linear(), end, scale: None })?;
        self.chain.unscaled = Some((norm.out, RowScale { squares, cols: norm.cols, eps: norm.eps }));
        Ok(true)
    }

    /// Makes the product a link if its rows lack their scale; false if it is to run at once.
    pub(crate) fn link(
        &mut self,
        y: Span,
        x: Span,
        weight: &CudaWeight,
        pitch: usize,
        epilogue: Epilogue,
    ) -> Result<bool, DeviceError> {
        let scale = self.chain.scale_of(x);
        if scale.is_some() {
            self.add_link(Link { y, pitch, x, linear: weight.linear(), end: LinkEnd::Store(epilogue), scale })?;
        }
        Ok(scale.is_some())
    }

    fn add_link(&mut self, link: Link) -> Result<(), DeviceError> {
        if self.chain.links.len() == MAX_LINKS {
            self.flush()?;
        }
        self.chain.links.push(link);
        Ok(())
    }

    /// Launches the links that were collected: before any other op of a step.
    pub(crate) fn flush(&mut self) -> Result<(), DeviceError> {
        let (Some(memory), false) = (&self.chain.memory, self.chain.links.is_empty()) else { return Ok(()) };
        let rows = self.current().shape.tokens;
        let links = std::mem::take(&mut self.chain.links);
        linear_chain(&self.queue, &links, rows, &memory.scratch, self.group.fused()).map_err(device_error)
    }
}
