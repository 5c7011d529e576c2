//! Compares the CPU's Gated DeltaNet with the reference, and with itself in other chunks and beside other rows.

mod cpu;

use cpu::random;
use kernels::cpu::{DeltaWeights, Pool, StateRow, StateShape, gated_delta};
use kernels::reference;

const EPS: f32 = 1e-6;

struct Layer {
    shape: StateShape,
    conv: Vec<f32>, // [C, taps], as checkpoints have it
    taps: Vec<f32>, // [taps, C]
    a_log: Vec<f32>,
    decay: Vec<f32>,
    dt_bias: Vec<f32>,
    norm: Vec<f32>,
    max_rate: f32,
}

impl Layer {
    fn new([num_key_heads, num_value_heads, key_dim, value_dim, num_taps]: [usize; 5]) -> Self {
        let shape = StateShape { num_key_heads, num_value_heads, key_dim, value_dim, num_taps };
        let conv = random(1, shape.channels() * num_taps);
        let taps = (0..num_taps).flat_map(|tap| conv.iter().skip(tap).step_by(num_taps)).copied().collect();
        let a_log: Vec<f32> = random(2, num_value_heads).iter().map(|x| x - 1.0).collect();
        let decay = a_log.iter().map(|x| -x.exp()).collect();
        let (dt_bias, norm) = (random(3, num_value_heads), random(4, value_dim));
        Self { shape, conv, taps, a_log, decay, dt_bias, norm, max_rate: 1.0 }
    }

    fn stride(&self) -> usize {
        self.shape.channels() + self.shape.num_value_heads * self.shape.value_dim
    }

    fn inputs(&self, seed: u64, tokens: usize) -> [Vec<f32>; 2] {
        [random(seed, tokens * self.stride()), random(seed + 1, tokens * 2 * self.shape.num_value_heads)]
    }

    fn run(&self, threads: usize, rows: &[StateRow], inputs: &[Vec<f32>; 2], states: &mut [f32]) -> Vec<f32> {
        let Self { taps, decay, dt_bias, norm, shape, .. } = self;
        let weights = DeltaWeights { conv: taps, decay, dt_bias, norm, max_rate: self.max_rate, eps: EPS };
        let tokens = inputs[1].len() / (2 * shape.num_value_heads);
        let mut out = vec![f32::NAN; tokens * shape.num_value_heads * shape.value_dim];
        let inputs = [&inputs[0][..], &inputs[1]];
        gated_delta(&mut Pool::new(threads), shape, &weights, rows, inputs, (&mut out, states));
        out
    }

    /// A row computed in chunks of the given sizes, one after the other, in a slot that another row has used.
    fn in_chunks(&self, inputs: &[Vec<f32>; 2], chunks: &[usize]) -> Vec<f32> {
        let (mut states, mut out, mut first) = (vec![7.0; 3 * self.shape.state_len()], Vec::new(), 0);
        for &num_tokens in chunks {
            let part = |index: usize, width: usize| inputs[index][first * width..(first + num_tokens) * width].to_vec();
            let part = [part(0, self.stride()), part(1, 2 * self.shape.num_value_heads)];
            let row = StateRow { first_token: 0, num_tokens, state: 1, is_first: first == 0, saved: None };
            out.extend(self.run(2, &[row], &part, &mut states));
            first += num_tokens;
        }
        let others = [&states[..self.shape.state_len()], &states[2 * self.shape.state_len()..]];
        assert!(others.concat().iter().all(|x| *x == 7.0), "the slots of other rows are not written");
        out
    }
}

#[test]
fn a_sequence_agrees_with_the_reference() {
    for (sizes, tokens, max_rate) in [
        ([1, 1, 8, 8, 4], 1, 1.0),
        ([2, 4, 16, 24, 4], 37, 1.0),
        ([2, 4, 16, 24, 4], 37, 2.0),
        ([3, 3, 5, 7, 2], 20, 1.0),
        ([1, 3, 12, 9, 1], 9, 1.0),
        ([2, 2, 64, 64, 4], 70, 1.0),
    ] {
        let layer = Layer { max_rate, ..Layer::new(sizes) };
        let inputs = layer.inputs(10, tokens);
        let weights = [&layer.conv[..], &layer.a_log, &layer.dt_bias, &layer.norm];
        let expected = reference::gated_delta(sizes, weights, &inputs[0], &inputs[1], (max_rate, EPS));
        let found = layer.in_chunks(&inputs, &[tokens]);
        // The state is a sum over the last tokens, each read by sums over a head; the norm divides by a root of at least
        // some hundredths of the largest terms.
        let allowed = (40.0 + sizes[2] as f32) * 16.0 * 2f32.powi(-24);
        for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
            let error = (found - expected).abs() / expected.abs().max(1.0);
            assert!(error <= allowed, "{sizes:?}, element {index}: {found} not {expected}, allowed {allowed}");
        }
        assert_eq!(found.len(), expected.len());
    }
}

#[test]
fn a_row_does_not_depend_on_chunks_other_rows_or_threads() {
    let layer = Layer::new([2, 4, 16, 24, 4]);
    let inputs = layer.inputs(20, 40);
    let whole = layer.in_chunks(&inputs, &[40]);
    for chunks in [&[1; 40][..], &[39, 1], &[2, 1, 3, 30, 4]] {
        assert!(layer.in_chunks(&inputs, chunks) == whole, "chunks of {chunks:?} tokens");
    }
    // The same row behind another one.
    let other = layer.inputs(30, 11);
    let both = [0, 1].map(|index| [&other[index][..], &inputs[index]].concat());
    let rows = [
        StateRow { first_token: 0, num_tokens: 11, state: 2, is_first: true, saved: None },
        StateRow { first_token: 11, num_tokens: 40, state: 0, is_first: true, saved: None },
    ];
    for threads in [1, 3] {
        let out = layer.run(threads, &rows, &both, &mut vec![3.0; 3 * layer.shape.state_len()]);
        assert!(out[out.len() - whole.len()..] == whole, "{threads} threads");
    }
}

#[test]
fn a_state_that_is_saved_within_a_step_goes_on_as_if_the_step_had_ended_there() {
    let layer = Layer::new([2, 4, 16, 24, 4]);
    let inputs = layer.inputs(40, 12);
    let whole = layer.in_chunks(&inputs, &[12]);
    for count in [1, 2, 5, 12] {
        let mut states = vec![7.0; 3 * layer.shape.state_len()];
        let row = StateRow { first_token: 0, num_tokens: 12, state: 2, is_first: true, saved: Some([count as u32, 0]) };
        assert!(layer.run(2, &[row], &inputs, &mut states) == whole);
        let rest = [0, 1].map(|index| inputs[index][count * inputs[index].len() / 12..].to_vec());
        let row = StateRow { num_tokens: 12 - count, state: 0, is_first: false, saved: None, ..row };
        let out = layer.run(2, &[row], &rest, &mut states);
        assert!(out == whole[count * whole.len() / 12..], "{count} tokens");
    }
}

#[test]
#[should_panic(expected = "each row has a state of its own")]
fn two_rows_with_one_state_are_refused() {
    let layer = Layer::new([1, 1, 8, 8, 4]);
    let row = StateRow { first_token: 0, num_tokens: 1, state: 0, is_first: true, saved: None };
    layer.run(1, &[row, row], &layer.inputs(1, 2), &mut vec![0.0; layer.shape.state_len()]);
}
