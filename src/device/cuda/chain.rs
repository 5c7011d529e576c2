//! Chains of matrix products: in a decode step with few rows, products are collected until another op must run, and
//! then launched as one kernel.
//!
//! A partial product waits until the norm that follows it is known. One link of the chain then multiplies, sums over
//! the group, adds to the residual and stores rows without their norm scale. Every product that reads these rows
//! applies the scale.
//!
//! A norm behind a branch has two scales, so a link stores the rows of the residual and of the branch apart, and the products that
//! read them add both. The residual lacks the branch until the next such link, or until another op reads it.

use std::ops::RangeInclusive;
use std::sync::Arc;

use kernels::cuda::branch_norm::{BranchNorm, branch_norm};
use kernels::cuda::linear_chain::{
    AddBranch, AddNorm, BranchBefore, ChainScratch, Link, LinkEnd, LinkWeight, MAX_BRANCH_ROWS, MAX_LINKS, MAX_ROWS,
    RowScale, branch_squares_bytes, has_kernel, linear_chain, norm_slices,
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
    /// A residual, and the branch that it lacks.
    lacking: Option<(Span, BranchBefore)>,
    /// Products that have not been launched.
    links: Vec<Link>,
}

struct Memory {
    /// Number of rows for which one GPU uses chains.
    chained_rows: RangeInclusive<usize>,
    scratch: ChainScratch,
    /// `[MAX_ROWS, slices]` f32.
    squares: DeviceBuffer,
    /// `[MAX_BRANCH_ROWS, cols]` bf16: the branch that the residual lacks.
    branch: DeviceBuffer,
    /// The squares of this branch, and those of the next one.
    branch_squares: [DeviceBuffer; 2],
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
        let new_squares = || DeviceBuffer::new(gpu, branch_squares_bytes(MAX_BRANCH_ROWS, cols));
        let memory = Memory {
            chained_rows,
            scratch: ChainScratch::new(gpu)?,
            squares: DeviceBuffer::new(gpu, squares_bytes(cols))?,
            branch: DeviceBuffer::new(gpu, branch_bytes(cols))?,
            branch_squares: [new_squares()?, new_squares()?],
        };
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
        self.lacking = None;
        self.links.clear();
    }
}

fn squares_bytes(cols: usize) -> usize {
    MAX_ROWS * norm_slices(cols) * 4
}

fn branch_bytes(cols: usize) -> usize {
    MAX_BRANCH_ROWS * cols * 2
}

/// Bytes that [`Chain::new`] allocates on a GPU with `multiprocessors`.
pub(crate) fn bytes(cols: usize, multiprocessors: usize) -> usize {
    let branches = branch_bytes(cols) + 2 * branch_squares_bytes(MAX_BRANCH_ROWS, cols);
    squares_bytes(cols) + branches + ChainScratch::bytes(multiprocessors)
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
            // A product that gathers its inputs first is no link.
            && !self.product_scratch.has_gathered()
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
            self.run_deferred_product()?;
            self.chain.deferred = Some(Deferred { out, x, weight: *weight });
        }
        Ok(joins)
    }

    /// Runs what waits for a later op: the deferred product, since what follows it is not the norm that would be a part of it; the sum of
    /// the residual and the branch that it lacks; a gate whose rows wait for experts.
    pub(crate) fn run_deferred(&mut self) -> Result<(), DeviceError> {
        self.run_deferred_product()?;
        self.complete_residual()
    }

    /// Adds the branch that the residual lacks to it.
    fn complete_residual(&mut self) -> Result<(), DeviceError> {
        let Some((residual, before)) = self.chain.lacking.take() else { return Ok(()) };
        self.flush()?;
        let memory = self.chain.memory.as_ref().expect("chains have memory");
        let RowScale { cols, eps, .. } = before.scale;
        let norm = BranchNorm { residual, branch: memory.branch.span(), branch_weight: before.gain, next: None, eps };
        branch_norm(&self.queue, norm, self.num_tokens(), cols).map_err(device_error)
    }

    fn run_deferred_product(&mut self) -> Result<(), DeviceError> {
        if let Some(Deferred { out, x, weight }) = self.chain.deferred.take() {
            self.partial_product(out, x, &weight)?;
        }
        self.run_row_gate()
    }

    /// Adds a link for the deferred product and the norm; returns false if no product was deferred.
    pub(crate) fn finish_deferred(&mut self, norm: ReduceAddNorm) -> Result<bool, DeviceError> {
        self.complete_residual()?;
        let deferred = self.chain.deferred.take();
        self.chain.unscaled = None;
        let (Some(Deferred { out, x, weight }), Some(memory)) = (deferred, &self.chain.memory) else {
            return Ok(false);
        };
        assert_eq!(out.address(), norm.partial.address(), "the norm that follows a partial product takes it");
        let squares = memory.squares.span();
        let end = LinkEnd::AddNorm(AddNorm { residual: norm.residual, gain: norm.weight, squares });
        self.add_link(Link { y: norm.out, pitch: norm.cols, x, linear: weight.in_chain(), end, scale: None })?;
        self.chain.unscaled =
            Some((norm.out, RowScale { squares, cols: norm.cols, eps: norm.eps, is_of_branch: false }));
        Ok(true)
    }

    /// Adds a link for the deferred product, which is a branch with the norm `branch`; returns false if no product was deferred, or there
    /// are too many rows.
    pub(crate) fn finish_deferred_branch(
        &mut self,
        residual: Span,
        branch: &CudaWeight,
        [out, weight]: [Span; 2],
        eps: f32,
    ) -> Result<bool, DeviceError> {
        let (rows, cols) = (self.num_tokens(), branch.cols);
        // A drafter reads the normed rows of the last layer.
        let has_room = rows <= MAX_BRANCH_ROWS && 2 * rows <= self.tensor_rows() && !self.feeds_drafter();
        let (Some(Deferred { x, weight: product, .. }), Some(memory), true) =
            (self.chain.deferred, &self.chain.memory, has_room)
        else {
            return Ok(false);
        };
        let before = self.chain.lacking.take();
        assert!(before.is_none_or(|(lacking, _)| lacking.address() == residual.address()), "a model has one residual");
        let before = before.map(|(_, before)| before);
        let [first, second] = memory.branch_squares.each_ref().map(DeviceBuffer::span);
        let squares =
            if before.is_some_and(|before| before.scale.squares.address() == first.address()) { second } else { first };
        let add = AddBranch {
            residual,
            branch: memory.branch.span(),
            branch_gain: branch.values,
            before,
            gain: weight,
            squares,
        };
        self.chain.deferred = None;
        let end = LinkEnd::AddBranch(add);
        self.add_link(Link { y: out, pitch: cols, x, linear: product.in_chain(), end, scale: None })?;
        let scale = RowScale { squares, cols, eps, is_of_branch: true };
        self.chain.unscaled = Some((out, scale));
        self.chain.lacking = Some((residual, BranchBefore { gain: branch.values, scale }));
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
