//! Linear layers for up to 128 rows on Hopper. Kernel: `sm90_wide_gemm.cu`.

use super::error::ensure;
use super::skinny_gemm::{Epilogue, LinearWeight, check_operands, output_argument};
use super::tensor_map::TensorMap;
use super::{Arg, CudaError, Gpu, Launch, Queue, Span};

/// Most rows of `x`.
pub const MAX_ROWS: usize = 128;

const OP: &str = "wide_gemm";
/// Columns of a slice that the copy engine brings: 128 bytes.
const SLICE: usize = 64;
/// Rows of a weight that a block takes, those that there are kernels of.
const WIDTHS: [usize; 5] = [64, 96, 128, 176, 256];
/// Shared memory of a block that the ring of slices and the sums may take.
const RING_BYTES: usize = 200 << 10;

/// How the kernel divides the work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Division {
    /// Rows of the weight that a block takes.
    pub width: usize,
    /// Blocks of a cluster, which bring x to each other: 1, 2 or 4.
    pub blocks: usize,
}

impl Division {
    /// The narrowest tiles of which a wave over `multiprocessors` takes all of `n`.
    pub fn for_shape(n: usize, multiprocessors: usize) -> Self {
        let fits = |&width: &usize| n.div_ceil(width).next_multiple_of(2) <= multiprocessors;
        Self { width: WIDTHS.into_iter().find(fits).unwrap_or(WIDTHS[WIDTHS.len() - 1]), blocks: 2 }
    }
}

/// Whether the kernel is quicker than the library, by measurement on an H200 (kernels/README.md): outputs are many beside inputs.
pub fn suits(n: usize, k: usize) -> bool {
    n >= 2 * k
}

/// Whether this GPU and this build have the kernel.
pub fn is_available(gpu: &Gpu) -> bool {
    gpu.capability().0 == 9 && gpu.has_kernel("sm90_wide_gemm_bf16_n64")
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
    let division = Division::for_shape(linear.n, q.gpu().num_multiprocessors() as usize);
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
    let Division { width, blocks } = division;
    ensure!(OP, (1..=MAX_ROWS).contains(&rows), "{rows} rows; expected 1 to {MAX_ROWS}");
    ensure!(OP, WIDTHS.contains(&width) && matches!(blocks, 1 | 2 | 4), "tiles of {width}, clusters of {blocks}");
    check_operands(OP, y, x, linear, rows, epilogue)?;
    let stage_bytes = (MAX_ROWS + width) * SLICE * 2;
    let stages = RING_BYTES / stage_bytes;
    let sums_bytes = MAX_ROWS * (width + 8) * 4;
    let shared_bytes = (stages * stage_bytes).max(sums_bytes) + 1024;

    let weight_map = TensorMap::matrix(linear.weight, linear.n, linear.k, width, SLICE)?;
    let x_map = TensorMap::matrix(x, rows, linear.k, MAX_ROWS / blocks, SLICE)?;
    let output = output_argument(y, linear, rows, epilogue.code());
    let args = [
        Arg::Bytes(weight_map.bytes()),
        Arg::Bytes(x_map.bytes()),
        Arg::Bytes(&output),
        (linear.k as u32).into(),
        (stages as u32).into(),
        (blocks as u32).into(),
    ];
    let launch = Launch::new(0, 288)
        .grid(blocks as u32, linear.n.div_ceil(width * blocks) as u32, 1)
        .shared(shared_bytes as u32)
        .cluster(blocks as u32);
    q.launch(&format!("sm90_wide_gemm_bf16_n{width}"), launch, &args)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wave_takes_each_matrix_of_the_7b_shape() {
        for (n, width) in [(12288, 96), (22016, 176), (32000, 256), (6144, 64), (11008, 96)] {
            let division = Division::for_shape(n, 132);
            assert_eq!(division, Division { width, blocks: 2 }, "{n}");
            assert!((84..=132).contains(&n.div_ceil(width)), "{n} in tiles of {width}");
        }
    }
}
