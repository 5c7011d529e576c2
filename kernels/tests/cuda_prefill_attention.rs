//! Compares prefill attention with the plain formula, for various head shapes, windows, and chunks with and without a
//! cached prefix.

mod gpu;
#[path = "gpu/attention.rs"]
mod rows;

use gpu::{Random, floats, poisoned};
use half::bf16;
use kernels::cuda::expand_blocks::{Contexts, ExpandedBlocks};
use kernels::cuda::prefill_attention::{
    PrefillAttention, PrefillRows, PrefillWorkspace, expanded_prefill_attention, prefill_attention,
    prefill_attention_simple,
};
use kernels::cuda::rope_cache::HeadShape;
use kernels::cuda::{CudaError, DeviceBuffer, Gpu, Queue};
use kernels::kv_codes::KvCodes;
use rows::{CachedRows, Kind};
use std::collections::VecDeque;
use std::sync::Arc;

const SHAPES: [[usize; 4]; 6] =
    [[2, 2, 128, 64], [4, 1, 128, 16], [3, 1, 64, 128], [2, 2, 64, 32], [2, 1, 96, 16], [2, 1, 256, 64]];

/// Chunk and length of each row.
const CHUNKS: [&[(usize, usize)]; 4] =
    [&[(1, 1)], &[(5, 5), (16, 300), (130, 130)], &[(257, 600), (1, 70), (64, 64), (128, 900)], &[(400, 400)]];

#[test]
fn chunks_attend_to_their_prefix_and_themselves_as_the_formula_says() {
    attend_as_the_formula_says(None);
}

#[test]
fn chunks_attend_to_codes_as_the_formula_says() {
    KvCodes::ALL.into_iter().for_each(|codes| attend_as_the_formula_says(Some(codes)));
}

/// How attention is queued.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Path {
    /// The kernel of all GPUs.
    Simple,
    Fast,
    /// Codes are expanded first.
    Expanded,
}

/// Bytes behind the memory of expanded blocks that must stay as they are.
const GUARD: usize = 4096;

/// Expands blocks into poisoned memory of exactly their size, and attends.
fn attend_expanded(
    gpu: &Arc<Gpu>,
    queue: &Queue,
    attention: &PrefillAttention<'_>,
    lens: &[usize],
) -> Result<(), CudaError> {
    let contexts = Contexts { sum: lens.iter().sum(), longest: lens.iter().copied().max().unwrap_or(0) };
    let bytes = ExpandedBlocks::bytes(attention.shape, lens.len(), contexts);
    let scratch = poisoned::<u8>(gpu, queue, bytes + GUARD);
    let blocks_in =
        |bytes| ExpandedBlocks::in_buffer(scratch.span().part(0, bytes), attention.shape, lens.len(), contexts);
    assert!(blocks_in(bytes - 1).is_none(), "memory that is too small");
    expanded_prefill_attention(queue, attention, &blocks_in(bytes).expect("memory of the right size"))?;
    queue.wait()?;
    let guard: Vec<u8> = scratch.span().part(bytes, GUARD).read(GUARD)?;
    assert!(guard.iter().all(|&byte| byte == 0xff), "memory behind the blocks is written");
    Ok(())
}

/// Whether the fast kernel rounds the products of codes and scales to bf16.
fn expands_to_bf16(gpu: &Gpu, codes: KvCodes, head_dim: usize) -> bool {
    gpu.capability().0 == 9 && gpu.has_kernel(&format!("sm90_prefill_attention_{}_d{head_dim}", codes.name()))
}

fn attend_as_the_formula_says(codes: Option<KvCodes>) {
    let Some((gpu, queue)) = gpu::open() else { return };
    let mut random = Random::new(4);
    let workspace = PrefillWorkspace::new(&gpu).expect("memory");
    for [num_heads, num_kv_heads, head_dim, block_size] in SHAPES {
        let shape = HeadShape { num_heads, num_kv_heads, head_dim, block_size, has_kv: true };
        for chunks in CHUNKS {
            let lens: Vec<usize> = chunks.iter().map(|c| c.1).collect();
            let cached = CachedRows::new(&gpu, &mut random, shape, &lens);
            let mut cached = match codes {
                Some(codes) => cached.coded(&gpu, codes),
                None => cached,
            };
            let mut starts = vec![0u32];
            chunks.iter().for_each(|c| starts.push(starts[starts.len() - 1] + c.0 as u32));
            let num_tokens = starts[chunks.len()] as usize;
            let (cols, qkv_cols) = (num_heads * head_dim, shape.qkv_cols());
            let qkv = random.bf16s(num_tokens * qkv_cols, 1.0);
            let qkv_buffer = DeviceBuffer::from_slice(&gpu, &qkv).expect("memory");
            let start_buffer = DeviceBuffer::from_slice(&gpu, &starts).expect("memory");
            let rows = PrefillRows {
                block_tables: cached.table_buffer.span(),
                max_blocks: cached.max_blocks,
                context_lens: cached.len_buffer.span(),
                row_starts: start_buffer.span(),
                num_rows: chunks.len(),
                num_tokens,
                max_chunk: chunks.iter().map(|c| c.0).max().unwrap_or(0),
            };
            let bounds = [[0, 0], [75, 0], [0, 100], [0, 64], [40, 150]];
            let kinds = [Kind::Plain, Kind::Alibi, Kind::Capped, Kind::Sinks];
            // Bits of the Hopper kernel for codes, which expansion keeps.
            let mut bits: VecDeque<Vec<u16>> = VecDeque::new();
            let cases = kinds.into_iter().flat_map(|kind| bounds.map(move |bounds| (kind, bounds)));
            // Those that round keys and values to bf16 come last.
            let paths =
                [Path::Simple, Path::Fast, Path::Expanded].into_iter().take(if codes.is_some() { 3 } else { 2 });
            for (path, (kind, bounds)) in paths.flat_map(|path| cases.clone().map(move |case| (path, case))) {
                let is_rounded = |codes| match path {
                    Path::Simple => false,
                    Path::Fast => expands_to_bf16(&gpu, codes, head_dim),
                    Path::Expanded => true,
                };
                if codes.is_some_and(is_rounded) {
                    cached.round_to_bf16();
                }
                let scores = cached.scores(&gpu, kind, bounds);
                if !scores.on_gpu.has_fast_kernels(head_dim) {
                    continue;
                }
                let out = poisoned::<bf16>(&gpu, &queue, num_tokens * cols);
                let attention = PrefillAttention {
                    out: out.span(),
                    qkv: qkv_buffer.span(),
                    cache: cached.cache(),
                    rows,
                    shape,
                    scores: scores.on_gpu,
                    workspace: &workspace,
                };
                let launched = match path {
                    Path::Simple => prefill_attention_simple(&queue, &attention),
                    Path::Fast => prefill_attention(&queue, &attention),
                    Path::Expanded => attend_expanded(&gpu, &queue, &attention, &lens),
                };
                launched.expect("a launch");
                queue.wait().expect("the kernel runs");
                let found = out.span().read::<bf16>(num_tokens * cols).expect("a copy");
                let what = format!("{shape:?}, {chunks:?}, window and chunk {bounds:?}, {path:?}, {kind:?}, {codes:?}");
                if codes.is_some_and(|codes| expands_to_bf16(&gpu, codes, head_dim)) {
                    let found: Vec<u16> = found.iter().map(|x| x.to_bits()).collect();
                    match path {
                        Path::Simple => {}
                        Path::Fast => bits.push_back(found),
                        Path::Expanded => assert!(bits.pop_front() == Some(found), "{what}: other bits than of codes"),
                    }
                }
                let found = floats(&found);
                for (row, &(count, len)) in chunks.iter().enumerate() {
                    for i in 0..count {
                        let token = starts[row] as usize + i;
                        let (found, q) = (&found[token * cols..(token + 1) * cols], &qkv[token * qkv_cols..]);
                        assert!(found.iter().all(|x| x.is_finite()), "{what}: token {token} is finite");
                        // The formula is slow, so only the ends and a sample of the other elements are checked.
                        if i % 37 == 0 || i + 1 == count || i % 128 == 127 {
                            cached.check(&what, found, q, row, len - count + i, &scores);
                        }
                    }
                }
            }
        }
    }
}
