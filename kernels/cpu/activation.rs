//! gate:     out[t, i] = activation(x[t, i]) * x[t, I + i], where x is [gate | up]
//! activate: x[i] = activation(x[i])
//!
//! x       [T, 2 I] f32
//! out     [T, I] f32
//! test    tests/cpu_ops.rs against reference::silu, gelu_tanh, gelu

use crate::cpu::shared::SharedOut;
use crate::cpu::{Pool, exp};

/// The gate's activation function.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Gate {
    /// `x * sigmoid(x)`.
    Silu,
    /// `0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`.
    GeluTanh,
    /// `0.5 x (1 + erf(x / sqrt(2)))`.
    Gelu,
    /// `max(x, 0)`.
    Relu,
    /// `max(x, 0)^2`.
    ReluSquared,
    /// Quadratic above 0 and exponential below, with learned curvatures (Huang & Schlag 2024).
    Xielu(Xielu),
    /// `g * sigmoid(alpha * g) * (u + 1)`, where `g` is the gate up to `limit` and `u` is up within `-limit..=limit`. Only for
    /// gates.
    Clamped {
        /// `alpha`.
        alpha: f32,
        /// `limit`.
        limit: f32,
    },
}

/// `positive x^2 + slope x` above 0, else `negative (e^min(x, edge) - 1 - x) + slope x`.
#[derive(Debug, Clone, Copy, PartialEq)]
#[allow(missing_docs)] // Fields are named by the formula.
pub struct Xielu {
    pub positive: f32,
    pub negative: f32,
    pub slope: f32,
    pub edge: f32,
}

/// `out = activation(gate) * up` for each row, where `x` is `[gate | up]`.
///
/// # Panics
/// Panics if `x` is shorter than twice `out`.
pub fn gate(pool: &mut Pool, out: &mut [f32], x: &[f32], width: usize, gate: Gate) {
    assert!(x.len() >= 2 * out.len(), "gate and up are each as many as outputs");
    let rows = out.len() / width;
    let shared = SharedOut::new(out);
    const CHUNK: usize = 1 << 11;
    let per_row = width.div_ceil(CHUNK);
    pool.each(rows * per_row, (1 << 14) / CHUNK, |range| {
        for item in range {
            let (row, start) = (item / per_row, item % per_row * CHUNK);
            let len = CHUNK.min(width - start);
            let x = &x[row * 2 * width..][..2 * width];
            // SAFETY: each item is a separate part of one row.
            let out = unsafe { shared.slice(row * width + start, len) };
            let (gates, ups) = (&x[start..start + len], &x[width + start..width + start + len]);
            match gate {
                Gate::Silu => silu_times(out, gates, ups),
                Gate::GeluTanh => gelu_tanh_times(out, gates, ups),
                Gate::Gelu => gelu_times(out, gates, ups),
                Gate::Relu => relu_times(out, gates, ups),
                Gate::ReluSquared => relu_squared_times(out, gates, ups),
                Gate::Xielu(by) => {
                    out.iter_mut().zip(gates).zip(ups).for_each(|((out, x), up)| *out = xielu(*x, by) * up)
                }
                Gate::Clamped { alpha, limit } => clamped_times(out, gates, ups, alpha, limit),
            }
        }
    });
}

/// `x = activation(x)`, element by element.
pub fn activate(pool: &mut Pool, x: &mut [f32], gate: Gate) {
    const CHUNK: usize = 1 << 14;
    let len = x.len();
    let shared = SharedOut::new(x);
    pool.each(len, CHUNK, |range| {
        // SAFETY: each range has one thread.
        let x = unsafe { shared.slice(range.start, range.len()) };
        match gate {
            Gate::Silu => silu_all(x),
            Gate::GeluTanh => gelu_tanh_all(x),
            Gate::Gelu => gelu_all(x),
            Gate::Relu => relu_all(x),
            Gate::ReluSquared => relu_squared_all(x),
            Gate::Xielu(by) => x.iter_mut().for_each(|x| *x = xielu(*x, by)),
            Gate::Clamped { .. } => unreachable!("a clamped gate has an up part"),
        }
    });
}

for_each_isa! {
    fn silu_times(out: &mut [f32], gates: &[f32], ups: &[f32]) {
        for ((out, gate), up) in out.iter_mut().zip(gates).zip(ups) {
            *out = silu(*gate) * up;
        }
    }
    fn clamped_times(out: &mut [f32], gates: &[f32], ups: &[f32], alpha: f32, limit: f32) {
        for ((out, gate), up) in out.iter_mut().zip(gates).zip(ups) {
            let (gate, up) = (gate.min(limit), up.clamp(-limit, limit));
            *out = gate / (1.0 + exp(-alpha * gate)) * (up + 1.0);
        }
    }
    fn silu_all(x: &mut [f32]) {
        for x in x {
            *x = silu(*x);
        }
    }
    fn gelu_tanh_times(out: &mut [f32], gates: &[f32], ups: &[f32]) {
        for ((out, gate), up) in out.iter_mut().zip(gates).zip(ups) {
            *out = gelu_tanh(*gate) * up;
        }
    }
    fn gelu_tanh_all(x: &mut [f32]) {
        for x in x {
            *x = gelu_tanh(*x);
        }
    }
    fn gelu_times(out: &mut [f32], gates: &[f32], ups: &[f32]) {
        for ((out, gate), up) in out.iter_mut().zip(gates).zip(ups) {
            *out = gelu(*gate) * up;
        }
    }
    fn gelu_all(x: &mut [f32]) {
        for x in x {
            *x = gelu(*x);
        }
    }
    fn relu_times(out: &mut [f32], gates: &[f32], ups: &[f32]) {
        for ((out, gate), up) in out.iter_mut().zip(gates).zip(ups) {
            *out = relu(*gate) * up;
        }
    }
    fn relu_all(x: &mut [f32]) {
        for x in x {
            *x = relu(*x);
        }
    }
    fn relu_squared_times(out: &mut [f32], gates: &[f32], ups: &[f32]) {
        for ((out, gate), up) in out.iter_mut().zip(gates).zip(ups) {
            *out = relu_squared(*gate) * up;
        }
    }
    fn relu_squared_all(x: &mut [f32]) {
        for x in x {
            *x = relu_squared(*x);
        }
    }
}

/// `activation(x) * up`, for one element.
#[inline(always)]
pub(super) fn gated(gate: Gate, x: f32, up: f32) -> f32 {
    match gate {
        Gate::Clamped { alpha, limit } => {
            let x = x.min(limit);
            x / (1.0 + exp(-alpha * x)) * (up.clamp(-limit, limit) + 1.0)
        }
        other => activation(other, x) * up,
    }
}

/// The activation function of one element.
#[inline(always)]
fn activation(gate: Gate, x: f32) -> f32 {
    match gate {
        Gate::Silu => silu(x),
        Gate::GeluTanh => gelu_tanh(x),
        Gate::Gelu => gelu(x),
        Gate::Relu => relu(x),
        Gate::ReluSquared => relu_squared(x),
        Gate::Xielu(by) => xielu(x, by),
        Gate::Clamped { .. } => unreachable!("a clamped gate has an up part"),
    }
}

#[inline(always)]
fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

#[inline(always)]
fn gelu_tanh(x: f32) -> f32 {
    let inner = 0.797_884_6 * (x + 0.044_715 * x * x * x);
    // 0.5 (1 + tanh(y)) = 1 / (1 + e^-2y)
    x / (1.0 + exp(-2.0 * inner))
}

/// `0.5 x erfc(-x / sqrt(2))`; erfc by a Chebyshev fit with a relative error below 1.2e-7 (Press et al. 1992, 6.2).
#[inline(always)]
fn gelu(x: f32) -> f32 {
    const SERIES: [f32; 10] = [
        -1.265_512_2,
        1.000_023_7,
        0.374_091_96,
        0.096_784_18,
        -0.186_288_06,
        0.278_868_07,
        -1.135_204,
        1.488_515_9,
        -0.822_152_23,
        0.170_872_77,
    ];
    let size = x.abs() * std::f32::consts::FRAC_1_SQRT_2;
    let t = 1.0 / (1.0 + 0.5 * size);
    let series = SERIES.iter().rev().fold(0.0, |sum, term| sum * t + term);
    let tail = t * exp(series - size * size);
    0.5 * x * if x < 0.0 { tail } else { 2.0 - tail }
}

#[inline(always)]
fn relu(x: f32) -> f32 {
    x.max(0.0)
}

#[inline(always)]
fn relu_squared(x: f32) -> f32 {
    let positive = x.max(0.0);
    positive * positive
}

/// `e^x - 1` is computed for small `x` too, where the two terms would cancel.
#[inline(always)]
fn xielu(x: f32, by: Xielu) -> f32 {
    match x > 0.0 {
        true => by.positive * x * x + by.slope * x,
        false => (x.min(by.edge).exp_m1() - x) * by.negative + by.slope * x,
    }
}
