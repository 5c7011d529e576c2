//! Products with a number and with columns of another matrix, and copies to columns. Kernels: `scale.cu`.

use half::bf16;

use super::error::ensure;
use super::launch::Arg;
use super::{CudaError, Launch, Queue, Span};

/// `x[i] *= factor` for the first `count` elements, a multiple of 8.
pub fn scale(q: &Queue, x: Span, factor: f32, count: usize) -> Result<(), CudaError> {
    let op = "scale";
    ensure!(op, count > 0 && count.is_multiple_of(8), "{count} elements; a multiple of 8");
    ensure!(op, x.count::<bf16>() >= count, "x is shorter than {count}");
    ensure!(op, x.is_aligned(16), "x is not 16-byte aligned");
    let eighths = count / 8;
    let args = [x.into(), factor.into(), (eighths as u64).into()];
    q.launch("scale_bf16", Launch::new(eighths.div_ceil(256) as u32, 256), &args)
}

/// Some columns of a matrix.
#[derive(Debug, Clone, Copy)]
pub struct Columns {
    /// `[rows, width]` bf16.
    pub matrix: Span,
    /// Number of columns of the matrix, a multiple of 8.
    pub width: usize,
    /// The first of the columns, a multiple of 8.
    pub first: usize,
}

impl Columns {
    /// The launch over `cols` of these columns, as a matrix `x` `[rows, cols]` of its own, and its arguments.
    fn launch(
        &self,
        op: &'static str,
        x: Span,
        rows: usize,
        cols: usize,
    ) -> Result<(Launch, [Arg<'static>; 3]), CudaError> {
        let Columns { matrix, width, first } = *self;
        ensure!(op, cols > 0 && rows > 0, "{rows} rows of {cols} columns");
        let fits = [cols, width, first].iter().all(|count| count.is_multiple_of(8)) && first + cols <= width;
        ensure!(op, fits, "columns {first} to {} of {width}; multiples of 8", first + cols);
        ensure!(op, x.count::<bf16>() >= rows * cols, "x is shorter than {rows} x {cols}");
        ensure!(op, matrix.count::<bf16>() >= rows * width, "y is shorter than {rows} x {width}");
        ensure!(op, x.is_aligned(16) && matrix.is_aligned(16), "an operand is not 16-byte aligned");
        let threads = (cols / 8).min(256).next_multiple_of(32) as u32;
        Ok((Launch::new(rows as u32, threads), [cols, width, first].map(|size| Arg::from(size as u32))))
    }
}

/// `x[t, c] *= y[t, first + c]`: `x` `[rows, cols]`.
pub fn multiply_columns(q: &Queue, x: Span, y: Columns, rows: usize, cols: usize) -> Result<(), CudaError> {
    let (launch, [cols, width, first]) = y.launch("multiply_columns", x, rows, cols)?;
    q.launch("multiply_columns_bf16", launch, &[x.into(), y.matrix.into(), cols, width, first])
}

/// `y[t, first + c] = x[t, c]`: `x` `[rows, cols]`.
pub fn put_columns(q: &Queue, y: Columns, x: Span, rows: usize, cols: usize) -> Result<(), CudaError> {
    let (launch, [cols, width, first]) = y.launch("put_columns", x, rows, cols)?;
    q.launch("put_columns_bf16", launch, &[y.matrix.into(), x.into(), cols, width, first])
}
