//! Linear layers whose weights and inputs are in e4m3, for many rows, on Hopper. Kernel: `sm90_fp8_gemm.cu`.

use super::error::ensure;
use super::packed_weight::{PackedFormat, PackedWeight, TILE};
use super::quantize_rows::Fp8Rows;
use super::quantized_gemm::check_outputs;
use super::skinny_gemm::{Epilogue, output_argument};
use super::tensor_map::TensorMap;
use super::{Arg, CudaError, Launch, Queue, Span};

const OP: &str = "fp8_gemm";
/// Bytes of a slice of a row.
const SLICE: usize = 128;
/// Floats between rows of partial sums, `PITCH` of `sm90_gemm.cuh`.
const PITCH: usize = TILE + 4;
/// How the kernel divides the work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fp8Split {
    /// Rows of x and of the weight of a tile, one of [`Fp8Split::tiles`]. The results do not depend on it.
    pub tile: [usize; 2],
    /// Number of parts of K, which is the number of blocks in a cluster: 1 to 4. It determines the order of
    /// summation.
    pub parts: usize,
}

impl Fp8Split {
    /// The tiles that there are for weights in this format. Blocks of 64 rows of a weight have a scale, and 224 is no multiple.
    pub fn tiles(format: PackedFormat) -> impl Iterator<Item = [usize; 2]> {
        let all = [[128, 256], [128, 128], [128, 224], [160, 128]];
        all.into_iter().filter(move |tile| tile[1] != 224 || format == PackedFormat::Fp8Rows)
    }

    /// The division with the least time for a shape, by a model of an H200 (kernels/README.md).
    pub fn for_shape(n: usize, k: usize, format: PackedFormat, rows: usize, multiprocessors: usize) -> Self {
        let slices = format.slices(k);
        let time = |split: &Self| split.microseconds(n, slices, rows, multiprocessors);
        let choices = Self::tiles(format).flat_map(|tile| {
            let most = if tile[1] == 128 { 3 } else { 1 };
            (1..=most).map(move |parts| Self { tile, parts })
        });
        let is_possible = |split: &Self| split.parts == 1 || slices >= 8 * split.parts;
        let best = choices.filter(is_possible).min_by(|a, b| time(a).total_cmp(&time(b)));
        best.unwrap_or(Self { tile: [128, 256], parts: 1 })
    }

    fn microseconds(self, n: usize, slices: usize, rows: usize, multiprocessors: usize) -> f64 {
        let Self { tile, parts } = self;
        let tiles = rows.div_ceil(tile[0]) * n.div_ceil(tile[1]);
        // Clusters of three do not fill every group of multiprocessors.
        let blocks = if parts > 2 { multiprocessors * 15 / 16 } else { multiprocessors };
        let waves = (tiles * parts).div_ceil(blocks / parts * parts);
        let slice = match tile {
            [_, 256] => 0.76,
            [_, 224] => 0.68,
            [160, _] => 0.58,
            _ => 0.40,
        };
        let store = if parts > 1 { 3.5 } else { 1.5 };
        waves as f64 * (slices.div_ceil(parts) as f64 * slice + store)
    }
}

/// `y [rows, n] = x @ weight^T + bias`; the weight is in [`PackedFormat::Fp8Rows`] or [`PackedFormat::Fp8Blocks`].
pub fn fp8_gemm(
    q: &Queue,
    y: Span,
    x: Fp8Rows,
    weight: &PackedWeight,
    rows: usize,
    epilogue: Epilogue,
) -> Result<(), CudaError> {
    let multiprocessors = q.gpu().num_multiprocessors() as usize;
    let split = Fp8Split::for_shape(weight.n, weight.k, weight.format, rows, multiprocessors);
    fp8_gemm_split(q, y, x, weight, rows, epilogue, split)
}

/// [`fp8_gemm`] with a given division.
pub fn fp8_gemm_split(
    q: &Queue,
    y: Span,
    x: Fp8Rows,
    weight: &PackedWeight,
    rows: usize,
    epilogue: Epilogue,
    split: Fp8Split,
) -> Result<(), CudaError> {
    check_outputs(y, weight, rows, epilogue)?;
    let PackedWeight { codes, scales, bias, n, k, format } = *weight;
    x.check(rows, k)?;
    let format_name = match format {
        PackedFormat::Fp8Rows => "rows",
        PackedFormat::Fp8Blocks => "blocks",
        PackedFormat::Int4 { .. } | PackedFormat::Mxfp4 | PackedFormat::Nvfp4 => "",
    };
    ensure!(OP, !format_name.is_empty(), "a weight in {format:?}; expected e4m3");
    let Fp8Split { tile, parts } = split;
    let [tile_rows, cols] = tile;
    ensure!(OP, Fp8Split::tiles(format).any(|one| one == tile), "tiles of {tile:?} for a weight in {format:?}");
    ensure!(OP, (1..=4).contains(&parts), "K in {parts} parts; expected 1 to 4");
    ensure!(OP, parts == 1 || cols.is_multiple_of(TILE), "K in {parts} parts with tiles of {tile:?}");
    let slices = format.slices(k);
    let stage_bytes = (tile_rows + cols) * SLICE + tile_rows * size_of::<f32>() + cols.div_ceil(TILE) * 16;
    // Barriers, and the scales of rows of the weight.
    let static_bytes = 128 + 2 * 256 * size_of::<f32>();
    let room = (q.gpu().max_shared_bytes() as usize).saturating_sub(1024 + static_bytes);
    let stages = (room / stage_bytes).min(8);
    let partial_bytes = if parts > 1 { cols / TILE * tile_rows * PITCH * 4 } else { 0 };
    ensure!(OP, stages > 1 && partial_bytes <= room, "shared memory of {room} bytes is too small");
    let codes_map = TensorMap::bytes_matrix(codes, n, format.row_bytes(k), cols, SLICE)?;
    let x_map = TensorMap::bytes_matrix(x.codes, rows, slices * SLICE, tile_rows, SLICE)?;
    let output = output_argument(y, bias, rows, n, epilogue.code());
    let operands = operands_argument(x.scales, scales, [Fp8Rows::pitch(rows), slices, parts]);
    let args = [
        Arg::Bytes(codes_map.bytes()),
        Arg::Bytes(x_map.bytes()),
        Arg::Bytes(&output),
        Arg::Bytes(bytemuck::bytes_of(&operands)),
        (stages as u32).into(),
    ];
    let tiles = rows.div_ceil(tile_rows) * n.div_ceil(cols);
    let blocks = if parts > 1 { tiles * parts } else { tiles.min(q.gpu().num_multiprocessors() as usize) };
    let launch = Launch::new(blocks as u32, 384)
        .shared(((stages * stage_bytes).max(partial_bytes) + 1024) as u32)
        .cluster(parts as u32);
    q.launch(&format!("sm90_fp8_gemm_{format_name}_m{tile_rows}_n{cols}"), launch, &args)
}

/// `Operands` of the kernel.
fn operands_argument(x_scales: Span, w_scales: Span, [pitch, slices, parts]: [usize; 3]) -> [u64; 4] {
    [x_scales.address(), w_scales.address(), pitch as u64 | (slices as u64) << 32, parts as u64]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The division that measured best, or within 5 % of it, on an H200.
    #[test]
    fn shapes_get_the_division_that_measured_best() {
        let split = |n, k, rows| Fp8Split::for_shape(n, k, PackedFormat::Fp8Rows, rows, 132);
        let found = |rows| [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)].map(|(n, k)| split(n, k, rows));
        let [wide, narrow, full, fitted] = [[128, 224], [128, 128], [128, 256], [160, 128]];
        let expect = |all: [([usize; 2], usize); 4]| all.map(|(tile, parts)| Fp8Split { tile, parts });
        assert_eq!(found(128), expect([(narrow, 2), (narrow, 3), (wide, 1), (narrow, 3)]));
        assert_eq!(found(150), expect([(fitted, 2), (fitted, 3), (fitted, 1), (fitted, 3)]));
        assert_eq!(found(256), expect([(narrow, 1), (narrow, 2), (wide, 1), (narrow, 2)]));
        assert_eq!(found(512), expect([(wide, 1), (narrow, 1), (wide, 1), (narrow, 1)]));
        assert_eq!(split(28672, 4096, 2048), Fp8Split { tile: full, parts: 1 });
        let blocks = |rows| Fp8Split::for_shape(28672, 4096, PackedFormat::Fp8Blocks, rows, 132).tile;
        assert_eq!([150, 256].map(blocks), [fitted, full]);
    }
}
