//! The activation function of an MLP without a gate. Kernels: `activation.cu`.

use half::bf16;

use super::error::ensure;
use super::gated_activation::GateActivation;
use super::{Arg, CudaError, Launch, Queue, Span};

/// `x[i] = activation(x[i])` for the first `count` elements, a multiple of 8.
pub fn activate(q: &Queue, x: Span, activation: GateActivation, count: usize) -> Result<(), CudaError> {
    let (launch, eighths) = geometry(x, count)?;
    let kernel = match activation {
        GateActivation::Silu => "silu_bf16",
        GateActivation::GeluTanh => "gelu_tanh_bf16",
        GateActivation::Gelu => "gelu_bf16",
        GateActivation::Relu => "relu_bf16",
        GateActivation::ReluSquared => "relu_squared_bf16",
    };
    q.launch(kernel, launch, &[x.into(), eighths.into()])
}

/// An activation with four numbers: `positive x^2 + slope x` above 0, else `negative (e^min(x, edge) - 1 - x) + slope x`.
#[derive(Debug, Clone, Copy, PartialEq)]
#[allow(missing_docs)] // Fields are named by the formula.
pub struct Xielu {
    pub positive: f32,
    pub negative: f32,
    pub slope: f32,
    pub edge: f32,
}

/// `x[i] = activation(x[i])` for the first `count` elements, a multiple of 8.
pub fn activate_xielu(q: &Queue, x: Span, activation: Xielu, count: usize) -> Result<(), CudaError> {
    let (launch, eighths) = geometry(x, count)?;
    let Xielu { positive, negative, slope, edge } = activation;
    let numbers = [positive, negative, slope, edge];
    q.launch("xielu_bf16", launch, &[x.into(), eighths.into(), Arg::Bytes(bytemuck::bytes_of(&numbers))])
}

/// The launch for `count` elements, and the number of groups of eight; checks the buffer.
fn geometry(x: Span, count: usize) -> Result<(Launch, u64), CudaError> {
    let op = "activate";
    ensure!(op, count > 0 && count.is_multiple_of(8), "{count} elements; a multiple of 8");
    ensure!(op, x.count::<bf16>() >= count, "x is shorter than {count}");
    ensure!(op, x.is_aligned(16), "x is not 16-byte aligned");
    let eighths = count / 8;
    Ok((Launch::new(eighths.div_ceil(256) as u32, 256), eighths as u64))
}
