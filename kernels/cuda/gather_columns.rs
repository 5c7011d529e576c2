//! Gathers the inputs of a weight whose columns have an order of their own. Kernel: `gather_columns.cu`.

use half::bf16;

use super::error::ensure;
use super::{CudaError, Launch, Queue, Span};

/// Columns of a thread block.
const BLOCK_COLS: usize = 2048;

/// `y[m, i] = x[m, order[i]]`: `x` and `y` `[rows, cols]`, `order` `[cols]` u32, below `cols` (by construction: it is a permutation).
/// `order` is not written by work of this queue that may still run.
pub fn gather_columns(q: &Queue, y: Span, x: Span, order: Span, rows: usize, cols: usize) -> Result<(), CudaError> {
    ensure!("gather_columns", cols > 0 && cols.is_multiple_of(8), "cols {cols} is not a multiple of 8");
    ensure!("gather_columns", rows > 0, "no rows");
    ensure!("gather_columns", y.count::<bf16>() >= rows * cols, "y is shorter than {rows} x {cols}");
    ensure!("gather_columns", x.count::<bf16>() >= rows * cols, "x is shorter than {rows} x {cols}");
    ensure!("gather_columns", order.count::<u32>() >= cols, "order is shorter than {cols}");
    ensure!("gather_columns", y.is_aligned(16) && order.is_aligned(16), "a buffer is not 16-byte aligned");
    let threads = (cols / 8).min(BLOCK_COLS / 8).next_multiple_of(32) as u32;
    q.launch(
        "gather_columns_bf16",
        Launch::new(rows as u32, threads).grid(rows as u32, cols.div_ceil(BLOCK_COLS) as u32, 1),
        &[y.into(), x.into(), order.into(), (cols as u32).into()],
    )
}
