//! Low-rank products of adapters beside linear layers. Kernels: `low_rank.cu`, `sm90_low_rank.cu`, and the products for few rows with
//! `low_rank` in their names. Their common head, `low_rank.cuh`, describes the operands.

use bytemuck::{Pod, Zeroable};
use half::bf16;

use super::error::ensure;
use super::gated_activation::GATE_GROUP;
use super::tensor_map::TensorMap;
use super::{Arg, CudaError, Gpu, Launch, Queue, Span};

/// Value of a token without an adapter.
pub const NO_SLOT: u32 = u32::MAX;
/// Columns that products read or leave out together.
pub const SLICE: usize = 64;
/// Ranks are rounded up to a power of two between this and [`SLICE`].
const LEAST_RANK: usize = 8;
/// Most outputs of a layer's modules that begin apart.
const MAX_MODULES: usize = 3;

const OP: &str = "low_rank";
/// Parts of K, and the threads of a block that multiplies with A.
const K_PARTS: usize = 8;
const SHRINK_THREADS: usize = 256;
/// Rows of A, and of x, in a tile.
const TILE: usize = 16;

/// The rank that adapters of up to `max_rank` take in their slots.
pub fn padded_rank(max_rank: usize) -> usize {
    max_rank.next_power_of_two().max(LEAST_RANK)
}

/// Columns of all slots: those of one module in `h`.
pub fn slot_cols(num_slots: usize, rank: usize) -> usize {
    (num_slots * rank).next_multiple_of(SLICE)
}

/// Most slots of a rank: a step names its slices by the bits of a word.
pub fn max_slots(rank: usize) -> usize {
    u64::BITS as usize * SLICE / rank
}

/// The bit of the slice with the columns of a slot.
pub fn slice_bit(slot: u32, rank: usize) -> u64 {
    1 << (slot as usize * rank / SLICE)
}

/// How the outputs of a layer are divided among modules, each of which has matrices of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Modules {
    /// One to three modules, one behind the other; the outputs with which all but the first begin.
    Stacked {
        /// Number of modules.
        count: usize,
        /// The first outputs of the second and third module; those that are not there begin at `usize::MAX`.
        starts: [usize; MAX_MODULES - 1],
    },
    /// Gate and up, in alternating groups of [`GATE_GROUP`].
    Gated,
}

impl Modules {
    /// Number of modules.
    pub fn count(self) -> usize {
        match self {
            Modules::Stacked { count, .. } => count,
            Modules::Gated => 2,
        }
    }

    /// The kernels' `Modules`: count, group, starts.
    fn words(self) -> [u32; 4] {
        let word = |start: usize| start.min(u32::MAX as usize) as u32;
        match self {
            Modules::Stacked { count, starts } => [count as u32, 0, word(starts[0]), word(starts[1])],
            Modules::Gated => [2, GATE_GROUP as u32, u32::MAX, u32::MAX],
        }
    }

    fn check(self, n: usize) -> Result<(), CudaError> {
        let Modules::Stacked { count, starts } = self else { return Ok(()) };
        ensure!(OP, (1..=MAX_MODULES).contains(&count), "{count} modules; expected 1 to {MAX_MODULES}");
        let own = &starts[..count - 1];
        let fits = own.iter().all(|&start| start < n) && own.is_sorted();
        ensure!(OP, fits, "modules begin at {own:?} of {n} outputs; expected them in order");
        Ok(())
    }
}

/// The matrices of all slots of a layer `[n, k]`.
#[derive(Debug, Clone, Copy)]
pub struct LowRankWeight {
    /// `[slots, modules, rank, k]` bf16.
    pub a: Span,
    /// `[n, slot_cols]` bf16; zero where a slot has no product.
    pub b: Span,
    /// `[slots, modules]` f32.
    pub scales: Span,
    /// A u64: the slices in which a slot has a product in this layer.
    pub in_layer: Span,
    /// Number of slots.
    pub num_slots: usize,
    /// The slots' rank: [`padded_rank`].
    pub rank: usize,
    /// Outputs of the layer.
    pub n: usize,
    /// Inputs of the layer, a multiple of 8.
    pub k: usize,
    /// The modules of its outputs.
    pub modules: Modules,
}

/// Where the tokens of a step name their slots, and the space for products with A.
#[derive(Debug, Clone, Copy)]
pub struct LowRankStep {
    /// `[T]` u32: slots, or [`NO_SLOT`].
    pub slots: Span,
    /// A u64: the slices that a token uses.
    pub in_step: Span,
    /// `[T, modules, slot_cols]` bf16.
    pub h: Span,
}

impl LowRankWeight {
    /// Columns of a module in `h`.
    fn cols(&self) -> usize {
        slot_cols(self.num_slots, self.rank)
    }

    /// Whether products for few rows can add B h themselves: all modules begin and end at multiples of 8.
    pub fn is_aligned(&self) -> bool {
        let starts = match &self.modules {
            Modules::Stacked { count, starts } => &starts[..count - 1],
            Modules::Gated => &[],
        };
        starts.iter().chain([&self.n]).all(|start| start.is_multiple_of(8))
    }

    fn check(&self, step: &LowRankStep, rows: usize) -> Result<(), CudaError> {
        let Self { a, b, scales, in_layer, num_slots, rank, n, k, modules } = *self;
        ensure!(OP, rank.is_power_of_two() && (LEAST_RANK..=SLICE).contains(&rank), "rank {rank} in slots");
        ensure!(OP, (1..=max_slots(rank)).contains(&num_slots), "{num_slots} slots of rank {rank}");
        ensure!(OP, rows > 0, "no rows");
        ensure!(OP, k > 0 && k.is_multiple_of(8), "{k} inputs are not a multiple of 8");
        ensure!(OP, n > 0, "no outputs");
        modules.check(n)?;
        let (count, cols) = (modules.count(), self.cols());
        ensure!(
            OP,
            a.count::<bf16>() >= num_slots * count * rank * k,
            "A is shorter than {num_slots} x {count} x {rank} x {k}"
        );
        ensure!(OP, b.count::<bf16>() >= n * cols, "B is shorter than {n} x {cols}");
        ensure!(OP, scales.count::<f32>() >= num_slots * count, "fewer than {num_slots} x {count} scales");
        ensure!(OP, step.slots.count::<u32>() >= rows, "fewer than {rows} slots of tokens");
        ensure!(OP, step.h.count::<bf16>() >= rows * count * cols, "h is shorter than {rows} x {count} x {cols}");
        let masks = [in_layer, step.in_step];
        ensure!(
            OP,
            masks.iter().all(|mask| mask.bytes() >= 8 && mask.is_aligned(8)),
            "a mask is not a word of 8 bytes"
        );
        ensure!(OP, [a, b, step.h].iter().all(|span| span.is_aligned(16)), "a buffer is not 16-byte aligned");
        Ok(())
    }
}

/// The kernels' `Shrink`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct ShrinkArgument {
    addresses: [u64; 7], // x, h, a, scales, slots, in_step, in_layer
    sizes: [u32; 6],     // tokens, k, rank, modules, cols, tile
}

/// The kernels' `Expand`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct ExpandArgument {
    addresses: [u64; 5], // y, h, b, slots, in_layer
    sizes: [u32; 4],     // tokens, n, rank, cols
    modules: [u32; 4],
}

/// `h[t] = scale * A x[t]` with the matrices of each token's slot, for `x [rows, k]`. A row's result does not depend on the others.
pub fn shrink(q: &Queue, weight: &LowRankWeight, step: &LowRankStep, x: Span, rows: usize) -> Result<(), CudaError> {
    shrink_with(q, weight, step, x, rows, q.gpu().capability().0 == 9 && q.gpu().has_kernel(FAST_SHRINK))
}

const FAST_SHRINK: &str = "sm90_low_rank_shrink_bf16";

/// [`shrink`] with the version that runs on any GPU; both give the same bits.
pub fn shrink_simple(
    q: &Queue,
    weight: &LowRankWeight,
    step: &LowRankStep,
    x: Span,
    rows: usize,
) -> Result<(), CudaError> {
    shrink_with(q, weight, step, x, rows, false)
}

fn shrink_with(
    q: &Queue,
    weight: &LowRankWeight,
    step: &LowRankStep,
    x: Span,
    rows: usize,
    is_fast: bool,
) -> Result<(), CudaError> {
    weight.check(step, rows)?;
    let LowRankWeight { a, scales, in_layer, rank, k, modules, .. } = *weight;
    ensure!(OP, x.count::<bf16>() >= rows * k && x.is_aligned(16), "x is shorter than {rows} x {k}, or not aligned");
    // Many tokens mostly follow each other in few slots, so that large tiles save blocks that find none of theirs.
    let tile = if rows <= 64 { 64 } else { SHRINK_THREADS };
    let count = modules.count();
    let argument = ShrinkArgument {
        addresses: [x, step.h, a, scales, step.slots, step.in_step, in_layer].map(Span::address),
        sizes: [rows, k, rank, count, weight.cols(), tile].map(|size| size as u32),
    };
    // Columns of the last slice behind those of the slots become 0, too.
    let units = weight.cols() / rank * count * rank.div_ceil(TILE);
    let (kernel, parts) = if is_fast { (FAST_SHRINK, K_PARTS) } else { ("low_rank_shrink_bf16", 1) };
    let launch = Launch::new(0, SHRINK_THREADS as u32)
        .grid(parts as u32, units as u32, rows.div_ceil(tile) as u32)
        .shared(((tile * TILE + K_PARTS * TILE * TILE) * 4) as u32)
        .cluster(parts as u32);
    q.launch(kernel, launch, &[Arg::Bytes(bytemuck::bytes_of(&argument))])
}

/// `y[t] += B h[t]` with the matrices of each token's slot, for `y [rows, n]`. Rows without an adapter stay as they are.
pub fn expand(q: &Queue, weight: &LowRankWeight, step: &LowRankStep, y: Span, rows: usize) -> Result<(), CudaError> {
    weight.check(step, rows)?;
    let LowRankWeight { b, in_layer, rank, n, modules, .. } = *weight;
    ensure!(OP, y.count::<bf16>() >= rows * n && y.is_aligned(16), "y is shorter than {rows} x {n}, or not aligned");
    let argument = ExpandArgument {
        addresses: [y, step.h, b, step.slots, in_layer].map(Span::address),
        sizes: [rows, n, rank, weight.cols()].map(|size| size as u32),
        modules: modules.words(),
    };
    let launch = Launch::new(0, 128).grid(n.div_ceil(64) as u32, rows.div_ceil(64) as u32, 1);
    q.launch("low_rank_expand_bf16", launch, &[Arg::Bytes(bytemuck::bytes_of(&argument))])
}

/// The kernels' `LowRank`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct LowRankArgument {
    addresses: [u64; 2], // in_step, in_layer
    cols: u32,
    modules: [u32; 4],
    padding: u32,
}

/// What a product for few rows needs to add B h itself.
pub(super) struct Fused {
    argument: LowRankArgument,
    b_map: TensorMap,
    h_map: TensorMap,
}

impl Fused {
    /// For a product of `linear` whose boxes have `box_rows` rows of x.
    pub(super) fn new(
        weight: &LowRankWeight,
        step: &LowRankStep,
        [n, k]: [usize; 2],
        rows: usize,
        box_rows: usize,
    ) -> Result<Self, CudaError> {
        weight.check(step, rows)?;
        ensure!(OP, weight.is_aligned(), "{:?} of {n} outputs begin or end at no multiples of 8", weight.modules);
        ensure!(OP, [weight.n, weight.k] == [n, k], "adapters of a layer {} x {} beside {n} x {k}", weight.n, weight.k);
        let cols = weight.cols();
        Ok(Self {
            argument: LowRankArgument {
                addresses: [step.in_step, weight.in_layer].map(Span::address),
                cols: cols as u32,
                modules: weight.modules.words(),
                padding: 0,
            },
            b_map: TensorMap::matrix(weight.b, n, cols, SLICE, SLICE)?,
            h_map: TensorMap::matrix(step.h, rows, weight.modules.count() * cols, box_rows, SLICE)?,
        })
    }

    /// The kernels' last arguments.
    pub(super) fn args(&self) -> [Arg<'_>; 3] {
        [Arg::Bytes(bytemuck::bytes_of(&self.argument)), Arg::Bytes(self.b_map.bytes()), Arg::Bytes(self.h_map.bytes())]
    }
}

/// Whether this GPU and this build have products for few rows that add B h themselves.
pub fn has_fused_kernel(gpu: &Gpu) -> bool {
    gpu.capability().0 == 9 && gpu.has_kernel("sm90_skinny_gemm_low_rank_bf16_m8_g1")
}

/// Operands of adapters beside a product: the slots of a layer, and the step.
pub type LowRankOperands<'a> = (&'a LowRankWeight, &'a LowRankStep);
