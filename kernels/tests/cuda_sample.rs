//! Compares sampling on the device with a sorted fp64 reference; draws are compared by their frequencies.

mod gpu;

use std::collections::HashSet;
use std::sync::Arc;

use gpu::{Random, open, poisoned};
use kernels::cuda::sample::{
    self, ARGMAX_CHUNKS, DECAYS, GREEDY, LISTS, Logits, Masks, NO_MASK, Outputs, PENALTIES, RowParams, RowState,
    Samples, Share, VERIFIES, Work, partials_bytes,
};
use kernels::cuda::{DeviceBuffer, Gpu, PinnedBuffer, Queue};

const MAX_TOP: usize = 6;
const MAX_LEN: usize = 64;

/// Rows of one step, their state on the device, and their results.
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
        let rows: Vec<u32> = (0..self.params.len() as u32).collect();
        let drawn = self.draw_rows(logits, share, &rows, num_generated);
        let last = self.last.span().read::<u32>(rows.len()).unwrap();
        assert_eq!(last, drawn.tokens, "each row's last token is the one reported");
        drawn
    }

    /// `logits` `[groups, S, share]` for the given rows, whose settings are those that the device left.
    fn draw_rows(&mut self, logits: &[f32], share: usize, row_ids: &[u32], num_generated: &[u32]) -> Drawn {
        self.draw_masked(logits, share, row_ids, num_generated, None)
    }

    /// As [`Bench::draw_rows`], with the mask of each sample and the words of all masks.
    fn draw_masked(
        &mut self,
        logits: &[f32],
        share: usize,
        row_ids: &[u32],
        num_generated: &[u32],
        masks: Option<(&[u32], &[u32])>,
    ) -> Drawn {
        let (rows, gpu) = (row_ids.len(), self.gpu.clone());
        let params = DeviceBuffer::from_slice(&gpu, &self.params).unwrap();
        let values = DeviceBuffer::from_slice(&gpu, logits).unwrap();
        let work = poisoned::<f32>(&gpu, &self.q, rows * self.vocab);
        let partials = poisoned::<f32>(&gpu, &self.q, partials_bytes(rows).div_ceil(4));
        let work = Work { logits: work.span(), partials: partials.span() };
        let row_ids = DeviceBuffer::from_slice(&gpu, row_ids).unwrap();
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
        let outputs =
            Outputs { base: self.outputs.span(), slot: slot.span(), max_samples: rows, max_top: MAX_TOP, first: 0 };
        let all = Logits { values: values.span(), share, vocab: self.vocab };
        let masks = masks.map(|(rows, words)| [rows, words].map(|part| DeviceBuffer::from_slice(&gpu, part).unwrap()));
        let spans = masks.as_ref().map(|[rows, words]| Masks { rows: rows.span(), words: words.span() });
        sample::sample(&self.q, all, work, state, samples, spans, outputs).unwrap();
        self.q.wait().unwrap();
        self.params = params.span().read(self.params.len()).unwrap();
        let bytes = Outputs::slot_bytes(rows, MAX_TOP);
        let words: &[u32] = bytemuck::cast_slice(&self.outputs[bytes..]);
        let float = |word: &u32| f32::from_bits(*word);
        let tops = |from: usize| words[from..from + rows * MAX_TOP].chunks(MAX_TOP);
        Drawn {
            tokens: words[..rows].to_vec(),
            logprobs: words[rows..2 * rows].iter().map(float).collect(),
            top_tokens: tops(2 * rows).map(|c| c.to_vec()).collect(),
            top_logprobs: tops((2 + MAX_TOP) * rows).map(|c| c.iter().map(float).collect()).collect(),
        }
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
    let shapes = [(1, 1, 8, 8), (1, 5, 32000, 32000), (4, 3, 1256, 5019), (2, 130, 64, 121)];
    for ((groups, rows, share, vocab), is_masked) in
        shapes.into_iter().flat_map(|shape| [(shape, false), (shape, true)])
    {
        let mut logits = random_logits(&mut random, groups * rows * share);
        // A tie across workers; the lower token must win.
        for s in 0..rows {
            let (a, b) = (random.below(vocab), random.below(vocab));
            for v in [a, b] {
                logits[(v / share * rows + s) * share + v % share] = 50.0;
            }
        }
        // Masks of a third of the tokens, one without any, and samples without a mask.
        let row_words = vocab.div_ceil(32);
        let words: Vec<u32> = (0..rows * row_words)
            .map(|word| if word < row_words { 0 } else { (random.below(1 << 16) * random.below(1 << 16)) as u32 })
            .collect();
        let mask_rows: Vec<u32> = (0..rows as u32).map(|row| if row % 3 == 1 { NO_MASK } else { row }).collect();
        let on_gpu = [&mask_rows, &words].map(|part| DeviceBuffer::from_slice(&gpu, part).unwrap());
        let masks = is_masked.then(|| Masks { rows: on_gpu[0].span(), words: on_gpu[1].span() });
        let allows = |s: usize, v: usize| {
            let mask = mask_rows[s];
            !is_masked || mask == NO_MASK || words[mask as usize * row_words + v / 32] >> (v % 32) & 1 == 1
        };
        let pairs = poisoned::<u64>(&gpu, &q, groups * rows * ARGMAX_CHUNKS);
        let values = DeviceBuffer::from_slice(&gpu, &logits).unwrap();
        for g in 0..groups {
            let part = values.span().elements::<f32>(g * rows * share, rows * share);
            let own = pairs.span().elements::<u64>(g * rows * ARGMAX_CHUNKS, rows * ARGMAX_CHUNKS);
            let real = share.min(vocab - g * share);
            let part = Share { logits: part, len: real, stride: share, first_token: (g * share) as u32 };
            sample::argmax(&q, own, part, rows, masks, vocab).unwrap();
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
        let out = Outputs { base: outputs.span(), slot: slot.span(), max_samples: rows, max_top: 1, first: 0 };
        sample::greedy(&q, pairs.span(), groups, vocab, state, samples, out).unwrap();
        q.wait().unwrap();
        let found: &[u32] = &bytemuck::cast_slice(&outputs)[..rows];
        let expected: Vec<u32> = (0..rows)
            .map(|s| {
                let value = |v: usize| logits[(v / share * rows + s) * share + v % share];
                argmax(&(0..vocab).map(|v| if allows(s, v) { value(v) } else { f32::NEG_INFINITY }).collect::<Vec<_>>())
            })
            .collect();
        assert_eq!(found, expected, "{groups} workers, {rows} rows of {vocab}");
        let last: Vec<u32> = last.span().read(rows).unwrap();
        assert!(last.iter().rev().eq(expected.iter()), "rows are those named, not the samples' order");
    }
}

/// The tokens that may be drawn with the settings, found by sorting in fp64. Tokens within `slack` of a threshold are
/// in neither set: (must never be drawn, may be drawn).
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

/// Few tokens that may be drawn are sorted, and many are searched for in the whole row.
#[test]
fn draws_from_large_vocabularies_keep_the_tokens_that_sorting_keeps() {
    let Some((gpu, q)) = open() else { return };
    let mut random = Random::new(8);
    let (vocab, draws) = (50_021, 400);
    // Nearly equal logits, and some that fall quickly.
    let flat: Vec<f32> = (0..vocab).map(|_| random.normal() * 0.4).collect();
    let peaked: Vec<f32> = (0..vocab).map(|v| -1.5 * ((v * 7919 % vocab + 2) as f32).ln()).collect();
    let settings = [
        RowParams { top_k: 50, ..plain() },
        RowParams { top_k: 6000, ..plain() },
        RowParams { top_p: 0.6, temperature: 0.9, ..plain() },
        RowParams { top_k: 3000, top_p: 0.9, min_p: 0.001, temperature: 1.3, ..plain() },
        RowParams { min_p: 0.3, ..plain() },
        plain(),
    ];
    for (row, settings) in [&flat, &peaked].into_iter().flat_map(|row| settings.map(|settings| (row, settings))) {
        let params: Vec<RowParams> = (0..draws).map(|i| RowParams { seed: i as u64 * 17 + 3, ..settings }).collect();
        let mut bench = Bench::new(gpu.clone(), Queue::new(&gpu).unwrap(), vocab, params);
        let drawn = bench.draw(&row.repeat(draws), vocab, &vec![1; draws]);
        let kept = allowed(row, &settings);
        let strays: Vec<u32> = drawn.tokens.iter().copied().filter(|t| !kept.contains(t)).collect();
        assert!(strays.is_empty(), "{settings:?}: drew {strays:?} outside {} kept", kept.len());
        // The likelier half of them is drawn as often as it is likely.
        let weight = |t: u32| (f64::from(row[t as usize]) / f64::from(settings.temperature)).exp();
        let mut order: Vec<u32> = kept.iter().copied().collect();
        order.sort_by(|&a, &b| row[b as usize].total_cmp(&row[a as usize]));
        let likelier: HashSet<u32> = order[..order.len().div_ceil(2)].iter().copied().collect();
        let mass = |tokens: &HashSet<u32>| tokens.iter().map(|&t| weight(t)).sum::<f64>();
        let p = mass(&likelier) / mass(&kept);
        let found = drawn.tokens.iter().filter(|t| likelier.contains(t)).count() as f64;
        let (expected, sigma) = (p * draws as f64, (p * (1.0 - p) * draws as f64).sqrt());
        assert!((found - expected).abs() <= 5.0 * sigma + 1.0, "{settings:?}: {found} draws, expected {expected}");
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
        // Row 0: the two likeliest tokens are known; one is from the prompt, one was generated. A negative logit is
        // multiplied.
        let top = likely(&full[0], 3);
        full[0][top[0] as usize] = 4.0;
        expected[0][top[0] as usize] = 4.0 / 1.5;
        expected[0][top[1] as usize] /= 1.5;
        bench.join(0, &[top[0], 1, 1, top[1], top[1], 1], 3);
        expected[0][1] = if full[0][1] > 0.0 { full[0][1] / 1.5 } else { full[0][1] * 1.5 };
        // Row 1: generated three times; the prompt is not counted.
        let top1 = likely(&full[1], 2);
        bench.join(1, &[top1[1], 0, 0, top1[0], top1[0], top1[0]], 3);
        expected[1][top1[0] as usize] -= 1.0 + 3.0 * 0.75;
        // Row 2: logit bias.
        let rank = likely(&full[2], 30);
        bench.set_lists(2, &[rank[29], rank[0], 100f32.to_bits(), (-3f32).to_bits()]);
        expected[2][rank[29] as usize] += 100.0;
        expected[2][rank[0] as usize] -= 3.0;
        // Row 3: the likeliest token would complete a bad word, the second would not.
        let rank = likely(&full[3], 2);
        bench.join(3, &[5, 6, 7, 8, 9, 11], 3);
        bench.set_lists(3, &[3, 9, 11, rank[0], 3, 8, 11, rank[1]]);
        expected[3][rank[0] as usize] = f32::NEG_INFINITY;
        // Rows 4 and 5: end ids are suppressed while fewer than min_tokens are generated.
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
        // The chosen token was counted, so its penalties increase.
        let counts: Vec<u32> = bench.counts.span().read(rows * vocab).unwrap();
        let count = counts[vocab + chosen[1] as usize] & 0x7fff_ffff;
        let joined = if chosen[1] == top1[0] { 3 } else { 0 };
        assert_eq!(count, joined + 1, "row 1's choice was counted");
    }
    drop(q);
}

/// The logarithm of the sum of exponentials.
fn log_total(row: &[f32]) -> f64 {
    let most = f64::from(row.iter().copied().fold(f32::MIN, f32::max));
    most + row.iter().map(|&x| (f64::from(x) - most).exp()).sum::<f64>().ln()
}

#[test]
fn beams_report_their_candidates_after_penalties_of_log_probabilities_and_append_nothing() {
    let Some((gpu, q)) = open() else { return };
    let mut random = Random::new(4);
    for (groups, vocab, share) in [(1usize, 900usize, 900usize), (2, 1990, 1000)] {
        let beam = |num_candidates| RowParams { num_candidates, flags: GREEDY, num_prompt: 2, ..plain() };
        let settings = vec![
            beam(1),
            beam(MAX_TOP as u32),
            RowParams { flags: GREEDY | PENALTIES, repetition: 1.3, frequency: 0.5, ..beam(5) },
            RowParams { flags: GREEDY | LISTS, num_end: 1, min_tokens: 9, ..beam(4) },
        ];
        let (rows, wanted) = (settings.len(), [1, MAX_TOP, 5, 4]);
        let full: Vec<Vec<f32>> = (0..rows).map(|_| random_logits(&mut random, vocab)).collect();
        let mut bench = Bench::new(gpu.clone(), Queue::new(&gpu).unwrap(), vocab, settings);
        let mut expected: Vec<Vec<f64>> =
            full.iter().map(|row| row.iter().map(|&x| f64::from(x) - log_total(row)).collect()).collect();
        let (prompt, generated) = (argmax(&full[2]), (argmax(&full[2]) + 1) % vocab as u32);
        bench.join(2, &[prompt, prompt, generated, generated], 2);
        for token in [prompt, generated] {
            // Log-probabilities are at most 0, so the penalty multiplies.
            expected[2][token as usize] *= f64::from(1.3f32);
        }
        expected[2][generated as usize] -= 2.0 * 0.5;
        bench.set_lists(3, &[argmax(&full[3])]);
        expected[3][argmax(&full[3]) as usize] = f64::NEG_INFINITY;
        let counts = bench.counts.span().read::<u32>(rows * vocab).unwrap();

        let mut logits = vec![f32::NAN; groups * rows * share];
        for (s, v) in (0..rows).flat_map(|s| (0..vocab).map(move |v| (s, v))) {
            logits[(v / share * rows + s) * share + v % share] = full[s][v];
        }
        let ids: Vec<u32> = (0..rows as u32).collect();
        let drawn = bench.draw_rows(&logits, share, &ids, &vec![2; rows]);
        for s in 0..rows {
            let mut order: Vec<usize> = (0..vocab).collect();
            order.sort_by(|&a, &b| expected[s][b].total_cmp(&expected[s][a]));
            let best: Vec<u32> = order[..wanted[s]].iter().map(|&token| token as u32).collect();
            assert_eq!(drawn.top_tokens[s][..wanted[s]], best, "row {s} of {groups} workers");
            assert_eq!(drawn.tokens[s], best[0]);
            for (found, &token) in drawn.top_logprobs[s].iter().zip(&order[..wanted[s]]) {
                assert!((f64::from(*found) - expected[s][token]).abs() < 1e-4, "row {s}, token {token}: {found}");
            }
        }
        assert!(bench.last.span().read::<u32>(rows).unwrap().iter().all(|&token| token == u32::MAX), "no last token");
        assert!(bench.counts.span().read::<u32>(rows * vocab).unwrap() == counts, "nothing was counted");
    }
    drop(q);
}

#[test]
fn rows_that_verify_report_every_sample_and_append_none() {
    let Some((gpu, q)) = open() else { return };
    let mut random = Random::new(5);
    let vocab = 500;
    let params = vec![RowParams { flags: GREEDY | PENALTIES, repetition: 1.0, num_logprobs: 1, ..plain() }; 3];
    let mut bench = Bench::new(gpu.clone(), Queue::new(&gpu).unwrap(), vocab, params);
    (0..3).for_each(|row| bench.join(row, &[7, 8], 2));
    // Row 1 three times, row 2 once.
    let ids = [1 | VERIFIES, 1 | VERIFIES, 1 | VERIFIES, 2];
    let rows: Vec<Vec<f32>> = ids.iter().map(|_| random_logits(&mut random, vocab)).collect();
    // Outputs are stored by sample; there are more samples than rows.
    bench.outputs = PinnedBuffer::new(&gpu, 2 * Outputs::slot_bytes(ids.len(), MAX_TOP)).unwrap();
    let drawn = bench.draw_rows(&rows.concat(), vocab, &ids, &[0, 1, 2, 0]);
    let expected: Vec<u32> = rows.iter().map(|row| argmax(row)).collect();
    assert_eq!(drawn.tokens, expected);
    assert_eq!(bench.last.span().read::<u32>(3).unwrap(), [u32::MAX, u32::MAX, expected[3]]);
    let counts: Vec<u32> = bench.counts.span().read(3 * vocab).unwrap();
    let generated = |row: usize| counts[row * vocab..(row + 1) * vocab].iter().map(|c| c & 0x7fff_ffff).sum::<u32>();
    assert_eq!([generated(0), generated(1), generated(2)], [0, 0, 1], "only row 2's choice was counted");
    drop(q);
}

#[test]
fn top_p_decays_with_each_token_until_the_one_that_resets_it() {
    let Some((gpu, q)) = open() else { return };
    let vocab = 64;
    let settings = RowParams {
        flags: DECAYS,
        top_p: 0.8,
        top_p_first: 0.8,
        top_p_decay: 0.5,
        top_p_min: 0.3,
        top_p_reset: 9,
        ..plain()
    };
    let mut bench = Bench::new(gpu.clone(), Queue::new(&gpu).unwrap(), vocab, vec![settings]);
    let certain = |token: usize| (0..vocab).map(|v| if v == token { 50.0 } else { 0.0 }).collect::<Vec<f32>>();
    for (step, (token, left)) in [(3, 0.4), (4, 0.3), (5, 0.3), (9, 0.8), (3, 0.4)].into_iter().enumerate() {
        let drawn = bench.draw(&certain(token), vocab, &[step as u32]);
        assert_eq!(drawn.tokens, [token as u32]);
        assert!((bench.params[0].top_p - left).abs() < 1e-6, "after step {step}: {}", bench.params[0].top_p);
    }
    drop(q);
}

#[test]
fn masks_restrict_their_samples_and_no_others() {
    let Some((gpu, _)) = open() else { return };
    let mut random = Random::new(11);
    for (groups, share, vocab) in [(1, 8, 8), (1, 32_000, 32_000), (4, 1256, 5019)] {
        let greedy = RowParams { flags: GREEDY, ..plain() };
        let params = vec![greedy, plain(), greedy, RowParams { top_p: 0.9, top_k: 3, ..plain() }, greedy];
        let rows = params.len();
        let mut bench = Bench::new(gpu.clone(), Queue::new(&gpu).unwrap(), vocab, params);
        let logits = random_logits(&mut random, groups * rows * share);
        let value = |s: usize, v: usize| logits[(v / share * rows + s) * share + v % share];
        // Samples 0, 1 and 3 have masks of two tokens, in another order than the samples; sample 4 may choose nothing.
        let words = vocab.div_ceil(32);
        let mask_rows = [2, 0, NO_MASK, 1, 3];
        let mut masks = vec![0u32; 4 * words];
        let allowed: Vec<[usize; 2]> = (0..3).map(|_| [random.below(vocab), random.below(vocab)]).collect();
        for (mask, tokens) in allowed.iter().enumerate() {
            tokens.iter().for_each(|token| masks[mask * words + token / 32] |= 1 << (token % 32));
        }
        for position in 0..20 {
            let ids: Vec<u32> = (0..rows as u32).collect();
            let drawn = bench.draw_masked(&logits, share, &ids, &vec![position; rows], Some((&mask_rows, &masks)));
            for (sample, &mask) in mask_rows.iter().enumerate().filter(|(_, mask)| **mask < 3) {
                let tokens = allowed[mask as usize];
                assert!(tokens.contains(&(drawn.tokens[sample] as usize)), "sample {sample}: {}", drawn.tokens[sample]);
            }
            let [a, b] = allowed[2];
            let (best_a, best_b) = (value(0, a), value(0, b));
            let expected = if best_a > best_b || (best_a == best_b && a < b) { a } else { b };
            assert_eq!(drawn.tokens[0] as usize, expected);
            let free: Vec<f32> = (0..vocab).map(|v| value(2, v)).collect();
            assert_eq!(drawn.tokens[2], argmax(&free));
            assert!((drawn.tokens[4] as usize) < vocab, "an empty mask gives a token of the vocabulary");
        }
    }
}
