//! mamba2: one layer of Mamba-2 (Dao and Gu 2024) behind its projections, for rows of tokens in order
//!
//! conv      of the channels C | B | x, which are q | k | v in `recurrent.rs`; B and C of a key head belong to a group of value heads
//! gates     d = softplus(dt + dt_bias), g = exp(decay * d), where decay = -exp(A_log)
//! state     S = g S + B ⊗ d x;  o = S^T C + skip x                                       S [DK, DV]
//! out       y = o * silu(z);  y * rsqrt(mean(y^2) + eps) * norm, where the mean is over neighbouring value heads; without a norm y
//!
//! inputs    [T, C + V DV] f32: C of all key heads, B, x of all value heads, z
//! dt        [T, V] f32
//! out       [T, V DV] f32
//! states    [slots, STATE] f32: inputs of the convolution, then S of each value head
//! maths     f32, in the order of tokens (`recurrent.rs`)
//! threads   divide (row, key head), then (row, value heads with a common norm)
//! bound     decode: reads and writes S, 8 DK DV bytes for each value head
//! test      tests/cpu_mamba2.rs against reference::mamba2

use crate::cpu::recurrent::{ConvWeights, HeadToken, each_token, num_tokens, sigmoid, softplus, squares};
use crate::cpu::shared::SharedOut;
use crate::cpu::{Pool, StateRow, StateShape, exp};

/// Weights of a layer besides its projections.
#[derive(Debug, Clone, Copy)]
pub struct Mamba2Weights<'a> {
    /// `[taps, C]`.
    pub conv: &'a [f32],
    /// `[C]`, or empty.
    pub conv_bias: &'a [f32],
    /// `[V]`: `-exp(A_log)`.
    pub decay: &'a [f32],
    /// `[V]`.
    pub dt_bias: &'a [f32],
    /// `[V]`: what of x is added to the output.
    pub skip: &'a [f32],
    /// `[V DV]`, or empty.
    pub norm: &'a [f32],
    /// Neighbouring value heads that have one norm together, or are computed together; a divisor of `V`.
    pub norm_heads: usize,
    /// Added to the mean square of the output.
    pub eps: f32,
}

/// Computes the layer for the tokens of `rows` and advances their states.
///
/// # Panics
/// Panics if a buffer is too short, or if two rows have the same state, or one that is saved.
pub fn mamba2(
    pool: &mut Pool,
    shape: &StateShape,
    weights: &Mamba2Weights<'_>,
    rows: &[StateRow],
    [inputs, dt]: [&[f32]; 2],
    (out, states): (&mut [f32], &mut [f32]),
) {
    let (channels, num_heads, value_dim) = (shape.channels(), shape.num_value_heads, shape.value_dim);
    assert!(dt.len() >= num_tokens(rows) * num_heads, "inputs for each token");
    let (width, stride) = (num_heads * value_dim, channels + num_heads * value_dim);
    let out = SharedOut::new(out);
    let conv = ConvWeights { taps: weights.conv, bias: weights.conv_bias, has_gated_inputs: false };
    each_token(pool, shape, conv, rows, (inputs, stride), states, |of| {
        let HeadToken { token, key_head, query, key, values, heads, scratch, .. } = of;
        let parts = heads.chunks_exact_mut(shape.key_dim * value_dim).zip(values.chunks_exact(value_dim));
        for (index, (state, x)) in parts.enumerate() {
            let head = key_head * shape.group() + index;
            let step = softplus(dt[token * num_heads + head] + weights.dt_bias[head]);
            let factors = [exp(weights.decay[head] * step), step, weights.skip[head]];
            // SAFETY: each token and head has one thread.
            let out = unsafe { out.slice(token * width + head * value_dim, value_dim) };
            advance_state(state, key, query, x, factors, scratch, out);
        }
    });
    let (group, count) = (weights.norm_heads * value_dim, num_heads / weights.norm_heads);
    pool.each(rows.len() * count, 1, |items| {
        for item in items {
            let (row, first) = (&rows[item / count], item % count * group);
            for token in row.first_token..row.first_token + row.num_tokens {
                // SAFETY: each token and group has one thread.
                let out = unsafe { out.slice(token * width + first, group) };
                let gate = &inputs[token * stride + channels + first..][..group];
                gated(out, gate);
                if !weights.norm.is_empty() {
                    norm(out, &weights.norm[first..first + group], weights.eps);
                }
            }
        }
    });
}

for_each_isa! {
    /// Decays a state, adds `step * x` for `key`, and reads it by `query`.
    fn advance_state(
        state: &mut [f32],
        key: &[f32],
        query: &[f32],
        x: &[f32],
        factors: [f32; 3],
        added: &mut [f32],
        out: &mut [f32],
    ) {
        let [decay, step, skip] = factors;
        for ((added, out), x) in added.iter_mut().zip(&mut *out).zip(x) {
            (*added, *out) = (step * x, 0.0);
        }
        for ((row, key), query) in state.chunks_exact_mut(x.len()).zip(key).zip(query) {
            for ((element, added), out) in row.iter_mut().zip(&*added).zip(&mut *out) {
                *element = *element * decay + key * added;
                *out += *element * query;
            }
        }
        out.iter_mut().zip(x).for_each(|(out, x)| *out += skip * x);
    }

    /// `x *= silu(gate)`.
    fn gated(x: &mut [f32], gate: &[f32]) {
        x.iter_mut().zip(gate).for_each(|(x, gate)| *x *= gate * sigmoid(*gate));
    }

    /// `x *= rsqrt(mean(x^2) + eps) * weight`.
    fn norm(x: &mut [f32], weight: &[f32], eps: f32) {
        let scale = 1.0 / (squares(x) / x.len() as f32 + eps).sqrt();
        x.iter_mut().zip(weight).for_each(|(x, weight)| *x = *x * scale * weight);
    }
}
