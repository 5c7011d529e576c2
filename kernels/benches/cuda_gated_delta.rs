//! Gated DeltaNet behind its projections on the first GPU, compared with the memory bandwidth.
//!
//! `cargo bench -p kernels --bench cuda_gated_delta [-- READ_TB_S]`; the default bandwidth is 4.47 TB/s, an H200's. The
//! heads are those of a layer of Qwen3.5 35B-A3B (16, 32) and 27B (16, 48). States rotate through more memory than the L2
//! cache holds. Decodes read and write them, so their rate counts both directions.

mod gpu;

use gpu::{ROTATED_BYTES, microseconds, random};
use half::bf16;
use kernels::cuda::gated_delta::{DeltaShape, DeltaWeights, GatedDelta, HEAD_DIM, scratch_bytes};
use kernels::cuda::recurrent::{RecurrentOp, RecurrentRows, RecurrentStates, RowsKernel};
use kernels::cuda::{DeviceBuffer, Queue};

const HEADS: [[usize; 2]; 2] = [[16, 32], [16, 48]];
const DECODES: [usize; 8] = [1, 2, 4, 8, 16, 32, 64, 128];
/// Rows and tokens of each.
const CHUNKS: [(usize, usize); 5] = [(1, 128), (1, 512), (1, 2048), (8, 512), (8, 2048)];

/// A layer with its buffers.
struct Layer {
    delta: GatedDelta,
    _buffers: Vec<DeviceBuffer>,
}

impl Layer {
    fn new(queue: &Queue, [num_key_heads, num_value_heads]: [usize; 2], num_slots: usize, tokens: usize) -> Self {
        let gpu = queue.gpu();
        let shape = DeltaShape { num_key_heads, num_value_heads };
        let (channels, inner) = (shape.channels(), num_value_heads * HEAD_DIM);
        let floats = |count: usize| DeviceBuffer::from_slice(gpu, &vec![0.25f32; count]).expect("memory");
        let positions: Vec<u32> = (0..tokens as u32).map(|token| token % 2048).collect();
        let buffers = vec![
            DeviceBuffer::with_count::<bf16>(gpu, tokens * inner).expect("memory"),
            random(gpu, tokens * (channels + inner)),
            random(gpu, tokens * 2 * num_value_heads),
            floats(4 * channels),
            floats(num_value_heads),
            floats(num_value_heads),
            floats(HEAD_DIM),
            DeviceBuffer::with_count::<f32>(gpu, num_slots * shape.state_len()).expect("memory"),
            DeviceBuffer::from_slice(gpu, &positions).expect("memory"),
        ];
        queue.fill(buffers[7].span(), 0).expect("a fill");
        let span = |index: usize| buffers[index].span();
        let weights = DeltaWeights { conv: span(3), decay: span(4), dt_bias: span(5), norm: span(6), eps: 1e-6 };
        let states = RecurrentStates { memory: span(7), pitch: shape.state_len(), num_slots };
        let (out, qkvz, ba, positions) = (span(0), span(1), span(2), span(8));
        Self { delta: GatedDelta { out, qkvz, ba, shape, weights, states, positions }, _buffers: buffers }
    }
}

fn main() {
    let Some((gpu, queue)) = gpu::open() else { return };
    let read = std::env::args().find_map(|arg| arg.parse::<f64>().ok()).unwrap_or(4.47);
    for heads in HEADS {
        for rows in DECODES {
            let bytes = heads[1] * HEAD_DIM * HEAD_DIM * 4;
            let copies = (ROTATED_BYTES / bytes / rows).max(2);
            let layer = Layer::new(&queue, heads, copies * rows, rows);
            let slots: Vec<u32> = (0..(copies * rows) as u32).collect();
            let slots = DeviceBuffer::from_slice(&gpu, &slots).expect("memory");
            let us = microseconds(&queue, copies, |i| {
                layer.delta.decode(&queue, slots.span().elements::<u32>(i * rows, rows), 0, rows)
            });
            let rate = (2 * rows * bytes) as f64 / us / 1e6;
            println!("{heads:?} decode {rows:>4}: {us:>7.1} us, {rate:.2} TB/s, {:.0} % of reads", 100.0 * rate / read);
        }
        for (rows, tokens) in CHUNKS {
            let layer = Layer::new(&queue, heads, rows, rows * tokens);
            let starts: Vec<u32> = (0..=rows).map(|row| (row * tokens) as u32).collect();
            let slots: Vec<u32> = (0..rows as u32).collect();
            let [slots, starts] =
                [&slots, &starts].map(|values| DeviceBuffer::from_slice(&gpu, values).expect("memory"));
            let scratch = scratch_bytes(layer.delta.shape, rows * tokens);
            let scratch = DeviceBuffer::with_count::<u8>(&gpu, scratch).expect("memory");
            let (slots, starts) = (slots.span(), starts.span());
            let all = RecurrentRows { slots, starts, num_tokens: rows * tokens, count: rows };
            let us = [RowsKernel::InOrder, RowsKernel::Chunks(scratch.span())]
                .map(|kernel| microseconds(&queue, 2, |_| layer.delta.rows(&queue, &all, kernel)));
            println!("{heads:?} rows {rows} x {tokens}: {:.1} us in order, {:.1} us in chunks", us[0], us[1]);
        }
    }
}
