//! Linear layers with weights in 8 or 4 bits for few rows, bound by memory bandwidth, and the expansion of such weights
//! to bf16. Kernels: `sm90_quantized_gemm.cu`, `quantized_gemm.cu` on other GPUs, `sm90_quantized_wide_gemm.cu` for
//! more rows, `dequantize.cu`.

use half::bf16;

use super::error::ensure;
use super::gated_activation::GATE_GROUP;
use super::low_rank::{Fused, LowRankOperands};
pub use super::packed_weight::{PackedFormat, PackedWeight, TILE};
use super::skinny_gemm::{CROWDED, Epilogue, MAX_ROWS, output_argument, width_for};
use super::sum_order::SumOrder;
use super::tensor_map::TensorMap;
use super::{Arg, CudaError, Gpu, Launch, Queue, Span};

const OP: &str = "quantized_gemm";
/// Columns of `x` in a box of the copy engine: 128 bytes.
const BOX: usize = 64;

/// Number of rows of `x` up to which a kernel with four warpgroups exists.
const MAX_WIDTH_OF_FOUR: usize = 32;

/// How the kernel divides the work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QuantizedSplit {
    /// Number of parts of K, which is the number of blocks in a cluster: 1, 2 or 4.
    pub parts: usize,
    /// Number of warpgroups of a block that multiply slices of K in turn: 2 or 4.
    pub groups: usize,
    /// Shared memory of a block for the ring of slices, in bytes.
    pub ring_bytes: usize,
}

impl QuantizedSplit {
    /// The division for a shape, by measurement (kernels/README.md). It determines the order of summation, so it
    /// depends on the number of rows only where there are more than 32.
    pub fn for_shape(n: usize, slices: usize, rows: usize) -> Self {
        let tiles = n.div_ceil(TILE);
        let parts = match tiles {
            _ if slices < 8 => 1,
            0..34 => 4,
            34..67 => 2,
            _ => 1,
        };
        let (groups, ring_bytes) = match tiles * parts {
            CROWDED.. if parts == 4 => (2, 100 << 10),
            0..133 => (if rows > MAX_WIDTH_OF_FOUR { 2 } else { 4 }, 200 << 10),
            _ => (2, 100 << 10),
        };
        Self { parts, groups, ring_bytes }
    }

    /// The division that sums in `order`.
    fn of_order(order: SumOrder, n: usize) -> Self {
        let SumOrder { parts, groups } = order;
        let ring_bytes = if n.div_ceil(TILE) * parts < 133 { 200 << 10 } else { 100 << 10 };
        Self { parts, groups, ring_bytes }
    }
}

/// The one order of a weight in which few and many rows are summed, with slices of its format: that of [`quantized_gemm`] for 33 to 64
/// rows.
fn sum_order(weight: &PackedWeight) -> SumOrder {
    let QuantizedSplit { parts, groups, .. } =
        QuantizedSplit::for_shape(weight.n, weight.format.slices(weight.k), MAX_ROWS);
    SumOrder { parts, groups }
}

/// Parts of K for many rows. Few tiles do not fill the GPU.
fn wide_parts(weight: &PackedWeight) -> usize {
    match weight.n.div_ceil(WIDE) {
        _ if weight.format.slices(weight.k) < 8 => 1,
        0..17 => 4,
        17..67 => 2,
        _ => 1,
    }
}

/// Rows of `x` and of the weight that a block of the kernel for many rows computes.
const WIDE: usize = 128;

/// The same as [`quantized_gemm`] for any number of rows, by the tensor cores; only on Hopper ([`has_hopper_kernel`]).
pub fn quantized_wide_gemm(
    q: &Queue,
    y: Span,
    x: Span,
    weight: &PackedWeight,
    rows: usize,
    epilogue: Epilogue,
) -> Result<(), CudaError> {
    launch_wide(q, [y, x], weight, rows, epilogue, SumOrder { parts: wide_parts(weight), groups: 1 })
}

/// The same, whose rows have the same bits for any number of rows.
pub fn quantized_gemm_in_order(
    q: &Queue,
    y: Span,
    x: Span,
    weight: &PackedWeight,
    rows: usize,
    epilogue: Epilogue,
) -> Result<(), CudaError> {
    let order = sum_order(weight);
    match rows <= MAX_ROWS {
        true => quantized_gemm_split(q, y, x, weight, rows, epilogue, QuantizedSplit::of_order(order, weight.n)),
        false => launch_wide(q, [y, x], weight, rows, epilogue, order),
    }
}

/// The kernel for many rows, with the bits of [`quantized_gemm_split`] in the same order.
fn launch_wide(
    q: &Queue,
    [y, x]: [Span; 2],
    weight: &PackedWeight,
    rows: usize,
    epilogue: Epilogue,
    order: SumOrder,
) -> Result<(), CudaError> {
    check_product(y, x, weight, rows, epilogue)?;
    let format = weight.format;
    let SumOrder { parts, groups } = order;
    ensure!(
        OP,
        [parts, groups].iter().all(|count| matches!(count, 1 | 2 | 4)),
        "{order:?}; expected 1, 2 or 4 of each"
    );
    let stage_bytes = WIDE * 128 + WIDE * format.slice_cols() * 2 + WIDE / TILE * format.max_meta_bytes();
    let static_bytes = 1024;
    let room = (q.gpu().max_shared_bytes() as usize).saturating_sub(1024 + static_bytes);
    let stages = (room / stage_bytes).min(8);
    let partial_bytes = WIDE / TILE * WIDE * (TILE + 4) * 4;
    ensure!(OP, stages > 0 && partial_bytes <= room, "shared memory of {room} bytes is too small");
    let tiles = rows.div_ceil(WIDE) * weight.n.div_ceil(WIDE);
    let blocks = wide_blocks(tiles, weight, order, q.gpu().num_multiprocessors() as usize);
    let tiling = Tiling {
        kernel: format!("sm90_quantized_wide_gemm_{}", format.name()),
        weight_rows: WIDE,
        x_rows: WIDE,
        counts: vec![format.slices(weight.k), parts, groups, stages, blocks],
        blocks,
        threads: WIDE / TILE * 128 + 128,
        shared_bytes: (stages * stage_bytes).max(partial_bytes) + 1024,
        grid: [blocks * tiles, 1],
    };
    launch(q, [y, x], weight, rows, epilogue, &tiling, None)
}

/// Blocks of a tile of the kernel for many rows, by a model of the time on an H200 (kernels/README.md): one for each part of K, or one
/// for all parts.
fn wide_blocks(tiles: usize, weight: &PackedWeight, order: SumOrder, multiprocessors: usize) -> usize {
    let microseconds = |blocks: usize| {
        let waves = (tiles * blocks).div_ceil(multiprocessors / blocks * blocks);
        let slices = weight.format.slices(weight.k).div_ceil(blocks) as f64;
        let slice = 1.3 * weight.format.slice_cols() as f64 / 256.0;
        let kept = 0.6 * (order.runs() / blocks - 1) as f64;
        let store = if blocks > 1 { 4.0 } else { 2.5 };
        waves as f64 * (slices * slice + kept + store)
    };
    if microseconds(order.parts) < microseconds(1) { order.parts } else { 1 }
}

/// How a kernel for Hopper divides a product.
struct Tiling {
    kernel: String,
    /// Rows of the weight and of `x` that a block loads at a time.
    weight_rows: usize,
    x_rows: usize,
    /// Arguments of the kernel: how K is divided, and stages of the ring.
    counts: Vec<usize>,
    /// Blocks of a cluster.
    blocks: usize,
    threads: usize,
    shared_bytes: usize,
    grid: [usize; 2],
}

fn launch(
    q: &Queue,
    [y, x]: [Span; 2],
    weight: &PackedWeight,
    rows: usize,
    epilogue: Epilogue,
    tiling: &Tiling,
    fused: Option<&Fused>,
) -> Result<(), CudaError> {
    let PackedWeight { codes, bias, n, k, format, .. } = *weight;
    let codes_map = TensorMap::bytes_matrix(codes, n, format.row_bytes(k), tiling.weight_rows, 128)?;
    let x_map = TensorMap::matrix(x, rows, k, tiling.x_rows, BOX)?;
    let output = output_argument(y, bias, rows, n, epilogue.code());
    let meta = meta_argument(weight.scales, format);
    let mut args = vec![
        Arg::Bytes(codes_map.bytes()),
        Arg::Bytes(x_map.bytes()),
        Arg::Bytes(&output),
        Arg::Bytes(bytemuck::bytes_of(&meta)),
    ];
    args.extend(tiling.counts.iter().map(|&count| Arg::from(count as u32)));
    args.extend(fused.into_iter().flat_map(Fused::args));
    let [width, height] = tiling.grid.map(|size| size as u32);
    let launch = Launch::new(0, tiling.threads as u32)
        .grid(width, height, 1)
        .shared(tiling.shared_bytes as u32)
        .cluster(tiling.blocks as u32);
    q.launch(&tiling.kernel, launch, &args)
}

/// Whether this GPU and this build have the fast kernel.
pub fn has_hopper_kernel(gpu: &Gpu) -> bool {
    gpu.capability().0 == 9 && gpu.has_kernel("sm90_quantized_gemm_fp8_rows_m8_g2")
}

/// `y = x @ weight^T + bias` for `x [rows, k]`, `rows` at most [`MAX_ROWS`]. The result of a row does not depend on the
/// other rows.
pub fn quantized_gemm(
    q: &Queue,
    y: Span,
    x: Span,
    weight: &PackedWeight,
    rows: usize,
    epilogue: Epilogue,
) -> Result<(), CudaError> {
    if has_hopper_kernel(q.gpu()) {
        let split = QuantizedSplit::for_shape(weight.n, weight.format.slices(weight.k), rows);
        quantized_gemm_split(q, y, x, weight, rows, epilogue, split)
    } else {
        quantized_gemm_simple(q, y, x, weight, rows, epilogue)
    }
}

/// [`quantized_gemm`] on Hopper with a given division.
pub fn quantized_gemm_split(
    q: &Queue,
    y: Span,
    x: Span,
    weight: &PackedWeight,
    rows: usize,
    epilogue: Epilogue,
    split: QuantizedSplit,
) -> Result<(), CudaError> {
    launch_split(q, [y, x], weight, rows, epilogue, split, None)
}

/// [`quantized_gemm`] on Hopper that also adds `B h` of each row's adapter, before the activation if there is one
/// ([`super::low_rank::has_fused_kernel`]). Rows without an adapter have the same bits as from [`quantized_gemm`].
pub fn quantized_gemm_low_rank(
    q: &Queue,
    [y, x]: [Span; 2],
    weight: &PackedWeight,
    rows: usize,
    epilogue: Epilogue,
    low_rank: LowRankOperands<'_>,
) -> Result<(), CudaError> {
    let split = QuantizedSplit::for_shape(weight.n, weight.format.slices(weight.k), rows);
    launch_split(q, [y, x], weight, rows, epilogue, split, Some(low_rank))
}

fn launch_split(
    q: &Queue,
    [y, x]: [Span; 2],
    weight: &PackedWeight,
    rows: usize,
    epilogue: Epilogue,
    split: QuantizedSplit,
    low_rank: Option<LowRankOperands<'_>>,
) -> Result<(), CudaError> {
    check_product(y, x, weight, rows, epilogue)?;
    ensure!(OP, rows <= MAX_ROWS, "{rows} rows; expected 1 to {MAX_ROWS}");
    let format = weight.format;
    let QuantizedSplit { parts, groups, ring_bytes } = split;
    ensure!(OP, matches!(parts, 1 | 2 | 4), "K in {parts} parts; expected 1, 2 or 4");
    ensure!(OP, matches!(groups, 2 | 4), "{groups} groups; expected 2 or 4");
    let width = width_for(rows);
    ensure!(OP, groups == 2 || width <= MAX_WIDTH_OF_FOUR, "{rows} rows in 4 groups; expected 2 groups");
    let stage_bytes = TILE * 128 + width * format.slice_cols() * 2 + format.max_meta_bytes();
    // A stage belongs to one group of warps, because its barrier must be waited for in order.
    let stages = ((ring_bytes / stage_bytes).min(32) / groups).max(1) * groups;
    let partial_bytes = groups * (TILE + 4) * width * 4;
    let shared_bytes = (stages * stage_bytes).max(partial_bytes) + 1024;
    // The barriers are in static shared memory.
    let static_bytes = 512;
    let fits = shared_bytes + static_bytes <= q.gpu().max_shared_bytes() as usize;
    ensure!(OP, fits, "a ring of {ring_bytes} bytes is too large");
    let fused =
        low_rank.map(|(low_rank, step)| Fused::new(low_rank, step, [weight.n, weight.k], rows, width)).transpose()?;
    let kind = if fused.is_some() { "_low_rank" } else { "" };
    let tiling = Tiling {
        kernel: format!("sm90_quantized_gemm{kind}_{}_m{width}_g{groups}", format.name()),
        weight_rows: TILE,
        x_rows: width,
        counts: vec![weight.k, stages, parts],
        blocks: parts,
        threads: groups * 128 + 32,
        shared_bytes,
        grid: [parts, weight.n.div_ceil(TILE)],
    };
    launch(q, [y, x], weight, rows, epilogue, &tiling, fused.as_ref())
}

/// [`quantized_gemm`] with the version that runs on any GPU.
pub fn quantized_gemm_simple(
    q: &Queue,
    y: Span,
    x: Span,
    weight: &PackedWeight,
    rows: usize,
    epilogue: Epilogue,
) -> Result<(), CudaError> {
    check_product(y, x, weight, rows, epilogue)?;
    ensure!(OP, rows <= MAX_ROWS, "{rows} rows; expected 1 to {MAX_ROWS}");
    let width = width_for(rows);
    let meta = meta_argument(weight.scales, weight.format);
    let args = [
        y.into(),
        x.into(),
        weight.codes.into(),
        Arg::Bytes(bytemuck::bytes_of(&meta)),
        weight.bias.into(),
        (rows as u32).into(),
        (weight.n as u32).into(),
        (weight.k as u32).into(),
        epilogue.code().into(),
    ];
    let launch = Launch::new(weight.n.div_ceil(16) as u32, 256).shared((8 * width * 17 * 4) as u32);
    q.launch(&format!("quantized_gemm_{}_m{width}", weight.format.name()), launch, &args)
}

/// `Meta` of the kernels: the address of the scales, their bytes in a tile and slice, and whether they are f16.
pub(super) fn meta_argument(scales: Span, format: PackedFormat) -> [u64; 2] {
    [scales.address(), format.meta_bytes() as u64 | u64::from(format.scale_is_f16()) << 32]
}

/// Checks the operands of a product.
pub(super) fn check_product(
    y: Span,
    x: Span,
    weight: &PackedWeight,
    rows: usize,
    epilogue: Epilogue,
) -> Result<(), CudaError> {
    check_outputs(y, weight, rows, epilogue)?;
    let k = weight.k;
    ensure!(OP, x.count::<bf16>() >= rows * k && x.is_aligned(16), "x is shorter than {rows} x {k}, or not aligned");
    Ok(())
}

/// Checks the operands of a product besides x.
pub(super) fn check_outputs(y: Span, weight: &PackedWeight, rows: usize, epilogue: Epilogue) -> Result<(), CudaError> {
    check(weight)?;
    let n = weight.n;
    ensure!(OP, rows > 0, "no rows");
    let group = if matches!(epilogue, Epilogue::Gated(_)) { 2 * GATE_GROUP } else { 8 };
    ensure!(OP, n.is_multiple_of(group), "{n} outputs are not a multiple of {group}");
    ensure!(OP, y.bytes() >= epilogue.output_bytes(rows, n) && y.is_aligned(16), "y is too short, or not aligned");
    Ok(())
}

/// `out [n, k]` bf16: the values of a weight, rounded.
pub fn dequantize(q: &Queue, out: Span, weight: &PackedWeight) -> Result<(), CudaError> {
    check(weight)?;
    let PackedWeight { codes, scales, n, k, format, .. } = *weight;
    ensure!(OP, out.count::<bf16>() >= n * k && out.is_aligned(16), "out is shorter than {n} x {k}, or not aligned");
    let meta = meta_argument(scales, format);
    let args = [out.into(), codes.into(), Arg::Bytes(bytemuck::bytes_of(&meta)), (n as u32).into(), (k as u32).into()];
    // All experts of a layer have more rows than a grid has blocks in its second dimension.
    let launch = Launch::new((n.div_ceil(8) * format.slices(k)) as u32, 256);
    q.launch(&format!("dequantize_bf16_{}", format.name()), launch, &args)
}

fn check(weight: &PackedWeight) -> Result<(), CudaError> {
    let PackedWeight { codes, scales, bias, n, k, format } = *weight;
    if let PackedFormat::Int4 { group, .. } | PackedFormat::Int8 { group, .. } = format {
        ensure!(OP, matches!(group, 32 | 128), "groups of {group} inputs; expected 32 or 128");
    }
    ensure!(OP, k > 0 && k.is_multiple_of(8), "{k} inputs are not a multiple of 8");
    ensure!(OP, n > 0 && n.is_multiple_of(8), "{n} outputs are not a multiple of 8");
    ensure!(OP, codes.bytes() >= format.codes_bytes(n, k), "the codes are shorter than {n} x {k}");
    ensure!(OP, scales.bytes() >= format.scales_bytes(n, k), "the scales are shorter than those of {n} x {k}");
    ensure!(OP, bias.is_null() || (bias.count::<bf16>() >= n && bias.is_aligned(8)), "the bias is shorter than {n}");
    ensure!(OP, codes.is_aligned(16) && scales.is_aligned(16), "a buffer is not 16-byte aligned");
    Ok(())
}
