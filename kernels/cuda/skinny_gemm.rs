//! Linear layers for few rows, at the rate of memory. Kernels: `sm90_skinny_gemm.cu`, and `skinny_gemm.cu` where that
//! does not run.

use bytemuck::{Pod, Zeroable};
use half::bf16;

use super::all_reduce::{PeerGroup, Shots};
use super::error::ensure;
use super::gated_activation::GateActivation;
use super::tensor_map::TensorMap;
use super::{Arg, CudaError, Gpu, Launch, Queue, Span};

/// Most rows of `x`.
pub const MAX_ROWS: usize = 64;

/// Most rows of [`peer_add_norm`] and [`scaled`]: with more, every block that takes the result adds up too many squares.
pub const MAX_NORM_ROWS: usize = 8;

/// Rows of gate that are followed by as many rows of up in a packed gate/up weight.
pub const GATE_GROUP: usize = 8;

const OP: &str = "skinny_gemm";
/// Rows of the weight that a cluster takes, and columns of a slice that the copy engine brings: 128 bytes.
const TILE: usize = 64;
const SLICE: usize = 64;

/// A linear layer's weight `[n, k]` and bias `[n]`, bf16.
#[derive(Debug, Clone, Copy)]
pub struct LinearWeight {
    /// `[n, k]`.
    pub weight: Span,
    /// `[n]`, or [`Span::NULL`].
    pub bias: Span,
    /// Outputs.
    pub n: usize,
    /// Inputs.
    pub k: usize,
}

/// What becomes of the product.
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
    fn code(self) -> u32 {
        match self {
            Epilogue::Store => 0,
            Epilogue::StoreF32 => 1,
            Epilogue::Gated(GateActivation::Silu) => 2,
            Epilogue::Gated(GateActivation::GeluTanh) => 3,
        }
    }

    fn output_bytes(self, rows: usize, n: usize) -> usize {
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
    /// Parts of K, the blocks of a cluster: 1, 2 or 4.
    pub parts: usize,
    /// Warpgroups of a block that multiply slices of K in turn: 1, 2 or 4.
    pub groups: usize,
    /// Shared memory of a block, for the ring of slices.
    pub ring_bytes: usize,
}

impl Split {
    /// The division for a shape, by measurement on an H200 (kernels/README.md). The order of summation follows from it, so it
    /// depends on the rows as little as it can: up to 32 or more.
    pub fn for_shape(n: usize, k: usize, rows: usize) -> Self {
        let tiles = n.div_ceil(TILE);
        let parts = match tiles {
            _ if k < 1024 => 1,
            0..34 => 4,
            34..300 => 2,
            _ => 1,
        };
        // One block a multiprocessor has a deep ring, and hands several slices at once to its tensor cores. Where there are more
        // blocks, several share a multiprocessor, and the next kernel's come in as these go.
        let (groups, ring_bytes) = match tiles * parts {
            0..133 => (4, 200 << 10),
            440.. if parts == 1 => (2, if rows > 32 { 104 << 10 } else { 48 << 10 }),
            _ if rows > 32 => (2, 64 << 10),
            _ => (1, 64 << 10),
        };
        Self { parts, groups, ring_bytes }
    }
}

/// `y = x @ weight^T + bias` for `x [rows, k]`, `rows` at most [`MAX_ROWS`]; a row's result does not depend on the others.
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

/// Rows of `x` that an [`peer_add_norm`] left unscaled: each is to be multiplied by `rsqrt(mean of its squares + eps)`.
#[derive(Debug, Clone, Copy)]
pub struct RowScale {
    /// `[rows, slices]` f32, sums of squares.
    pub squares: Span,
    /// Sums of a row.
    pub slices: usize,
    /// Columns of a row.
    pub cols: usize,
    /// Of the norm.
    pub eps: f32,
}

/// What [`peer_add_norm`] does with the product.
#[derive(Debug, Clone, Copy)]
pub struct AddNorm {
    /// `[rows, n]` bf16, to which the product is added.
    pub residual: Span,
    /// `[n]` bf16, the norm's weight.
    pub gain: Span,
    /// `[rows, slices]` f32, see [`norm_slices`]; every element is written.
    pub squares: Span,
}

/// Sums of squares that [`peer_add_norm`] leaves of each row.
pub fn norm_slices(n: usize, k: usize, rows: usize) -> usize {
    n.div_ceil(TILE) * Split::for_shape(n, k, rows).parts
}

/// Most of [`norm_slices`] for any `k` and number of rows.
pub fn max_norm_slices(n: usize) -> usize {
    n.div_ceil(TILE) * 4
}

/// `residual += the group's sum of x @ weight^T`, each rank's part rounded to bf16, then `y = residual * gain`, both `[rows, n]` bf16,
/// and the squares of `residual` before it is rounded: an RMSNorm but for its scale, which the product that takes `y` applies
/// ([`scaled`]). `rows` at most [`MAX_NORM_ROWS`]. All ranks call it alike, and use the group for nothing else. On Hopper
/// ([`has_norm_kernel`]).
pub fn peer_add_norm(
    q: &Queue,
    y: Span,
    x: Span,
    linear: &LinearWeight,
    rows: usize,
    add: AddNorm,
    group: &PeerGroup,
) -> Result<(), CudaError> {
    let LinearWeight { n, k, .. } = *linear;
    let norm = add.argument(y, linear, rows)?;
    ensure!(OP, rows <= MAX_NORM_ROWS, "{rows} rows; expected at most {MAX_NORM_ROWS}");
    check(y, x, linear, rows, Epilogue::Store)?;
    let peers = group.argument(&[y, add.residual], rows, n, Shots::One)?;
    launch(q, y, x, linear, rows, Epilogue::Store.code(), Split::for_shape(n, k, rows), Some(norm), Some(&peers))
}

impl AddNorm {
    /// The kernel's `Norm`, after checking that the operands hold `rows` rows.
    fn argument(&self, y: Span, linear: &LinearWeight, rows: usize) -> Result<NormArgument, CudaError> {
        let LinearWeight { n, k, .. } = *linear;
        let slices = norm_slices(n, k, rows);
        let AddNorm { residual, gain, squares } = *self;
        let fits = residual.count::<bf16>() >= rows * n && gain.count::<bf16>() >= n;
        ensure!(OP, fits, "the residual or the norm's weight is too short for {rows} rows of {n}");
        ensure!(OP, squares.count::<f32>() >= rows * slices, "{} squares of {rows} x {slices}", squares.count::<f32>());
        ensure!(OP, residual.is_aligned(8) && gain.is_aligned(8), "a buffer is not 8-byte aligned");
        ensure!(OP, y.address() != residual.address(), "y and residual are one buffer");
        Ok(NormArgument {
            residual: residual.address(),
            gain: gain.address(),
            squares_out: squares.address(),
            slices_out: slices as u32,
            ..NormArgument::default()
        })
    }
}

/// [`skinny_gemm`] of an `x` that [`peer_add_norm`] made. On Hopper ([`has_norm_kernel`]).
pub fn scaled(
    q: &Queue,
    y: Span,
    x: Span,
    linear: &LinearWeight,
    rows: usize,
    epilogue: Epilogue,
    scale: RowScale,
) -> Result<(), CudaError> {
    let RowScale { squares, slices, cols, eps } = scale;
    let found = squares.count::<f32>();
    ensure!(OP, rows <= MAX_NORM_ROWS, "{rows} rows; expected at most {MAX_NORM_ROWS}");
    ensure!(OP, slices > 0 && cols > 0 && found >= rows * slices, "{found} squares of {rows} x {slices}");
    let norm = NormArgument {
        squares_in: squares.address(),
        slices_in: slices as u32,
        inverse_cols: 1.0 / cols as f32,
        eps,
        ..NormArgument::default()
    };
    check(y, x, linear, rows, epilogue)?;
    launch(q, y, x, linear, rows, epilogue.code(), Split::for_shape(linear.n, linear.k, rows), Some(norm), None)
}

/// Whether this GPU and this build have [`peer_add_norm`] and [`scaled`].
pub fn has_norm_kernel(gpu: &Gpu) -> bool {
    has_hopper_kernel(gpu) && gpu.has_kernel("sm90_skinny_gemm_norm_bf16_m8_g1")
}

/// The kernel's `Norm`.
#[derive(Clone, Copy, Default, Pod, Zeroable)]
#[repr(C)]
struct NormArgument {
    squares_in: u64,
    residual: u64,
    gain: u64,
    squares_out: u64,
    slices_in: u32,
    slices_out: u32,
    inverse_cols: f32,
    eps: f32,
}

/// [`skinny_gemm`] on Hopper with a division of one's own.
pub fn skinny_gemm_split(
    q: &Queue,
    y: Span,
    x: Span,
    linear: &LinearWeight,
    rows: usize,
    epilogue: Epilogue,
    split: Split,
) -> Result<(), CudaError> {
    check(y, x, linear, rows, epilogue)?;
    launch(q, y, x, linear, rows, epilogue.code(), split, None, None)
}

/// The Hopper kernel, with a norm or without, and with the arguments of a group for the former; operands are checked.
#[allow(clippy::too_many_arguments)] // One op, its operands and its shape.
fn launch(
    q: &Queue,
    y: Span,
    x: Span,
    linear: &LinearWeight,
    rows: usize,
    epilogue: u32,
    split: Split,
    norm: Option<NormArgument>,
    peers: Option<&[u8]>,
) -> Result<(), CudaError> {
    let Split { parts, groups, ring_bytes } = split;
    ensure!(OP, matches!(parts, 1 | 2 | 4), "K in {parts} parts; expected 1, 2 or 4");
    ensure!(OP, matches!(groups, 1 | 2 | 4), "{groups} groups; expected 1, 2 or 4");
    let width = width_for(rows);
    let stage_bytes = (TILE + width) * SLICE * 2;
    // A stage belongs to one group: its barrier is waited for in order.
    let stages = ((ring_bytes / stage_bytes).min(32) / groups).max(1) * groups;
    let partial_bytes = groups * (TILE + 4) * width * 4;
    let shared_bytes = (stages * stage_bytes).max(partial_bytes) + 1024;
    // Barriers, and the rows' scales, lie beside it.
    let static_bytes = 512 + 4 * width;
    let fits = shared_bytes + static_bytes <= q.gpu().max_shared_bytes() as usize;
    ensure!(OP, fits, "a ring of {ring_bytes} bytes is too large");

    let weight_map = TensorMap::matrix(linear.weight, linear.n, linear.k, TILE, SLICE)?;
    let x_map = TensorMap::matrix(x, rows, linear.k, width, SLICE)?;
    let output = output_argument(y, linear, rows, epilogue);
    let norm_bytes = norm.as_ref().map(bytemuck::bytes_of);
    let args = [
        Arg::Bytes(weight_map.bytes()),
        Arg::Bytes(x_map.bytes()),
        Arg::Bytes(&output),
        (linear.k as u32).into(),
        (stages as u32).into(),
        (parts as u32).into(),
        Arg::Bytes(norm_bytes.unwrap_or_default()),
        Arg::Bytes(peers.unwrap_or_default()),
    ];
    let (kind, warps) = match (norm.is_some(), peers.is_some()) {
        (true, true) => ("peer_norm_", 2),
        (true, false) => ("norm_", 2),
        (false, _) => ("", 1),
    };
    let launch = Launch::new(0, (groups * 128 + warps * 32) as u32)
        .grid(parts as u32, linear.n.div_ceil(TILE) as u32, 1)
        .shared(shared_bytes as u32)
        .cluster(parts as u32);
    let num_args = args.len() - usize::from(norm.is_none()) - usize::from(peers.is_none());
    q.launch(&format!("sm90_skinny_gemm_{kind}bf16_m{width}_g{groups}"), launch, &args[..num_args])
}

/// [`skinny_gemm`] by the version that runs on any GPU.
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

fn width_for(rows: usize) -> usize {
    rows.next_power_of_two().max(8)
}

fn check(y: Span, x: Span, linear: &LinearWeight, rows: usize, epilogue: Epilogue) -> Result<(), CudaError> {
    ensure!(OP, (1..=MAX_ROWS).contains(&rows), "{rows} rows; expected 1 to {MAX_ROWS}");
    let LinearWeight { weight, bias, n, k } = *linear;
    ensure!(OP, k > 0 && k.is_multiple_of(8), "{k} inputs are not a multiple of 8");
    let group = if matches!(epilogue, Epilogue::Gated(_)) { 2 * GATE_GROUP } else { 8 };
    ensure!(OP, n > 0 && n.is_multiple_of(group), "{n} outputs are not a multiple of {group}");
    ensure!(OP, x.count::<bf16>() >= rows * k, "x is shorter than {rows} x {k}");
    ensure!(OP, weight.count::<bf16>() >= n * k, "the weight is shorter than {n} x {k}");
    ensure!(OP, bias.is_null() || bias.count::<bf16>() >= n, "the bias is shorter than {n}");
    ensure!(OP, y.bytes() >= epilogue.output_bytes(rows, n), "y is too short for {rows} rows of {n} outputs");
    let aligned = [y, x, weight].iter().all(|span| span.is_aligned(16)) && (bias.is_null() || bias.is_aligned(8));
    ensure!(OP, aligned, "a buffer is not 16-byte aligned");
    Ok(())
}

/// `Output` of the kernel: y, bias, m, n, epilogue, padding.
fn output_argument(y: Span, linear: &LinearWeight, rows: usize, epilogue: u32) -> [u8; 32] {
    let words: [u64; 4] =
        [y.address(), linear.bias.address(), rows as u64 | (linear.n as u64) << 32, u64::from(epilogue)];
    bytemuck::cast(words)
}
