//! short_conv: one layer of LFM2 with a short convolution, behind its projections, for rows of tokens in order
//!
//! conv      of x * B, in `recurrent.rs`: the channels are v, and there are no q, k and matrices
//! out       C * conv
//!
//! inputs    [T, 2 V DV] f32: x, B
//! gates     [T, V DV] f32: C
//! out       [T, V DV] f32
//! states    [slots, STATE] f32: inputs of the convolution
//! maths     f32, in the order of tokens (`recurrent.rs`)
//! bound     decode: reads and writes the state, 8 (taps - 1) V DV bytes
//! test      tests/cpu_short_conv.rs against reference::short_conv

use crate::cpu::recurrent::{ConvWeights, each_token, num_tokens};
use crate::cpu::shared::SharedOut;
use crate::cpu::{Pool, StateRow, StateShape};

/// Computes the layer for the tokens of `rows` and advances their states. `conv` is `[taps, C]`, `conv_bias` `[C]` or empty; `shape`
/// has as many key heads as value heads, of size 0.
///
/// # Panics
/// Panics if a buffer is too short, or if two rows have the same state, or one that is saved.
pub fn short_conv(
    pool: &mut Pool,
    shape: &StateShape,
    [conv, conv_bias]: [&[f32]; 2],
    rows: &[StateRow],
    [inputs, gates]: [&[f32]; 2],
    (out, states): (&mut [f32], &mut [f32]),
) {
    let width = shape.channels();
    assert!(gates.len() >= num_tokens(rows) * width, "gates for each token");
    let out = SharedOut::new(out);
    let conv = ConvWeights { taps: conv, bias: conv_bias, has_gated_inputs: true };
    each_token(pool, shape, conv, rows, (inputs, 2 * width), states, |of| {
        let first = of.token * width + of.key_head * of.values.len();
        // SAFETY: each token and head has one thread.
        let out = unsafe { out.slice(first, of.values.len()) };
        out.iter_mut().zip(&*of.values).zip(&gates[first..]).for_each(|((out, x), gate)| *out = x * gate);
    });
}
