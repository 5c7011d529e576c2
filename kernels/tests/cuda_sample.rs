//! Sampling on the device against a sorted fp64 reference; draws by their frequencies.

mod gpu;

use std::collections::HashSet;
use std::sync::Arc;

use gpu::{Random, open, poisoned};
use kernels::cuda::sample::{
    self, ARGMAX_CHUNKS, GREEDY, LISTS, Logits, Outputs, PENALTIES, RowParams, RowState, Samples,
};
use kernels::cuda::{DeviceBuffer, Gpu, PinnedBuffer, Queue};

const MAX_TOP: usize = 6;
const MAX_LEN: usize = 64;

/// Rows of one step, their state on the device, and what came out.
struct Bench {
    gpu: Arc<Gpu>,
    q: Queue,
    vocab: usize,
    params: Vec<RowParams>,
    last: DeviceBuffer,
    history: DeviceBuffer,
    counts: DeviceBuffer,
    outputs: PinnedBuffer,
    lists: Vec<DeviceBuffer>,
}

struct Drawn {
    tokens: Vec<u32>,
    logprobs: Vec<f32>,
    top_tokens: Vec<Vec<u32>>,
    top_logprobs: Vec<Vec<f32>>,
}

impl Bench {
    fn new(gpu: Arc<Gpu>, q: Queue, vocab: usize, params: Vec<RowParams>) -> Self {
        let rows = params.len();
        Self {
            vocab,
            last: poisoned::<u32>(&gpu, &q, rows),
            history: poisoned::<u32>(&gpu, &q, rows * MAX_LEN),
            counts: poisoned::<u32>(&gpu, &q, rows * vocab),
            outputs: PinnedBuffer::new(&gpu, 2 * Outputs::slot_bytes(rows, MAX_TOP)).unwrap(),
            lists: Vec::new(),
            params,
            gpu,
            q,
        }
    }

    fn set_lists(&mut self, row: usize, words: &[u32]) {
        let buffer = DeviceBuffer::from_slice(&self.gpu, words).unwrap();
        self.params[row].lists = buffer.span().address();
        self.lists.push(buffer);
    }

    fn join(&self, row: usize, tokens: &[u32], prompt: usize) {
        let history = self.history.span().elements::<u32>(row * MAX_LEN, MAX_LEN);
        history.write(tokens).unwrap();
        let counts = self.counts.span().elements::<u32>(row * self.vocab, self.vocab);
        sample::join(&self.q, counts, history, prompt, tokens.len()).unwrap();
        self.q.wait().unwrap();
    }

    /// `logits` `[groups, S, share]` for rows `0..S`.
    fn draw(&mut self, logits: &[f32], share: usize, num_generated: &[u32]) -> Drawn {
        let (rows, gpu) = (self.params.len(), self.gpu.clone());
        let params = DeviceBuffer::from_slice(&gpu, &self.params).unwrap();
        let values = DeviceBuffer::from_slice(&gpu, logits).unwrap();
        let work = poisoned::<f32>(&gpu, &self.q, rows * self.vocab);
        let row_ids = DeviceBuffer::from_slice(&gpu, &(0..rows as u32).collect::<Vec<_>>()).unwrap();
        let generated = DeviceBuffer::from_slice(&gpu, num_generated).unwrap();
        let slot = DeviceBuffer::from_slice(&gpu, &[1u32]).unwrap();
        let state = RowState {
            params: params.span(),
            last_tokens: self.last.span(),
            history: self.history.span(),
            counts: self.counts.span(),
            max_len: MAX_LEN,
        };
        let samples = Samples { rows: row_ids.span(), num_generated: generated.span(), count: rows };
        let outputs = Outputs { base: self.outputs.span(), slot: slot.span(), max_samples: rows, max_top: MAX_TOP };
        let all = Logits { values: values.span(), share, vocab: self.vocab };
        sample::sample(&self.q, all, work.span(), state, samples, outputs).unwrap();
        self.q.wait().unwrap();
        let bytes = Outputs::slot_bytes(rows, MAX_TOP);
        let words: &[u32] = bytemuck::cast_slice(&self.outputs[bytes..]);
        let float = |word: &u32| f32::from_bits(*word);
        let tops = |from: usize| words[from..from + rows * MAX_TOP].chunks(MAX_TOP);
        let drawn = Drawn {
            tokens: words[..rows].to_vec(),
            logprobs: words[rows..2 * rows].iter().map(float).collect(),
            top_tokens: tops(2 * rows).map(|c| c.to_vec()).collect(),
            top_logprobs: tops((2 + MAX_TOP) * rows).map(|c| c.iter().map(float).collect()).collect(),
        };
        assert_eq!(
            self.last.span().read::<u32>(rows).unwrap(),
            drawn.tokens,
            "each row's last token is the one reported"
        );
        drawn
    }
}

fn plain() -> RowParams {
    RowParams { temperature: 1.0, top_p: 1.0, repetition: 1.0, ..RowParams::default() }
}

fn random_logits(random: &mut Random, count: usize) -> Vec<f32> {
    (0..count).map(|_| random.normal() * 3.0).collect()
}

fn argmax(row: &[f32]) -> u32 {
    (0..row.len()).fold(0, |best, i| if row[i] > row[best] { i } else { best }) as u32
}

#[test]
fn greedy_is_the_lowest_of_the_likeliest_over_all_workers() {
    let Some((gpu, q)) = open() else { return };
    let mut random = Random::new(1);
    for (groups, rows, share, vocab) in [(1, 1, 8, 8), (1, 5, 32000, 32000), (4, 3, 1256, 5019), (2, 130, 64, 121)] {
        let mut logits = random_logits(&mut random, groups * rows * share);
        // A tie across workers, to be won by the lower token.
        for s in 0..rows {
            let (a, b) = (random.below(vocab), random.below(vocab));
            for v in [a, b] {
                logits[(v / share * rows + s) * share + v % share] = 50.0;
            }
        }
        let pairs = poisoned::<u64>(&gpu, &q, groups * rows * ARGMAX_CHUNKS);
        let values = DeviceBuffer::from_slice(&gpu, &logits).unwrap();
        for g in 0..groups {
            let part = values.span().elements::<f32>(g * rows * share, rows * share);
            let own = pairs.span().elements::<u64>(g * rows * ARGMAX_CHUNKS, rows * ARGMAX_CHUNKS);
            let real = share.min(vocab - g * share);
            sample::argmax(&q, own, part, rows, real, share, (g * share) as u32).unwrap();
        }
        let params = DeviceBuffer::from_slice(&gpu, &vec![RowParams { flags: GREEDY, ..plain() }; rows]).unwrap();
        let words = |values: Vec<u32>| DeviceBuffer::from_slice(&gpu, &values).unwrap();
        let (ids, generated, slot) = (words((0..rows as u32).rev().collect()), words(vec![0; rows]), words(vec![0]));
        let last = poisoned::<u32>(&gpu, &q, rows);
        let outputs = PinnedBuffer::new(&gpu, Outputs::slot_bytes(rows, 1)).unwrap();
        let state = RowState {
            params: params.span(),
            last_tokens: last.span(),
            history: last.span(),
            counts: last.span(),
            max_len: 0,
        };
        let samples = Samples { rows: ids.span(), num_generated: generated.span(), count: rows };
        let out = Outputs { base: outputs.span(), slot: slot.span(), max_samples: rows, max_top: 1 };
        sample::greedy(&q, pairs.span(), groups, vocab, state, samples, out).unwrap();
        q.wait().unwrap();
        let found: &[u32] = &bytemuck::cast_slice(&outputs)[..rows];
        let expected: Vec<u32> = (0..rows)
            .map(|s| {
                argmax(&(0..vocab).map(|v| logits[(v / share * rows + s) * share + v % share]).collect::<Vec<_>>())
            })
            .collect();
        assert_eq!(found, expected, "{groups} workers, {rows} rows of {vocab}");
        let last: Vec<u32> = last.span().read(rows).unwrap();
        assert!(last.iter().rev().eq(expected.iter()), "rows are those named, not the samples' order");
    }
}

/// Tokens that may be drawn under the settings, by sorting in fp64; those within `slack` of a threshold are left out of
/// both sets: (must never be drawn, may be drawn).
fn allowed(row: &[f32], p: &RowParams) -> HashSet<u32> {
    let z: Vec<f64> = row.iter().map(|&x| f64::from(x) / f64::from(p.temperature)).collect();
    let mut order: Vec<usize> = (0..z.len()).collect();
    order.sort_by(|&a, &b| z[b].total_cmp(&z[a]));
    if p.top_k > 0 {
        order.truncate(p.top_k as usize);
    }
    let most = z[order[0]];
    let total: f64 = order.iter().map(|&i| (z[i] - most).exp()).sum();
    let mut mass = 0.0;
    let mut kept = HashSet::new();
    for &i in &order {
        if mass >= f64::from(p.top_p) * total * (1.0 + 1e-6) || (z[i] - most).exp() < f64::from(p.min_p) * (1.0 - 1e-5)
        {
            break;
        }
        kept.insert(i as u32);
        mass += (z[i] - most).exp();
    }
    kept
}

#[test]
fn thresholds_keep_the_tokens_that_sorting_keeps_and_draws_follow_their_probabilities() {
    let Some((gpu, q)) = open() else { return };
    let mut random = Random::new(2);
    let vocab = 777;
    let row = random_logits(&mut random, vocab);
    let draws = 2048;
    for settings in [
        plain(),
        RowParams { top_k: 5, ..plain() },
        RowParams { top_p: 0.6, temperature: 0.7, ..plain() },
        RowParams { min_p: 0.1, temperature: 1.5, ..plain() },
        RowParams { top_k: 40, top_p: 0.8, min_p: 0.02, temperature: 1.2, ..plain() },
        RowParams { top_p: 1e-6, ..plain() },
    ] {
        let params: Vec<RowParams> = (0..draws).map(|i| RowParams { seed: i as u64 * 31 + 7, ..settings }).collect();
        let mut bench = Bench::new(gpu.clone(), Queue::new(&gpu).unwrap(), vocab, params);
        let logits: Vec<f32> = (0..draws).flat_map(|_| row.clone()).collect();
        let drawn = bench.draw(&logits, vocab, &vec![3; draws]);
        let again = bench.draw(&logits, vocab, &vec![3; draws]);
        assert_eq!(drawn.tokens, again.tokens, "the same seed and position draw the same token");
        let kept = allowed(&row, &settings);
        let mut counts = vec![0usize; vocab];
        drawn.tokens.iter().for_each(|&t| counts[t as usize] += 1);
        let strays: Vec<u32> = drawn.tokens.iter().copied().filter(|t| !kept.contains(t)).collect();
        assert!(strays.is_empty(), "{settings:?}: drew {strays:?} outside {} kept", kept.len());
        let weight = |t: &u32| (f64::from(row[*t as usize]) / f64::from(settings.temperature)).exp();
        let total: f64 = kept.iter().map(weight).sum();
        for t in &kept {
            let p = weight(t) / total;
            let (expected, found) = (p * draws as f64, counts[*t as usize] as f64);
            let sigma = (expected * (1.0 - p)).sqrt();
            assert!(
                (found - expected).abs() <= 5.0 * sigma + 3.0,
                "{settings:?}: token {t} drawn {found} times, expected {expected}"
            );
        }
        let other = bench.draw(&logits, vocab, &vec![4; draws]);
        assert!(kept.len() == 1 || other.tokens != drawn.tokens, "another position draws other tokens");
    }
    drop(q);
}

#[test]
fn penalties_lists_and_log_probabilities_agree_with_fp64() {
    let Some((gpu, q)) = open() else { return };
    let mut random = Random::new(3);
    for (groups, vocab, share) in [(1usize, 1000usize, 1000usize), (3, 2990, 1000)] {
        let settings = vec![
            RowParams { flags: GREEDY | PENALTIES, repetition: 1.5, num_logprobs: 4, num_prompt: 3, ..plain() },
            RowParams {
                flags: GREEDY | PENALTIES,
                presence: 1.0,
                frequency: 0.75,
                num_logprobs: 1,
                num_prompt: 3,
                ..plain()
            },
            RowParams { flags: GREEDY | LISTS, num_bias: 2, num_prompt: 3, num_logprobs: 7, ..plain() },
            RowParams { flags: GREEDY | LISTS, num_bad: 2, num_prompt: 3, ..plain() },
            RowParams { flags: GREEDY | LISTS, num_end: 2, min_tokens: 4, num_prompt: 3, ..plain() },
            RowParams { flags: GREEDY | LISTS, num_end: 2, min_tokens: 3, num_prompt: 3, ..plain() },
        ];
        let rows = settings.len();
        let mut full: Vec<Vec<f32>> = (0..rows).map(|_| random_logits(&mut random, vocab)).collect();
        let likely = |row: &[f32], n: usize| -> Vec<u32> {
            let mut order: Vec<u32> = (0..row.len() as u32).collect();
            order.sort_by(|&a, &b| row[b as usize].total_cmp(&row[a as usize]));
            order[..n].to_vec()
        };
        let mut bench = Bench::new(gpu.clone(), Queue::new(&gpu).unwrap(), vocab, settings);
        let mut expected = full.clone();
        // Row 0: the two likeliest are known; one from the prompt, one generated. A negative one is multiplied.
        let top = likely(&full[0], 3);
        full[0][top[0] as usize] = 4.0;
        expected[0][top[0] as usize] = 4.0 / 1.5;
        expected[0][top[1] as usize] /= 1.5;
        bench.join(0, &[top[0], 1, 1, top[1], top[1], 1], 3);
        expected[0][1] = if full[0][1] > 0.0 { full[0][1] / 1.5 } else { full[0][1] * 1.5 };
        // Row 1: generated three times; the prompt does not count.
        let top1 = likely(&full[1], 2);
        bench.join(1, &[top1[1], 0, 0, top1[0], top1[0], top1[0]], 3);
        expected[1][top1[0] as usize] -= 1.0 + 3.0 * 0.75;
        // Row 2: bias.
        let rank = likely(&full[2], 30);
        bench.set_lists(2, &[rank[29], rank[0], 100f32.to_bits(), (-3f32).to_bits()]);
        expected[2][rank[29] as usize] += 100.0;
        expected[2][rank[0] as usize] -= 3.0;
        // Row 3: the likeliest would complete a bad word, the second would not.
        let rank = likely(&full[3], 2);
        bench.join(3, &[5, 6, 7, 8, 9, 11], 3);
        bench.set_lists(3, &[3, 9, 11, rank[0], 3, 8, 11, rank[1]]);
        expected[3][rank[0] as usize] = f32::NEG_INFINITY;
        // Rows 4 and 5: end ids are held back while fewer than min_tokens are generated.
        for (row, held) in [(4, true), (5, false)] {
            let rank = likely(&full[row], 2);
            bench.set_lists(row, &rank);
            if held {
                rank.iter().for_each(|&t| expected[row][t as usize] = f32::NEG_INFINITY);
            }
        }
        let mut logits = vec![f32::NAN; groups * rows * share];
        for (s, v) in (0..rows).flat_map(|s| (0..vocab).map(move |v| (s, v))) {
            logits[(v / share * rows + s) * share + v % share] = full[s][v];
        }
        let drawn = bench.draw(&logits, share, &vec![3; rows]);
        let chosen: Vec<u32> = expected.iter().map(|row| argmax(row)).collect();
        assert_eq!(drawn.tokens, chosen, "{groups} workers");
        for (s, top_n) in [(0, 3), (1, 0), (2, 6)] {
            let most = full[s].iter().copied().fold(f32::MIN, f32::max);
            let total = f64::from(most) + full[s].iter().map(|&x| f64::from(x - most).exp()).sum::<f64>().ln();
            let logprob = |t: u32| (f64::from(full[s][t as usize]) - total) as f32;
            assert!((drawn.logprobs[s] - logprob(chosen[s])).abs() < 1e-4, "row {s}: {}", drawn.logprobs[s]);
            let rank = likely(&full[s], top_n);
            assert_eq!(drawn.top_tokens[s][..top_n], rank, "row {s}");
            for (found, token) in drawn.top_logprobs[s].iter().zip(&rank) {
                assert!((found - logprob(*token)).abs() < 1e-4, "row {s}: {found}");
            }
        }
        // The chosen token was counted, so that penalties grow.
        let counts: Vec<u32> = bench.counts.span().read(rows * vocab).unwrap();
        let count = counts[vocab + chosen[1] as usize] & 0x7fff_ffff;
        let joined = if chosen[1] == top1[0] { 3 } else { 0 };
        assert_eq!(count, joined + 1, "row 1's choice was counted");
    }
    drop(q);
}
