//! gated_delta: one layer of Gated DeltaNet (Yang et al. 2024) behind its projections, for rows of tokens in order
//!
//! conv      of the channels q | k | v, in `recurrent.rs`
//! heads     q, k = x / sqrt(sum x^2 + 1e-6), q = q / sqrt(DK); value heads share the q and k of a key head
//! gates     beta = rate sigmoid(b), g = exp(decay * softplus(a + dt_bias)), where decay = -exp(A_log)
//! state     S = g S;  S = S + k ⊗ beta (v - S^T k);  o = S^T q                            S [DK, DV]
//! out       o * rsqrt(mean(o^2) + eps) * norm * silu(z)
//!
//! qkvz      [T, C + V DV] f32: q of all key heads, k, v of all value heads, z;  C = 2 K DK + V DV
//! ba        [T, 2 V] f32: b, a
//! out       [T, V DV] f32
//! states    [slots, STATE] f32: inputs of the convolution, then S of each value head
//! maths     f32, in the order of tokens (`recurrent.rs`)
//! bound     decode: reads and writes S, 8 DK DV bytes for each value head
//! test      tests/cpu_gated_delta.rs against reference::gated_delta

use crate::cpu::recurrent::{ConvWeights, HeadToken, each_token, num_tokens, sigmoid, softplus, squares};
use crate::cpu::shared::SharedOut;
use crate::cpu::{Pool, StateRow, StateShape, exp};

/// Added to the sum of squares of q and k.
const HEAD_EPS: f32 = 1e-6;

/// Weights of a layer besides its projections.
#[derive(Debug, Clone, Copy)]
pub struct DeltaWeights<'a> {
    /// `[taps, C]`.
    pub conv: &'a [f32],
    /// `[V]`: `-exp(A_log)`.
    pub decay: &'a [f32],
    /// `[V]`.
    pub dt_bias: &'a [f32],
    /// `[DV]`.
    pub norm: &'a [f32],
    /// Largest learning rate.
    pub max_rate: f32,
    /// Added to the mean square of the output.
    pub eps: f32,
}

/// Computes the layer for the tokens of `rows` and advances their states.
///
/// # Panics
/// Panics if a buffer is too short, or if two rows have the same state, or one that is saved.
pub fn gated_delta(
    pool: &mut Pool,
    shape: &StateShape,
    weights: &DeltaWeights<'_>,
    rows: &[StateRow],
    [qkvz, ba]: [&[f32]; 2],
    (out, states): (&mut [f32], &mut [f32]),
) {
    let (channels, num_heads, value_dim) = (shape.channels(), shape.num_value_heads, shape.value_dim);
    assert!(ba.len() >= num_tokens(rows) * 2 * num_heads, "inputs for each token");
    let out = SharedOut::new(out);
    let conv = ConvWeights { taps: weights.conv, bias: &[], has_gated_inputs: false };
    let inputs = (qkvz, channels + num_heads * value_dim);
    each_token(pool, shape, conv, rows, inputs, states, |of| {
        let HeadToken { token, key_head, inputs, query, key, values, heads, scratch, .. } = of;
        normalize(query, (shape.key_dim as f32).powf(-0.5));
        normalize(key, 1.0);
        let parts = heads.chunks_exact_mut(shape.key_dim * value_dim).zip(values.chunks_exact(value_dim));
        for (index, (state, value)) in parts.enumerate() {
            let head = key_head * shape.group() + index;
            let [b, a] = [0, num_heads].map(|first| ba[token * 2 * num_heads + first + head]);
            let decay = exp(weights.decay[head] * softplus(a + weights.dt_bias[head]));
            let beta = weights.max_rate * sigmoid(b);
            // SAFETY: each token and head has one thread.
            let out = unsafe { out.slice((token * num_heads + head) * value_dim, value_dim) };
            advance_state(state, [key, query, value], &[decay], beta, scratch, out);
            gated_norm(out, &inputs[channels + head * value_dim..][..value_dim], weights.norm, weights.eps);
        }
    });
}

for_each_isa! {
    /// Decays a state, adds what it lacks of `value` for `key`, and reads it by `query`. There is one decay, or one for each row.
    pub(super) fn advance_state(
        state: &mut [f32],
        inputs: [&[f32]; 3],
        decays: &[f32],
        beta: f32,
        memory: &mut [f32],
        out: &mut [f32],
    ) {
        let [key, query, value] = inputs;
        memory.fill(0.0);
        for ((row, key), decay) in state.chunks_exact_mut(value.len()).zip(key).zip(decays.iter().cycle()) {
            for (element, memory) in row.iter_mut().zip(&mut *memory) {
                *element *= decay;
                *memory += *element * key;
            }
        }
        for (memory, value) in memory.iter_mut().zip(value) {
            *memory = (value - *memory) * beta;
        }
        out.fill(0.0);
        for ((row, key), query) in state.chunks_exact_mut(value.len()).zip(key).zip(query) {
            for ((element, added), out) in row.iter_mut().zip(&*memory).zip(&mut *out) {
                *element += key * added;
                *out += *element * query;
            }
        }
    }

    /// `x = x * rsqrt(mean(x^2) + eps) * weight * silu(gate)`.
    fn gated_norm(x: &mut [f32], gate: &[f32], weight: &[f32], eps: f32) {
        let scale = 1.0 / (squares(x) / x.len() as f32 + eps).sqrt();
        for ((x, weight), gate) in x.iter_mut().zip(weight).zip(gate) {
            *x = *x * scale * weight * (gate * sigmoid(*gate));
        }
    }
}

/// `x = x * rsqrt(sum x^2 + 1e-6) * factor`.
pub(super) fn normalize(x: &mut [f32], factor: f32) {
    let scale = 1.0 / (squares(x) + HEAD_EPS).sqrt();
    x.iter_mut().for_each(|x| *x = *x * scale * factor);
}
