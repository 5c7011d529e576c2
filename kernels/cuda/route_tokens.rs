//! The choice of experts. Kernel: `route_tokens.cu`.

use half::bf16;

use super::error::ensure;
use super::{Arg, CudaError, Launch, Queue, Span};

/// Maximum number of experts of a layer.
pub const MAX_EXPERTS: usize = 512;

/// Maximum number of experts of a token.
pub const MAX_CHOICES: usize = 32;

/// Maximum number of groups of experts.
pub const MAX_GROUPS: usize = 32;

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

/// What the choice is made by. Weights of experts follow from logits and biases; a token goes to the experts with the
/// largest sums of weight and selection bias.
#[derive(Debug, Clone, Copy)]
pub struct Router {
    /// `[T, count]` f32: products of the router.
    pub logits: Span,
    /// `[count]` bf16, added to the logits; or [`Span::NULL`].
    pub bias: Span,
    /// `[count]` f32, added to the weights while experts are chosen; or [`Span::NULL`].
    pub selection_bias: Span,
    /// `[count]` f32, which multiply the weights at the end; or [`Span::NULL`].
    pub scales: Span,
    /// `[T]` u32; `u32::MAX` marks padding.
    pub slots: Span,
    /// Number of experts.
    pub count: usize,
    /// How weights follow from logits.
    pub scoring: Scoring,
    /// If set, only the experts of some groups can be chosen.
    pub groups: Option<Groups>,
    /// Whether the weights of the chosen experts are divided by their sum.
    pub is_normalized: bool,
    /// Multiplies the weights of the chosen experts.
    pub scale: f32,
}

/// How the weights of experts follow from their logits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Scoring {
    /// The softmax over all experts.
    Softmax,
    /// The sigmoid of each.
    Sigmoid,
    /// Experts are chosen by their logits. The weight of each is the share of its logit, the largest one `m`, in the softmax over those
    /// logits `s` that were not chosen before and for which `m - s` is at most `tolerance * max(|s|, m)`.
    SparseMixer {
        /// Share of a logit.
        tolerance: f32,
    },
}

impl Scoring {
    /// Its number in the kernels, and the tolerance.
    fn parameters(self) -> (u32, f32) {
        match self {
            Self::Softmax => (0, 0.0),
            Self::Sigmoid => (1, 0.0),
            Self::SparseMixer { tolerance } => (2, tolerance),
        }
    }
}

/// Groups of equal size, in order. A token chooses within those with the largest scores, the lower group where two are equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Groups {
    /// Number of groups.
    pub count: usize,
    /// Number of groups that a token chooses.
    pub chosen: usize,
    /// What the score of a group is.
    pub score: GroupScore,
}

/// The score of a group of experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupScore {
    /// That of the best expert.
    Best,
    /// The sum of those of the two best; each group has two experts or more.
    BestTwo,
}

impl Router {
    /// The softmax of the logits, without biases and factors.
    pub fn softmax(logits: Span, slots: Span, count: usize, is_normalized: bool) -> Self {
        Self {
            logits,
            bias: Span::NULL,
            selection_bias: Span::NULL,
            scales: Span::NULL,
            slots,
            count,
            scoring: Scoring::Softmax,
            groups: None,
            is_normalized,
            scale: 1.0,
        }
    }

    /// Checks everything but the logits.
    pub(super) fn check(&self, to: Choices, tokens: usize) -> Result<(), CudaError> {
        let (op, Choices { experts, probabilities, top_k }) = ("route_tokens", to);
        let Self { bias, selection_bias, scales, slots, count, groups, .. } = *self;
        ensure!(op, (1..=MAX_EXPERTS).contains(&count), "{count} experts; expected 1 to {MAX_EXPERTS}");
        ensure!(op, (1..=count.min(MAX_CHOICES)).contains(&top_k), "{top_k} of {count} experts for a token");
        ensure!(op, tokens > 0, "no tokens");
        ensure!(op, bias.is_null() || bias.count::<bf16>() >= count, "the bias is shorter than {count}");
        for (name, span) in [("selection bias", selection_bias), ("scales", scales)] {
            ensure!(op, span.is_null() || span.count::<f32>() >= count, "{name} shorter than {count}");
        }
        if let Some(groups) = groups {
            groups.check(count, top_k)?;
        }
        ensure!(op, experts.count::<u32>() >= tokens * top_k, "experts are shorter than {tokens} x {top_k}");
        ensure!(
            op,
            probabilities.count::<f32>() >= tokens * top_k,
            "probabilities are shorter than {tokens} x {top_k}"
        );
        ensure!(op, slots.count::<u32>() >= tokens, "slots are shorter than {tokens}");
        Ok(())
    }

    /// `Router` of the kernels: bias, selection_bias, scales, count, top_k, is_normalized, scoring, groups,
    /// chosen_groups, scale, is_best, tolerance, padding.
    pub(super) fn parameters(&self, to: Choices) -> [u64; 8] {
        let pair = |low: usize, high: usize| low as u64 | (high as u64) << 32;
        let (groups, chosen) = self.groups.map_or((0, 0), |groups| (groups.count, groups.chosen));
        let (scoring, tolerance) = self.scoring.parameters();
        let is_best = self.groups.is_some_and(|groups| groups.score == GroupScore::Best);
        [
            self.bias.address(),
            self.selection_bias.address(),
            self.scales.address(),
            pair(self.count, to.top_k),
            pair(usize::from(self.is_normalized), scoring as usize),
            pair(groups, chosen),
            pair(self.scale.to_bits() as usize, usize::from(is_best)),
            u64::from(tolerance.to_bits()),
        ]
    }
}

impl Groups {
    fn check(self, num_experts: usize, top_k: usize) -> Result<(), CudaError> {
        let Self { count, chosen, score } = self;
        let least = if score == GroupScore::BestTwo { 2 } else { 1 };
        let fits = (1..=MAX_GROUPS).contains(&count)
            && num_experts.is_multiple_of(count)
            && num_experts / count >= least
            && (1..=count).contains(&chosen)
            && chosen * (num_experts / count) >= top_k;
        ensure!("route_tokens", fits, "{top_k} of {num_experts} experts in {chosen} of {count} groups");
        Ok(())
    }
}

/// Chooses the experts of each token, as `ops::Routing` describes.
pub fn route_tokens(q: &Queue, to: Choices, router: &Router, tokens: usize) -> Result<(), CudaError> {
    router.check(to, tokens)?;
    let (op, count, logits) = ("route_tokens", router.count, router.logits);
    ensure!(op, logits.count::<f32>() >= tokens * count, "logits are shorter than {tokens} x {count}");
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
