//! Layer norm, and residual add with layer norm. Kernel: `layer_norm.cu`.

use half::bf16;

use super::error::ensure;
use super::{CudaError, Launch, Queue, Span};

/// Weight and bias of a layer norm, each `[cols]` bf16.
#[derive(Debug, Clone, Copy)]
pub struct LayerNormWeight {
    /// Multiplied with the normalized values.
    pub weight: Span,
    /// Added after the multiplication.
    pub bias: Span,
}

/// `y[t, :] = (x[t, :] - mean) * rsqrt(variance + eps) * weight + bias`; `y` may be `x`.
///
/// `x`, `y` `[rows, cols]` bf16.
pub fn layer_norm(
    q: &Queue,
    y: Span,
    x: Span,
    norm: LayerNormWeight,
    rows: usize,
    cols: usize,
    eps: f32,
) -> Result<(), CudaError> {
    let launch = geometry(&[y, x], norm, rows, cols)?;
    let args = [y.into(), x.into(), norm.weight.into(), norm.bias.into(), (cols as u32).into(), eps.into()];
    q.launch("layer_norm_bf16", launch, &args)
}

/// `residual += partial`, then `y = layer_norm(residual)`. The norm uses the sum before it is rounded.
///
/// `y`, `residual`, `partial` `[rows, cols]` bf16; `y` may be `partial`, but not `residual`.
#[allow(clippy::too_many_arguments)] // One op with its operands and its shape.
pub fn add_layer_norm(
    q: &Queue,
    y: Span,
    residual: Span,
    partial: Span,
    norm: LayerNormWeight,
    rows: usize,
    cols: usize,
    eps: f32,
) -> Result<(), CudaError> {
    let launch = geometry(&[y, residual, partial], norm, rows, cols)?;
    ensure!("add_layer_norm", y.address() != residual.address(), "y and residual are one buffer");
    let LayerNormWeight { weight, bias } = norm;
    let args =
        [y.into(), residual.into(), partial.into(), weight.into(), bias.into(), (cols as u32).into(), eps.into()];
    q.launch("add_layer_norm_bf16", launch, &args)
}

fn geometry(buffers: &[Span], norm: LayerNormWeight, rows: usize, cols: usize) -> Result<Launch, CudaError> {
    let op = "layer_norm";
    ensure!(op, cols.is_multiple_of(8) && (8..=32_768).contains(&cols), "cols {cols}; a multiple of 8 up to 32768");
    ensure!(op, rows > 0, "no rows");
    for span in buffers {
        let found = span.count::<bf16>();
        ensure!(op, found >= rows * cols, "{found} elements in a buffer of {rows} x {cols}");
        ensure!(op, span.is_aligned(16), "a buffer is not 16-byte aligned");
    }
    for (name, span) in [("weight", norm.weight), ("bias", norm.bias)] {
        ensure!(op, span.count::<bf16>() >= cols && span.is_aligned(16), "{name} is shorter than {cols} or unaligned");
    }
    let threads = (cols / 8).div_ceil(32).min(32) * 32;
    Ok(Launch::new(rows as u32, threads as u32))
}
