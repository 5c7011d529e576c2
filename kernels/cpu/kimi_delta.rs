//! kimi_delta: one layer of Kimi Delta Attention (Kimi Linear, 2025) behind its projections, for rows of tokens in order
//!
//! conv      of the channels q | k | v, in `recurrent.rs`
//! heads     q, k = x / sqrt(sum x^2 + 1e-6), q = q / sqrt(DK)
//! gates     beta = sigmoid(b), g = exp(decay * softplus(f + dt_bias)) for each channel of k, where decay = -exp(A_log)
//! state     S = diag(g) S;  S = S + k ⊗ beta (v - S^T k);  o = S^T q                            S [DK, DV]
//! out       o * rsqrt(mean(o^2) + eps) * norm * sigmoid(z)
//!
//! qkvb      [T, C + H] f32: q of all heads, k, v, b;  C = 2 H DK + H DV
//! f         [T, H DK] f32
//! z         [T, H DV] f32
//! out       [T, H DV] f32
//! states    [slots, STATE] f32: inputs of the convolution, then S of each head
//! maths     f32, in the order of tokens (`recurrent.rs`)
//! bound     decode: reads and writes S, 8 DK DV bytes for each head
//! test      tests/cpu_kimi_delta.rs against reference::kimi_delta

use crate::cpu::gated_delta::{advance_state, normalize};
use crate::cpu::recurrent::{ConvWeights, HeadToken, each_token, num_tokens, sigmoid, softplus, squares};
use crate::cpu::shared::SharedOut;
use crate::cpu::{Pool, StateRow, StateShape, exp};

/// Weights of a layer besides its projections.
#[derive(Debug, Clone, Copy)]
pub struct KimiDeltaWeights<'a> {
    /// `[taps, C]`.
    pub conv: &'a [f32],
    /// `[H]`: `-exp(A_log)`.
    pub decay: &'a [f32],
    /// `[H DK]`.
    pub dt_bias: &'a [f32],
    /// `[DV]`.
    pub norm: &'a [f32],
    /// Added to the mean square of the output.
    pub eps: f32,
}

/// Computes the layer for the tokens of `rows` and advances their states. `inputs` are `qkvb`, `f` and `z`.
///
/// # Panics
/// Panics if a buffer is too short, if heads share q and k, or if two rows have the same state, or one that is saved.
pub fn kimi_delta(
    pool: &mut Pool,
    shape: &StateShape,
    weights: &KimiDeltaWeights<'_>,
    rows: &[StateRow],
    [qkvb, steps, gates]: [&[f32]; 3],
    (out, states): (&mut [f32], &mut [f32]),
) {
    let (channels, num_heads, key_dim, value_dim) =
        (shape.channels(), shape.num_value_heads, shape.key_dim, shape.value_dim);
    assert_eq!(shape.num_key_heads, num_heads, "each head has its own q and k");
    let widths = [num_heads * key_dim, num_heads * value_dim];
    let has_all = |inputs: &[f32], width: usize| inputs.len() >= num_tokens(rows) * width;
    assert!(has_all(steps, widths[0]) && has_all(gates, widths[1]), "inputs for each token");
    let out = SharedOut::new(out);
    let conv = ConvWeights { taps: weights.conv, bias: &[], has_gated_inputs: false };
    each_token(pool, shape, conv, rows, (qkvb, channels + num_heads), states, |of| {
        let HeadToken { token, key_head: head, inputs, query, key, values, heads, scratch, key_scratch: decays } = of;
        normalize(query, (key_dim as f32).powf(-0.5));
        normalize(key, 1.0);
        let steps = &steps[token * widths[0] + head * key_dim..][..key_dim];
        let biases = &weights.dt_bias[head * key_dim..][..key_dim];
        for ((decay, step), bias) in decays.iter_mut().zip(steps).zip(biases) {
            *decay = exp(weights.decay[head] * softplus(step + bias));
        }
        // SAFETY: each token and head has one thread.
        let out = unsafe { out.slice(token * widths[1] + head * value_dim, value_dim) };
        advance_state(heads, [key, query, values], decays, sigmoid(inputs[channels + head]), scratch, out);
        gated_norm(out, &gates[token * widths[1] + head * value_dim..][..value_dim], weights.norm, weights.eps);
    });
}

for_each_isa! {
    /// `x = x * rsqrt(mean(x^2) + eps) * weight * sigmoid(gate)`.
    fn gated_norm(x: &mut [f32], gate: &[f32], weight: &[f32], eps: f32) {
        let scale = 1.0 / (squares(x) / x.len() as f32 + eps).sqrt();
        for ((x, weight), gate) in x.iter_mut().zip(weight).zip(gate) {
            *x = *x * scale * weight * sigmoid(*gate);
        }
    }
}
