//! Attention over latent vectors, of decoding rows and of chunks of new tokens. Kernels: `latent_attention.cu`, and
//! `sm90_latent_attention.cu` for tiles of 64 queries on Hopper.

use std::sync::Arc;

use half::bf16;

use super::decode_division::Division;
use super::error::ensure;
use super::latent_cache::{RANKS, width};
use super::{Arg, CudaError, DeviceBuffer, Gpu, Launch, Queue, Span};

const OP: &str = "latent_attention";
/// Maximum number of parts of a tile's positions.
const MAX_SPLITS: usize = 128;
/// Blocks that are aimed at: about one for each multiprocessor of a large GPU.
const BLOCKS: usize = 128;
/// Shared memory of a block from which three stages fit beside those of another block.
const THREE_STAGES_FROM: u32 = 200 << 10;

/// Rows of a step, and the locations of their latent vectors.
#[derive(Debug, Clone, Copy)]
pub struct LatentRows {
    /// `[R, max_blocks]` u32.
    pub block_tables: Span,
    /// Row length of `block_tables`.
    pub max_blocks: usize,
    /// `[R]` u32; without `row_starts` 0 marks a padding row.
    pub context_lens: Span,
    /// `[R + 1]` u32: prefix sum of the rows' tokens. Without it each row has one token.
    pub row_starts: Option<Span>,
    /// `R`.
    pub num_rows: usize,
    /// The first of the tokens, in the order of `row_starts`, that are attended for; 0 without it.
    pub first_token: usize,
    /// Number of these tokens.
    pub num_tokens: usize,
    /// Tokens of the longest row, at most.
    pub max_chunk: usize,
}

/// A kernel, which determines the size of tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LatentKernel {
    /// Tiles of 16 queries, on every GPU.
    Small,
    /// Tiles of 64 queries, if the GPU has enough shared memory.
    Large,
    /// The same by warpgroups, on Hopper.
    Hopper,
}

impl LatentKernel {
    /// Queries of a tile.
    pub fn tile(self) -> usize {
        if self == LatentKernel::Small { 16 } else { 64 }
    }

    /// Whether the GPU runs it.
    pub fn is_on(self, gpu: &Gpu) -> bool {
        let [_, rank] = RANKS;
        let has_room = gpu.max_shared_bytes() as usize >= self.shared_bytes(2, rank);
        has_room && (self != LatentKernel::Hopper || gpu.capability().0 == 9 && gpu.has_kernel(&self.name(rank)))
    }

    /// The fastest for rows of up to `queries` queries each, tokens times heads.
    pub fn for_rows(gpu: &Gpu, queries: usize) -> Self {
        let large = [LatentKernel::Hopper, LatentKernel::Large].into_iter().find(|kernel| kernel.is_on(gpu));
        large.filter(|_| queries > 16).unwrap_or(LatentKernel::Small)
    }

    fn name(self, rank: usize) -> String {
        match self {
            LatentKernel::Small => format!("latent_attention_bf16_l{rank}_m16"),
            LatentKernel::Large => format!("latent_attention_bf16_l{rank}_m64"),
            LatentKernel::Hopper => format!("sm90_latent_attention_bf16_l{rank}"),
        }
    }

    /// Stages of the ring of positions.
    fn stages(self, gpu: &Gpu) -> usize {
        if self == LatentKernel::Small && gpu.max_shared_bytes() >= THREE_STAGES_FROM { 3 } else { 2 }
    }

    /// Bytes of shared memory: the ring, probabilities, maxima and corrections, and queries of large tiles; on Hopper also what
    /// their alignment takes.
    fn shared_bytes(self, stages: usize, rank: usize) -> usize {
        let row = 2 * width(rank);
        match self {
            LatentKernel::Small => stages * 32 * row + 16 * (2 * 32 + 16) + 5 * 16 * 4,
            LatentKernel::Large => (64 + stages * 64) * row + 64 * (2 * 64 + 16) + 3 * 64 * 4,
            LatentKernel::Hopper => (64 + stages * 64) * row + 64 * 2 * 64 + 2 * 64 * 4 + 1024,
        }
    }
}

/// How the work is divided among thread blocks. It depends only on what the host knows when a graph is recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LatentSplits {
    /// The kernel.
    pub kernel: LatentKernel,
    /// Maximum number of parts of a tile's positions, up to 128.
    pub splits: usize,
    /// Minimum number of positions in a part, a multiple of 64.
    pub min_chunk: usize,
}

impl LatentSplits {
    /// As many blocks as multiprocessors, for rows of up to `queries` queries each, tokens times heads.
    pub fn new(kernel: LatentKernel, num_rows: usize, queries: usize) -> Self {
        let tiles = num_rows * queries.div_ceil(kernel.tile());
        let splits = (BLOCKS / tiles.max(1)).clamp(1, MAX_SPLITS);
        Self { kernel, splits, min_chunk: 64 }
    }

    /// The division of decoding rows with [`Division::ByLength`]: the same for any number of rows.
    pub fn by_length(kernel: LatentKernel) -> Self {
        Self { kernel, splits: 16, min_chunk: 128 }
    }

    /// Partial sums of a row with `queries` queries.
    fn partial_queries(self, queries: usize) -> usize {
        queries.next_multiple_of(self.kernel.tile()) * self.splits
    }
}

/// Partial sums of [`latent_attention`]. Only one call at a time may use it.
#[derive(Debug)]
pub struct LatentWorkspace {
    division: Division,
    rank: usize,
    partial: DeviceBuffer,
}

impl LatentWorkspace {
    /// Bytes that [`LatentWorkspace::new`] allocates.
    pub fn bytes(division: Division, rank: usize) -> usize {
        max_partial_queries(division) * (rank + 2) * 4
    }

    /// Allocates [`LatentWorkspace::bytes`], for latent vectors of up to `rank` elements.
    pub fn new(gpu: &Arc<Gpu>, division: Division, rank: usize) -> Result<Self, CudaError> {
        Ok(Self { division, rank, partial: DeviceBuffer::new(gpu, Self::bytes(division, rank))? })
    }
}

/// Queries whose partial sums a workspace has room for: those of all blocks that run at a time or, by length, those of 128 rows with 16
/// heads in 16 parts.
fn max_partial_queries(division: Division) -> usize {
    match division {
        Division::ByRows => 8192,
        Division::ByLength => 32_768,
    }
}

/// `rows[t, h, :rank]` = attention of the query `rows[t, h, :]` over the latent vectors of its row up to its own position.
#[derive(Debug, Clone, Copy)]
pub struct LatentAttention<'a> {
    /// `[T, H, width]` bf16: the queries of [`LatentRows::num_tokens`] tokens, whose first `rank` elements become the result.
    pub rows: Span,
    /// `[blocks, B, width]` bf16: the layer's blocks.
    pub cache: Span,
    /// Elements of a latent vector, one of [`RANKS`].
    pub rank: usize,
    /// The rows of the step.
    pub step: LatentRows,
    /// `H`.
    pub num_heads: usize,
    /// `B`, a power of two, 16 or more.
    pub block_size: usize,
    /// Multiplies q·k.
    pub scale: f32,
    /// Partial sums.
    pub workspace: &'a LatentWorkspace,
}

/// Queues the attention, with the fastest kernel, and the division that the workspace is for.
pub fn latent_attention(q: &Queue, attention: &LatentAttention<'_>) -> Result<(), CudaError> {
    match attention.workspace.division {
        Division::ByRows => {
            let queries = attention.step.max_chunk * attention.num_heads;
            let kernel = LatentKernel::for_rows(q.gpu(), queries);
            latent_attention_split(q, attention, LatentSplits::new(kernel, attention.step.num_rows, queries))
        }
        Division::ByLength => latent_attention_by_length(q, attention),
    }
}

/// Chunks, also of one token, go through all positions in order. Decodes are divided by their length alone, and the workspace bounds the
/// rows of a launch.
fn latent_attention_by_length(q: &Queue, attention: &LatentAttention<'_>) -> Result<(), CudaError> {
    let (step, num_heads) = (attention.step, attention.num_heads);
    if step.row_starts.is_some() {
        let kernel = LatentKernel::for_rows(q.gpu(), usize::MAX);
        return latent_attention_split(q, attention, LatentSplits { kernel, splits: 1, min_chunk: 64 });
    }
    attention.check()?;
    let splits = LatentSplits::by_length(LatentKernel::for_rows(q.gpu(), num_heads));
    let most = max_partial_queries(Division::ByLength) / splits.partial_queries(num_heads);
    ensure!(OP, most > 0, "the partial sums of {num_heads} heads do not fit");
    for first in (0..step.num_rows).step_by(most) {
        let count = most.min(step.num_rows - first);
        let width = num_heads * width(attention.rank);
        let own = LatentRows {
            block_tables: step.block_tables.elements::<u32>(first * step.max_blocks, count * step.max_blocks),
            context_lens: step.context_lens.elements::<u32>(first, count),
            num_rows: count,
            num_tokens: count,
            ..step
        };
        let rows = attention.rows.elements::<bf16>(first * width, count * width);
        latent_attention_split(q, &LatentAttention { rows, step: own, ..*attention }, splits)?;
    }
    Ok(())
}

/// [`latent_attention`] with the kernel that runs on any GPU.
pub fn latent_attention_simple(q: &Queue, attention: &LatentAttention<'_>) -> Result<(), CudaError> {
    let queries = attention.step.max_chunk * attention.num_heads;
    let splits = LatentSplits::new(LatentKernel::Small, attention.step.num_rows, queries);
    latent_attention_split(q, attention, splits)
}

/// [`latent_attention`] with a given division.
pub fn latent_attention_split(
    q: &Queue,
    attention: &LatentAttention<'_>,
    splits: LatentSplits,
) -> Result<(), CudaError> {
    attention.check()?;
    let step = attention.step;
    let LatentSplits { kernel, splits: count, min_chunk } = splits;
    ensure!(OP, kernel.is_on(q.gpu()), "this GPU does not run {kernel:?}");
    let tile = kernel.tile();
    let fits = (1..=MAX_SPLITS).contains(&count) && min_chunk > 0 && min_chunk.is_multiple_of(64);
    ensure!(OP, fits, "{count} splits of at least {min_chunk}");
    let queries = step.max_chunk.min(step.num_tokens) * attention.num_heads;
    let tiles = queries.div_ceil(tile);
    let partial_queries = step.num_rows * splits.partial_queries(queries);
    ensure!(OP, tiles <= 65_535, "{tiles} tiles of queries");
    let fits = count == 1 || partial_queries <= max_partial_queries(attention.workspace.division);
    ensure!(OP, fits, "{partial_queries} partial sums do not fit");
    let argument = attention.argument(splits);
    let stages = kernel.stages(q.gpu());
    let launch = Launch::new(0, if tile == 64 { 256 } else { 128 })
        .grid(count as u32, tiles as u32, step.num_rows as u32)
        .shared(kernel.shared_bytes(stages, attention.rank) as u32);
    let bytes = Arg::Bytes(bytemuck::bytes_of(&argument));
    let args = [bytes, (stages as u32).into()];
    // The number of stages of the Hopper kernel is fixed.
    q.launch(&kernel.name(attention.rank), launch, if kernel == LatentKernel::Hopper { &args[..1] } else { &args })?;
    if count == 1 {
        return Ok(());
    }
    let launch = Launch::new(0, attention.rank as u32 / 4).grid(tile as u32, tiles as u32, step.num_rows as u32);
    q.launch(&format!("latent_combine_bf16_l{}", attention.rank), launch, &[bytes])
}

impl LatentAttention<'_> {
    /// The kernels' `LatentAttention`: seven pointers, eight words.
    fn argument(&self, splits: LatentSplits) -> [u64; 11] {
        let pair = |low: usize, high: usize| low as u64 | (high as u64) << 32;
        let (step, partial) = (self.step, self.workspace.partial.span());
        let stats = max_partial_queries(self.workspace.division);
        [
            self.rows.address(),
            self.cache.address(),
            step.block_tables.address(),
            step.context_lens.address(),
            step.row_starts.map_or(0, |starts| starts.address()),
            partial.address(),
            partial.elements::<f32>(stats * self.rank, 2 * stats).address(),
            pair(step.first_token, step.num_tokens),
            pair(self.num_heads, step.max_blocks),
            pair(self.block_size.trailing_zeros() as usize, splits.splits),
            pair(splits.min_chunk, self.scale.to_bits() as usize),
        ]
    }

    fn check(&self) -> Result<(), CudaError> {
        let Self { rows, cache, rank, step, num_heads, block_size, workspace, .. } = *self;
        ensure!(OP, RANKS.contains(&rank), "latent vectors of {rank}; expected {RANKS:?}");
        ensure!(OP, workspace.rank >= rank, "the workspace is for latent vectors of {}, not {rank}", workspace.rank);
        let LatentRows { num_rows, num_tokens, max_chunk, first_token, .. } = step;
        ensure!(OP, (1..=65_535).contains(&num_rows), "{num_rows} rows");
        ensure!(OP, num_heads > 0 && max_chunk > 0, "{num_heads} heads, {max_chunk} tokens of a row");
        ensure!(OP, block_size.is_power_of_two() && block_size >= 16, "blocks of {block_size}");
        let is_decode = max_chunk == 1 && num_tokens == num_rows && first_token == 0;
        ensure!(OP, step.row_starts.is_some() || is_decode, "{num_tokens} tokens of {num_rows} rows without starts");
        let needed = num_tokens * num_heads * width(rank);
        ensure!(OP, num_tokens > 0 && rows.count::<bf16>() >= needed, "rows are too short for {num_tokens} tokens");
        ensure!(OP, step.context_lens.count::<u32>() >= num_rows, "context_lens is too short for {num_rows} rows");
        let has_starts = step.row_starts.is_none_or(|starts| starts.count::<u32>() > num_rows);
        ensure!(OP, has_starts, "row_starts is too short for {num_rows} rows");
        let tables = step.block_tables.count::<u32>();
        ensure!(OP, tables >= num_rows * step.max_blocks, "block_tables is too short for {num_rows} rows");
        ensure!(OP, rows.is_aligned(16) && cache.is_aligned(16), "a buffer is not 16-byte aligned");
        Ok(())
    }
}
