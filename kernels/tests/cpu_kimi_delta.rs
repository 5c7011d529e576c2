//! Compares the CPU's Kimi Delta Attention with the reference, and with itself in other chunks and beside other rows.

mod cpu;

use cpu::random;
use kernels::cpu::{KimiDeltaWeights, Pool, StateRow, StateShape, kimi_delta};
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
}

impl Layer {
    fn new([num_heads, key_dim, value_dim, num_taps]: [usize; 4]) -> Self {
        let shape = StateShape { num_key_heads: num_heads, num_value_heads: num_heads, key_dim, value_dim, num_taps };
        let conv = random(1, shape.channels() * num_taps);
        let taps = (0..num_taps).flat_map(|tap| conv.iter().skip(tap).step_by(num_taps)).copied().collect();
        let a_log: Vec<f32> = random(2, num_heads).iter().map(|x| x - 1.0).collect();
        let decay = a_log.iter().map(|x| -x.exp()).collect();
        let (dt_bias, norm) = (random(3, num_heads * key_dim), random(4, value_dim));
        Self { shape, conv, taps, a_log, decay, dt_bias, norm }
    }

    /// Columns of the three inputs.
    fn widths(&self) -> [usize; 3] {
        let StateShape { num_value_heads, key_dim, value_dim, .. } = self.shape;
        [self.shape.channels() + num_value_heads, num_value_heads * key_dim, num_value_heads * value_dim]
    }

    fn inputs(&self, seed: u64, tokens: usize) -> [Vec<f32>; 3] {
        let [qkvb, steps, gates] = self.widths();
        [random(seed, tokens * qkvb), random(seed + 1, tokens * steps), random(seed + 2, tokens * gates)]
    }

    fn run(&self, threads: usize, rows: &[StateRow], inputs: &[Vec<f32>; 3], states: &mut [f32]) -> Vec<f32> {
        let Self { taps, decay, dt_bias, norm, shape, .. } = self;
        let weights = KimiDeltaWeights { conv: taps, decay, dt_bias, norm, eps: EPS };
        let mut out = vec![f32::NAN; inputs[2].len()];
        let inputs = [&inputs[0][..], &inputs[1], &inputs[2]];
        kimi_delta(&mut Pool::new(threads), shape, &weights, rows, inputs, (&mut out, states));
        out
    }

    /// A row computed in chunks of the given sizes, one after the other, in a slot that another row has used.
    fn in_chunks(&self, inputs: &[Vec<f32>; 3], chunks: &[usize]) -> Vec<f32> {
        let (mut states, mut out, mut first) = (vec![7.0; 3 * self.shape.state_len()], Vec::new(), 0);
        for &num_tokens in chunks {
            let widths = self.widths();
            let part = [0, 1, 2].map(|index| {
                let width = widths[index];
                inputs[index][first * width..(first + num_tokens) * width].to_vec()
            });
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
    for (sizes, tokens) in
        [([1, 8, 8, 4], 1), ([4, 16, 24, 4], 37), ([3, 5, 7, 2], 20), ([2, 12, 9, 1], 9), ([2, 64, 64, 4], 70)]
    {
        let layer = Layer::new(sizes);
        let inputs = layer.inputs(10, tokens);
        let weights = [&layer.conv[..], &layer.a_log, &layer.dt_bias, &layer.norm];
        let [num_heads, key_dim, value_dim, num_taps] = sizes;
        let sizes = [num_heads, num_heads, key_dim, value_dim, num_taps];
        let expected = reference::kimi_delta(sizes, weights, [&inputs[0], &inputs[1], &inputs[2]], EPS);
        let found = layer.in_chunks(&inputs, &[tokens]);
        // The state is a sum over the last tokens, each read by sums over a head; the norm divides by a root of at least
        // some hundredths of the largest terms.
        let allowed = (40.0 + key_dim as f32) * 16.0 * 2f32.powi(-24);
        for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
            let error = (found - expected).abs() / expected.abs().max(1.0);
            assert!(error <= allowed, "{sizes:?}, element {index}: {found} not {expected}, allowed {allowed}");
        }
        assert_eq!(found.len(), expected.len());
    }
}

#[test]
fn a_row_does_not_depend_on_chunks_other_rows_or_threads() {
    let layer = Layer::new([4, 16, 24, 4]);
    let inputs = layer.inputs(20, 40);
    let whole = layer.in_chunks(&inputs, &[40]);
    for chunks in [&[1; 40][..], &[39, 1], &[2, 1, 3, 30, 4]] {
        assert!(layer.in_chunks(&inputs, chunks) == whole, "chunks of {chunks:?} tokens");
    }
    // The same row behind another one.
    let other = layer.inputs(30, 11);
    let both = [0, 1, 2].map(|index| [&other[index][..], &inputs[index]].concat());
    let rows = [
        StateRow { first_token: 0, num_tokens: 11, state: 2, is_first: true, saved: None },
        StateRow { first_token: 11, num_tokens: 40, state: 0, is_first: true, saved: None },
    ];
    for threads in [1, 3] {
        let out = layer.run(threads, &rows, &both, &mut vec![3.0; 3 * layer.shape.state_len()]);
        assert!(out[out.len() - whole.len()..] == whole, "{threads} threads");
    }
}
