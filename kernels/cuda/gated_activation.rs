//! Gated activation after the gate/up projection. Kernel: `gated_activation.cu`.

use half::bf16;

use super::error::ensure;
use super::{CudaError, Launch, Queue, Span};

/// Size of the alternating groups of gate and up rows in a packed gate/up weight.
pub const GATE_GROUP: usize = 8;

/// The gate's activation function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GateActivation {
    /// `x * sigmoid(x)`.
    Silu,
    /// Gaussian error linear unit, tanh approximation.
    GeluTanh,
    /// Gaussian error linear unit.
    Gelu,
    /// `max(x, 0)`.
    Relu,
    /// `max(x, 0)^2`.
    ReluSquared,
}

impl GateActivation {
    /// Whether products for few rows can apply it.
    pub fn is_fused(self) -> bool {
        matches!(self, Self::Silu | Self::GeluTanh)
    }
}

/// `y[t, f] = activation(gate[t, f]) * up[t, f]`.
///
/// `x` `[rows, 2 * cols]` has alternating groups of `group` columns of gate and `group` of up; `group = cols` means
/// `[gate | up]`. `y` `[rows, cols]`.
pub fn gated_activation(
    q: &Queue,
    y: Span,
    x: Span,
    activation: GateActivation,
    rows: usize,
    cols: usize,
    group: usize,
) -> Result<(), CudaError> {
    let op = "gated_activation";
    ensure!(op, cols > 0 && cols.is_multiple_of(8), "cols {cols} is not a multiple of 8");
    ensure!(op, group > 0 && group.is_multiple_of(8) && cols.is_multiple_of(group), "group {group} of {cols} columns");
    ensure!(op, rows > 0, "no rows");
    ensure!(op, y.count::<bf16>() >= rows * cols, "y is shorter than {rows} x {cols}");
    ensure!(op, x.count::<bf16>() >= 2 * rows * cols, "x is shorter than {rows} x {}", 2 * cols);
    ensure!(op, y.is_aligned(16) && x.is_aligned(16), "a buffer is not 16-byte aligned");
    let kernel = match activation {
        GateActivation::Silu => "silu_gated_bf16",
        GateActivation::GeluTanh => "gelu_tanh_gated_bf16",
        GateActivation::Gelu => "gelu_gated_bf16",
        GateActivation::Relu => "relu_gated_bf16",
        GateActivation::ReluSquared => "relu_squared_gated_bf16",
    };
    let launch = Launch::new(0, 256).grid(rows as u32, (cols / 8).div_ceil(256) as u32, 1);
    q.launch(kernel, launch, &[y.into(), x.into(), (cols as u32).into(), (group as u32).into()])
}
