//! Adds learned positions to the embedding. Kernel: `add_positions.cu`.

use half::bf16;

use super::error::ensure;
use super::{CudaError, Launch, Queue, Span};

/// `x[t, :] += table[positions[t], :]`: `x` `[T, cols]`, `table` `[P, cols]`, `positions` `[T]` u32, below `P`
/// (asserted when the step is packed).
pub fn add_positions(
    q: &Queue,
    x: Span,
    table: Span,
    positions: Span,
    num_tokens: usize,
    cols: usize,
) -> Result<(), CudaError> {
    let op = "add_positions";
    ensure!(op, cols > 0 && cols.is_multiple_of(8), "cols {cols} is not a multiple of 8");
    ensure!(op, num_tokens > 0, "no tokens");
    ensure!(op, x.count::<bf16>() >= num_tokens * cols, "x is shorter than {num_tokens} x {cols}");
    ensure!(op, table.count::<bf16>() >= cols, "the table is empty");
    ensure!(op, positions.count::<u32>() >= num_tokens, "positions is shorter than {num_tokens}");
    ensure!(op, x.is_aligned(16) && table.is_aligned(16), "a buffer is not 16-byte aligned");
    let threads = (cols / 8).min(256).next_multiple_of(32) as u32;
    let args = [x.into(), table.into(), positions.into(), (cols as u32).into()];
    q.launch("add_positions_bf16", Launch::new(num_tokens as u32, threads), &args)
}
