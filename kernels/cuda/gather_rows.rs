//! Gathers the rows that sample. Kernel: `gather_rows.cu`.

use half::bf16;

use super::error::ensure;
use super::{CudaError, Launch, Queue, Span};

/// `y[s, :] = x[index[s], :]`: `x` `[T, cols]`, `y` `[rows, cols]`, `index` `[rows]` u32, below `T` (asserted when the
/// step is packed).
pub fn gather_rows(q: &Queue, y: Span, x: Span, index: Span, rows: usize, cols: usize) -> Result<(), CudaError> {
    ensure!("gather_rows", cols > 0 && cols.is_multiple_of(8), "cols {cols} is not a multiple of 8");
    ensure!("gather_rows", rows > 0, "no rows");
    ensure!("gather_rows", y.count::<bf16>() >= rows * cols, "y is shorter than {rows} x {cols}");
    ensure!("gather_rows", index.count::<u32>() >= rows, "index is shorter than {rows}");
    ensure!("gather_rows", y.is_aligned(16) && x.is_aligned(16), "a buffer is not 16-byte aligned");
    let threads = (cols / 8).min(256).next_multiple_of(32) as u32;
    q.launch(
        "gather_rows_bf16",
        Launch::new(rows as u32, threads),
        &[y.into(), x.into(), index.into(), (cols as u32).into()],
    )
}
