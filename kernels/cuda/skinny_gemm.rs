//! Linear layers for few rows, bound by memory bandwidth. Kernels: `sm90_skinny_gemm.cu`, and `skinny_gemm.cu` on other
//! GPUs.

use half::bf16;

use super::error::ensure;
use super::gated_activation::{GATE_GROUP, GateActivation};
use super::low_rank::{Fused, LowRankOperands};
use super::tensor_map::TensorMap;
use super::{Arg, CudaError, Gpu, Launch, Queue, Span};

/// Maximum number of rows of `x`.
pub const MAX_ROWS: usize = 64;

const OP: &str = "skinny_gemm";
/// Number of rows of the weight that a cluster computes, and number of columns in a slice that the copy engine fetches:
/// 128 bytes.
const TILE: usize = 64;
const SLICE: usize = 64;
/// From this number of blocks on, clusters of four do not all find four free multiprocessors in one part of the GPU, and the last ones
/// would wait until others have ended. Two of their blocks then fit on a multiprocessor.
pub(super) const CROWDED: usize = 113;

/// A linear layer's weight `[n, k]` and bias `[n]`, bf16.
#[derive(Debug, Clone, Copy)]
pub struct LinearWeight {
    /// `[n, k]`.
    pub weight: Span,
    /// `[n]`, or [`Span::NULL`].
    pub bias: Span,
    /// Number of outputs.
    pub n: usize,
    /// Number of inputs.
    pub k: usize,
}

/// What happens with the product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Epilogue {
    /// `y [M, N]` bf16.
    Store,
    /// `y [M, N]` f32.
    StoreF32,
    /// `y [M, N / 2]` bf16, `activation(gate) * up`; the weight's rows are packed in groups of [`GATE_GROUP`].
    Gated(GateActivation),
}

impl Epilogue {
    pub(super) fn code(self) -> u32 {
        match self {
            Epilogue::Store => 0,
            Epilogue::StoreF32 => 1,
            Epilogue::Gated(GateActivation::Silu) => 2,
            Epilogue::Gated(GateActivation::GeluTanh) => 3,
            Epilogue::Gated(other) => unreachable!("{other:?} is no epilogue: `GateActivation::is_fused`"),
        }
    }

    pub(super) fn output_bytes(self, rows: usize, n: usize) -> usize {
        match self {
            Epilogue::Store => rows * n * 2,
            Epilogue::StoreF32 => rows * n * 4,
            Epilogue::Gated(_) => rows * n,
        }
    }
}

/// How the Hopper kernel divides the work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Split {
    /// Number of parts of K, which is the number of blocks in a cluster: 1, 2 or 4.
    pub parts: usize,
    /// Number of warpgroups of a block that multiply slices of K in turn: 1, 2 or 4.
    pub groups: usize,
    /// Shared memory of a block for the ring of slices, in bytes.
    pub ring_bytes: usize,
}

impl Split {
    /// The division for a shape, by measurement on an H200 (kernels/README.md). It determines the order of summation,
    /// so it depends on the number of rows as little as possible: only on whether there are more than 32.
    pub fn for_shape(n: usize, k: usize, rows: usize) -> Self {
        let tiles = n.div_ceil(TILE);
        let parts = match tiles {
            _ if k < 1024 => 1,
            0..34 => 4,
            34..300 => 2,
            _ => 1,
        };
        // One block per multiprocessor has a deep ring and passes several slices at a time to its tensor cores. With
        // more blocks, several share a multiprocessor, and those of the next kernel start as these end.
        let (groups, ring_bytes) = match tiles * parts {
            CROWDED.. if parts == 4 => (2, 100 << 10),
            0..133 => (4, 200 << 10),
            440.. if parts == 1 => (2, if rows > 32 { 104 << 10 } else { 48 << 10 }),
            _ if rows > 32 => (2, 64 << 10),
            _ => (1, 64 << 10),
        };
        Self { parts, groups, ring_bytes }
    }
}

/// `y = x @ weight^T + bias` for `x [rows, k]`, `rows` at most [`MAX_ROWS`]. The result of a row does not depend on the
/// other rows.
pub fn skinny_gemm(
    q: &Queue,
    y: Span,
    x: Span,
    linear: &LinearWeight,
    rows: usize,
    epilogue: Epilogue,
) -> Result<(), CudaError> {
    if has_hopper_kernel(q.gpu()) {
        skinny_gemm_split(q, y, x, linear, rows, epilogue, Split::for_shape(linear.n, linear.k, rows))
    } else {
        skinny_gemm_simple(q, y, x, linear, rows, epilogue)
    }
}

/// Whether this GPU and this build have the fast kernel.
pub fn has_hopper_kernel(gpu: &Gpu) -> bool {
    gpu.capability().0 == 9 && gpu.has_kernel("sm90_skinny_gemm_bf16_m8_g1")
}

/// [`skinny_gemm`] on Hopper with a given division.
pub fn skinny_gemm_split(
    q: &Queue,
    y: Span,
    x: Span,
    linear: &LinearWeight,
    rows: usize,
    epilogue: Epilogue,
    split: Split,
) -> Result<(), CudaError> {
    launch_split(q, [y, x], linear, rows, epilogue, split, None)
}

/// [`skinny_gemm`] on Hopper that also adds `B h` of each row's adapter, before the activation if there is one
/// ([`super::low_rank::has_fused_kernel`]). Rows without an adapter have the same bits as from [`skinny_gemm`].
pub fn skinny_gemm_low_rank(
    q: &Queue,
    [y, x]: [Span; 2],
    linear: &LinearWeight,
    rows: usize,
    epilogue: Epilogue,
    low_rank: LowRankOperands<'_>,
) -> Result<(), CudaError> {
    launch_split(q, [y, x], linear, rows, epilogue, Split::for_shape(linear.n, linear.k, rows), Some(low_rank))
}

fn launch_split(
    q: &Queue,
    [y, x]: [Span; 2],
    linear: &LinearWeight,
    rows: usize,
    epilogue: Epilogue,
    split: Split,
    low_rank: Option<LowRankOperands<'_>>,
) -> Result<(), CudaError> {
    check(y, x, linear, rows, epilogue)?;
    let Split { parts, groups, ring_bytes } = split;
    ensure!(OP, matches!(parts, 1 | 2 | 4), "K in {parts} parts; expected 1, 2 or 4");
    ensure!(OP, matches!(groups, 1 | 2 | 4), "{groups} groups; expected 1, 2 or 4");
    let width = width_for(rows);
    let stage_bytes = (TILE + width) * SLICE * 2;
    // A stage belongs to one group of warps, because its barrier must be waited for in order.
    let stages = ((ring_bytes / stage_bytes).min(32) / groups).max(1) * groups;
    let partial_bytes = groups * (TILE + 4) * width * 4;
    let shared_bytes = (stages * stage_bytes).max(partial_bytes) + 1024;
    // The barriers are in static shared memory.
    let static_bytes = 512;
    let fits = shared_bytes + static_bytes <= q.gpu().max_shared_bytes() as usize;
    ensure!(OP, fits, "a ring of {ring_bytes} bytes is too large");

    let weight_map = TensorMap::matrix(linear.weight, linear.n, linear.k, TILE, SLICE)?;
    let x_map = TensorMap::matrix(x, rows, linear.k, width, SLICE)?;
    let output = output_argument(y, linear.bias, rows, linear.n, epilogue.code());
    let fused =
        low_rank.map(|(weight, step)| Fused::new(weight, step, [linear.n, linear.k], rows, width)).transpose()?;
    let mut args = vec![
        Arg::Bytes(weight_map.bytes()),
        Arg::Bytes(x_map.bytes()),
        Arg::Bytes(&output),
        (linear.k as u32).into(),
        (stages as u32).into(),
        (parts as u32).into(),
    ];
    args.extend(fused.iter().flat_map(Fused::args));
    let launch = Launch::new(0, (groups * 128 + 32) as u32)
        .grid(parts as u32, linear.n.div_ceil(TILE) as u32, 1)
        .shared(shared_bytes as u32)
        .cluster(parts as u32);
    let kind = if fused.is_some() { "low_rank_bf16" } else { "bf16" };
    q.launch(&format!("sm90_skinny_gemm_{kind}_m{width}_g{groups}"), launch, &args)
}

/// [`skinny_gemm`] with the version that runs on any GPU.
pub fn skinny_gemm_simple(
    q: &Queue,
    y: Span,
    x: Span,
    linear: &LinearWeight,
    rows: usize,
    epilogue: Epilogue,
) -> Result<(), CudaError> {
    check(y, x, linear, rows, epilogue)?;
    let width = width_for(rows);
    let args = [
        y.into(),
        x.into(),
        linear.weight.into(),
        linear.bias.into(),
        (rows as u32).into(),
        (linear.n as u32).into(),
        (linear.k as u32).into(),
        epilogue.code().into(),
    ];
    let launch = Launch::new(linear.n.div_ceil(16) as u32, 256).shared((8 * width * 17 * 4) as u32);
    q.launch(&format!("skinny_gemm_bf16_m{width}"), launch, &args)
}

/// Number of rows of `x` that a kernel multiplies for `rows`.
pub(super) fn width_for(rows: usize) -> usize {
    rows.next_power_of_two().max(8)
}

pub(super) fn check(y: Span, x: Span, linear: &LinearWeight, rows: usize, epilogue: Epilogue) -> Result<(), CudaError> {
    ensure!(OP, rows <= MAX_ROWS, "{rows} rows; expected 1 to {MAX_ROWS}");
    check_operands(OP, y, x, linear, rows, epilogue)
}

/// Checks the operands of a product of any number of rows.
pub(super) fn check_operands(
    op: &'static str,
    y: Span,
    x: Span,
    linear: &LinearWeight,
    rows: usize,
    epilogue: Epilogue,
) -> Result<(), CudaError> {
    let LinearWeight { weight, bias, n, k } = *linear;
    ensure!(op, rows > 0, "no rows");
    ensure!(op, k > 0 && k.is_multiple_of(8), "{k} inputs are not a multiple of 8");
    let group = if matches!(epilogue, Epilogue::Gated(_)) { 2 * GATE_GROUP } else { 8 };
    ensure!(op, n > 0 && n.is_multiple_of(group), "{n} outputs are not a multiple of {group}");
    ensure!(op, x.count::<bf16>() >= rows * k, "x is shorter than {rows} x {k}");
    ensure!(op, weight.count::<bf16>() >= n * k, "the weight is shorter than {n} x {k}");
    ensure!(op, bias.is_null() || bias.count::<bf16>() >= n, "the bias is shorter than {n}");
    ensure!(op, y.bytes() >= epilogue.output_bytes(rows, n), "y is too short for {rows} rows of {n} outputs");
    let aligned = [y, x, weight].iter().all(|span| span.is_aligned(16)) && (bias.is_null() || bias.is_aligned(8));
    ensure!(op, aligned, "a buffer is not 16-byte aligned");
    Ok(())
}

/// `Output` of the kernel: y, bias, m, n, epilogue, pitch.
pub(super) fn output_argument(y: Span, bias: Span, rows: usize, n: usize, epilogue: u32) -> [u8; 32] {
    let words: [u64; 4] =
        [y.address(), bias.address(), rows as u64 | (n as u64) << 32, u64::from(epilogue) | (n as u64) << 32];
    bytemuck::cast(words)
}
