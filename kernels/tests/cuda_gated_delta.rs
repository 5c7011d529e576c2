//! Compares Gated DeltaNet with the reference, and with itself in other steps and beside other rows.

mod gpu;
#[path = "gpu/recurrent.rs"]
mod recurrent;

use std::sync::Arc;

use gpu::{Random, assert_close, floats, open, poisoned};
use half::bf16;
use kernels::cuda::gate::gate;
use kernels::cuda::gated_delta::{DeltaShape, DeltaWeights, GatedDelta, HEAD_DIM, scratch_bytes};
use kernels::cuda::recurrent::{NUM_TAPS, RecurrentOp, RecurrentStates};
use kernels::cuda::{DeviceBuffer, Gpu, Span};
use kernels::reference;
use recurrent::Rule;

const EPS: f32 = 1e-6;

struct Delta {
    shape: DeltaShape,
    conv: Vec<f32>, // [C, taps], as checkpoints have it
    a_log: Vec<f32>,
    dt_bias: Vec<f32>,
    norm: Vec<f32>,
    weights: [DeviceBuffer; 4],
}

impl Delta {
    fn new(gpu: &Arc<Gpu>, [num_key_heads, num_value_heads]: [usize; 2]) -> Self {
        let shape = DeltaShape { num_key_heads, num_value_heads };
        let mut random = Random::new(5);
        let mut values = |count: usize| (0..count).map(|_| random.unit()).collect::<Vec<f32>>();
        let conv = values(shape.channels() * NUM_TAPS);
        let a_log: Vec<f32> = values(num_value_heads).iter().map(|x| 2.0 * x - 1.0).collect();
        let (dt_bias, norm) = (values(num_value_heads), values(HEAD_DIM));
        let taps: Vec<f32> = (0..NUM_TAPS).flat_map(|tap| conv.iter().skip(tap).step_by(NUM_TAPS)).copied().collect();
        let decay: Vec<f32> = a_log.iter().map(|x| -x.exp()).collect();
        let weights = [&taps, &decay, &dt_bias, &norm].map(|values| DeviceBuffer::from_slice(gpu, values).unwrap());
        Self { shape, conv, a_log, dt_bias, norm, weights }
    }
}

impl Rule for Delta {
    fn widths(&self) -> [usize; 3] {
        let inner = self.shape.num_value_heads * HEAD_DIM;
        [self.shape.channels() + inner, 2 * self.shape.num_value_heads, inner]
    }

    fn state_len(&self) -> usize {
        self.shape.state_len()
    }

    fn scratch_bytes(&self, tokens: usize) -> usize {
        scratch_bytes(self.shape, tokens)
    }

    fn expected(&self, [qkvz, ba]: [&[f32]; 2]) -> Vec<f32> {
        let DeltaShape { num_key_heads, num_value_heads } = self.shape;
        let sizes = [num_key_heads, num_value_heads, HEAD_DIM, HEAD_DIM, NUM_TAPS];
        let weights = [&self.conv[..], &self.a_log, &self.dt_bias, &self.norm];
        reference::gated_delta(sizes, weights, qkvz, ba, (1.0, EPS))
    }

    fn op(&self, out: Span, [qkvz, ba]: [Span; 2], states: RecurrentStates, positions: Span) -> impl RecurrentOp {
        let [conv, decay, dt_bias, norm] = self.weights.each_ref().map(DeviceBuffer::span);
        let weights = DeltaWeights { conv, decay, dt_bias, norm, eps: EPS };
        GatedDelta { out, qkvz, ba, shape: self.shape, weights, states, positions }
    }
}

#[test]
fn sequences_agree_with_the_reference() {
    let heads = [[1, 1], [2, 4], [1, 3], [3, 3]];
    recurrent::sequences_agree_with_the_reference(|gpu| heads.map(|heads| Delta::new(gpu, heads)).into());
}

#[test]
fn a_row_does_not_depend_on_other_rows_or_on_the_cut_into_steps() {
    recurrent::a_row_does_not_depend_on_other_rows_or_on_the_cut_into_steps(|gpu| Delta::new(gpu, [2, 6]));
}

#[test]
fn chunks_agree_with_the_reference_and_among_themselves() {
    let heads = [[1, 1], [2, 4], [1, 3]];
    recurrent::chunks_agree_with_the_reference_and_among_themselves(|gpu| {
        heads.map(|heads| Delta::new(gpu, heads)).into()
    });
}

#[test]
fn chunks_of_many_rows_are_those_of_each_alone() {
    recurrent::chunks_of_many_rows_are_those_of_each_alone(|gpu| Delta::new(gpu, [4, 32]));
}

#[test]
fn a_state_that_is_saved_within_a_row_goes_on_as_if_the_row_had_ended_there() {
    recurrent::saved_states_go_on_as_if_the_row_had_ended_there(|gpu| Delta::new(gpu, [2, 4]));
}

#[test]
fn gates_agree_with_the_formula() {
    let Some((gpu, q)) = open() else { return };
    let mut random = Random::new(31);
    for count in [8, 3 * 40, 5 * 4096, 2056] {
        let (x, y) = (random.bf16s(count, 2.0), random.bf16s(count, 4.0));
        let dx = poisoned::<bf16>(&gpu, &q, count + 8);
        dx.span().write(&x).unwrap();
        let dy = DeviceBuffer::from_slice(&gpu, &y).unwrap();
        gate(&q, dx.span(), dy.span(), count).unwrap();
        q.wait().unwrap();
        let mut found: Vec<bf16> = dx.span().read(count + 8).unwrap();
        assert!(found.split_off(count).iter().all(|x| x.to_bits() == 0xffff), "elements behind the output");
        let expected: Vec<f32> = x.iter().zip(&y).map(|(x, y)| x.to_f32() / (1.0 + (-y.to_f32()).exp())).collect();
        assert_close(&format!("gate of {count}"), &floats(&found), &expected, 1.0 / 128.0, 1e-6);
    }
}
