//! The activation function of an MLP without a gate. Kernel: `activation.cu`.

use half::bf16;

use super::error::ensure;
use super::gated_activation::GateActivation;
use super::{CudaError, Launch, Queue, Span};

/// `x[i] = activation(x[i])` for the first `count` elements, a multiple of 8.
pub fn activate(q: &Queue, x: Span, activation: GateActivation, count: usize) -> Result<(), CudaError> {
    let op = "activate";
    ensure!(op, count > 0 && count.is_multiple_of(8), "{count} elements; a multiple of 8");
    ensure!(op, x.count::<bf16>() >= count, "x is shorter than {count}");
    ensure!(op, x.is_aligned(16), "x is not 16-byte aligned");
    let kernel = match activation {
        GateActivation::Silu => "silu_bf16",
        GateActivation::GeluTanh => "gelu_tanh_bf16",
        GateActivation::Gelu => "gelu_bf16",
        GateActivation::Relu => "relu_bf16",
        GateActivation::ReluSquared => "relu_squared_bf16",
    };
    let eighths = count / 8;
    q.launch(kernel, Launch::new(eighths.div_ceil(256) as u32, 256), &[x.into(), (eighths as u64).into()])
}
