//! Norms behind a branch, and sums of two branches. Kernels: `branch_norm.cu`.

use half::bf16;

use super::error::ensure;
use super::{CudaError, Launch, Queue, Span};

/// Operands of [`branch_norm`].
#[derive(Debug, Clone, Copy)]
pub struct BranchNorm {
    /// `[rows, cols]`, the hidden state.
    pub residual: Span,
    /// `[rows, cols]`, the branch.
    pub branch: Span,
    /// `[cols]`, weight of the branch's norm.
    pub branch_weight: Span,
    /// `[rows, cols]`, and the `[cols]` weight of the norm that follows.
    pub next: Option<[Span; 2]>,
    /// Added to mean squares.
    pub eps: f32,
}

/// `residual += rms_norm(branch)`; then the next norm of `residual`, if there is one.
pub fn branch_norm(q: &Queue, norm: BranchNorm, rows: usize, cols: usize) -> Result<(), CudaError> {
    let op = "branch_norm";
    let BranchNorm { residual, branch, branch_weight, next, eps } = norm;
    ensure!(op, cols > 0 && cols.is_multiple_of(8) && cols <= 32768, "cols {cols}; a multiple of 8 up to 32768");
    ensure!(op, rows > 0, "no rows");
    let [y, next_weight] = next.unwrap_or([Span::NULL, Span::NULL]);
    let matrices = [Some(residual), Some(branch), next.map(|[y, _]| y)];
    for matrix in matrices.into_iter().flatten() {
        ensure!(op, matrix.count::<bf16>() >= rows * cols, "a matrix is shorter than {rows} x {cols}");
        ensure!(op, matrix.is_aligned(16), "a matrix is not 16-byte aligned");
    }
    for weight in [Some(branch_weight), next.map(|[_, weight]| weight)].into_iter().flatten() {
        ensure!(op, weight.count::<bf16>() >= cols && weight.is_aligned(16), "a weight is short or not aligned");
    }
    let threads = (cols / 8).min(1024).next_multiple_of(32) as u32;
    let args = [
        y.into(),
        residual.into(),
        branch.into(),
        branch_weight.into(),
        next_weight.into(),
        (cols as u32).into(),
        eps.into(),
    ];
    q.launch("branch_norm_bf16", Launch::new(rows as u32, threads), &args)
}

/// `x[i] += y[i]` for the first `count` elements, a multiple of 8.
pub fn add(q: &Queue, x: Span, y: Span, count: usize) -> Result<(), CudaError> {
    let op = "add";
    ensure!(op, count > 0 && count.is_multiple_of(8), "{count} elements; a multiple of 8");
    ensure!(op, x.count::<bf16>() >= count && y.count::<bf16>() >= count, "an operand is shorter than {count}");
    ensure!(op, x.is_aligned(16) && y.is_aligned(16), "an operand is not 16-byte aligned");
    let eighths = count / 8;
    q.launch("add_bf16", Launch::new(eighths.div_ceil(256) as u32, 256), &[x.into(), y.into(), (eighths as u64).into()])
}
