//! Products of experts whose weights and inputs are in e4m3, on Hopper. Kernel: `sm90_grouped_fp8_gemm.cu`.

use super::error::ensure;
use super::expert_rows::{GroupedRows, RowInputs};
use super::grouped_gemm::{GroupedEpilogue, GroupedWeight, check_products, parameters, ring};
use super::packed_weight::{PackedFormat, TILE};
use super::quantize_rows::Fp8Rows;
use super::tensor_map::TensorMap;
use super::{Arg, CudaError, Gpu, Launch, Queue, Span};

const OP: &str = "grouped_fp8_gemm";
/// Bytes of a slice of a row.
const SLICE: usize = 128;
/// Rows of a tile, at most, and of the larger box of x.
const MAX_TILE_ROWS: usize = 128;
const BOX_ROWS: usize = 64;
/// Rows of the weight of a block.
const COLUMNS: usize = 2 * TILE;

/// Whether this GPU and this build have the kernel for weights in this format.
pub fn has_grouped_fp8_kernel(gpu: &Gpu, format: PackedFormat) -> bool {
    let is_fp8 = matches!(format, PackedFormat::Fp8Rows | PackedFormat::Fp8Blocks);
    is_fp8 && gpu.capability().0 == 9 && gpu.has_kernel("sm90_grouped_fp8_gemm_blocks")
}

/// [`super::grouped_gemm::grouped_gemm`] for weights in [`PackedFormat::Fp8Rows`] or [`PackedFormat::Fp8Blocks`] and inputs that are
/// rounded to e4m3. The result of a row depends on no other rows, nor on their number.
pub fn grouped_fp8_gemm(
    q: &Queue,
    y: Span,
    inputs: RowInputs<Fp8Rows>,
    weight: &GroupedWeight,
    rows: GroupedRows,
    epilogue: GroupedEpilogue,
) -> Result<(), CudaError> {
    let GroupedWeight { weight: codes, packed, num_experts, n, k, .. } = *weight;
    let (scales, name, format) = match packed {
        Some((scales, format @ PackedFormat::Fp8Rows)) => (scales, "rows", format),
        Some((scales, format @ PackedFormat::Fp8Blocks)) => (scales, "blocks", format),
        _ => return Err(CudaError::argument(OP, "the weights are not in e4m3")),
    };
    check_products(y, weight, rows, epilogue)?;
    let (tokens, (x, x_rows)) = (inputs.tokens(rows)?, inputs.values(rows));
    x.check(x_rows, k)?;
    let (slices, tile_rows) = (format.slices(k), rows.tokens.next_power_of_two().clamp(8, MAX_TILE_ROWS));
    let codes_map = TensorMap::bytes_matrix(codes, num_experts * n, format.row_bytes(k), COLUMNS, SLICE)?;
    let [x_map, x_box_map] =
        [8, BOX_ROWS].map(|rows_of_box| TensorMap::bytes_matrix(x.codes, x_rows, slices * SLICE, rows_of_box, SLICE));
    let (x_map, x_box_map) = (x_map?, x_box_map?);
    let parameters = parameters(y, weight, rows, epilogue, &inputs);
    let sizes = Fp8Rows::pitch(x_rows) as u64 | (slices as u64) << 32;
    let operands = [x.scales.address(), scales.address(), sizes, x.codes.address(), tokens.address()];
    let stage_bytes = (COLUMNS + tile_rows) * SLICE + 2 * 16 + tile_rows * size_of::<f32>() + 16;
    let (stages, shared) = ring(q.gpu(), stage_bytes, 16, 0);
    ensure!(OP, stages > 1, "shared memory is too small for tiles of {tile_rows} rows");
    let args = [
        Arg::Bytes(codes_map.bytes()),
        Arg::Bytes(x_map.bytes()),
        Arg::Bytes(x_box_map.bytes()),
        Arg::Bytes(bytemuck::bytes_of(&parameters)),
        Arg::Bytes(bytemuck::bytes_of(&operands)),
        (tile_rows as u32).into(),
        stages.into(),
    ];
    let launch = Launch::new(q.gpu().num_multiprocessors(), 384).shared(shared);
    q.launch(&format!("sm90_grouped_fp8_gemm_{name}"), launch, &args)
}
