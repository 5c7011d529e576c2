//! What layers with a recurrent state share: the states of rows in slots, a causal convolution of each channel, and the order of
//! tokens
//!
//! conv      x[t, c] = silu(sum over j of w[j, c] * in[t - taps + 1 + j, c] + bias[c]) for the channels q | k | v;  C = 2 K DK + V DV
//!           with gated inputs in[t, c] is the product of two inputs, and there is no silu
//! states    [slots, STATE] f32: the last taps - 1 inputs `[taps - 1, C]`, oldest first, then a matrix [DK, DV] of each value head
//! maths     f32; token by token in one order, so the result does not depend on how a row is divided into steps
//! threads   divide (row, key head)

use crate::cpu::shared::SharedOut;
use crate::cpu::{Pool, exp};

const LANES: usize = 8;

/// Sizes of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateShape {
    /// `K`, number of key heads.
    pub num_key_heads: usize,
    /// `V`, number of value heads; a multiple of `K`.
    pub num_value_heads: usize,
    /// `DK`, size of a key head; 0 if there are no matrices.
    pub key_dim: usize,
    /// `DV`, size of a value head.
    pub value_dim: usize,
    /// Number of inputs of the convolution, at least 1.
    pub num_taps: usize,
}

impl StateShape {
    /// `C`, channels of the convolution: q, k and v.
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
    pub(super) fn group(&self) -> usize {
        self.num_value_heads / self.num_key_heads
    }

    /// The channels of a key head and its value heads: first and number, of q, of k and of v.
    fn parts(&self, key_head: usize) -> [(usize, usize); 3] {
        let (dim, values) = (self.key_dim, self.group() * self.value_dim);
        let first_value = 2 * self.num_key_heads * dim;
        [(key_head * dim, dim), ((self.num_key_heads + key_head) * dim, dim), (first_value + key_head * values, values)]
    }
}

/// The tokens of one row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateRow {
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

/// Weights of the convolution.
#[derive(Debug, Clone, Copy)]
pub(super) struct ConvWeights<'a> {
    /// `[taps, C]`.
    pub(super) taps: &'a [f32],
    /// `[C]`, or empty.
    pub(super) bias: &'a [f32],
    /// Whether the channels are multiplied by the inputs that follow them, and the result has no activation.
    pub(super) has_gated_inputs: bool,
}

/// One token of a row, for one key head and its value heads.
pub(super) struct HeadToken<'a> {
    /// Index of the token in `T`.
    pub(super) token: usize,
    pub(super) key_head: usize,
    /// All inputs of the token.
    pub(super) inputs: &'a [f32],
    /// q, k and v behind the convolution.
    pub(super) query: &'a mut [f32],
    pub(super) key: &'a mut [f32],
    pub(super) values: &'a mut [f32],
    /// The matrices `[DK, DV]` of the value heads.
    pub(super) heads: &'a mut [f32],
    /// `[DV]` for intermediate values.
    pub(super) scratch: &'a mut [f32],
    /// `[DK]`, the same.
    pub(super) key_scratch: &'a mut [f32],
}

/// Computes the convolution for the tokens of `rows`, and calls `advance` for each of their key heads, which advances the
/// matrices. `inputs` begin with the channels. States that are to be saved are.
///
/// # Panics
/// Panics if a buffer is too short, or if two rows have the same state, or one that is saved.
pub(super) fn each_token(
    pool: &mut Pool,
    shape: &StateShape,
    conv: ConvWeights<'_>,
    rows: &[StateRow],
    (inputs, stride): (&[f32], usize),
    states: &mut [f32],
    advance: impl Fn(HeadToken<'_>) + Sync,
) {
    let saved = rows.iter().filter_map(|row| row.saved.map(|[_, slot]| slot as usize));
    let mut slots: Vec<usize> = rows.iter().map(|row| row.state).chain(saved).collect();
    let used = shape.channels() * if conv.has_gated_inputs { 2 } else { 1 };
    assert!(inputs.len() >= num_tokens(rows) * stride && stride >= used, "inputs for each token");
    slots.sort_unstable();
    assert!(slots.windows(2).all(|pair| pair[0] < pair[1]), "each row has a state of its own");
    assert_eq!(conv.taps.len(), shape.num_taps * shape.channels(), "a weight for each tap and channel");
    assert!(conv.bias.is_empty() || conv.bias.len() == shape.channels(), "a bias for each channel");
    let states = SharedOut::new(states);
    pool.each(rows.len() * shape.num_key_heads, 1, |items| {
        for item in items {
            let (row, key_head) = (&rows[item / shape.num_key_heads], item % shape.num_key_heads);
            run_head(shape, conv, row, key_head, (inputs, stride), &states, &advance);
        }
    });
}

/// Tokens up to the last one of these rows.
pub(super) fn num_tokens(rows: &[StateRow]) -> usize {
    rows.iter().map(|row| row.first_token + row.num_tokens).max().unwrap_or(0)
}

/// One key head of one row, with its value heads.
fn run_head(
    shape: &StateShape,
    weights: ConvWeights<'_>,
    row: &StateRow,
    key_head: usize,
    (inputs, stride): (&[f32], usize),
    states: &SharedOut<f32>,
    advance: &impl Fn(HeadToken<'_>),
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
    let (mut scratch, mut key_scratch) = (vec![0.0; value_dim], vec![0.0; key_dim]);
    for token in row.first_token..row.first_token + row.num_tokens {
        let inputs = &inputs[token * stride..][..stride];
        let (query, rest) = conv.advance(inputs).split_at_mut(key_dim);
        let (key, values) = rest.split_at_mut(key_dim);
        let (scratch, key_scratch) = (&mut scratch[..], &mut key_scratch[..]);
        advance(HeadToken { token, key_head, inputs, query, key, values, heads, scratch, key_scratch });
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
    weights: Vec<f32>,    // [taps, width]
    bias: Vec<f32>,       // [width], or none
    gates: Option<usize>, // where the gates of the inputs begin
    inputs: Vec<f32>,     // [taps, width], oldest first; the last is the current token's
    mixed: Vec<f32>,      // [width]
}

impl Convolution {
    fn new(shape: &StateShape, weights: ConvWeights<'_>, parts: [(usize, usize); 3]) -> Self {
        let width = parts.iter().map(|(_, len)| len).sum::<usize>();
        let taps = weights.taps.chunks_exact(shape.channels());
        let own = taps.flat_map(|tap| parts.into_iter().flat_map(|(first, len)| &tap[first..first + len]));
        let own_bias = parts.into_iter().filter_map(|(first, len)| weights.bias.get(first..first + len)).flatten();
        let gates = weights.has_gated_inputs.then_some(shape.channels());
        let (bias, weights) = (own_bias.copied().collect(), own.copied().collect());
        Self { parts, width, weights, bias, gates, inputs: vec![0.0; shape.num_taps * width], mixed: vec![0.0; width] }
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
            if let Some(gates) = self.gates {
                part.iter_mut().zip(&token[gates + first..]).for_each(|(input, gate)| *input *= gate);
            }
            own = rest;
        }
        convolve(&mut self.mixed, &self.inputs, &self.weights, &self.bias, self.gates.is_none());
        self.inputs.copy_within(self.width.., 0);
        &mut self.mixed
    }
}

for_each_isa! {
    /// `out = silu(sum over taps of inputs * weights + bias)`. There may be no bias and no silu.
    fn convolve(out: &mut [f32], inputs: &[f32], weights: &[f32], bias: &[f32], has_silu: bool) {
        match bias.is_empty() {
            true => out.fill(0.0),
            false => out.copy_from_slice(bias),
        }
        for (inputs, weights) in inputs.chunks_exact(out.len()).zip(weights.chunks_exact(out.len())) {
            for ((out, input), weight) in out.iter_mut().zip(inputs).zip(weights) {
                *out += input * weight;
            }
        }
        if has_silu {
            out.iter_mut().for_each(|x| *x *= sigmoid(*x));
        }
    }
}

/// The sum of squares, in lanes.
#[inline(always)]
pub(super) fn squares(x: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    for part in x.chunks(LANES) {
        lanes.iter_mut().zip(part).for_each(|(lane, x)| *lane += x * x);
    }
    lanes.iter().sum()
}

#[inline(always)]
pub(super) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

pub(super) fn softplus(x: f32) -> f32 {
    x.max(0.0) + exp(-x.abs()).ln_1p()
}
