//! Adds the outputs of the experts of each token. Kernels: `sum_experts.cu`.

use half::bf16;

use super::error::ensure;
use super::rms_norm::geometry;
use super::route_tokens::Choices;
use super::sort_routes::SortedRoutes;
use super::{Arg, CudaError, Launch, Queue, Span};

/// The outputs of the experts: `y` `[routes, cols]` has the rows that [`super::sort_routes`] ordered.
#[derive(Debug, Clone, Copy)]
pub struct ExpertOutputs {
    /// `[routes, cols]` bf16.
    pub y: Span,
    /// The experts of each token.
    pub choices: Choices,
    /// The row of each route.
    pub sorted: SortedRoutes,
    /// Number of columns.
    pub cols: usize,
    /// `[tokens, cols]` bf16 that is added to the sums, or null. May be where the sums are stored.
    pub also: Span,
    /// `[tokens]` f32 that multiply it, or null.
    pub also_factors: Span,
}

impl ExpertOutputs {
    fn check(&self, tokens: usize) -> Result<(), CudaError> {
        let (op, Self { y, choices, sorted, cols, also, also_factors }) = ("sum_experts", *self);
        let routes = tokens * choices.top_k;
        ensure!(op, cols > 0 && cols.is_multiple_of(8), "cols {cols} is not a multiple of 8");
        ensure!(op, routes > 0, "no routes");
        ensure!(op, y.count::<bf16>() >= routes * cols && y.is_aligned(16), "y is shorter than {routes} x {cols}");
        let is_enough = also.is_null() || (also.count::<bf16>() >= tokens * cols && also.is_aligned(16));
        ensure!(op, is_enough, "what is added is shorter than {tokens} x {cols}");
        let is_enough = also_factors.is_null() || also_factors.count::<f32>() >= tokens;
        ensure!(op, is_enough, "the factors of what is added are fewer than {tokens}");
        let spans = [sorted.places, choices.experts, choices.probabilities];
        ensure!(op, spans.iter().all(|span| span.count::<u32>() >= routes), "a buffer is shorter than {routes} routes");
        Ok(())
    }

    /// `ExpertSum` of the kernels: y, places, experts, probabilities, top_k, first, local, also,
    /// also_factors.
    fn parameters(&self) -> [u64; 8] {
        let Self { y, choices, sorted, .. } = self;
        [
            y.address(),
            sorted.places.address(),
            choices.experts.address(),
            choices.probabilities.address(),
            choices.top_k as u64 | (sorted.first_expert as u64) << 32,
            sorted.num_experts as u64,
            self.also.address(),
            self.also_factors.address(),
        ]
    }
}

/// Maximum number of columns of [`sum_experts_add_norm`].
pub const MAX_NORM_COLS: usize = 8192;

/// `out[t, :]` = the sum, in order of the experts, of `probability * y[row, :]` over the routes of token `t`; `out`
/// `[tokens, cols]`.
pub fn sum_experts(q: &Queue, out: Span, outputs: &ExpertOutputs, tokens: usize) -> Result<(), CudaError> {
    let (op, cols) = ("sum_experts", outputs.cols);
    outputs.check(tokens)?;
    ensure!(op, out.count::<bf16>() >= tokens * cols && out.is_aligned(16), "out is shorter than {tokens} x {cols}");
    let parameters = outputs.parameters();
    let args = [out.into(), Arg::Bytes(bytemuck::bytes_of(&parameters)), (cols as u32).into()];
    let launch = Launch::new(0, 128).grid(tokens as u32, (cols / 8).div_ceil(128) as u32, 1);
    q.launch("sum_experts_bf16", launch, &args)
}

/// `residual[t, :]` += that sum; `out[t, :]` = its RMS norm with `gain` `[cols]`. `out`, `residual` `[tokens, cols]`, at most
/// [`MAX_NORM_COLS`] columns.
pub fn sum_experts_add_norm(
    q: &Queue,
    out: Span,
    residual: Span,
    outputs: &ExpertOutputs,
    gain: Span,
    tokens: usize,
    eps: f32,
) -> Result<(), CudaError> {
    outputs.check(tokens)?;
    ensure!("sum_experts", outputs.cols <= MAX_NORM_COLS, "a norm of {} columns", outputs.cols);
    let launch = geometry(&[out, residual], gain, tokens, outputs.cols)?;
    let parameters = outputs.parameters();
    let args = [
        out.into(),
        residual.into(),
        Arg::Bytes(bytemuck::bytes_of(&parameters)),
        gain.into(),
        (outputs.cols as u32).into(),
        eps.into(),
    ];
    q.launch("sum_experts_add_norm_bf16", launch, &args)
}
