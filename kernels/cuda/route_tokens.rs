//! The choice of experts. Kernel: `route_tokens.cu`.

use half::bf16;

use super::error::ensure;
use super::{Arg, CudaError, Launch, Queue, Span};

/// Maximum number of experts of a layer.
pub const MAX_EXPERTS: usize = 512;

/// Maximum number of experts of a token.
pub const MAX_CHOICES: usize = 32;

/// Where the choices of `T` tokens go.
#[derive(Debug, Clone, Copy)]
pub struct Choices {
    /// `[T, top_k]` u32: the experts of each token in ascending order; the number of experts for padding.
    pub experts: Span,
    /// `[T, top_k]` f32.
    pub probabilities: Span,
    /// Number of experts of a token.
    pub top_k: usize,
}

/// What the choice is made by.
#[derive(Debug, Clone, Copy)]
pub struct Router {
    /// `[T, count]` f32: products of the router.
    pub logits: Span,
    /// `[count]` bf16, added to the logits; or [`Span::NULL`].
    pub bias: Span,
    /// `[T]` u32; `u32::MAX` marks padding.
    pub slots: Span,
    /// Number of experts.
    pub count: usize,
    /// Whether the probabilities of the chosen experts are divided by their sum.
    pub is_normalized: bool,
}

impl Router {
    pub(super) fn check(&self, to: Choices, tokens: usize) -> Result<(), CudaError> {
        let (op, Choices { experts, probabilities, top_k }) = ("route_tokens", to);
        let Self { logits, bias, slots, count, .. } = *self;
        ensure!(op, (1..=MAX_EXPERTS).contains(&count), "{count} experts; expected 1 to {MAX_EXPERTS}");
        ensure!(op, (1..=count.min(MAX_CHOICES)).contains(&top_k), "{top_k} of {count} experts for a token");
        ensure!(op, tokens > 0, "no tokens");
        ensure!(op, bias.is_null() || bias.count::<bf16>() >= count, "the bias is shorter than {count}");
        ensure!(op, experts.count::<u32>() >= tokens * top_k, "experts are shorter than {tokens} x {top_k}");
        ensure!(
            op,
            probabilities.count::<f32>() >= tokens * top_k,
            "probabilities are shorter than {tokens} x {top_k}"
        );
        ensure!(op, logits.count::<f32>() >= tokens * count, "logits are shorter than {tokens} x {count}");
        ensure!(op, slots.count::<u32>() >= tokens, "slots are shorter than {tokens}");
        Ok(())
    }

    /// `Router` of the kernels: bias, count, top_k, is_normalized, padding.
    pub(super) fn parameters(&self, to: Choices) -> [u64; 3] {
        let (count, top_k) = (self.count as u64, to.top_k as u64);
        [self.bias.address(), count | top_k << 32, u64::from(self.is_normalized)]
    }
}

/// Chooses the experts of each token, as `ops::Routing` describes.
pub fn route_tokens(q: &Queue, to: Choices, router: &Router, tokens: usize) -> Result<(), CudaError> {
    router.check(to, tokens)?;
    let parameters = router.parameters(to);
    let args = [
        to.experts.into(),
        to.probabilities.into(),
        router.logits.into(),
        router.slots.into(),
        (tokens as u32).into(),
        Arg::Bytes(bytemuck::bytes_of(&parameters)),
    ];
    q.launch("route_tokens_f32", Launch::new(tokens.div_ceil(4) as u32, 128), &args)
}
