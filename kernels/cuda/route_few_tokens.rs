//! The router of a layer with experts for few tokens: product, choice, order and rows in one kernel, `route_few_tokens.cu`.

use half::bf16;

use super::error::ensure;
use super::quantize_rows::Fp8Rows;
use super::route_tokens::{Choices, Router};
use super::sort_routes::{self, SortedRoutes, SortedRows};
use super::{Arg, CudaError, Gpu, Launch, Queue, Span};

const OP: &str = "route_few_tokens";
/// Maximum number of tokens, and of routes.
const MAX_TOKENS: usize = 16;
const MAX_ROUTES: usize = 512;
/// Threads of a block, and rows of the router that it multiplies.
const THREADS: u32 = 512;
const ROWS: usize = 16;
/// Bytes of [`RouterProduct::barrier`].
pub const BARRIER_BYTES: usize = 8;

/// The product whose result a [`Router`] chooses by.
#[derive(Debug, Clone, Copy)]
pub struct RouterProduct {
    /// `[tokens, width]` bf16.
    pub x: Span,
    /// `[experts, width]` bf16.
    pub weight: Span,
    /// Number of columns.
    pub width: usize,
    /// `[width]` bf16, one more output, and `[tokens]` f32, its sigmoid.
    pub gate: Option<[Span; 2]>,
    /// [`BARRIER_BYTES`] that are zero before the first launch, of one queue.
    pub barrier: Span,
}

/// Where the rows of each expert go.
#[derive(Debug, Clone, Copy)]
pub struct FewRows {
    /// In bf16.
    pub copied: SortedRows,
    /// If it is set, they go here instead, in e4m3.
    pub rounded: Option<Fp8Rows>,
}

/// Whether the kernel takes this number of tokens with `top_k` of `experts` experts on this GPU.
pub fn takes(gpu: &Gpu, tokens: usize, top_k: usize, experts: usize) -> bool {
    // All blocks must be resident at the same time.
    tokens <= MAX_TOKENS && tokens * top_k <= MAX_ROUTES && blocks(experts) <= gpu.num_multiprocessors()
}

fn blocks(experts: usize) -> u32 {
    (experts + 1).div_ceil(ROWS) as u32
}

/// Writes the logits of `router`, [`super::route_tokens`] and [`super::sort_routes`] of them, for a number of tokens that the kernel
/// [`takes`].
pub fn route_few_tokens(
    q: &Queue,
    to: SortedRoutes,
    choices: Choices,
    router: &Router,
    product: RouterProduct,
    tokens: usize,
    FewRows { copied, rounded }: FewRows,
) -> Result<(), CudaError> {
    let RouterProduct { x, weight, width, gate, barrier } = product;
    let count = router.count;
    router.check(choices, tokens)?;
    ensure!(OP, takes(q.gpu(), tokens, choices.top_k, count), "{tokens} tokens, {} of {count} experts", choices.top_k);
    ensure!(OP, width > 0 && width.is_multiple_of(8), "{width} inputs are not a multiple of 8");
    ensure!(OP, x.count::<bf16>() >= tokens * width && x.is_aligned(16), "x is shorter than {tokens} x {width}");
    let is_enough = weight.count::<bf16>() >= count * width && weight.is_aligned(16);
    ensure!(OP, is_enough, "the router is shorter than {count} x {width}, or not aligned");
    let [gate, factors] = gate.unwrap_or([Span::NULL; 2]);
    if !gate.is_null() {
        let is_enough = gate.count::<bf16>() >= width && gate.is_aligned(16) && factors.count::<f32>() >= tokens;
        ensure!(OP, is_enough, "the gate is shorter than {width}, or its factors than {tokens}");
    }
    ensure!(OP, barrier.bytes() >= BARRIER_BYTES && barrier.is_aligned(4), "the barrier is short or not aligned");
    sort_routes::check(to, choices, tokens, Some(copied))?;
    let routes = tokens * choices.top_k;
    rounded.map_or(Ok(()), |rounded| rounded.check(routes, copied.cols))?;
    let [codes, scales] = rounded.map_or([Span::NULL; 2], |Fp8Rows { codes, scales }| [codes, scales]);
    let pair = |low: usize, high: usize| low as u64 | (high as u64) << 32;
    // `FewTokens` of the kernel.
    let parameters = [
        x.address(),
        weight.address(),
        gate.address(),
        factors.address(),
        router.logits.address(),
        choices.experts.address(),
        choices.probabilities.address(),
        router.slots.address(),
        to.offsets.address(),
        to.tokens.address(),
        to.places.address(),
        copied.rows.address(),
        copied.x.address(),
        barrier.address(),
        pair(tokens, width),
        pair(copied.cols, to.first_expert),
        pair(to.num_experts, Fp8Rows::pitch(routes)),
        codes.address(),
        scales.address(),
    ];
    let routing = router.parameters(choices);
    let args = [Arg::Bytes(bytemuck::bytes_of(&parameters)), Arg::Bytes(bytemuck::bytes_of(&routing))];
    q.launch("route_few_tokens", Launch::new(blocks(count), THREADS), &args)
}
