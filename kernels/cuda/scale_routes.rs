//! Multiplies the inputs of experts by the weights of their routes. Kernel: `scale_routes.cu`.

use half::bf16;

use super::error::ensure;
use super::route_tokens::Choices;
use super::sort_routes::SortedRoutes;
use super::{CudaError, Launch, Queue, Span};

/// `rows[row of r, :] *= probability of r` for each of `routes` routes `r` to an expert of this worker, whose probability
/// becomes 1: it does not multiply the output too. `rows` `[routes, cols]` has the order of [`super::sort_routes`].
pub fn scale_routes(
    q: &Queue,
    rows: Span,
    choices: Choices,
    sorted: SortedRoutes,
    routes: usize,
    cols: usize,
) -> Result<(), CudaError> {
    let op = "scale_routes";
    ensure!(op, cols > 0 && cols.is_multiple_of(8), "cols {cols} is not a multiple of 8");
    ensure!(op, routes > 0, "no routes");
    ensure!(
        op,
        rows.count::<bf16>() >= routes * cols && rows.is_aligned(16),
        "rows are shorter than {routes} x {cols} or unaligned"
    );
    let spans = [sorted.places, choices.experts, choices.probabilities];
    ensure!(op, spans.iter().all(|span| span.count::<u32>() >= routes), "a buffer is shorter than {routes} routes");
    let args = [
        rows.into(),
        sorted.places.into(),
        choices.experts.into(),
        choices.probabilities.into(),
        (sorted.first_expert as u32).into(),
        (sorted.num_experts as u32).into(),
        (cols as u32).into(),
    ];
    let threads = (cols / 8).min(256).next_multiple_of(32) as u32;
    q.launch("scale_routes_bf16", Launch::new(routes as u32, threads), &args)
}
