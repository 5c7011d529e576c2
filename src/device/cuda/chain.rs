//! Chains of matrix products: in a decode step with few rows, products are collected until another op must run, and
//! then launched as one kernel.
//!
//! A partial product waits until the norm that follows it is known. One link of the chain then multiplies, sums over
//! the group, adds to the residual and stores rows without their norm scale. Every product that reads these rows
//! applies the scale.

use std::ops::RangeInclusive;
use std::sync::Arc;

use kernels::cuda::linear_chain::{
    AddNorm, ChainScratch, Link, LinkEnd, LinkWeight, MAX_LINKS, MAX_ROWS, RowScale, has_kernel, linear_chain,
    norm_slices,
};
use kernels::cuda::skinny_gemm::Epilogue;
use kernels::cuda::{CudaError, DeviceBuffer, Gpu, Span};
use ops::DeviceError;

use super::group::ReduceAddNorm;
use super::step::StepShape;
use super::{CudaDevice, CudaWeight, device_error};

/// Number of rows for which a chain is faster on one GPU, by measurement (kernels/README.md). In a group, sums over it
/// are part of the chain.
const CHAINED_ROWS: RangeInclusive<usize> = 2..=8;
/// The same for models in which several query heads share keys and values.
const CHAINED_ROWS_OF_GROUPED_QUERIES: RangeInclusive<usize> = 1..=8;
/// The same for models with quantized weights.
const CHAINED_ROWS_OF_QUANTIZED: RangeInclusive<usize> = 1..=MAX_ROWS;

/// The state between two products of the current step.
#[derive(Default)]
pub(crate) struct Chain {
    /// `None` if products are launched one by one.
    memory: Option<Memory>,
    /// A partial product that waits for its norm.
    deferred: Option<Deferred>,
    /// Rows that were stored without their scale.
    unscaled: Option<(Span, RowScale)>,
    /// Products that have not been launched.
    links: Vec<Link>,
}

struct Memory {
    /// Number of rows for which one GPU uses chains.
    chained_rows: RangeInclusive<usize>,
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
    /// For norms of `cols` columns. `has_grouped_queries`: whether several query heads share keys and values;
    /// `is_quantized`: whether there are quantized weights.
    pub(crate) fn new(
        gpu: &Arc<Gpu>,
        cols: usize,
        has_grouped_queries: bool,
        is_quantized: bool,
    ) -> Result<Self, CudaError> {
        let chained_rows = match has_grouped_queries {
            _ if is_quantized => CHAINED_ROWS_OF_QUANTIZED,
            true => CHAINED_ROWS_OF_GROUPED_QUERIES,
            false => CHAINED_ROWS,
        };
        let squares = DeviceBuffer::new(gpu, squares_bytes(cols))?;
        let memory = Memory { chained_rows, scratch: ChainScratch::new(gpu)?, squares };
        Ok(Self { memory: Some(memory), ..Self::default() })
    }

    /// The scale that must still be applied to the rows at `x`.
    pub(crate) fn scale_of(&self, x: Span) -> Option<RowScale> {
        self.unscaled.filter(|(rows, _)| rows.address() == x.address()).map(|(_, scale)| scale)
    }

    /// Drops the state of the last step; called before the first op of every step.
    pub(crate) fn reset(&mut self) {
        self.deferred = None;
        self.unscaled = None;
        self.links.clear();
    }
}

fn squares_bytes(cols: usize) -> usize {
    MAX_ROWS * norm_slices(cols) * 4
}

/// Bytes that [`Chain::new`] allocates on a GPU with `multiprocessors`.
pub(crate) fn bytes(cols: usize, multiprocessors: usize) -> usize {
    squares_bytes(cols) + ChainScratch::bytes(multiprocessors)
}

impl CudaWeight {
    /// The weight as a link of a chain takes it.
    fn in_chain(&self) -> LinkWeight {
        self.packed_weight().map_or(LinkWeight::Plain(self.linear()), LinkWeight::Packed)
    }
}

impl CudaDevice {
    /// Whether chains are possible for this model: the kernel must support every matrix.
    pub(crate) fn can_chain(&self) -> bool {
        let CudaDevice { config, gpu, .. } = self;
        // Stages take part in the same exchanges, and some of them may not support chains.
        self.pipeline.stage.count == 1
            && config.use_fast_kernels
            && !config.batch_invariant
            && self.all_skinny
            && !self.has_layer_norms
            && !self.expert_sizes.has_experts()
            && has_kernel(gpu)
    }

    /// Whether products of the current step are collected.
    fn chains(&self) -> bool {
        let StepShape { tokens, prefill_rows, samples, has_adapters, .. } = self.current().shape;
        // Such a step does not gather the positions that sample, because scales are stored by token. Products of adapters are no
        // links. The output head of a masked step runs later, and not as a part of its recording.
        let is_masked = self.current().is_masked;
        let decodes =
            prefill_rows == 0 && samples == tokens && self.reports.positions.is_empty() && !has_adapters && !is_masked;
        let is_faster = |memory: &Memory| match self.group.size() {
            1 => memory.chained_rows.contains(&tokens),
            _ => tokens <= MAX_ROWS && self.group.fused().is_some(),
        };
        self.chain.memory.as_ref().is_some_and(is_faster) && decodes && !self.current().only_products
    }

    /// Defers the partial product until [`CudaDevice::finish_deferred`]; returns false if it must run at once.
    pub(crate) fn defer(&mut self, out: Span, x: Span, weight: &CudaWeight) -> Result<bool, DeviceError> {
        let joins = weight.is_partial && self.chains();
        if joins {
            self.run_deferred()?;
            self.chain.deferred = Some(Deferred { out, x, weight: *weight });
        }
        Ok(joins)
    }

    /// Runs the deferred product, if there is one: what follows it is not the norm that would be a part of it. The same for a
    /// gate whose rows wait for experts.
    pub(crate) fn run_deferred(&mut self) -> Result<(), DeviceError> {
        if let Some(Deferred { out, x, weight }) = self.chain.deferred.take() {
            self.partial_product(out, x, &weight)?;
        }
        self.run_row_gate()
    }

    /// Adds a link for the deferred product and the norm; returns false if no product was deferred.
    pub(crate) fn finish_deferred(&mut self, norm: ReduceAddNorm) -> Result<bool, DeviceError> {
        let deferred = self.chain.deferred.take();
        self.chain.unscaled = None;
        let (Some(Deferred { out, x, weight }), Some(memory)) = (deferred, &self.chain.memory) else {
            return Ok(false);
        };
        assert_eq!(out.address(), norm.partial.address(), "the norm that follows a partial product takes it");
        let squares = memory.squares.span();
        let end = LinkEnd::AddNorm(AddNorm { residual: norm.residual, gain: norm.weight, squares });
        self.add_link(Link { y: norm.out, pitch: norm.cols, x, linear: weight.in_chain(), end, scale: None })?;
        self.chain.unscaled = Some((norm.out, RowScale { squares, cols: norm.cols, eps: norm.eps }));
        Ok(true)
    }

    /// Adds a link for the product if its rows lack their scale; returns false if it must run at once.
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
            self.add_link(Link { y, pitch, x, linear: weight.in_chain(), end: LinkEnd::Store(epilogue), scale })?;
        }
        Ok(scale.is_some())
    }

    fn add_link(&mut self, link: Link) -> Result<(), DeviceError> {
        let is_other = |other: &Link| other.linear.name() != link.linear.name();
        if self.chain.links.len() == MAX_LINKS || self.chain.links.last().is_some_and(is_other) {
            self.flush()?;
        }
        self.chain.links.push(link);
        Ok(())
    }

    /// Launches the collected links. Must be called before any other op of a step.
    pub(crate) fn flush(&mut self) -> Result<(), DeviceError> {
        self.rounded = None;
        let (Some(memory), false) = (&self.chain.memory, self.chain.links.is_empty()) else { return Ok(()) };
        let rows = self.current().shape.tokens;
        let links = std::mem::take(&mut self.chain.links);
        linear_chain(&self.queue, &links, rows, &memory.scratch, self.group.fused()).map_err(device_error)
    }
}
