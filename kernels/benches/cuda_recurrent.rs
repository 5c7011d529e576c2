//! Layers with a recurrent state behind their projections on the first GPU, compared with the memory bandwidth.
//!
//! `cargo bench -p kernels --bench cuda_recurrent [-- READ_TB_S]`; the default bandwidth is 4.47 TB/s, an H200's. The sizes are
//! those of a layer of Qwen3.5 35B-A3B and 27B (Gated DeltaNet), and of Nemotron 3 Nano, Nemotron Nano 2 and Granite 4 Small
//! (Mamba-2). States rotate through more memory than the L2 cache holds. Decodes read and write them, so their rate counts both
//! directions.

mod gpu;

use gpu::{ROTATED_BYTES, microseconds, random};
use half::bf16;
use kernels::cuda::gated_delta::{self, DeltaShape, DeltaWeights, GatedDelta};
use kernels::cuda::mamba2::{Mamba2, MambaShape, MambaWeights};
use kernels::cuda::recurrent::{RecurrentOp, RecurrentRows, RecurrentStates, RowsKernel};
use kernels::cuda::{DeviceBuffer, Queue, Span};

const DECODES: [usize; 8] = [1, 2, 4, 8, 16, 32, 64, 128];
/// Rows and tokens of each.
const CHUNKS: [(usize, usize); 5] = [(1, 128), (1, 512), (1, 2048), (8, 512), (8, 2048)];

/// A kind of layer.
#[derive(Clone, Copy)]
enum Kind {
    Delta(DeltaShape),
    /// With the number of heads that have one norm together.
    Mamba(MambaShape, usize),
}

const KINDS: [(&str, Kind); 5] = [
    ("Qwen3.5 35B-A3B", Kind::Delta(DeltaShape { num_key_heads: 16, num_value_heads: 32 })),
    ("Qwen3.5 27B", Kind::Delta(DeltaShape { num_key_heads: 16, num_value_heads: 48 })),
    ("Nemotron 3 Nano", Kind::Mamba(MambaShape { num_key_heads: 8, num_value_heads: 64, value_dim: 64 }, 8)),
    ("Nemotron Nano 2", Kind::Mamba(MambaShape { num_key_heads: 8, num_value_heads: 128, value_dim: 80 }, 16)),
    ("Granite 4 Small", Kind::Mamba(MambaShape { num_key_heads: 1, num_value_heads: 128, value_dim: 64 }, 128)),
];

impl Kind {
    /// Columns of the first input, of the second, and of the output.
    fn widths(self) -> [usize; 3] {
        match self {
            Self::Delta(shape) => {
                let inner = shape.num_value_heads * gated_delta::HEAD_DIM;
                [shape.channels() + inner, 2 * shape.num_value_heads, inner]
            }
            Self::Mamba(shape, _) => [shape.channels() + shape.width(), shape.num_value_heads, shape.width()],
        }
    }

    fn channels(self) -> usize {
        let [inputs, _, out] = self.widths();
        inputs - out
    }

    fn state_len(self) -> usize {
        match self {
            Self::Delta(shape) => shape.state_len(),
            Self::Mamba(shape, _) => shape.state_len(),
        }
    }

    fn scratch_bytes(self, tokens: usize) -> usize {
        match self {
            Self::Delta(shape) => gated_delta::scratch_bytes(shape, tokens),
            Self::Mamba(shape, _) => shape.scratch_bytes(tokens),
        }
    }
}

/// A layer with its buffers.
struct Layer {
    op: Box<dyn RecurrentOp>,
    _buffers: Vec<DeviceBuffer>,
}

impl Layer {
    fn new(queue: &Queue, kind: Kind, num_slots: usize, tokens: usize) -> Self {
        let gpu = queue.gpu();
        let ([inputs, steps, width], channels) = (kind.widths(), kind.channels());
        let positions: Vec<u32> = (0..tokens as u32).map(|token| token % 2048).collect();
        let buffers = vec![
            DeviceBuffer::with_count::<bf16>(gpu, tokens * width).expect("memory"),
            random(gpu, tokens * inputs),
            random(gpu, tokens * steps),
            DeviceBuffer::with_count::<f32>(gpu, num_slots * kind.state_len()).expect("memory"),
            DeviceBuffer::from_slice(gpu, &positions).expect("memory"),
            // All weights.
            DeviceBuffer::from_slice(gpu, &vec![0.25f32; 4 * channels]).expect("memory"),
        ];
        queue.fill(buffers[3].span(), 0).expect("a fill");
        let [out, inputs, steps, memory, positions, all] = std::array::from_fn(|index| buffers[index].span());
        let states = RecurrentStates { memory, pitch: kind.state_len(), num_slots };
        let (conv, decay, dt_bias, norm, eps) = (all, all, all, all, 1e-6);
        let op: Box<dyn RecurrentOp> = match kind {
            Kind::Delta(shape) => {
                let weights = DeltaWeights { conv, decay, dt_bias, norm, eps };
                Box::new(GatedDelta { out, qkvz: inputs, ba: steps, shape, weights, states, positions })
            }
            Kind::Mamba(shape, norm_heads) => {
                let (conv_bias, skip) = (Span::NULL, all);
                let weights = MambaWeights { conv, conv_bias, decay, dt_bias, skip, norm, norm_heads, eps };
                Box::new(Mamba2 { out, inputs, dt: steps, shape, weights, states, positions })
            }
        };
        Self { op, _buffers: buffers }
    }
}

fn main() {
    let Some((gpu, queue)) = gpu::open() else { return };
    let read = std::env::args().find_map(|arg| arg.parse::<f64>().ok()).unwrap_or(4.47);
    for (name, kind) in KINDS {
        for rows in DECODES {
            // The matrices.
            let bytes = (kind.state_len() - 3 * kind.channels()) * size_of::<f32>();
            let copies = (ROTATED_BYTES / bytes / rows).max(2);
            let layer = Layer::new(&queue, kind, copies * rows, rows);
            let slots: Vec<u32> = (0..(copies * rows) as u32).collect();
            let slots = DeviceBuffer::from_slice(&gpu, &slots).expect("memory");
            let us = microseconds(&queue, copies, |i| {
                layer.op.decode(&queue, slots.span().elements::<u32>(i * rows, rows), 0, rows)
            });
            let rate = (2 * rows * bytes) as f64 / us / 1e6;
            println!("{name}: decode {rows:>4}: {us:>7.1} us, {rate:.2} TB/s, {:.0} % of reads", 100.0 * rate / read);
        }
        for (rows, tokens) in CHUNKS {
            let layer = Layer::new(&queue, kind, rows, rows * tokens);
            let starts: Vec<u32> = (0..=rows).map(|row| (row * tokens) as u32).collect();
            let slots: Vec<u32> = (0..rows as u32).collect();
            let [slots, starts] =
                [&slots, &starts].map(|values| DeviceBuffer::from_slice(&gpu, values).expect("memory"));
            let scratch = kind.scratch_bytes(rows * tokens);
            let scratch = DeviceBuffer::with_count::<u8>(&gpu, scratch).expect("memory");
            let (slots, starts) = (slots.span(), starts.span());
            let all = RecurrentRows { slots, starts, num_tokens: rows * tokens, count: rows };
            let us = [RowsKernel::InOrder, RowsKernel::Chunks(scratch.span())]
                .map(|kernel| microseconds(&queue, 2, |_| layer.op.rows(&queue, &all, kernel)));
            println!("{name}: rows {rows} x {tokens}: {:.1} us in order, {:.1} us in chunks", us[0], us[1]);
        }
    }
}
