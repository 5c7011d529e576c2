//! Compares Gated DeltaNet with the reference, and with itself in other steps and beside other rows.

mod gpu;

use std::sync::Arc;

use gpu::{Random, assert_close, floats, open, poisoned};
use half::bf16;
use kernels::cuda::gate::gate;
use kernels::cuda::gated_delta::{DeltaShape, DeltaWeights, GatedDelta, HEAD_DIM, scratch_bytes};
use kernels::cuda::recurrent::{NO_SLOT, NUM_TAPS, RecurrentOp, RecurrentRows, RecurrentStates, RowsKernel};
use kernels::cuda::{DeviceBuffer, Gpu, Queue};
use kernels::reference;

const EPS: f32 = 1e-6;
/// One bf16 rounding.
const ULP: f32 = 1.0 / 128.0;

/// A layer with a pool of states.
struct Layer {
    shape: DeltaShape,
    conv: Vec<f32>, // [C, taps], as checkpoints have it
    a_log: Vec<f32>,
    dt_bias: Vec<f32>,
    norm: Vec<f32>,
    weights: [DeviceBuffer; 4],
    states: DeviceBuffer,
    num_slots: usize,
    pitch: usize,
    /// For chunks; in order without it.
    scratch: Option<DeviceBuffer>,
    /// In order, and after so many tokens of the chunk of a step its state is saved in this slot.
    saved: Option<[u32; 2]>,
}

/// Tokens of one sequence in a step.
struct Row<'a> {
    slot: u32,
    first: usize,
    inputs: &'a Inputs,
    count: usize,
}

/// Inputs of a sequence.
struct Inputs {
    qkvz: Vec<bf16>,
    ba: Vec<bf16>,
    tokens: usize,
}

impl Layer {
    fn new(gpu: &Arc<Gpu>, q: &Queue, heads: [usize; 2], num_slots: usize) -> Self {
        let shape = DeltaShape { num_key_heads: heads[0], num_value_heads: heads[1] };
        let mut random = Random::new(5);
        let mut values = |count: usize| (0..count).map(|_| random.unit()).collect::<Vec<f32>>();
        let conv = values(shape.channels() * NUM_TAPS);
        let a_log: Vec<f32> = values(heads[1]).iter().map(|x| 2.0 * x - 1.0).collect();
        let (dt_bias, norm) = (values(heads[1]), values(HEAD_DIM));
        let taps: Vec<f32> = (0..NUM_TAPS).flat_map(|tap| conv.iter().skip(tap).step_by(NUM_TAPS)).copied().collect();
        let decay: Vec<f32> = a_log.iter().map(|x| -x.exp()).collect();
        let weights = [&taps, &decay, &dt_bias, &norm].map(|values| DeviceBuffer::from_slice(gpu, values).unwrap());
        let pitch = shape.state_len() + 64;
        let states = poisoned::<f32>(gpu, q, num_slots * pitch);
        Self { shape, conv, a_log, dt_bias, norm, weights, states, num_slots, pitch, scratch: None, saved: None }
    }

    /// The same in chunks, of which `tokens` tokens are prepared at a time.
    fn in_chunks(self, gpu: &Arc<Gpu>, q: &Queue, tokens: usize) -> Self {
        let scratch = poisoned::<u8>(gpu, q, scratch_bytes(self.shape, tokens));
        Self { scratch: Some(scratch), ..self }
    }

    fn kernel(&self) -> RowsKernel {
        self.scratch.as_ref().map_or(RowsKernel::InOrder, |scratch| RowsKernel::Chunks(scratch.span()))
    }

    fn widths(&self) -> [usize; 3] {
        let inner = self.shape.num_value_heads * HEAD_DIM;
        [self.shape.channels() + inner, 2 * self.shape.num_value_heads, inner]
    }

    fn inputs(&self, seed: u64, tokens: usize) -> Inputs {
        let (mut random, [width, gates, _]) = (Random::new(seed), self.widths());
        Inputs { qkvz: random.bf16s(tokens * width, 1.0), ba: random.bf16s(tokens * gates, 1.0), tokens }
    }

    fn expected(&self, inputs: &Inputs) -> Vec<f32> {
        let DeltaShape { num_key_heads, num_value_heads } = self.shape;
        let sizes = [num_key_heads, num_value_heads, HEAD_DIM, HEAD_DIM, NUM_TAPS];
        let weights = [&self.conv[..], &self.a_log, &self.dt_bias, &self.norm];
        reference::gated_delta(sizes, weights, &floats(&inputs.qkvz), &floats(&inputs.ba), (1.0, EPS))
    }

    /// One step: `chunks` first, then `decodes` of one token, then padding. Returns the output of all tokens.
    fn step(&self, gpu: &Arc<Gpu>, q: &Queue, chunks: &[Row], decodes: &[Row], padding: usize) -> Vec<bf16> {
        let [width, gates, inner] = self.widths();
        let (mut qkvz, mut ba, mut positions, mut slots, mut starts) = (vec![], vec![], vec![], vec![], vec![0u32]);
        for row in chunks.iter().chain(decodes) {
            let Row { slot, first, inputs, count } = row;
            qkvz.extend_from_slice(&inputs.qkvz[first * width..(first + count) * width]);
            ba.extend_from_slice(&inputs.ba[first * gates..(first + count) * gates]);
            positions.extend((*first..first + count).map(|position| position as u32));
            slots.push(*slot);
            starts.push(positions.len() as u32);
        }
        qkvz.extend(vec![bf16::NAN; padding * width]);
        ba.extend(vec![bf16::NAN; padding * gates]);
        positions.extend(vec![0; padding]);
        slots.extend(vec![NO_SLOT; padding]);
        let tokens = positions.len();
        let chunk_tokens = starts[chunks.len()] as usize;
        let out = poisoned::<bf16>(gpu, q, tokens * inner + 8);
        let upload = |values: &[bf16]| DeviceBuffer::from_slice(gpu, values).unwrap();
        let (dqkvz, dba) = (upload(&qkvz), upload(&ba));
        let [dpositions, dslots, dstarts] =
            [&positions, &slots, &starts].map(|values| DeviceBuffer::from_slice(gpu, values).unwrap());
        let [conv, decay, dt_bias, norm] = self.weights.each_ref().map(DeviceBuffer::span);
        let delta = GatedDelta {
            out: out.span(),
            qkvz: dqkvz.span(),
            ba: dba.span(),
            shape: self.shape,
            weights: DeltaWeights { conv, decay, dt_bias, norm, eps: EPS },
            states: RecurrentStates { memory: self.states.span(), pitch: self.pitch, num_slots: self.num_slots },
            positions: dpositions.span(),
        };
        if !chunks.is_empty() {
            let (slots, starts) = (dslots.span(), dstarts.span());
            let rows = RecurrentRows { slots, starts, num_tokens: chunk_tokens, count: chunks.len() };
            let saved = self.saved.map(|saved| DeviceBuffer::from_slice(gpu, &saved).unwrap());
            let kernel = saved.as_ref().map_or(self.kernel(), |saved| RowsKernel::Saving(saved.span()));
            delta.rows(q, &rows, kernel).unwrap();
        }
        let num_decodes = decodes.len() + padding;
        if num_decodes > 0 {
            let own = dslots.span().elements::<u32>(chunks.len(), num_decodes);
            delta.decode(q, own, chunk_tokens, num_decodes).unwrap();
        }
        q.wait().unwrap();
        let mut found: Vec<bf16> = out.span().read(tokens * inner + 8).unwrap();
        assert!(found.split_off(tokens * inner).iter().all(|x| x.to_bits() == 0xffff), "elements behind the output");
        assert!(found[(tokens - padding) * inner..].iter().all(|x| x.to_bits() == 0), "the output of padding is 0");
        found
    }

    /// A sequence in steps of the given sizes; with `decodes`, steps of one token are decodes.
    fn in_steps(&self, gpu: &Arc<Gpu>, q: &Queue, inputs: &Inputs, steps: &[usize], decodes: bool) -> Vec<bf16> {
        let (mut out, mut first) = (Vec::new(), 0);
        for &count in steps {
            let row = [Row { slot: 1, first, inputs, count }];
            out.extend(match decodes && count == 1 {
                true => self.step(gpu, q, &[], &row, 0),
                false => self.step(gpu, q, &row, &[], 0),
            });
            first += count;
        }
        assert_eq!(first, inputs.tokens);
        out
    }
}

impl Inputs {
    /// Those of the first `count` tokens, and then the others'.
    fn and_then(&self, others: &Self, count: usize) -> Self {
        let [width, gates] = [&self.qkvz, &self.ba].map(|values| values.len() / self.tokens);
        let mixed =
            |own: &[bf16], other: &[bf16], width: usize| [&own[..count * width], &other[count * width..]].concat();
        let (qkvz, ba) = (mixed(&self.qkvz, &others.qkvz, width), mixed(&self.ba, &others.ba, gates));
        Self { qkvz, ba, tokens: self.tokens }
    }
}

/// The largest error against the reference, in units of the tolerance.
fn excess(found: &[bf16], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    let error = |(found, expected): (&bf16, &f32)| {
        let excess = (found.to_f32() - expected).abs() / (ULP * expected.abs() + 2e-4);
        if excess.is_finite() { excess } else { f32::INFINITY }
    };
    found.iter().zip(expected).map(error).fold(0.0, f32::max)
}

#[test]
fn sequences_agree_with_the_reference() {
    let Some((gpu, q)) = open() else { return };
    let mut wrong = Vec::new();
    for heads in [[1, 1], [2, 4], [1, 3], [3, 3]] {
        let layer = Layer::new(&gpu, &q, heads, 3);
        for (tokens, steps) in [(1, vec![1]), (6, vec![1; 6]), (9, vec![2, 1, 3, 1, 1, 1]), (70, vec![70])] {
            let inputs = layer.inputs(tokens as u64, tokens);
            let expected = layer.expected(&inputs);
            for decodes in [false, true] {
                let excess = excess(&layer.in_steps(&gpu, &q, &inputs, &steps, decodes), &expected);
                let case = format!("heads {heads:?}, steps {steps:?}, decodes {decodes}: {excess} of the tolerance");
                println!("{case}");
                wrong.extend((excess > 1.0).then_some(case));
            }
        }
        let states: Vec<u32> = layer.states.span().read(3 * layer.pitch).unwrap();
        let others = [&states[..layer.pitch], &states[layer.pitch + layer.shape.state_len()..]].concat();
        assert!(
            others.iter().all(|word| *word == u32::MAX),
            "the slots of other rows and the space between are not written"
        );
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn a_row_does_not_depend_on_other_rows_or_on_the_cut_into_steps() {
    let Some((gpu, q)) = open() else { return };
    let layer = Layer::new(&gpu, &q, [2, 6], 7);
    let (inputs, other) = (layer.inputs(1, 41), layer.inputs(2, 41));
    let whole = layer.in_steps(&gpu, &q, &inputs, &[41], false);
    let mut wrong = Vec::new();
    for steps in [vec![1; 41], vec![40, 1], vec![2, 1, 3, 30, 4, 1]] {
        for decodes in [false, true] {
            let is_same = layer.in_steps(&gpu, &q, &inputs, &steps, decodes) == whole;
            wrong.extend((!is_same).then(|| format!("steps {steps:?}, decodes {decodes}")));
        }
    }
    // A step of two chunks, two decodes and padding; then the same rows go on.
    let inner = layer.widths()[2];
    let row = |slot, inputs, first, count| Row { slot, first, inputs, count };
    layer.step(&gpu, &q, &[row(2, &inputs, 0, 20), row(3, &other, 0, 7)], &[], 0);
    let chunks = [row(4, &other, 0, 13), row(0, &inputs, 0, 41)];
    let found = layer.step(&gpu, &q, &chunks, &[row(3, &other, 7, 1), row(2, &inputs, 20, 1)], 3);
    let parts = [
        (&found[13 * inner..54 * inner], &whole[..]),
        (&found[55 * inner..56 * inner], &whole[20 * inner..21 * inner]),
    ];
    for (index, (found, expected)) in parts.into_iter().enumerate() {
        wrong.extend((found != expected).then(|| format!("part {index} beside other rows")));
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Root mean square and largest error against the reference.
fn errors(found: &[bf16], expected: &[f32]) -> [f32; 2] {
    assert_eq!(found.len(), expected.len());
    let errors = || found.iter().zip(expected).map(|(found, expected)| (found.to_f32() - expected).abs());
    let worst = errors().fold(0.0, |worst: f32, error| if error.is_nan() { f32::INFINITY } else { worst.max(error) });
    [(errors().map(|error| error * error).sum::<f32>() / found.len() as f32).sqrt(), worst]
}

#[test]
fn chunks_agree_with_the_reference_and_among_themselves() {
    let Some((gpu, q)) = open() else { return };
    let mut wrong = Vec::new();
    for heads in [[1, 1], [2, 4], [1, 3]] {
        let layer = Layer::new(&gpu, &q, heads, 3).in_chunks(&gpu, &q, 330);
        let cases = [
            (1, vec![1]),
            (5, vec![5]),
            (64, vec![64]),
            (65, vec![65]),
            (70, vec![6, 64]),
            (200, vec![200]),
            (200, vec![64, 128, 8]),
            (200, vec![30, 1, 100, 69]),
            (330, vec![330]),
        ];
        for (tokens, steps) in cases {
            let inputs = layer.inputs(tokens as u64, tokens);
            let expected = layer.expected(&inputs);
            for decodes in [false, true] {
                let found = layer.in_steps(&gpu, &q, &inputs, &steps, decodes);
                let [rms, worst] = errors(&found, &expected);
                let size = (expected.iter().map(|x| x * x).sum::<f32>() / expected.len() as f32).sqrt();
                let case = format!(
                    "heads {heads:?}, steps {steps:?}, {decodes}: rms {rms:.2e} worst {worst:.2e} of {size:.2e}"
                );
                println!("{case}");
                // Operands are rounded to bf16 five times on their way, and the output twice: 2^-9 each.
                wrong.extend((rms > 0.01 * size || worst.is_nan() || worst > 0.15 * size.max(1.0)).then_some(case));
            }
        }
        let inputs = layer.inputs(9, 200);
        let whole = layer.in_steps(&gpu, &q, &inputs, &[200], false);
        for steps in [vec![64, 136], vec![128, 72], vec![64, 64, 64, 8]] {
            let is_same = layer.in_steps(&gpu, &q, &inputs, &steps, false) == whole;
            wrong.extend((!is_same).then(|| format!("heads {heads:?}, cut at multiples of 64: {steps:?}")));
        }
        let (row, other) = (|slot, inputs, first, count| Row { slot, first, inputs, count }, layer.inputs(10, 33));
        let found = layer.step(&gpu, &q, &[row(0, &other, 0, 33), row(2, &inputs, 0, 200)], &[], 0);
        let is_same = found[33 * layer.widths()[2]..] == whole;
        wrong.extend((!is_same).then(|| format!("heads {heads:?}, beside another row")));
        for tokens in [1, 64, 128] {
            let layer = Layer::new(&gpu, &q, heads, 3).in_chunks(&gpu, &q, tokens);
            let is_same = layer.in_steps(&gpu, &q, &inputs, &[200], false) == whole;
            wrong.extend((!is_same).then(|| format!("heads {heads:?}, {tokens} tokens prepared at a time")));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// More rows than a warp has lanes, which begin and end within chunks, in more chunks than are prepared at a time. The heads of
/// several rows are computed in blocks of four warps, those of one alone in blocks of two.
#[test]
fn chunks_of_many_rows_are_those_of_each_alone() {
    let Some((gpu, q)) = open() else { return };
    let rows = 45;
    let layer = Layer::new(&gpu, &q, [4, 32], rows).in_chunks(&gpu, &q, 700);
    let inputs: Vec<Inputs> = (0..rows).map(|row| layer.inputs(row as u64, 1 + row * 37 % 150)).collect();
    let first = |row: usize| inputs[row].tokens * (row % 3) / 4;
    let inner = layer.widths()[2];
    let row = |row: usize, first, count| Row { slot: row as u32, first, inputs: &inputs[row], count };
    let begun: Vec<Row> = (0..rows).filter(|&r| first(r) > 0).map(|r| row(r, 0, first(r))).collect();
    let rest: Vec<Row> = (0..rows).map(|r| row(r, first(r), inputs[r].tokens - first(r))).collect();
    layer.step(&gpu, &q, &begun, &[], 0);
    let together = layer.step(&gpu, &q, &rest, &[], 0);
    let step = |row: &Row| layer.step(&gpu, &q, std::slice::from_ref(row), &[], 0);
    begun.iter().for_each(|row| drop(step(row)));
    let alone: Vec<bf16> = rest.iter().flat_map(step).collect();
    let mut start = 0;
    for (index, row) in rest.iter().enumerate() {
        let end = start + row.count * inner;
        assert!(together[start..end] == alone[start..end], "row {index}: {} tokens from {}", row.count, row.first);
        start = end;
    }
    assert_eq!(start, alone.len());
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
        assert_close(&format!("gate of {count}"), &floats(&found), &expected, ULP, 1e-6);
    }
}

#[test]
fn a_state_that_is_saved_within_a_row_goes_on_as_if_the_row_had_ended_there() {
    let Some((gpu, q)) = open() else { return };
    let mut layer = Layer::new(&gpu, &q, [2, 4], 4);
    for (before, count, tokens) in [(0, 1, 5), (5, 1, 4), (6, 3, 6), (2, 4, 4), (1, 2, 9)] {
        let (inputs, other) = (layer.inputs(1, 20), layer.inputs(2, 20));
        let whole = layer.in_steps(&gpu, &q, &inputs, &[20], false);
        let row = |slot, first, inputs, count| [Row { slot, first, inputs, count }];
        if before > 0 {
            layer.step(&gpu, &q, &row(1, 0, &inputs, before), &[], 0);
        }
        // The tokens behind the saved state are wrong drafts.
        let drafted = inputs.and_then(&other, before + count);
        layer.saved = Some([count as u32, 2]);
        layer.step(&gpu, &q, &row(1, before, &drafted, tokens), &[], 0);
        layer.saved = None;
        let known = before + count;
        let found = layer.step(&gpu, &q, &row(2, known, &inputs, 20 - known), &[], 0);
        let inner = layer.widths()[2];
        let same = found.iter().zip(&whole[known * inner..]).all(|(a, b)| a.to_bits() == b.to_bits());
        assert!(same, "{count} of {tokens} tokens behind {before}");
    }
}
