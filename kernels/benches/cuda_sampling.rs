//! Choosing the next token of a vocabulary of 128 256 on the first GPU, by settings and number of rows.
//!
//! `cargo bench -p kernels --bench cuda_sampling`. `flat`: all logits are alike, as those of random weights. `peaked`: probabilities fall
//! with the rank of a token as 1 / (rank + 2)^1.5, in any order, as those of trained models.

mod gpu;

use std::sync::Arc;

use gpu::microseconds;
use kernels::cuda::sample::{
    self, ARGMAX_CHUNKS, Logits, Outputs, RowParams, RowState, Samples, Share, Work, partials_bytes,
};
use kernels::cuda::{DeviceBuffer, Gpu, PinnedBuffer};

const VOCAB: usize = 128_256;
const MAX_LEN: usize = 64;
const ROWS: [usize; 5] = [1, 8, 32, 128, 256];

/// Name, and what it changes in the settings of a row.
type Setting = (&'static str, fn(&mut RowParams));

const SETTINGS: [Setting; 7] = [
    ("temperature", |_| {}),
    ("top-k 50", |p| p.top_k = 50),
    ("top-p 0.9", |p| p.top_p = 0.9),
    ("top-k 50, top-p 0.9", |p| (p.top_k, p.top_p) = (50, 0.9)),
    ("min-p 0.05", |p| p.min_p = 0.05),
    ("greedy, penalties", |p| (p.flags, p.presence) = (sample::GREEDY | sample::PENALTIES, 0.5)),
    ("top-p 0.9, log-probabilities", |p| (p.top_p, p.num_logprobs) = (0.9, 1)),
];

fn main() {
    let Some((gpu, queue)) = gpu::open() else { return };
    println!("{:>7} {:>30} {:>4} {:>8}", "logits", "settings", "rows", "us");
    for (form, logit) in [("flat", flat as fn(u64) -> f32), ("peaked", peaked)] {
        for rows in ROWS {
            let logits = logits(&gpu, rows, logit);
            let [last, rows_of, generated] = [(); 3].map(|()| upload(&gpu, &(0..rows as u32).collect::<Vec<_>>()));
            let slot = upload(&gpu, &[0u32]);
            let history = upload(&gpu, &vec![0u32; rows * MAX_LEN]);
            let counts = upload(&gpu, &vec![0u32; rows * VOCAB]);
            let work = DeviceBuffer::with_count::<f32>(&gpu, rows * VOCAB).expect("memory");
            let partials = DeviceBuffer::new(&gpu, partials_bytes(rows)).expect("memory");
            let work = Work { logits: work.span(), partials: partials.span() };
            let pinned = PinnedBuffer::new(&gpu, Outputs::slot_bytes(rows, 1)).expect("memory");
            let outputs = Outputs { base: pinned.span(), slot: slot.span(), max_samples: rows, max_top: 1, first: 0 };
            let samples = Samples { rows: rows_of.span(), num_generated: generated.span(), count: rows };
            let all = Logits { values: logits.span(), share: VOCAB, vocab: VOCAB };
            let state = |params: &DeviceBuffer| RowState {
                params: params.span(),
                last_tokens: last.span(),
                history: history.span(),
                counts: counts.span(),
                max_len: MAX_LEN,
            };
            for (name, change) in SETTINGS {
                let mut row = RowParams {
                    temperature: 1.0,
                    top_p: 1.0,
                    repetition: 1.0,
                    top_p_reset: u32::MAX,
                    ..RowParams::default()
                };
                change(&mut row);
                let params = upload(&gpu, &vec![row; rows]);
                let us = microseconds(&queue, 4, |_| {
                    sample::sample(&queue, all, work, state(&params), samples, None, outputs)
                });
                println!("{form:>7} {name:>30} {rows:>4} {us:>8.1}");
            }
            let params = upload(&gpu, &vec![RowParams { flags: sample::GREEDY, ..RowParams::default() }; rows]);
            let pairs = DeviceBuffer::with_count::<u64>(&gpu, rows * ARGMAX_CHUNKS).expect("memory");
            let share = Share { logits: logits.span(), len: VOCAB, stride: VOCAB, first_token: 0 };
            let us = microseconds(&queue, 4, |_| {
                sample::argmax(&queue, pairs.span(), share, rows, None, VOCAB)?;
                sample::greedy(&queue, pairs.span(), 1, VOCAB, state(&params), samples, outputs)
            });
            println!("{form:>7} {:>30} {rows:>4} {us:>8.1}", "greedy");
        }
    }
}

fn upload<T: bytemuck::Pod>(gpu: &Arc<Gpu>, values: &[T]) -> DeviceBuffer {
    DeviceBuffer::from_slice(gpu, values).expect("memory")
}

fn logits(gpu: &Arc<Gpu>, rows: usize, logit: fn(u64) -> f32) -> DeviceBuffer {
    let row: Vec<f32> = (0..VOCAB as u64).map(logit).collect();
    let buffer = DeviceBuffer::with_count::<f32>(gpu, rows * VOCAB).expect("memory");
    (0..rows).for_each(|i| buffer.span().elements::<f32>(i * VOCAB, VOCAB).write(&row).expect("a copy"));
    buffer
}

/// Between -1 and 1.
fn flat(token: u64) -> f32 {
    (token.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as f32 / (1 << 23) as f32 - 1.0
}

/// The logarithm of a power of the token's rank, which is another for each token.
fn peaked(token: u64) -> f32 {
    let rank = token * 48_271 % VOCAB as u64;
    -1.5 * (rank as f32 + 2.0).ln()
}
