//! RMSNorm, and residual add with RMSNorm. Kernels: `rms_norm.cu`, `add_rms_norm_fp8.cu`.

use half::bf16;

use super::error::ensure;
use super::quantize_rows::Fp8Rows;
use super::{CudaError, Launch, Queue, Span};

/// `y[t, :] = x[t, :] * rsqrt(mean(x[t, :]^2) + eps) * weight`; `y` may be `x`.
///
/// `x`, `y` `[rows, cols]`, `weight` `[cols]`, bf16.
pub fn rms_norm(
    q: &Queue,
    y: Span,
    x: Span,
    weight: Span,
    rows: usize,
    cols: usize,
    eps: f32,
) -> Result<(), CudaError> {
    let launch = geometry(&[y, x], weight, rows, cols)?;
    q.launch("rms_norm_bf16", launch, &[y.into(), x.into(), weight.into(), (cols as u32).into(), eps.into()])
}

/// `residual += partial`, then `y = rms_norm(residual)`. The norm uses the sum before it is rounded.
///
/// `y`, `residual`, `partial` `[rows, cols]`, `weight` `[cols]`, bf16; `y` may be `partial`, but not `residual`.
#[allow(clippy::too_many_arguments)] // One op with its operands and its shape.
pub fn add_rms_norm(
    q: &Queue,
    y: Span,
    residual: Span,
    partial: Span,
    weight: Span,
    rows: usize,
    cols: usize,
    eps: f32,
) -> Result<(), CudaError> {
    let launch = geometry(&[y, residual, partial], weight, rows, cols)?;
    ensure!("add_rms_norm", y.address() != residual.address(), "y and residual are one buffer");
    let args = [y.into(), residual.into(), partial.into(), weight.into(), (cols as u32).into(), eps.into()];
    q.launch("add_rms_norm_bf16", launch, &args)
}

/// [`add_rms_norm`] that also stores `y` in e4m3, with the bits of [`super::quantize_rows::quantize_rows`]. `cols` is a multiple
/// of 128. Only on Hopper.
#[expect(clippy::too_many_arguments, reason = "one op with its operands and its shape")]
pub fn add_rms_norm_fp8(
    q: &Queue,
    y: Span,
    residual: Span,
    partial: Span,
    weight: Span,
    codes: Fp8Rows,
    rows: usize,
    cols: usize,
    eps: f32,
) -> Result<(), CudaError> {
    let launch = geometry(&[y, residual, partial], weight, rows, cols)?;
    ensure!("add_rms_norm_fp8", y.address() != residual.address(), "y and residual are one buffer");
    ensure!("add_rms_norm_fp8", cols.is_multiple_of(128), "{cols} columns are not a multiple of 128");
    codes.check(rows, cols)?;
    let args = [
        y.into(),
        residual.into(),
        partial.into(),
        weight.into(),
        (cols as u32).into(),
        eps.into(),
        codes.codes.into(),
        codes.scales.into(),
        (Fp8Rows::pitch(rows) as u32).into(),
    ];
    q.launch("add_rms_norm_fp8", launch, &args)
}

/// The launch of a norm of `rows` rows of each buffer; checks their sizes.
pub(super) fn geometry(buffers: &[Span], weight: Span, rows: usize, cols: usize) -> Result<Launch, CudaError> {
    ensure!(
        "rms_norm",
        cols.is_multiple_of(8) && (8..=32_768).contains(&cols),
        "cols {cols}; a multiple of 8 up to 32768"
    );
    ensure!("rms_norm", rows > 0, "no rows");
    for span in buffers {
        let found = span.count::<bf16>();
        ensure!("rms_norm", found >= rows * cols, "{found} elements in a buffer of {rows} x {cols}");
        ensure!("rms_norm", span.is_aligned(16), "a buffer is not 16-byte aligned");
    }
    ensure!(
        "rms_norm",
        weight.count::<bf16>() >= cols && weight.is_aligned(16),
        "weight is shorter than {cols} or unaligned"
    );
    let threads = (cols / 8).div_ceil(32).min(32) * 32;
    Ok(Launch::new(rows as u32, threads as u32))
}
