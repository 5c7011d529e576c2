//! Steps of layers with a recurrent state, compared with the reference, and with themselves in other steps and beside other rows.

use std::sync::Arc;

use half::bf16;
use kernels::cuda::recurrent::{NO_SLOT, RecurrentOp, RecurrentRows, RecurrentStates, RowsKernel};
use kernels::cuda::{DeviceBuffer, Gpu, Queue, Span};

use super::gpu::{Random, floats, open, poisoned};

/// One bf16 rounding.
const ULP: f32 = 1.0 / 128.0;

/// A layer of a kind, with its weights.
pub trait Rule: Sized {
    /// Columns of the first input, of the second, and of the output.
    fn widths(&self) -> [usize; 3];
    /// Floats of a state.
    fn state_len(&self) -> usize;
    /// Bytes that chunks of steps of up to `tokens` tokens need.
    fn scratch_bytes(&self, tokens: usize) -> usize;
    /// The output of the reference for a sequence from its start.
    fn expected(&self, inputs: [&[f32]; 2]) -> Vec<f32>;
    /// The op for a step with these buffers.
    fn op(&self, out: Span, inputs: [Span; 2], states: RecurrentStates, positions: Span) -> impl RecurrentOp;
}

/// A layer with a pool of states.
pub struct Layer<R> {
    rule: R,
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
    parts: [Vec<bf16>; 2],
    tokens: usize,
}

impl<R: Rule> Layer<R> {
    pub fn new(gpu: &Arc<Gpu>, q: &Queue, rule: R, num_slots: usize) -> Self {
        let pitch = rule.state_len() + 64;
        let states = poisoned::<f32>(gpu, q, num_slots * pitch);
        Self { rule, states, num_slots, pitch, scratch: None, saved: None }
    }

    /// The same in chunks, of which `tokens` tokens are prepared at a time.
    fn in_chunks(self, gpu: &Arc<Gpu>, q: &Queue, tokens: usize) -> Self {
        let scratch = poisoned::<u8>(gpu, q, self.rule.scratch_bytes(tokens));
        Self { scratch: Some(scratch), ..self }
    }

    fn kernel(&self) -> RowsKernel {
        self.scratch.as_ref().map_or(RowsKernel::InOrder, |scratch| RowsKernel::Chunks(scratch.span()))
    }

    fn inputs(&self, seed: u64, tokens: usize) -> Inputs {
        let (mut random, [first, second, _]) = (Random::new(seed), self.rule.widths());
        Inputs { parts: [first, second].map(|width| random.bf16s(tokens * width, 1.0)), tokens }
    }

    fn expected(&self, inputs: &Inputs) -> Vec<f32> {
        let [first, second] = inputs.parts.each_ref().map(|part| floats(part));
        self.rule.expected([&first, &second])
    }

    /// One step: `chunks` first, then `decodes` of one token, then padding. Returns the output of all tokens.
    fn step(&self, gpu: &Arc<Gpu>, q: &Queue, chunks: &[Row], decodes: &[Row], padding: usize) -> Vec<bf16> {
        let [first_width, second_width, inner] = self.rule.widths();
        let (mut parts, mut positions, mut slots, mut starts) = ([vec![], vec![]], vec![], vec![], vec![0u32]);
        for row in chunks.iter().chain(decodes) {
            let Row { slot, first, inputs, count } = row;
            for ((part, own), width) in parts.iter_mut().zip(&inputs.parts).zip([first_width, second_width]) {
                part.extend_from_slice(&own[first * width..(first + count) * width]);
            }
            positions.extend((*first..first + count).map(|position| position as u32));
            slots.push(*slot);
            starts.push(positions.len() as u32);
        }
        for (part, width) in parts.iter_mut().zip([first_width, second_width]) {
            part.extend(vec![bf16::NAN; padding * width]);
        }
        positions.extend(vec![0; padding]);
        slots.extend(vec![NO_SLOT; padding]);
        let tokens = positions.len();
        let chunk_tokens = starts[chunks.len()] as usize;
        let out = poisoned::<bf16>(gpu, q, tokens * inner + 8);
        let parts = parts.each_ref().map(|values| DeviceBuffer::from_slice(gpu, values).unwrap());
        let [positions, slots, starts] =
            [&positions, &slots, &starts].map(|values| DeviceBuffer::from_slice(gpu, values).unwrap());
        let states = RecurrentStates { memory: self.states.span(), pitch: self.pitch, num_slots: self.num_slots };
        let op = self.rule.op(out.span(), parts.each_ref().map(DeviceBuffer::span), states, positions.span());
        if !chunks.is_empty() {
            let rows = RecurrentRows {
                slots: slots.span(),
                starts: starts.span(),
                num_tokens: chunk_tokens,
                count: chunks.len(),
            };
            let saved = self.saved.map(|saved| DeviceBuffer::from_slice(gpu, &saved).unwrap());
            let kernel = saved.as_ref().map_or(self.kernel(), |saved| RowsKernel::Saving(saved.span()));
            op.rows(q, &rows, kernel).unwrap();
        }
        let num_decodes = decodes.len() + padding;
        if num_decodes > 0 {
            let own = slots.span().elements::<u32>(chunks.len(), num_decodes);
            op.decode(q, own, chunk_tokens, num_decodes).unwrap();
        }
        q.wait().unwrap();
        let mut found: Vec<bf16> = out.span().read(tokens * inner + 8).unwrap();
        assert!(found.split_off(tokens * inner).iter().all(|x| x.to_bits() == 0xffff), "elements behind the output");
        assert!(found[(tokens - padding) * inner..].iter().all(|x| x.to_f32() == 0.0), "the output of padding is 0");
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
        let mixed = |(own, other): (&Vec<bf16>, &Vec<bf16>)| {
            let width = own.len() / self.tokens;
            [&own[..count * width], &other[count * width..]].concat()
        };
        let [first, second] = [0, 1].map(|part| mixed((&self.parts[part], &others.parts[part])));
        Self { parts: [first, second], tokens: self.tokens }
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

/// Sequences of each of `rules`, in order, agree with the reference.
pub fn sequences_agree_with_the_reference<R: Rule>(rules: impl Fn(&Arc<Gpu>) -> Vec<R>) {
    let Some((gpu, q)) = open() else { return };
    let mut wrong = Vec::new();
    for (rule, own) in rules(&gpu).into_iter().enumerate() {
        let layer = Layer::new(&gpu, &q, own, 3);
        for (tokens, steps) in [(1, vec![1]), (6, vec![1; 6]), (9, vec![2, 1, 3, 1, 1, 1]), (70, vec![70])] {
            let inputs = layer.inputs(tokens as u64, tokens);
            let expected = layer.expected(&inputs);
            for decodes in [false, true] {
                let excess = excess(&layer.in_steps(&gpu, &q, &inputs, &steps, decodes), &expected);
                let case = format!("rule {rule}, steps {steps:?}, decodes {decodes}: {excess} of the tolerance");
                println!("{case}");
                wrong.extend((excess > 1.0).then_some(case));
            }
        }
        let states: Vec<u32> = layer.states.span().read(3 * layer.pitch).unwrap();
        let others = [&states[..layer.pitch], &states[layer.pitch + layer.rule.state_len()..]].concat();
        assert!(
            others.iter().all(|word| *word == u32::MAX),
            "the slots of other rows and the space between are not written"
        );
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// A row of `rule`, in order, does not depend on other rows or on the cut into steps.
pub fn a_row_does_not_depend_on_other_rows_or_on_the_cut_into_steps<R: Rule>(rule: impl Fn(&Arc<Gpu>) -> R) {
    let Some((gpu, q)) = open() else { return };
    let layer = Layer::new(&gpu, &q, rule(&gpu), 7);
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
    let inner = layer.rule.widths()[2];
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

/// Chunks of each of `rules` agree with the reference and among themselves.
pub fn chunks_agree_with_the_reference_and_among_themselves<R: Rule>(rules: impl Fn(&Arc<Gpu>) -> Vec<R>) {
    let Some((gpu, q)) = open() else { return };
    let mut wrong = Vec::new();
    for (rule, own) in rules(&gpu).into_iter().enumerate() {
        let layer = Layer::new(&gpu, &q, own, 3).in_chunks(&gpu, &q, 330);
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
                let case =
                    format!("rule {rule}, steps {steps:?}, {decodes}: rms {rms:.2e} worst {worst:.2e} of {size:.2e}");
                println!("{case}");
                // Operands are rounded to bf16 five times on their way, and the output twice: 2^-9 each.
                wrong.extend((rms > 0.01 * size || worst.is_nan() || worst > 0.15 * size.max(1.0)).then_some(case));
            }
        }
        let inputs = layer.inputs(9, 200);
        let whole = layer.in_steps(&gpu, &q, &inputs, &[200], false);
        for steps in [vec![64, 136], vec![128, 72], vec![64, 64, 64, 8]] {
            let is_same = layer.in_steps(&gpu, &q, &inputs, &steps, false) == whole;
            wrong.extend((!is_same).then(|| format!("rule {rule}, cut at multiples of 64: {steps:?}")));
        }
        let (row, other) = (|slot, inputs, first, count| Row { slot, first, inputs, count }, layer.inputs(10, 33));
        let found = layer.step(&gpu, &q, &[row(0, &other, 0, 33), row(2, &inputs, 0, 200)], &[], 0);
        let is_same = found[33 * layer.rule.widths()[2]..] == whole;
        wrong.extend((!is_same).then(|| format!("rule {rule}, beside another row")));
        for tokens in [1, 64, 128] {
            let own = rules(&gpu).swap_remove(rule);
            let layer = Layer::new(&gpu, &q, own, 3).in_chunks(&gpu, &q, tokens);
            let is_same = layer.in_steps(&gpu, &q, &inputs, &[200], false) == whole;
            wrong.extend((!is_same).then(|| format!("rule {rule}, {tokens} tokens prepared at a time")));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// More rows than a warp has lanes, which begin and end within chunks, in more chunks than are prepared at a time. The heads of
/// several rows are computed in blocks of four warps, those of one alone in blocks of two.
pub fn chunks_of_many_rows_are_those_of_each_alone<R: Rule>(rule: impl Fn(&Arc<Gpu>) -> R) {
    let Some((gpu, q)) = open() else { return };
    let rows = 45;
    let layer = Layer::new(&gpu, &q, rule(&gpu), rows).in_chunks(&gpu, &q, 700);
    let inputs: Vec<Inputs> = (0..rows).map(|row| layer.inputs(row as u64, 1 + row * 37 % 150)).collect();
    let first = |row: usize| inputs[row].tokens * (row % 3) / 4;
    let inner = layer.rule.widths()[2];
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

/// A state of `rule` that is saved within a row goes on as if the row had ended there.
pub fn saved_states_go_on_as_if_the_row_had_ended_there<R: Rule>(rule: impl Fn(&Arc<Gpu>) -> R) {
    let Some((gpu, q)) = open() else { return };
    let mut layer = Layer::new(&gpu, &q, rule(&gpu), 4);
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
        let inner = layer.rule.widths()[2];
        let same = found.iter().zip(&whole[known * inner..]).all(|(a, b)| a.to_bits() == b.to_bits());
        assert!(same, "{count} of {tokens} tokens behind {before}");
    }
}
