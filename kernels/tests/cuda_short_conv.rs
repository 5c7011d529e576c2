//! Compares the short convolutions of LFM2 with the reference, and with themselves in other steps and beside other rows.

mod gpu;

use std::sync::Arc;

use gpu::{Random, assert_close, floats, open, poisoned};
use half::bf16;
use kernels::cuda::recurrent::{NO_SLOT, RecurrentOp, RecurrentRows, RecurrentStates, RowsKernel};
use kernels::cuda::short_conv::{SHORT_TAPS, ShortConv};
use kernels::cuda::{DeviceBuffer, Gpu, Queue, Span};
use kernels::reference;

/// A layer with a pool of states.
struct Layer {
    width: usize,
    conv: Vec<f32>, // [W, taps], as checkpoints have it
    bias: Vec<f32>,
    weights: [DeviceBuffer; 2],
    has_bias: bool,
    states: DeviceBuffer,
    num_slots: usize,
    pitch: usize,
}

/// Tokens of one sequence in a step.
struct Row<'a> {
    slot: u32,
    first: usize,
    inputs: &'a Inputs,
    count: usize,
    /// After so many of them, the state is saved in this slot.
    saved: [u32; 2],
}

/// Inputs of a sequence.
struct Inputs {
    inputs: Vec<bf16>,
    gates: Vec<bf16>,
    tokens: usize,
}

fn row(slot: u32, inputs: &Inputs, first: usize, count: usize) -> Row<'_> {
    Row { slot, first, inputs, count, saved: [0, 0] }
}

impl Layer {
    fn new(gpu: &Arc<Gpu>, q: &Queue, width: usize, has_bias: bool, num_slots: usize) -> Self {
        let mut random = Random::new(5);
        let mut values = |count: usize| (0..count).map(|_| random.unit()).collect::<Vec<f32>>();
        let conv = values(width * SHORT_TAPS);
        let bias = if has_bias { values(width) } else { vec![0.0; width] };
        let taps: Vec<f32> =
            (0..SHORT_TAPS).flat_map(|tap| conv.iter().skip(tap).step_by(SHORT_TAPS)).copied().collect();
        let weights = [&taps, &bias].map(|values| DeviceBuffer::from_slice(gpu, values).unwrap());
        let pitch = ShortConv::state_len(width) + 64;
        let states = poisoned::<f32>(gpu, q, num_slots * pitch);
        Self { width, conv, bias, weights, has_bias, states, num_slots, pitch }
    }

    fn inputs(&self, seed: u64, tokens: usize) -> Inputs {
        let mut random = Random::new(seed);
        let (inputs, gates) = (random.bf16s(tokens * 2 * self.width, 1.0), random.bf16s(tokens * self.width, 1.0));
        Inputs { inputs, gates, tokens }
    }

    fn expected(&self, inputs: &Inputs) -> Vec<f32> {
        reference::short_conv(&self.conv, &self.bias, &floats(&inputs.inputs), &floats(&inputs.gates))
    }

    /// One step: `chunks` first, then `decodes` of one token, then padding. Without decodes, padding belongs to the rows of several
    /// tokens, of which there are then as many as tokens. Returns the output of all tokens.
    fn step(&self, gpu: &Arc<Gpu>, q: &Queue, chunks: &[Row], decodes: &[Row], padding: usize) -> Vec<bf16> {
        let width = self.width;
        let (mut inputs, mut gates, mut positions, mut slots, mut starts) =
            (vec![], vec![], vec![], vec![], vec![0u32]);
        for row in chunks.iter().chain(decodes) {
            let tokens = row.first..row.first + row.count;
            inputs.extend_from_slice(&row.inputs.inputs[tokens.start * 2 * width..tokens.end * 2 * width]);
            gates.extend_from_slice(&row.inputs.gates[tokens.start * width..tokens.end * width]);
            positions.extend(tokens.map(|position| position as u32));
            slots.push(row.slot);
            starts.push(positions.len() as u32);
        }
        let (num_known, chunk_tokens) = (positions.len(), starts[chunks.len()] as usize);
        inputs.extend(vec![bf16::NAN; padding * 2 * width]);
        gates.extend(vec![bf16::NAN; padding * width]);
        positions.extend(vec![0; padding]);
        let tokens = positions.len();
        let is_padded = decodes.is_empty() && padding > 0;
        let num_rows = if is_padded { tokens } else { chunks.len() };
        slots.resize(num_rows.max(slots.len() + padding), NO_SLOT);
        starts.resize(slots.len() + 1, num_known as u32);
        let mut saved: Vec<u32> = chunks.iter().flat_map(|row| row.saved).collect();
        saved.resize(2 * num_rows.max(1), 0);
        let out = poisoned::<bf16>(gpu, q, tokens * width + 8);
        let [dinputs, dgates] = [&inputs, &gates].map(|values| DeviceBuffer::from_slice(gpu, values).unwrap());
        let [dpositions, dslots, dstarts, dsaved] =
            [&positions, &slots, &starts, &saved].map(|values| DeviceBuffer::from_slice(gpu, values).unwrap());
        let layer = ShortConv {
            out: out.span(),
            inputs: dinputs.span(),
            gates: dgates.span(),
            width,
            taps: self.weights[0].span(),
            bias: if self.has_bias { self.weights[1].span() } else { Span::NULL },
            states: RecurrentStates { memory: self.states.span(), pitch: self.pitch, num_slots: self.num_slots },
            positions: dpositions.span(),
        };
        if num_rows > 0 {
            let num_tokens = if is_padded { tokens } else { chunk_tokens };
            let rows = RecurrentRows { slots: dslots.span(), starts: dstarts.span(), num_tokens, count: num_rows };
            let saves = is_padded || chunks.iter().any(|row| row.saved[0] > 0);
            let kernel = if saves { RowsKernel::Saving(dsaved.span()) } else { RowsKernel::InOrder };
            layer.rows(q, &rows, kernel).unwrap();
        }
        let num_decodes = decodes.len() + if is_padded { 0 } else { padding };
        if num_decodes > 0 {
            let own = dslots.span().elements::<u32>(chunks.len(), num_decodes);
            layer.decode(q, own, chunk_tokens, num_decodes).unwrap();
        }
        q.wait().unwrap();
        let mut found: Vec<bf16> = out.span().read(tokens * width + 8).unwrap();
        assert!(found.split_off(tokens * width).iter().all(|x| x.to_bits() == 0xffff), "elements behind the output");
        assert!(found[num_known * width..].iter().all(|x| x.to_bits() == 0), "the output of padding is 0");
        found
    }

    /// A sequence in steps of the given sizes; with `decodes`, steps of one token are decodes.
    fn in_steps(&self, gpu: &Arc<Gpu>, q: &Queue, inputs: &Inputs, steps: &[usize], decodes: bool) -> Vec<bf16> {
        let (mut out, mut first) = (Vec::new(), 0);
        for &count in steps {
            let row = [row(1, inputs, first, count)];
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
        let width = self.gates.len() / self.tokens;
        let mixed =
            |own: &[bf16], other: &[bf16], width: usize| [&own[..count * width], &other[count * width..]].concat();
        let inputs = mixed(&self.inputs, &others.inputs, 2 * width);
        Self { inputs, gates: mixed(&self.gates, &others.gates, width), tokens: self.tokens }
    }
}

#[test]
fn sequences_agree_with_the_reference() {
    let Some((gpu, q)) = open() else { return };
    for (width, has_bias) in [(8, true), (40, false), (512, true), (1032, false), (2048, true)] {
        let layer = Layer::new(&gpu, &q, width, has_bias, 3);
        for (tokens, steps) in [(1, vec![1]), (6, vec![1; 6]), (9, vec![2, 1, 3, 1, 1, 1]), (70, vec![70])] {
            let inputs = layer.inputs(tokens as u64, tokens);
            let expected = layer.expected(&inputs);
            for decodes in [false, true] {
                let found = floats(&layer.in_steps(&gpu, &q, &inputs, &steps, decodes));
                // One rounding to bf16; products of up to four normal numbers are summed in f32.
                let case = format!("{width} channels, steps {steps:?}, decodes {decodes}");
                assert_close(&case, &found, &expected, 1.0 / 256.0, 1e-5);
            }
        }
        let states: Vec<u32> = layer.states.span().read(3 * layer.pitch).unwrap();
        let others = [&states[..layer.pitch], &states[layer.pitch + ShortConv::state_len(width)..]].concat();
        assert!(others.iter().all(|word| *word == u32::MAX), "{width} channels: other slots and the space between");
    }
}

#[test]
fn a_row_does_not_depend_on_other_rows_or_on_the_cut_into_steps() {
    let Some((gpu, q)) = open() else { return };
    let layer = Layer::new(&gpu, &q, 520, true, 7);
    let (inputs, other) = (layer.inputs(1, 41), layer.inputs(2, 41));
    let whole = layer.in_steps(&gpu, &q, &inputs, &[41], false);
    for steps in [vec![1; 41], vec![40, 1], vec![2, 1, 3, 30, 4, 1], vec![8, 9, 7, 16, 1], vec![10, 31]] {
        for decodes in [false, true] {
            let found = layer.in_steps(&gpu, &q, &inputs, &steps, decodes);
            assert!(found == whole, "steps {steps:?}, decodes {decodes}");
        }
    }
    // A step of two chunks, two decodes and padding, after the rows of the decodes have begun.
    let width = layer.width;
    layer.step(&gpu, &q, &[row(2, &inputs, 0, 20), row(3, &other, 0, 7)], &[], 0);
    let chunks = [row(4, &other, 0, 13), row(0, &inputs, 0, 41)];
    let found = layer.step(&gpu, &q, &chunks, &[row(3, &other, 7, 1), row(2, &inputs, 20, 1)], 3);
    assert!(found[13 * width..54 * width] == whole[..], "a chunk beside other rows");
    assert!(found[55 * width..56 * width] == whole[20 * width..21 * width], "a decode beside other rows");
}

/// More rows than a block has tokens, of which many begin and end within a block's tokens, and rows of more tokens than several blocks have.
#[test]
fn many_rows_are_those_of_each_alone() {
    let Some((gpu, q)) = open() else { return };
    let rows = 45;
    let layer = Layer::new(&gpu, &q, 72, false, rows);
    let inputs: Vec<Inputs> = (0..rows).map(|row| layer.inputs(row as u64, 1 + row * 37 % 50)).collect();
    let first = |row: usize| inputs[row].tokens * (row % 3) / 4;
    let part = |index: usize, first, count| row(index as u32, &inputs[index], first, count);
    let begun: Vec<Row> = (0..rows).filter(|&r| first(r) > 0).map(|r| part(r, 0, first(r))).collect();
    let rest: Vec<Row> = (0..rows).map(|r| part(r, first(r), inputs[r].tokens - first(r))).collect();
    layer.step(&gpu, &q, &begun, &[], 0);
    let together = layer.step(&gpu, &q, &rest, &[], 0);
    let mut start = 0;
    for (index, row) in rest.iter().enumerate() {
        let end = start + row.count * layer.width;
        let (all, from) = (layer.expected(&inputs[index]), row.first * layer.width);
        assert_close(&format!("row {index}"), &floats(&together[start..end]), &all[from..], 1.0 / 256.0, 1e-5);
        start = end;
    }
    assert_eq!(start, together.len());
}

#[test]
fn a_state_that_is_saved_within_a_row_goes_on_as_if_the_row_had_ended_there() {
    let Some((gpu, q)) = open() else { return };
    let layer = Layer::new(&gpu, &q, 136, true, 4);
    let width = layer.width;
    for (before, count, tokens) in [(0, 1, 5), (5, 1, 4), (6, 3, 6), (2, 4, 4), (1, 2, 9), (0, 2, 2), (3, 11, 20)] {
        for padding in [0, 3] {
            let (inputs, other) = (layer.inputs(1, 30), layer.inputs(2, 30));
            let whole = layer.in_steps(&gpu, &q, &inputs, &[30], false);
            if before > 0 {
                layer.step(&gpu, &q, &[row(1, &inputs, 0, before)], &[], 0);
            }
            // The tokens behind the saved state are wrong drafts. Another row saves nothing.
            let drafted = inputs.and_then(&other, before + count);
            let saving = Row { saved: [count as u32, 2], ..row(1, &drafted, before, tokens) };
            layer.step(&gpu, &q, &[row(3, &other, 0, 2), saving], &[], padding);
            let known = before + count;
            let found = layer.step(&gpu, &q, &[row(2, &inputs, known, 30 - known)], &[], 0);
            assert!(
                found == whole[known * width..],
                "{count} of {tokens} tokens behind {before}, {padding} of padding"
            );
        }
    }
}
