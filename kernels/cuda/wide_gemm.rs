//! Linear layers for up to 128 rows on Hopper, at the rate of memory where K and N are large. Kernel: `sm90_wide_gemm.cu`.

use super::error::ensure;
use super::skinny_gemm::{Epilogue, LinearWeight, check_operands, output_argument};
use super::tensor_map::TensorMap;
use super::{Arg, CudaError, Gpu, Launch, Queue, Span};

/// Most rows of `x`.
pub const MAX_ROWS: usize = 128;

const OP: &str = "wide_gemm";
/// Columns of a slice that the copy engine brings: 128 bytes.
const SLICE: usize = 64;
/// Rows of a weight that a cluster takes, those that there are kernels of.
const WIDTHS: [usize; 7] = [32, 64, 96, 128, 176, 192, 256];
/// Shared memory of a block that the ring of slices and the sums may take.
const RING_BYTES: usize = 200 << 10;

/// How the kernel divides the work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Division {
    /// Rows of the weight that a cluster takes.
    pub width: usize,
    /// Parts of K, the blocks of a cluster: 1, 2 or 4.
    pub parts: usize,
}

impl Division {
    /// The division that brings the least through the busiest multiprocessor, of `multiprocessors`.
    pub fn for_shape(n: usize, k: usize, multiprocessors: usize) -> Self {
        let parts = [1, 2, 4].into_iter().filter(|parts| *parts == 1 || k / parts >= 256);
        let all = parts.flat_map(|parts| WIDTHS.map(|width| Self { width, parts }));
        let whole = all.filter(|division| division.width / division.parts % 16 == 0);
        whole.min_by_key(|division| division.cost(n, k, multiprocessors)).expect("K in one part always fits")
    }

    /// Bytes of a wave's weights, x at two thirds since it comes from the L2 cache, and the sums of the cluster's other blocks.
    fn cost(self, n: usize, k: usize, multiprocessors: usize) -> usize {
        let Self { width, parts } = self;
        let waves = (n.div_ceil(width) * parts).div_ceil(multiprocessors);
        waves * ((2 * width + MAX_ROWS * 4 / 3) * k.div_ceil(parts) + MAX_ROWS * width * 4 * (parts - 1) / parts)
    }
}

/// Whether this GPU and this build have the kernel.
pub fn is_available(gpu: &Gpu) -> bool {
    gpu.capability().0 == 9 && gpu.has_kernel("sm90_wide_gemm_bf16_n32")
}

/// `y = x @ weight^T + bias` for `x [rows, k]`, `rows` at most [`MAX_ROWS`]; a row's result does not depend on the others.
pub fn wide_gemm(
    q: &Queue,
    y: Span,
    x: Span,
    linear: &LinearWeight,
    rows: usize,
    epilogue: Epilogue,
) -> Result<(), CudaError> {
    let division = Division::for_shape(linear.n, linear.k, q.gpu().num_multiprocessors() as usize);
    wide_gemm_divided(q, y, x, linear, rows, epilogue, division)
}

/// [`wide_gemm`] with a division of one's own.
pub fn wide_gemm_divided(
    q: &Queue,
    y: Span,
    x: Span,
    linear: &LinearWeight,
    rows: usize,
    epilogue: Epilogue,
    division: Division,
) -> Result<(), CudaError> {
    let Division { width, parts } = division;
    ensure!(OP, (1..=MAX_ROWS).contains(&rows), "{rows} rows; expected 1 to {MAX_ROWS}");
    let known = WIDTHS.contains(&width) && matches!(parts, 1 | 2 | 4) && (width / parts).is_multiple_of(16);
    ensure!(OP, known, "{width} rows of the weight in {parts} parts");
    check_operands(OP, y, x, linear, rows, epilogue)?;
    let stage_bytes = (MAX_ROWS + width) * SLICE * 2;
    let stages = RING_BYTES / stage_bytes;
    let sums_bytes = MAX_ROWS * (width + 8) * 4;
    let shared_bytes = (stages * stage_bytes).max(sums_bytes) + 1024;

    let weight_map = TensorMap::matrix(linear.weight, linear.n, linear.k, width, SLICE)?;
    let x_map = TensorMap::matrix(x, rows, linear.k, MAX_ROWS, SLICE)?;
    let output = output_argument(y, linear, rows, epilogue.code());
    let args = [
        Arg::Bytes(weight_map.bytes()),
        Arg::Bytes(x_map.bytes()),
        Arg::Bytes(&output),
        (linear.k as u32).into(),
        (stages as u32).into(),
        (parts as u32).into(),
    ];
    let launch = Launch::new(0, 288)
        .grid(parts as u32, linear.n.div_ceil(width) as u32, 1)
        .shared(shared_bytes as u32)
        .cluster(parts as u32);
    q.launch(&format!("sm90_wide_gemm_bf16_n{width}"), launch, &args)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wave_takes_each_matrix_of_the_7b_shape() {
        for (n, k) in
            [(12288, 4096), (4096, 4096), (22016, 4096), (4096, 11008), (32000, 4096), (3072, 4096), (5504, 4096)]
        {
            let Division { width, parts } = Division::for_shape(n, k, 132);
            let blocks = n.div_ceil(width) * parts;
            assert!((96..=132).contains(&blocks), "{n} x {k}: {width} rows in {parts} parts are {blocks} blocks");
        }
    }
}
