//! Scales rows by a gate of one output. Kernel: `gate_rows.cu`.

use half::bf16;

use super::error::ensure;
use super::{CudaError, Launch, Queue, Span};

/// `out[t, :] *= sigmoid(x[t, :] · gate)`: `out` `[rows, cols]`, `x` `[rows, width]`, `gate` `[width]`, all bf16.
pub fn gate_rows(
    q: &Queue,
    out: Span,
    x: Span,
    gate: Span,
    rows: usize,
    cols: usize,
    width: usize,
) -> Result<(), CudaError> {
    let op = "gate_rows";
    ensure!(op, cols > 0 && cols.is_multiple_of(8), "cols {cols} is not a multiple of 8");
    ensure!(op, width > 0 && width.is_multiple_of(8), "width {width} is not a multiple of 8");
    ensure!(op, rows > 0, "no rows");
    ensure!(op, out.count::<bf16>() >= rows * cols, "out is shorter than {rows} x {cols}");
    ensure!(op, x.count::<bf16>() >= rows * width, "x is shorter than {rows} x {width}");
    ensure!(op, gate.count::<bf16>() >= width, "the gate is shorter than {width}");
    ensure!(op, [out, x, gate].iter().all(|span| span.is_aligned(16)), "a buffer is not 16-byte aligned");
    let args = [out.into(), x.into(), gate.into(), (cols as u32).into(), (width as u32).into()];
    q.launch("gate_rows_bf16", Launch::new(rows as u32, 256), &args)
}
