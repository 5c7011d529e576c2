//! gated_delta: one layer of Gated DeltaNet (Yang et al. 2024) behind its projections, for rows of tokens in order
//!
//! conv      x[t, c] = silu(sum over j of w[j, c] * in[t - taps + 1 + j, c]) for the channels q | k | v
//! heads     q, k = x / sqrt(sum x^2 + 1e-6), q = q / sqrt(DK); value heads share the q and k of a key head
//! gates     beta = sigmoid(b), g = exp(decay * softplus(a + dt_bias)), where decay = -exp(A_log)
//! state     S = g S;  S = S + k ⊗ beta (v - S^T k);  o = S^T q                            S [DK, DV]
//! out       o * rsqrt(mean(o^2) + eps) * norm * silu(z)
//!
//! qkvz      [T, C + V DV] f32: q of all key heads, k, v of all value heads, z;  C = 2 K DK + V DV
//! ba        [T, 2 V] f32: b, a
//! out       [T, V DV] f32
//! states    [slots, STATE] f32: the last taps - 1 inputs `[taps - 1, C]`, oldest first, then S of each value head
//! maths     f32; token by token in one order, so the result does not depend on how a row is divided into steps
//! threads   divide (row, key head)
//! bound     decode: reads and writes S, 8 DK DV bytes for each value head
//! test      tests/cpu_gated_delta.rs against reference::gated_delta

use crate::cpu::shared::SharedOut;
use crate::cpu::{Pool, exp};

/// Added to the sum of squares of q and k.
const HEAD_EPS: f32 = 1e-6;

const LANES: usize = 8;

/// Sizes of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaShape {
    /// `K`, number of key heads.
    pub num_key_heads: usize,
    /// `V`, number of value heads; a multiple of `K`.
    pub num_value_heads: usize,
    /// `DK`, size of a key head.
    pub key_dim: usize,
    /// `DV`, size of a value head.
    pub value_dim: usize,
    /// Number of inputs of the convolution, at least 1.
    pub num_taps: usize,
}

impl DeltaShape {
    /// `C`, channels of the convolution.
    pub fn channels(&self) -> usize {
        2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim
    }

    /// `STATE`, elements of the state of a row.
    pub fn state_len(&self) -> usize {
        self.history_len() + self.num_value_heads * self.key_dim * self.value_dim
    }

    fn history_len(&self) -> usize {
        (self.num_taps - 1) * self.channels()
    }

    /// Value heads of a key head.
    fn group(&self) -> usize {
        self.num_value_heads / self.num_key_heads
    }

    /// The channels of a key head and its value heads: first and number, of q, of k and of v.
    fn parts(&self, key_head: usize) -> [(usize, usize); 3] {
        let (dim, values) = (self.key_dim, self.group() * self.value_dim);
        let first_value = 2 * self.num_key_heads * dim;
        [(key_head * dim, dim), ((self.num_key_heads + key_head) * dim, dim), (first_value + key_head * values, values)]
    }
}

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
    /// Added to the mean square of the output.
    pub eps: f32,
}

/// The tokens of one row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaRow {
    /// Index of the first token in `T`.
    pub first_token: usize,
    /// Number of tokens.
    pub num_tokens: usize,
    /// The slot of its state.
    pub state: usize,
    /// Whether the row begins here: its state is zero, whatever the slot holds.
    pub is_first: bool,
    /// If set, the state behind this number of tokens is saved in this slot.
    pub saved: Option<[u32; 2]>,
}

/// Computes the layer for the tokens of `rows` and advances their states.
///
/// # Panics
/// Panics if a buffer is too short, or if two rows have the same state, or one that is saved.
pub fn gated_delta(
    pool: &mut Pool,
    shape: &DeltaShape,
    weights: &DeltaWeights<'_>,
    rows: &[DeltaRow],
    [qkvz, ba]: [&[f32]; 2],
    (out, states): (&mut [f32], &mut [f32]),
) {
    let saved = rows.iter().filter_map(|row| row.saved.map(|[_, slot]| slot as usize));
    let mut slots: Vec<usize> = rows.iter().map(|row| row.state).chain(saved).collect();
    let num_tokens = rows.iter().map(|row| row.first_token + row.num_tokens).max().unwrap_or(0);
    let widths = [shape.channels() + shape.num_value_heads * shape.value_dim, 2 * shape.num_value_heads];
    assert!(qkvz.len() >= num_tokens * widths[0] && ba.len() >= num_tokens * widths[1], "inputs for each token");
    slots.sort_unstable();
    assert!(slots.windows(2).all(|pair| pair[0] < pair[1]), "each row has a state of its own");
    assert_eq!(weights.conv.len(), shape.num_taps * shape.channels(), "a weight for each tap and channel");
    let (out, states) = (SharedOut::new(out), SharedOut::new(states));
    pool.each(rows.len() * shape.num_key_heads, 1, |items| {
        for item in items {
            let (row, key_head) = (&rows[item / shape.num_key_heads], item % shape.num_key_heads);
            run_head(shape, weights, row, key_head, [qkvz, ba], (&out, &states));
        }
    });
}

/// One key head of one row, with its value heads.
fn run_head(
    shape: &DeltaShape,
    weights: &DeltaWeights<'_>,
    row: &DeltaRow,
    key_head: usize,
    [qkvz, ba]: [&[f32]; 2],
    (out, states): (&SharedOut<f32>, &SharedOut<f32>),
) {
    let (channels, group, key_dim, value_dim) = (shape.channels(), shape.group(), shape.key_dim, shape.value_dim);
    let (parts, first_head, start) = (shape.parts(key_head), key_head * group, row.state * shape.state_len());
    let mut conv = Convolution::new(shape, weights, parts);
    let head_len = key_dim * value_dim;
    // SAFETY: each row has a slot of its own, and each of its key heads has one thread and other channels and heads.
    let heads = unsafe { states.slice(start + shape.history_len() + first_head * head_len, group * head_len) };
    let history_of = |start: usize, tap: usize, (first, len): (usize, usize)| {
        // SAFETY: as above.
        unsafe { states.slice(start + tap * channels + first, len) }
    };
    let history = |tap: usize, part: (usize, usize)| history_of(start, tap, part);
    match row.is_first {
        true => heads.fill(0.0),
        false => conv.each_input(|tap, part, inputs| inputs.copy_from_slice(history(tap, part))),
    }
    let mut memory = vec![0.0; value_dim];
    let stride = channels + shape.num_value_heads * value_dim;
    for token in row.first_token..row.first_token + row.num_tokens {
        let inputs = &qkvz[token * stride..][..stride];
        let mixed = conv.advance(inputs);
        let (qk, values) = mixed.split_at_mut(2 * key_dim);
        let (query, key) = qk.split_at_mut(key_dim);
        normalize(query, (key_dim as f32).powf(-0.5));
        normalize(key, 1.0);
        for index in 0..group {
            let head = first_head + index;
            let [b, a] = [0, shape.num_value_heads].map(|first| ba[token * 2 * shape.num_value_heads + first + head]);
            let gates = [exp(weights.decay[head] * softplus(a + weights.dt_bias[head])), sigmoid(b)];
            let state = &mut heads[index * head_len..][..head_len];
            let value = &values[index * value_dim..][..value_dim];
            let place = (token * shape.num_value_heads + head) * value_dim;
            // SAFETY: each token and head has one thread.
            let out = unsafe { out.slice(place, value_dim) };
            advance_state(state, key, query, value, gates, &mut memory, out);
            gated_norm(out, &inputs[channels + head * value_dim..][..value_dim], weights.norm, weights.eps);
        }
        if let Some([_, slot]) = row.saved.filter(|[count, _]| row.first_token + *count as usize == token + 1) {
            let start = slot as usize * shape.state_len();
            let first = start + shape.history_len() + first_head * head_len;
            // SAFETY: as above, and the slot is no row's.
            unsafe { states.slice(first, group * head_len) }.copy_from_slice(heads);
            conv.each_input(|tap, part, inputs| history_of(start, tap, part).copy_from_slice(inputs));
        }
    }
    conv.each_input(|tap, part, inputs| history(tap, part).copy_from_slice(inputs));
}

/// The convolution of the channels of one key head.
struct Convolution {
    parts: [(usize, usize); 3],
    width: usize,
    weights: Vec<f32>, // [taps, width]
    inputs: Vec<f32>,  // [taps, width], oldest first; the last is the current token's
    mixed: Vec<f32>,   // [width]
}

impl Convolution {
    fn new(shape: &DeltaShape, weights: &DeltaWeights<'_>, parts: [(usize, usize); 3]) -> Self {
        let width = parts.iter().map(|(_, len)| len).sum::<usize>();
        let taps = weights.conv.chunks_exact(shape.channels());
        let own = taps.flat_map(|tap| parts.into_iter().flat_map(|(first, len)| &tap[first..first + len]));
        let (weights, inputs) = (own.copied().collect(), vec![0.0; shape.num_taps * width]);
        Self { parts, width, weights, inputs, mixed: vec![0.0; width] }
    }

    /// Calls `visit` with each earlier input's tap, the channels, and their values.
    fn each_input(&mut self, mut visit: impl FnMut(usize, (usize, usize), &mut [f32])) {
        let num_earlier = self.inputs.len() / self.width - 1;
        for (tap, mut inputs) in self.inputs.chunks_exact_mut(self.width).take(num_earlier).enumerate() {
            for part in self.parts {
                let (own, rest) = inputs.split_at_mut(part.1);
                visit(tap, part, own);
                inputs = rest;
            }
        }
    }

    /// Adds the inputs of a token, and returns the channels behind the convolution.
    fn advance(&mut self, token: &[f32]) -> &mut [f32] {
        let last = self.inputs.len() - self.width;
        let mut own = &mut self.inputs[last..];
        for (first, len) in self.parts {
            let (part, rest) = own.split_at_mut(len);
            part.copy_from_slice(&token[first..first + len]);
            own = rest;
        }
        convolve(&mut self.mixed, &self.inputs, &self.weights);
        self.inputs.copy_within(self.width.., 0);
        &mut self.mixed
    }
}

for_each_isa! {
    /// `out = silu(sum over taps of inputs * weights)`.
    fn convolve(out: &mut [f32], inputs: &[f32], weights: &[f32]) {
        out.fill(0.0);
        for (inputs, weights) in inputs.chunks_exact(out.len()).zip(weights.chunks_exact(out.len())) {
            for ((out, input), weight) in out.iter_mut().zip(inputs).zip(weights) {
                *out += input * weight;
            }
        }
        out.iter_mut().for_each(|x| *x *= sigmoid(*x));
    }

    /// Decays a state, adds what it lacks of `value` for `key`, and reads it by `query`.
    fn advance_state(
        state: &mut [f32],
        key: &[f32],
        query: &[f32],
        value: &[f32],
        gates: [f32; 2],
        memory: &mut [f32],
        out: &mut [f32],
    ) {
        let [decay, beta] = gates;
        memory.fill(0.0);
        for (row, key) in state.chunks_exact_mut(value.len()).zip(key) {
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
fn normalize(x: &mut [f32], factor: f32) {
    let scale = 1.0 / (squares(x) + HEAD_EPS).sqrt();
    x.iter_mut().for_each(|x| *x = *x * scale * factor);
}

/// The sum of squares, in lanes.
#[inline(always)]
fn squares(x: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    for part in x.chunks(LANES) {
        lanes.iter_mut().zip(part).for_each(|(lane, x)| *lane += x * x);
    }
    lanes.iter().sum()
}

#[inline(always)]
fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

fn softplus(x: f32) -> f32 {
    x.max(0.0) + exp(-x.abs()).ln_1p()
}
