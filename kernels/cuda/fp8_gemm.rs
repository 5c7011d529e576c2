//! Linear layers whose weights and inputs are in e4m3, for many rows, on Hopper. Kernel: `sm90_fp8_gemm.cu`.

use super::error::ensure;
use super::packed_weight::{PackedFormat, PackedWeight, TILE};
use super::quantize_rows::Fp8Rows;
use super::quantized_gemm::check_outputs;
use super::skinny_gemm::{Epilogue, output_argument};
use super::tensor_map::TensorMap;
use super::{Arg, CudaError, Launch, Queue, Span};

const OP: &str = "fp8_gemm";
/// Rows of x of a block, and bytes of a slice of a row.
const ROWS: usize = 128;
const SLICE: usize = 128;
/// Floats between rows of partial sums, `PITCH` of `sm90_gemm.cuh`.
const PITCH: usize = TILE + 4;
/// How the kernel divides the work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fp8Split {
    /// Rows of the weight of a block: 128 or 256. The results do not depend on it.
    pub cols: usize,
    /// Number of parts of K, which is the number of blocks in a cluster: 1 to 4. It determines the order of
    /// summation.
    pub parts: usize,
}

impl Fp8Split {
    /// Every division that [`Fp8Split::for_shape`] takes.
    const CHOICES: [Self; 4] = [
        Self { cols: 256, parts: 1 },
        Self { cols: 128, parts: 1 },
        Self { cols: 128, parts: 2 },
        Self { cols: 128, parts: 3 },
    ];

    /// The division with the least time for a shape, by a model of an H200 (kernels/README.md).
    pub fn for_shape(n: usize, slices: usize, rows: usize, multiprocessors: usize) -> Self {
        let time = |split: &Self| split.microseconds(n, slices, rows, multiprocessors);
        let is_possible = |split: &Self| split.parts == 1 || slices >= 8 * split.parts;
        let choices = Self::CHOICES.into_iter().filter(is_possible);
        choices.min_by(|a, b| time(a).total_cmp(&time(b))).unwrap_or(Self { cols: 256, parts: 1 })
    }

    fn microseconds(self, n: usize, slices: usize, rows: usize, multiprocessors: usize) -> f64 {
        let tiles = rows.div_ceil(ROWS) * n.div_ceil(self.cols);
        // Clusters of three do not fill every group of multiprocessors.
        let blocks = if self.parts > 2 { multiprocessors * 15 / 16 } else { multiprocessors };
        let waves = (tiles * self.parts).div_ceil(blocks / self.parts * self.parts);
        let slice = if self.cols == 256 { 0.76 } else { 0.40 };
        let store = if self.parts > 1 { 3.5 } else { 1.5 };
        waves as f64 * (slices.div_ceil(self.parts) as f64 * slice + store)
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
    let split = Fp8Split::for_shape(weight.n, weight.format.slices(weight.k), rows, multiprocessors);
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
        PackedFormat::Int4 { .. } | PackedFormat::Mxfp4 => "",
    };
    ensure!(OP, !format_name.is_empty(), "a weight in {format:?}; expected e4m3");
    let Fp8Split { cols, parts } = split;
    ensure!(OP, matches!(cols, 128 | 256), "{cols} columns; expected 128 or 256");
    ensure!(OP, (1..=4).contains(&parts), "K in {parts} parts; expected 1 to 4");
    let slices = format.slices(k);
    let stage_bytes = (ROWS + cols) * SLICE + ROWS * size_of::<f32>() + cols / TILE * 16;
    // Barriers, and the scales of rows of the weight.
    let static_bytes = 128 + 2 * 256 * size_of::<f32>();
    let room = (q.gpu().max_shared_bytes() as usize).saturating_sub(1024 + static_bytes);
    let stages = (room / stage_bytes).min(8);
    let partial_bytes = if parts > 1 { cols / TILE * ROWS * PITCH * 4 } else { 0 };
    ensure!(OP, stages > 1 && partial_bytes <= room, "shared memory of {room} bytes is too small");
    let codes_map = TensorMap::bytes_matrix(codes, n, format.row_bytes(k), cols, SLICE)?;
    let x_map = TensorMap::bytes_matrix(x.codes, rows, slices * SLICE, ROWS, SLICE)?;
    let output = output_argument(y, bias, rows, n, epilogue.code());
    let operands = operands_argument(x.scales, scales, [Fp8Rows::pitch(rows), slices, parts]);
    let args = [
        Arg::Bytes(codes_map.bytes()),
        Arg::Bytes(x_map.bytes()),
        Arg::Bytes(&output),
        Arg::Bytes(bytemuck::bytes_of(&operands)),
        (stages as u32).into(),
    ];
    let tiles = rows.div_ceil(ROWS) * n.div_ceil(cols);
    let blocks = if parts > 1 { tiles * parts } else { tiles.min(q.gpu().num_multiprocessors() as usize) };
    let launch = Launch::new(blocks as u32, 384)
        .shared(((stages * stage_bytes).max(partial_bytes) + 1024) as u32)
        .cluster(parts as u32);
    q.launch(&format!("sm90_fp8_gemm_{format_name}_n{cols}"), launch, &args)
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
        let split = |n, k: usize, rows| Fp8Split::for_shape(n, k / 128, rows, 132);
        assert_eq!(split(28672, 4096, 128), Fp8Split { cols: 256, parts: 1 });
        assert_eq!(split(4096, 14336, 256), Fp8Split { cols: 128, parts: 2 });
        assert_eq!(split(4096, 14336, 512), Fp8Split { cols: 128, parts: 1 });
        assert_eq!(split(6144, 4096, 512), Fp8Split { cols: 256, parts: 1 });
        assert_eq!(split(6144, 4096, 16384), Fp8Split { cols: 256, parts: 1 });
    }
}
