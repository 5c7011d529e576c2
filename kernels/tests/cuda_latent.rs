//! Compares attention over latent vectors, and what goes before and behind it, with the plain formulas, and with itself beside other
//! tokens.

mod gpu;

use std::ops::Range;
use std::sync::Arc;

use gpu::{Random, assert_close, floats, poisoned};
use half::bf16;
use kernels::cuda::decode_division::Division;
use kernels::cuda::latent_attention::{
    LatentAttention, LatentKernel, LatentRows, LatentSplits, LatentWorkspace, latent_attention, latent_attention_split,
};
use kernels::cuda::latent_cache::{LatentNorm, RANKS, ROTARY, Rotation, latent_cache, width};
use kernels::cuda::latent_product::{LatentUp, latent_queries, latent_values};
use kernels::cuda::rope_cache::QueryScale;
use kernels::cuda::{DeviceBuffer, Gpu, Queue};
use kernels::reference;

const EPS: f32 = 1e-6;
const POSITIONS: usize = 4096;
/// About what queries of a deviation of 1 need for scores of a deviation of 1.
const SCALE: f32 = 0.042;

/// Angles of all positions.
struct Angles {
    cos: Vec<f32>,
    sin: Vec<f32>,
    cos_on: DeviceBuffer,
    sin_on: DeviceBuffer,
    is_interleaved: bool,
}

impl Angles {
    fn new(gpu: &Arc<Gpu>, is_interleaved: bool) -> Self {
        let half = ROTARY / 2;
        let angle = |i: usize| (i / half) as f64 * 1e4f64.powf(-((i % half) as f64) / half as f64);
        let table = |of: fn(f64) -> f64| (0..POSITIONS * half).map(|i| of(angle(i)) as f32).collect::<Vec<f32>>();
        let (cos, sin) = (table(f64::cos), table(f64::sin));
        let upload = |table: &[f32]| DeviceBuffer::from_slice(gpu, table).expect("memory");
        Self { cos_on: upload(&cos), sin_on: upload(&sin), cos, sin, is_interleaved }
    }

    fn rotation(&self, positions: &DeviceBuffer) -> Rotation {
        let (cos, sin) = (self.cos_on.span(), self.sin_on.span());
        let (positions, is_interleaved) = (positions.span(), self.is_interleaved);
        Rotation { cos, sin, positions, is_interleaved, query_scale: None }
    }

    fn rotated(&self, x: &[f32], position: u32) -> Vec<f32> {
        let half = ROTARY / 2;
        let mut out = x.to_vec();
        for pair in 0..half {
            let (a, b) = if self.is_interleaved { (2 * pair, 2 * pair + 1) } else { (pair, pair + half) };
            let at = position as usize * half + pair;
            let (cos, sin) = (self.cos[at], self.sin[at]);
            (out[a], out[b]) = (x[a] * cos - x[b] * sin, x[b] * cos + x[a] * sin);
        }
        out
    }
}

/// Each case with both ranks.
fn with_ranks<T: Copy>(cases: &[T]) -> Vec<(usize, T)> {
    RANKS.into_iter().flat_map(|rank| cases.iter().map(move |&case| (rank, case))).collect()
}

fn upload<T: bytemuck::Pod>(gpu: &Arc<Gpu>, values: &[T]) -> DeviceBuffer {
    DeviceBuffer::from_slice(gpu, values).expect("memory")
}

fn read(buffer: &DeviceBuffer, count: usize) -> Vec<f32> {
    floats(&buffer.span().read::<bf16>(count).expect("a copy"))
}

#[test]
fn rows_of_the_cache_are_normed_and_rotated_and_padding_writes_none() {
    let Some((gpu, q)) = gpu::open() else { return };
    let mut random = Random::new(1);
    for (rank, is_interleaved) in with_ranks(&[false, true]) {
        let angles = Angles::new(&gpu, is_interleaved);
        let (tokens, num_rows, width) = (37, 64, width(rank));
        let positions: Vec<u32> = (0..tokens).map(|_| random.below(POSITIONS) as u32).collect();
        let mut slots: Vec<u32> = random.shuffled(num_rows)[..tokens].to_vec();
        slots[5] = u32::MAX;
        let latents = random.bf16s(tokens * width, 3.0);
        let gain = random.bf16s(rank, 1.0);
        let cache = poisoned::<bf16>(&gpu, &q, num_rows * width);
        let [slots_on, positions_on] = [&slots, &positions].map(|values| upload(&gpu, values));
        let (latents_on, gain_on) = (upload(&gpu, &latents), upload(&gpu, &gain));
        let norm = LatentNorm { rank, gain: gain_on.span(), eps: EPS };
        let rotation = angles.rotation(&positions_on);
        latent_cache(&q, cache.span(), latents_on.span(), norm, slots_on.span(), &rotation, tokens).expect("a launch");
        q.wait().expect("the kernel runs");
        let found = read(&cache, num_rows * width);
        for (slot, row) in found.chunks_exact(width).enumerate() {
            let Some(token) = slots.iter().position(|&other| other as usize == slot) else {
                assert!(row.iter().all(|x| x.is_nan()), "row {slot} was written");
                continue;
            };
            let from = floats(&latents[token * width..(token + 1) * width]);
            let normed = reference::rms_norm(&from[..rank], &floats(&gain), EPS);
            let expected = [normed, angles.rotated(&from[rank..], positions[token])].concat();
            assert_close("row", row, &expected, 2f32.powi(-8), 1e-5);
        }
    }
}

#[test]
fn products_with_keys_and_values_are_those_of_each_head() {
    let Some((gpu, q)) = gpu::open() else { return };
    let mut random = Random::new(2);
    let shapes = [[1, 8, 8], [3, 40, 72], [16, 128, 128], [5, 192, 128], [2, 136, 200]];
    for (rank, [num_heads, key_dim, value_dim]) in with_ranks(&shapes) {
        let width = width(rank);
        for tokens in [1, 16, 17, 70, 200] {
            let angles = Angles::new(&gpu, tokens % 2 == 0);
            let weight = random.bf16s(num_heads * (key_dim + value_dim) * rank, 0.05);
            let queries = random.bf16s(tokens * num_heads * (key_dim + ROTARY), 1.0);
            let positions: Vec<u32> = (0..tokens).map(|_| random.below(POSITIONS) as u32).collect();
            let (weight_on, queries_on, positions_on) =
                (upload(&gpu, &weight), upload(&gpu, &queries), upload(&gpu, &positions));
            let rows = poisoned::<bf16>(&gpu, &q, tokens * num_heads * width);
            let out = poisoned::<bf16>(&gpu, &q, tokens * num_heads * value_dim);
            let up = LatentUp { weight: weight_on.span(), rank, num_heads, key_dim, value_dim };
            let query_scale = (tokens % 3 > 0).then_some(QueryScale { beta: 0.3, period: 100, offset: 1 });
            let rotation = Rotation { query_scale, ..angles.rotation(&positions_on) };
            latent_queries(&q, rows.span(), queries_on.span(), &up, &rotation, tokens).expect("a launch");
            latent_values(&q, out.span(), rows.span(), &up, tokens).expect("a launch");
            q.wait().expect("the kernels run");
            let (rows, out) = (read(&rows, tokens * num_heads * width), read(&out, tokens * num_heads * value_dim));
            let weight = floats(&weight);
            for head in 0..num_heads {
                let own = &weight[head * (key_dim + value_dim) * rank..][..(key_dim + value_dim) * rank];
                let (keys, values) = own.split_at(key_dim * rank);
                let turned: Vec<f32> = (0..rank).flat_map(|r| (0..key_dim).map(move |k| keys[k * rank + r])).collect();
                for token in [0, tokens / 2, tokens - 1] {
                    let at = token * num_heads + head;
                    let query = floats(&queries[at * (key_dim + ROTARY)..(at + 1) * (key_dim + ROTARY)]);
                    let rotated = angles.rotated(&query[key_dim..], positions[token]);
                    let product = reference::linear(&query[..key_dim], &turned, None, key_dim);
                    let row = &rows[at * width..(at + 1) * width];
                    let periods = ((positions[token] + 1) / 100) as f32;
                    let factor = query_scale.map_or(1.0, |scale| 1.0 + scale.beta * periods.ln_1p());
                    let expected: Vec<f32> = product.iter().chain(&rotated).map(|x| x * factor).collect();
                    let what =
                        format!("{rank}, {num_heads} heads of {key_dim} and {value_dim}, token {token} of {tokens}");
                    assert_close(&format!("{what}: keys"), row, &expected, 2f32.powi(-8), 1e-4 * factor);
                    let product = reference::linear(&row[..rank], values, None, rank);
                    let found = &out[at * value_dim..(at + 1) * value_dim];
                    assert_close(&format!("{what}: values"), found, &product, 2f32.powi(-8), 1e-4);
                }
            }
        }
    }
}

/// Rows of given lengths in shuffled blocks. Unused positions are NaN.
struct CachedRows {
    lens: Vec<usize>,
    block_size: usize,
    max_blocks: usize,
    rank: usize,
    rows: Vec<Vec<f32>>, // [len, width] each
    cache: DeviceBuffer,
    tables: DeviceBuffer,
    lens_on: DeviceBuffer,
}

impl CachedRows {
    fn new(gpu: &Arc<Gpu>, random: &mut Random, [rank, block_size]: [usize; 2], lens: &[usize]) -> Self {
        let width = width(rank);
        let blocks_of = |len: &usize| len.div_ceil(block_size);
        let num_blocks = lens.iter().map(blocks_of).sum::<usize>() + 3;
        let max_blocks = lens.iter().map(blocks_of).max().unwrap_or(0) + 1;
        let mut order = random.shuffled(num_blocks).into_iter();
        let mut tables = vec![0u32; lens.len() * max_blocks];
        let mut cache = vec![bf16::NAN; num_blocks * block_size * width];
        let mut rows = Vec::new();
        for (row, len) in lens.iter().enumerate() {
            let values = random.bf16s(len * width, 1.0);
            for (index, values) in values.chunks(block_size * width).enumerate() {
                let block = order.next().expect("enough blocks");
                tables[row * max_blocks + index] = block;
                let start = block as usize * block_size * width;
                cache[start..start + values.len()].copy_from_slice(values);
            }
            rows.push(floats(&values));
        }
        let lens_on: Vec<u32> = lens.iter().map(|&len| len as u32).collect();
        Self {
            lens: lens.to_vec(),
            block_size,
            max_blocks,
            rank,
            rows,
            cache: upload(gpu, &cache),
            tables: upload(gpu, &tables),
            lens_on: upload(gpu, &lens_on),
        }
    }

    /// Attention of the last `chunks[r]` positions of each row, of which tokens `first..first + count` of all are computed; each
    /// row has one without `chunks`. Compares some of the queries with the formula.
    fn check(
        &self,
        (gpu, q): (&Arc<Gpu>, &Queue),
        random: &mut Random,
        num_heads: usize,
        chunks: Option<&[usize]>,
        [first, count]: [usize; 2],
        splits: Option<LatentSplits>,
    ) {
        let (rank, width) = (self.rank, width(self.rank));
        let ones = vec![1; self.lens.len()];
        let of_rows = chunks.unwrap_or(&ones);
        let mut starts = vec![0u32];
        of_rows.iter().for_each(|&tokens| starts.push(starts[starts.len() - 1] + tokens as u32));
        let queries = random.bf16s(count * num_heads * width, 1.0);
        let (rows, starts_on) = (upload(gpu, &queries), upload(gpu, &starts));
        let workspace = LatentWorkspace::new(gpu, Division::ByRows, rank).expect("memory");
        let attention = LatentAttention {
            rows: rows.span(),
            cache: self.cache.span(),
            rank: self.rank,
            step: LatentRows {
                block_tables: self.tables.span(),
                max_blocks: self.max_blocks,
                context_lens: self.lens_on.span(),
                row_starts: chunks.map(|_| starts_on.span()),
                num_rows: self.lens.len(),
                first_token: first,
                num_tokens: count,
                max_chunk: *of_rows.iter().max().expect("a row"),
            },
            num_heads,
            block_size: self.block_size,
            scale: SCALE,
            workspace: &workspace,
        };
        match splits {
            Some(splits) => latent_attention_split(q, &attention, splits),
            None => latent_attention(q, &attention),
        }
        .expect("a launch");
        q.wait().expect("the kernels run");
        let found = read(&rows, count * num_heads * width);
        assert_eq!(found.len(), queries.len());
        // All queries of small tests, some of large ones.
        let work: usize = self.lens.iter().zip(of_rows).map(|(len, tokens)| len * tokens * num_heads).sum();
        let step = (work / 60_000).max(1) | 1;
        for (row, range) in starts.windows(2).enumerate() {
            let all = (range[0] as usize).max(first)..(range[1] as usize).min(first + count);
            for index in (all.start * num_heads..all.end * num_heads).step_by(step) {
                let token = index / num_heads;
                let len = (self.lens[row] + token + 1).saturating_sub(range[1] as usize);
                let at = (index - first * num_heads) * width;
                let own = &found[at..at + rank];
                let what =
                    format!("{rank}, {num_heads} heads, {splits:?}, row {row}, token {token} of {len} positions");
                if self.lens[row] == 0 {
                    assert!(own.iter().all(|x| *x == 0.0), "{what}");
                    continue;
                }
                let query = floats(&queries[at..at + width]);
                let seen = &self.rows[row][..len * width];
                let sizes: Vec<f32> = seen.iter().map(|x| x.abs()).collect();
                let scores = reference::Scores { scale: SCALE, slope: 0.0, cap: None, sink: None };
                let expected = reference::attention_with(&query, seen, seen, scores);
                let scores = reference::Scores { scale: SCALE, slope: 0.0, cap: None, sink: None };
                let weighted = reference::attention_with(&query, seen, &sizes, scores);
                for (d, own) in own.iter().enumerate() {
                    let tolerance = (expected[d].abs() + weighted[d]) * 2f32.powi(-8) + 1e-5;
                    let expected = expected[d];
                    assert!((own - expected).abs() <= tolerance, "{what}, element {d}: {own}, not {expected}");
                }
            }
        }
    }
}

impl CachedRows {
    /// Attention with [`Division::ByLength`] of a step of positions of rows, whose queries are `queries[row]`, those of the last
    /// positions. Each position is a decode if `is_decode`.
    fn fixed(
        &self,
        (gpu, q): (&Arc<Gpu>, &Queue),
        num_heads: usize,
        queries: &[Vec<bf16>],
        step: &[(usize, Range<usize>)],
        is_decode: bool,
    ) -> Vec<Vec<bf16>> {
        let (rank, row_width) = (self.rank, width(self.rank));
        let width = num_heads * row_width;
        let tables: Vec<u32> = self.tables.span().read(self.lens.len() * self.max_blocks).expect("a copy");
        let (mut rows, mut own_tables, mut lens, mut starts) = (vec![], vec![], vec![], vec![0u32]);
        for (row, positions) in step {
            let first = self.lens[*row] - queries[*row].len() / width;
            rows.extend_from_slice(&queries[*row][(positions.start - first) * width..(positions.end - first) * width]);
            for end in if is_decode { positions.start + 1..=positions.end } else { positions.end..=positions.end } {
                own_tables.extend_from_slice(&tables[row * self.max_blocks..(row + 1) * self.max_blocks]);
                lens.push(end as u32);
                starts.push((rows.len() / width - (positions.end - end)) as u32);
            }
        }
        let tokens = rows.len() / width;
        let rows_on = upload(gpu, &rows);
        let [tables_on, lens_on, starts_on] = [&own_tables, &lens, &starts].map(|values| upload(gpu, values));
        let workspace = LatentWorkspace::new(gpu, Division::ByLength, self.rank).expect("memory");
        let attention = LatentAttention {
            rows: rows_on.span(),
            cache: self.cache.span(),
            rank: self.rank,
            step: LatentRows {
                block_tables: tables_on.span(),
                max_blocks: self.max_blocks,
                context_lens: lens_on.span(),
                row_starts: (!is_decode).then_some(starts_on.span()),
                num_rows: lens.len(),
                first_token: 0,
                num_tokens: tokens,
                max_chunk: starts.windows(2).map(|pair| (pair[1] - pair[0]) as usize).max().expect("a row"),
            },
            num_heads,
            block_size: self.block_size,
            scale: SCALE,
            workspace: &workspace,
        };
        latent_attention(q, &attention).expect("a launch");
        q.wait().expect("the kernels run");
        let found: Vec<bf16> = rows_on.span().read(tokens * width).expect("a copy");
        let results = found.chunks_exact(row_width).flat_map(|row| &row[..rank]).copied().collect::<Vec<_>>();
        let mut results = results.as_slice();
        let mut take = |tokens: usize| results.split_off(..tokens * num_heads * rank).expect("a part").to_vec();
        step.iter().map(|(_, positions)| take(positions.len())).collect()
    }
}

#[test]
fn a_token_has_the_same_bits_beside_any_others_and_in_any_chunk() {
    let Some((gpu, q)) = gpu::open() else { return };
    let mut random = Random::new(7);
    let lens = [300, 33, 2500, 127];
    for (rank, num_heads) in with_ranks(&[3, 16, 20, 128]) {
        let cached = CachedRows::new(&gpu, &mut random, [rank, 64], &lens);
        let width = num_heads * width(rank);
        let firsts = lens.map(|len: usize| len.saturating_sub(70));
        let queries: Vec<Vec<bf16>> =
            lens.iter().zip(firsts).map(|(len, first)| random.bf16s((len - first) * width, 1.0)).collect();
        let run =
            |step: &[(usize, Range<usize>)], is_decode| cached.fixed((&gpu, &q), num_heads, &queries, step, is_decode);
        let all: Vec<(usize, Range<usize>)> = (0..lens.len()).map(|row| (row, firsts[row]..lens[row])).collect();
        for is_decode in [false, true] {
            let together = run(&all, is_decode);
            for (row, first) in firsts.into_iter().enumerate() {
                let len = lens[row];
                for cut in [vec![first, len], vec![first, first + 1, first + 18, len - 1, len]] {
                    let parts = cut.windows(2).flat_map(|pair| run(&[(row, pair[0]..pair[1])], is_decode));
                    let alone = parts.collect::<Vec<_>>().concat();
                    let differing =
                        alone.iter().zip(&together[row]).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
                    let what = format!("{num_heads} heads, row {row} cut at {cut:?}, decodes {is_decode}");
                    assert_eq!((alone.len(), differing), (together[row].len(), 0), "{what}");
                    assert!(alone.iter().all(|x| x.is_finite()), "{what}");
                }
            }
        }
    }
}

#[test]
fn products_of_a_token_have_the_same_bits_beside_any_others() {
    let Some((gpu, q)) = gpu::open() else { return };
    let mut random = Random::new(8);
    for (rank, [num_heads, key_dim, value_dim]) in with_ranks(&[[16, 128, 128], [3, 40, 72], [5, 192, 128]]) {
        let width = width(rank);
        let tokens = 100;
        let angles = Angles::new(&gpu, true);
        let weight = upload(&gpu, &random.bf16s(num_heads * (key_dim + value_dim) * rank, 0.05));
        let query_width = num_heads * (key_dim + ROTARY);
        let queries = random.bf16s(tokens * query_width, 1.0);
        let up = LatentUp { weight: weight.span(), rank, num_heads, key_dim, value_dim };
        let run = |own: Range<usize>| {
            let count = own.len();
            let positions: Vec<u32> = own.clone().map(|token| token as u32).collect();
            let positions = upload(&gpu, &positions);
            let queries = upload(&gpu, &queries[own.start * query_width..own.end * query_width]);
            let rows = poisoned::<bf16>(&gpu, &q, count * num_heads * width);
            let out = poisoned::<bf16>(&gpu, &q, count * num_heads * value_dim);
            latent_queries(&q, rows.span(), queries.span(), &up, &angles.rotation(&positions), count)
                .expect("a launch");
            latent_values(&q, out.span(), rows.span(), &up, count).expect("a launch");
            q.wait().expect("the kernels run");
            let bits = |buffer: &DeviceBuffer, len| buffer.span().read::<u16>(len).expect("a copy");
            [bits(&rows, count * num_heads * width), bits(&out, count * num_heads * value_dim)]
        };
        let whole = run(0..tokens);
        for cut in [[0, 1, 17, 100], [0, 16, 33, 100]] {
            let parts: Vec<_> = cut.windows(2).map(|pair| run(pair[0]..pair[1])).collect();
            for (index, name) in ["keys", "values"].iter().enumerate() {
                let joined: Vec<u16> = parts.iter().flat_map(|part| &part[index]).copied().collect();
                assert!(
                    joined == whole[index],
                    "{name} of {num_heads} heads of {key_dim} and {value_dim}, cut at {cut:?}"
                );
            }
        }
    }
}

fn kernels_on(gpu: &Gpu) -> Vec<LatentKernel> {
    let all = [LatentKernel::Small, LatentKernel::Large, LatentKernel::Hopper];
    all.into_iter().filter(|kernel| kernel.is_on(gpu)).collect()
}

#[test]
fn decoding_rows_of_any_length_attend_as_the_formula_says() {
    let Some((gpu, q)) = gpu::open() else { return };
    let mut random = Random::new(3);
    let rows: [&[usize]; 4] = [&[1], &[5, 0, 17, 16, 64], &[255, 256, 257], &[1000, 3, 2049, 700]];
    let cases: Vec<(usize, &[usize])> = [16, 64, 32, 128].into_iter().zip(rows).collect();
    for (rank, (block_size, lens)) in with_ranks(&cases) {
        let cached = CachedRows::new(&gpu, &mut random, [rank, block_size], lens);
        let all = [0, lens.len()];
        for num_heads in [1, 2, 8, 16, 20, 64, 128] {
            for kernel in kernels_on(&gpu) {
                for (splits, min_chunk) in [(1, 64), (3, 64), (7, 128)] {
                    let splits = LatentSplits { kernel, splits, min_chunk };
                    cached.check((&gpu, &q), &mut random, num_heads, None, all, Some(splits));
                }
            }
            cached.check((&gpu, &q), &mut random, num_heads, None, all, None);
        }
    }
}

#[test]
fn many_rows_and_long_contexts_attend_as_the_formula_says() {
    let Some((gpu, q)) = gpu::open() else { return };
    let mut random = Random::new(4);
    let many: Vec<usize> = (0..200).map(|row| row * 3 % 150 + 1).collect();
    let cases: [(&[usize], usize); 4] = [(&many, 16), (&many, 128), (&[40_001], 16), (&[40_000, 12_345], 128)];
    for (rank, (lens, num_heads)) in with_ranks(&cases) {
        let cached = CachedRows::new(&gpu, &mut random, [rank, 64], lens);
        cached.check((&gpu, &q), &mut random, num_heads, None, [0, lens.len()], None);
    }
}

#[test]
fn chunks_of_new_tokens_attend_to_what_is_before_them() {
    let Some((gpu, q)) = gpu::open() else { return };
    let mut random = Random::new(5);
    let rows: [(&[usize], &[usize]); 4] =
        [(&[1], &[1]), (&[70], &[70]), (&[300, 33, 129], &[200, 33, 1]), (&[2100, 640], &[40, 513])];
    let cases: Vec<_> = [16, 64, 32, 128].into_iter().zip(rows).collect();
    for (rank, (block_size, (lens, chunks))) in with_ranks(&cases) {
        let cached = CachedRows::new(&gpu, &mut random, [rank, block_size], lens);
        let tokens: usize = chunks.iter().sum();
        for num_heads in [1, 3, 16, 128] {
            for kernel in kernels_on(&gpu) {
                let whole = LatentSplits { kernel, splits: 1, min_chunk: 64 };
                cached.check((&gpu, &q), &mut random, num_heads, Some(chunks), [0, tokens], Some(whole));
                // Some of the tokens, as where the buffer of queries is small.
                let part = [tokens / 3, tokens.div_ceil(2)];
                cached.check((&gpu, &q), &mut random, num_heads, Some(chunks), part, Some(whole));
            }
            cached.check((&gpu, &q), &mut random, num_heads, Some(chunks), [0, tokens], None);
        }
        let few = LatentSplits { kernel: LatentKernel::Small, splits: 4, min_chunk: 64 };
        if tokens <= 70 {
            cached.check((&gpu, &q), &mut random, 3, Some(chunks), [0, tokens], Some(few));
        }
    }
}

#[test]
fn all_steps_together_are_attention_over_keys_and_values() {
    let Some((gpu, q)) = gpu::open() else { return };
    RANKS.into_iter().for_each(|rank| check_all_steps((&gpu, &q), rank));
}

fn check_all_steps((gpu, q): (&Arc<Gpu>, &Queue), rank: usize) {
    let mut random = Random::new(6);
    let (num_heads, key_dim, value_dim, tokens, block_size, width) = (3, 128, 128, 50, 16, width(rank));
    let angles = Angles::new(gpu, true);
    let weight = random.bf16s(num_heads * (key_dim + value_dim) * rank, 0.05);
    let queries = random.bf16s(tokens * num_heads * (key_dim + ROTARY), 1.0);
    let latents = random.bf16s(tokens * width, 1.0);
    let gain = random.bf16s(rank, 1.0);
    let table: Vec<u32> = vec![3, 0, 4, 1];
    let positions: Vec<u32> = (0..tokens as u32).collect();
    let slots: Vec<u32> = positions.iter().map(|p| table[*p as usize / block_size] * 16 + p % 16).collect();
    let on = |values: &[u32]| upload(gpu, values);
    let (table, positions_on, slots, lens, starts) =
        (on(&table), on(&positions), on(&slots), on(&[tokens as u32]), on(&[0, tokens as u32]));
    let [weight_on, queries_on, latents_on, gain_on] =
        [&weight, &queries, &latents, &gain].map(|values| upload(gpu, values));
    let cache = poisoned::<bf16>(gpu, q, 5 * block_size * width);
    let rows = poisoned::<bf16>(gpu, q, tokens * num_heads * width);
    let out = poisoned::<bf16>(gpu, q, tokens * num_heads * value_dim);
    let workspace = LatentWorkspace::new(gpu, Division::ByRows, rank).expect("memory");
    let rotation = angles.rotation(&positions_on);
    let norm = LatentNorm { rank, gain: gain_on.span(), eps: EPS };
    let up = LatentUp { weight: weight_on.span(), rank, num_heads, key_dim, value_dim };
    latent_cache(q, cache.span(), latents_on.span(), norm, slots.span(), &rotation, tokens).expect("a launch");
    latent_queries(q, rows.span(), queries_on.span(), &up, &rotation, tokens).expect("a launch");
    let attention = LatentAttention {
        rows: rows.span(),
        cache: cache.span(),
        rank,
        step: LatentRows {
            block_tables: table.span(),
            max_blocks: 4,
            context_lens: lens.span(),
            row_starts: Some(starts.span()),
            num_rows: 1,
            first_token: 0,
            num_tokens: tokens,
            max_chunk: tokens,
        },
        num_heads,
        block_size,
        scale: 0.07,
        workspace: &workspace,
    };
    latent_attention(q, &attention).expect("a launch");
    latent_values(q, out.span(), rows.span(), &up, tokens).expect("a launch");
    q.wait().expect("the kernels run");
    let found = read(&out, tokens * num_heads * value_dim);
    let row = |(position, row): (usize, &[f32])| {
        let normed = reference::rms_norm(&row[..rank], &floats(&gain), EPS);
        [normed, angles.rotated(&row[rank..], position as u32)].concat()
    };
    let latents: Vec<f32> = floats(&latents).chunks_exact(width).enumerate().flat_map(row).collect();
    let (weight, queries) = (floats(&weight), floats(&queries));
    for (index, query) in queries.chunks_exact(key_dim + ROTARY).enumerate() {
        let (position, head) = (index / num_heads, index % num_heads);
        let query = [query[..key_dim].to_vec(), angles.rotated(&query[key_dim..], position as u32)].concat();
        let own = &weight[head * (key_dim + value_dim) * rank..][..(key_dim + value_dim) * rank];
        let (keys, values) = own.split_at(key_dim * rank);
        let seen = &latents[..(position + 1) * width];
        let expected = reference::latent_attention(&query, seen, rank, [keys, values], 0.07);
        // Outputs have a size of about 1; each of four roundings changes sums of many terms by less than one part in 256 of it.
        assert_close("out", &found[index * value_dim..(index + 1) * value_dim], &expected, 0.01, 0.03);
    }
}
