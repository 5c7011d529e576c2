//! Sorts the tokens of a step by expert. Kernel: `sort_routes.cu`.

use half::bf16;

use super::error::ensure;
use super::route_tokens::Choices;
use super::{Arg, CudaError, Launch, Queue, Span};

/// Tokens sorted by the experts of a worker.
#[derive(Debug, Clone, Copy)]
pub struct SortedRoutes {
    /// `[num_experts + 1]` u32: the first row of each expert, and the number of rows.
    pub offsets: Span,
    /// `[routes]` u32: the token of each row.
    pub tokens: Span,
    /// `[routes]` u32: the row of each route.
    pub places: Span,
    /// The first expert of this worker.
    pub first_expert: usize,
    /// Number of experts of this worker.
    pub num_experts: usize,
}

/// Activations that are copied in the order of the sorted rows.
#[derive(Debug, Clone, Copy)]
pub struct SortedRows {
    /// `[routes, cols]` bf16.
    pub rows: Span,
    /// `[tokens, cols]` bf16.
    pub x: Span,
    /// Number of columns.
    pub cols: usize,
}

/// Sorts the routes of `tokens` tokens by expert, then by token; routes to other workers' experts are left out. Copies
/// the rows of each expert if `copied` is set.
pub fn sort_routes(
    q: &Queue,
    to: SortedRoutes,
    choices: Choices,
    tokens: usize,
    copied: Option<SortedRows>,
) -> Result<(), CudaError> {
    let parameters = parameters(to, choices, tokens, copied)?;
    let args = [Arg::Bytes(bytemuck::bytes_of(&parameters)), choices.experts.into()];
    q.launch("sort_routes", Launch::new(to.num_experts as u32, 1024), &args)
}

/// `Sorted` of the kernel: offsets, tokens, places, rows, x, routes, top_k, first, cols.
fn parameters(
    to: SortedRoutes,
    choices: Choices,
    tokens: usize,
    copied: Option<SortedRows>,
) -> Result<[u64; 7], CudaError> {
    check(to, choices, tokens, copied)?;
    let routes = tokens * choices.top_k;
    let (rows, x, cols) = copied.map_or((Span::NULL, Span::NULL, 0), |copied| (copied.rows, copied.x, copied.cols));
    Ok([
        to.offsets.address(),
        to.tokens.address(),
        to.places.address(),
        rows.address(),
        x.address(),
        routes as u64 | (choices.top_k as u64) << 32,
        to.first_expert as u64 | (cols as u64) << 32,
    ])
}

fn check(to: SortedRoutes, choices: Choices, tokens: usize, copied: Option<SortedRows>) -> Result<(), CudaError> {
    let (op, routes) = ("sort_routes", tokens * choices.top_k);
    ensure!(op, to.num_experts > 0 && routes > 0, "{routes} routes to {} experts", to.num_experts);
    ensure!(op, to.offsets.count::<u32>() > to.num_experts, "offsets are shorter than {}", to.num_experts + 1);
    let spans = [to.tokens, to.places, choices.experts];
    ensure!(op, spans.iter().all(|span| span.count::<u32>() >= routes), "a buffer is shorter than {routes} routes");
    if let Some(SortedRows { rows, x, cols }) = copied {
        ensure!(op, cols > 0 && cols.is_multiple_of(8), "cols {cols} is not a multiple of 8");
        ensure!(op, rows.count::<bf16>() >= routes * cols, "rows are shorter than {routes} x {cols}");
        ensure!(op, x.count::<bf16>() >= tokens * cols, "x is shorter than {tokens} x {cols}");
        ensure!(op, rows.is_aligned(16) && x.is_aligned(16), "a buffer is not 16-byte aligned");
    }
    Ok(())
}
