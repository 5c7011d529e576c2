//! Compares the CPU's attention over latent vectors with the reference, and with itself in other chunks.

mod cpu;

use bytemuck::cast_slice;
use cpu::random;
use half::bf16;
use kernels::cpu::{
    AttentionRow, KvType, LatentAttention, LatentCache, LatentSizes, LatentTokens, Matrix, Pool, WeightType,
};
use kernels::reference;

const EPS: f32 = 1e-6;
const BLOCK: usize = 16;
const POSITIONS: usize = 70;

struct Layer {
    sizes: LatentSizes,
    num_heads: usize,
    norm: Vec<f32>,
    weights: Vec<f32>, // [H (key_dim + value_dim), rank]
    up: Matrix,
    angles: [Vec<f32>; 2],
    latents: Vec<f32>, // [positions, width]
    q: Vec<f32>,       // [positions, H (key_dim + rotary_dim)]
}

impl Layer {
    fn new(num_heads: usize, [rank, rotary_dim, key_dim, value_dim]: [usize; 4], is_interleaved: bool) -> Self {
        let sizes = LatentSizes { rank, rotary_dim, key_dim, value_dim, is_interleaved };
        let rows = num_heads * (key_dim + value_dim);
        let weights: Vec<f32> = random(1, rows * rank).iter().map(|x| x / 8.0).collect();
        let mut up = Matrix::new(WeightType::F32, rank);
        up.stack(cast_slice::<f32, u8>(&weights).to_vec(), rows, rank * 4);
        let angle = |i: usize| (i / (rotary_dim / 2)) as f32 * 0.3f32.powi((i % (rotary_dim / 2)) as i32);
        let angles = [f32::cos, f32::sin].map(|of| (0..POSITIONS * rotary_dim / 2).map(|i| of(angle(i))).collect());
        let norm = random(2, rank).iter().map(|x| 1.0 + x / 4.0).collect();
        let latents = random(3, POSITIONS * sizes.width());
        let q = random(4, POSITIONS * num_heads * (key_dim + rotary_dim));
        Self { sizes, num_heads, norm, weights, up, angles, latents, q }
    }

    /// The rotated pairs of a position.
    fn rotated(&self, x: &[f32], position: usize) -> Vec<f32> {
        let half = x.len() / 2;
        let mut out = x.to_vec();
        for pair in 0..half {
            let (a, b) = if self.sizes.is_interleaved { (2 * pair, 2 * pair + 1) } else { (pair, pair + half) };
            let [cos, sin] = [0, 1].map(|part| self.angles[part][position * half + pair]);
            (out[a], out[b]) = (x[a] * cos - x[b] * sin, x[b] * cos + x[a] * sin);
        }
        out
    }

    /// The rows that the cache should have.
    fn rows(&self, kv_type: KvType) -> Vec<f32> {
        let row = |(position, row): (usize, &[f32])| {
            let (latent, key) = row.split_at(self.sizes.rank);
            let normed = reference::rms_norm(latent, &self.norm, EPS);
            [normed, self.rotated(key, position)].concat()
        };
        let rows = self.latents.chunks_exact(self.sizes.width()).enumerate().flat_map(row);
        let kept = |x: f32| if kv_type == KvType::Bf16 { bf16::from_f32(x).to_f32() } else { x };
        rows.map(kept).collect()
    }

    fn expected(&self, kv_type: KvType) -> Vec<f32> {
        let LatentSizes { rank, rotary_dim, key_dim, value_dim, .. } = self.sizes;
        let rows = self.rows(kv_type);
        let mut expected = Vec::new();
        for (index, q) in self.q.chunks_exact(key_dim + rotary_dim).enumerate() {
            let (position, head) = (index / self.num_heads, index % self.num_heads);
            let q = [q[..key_dim].to_vec(), self.rotated(&q[key_dim..], position)].concat();
            let own = &self.weights[head * (key_dim + value_dim) * rank..][..(key_dim + value_dim) * rank];
            let (keys, values) = own.split_at(key_dim * rank);
            let seen = &rows[..(position + 1) * self.sizes.width()];
            expected.extend(reference::latent_attention(&q, seen, rank, [keys, values], 0.2));
        }
        expected
    }

    /// A sequence in blocks that are not in order, computed in chunks.
    fn run(&self, kv_type: KvType, chunks: &[usize]) -> Vec<f32> {
        let table = [7, 2, 0, 5, 3];
        let mut cache = LatentCache::new(kv_type, 8, BLOCK, self.sizes.width());
        let (mut pool, mut out, mut first) = (Pool::new(2), Vec::new(), 0);
        let angles = [&self.angles[0][..], &self.angles[1][..]];
        for &num_tokens in chunks {
            let tokens = first..first + num_tokens;
            let positions: Vec<u32> = tokens.clone().map(|position| position as u32).collect();
            let slots: Vec<u32> =
                tokens.clone().map(|p| table[p / BLOCK] * BLOCK as u32 + (p % BLOCK) as u32).collect();
            let width = self.sizes.width();
            let mut latents = self.latents[tokens.start * width..tokens.end * width].to_vec();
            let written = LatentTokens { positions: &positions, slots: &slots, angles };
            cache.write(&mut latents, &self.sizes, (&self.norm, EPS), &written);
            let stride = self.num_heads * (self.sizes.key_dim + self.sizes.rotary_dim);
            let mut part = vec![f32::NAN; num_tokens * self.num_heads * self.sizes.value_dim];
            let row = AttentionRow { first_token: 0, num_tokens, first_position: first, block_table: &table };
            let (sizes, num_heads, up) = (self.sizes, self.num_heads, &self.up);
            let attention = LatentAttention { sizes, num_heads, scale: 0.2, up, angles };
            attention.run(&mut pool, &mut part, &self.q[tokens.start * stride..tokens.end * stride], &[row], &cache);
            out.extend(part);
            first += num_tokens;
        }
        out
    }
}

#[test]
fn attention_over_latent_vectors_is_that_over_keys_and_values() {
    for (num_heads, sizes) in [(1, [16, 8, 8, 8]), (5, [32, 16, 24, 40]), (16, [48, 8, 16, 24])] {
        for is_interleaved in [false, true] {
            let layer = Layer::new(num_heads, sizes, is_interleaved);
            for kv_type in [KvType::F32, KvType::Bf16] {
                let expected = layer.expected(kv_type);
                let found = layer.run(kv_type, &[POSITIONS]);
                assert_eq!(found.len(), expected.len());
                let worst = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                // A row of the cache may be rounded to the other side.
                let allowed = if kv_type == KvType::F32 { 1e-4 } else { 5e-3 };
                assert!(worst < allowed, "{num_heads} heads of {sizes:?}, {kv_type:?}: off by {worst}");
            }
        }
    }
}

#[test]
fn a_token_has_the_same_bits_in_any_chunks() {
    let layer = Layer::new(5, [32, 16, 24, 40], true);
    let whole = layer.run(KvType::Bf16, &[POSITIONS]);
    for chunks in [&[1; POSITIONS][..], &[3, 20, 1, 7, 39], &[64, 6]] {
        assert!(layer.run(KvType::Bf16, chunks) == whole, "{chunks:?}");
    }
}
