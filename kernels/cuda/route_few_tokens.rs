//! The router of a layer with experts for few tokens: product, choice and order in one kernel, `route_few_tokens.cu`.

use half::bf16;

use super::error::ensure;
use super::grouped_gemm::has_hopper_kernels;
use super::quantize_rows::Fp8Rows;
use super::route_tokens::{Choices, MAX_EXPERTS, Router};
use super::{Arg, CudaError, Gpu, Launch, Queue, Span};

const OP: &str = "route_few_tokens";
/// Maximum number of tokens.
pub const MAX_TOKENS: usize = 8;
/// Maximum number of routes.
const MAX_ROUTES: usize = 256;
/// Blocks, all of one cluster, and threads of a block.
const BLOCKS: u32 = 8;
const THREADS: u32 = 512;

/// The product by whose result a [`Router`] chooses.
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
}

/// Where the order of the routes goes.
#[derive(Debug, Clone, Copy)]
pub struct ListedRoutes {
    /// [`list_bytes`]: four u32 for each expert that a token chose, in ascending order: its index among those of the worker, its first row,
    /// a bit for each token that chose it, and 0. They follow four u32 of which the first is the number of these experts. Rows are sorted
    /// by expert, then by token.
    pub list: Span,
    /// `[routes]` u32: the row of each route.
    pub places: Span,
    /// The first expert of this worker.
    pub first_expert: usize,
    /// Number of experts of this worker.
    pub num_experts: usize,
}

/// Bytes of a list of experts.
pub fn list_bytes(routes: usize) -> usize {
    16 * (1 + routes)
}

/// Rows of tokens that are rounded to e4m3.
#[derive(Debug, Clone, Copy)]
pub struct RoundedTokens {
    /// `[tokens, cols]` bf16.
    pub x: Span,
    /// Number of columns.
    pub cols: usize,
    /// The rounded rows.
    pub to: Fp8Rows,
}

/// Whether this GPU and this build have the kernel, and it takes this number of tokens with `top_k` of `experts` experts.
pub fn takes(gpu: &Gpu, tokens: usize, top_k: usize, experts: usize) -> bool {
    let is_small = tokens <= MAX_TOKENS && tokens * top_k <= MAX_ROUTES && experts <= MAX_EXPERTS;
    is_small && has_hopper_kernels(gpu)
}

/// [`super::route_tokens`] of the logits of a product, and a list of the experts, for a number of tokens that the kernel [`takes`]. The
/// logits of `router` are not used. Rounds rows of tokens, too, if `rounded` is set.
pub fn route_few_tokens(
    q: &Queue,
    to: ListedRoutes,
    choices: Choices,
    router: &Router,
    product: RouterProduct,
    tokens: usize,
    rounded: Option<RoundedTokens>,
) -> Result<(), CudaError> {
    let RouterProduct { x: routed, weight, width, gate } = product;
    let (count, routes) = (router.count, tokens * choices.top_k);
    router.check(choices, tokens)?;
    ensure!(OP, takes(q.gpu(), tokens, choices.top_k, count), "{tokens} tokens, {} of {count} experts", choices.top_k);
    ensure!(OP, width > 0 && width.is_multiple_of(8), "{width} inputs are not a multiple of 8");
    let is_enough = routed.count::<bf16>() >= tokens * width && routed.is_aligned(16);
    ensure!(OP, is_enough, "the inputs are shorter than {tokens} x {width}, or not aligned");
    let is_enough = weight.count::<bf16>() >= count * width && weight.is_aligned(16);
    ensure!(OP, is_enough, "the router is shorter than {count} x {width}, or not aligned");
    let [gate, factors] = gate.unwrap_or([Span::NULL; 2]);
    if !gate.is_null() {
        let is_enough = gate.count::<bf16>() >= width && gate.is_aligned(16) && factors.count::<f32>() >= tokens;
        ensure!(OP, is_enough, "the gate is shorter than {width}, or its factors than {tokens}");
    }
    let ListedRoutes { list, places, first_expert, num_experts } = to;
    let is_enough = list.bytes() >= list_bytes(routes) && list.is_aligned(16) && places.count::<u32>() >= routes;
    ensure!(OP, is_enough, "list or places are shorter than {routes} routes, or not aligned");
    let (x, cols, rounded) = match rounded {
        Some(RoundedTokens { x, cols, to }) => {
            let is_enough = x.count::<bf16>() >= tokens * cols && x.is_aligned(16) && cols.is_multiple_of(8);
            ensure!(OP, is_enough, "the rows of tokens are shorter than {tokens} x {cols}, or not aligned");
            to.check(tokens, cols)?;
            (x, cols, [to.codes, to.scales])
        }
        None => (Span::NULL, 0, [Span::NULL; 2]),
    };
    let pair = |low: usize, high: usize| low as u64 | (high as u64) << 32;
    // `FewTokens` of the kernel.
    let parameters = [
        routed.address(),
        weight.address(),
        gate.address(),
        factors.address(),
        choices.experts.address(),
        choices.probabilities.address(),
        router.slots.address(),
        places.address(),
        x.address(),
        pair(tokens, width),
        pair(cols, first_expert),
        pair(num_experts, Fp8Rows::pitch(tokens)),
        list.address(),
        rounded[0].address(),
        rounded[1].address(),
    ];
    let routing = router.parameters(choices);
    let args = [Arg::Bytes(bytemuck::bytes_of(&parameters)), Arg::Bytes(bytemuck::bytes_of(&routing))];
    q.launch("route_few_tokens", Launch::new(BLOCKS, THREADS).cluster(BLOCKS), &args)
}
