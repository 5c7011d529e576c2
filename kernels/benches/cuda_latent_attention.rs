//! Attention over latent vectors on the first GPU: decode compared with the memory bandwidth, prefill in TFLOP/s, and the products
//! with the weights of keys and values.
//!
//! `cargo bench -p kernels --bench cuda_latent_attention [-- READ_TB_S]`; the default bandwidth is 4.47 TB/s, an H200's.

mod gpu;

use std::sync::Arc;

use gpu::{ROTATED_BYTES, microseconds, random};
use kernels::cuda::decode_division::Division;
use kernels::cuda::latent_attention::{
    LatentAttention, LatentKernel, LatentRows, LatentSplits, LatentWorkspace, latent_attention_split,
};
use kernels::cuda::latent_cache::{ROTARY, Rotation, width};
use kernels::cuda::latent_product::{LatentUp, latent_queries, latent_values};
use kernels::cuda::{DeviceBuffer, Gpu, Queue};

const RANK: usize = 512;
const WIDTH: usize = width(RANK);
const BLOCK_SIZE: usize = 64;
const HEADS: [usize; 3] = [16, 32, 128];
/// Number of rows, and positions of each row.
const DECODES: [(usize, usize); 8] =
    [(1, 1024), (1, 8192), (1, 65536), (8, 1024), (8, 8192), (32, 1024), (32, 8192), (128, 2048)];
/// Tokens of a prompt.
const PREFILLS: [usize; 3] = [512, 2048, 8192];
const TOKENS: [usize; 4] = [1, 32, 128, 1024];

/// Rows of equal length over a cache of one layer, with blocks in order.
struct Rows {
    cache: DeviceBuffer,
    tables: DeviceBuffer,
    lens: DeviceBuffer,
    starts: DeviceBuffer,
    max_blocks: usize,
}

impl Rows {
    fn new(gpu: &Arc<Gpu>, [rows, len, tokens_each]: [usize; 3]) -> Self {
        let max_blocks = len.div_ceil(BLOCK_SIZE);
        let upload = |values: &[u32]| DeviceBuffer::from_slice(gpu, values).expect("memory");
        let tables: Vec<u32> = (0..(rows * max_blocks) as u32).collect();
        let starts: Vec<u32> = (0..=rows).map(|row| (row * tokens_each) as u32).collect();
        Self {
            cache: random(gpu, rows * max_blocks * BLOCK_SIZE * WIDTH),
            tables: upload(&tables),
            lens: upload(&vec![len as u32; rows]),
            starts: upload(&starts),
            max_blocks,
        }
    }

    fn step(&self, num_rows: usize, max_chunk: usize) -> LatentRows {
        LatentRows {
            block_tables: self.tables.span(),
            max_blocks: self.max_blocks,
            context_lens: self.lens.span(),
            row_starts: (max_chunk > 1).then(|| self.starts.span()),
            num_rows,
            first_token: 0,
            num_tokens: num_rows * max_chunk,
            max_chunk,
        }
    }
}

fn main() {
    let Some((gpu, queue)) = gpu::open() else { return };
    let read = std::env::args().find_map(|arg| arg.parse::<f64>().ok()).unwrap_or(4.47);
    println!("decode: us, TB/s, percent of the bandwidth, TFLOP/s; then us of other kernels and divisions");
    for num_heads in HEADS {
        DECODES.iter().for_each(|&(rows, len)| decode(&gpu, &queue, num_heads, [rows, len], read));
    }
    println!("prefill: us, TFLOP/s, us of other kernels");
    for num_heads in HEADS {
        PREFILLS.iter().for_each(|&len| prefill(&gpu, &queue, num_heads, len));
    }
    println!("products with keys, with values: us, TB/s of weights, TFLOP/s");
    for num_heads in HEADS {
        TOKENS.iter().for_each(|&tokens| products(&gpu, &queue, num_heads, tokens));
    }
}

fn kernels_on(gpu: &Gpu) -> Vec<LatentKernel> {
    let all = [LatentKernel::Small, LatentKernel::Large, LatentKernel::Hopper];
    all.into_iter().filter(|kernel| kernel.is_on(gpu)).collect()
}

fn decode(gpu: &Arc<Gpu>, queue: &Queue, num_heads: usize, [rows, len]: [usize; 2], read: f64) {
    let bytes = rows * len * WIDTH * 2;
    let copies = (ROTATED_BYTES / bytes).clamp(1, 12);
    let sets: Vec<Rows> = (0..copies).map(|_| Rows::new(gpu, [rows, len, 1])).collect();
    let queries = random(gpu, rows * num_heads * WIDTH);
    let workspace = LatentWorkspace::new(gpu, Division::ByRows, RANK).expect("memory");
    let us_of = |splits: LatentSplits| {
        microseconds(queue, 2 * copies, |i| {
            let set = &sets[i % copies];
            let attention = LatentAttention {
                rows: queries.span(),
                cache: set.cache.span(),
                rank: RANK,
                step: set.step(rows, 1),
                num_heads,
                block_size: BLOCK_SIZE,
                scale: 0.04,
                workspace: &workspace,
            };
            latent_attention_split(queue, &attention, splits)
        })
    };
    let own = LatentSplits::new(LatentKernel::for_rows(gpu, num_heads), rows, num_heads);
    let us = us_of(own);
    let flops = (2 * (2 * WIDTH - ROTARY) * num_heads * rows * len) as f64;
    let rate = bytes as f64 / us / 1e6;
    print!(
        "{num_heads:>4} heads {rows:>4} x {len:>5} {us:>8.1} {rate:>6.2} {:>4.0} {:>5.0}  {:?} x {}",
        100.0 * rate / read,
        flops / us / 1e6,
        own.kernel,
        own.splits
    );
    for kernel in kernels_on(gpu) {
        for splits in [own.splits / 2, own.splits, 2 * own.splits] {
            let other = LatentSplits { kernel, splits, ..own };
            let fits = splits == 1 || rows * num_heads.div_ceil(kernel.tile()) * splits * kernel.tile() <= 8192;
            if (1..=128).contains(&splits) && fits && other != own {
                print!("  {kernel:?} x {splits} {:.1}", us_of(other));
            }
        }
    }
    println!();
}

fn prefill(gpu: &Arc<Gpu>, queue: &Queue, num_heads: usize, len: usize) {
    let tokens = len.min(131_072 / num_heads);
    let set = Rows::new(gpu, [1, len, tokens]);
    let queries = random(gpu, tokens * num_heads * WIDTH);
    let workspace = LatentWorkspace::new(gpu, Division::ByRows, RANK).expect("memory");
    let attention = LatentAttention {
        rows: queries.span(),
        cache: set.cache.span(),
        rank: RANK,
        step: set.step(1, tokens),
        num_heads,
        block_size: BLOCK_SIZE,
        scale: 0.04,
        workspace: &workspace,
    };
    let us_of = |splits: LatentSplits| microseconds(queue, 1, |_| latent_attention_split(queue, &attention, splits));
    let own = LatentSplits::new(LatentKernel::for_rows(gpu, tokens * num_heads), 1, tokens * num_heads);
    let us = us_of(own);
    let seen = (tokens * (2 * len - tokens + 1)) as f64 / 2.0;
    let flops = (2 * (2 * WIDTH - ROTARY) * num_heads) as f64 * seen;
    print!("{num_heads:>4} heads, last {tokens:>5} of {len:>5} {us:>9.1} {:>5.0}", flops / us / 1e6);
    for kernel in kernels_on(gpu).into_iter().filter(|kernel| *kernel != own.kernel) {
        print!("  {kernel:?} {:.1}", us_of(LatentSplits::new(kernel, 1, tokens * num_heads)));
    }
    println!();
}

fn products(gpu: &Arc<Gpu>, queue: &Queue, num_heads: usize, tokens: usize) {
    let (key_dim, value_dim) = (128, 128);
    let bytes = num_heads * (key_dim + value_dim) * 512 * 2;
    let copies = (ROTATED_BYTES / bytes).clamp(1, 12);
    let weights: Vec<DeviceBuffer> = (0..copies).map(|_| random(gpu, bytes / 2)).collect();
    let queries = random(gpu, tokens * num_heads * (key_dim + ROTARY));
    let rows = random(gpu, tokens * num_heads * WIDTH);
    let out = random(gpu, tokens * num_heads * value_dim);
    let angles = DeviceBuffer::from_slice(gpu, &vec![0.5f32; 1024 * ROTARY / 2]).expect("memory");
    let positions: Vec<u32> = (0..tokens as u32).collect();
    let positions = DeviceBuffer::from_slice(gpu, &positions).expect("memory");
    let (cos, sin) = (angles.span(), angles.span());
    let rotation = Rotation { cos, sin, positions: positions.span(), is_interleaved: true, query_scale: None };
    let up = |i: usize| LatentUp { weight: weights[i % copies].span(), rank: RANK, num_heads, key_dim, value_dim };
    let keys = microseconds(queue, 2 * copies, |i| {
        latent_queries(queue, rows.span(), queries.span(), &up(i), &rotation, tokens)
    });
    let values = microseconds(queue, 2 * copies, |i| latent_values(queue, out.span(), rows.span(), &up(i), tokens));
    let flops = (2 * tokens * num_heads * 128 * 512) as f64;
    let rates = |us: f64| (bytes as f64 / 2.0 / us / 1e6, flops / us / 1e6);
    let ((keys_bytes, keys_flops), (values_bytes, values_flops)) = (rates(keys), rates(values));
    println!(
        "{num_heads:>4} heads, {tokens:>4} tokens  {keys:>7.1} {keys_bytes:>5.2} {keys_flops:>4.0}  {values:>7.1} {values_bytes:>5.2} {values_flops:>4.0}"
    );
}
