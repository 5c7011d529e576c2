//! Compares Mamba-2 with the reference, and with itself in other steps and beside other rows.

mod gpu;
#[path = "gpu/recurrent.rs"]
mod recurrent;

use std::sync::Arc;

use gpu::Random;
use kernels::cuda::mamba2::{KEY_DIM, Mamba2, MambaShape, MambaWeights};
use kernels::cuda::recurrent::{NUM_TAPS, RecurrentOp, RecurrentStates};
use kernels::cuda::{DeviceBuffer, Gpu, Span};
use kernels::reference;
use recurrent::Rule;

const EPS: f32 = 1e-5;

struct Mamba {
    shape: MambaShape,
    norm_heads: usize,
    conv: Vec<f32>, // [C, taps], as checkpoints have it
    conv_bias: Vec<f32>,
    a_log: Vec<f32>,
    dt_bias: Vec<f32>,
    skip: Vec<f32>,
    norm: Vec<f32>,
    weights: [DeviceBuffer; 6],
    has_bias: bool,
}

impl Mamba {
    fn new(
        gpu: &Arc<Gpu>,
        [num_key_heads, num_value_heads, value_dim, norm_heads]: [usize; 4],
        has_bias: bool,
    ) -> Self {
        let shape = MambaShape { num_key_heads, num_value_heads, value_dim };
        let mut random = Random::new(5);
        let mut values = |count: usize| (0..count).map(|_| random.unit()).collect::<Vec<f32>>();
        let conv = values(shape.channels() * NUM_TAPS);
        let conv_bias = if has_bias { values(shape.channels()) } else { vec![0.0; shape.channels()] };
        let a_log: Vec<f32> = values(num_value_heads).iter().map(|x| 2.0 * x - 1.0).collect();
        let (dt_bias, skip) = (values(num_value_heads), values(num_value_heads));
        let norm = values(shape.width());
        let taps: Vec<f32> = (0..NUM_TAPS).flat_map(|tap| conv.iter().skip(tap).step_by(NUM_TAPS)).copied().collect();
        let decay: Vec<f32> = a_log.iter().map(|x| -x.exp()).collect();
        let weights = [&taps, &conv_bias, &decay, &dt_bias, &skip, &norm]
            .map(|values| DeviceBuffer::from_slice(gpu, values).unwrap());
        Self { shape, norm_heads, conv, conv_bias, a_log, dt_bias, skip, norm, weights, has_bias }
    }
}

impl Rule for Mamba {
    fn widths(&self) -> [usize; 3] {
        let width = self.shape.width();
        [self.shape.channels() + width, self.shape.num_value_heads, width]
    }

    fn state_len(&self) -> usize {
        self.shape.state_len()
    }

    fn scratch_bytes(&self, tokens: usize) -> usize {
        self.shape.scratch_bytes(tokens)
    }

    fn expected(&self, [inputs, dt]: [&[f32]; 2]) -> Vec<f32> {
        let MambaShape { num_key_heads, num_value_heads, value_dim } = self.shape;
        let sizes = [num_key_heads, num_value_heads, KEY_DIM, value_dim, NUM_TAPS];
        let weights = [&self.conv[..], &self.conv_bias, &self.a_log, &self.dt_bias, &self.skip, &self.norm];
        reference::mamba2(sizes, weights, inputs, dt, (self.norm_heads, EPS))
    }

    fn op(&self, out: Span, [inputs, dt]: [Span; 2], states: RecurrentStates, positions: Span) -> impl RecurrentOp {
        let [conv, conv_bias, decay, dt_bias, skip, norm] = self.weights.each_ref().map(DeviceBuffer::span);
        let conv_bias = if self.has_bias { conv_bias } else { Span::NULL };
        let norm_heads = self.norm_heads;
        let weights = MambaWeights { conv, conv_bias, decay, dt_bias, skip, norm, norm_heads, eps: EPS };
        Mamba2 { out, inputs, dt, shape: self.shape, weights, states, positions }
    }
}

/// Key heads, value heads, the size of a value head, and value heads with a common norm.
const SIZES: [[usize; 4]; 5] = [[1, 1, 64, 1], [2, 4, 80, 2], [1, 3, 128, 3], [1, 12, 64, 12], [3, 3, 80, 3]];

fn rules(gpu: &Arc<Gpu>) -> Vec<Mamba> {
    SIZES.iter().enumerate().map(|(index, sizes)| Mamba::new(gpu, *sizes, index % 2 == 0)).collect()
}

#[test]
fn sequences_agree_with_the_reference() {
    recurrent::sequences_agree_with_the_reference(rules);
}

#[test]
fn a_row_does_not_depend_on_other_rows_or_on_the_cut_into_steps() {
    recurrent::a_row_does_not_depend_on_other_rows_or_on_the_cut_into_steps(|gpu| Mamba::new(gpu, [2, 6, 80, 3], true));
}

#[test]
fn chunks_agree_with_the_reference_and_among_themselves() {
    recurrent::chunks_agree_with_the_reference_and_among_themselves(rules);
}

#[test]
fn chunks_of_many_rows_are_those_of_each_alone() {
    for sizes in [[4, 32, 64, 8], [2, 48, 80, 24], [1, 32, 128, 32]] {
        recurrent::chunks_of_many_rows_are_those_of_each_alone(|gpu| Mamba::new(gpu, sizes, true));
    }
}

#[test]
fn a_state_that_is_saved_within_a_row_goes_on_as_if_the_row_had_ended_there() {
    recurrent::saved_states_go_on_as_if_the_row_had_ended_there(|gpu| Mamba::new(gpu, [2, 4, 64, 2], true));
}
