//! Linear layers in bf16 for many rows, on Hopper, whose sums have the same bits as those of [`super::skinny_gemm`] in the same
//! order. Kernel: `sm90_wide_gemm.cu`.

use super::error::ensure;
use super::skinny_gemm::{Epilogue, LinearWeight, check_operands, output_argument};
use super::sum_order::SumOrder;
use super::tensor_map::TensorMap;
use super::{Arg, CudaError, Gpu, Launch, Queue, Span};

const OP: &str = "wide_gemm";
/// Rows of x of a block, and columns of a slice.
const ROWS: usize = 128;
const SLICE: usize = 64;
/// Floats between rows of partial sums, `PITCH` of `sm90_gemm.cuh`.
const PITCH: usize = 64 + 4;

/// How the kernel divides the work. No result depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WideSplit {
    /// Rows of the weight of a block: 128; 224 if there is one run; 256 if the block has all parts of K.
    pub cols: usize,
    /// Whether each part of K has a block of its own, in one cluster for each tile.
    pub is_split: bool,
}

impl WideSplit {
    /// The division with the least time, by a model of an H200 (kernels/README.md).
    pub fn for_shape(weight: &LinearWeight, rows: usize, order: SumOrder, multiprocessors: usize) -> Self {
        let mut choices = [128, 256].map(|cols| Self { cols, is_split: false }).to_vec();
        if order.runs() == 1 {
            choices.push(Self { cols: 224, is_split: false });
        }
        if order.parts > 1 {
            choices.push(Self { cols: 128, is_split: true });
        }
        let time = |split: &Self| split.microseconds(weight, rows, order, multiprocessors);
        choices.into_iter().min_by(|a, b| time(a).total_cmp(&time(b))).unwrap_or(Self { cols: 128, is_split: false })
    }

    fn microseconds(self, weight: &LinearWeight, rows: usize, order: SumOrder, multiprocessors: usize) -> f64 {
        let blocks = if self.is_split { order.parts } else { 1 };
        let tiles = rows.div_ceil(ROWS) * weight.n.div_ceil(self.cols);
        // Clusters of four do not fill every group of multiprocessors.
        let usable = if blocks > 2 { multiprocessors * 15 / 16 } else { multiprocessors };
        let waves = (tiles * blocks).div_ceil(usable / blocks * blocks);
        let slices = weight.k.div_ceil(SLICE).div_ceil(blocks) as f64;
        let slice = match self.cols {
            256 => 0.64,
            224 => 0.57,
            _ => 0.36,
        };
        let store = if self.is_split { 8.0 } else { 1.5 };
        // Sums of runs, which go through local memory.
        let kept = if self.cols == 256 { 2.5 * (order.runs() - 1) as f64 } else { 0.0 };
        waves as f64 * (slices * slice + kept + store)
    }
}

/// Whether this GPU and this build have the kernel.
pub fn has_kernel(gpu: &Gpu) -> bool {
    gpu.capability().0 == 9 && gpu.has_kernel("sm90_wide_gemm_bf16_n128")
}

/// Whether [`wide_gemm`] with an activation is faster than the library and the activation after it (kernels/README.md): up to 128
/// rows, whose tiles of 224 columns are nearly as many as the multiprocessors.
pub fn is_fastest_gated(gpu: &Gpu, linear: &LinearWeight, rows: usize) -> bool {
    let (tiles, multiprocessors) = (linear.n.div_ceil(224), gpu.num_multiprocessors() as usize);
    let fills = tiles <= multiprocessors && tiles * 16 >= multiprocessors * 15;
    has_kernel(gpu) && rows <= ROWS && fills && SumOrder::for_shape(linear.n, linear.k).runs() == 1
}

/// `y = x @ weight^T + bias` for `x [rows, k]`, summed in the given order.
pub fn wide_gemm(
    q: &Queue,
    y: Span,
    x: Span,
    linear: &LinearWeight,
    rows: usize,
    epilogue: Epilogue,
    order: SumOrder,
) -> Result<(), CudaError> {
    let split = WideSplit::for_shape(linear, rows, order, q.gpu().num_multiprocessors() as usize);
    wide_gemm_split(q, y, x, linear, rows, epilogue, order, split)
}

/// [`wide_gemm`] with a given division.
#[expect(clippy::too_many_arguments, reason = "the operands of a product, and how it is computed")]
pub fn wide_gemm_split(
    q: &Queue,
    y: Span,
    x: Span,
    linear: &LinearWeight,
    rows: usize,
    epilogue: Epilogue,
    order: SumOrder,
    split: WideSplit,
) -> Result<(), CudaError> {
    check_operands(OP, y, x, linear, rows, epilogue)?;
    let LinearWeight { weight, bias, n, k } = *linear;
    let WideSplit { cols, is_split } = split;
    let counts = [order.parts, order.groups];
    ensure!(OP, counts.iter().all(|count| matches!(count, 1 | 2 | 4)), "{order:?}; expected 1, 2 or 4 of each");
    let is_possible = match cols {
        128 => true,
        224 => order.runs() == 1,
        256 => !is_split,
        _ => false,
    };
    ensure!(OP, is_possible, "{split:?} for {order:?}");
    let blocks = if is_split { order.parts } else { 1 };
    let stage_bytes = (ROWS + cols) * SLICE * 2;
    let partial_bytes = if blocks > 1 { cols / 64 * ROWS * PITCH * 4 } else { 0 };
    // Barriers are in static shared memory.
    let room = (q.gpu().max_shared_bytes() as usize).saturating_sub(1024 + 512);
    let stages = (room / stage_bytes).min(16);
    ensure!(OP, stages > 1 && partial_bytes <= room, "shared memory of {room} bytes is too small");

    let weight_map = TensorMap::matrix(weight, n, k, cols, SLICE)?;
    let x_map = TensorMap::matrix(x, rows, k, ROWS, SLICE)?;
    let output = output_argument(y, bias, rows, n, epilogue.code());
    let sums = [k.div_ceil(SLICE) as u32, order.parts as u32, order.groups as u32];
    let args = [
        Arg::Bytes(weight_map.bytes()),
        Arg::Bytes(x_map.bytes()),
        Arg::Bytes(&output),
        Arg::Bytes(bytemuck::bytes_of(&sums)),
        (stages as u32).into(),
        (blocks as u32).into(),
    ];
    let tiles = rows.div_ceil(ROWS) * n.div_ceil(cols);
    let grid = if blocks > 1 { tiles * blocks } else { tiles.min(q.gpu().num_multiprocessors() as usize) };
    let launch = Launch::new(grid as u32, 384)
        .shared(((stages * stage_bytes).max(partial_bytes) + 1024) as u32)
        .cluster(blocks as u32);
    let kind = if cols == 256 && order.runs() > 1 { "wide_gemm_of_runs" } else { "wide_gemm" };
    q.launch(&format!("sm90_{kind}_bf16_n{cols}"), launch, &args)
}
