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
/// Most parts of K.
const MAX_PARTS: usize = 3;

/// How the kernel divides the work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fp8Split {
    /// Rows of x and of the weight of a tile. The results do not depend on it.
    pub tile: [usize; 2],
    /// Number of parts of K: 1 to 3. It determines the order of summation.
    pub parts: usize,
    /// Whether each part has a block of a cluster. Otherwise a block computes the parts of a tile one after the other.
    pub has_clusters: bool,
}

impl Fp8Split {
    /// All divisions for weights in this format.
    pub fn all(format: PackedFormat) -> impl Iterator<Item = Self> {
        // Blocks of 64 rows of a weight have a scale, and 224 is no multiple.
        let tiles = [[128, 256], [128, 128], [128, 224], [160, 128], [64, 128], [64, 224]];
        let tiles = tiles.into_iter().filter(move |tile| tile[1] != 224 || format == PackedFormat::Fp8Rows);
        let splits = tiles.flat_map(|tile| {
            let of_parts = move |parts| [false, true].map(|has_clusters| Self { tile, parts, has_clusters });
            (1..=MAX_PARTS).flat_map(of_parts)
        });
        splits.filter(|split| match split {
            Self { parts: 1, has_clusters, .. } => !has_clusters,
            Self { tile, has_clusters: true, .. } => tile[1].is_multiple_of(TILE),
            Self { tile, .. } => matches!(tile, [128, 128 | 256]),
        })
    }

    /// The division with the least time for a shape, by a model of an H200 (kernels/README.md).
    pub fn for_shape(n: usize, k: usize, format: PackedFormat, rows: usize, multiprocessors: usize) -> Self {
        let slices = format.slices(k);
        let is_possible = |split: &Self| match split.parts {
            1 => true,
            parts => split.has_clusters && split.tile[1] == 128 && slices >= 8 * parts,
        };
        Self::fastest(Self::all(format).filter(is_possible), n, slices, rows, multiprocessors)
    }

    /// The same among those that sum in one order for any number of rows.
    pub fn invariant(n: usize, k: usize, format: PackedFormat, rows: usize, multiprocessors: usize) -> Self {
        let (slices, parts) = (format.slices(k), invariant_parts(n, format.slices(k)));
        let has_order = |split: &Self| split.parts == parts && (!split.has_clusters || split.tile[1] == 128);
        Self::fastest(Self::all(format).filter(has_order), n, slices, rows, multiprocessors)
    }

    fn fastest(
        splits: impl Iterator<Item = Self>,
        n: usize,
        slices: usize,
        rows: usize,
        multiprocessors: usize,
    ) -> Self {
        let time = |split: &Self| split.microseconds(n, slices, rows, multiprocessors);
        let best = splits.min_by(|a, b| time(a).total_cmp(&time(b)));
        best.unwrap_or(Self { tile: [128, 256], parts: 1, has_clusters: false })
    }

    fn microseconds(self, n: usize, slices: usize, rows: usize, multiprocessors: usize) -> f64 {
        let Self { tile, parts, has_clusters } = self;
        let cluster = if has_clusters { parts } else { 1 };
        let tiles = rows.div_ceil(tile[0]) * n.div_ceil(tile[1]);
        // Clusters of three do not fill every group of multiprocessors.
        let blocks = if cluster > 2 { multiprocessors * 15 / 16 } else { multiprocessors };
        let waves = (tiles * cluster).div_ceil(blocks / cluster * cluster);
        let slice = match tile {
            [128, 256] => 0.76,
            [128, 224] => 0.68,
            [160, _] => 0.58,
            [64, 224] => 0.55,
            [64, _] => 0.36,
            _ => 0.40,
        };
        let store = match has_clusters {
            true => 3.5,
            // Sums of parts go to memory and back.
            false if tile[1] == 256 => 1.5 + 2.7 * (parts - 1) as f64,
            false => 1.5,
        };
        waves as f64 * (slices.div_ceil(cluster) as f64 * slice + store)
    }
}

/// The number of parts of K for any number of rows: as many as give most multiprocessors of a Hopper GPU a block of a product of few
/// rows.
fn invariant_parts(n: usize, slices: usize) -> usize {
    const BLOCKS: usize = 132;
    let tiles = n.div_ceil(128);
    (1..=MAX_PARTS).rev().find(|parts| tiles * parts <= BLOCKS && slices >= 4 * parts).unwrap_or(1)
}

/// `y [rows, n] = x @ weight^T + bias`; the weight is in [`PackedFormat::Fp8Rows`] or [`PackedFormat::Fp8Blocks`].
pub fn fp8_gemm(
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
        _ => "",
    };
    ensure!(OP, !format_name.is_empty(), "a weight in {format:?}; expected e4m3");
    ensure!(OP, Fp8Split::all(format).any(|one| one == split), "{split:?} for a weight in {format:?}");
    let Fp8Split { tile: [tile_rows, cols], parts, has_clusters } = split;
    let cluster = if has_clusters { parts } else { 1 };
    let slices = format.slices(k);
    let stage_bytes = (tile_rows + cols) * SLICE + tile_rows * size_of::<f32>() + cols.div_ceil(TILE) * 16;
    // Barriers, and the scales of rows of the weight.
    let static_bytes = 128 + 2 * 256 * size_of::<f32>();
    let room = (q.gpu().max_shared_bytes() as usize).saturating_sub(1024 + static_bytes);
    let stages = (room / stage_bytes).min(8);
    let partial_bytes = if has_clusters { cols / TILE * tile_rows * PITCH * 4 } else { 0 };
    ensure!(OP, stages > 1 && partial_bytes <= room, "shared memory of {room} bytes is too small");
    let codes_map = TensorMap::bytes_matrix(codes, n, format.row_bytes(k), cols, SLICE)?;
    let x_map = TensorMap::bytes_matrix(x.codes, rows, slices * SLICE, tile_rows, SLICE)?;
    let output = output_argument(y, bias, rows, n, epilogue.code());
    let operands = operands_argument(x.scales, scales, [Fp8Rows::pitch(rows), slices, parts, cluster]);
    let args = [
        Arg::Bytes(codes_map.bytes()),
        Arg::Bytes(x_map.bytes()),
        Arg::Bytes(&output),
        Arg::Bytes(bytemuck::bytes_of(&operands)),
        (stages as u32).into(),
    ];
    let tiles = rows.div_ceil(tile_rows) * n.div_ceil(cols);
    let blocks = if has_clusters { tiles * cluster } else { tiles.min(q.gpu().num_multiprocessors() as usize) };
    let launch = Launch::new(blocks as u32, 384)
        .shared(((stages * stage_bytes).max(partial_bytes) + 1024) as u32)
        .cluster(cluster as u32);
    let kind = if parts > cluster { "fp8_gemm_of_parts" } else { "fp8_gemm" };
    q.launch(&format!("sm90_{kind}_{format_name}_m{tile_rows}_n{cols}"), launch, &args)
}

/// `Operands` of the kernel.
fn operands_argument(x_scales: Span, w_scales: Span, numbers: [usize; 4]) -> [u64; 4] {
    let [pitch, slices, parts, cluster] = numbers.map(|number| number as u64);
    [x_scales.address(), w_scales.address(), pitch | slices << 32, parts | cluster << 32]
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
        let of = |tile, parts| Fp8Split { tile, parts, has_clusters: parts > 1 };
        let expect = |all: [([usize; 2], usize); 4]| all.map(|(tile, parts)| of(tile, parts));
        assert_eq!(found(128), expect([(narrow, 2), (narrow, 3), (wide, 1), (narrow, 3)]));
        assert_eq!(found(150), expect([(fitted, 2), (fitted, 3), (fitted, 1), (fitted, 3)]));
        assert_eq!(found(256), expect([(narrow, 1), (narrow, 2), (wide, 1), (narrow, 2)]));
        assert_eq!(found(512), expect([(wide, 1), (narrow, 1), (wide, 1), (narrow, 1)]));
        assert_eq!(split(28672, 4096, 2048), of(full, 1));
        let blocks = |rows| Fp8Split::for_shape(28672, 4096, PackedFormat::Fp8Blocks, rows, 132).tile;
        assert_eq!([150, 256].map(blocks), [fitted, full]);
    }

    #[test]
    fn the_order_of_sums_does_not_depend_on_the_number_of_rows() {
        let layers = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (64, 128)];
        for (format, (n, k)) in [PackedFormat::Fp8Rows, PackedFormat::Fp8Blocks]
            .into_iter()
            .flat_map(|format| layers.map(|layer| (format, layer)))
        {
            let split = |rows| Fp8Split::invariant(n, k, format, rows, 132);
            let parts = split(1).parts;
            assert!((1..5000).all(|rows| split(rows).parts == parts), "{n} x {k}");
        }
        let few = |n, k| Fp8Split::invariant(n, k, PackedFormat::Fp8Rows, 8, 132);
        assert_eq!(layers.map(|(n, k)| few(n, k).parts), [2, 3, 1, 3, 1]);
        assert_eq!(few(4096, 4096), Fp8Split { tile: [64, 128], parts: 3, has_clusters: true });
        assert_eq!(few(28672, 4096), Fp8Split { tile: [64, 224], parts: 1, has_clusters: false });
        let many = Fp8Split::invariant(4096, 14336, PackedFormat::Fp8Rows, 16384, 132);
        assert_eq!(many, Fp8Split { tile: [128, 256], parts: 3, has_clusters: false });
    }
}
