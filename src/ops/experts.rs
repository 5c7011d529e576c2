//! Mixtures of experts: how tokens choose, and the weights of a layer.

use crate::{Activation, WeightSlice};

/// How tokens choose among the experts of a feed-forward.
///
/// The weights of all experts follow, in f32, from the products of the router. A token goes to the `top_k` experts with
/// the largest sum of weight and [`ExpertSlices::selection_bias`], the lower one where two are equal.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Routing {
    /// Experts of a token.
    pub top_k: usize,
    /// How weights follow from products.
    pub scoring: Scoring,
    /// Whether a weight multiplies the input of its expert ([`crate::Feature::ScaledExpertInputs`]); otherwise its output.
    pub scales_input: bool,
    /// If set, only the experts of some groups can be chosen ([`crate::Feature::ExpertGroups`]).
    pub groups: Option<ExpertGroups>,
    /// Whether the weights of the chosen experts are divided by their sum.
    pub is_normalized: bool,
    /// Multiplies the weights of the chosen experts at the end. Other values than 1 require [`crate::Feature::ExpertScales`].
    pub scale: f32,
    /// Activation function of the gates, or of up where there are none.
    pub activation: Activation,
}

/// Experts form groups of equal size, in order. A token chooses within the groups with the largest scores, the lower group
/// where two are equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertGroups {
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
    /// The largest weight. Requires [`crate::Feature::BestExpertGroups`].
    Best,
    /// The sum of the two largest; each group has two experts or more.
    BestTwo,
}

/// How the weights of experts follow from the products of a router.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Scoring {
    /// The softmax over all experts.
    Softmax,
    /// The sigmoid of each. Requires [`crate::Feature::SigmoidRouting`].
    Sigmoid,
    /// That of SparseMixer: a token goes to the experts with the largest products, one after the other. The weight of each is its
    /// share in the softmax over those experts that were not chosen before it and whose product `s` is not far below the largest
    /// product `m` of them: `m - s` is at most `tolerance * max(|s|, m)`. Requires [`crate::Feature::SparseMixer`].
    SparseMixer {
        /// Share of a product.
        tolerance: f32,
    },
}

/// The experts of a feed-forward, of which each is an MLP. This worker has some of them, and of these some or all
/// columns of the inner layer.
#[derive(Debug, Clone)]
pub struct ExpertSlices<'a> {
    /// `[experts, E]`, the same on every worker.
    pub router: WeightSlice<'a>,
    /// `[experts]`, added to the products of the router.
    pub router_bias: Option<WeightSlice<'a>>,
    /// `[experts]`: added to the weights while experts are chosen ([`crate::Feature::SelectionBias`]).
    pub selection_bias: Option<WeightSlice<'a>>,
    /// Index of this worker's first expert.
    pub first: usize,
    /// This worker's experts, in order.
    pub experts: Vec<ExpertSlice<'a>>,
    /// How tokens choose.
    pub routing: Routing,
    /// `[experts]`: if set, multiplies the weight of each expert at the end. Requires [`crate::Feature::ExpertScales`].
    pub scales: Option<WeightSlice<'a>>,
}

impl ExpertSlices<'_> {
    /// Number of columns of the experts' inputs and outputs.
    pub fn width(&self) -> usize {
        self.experts.first().map_or(self.router.cols.len(), |expert| expert.down.rows.len())
    }

    /// Whether the experts have gates.
    pub fn is_gated(&self) -> bool {
        self.experts.first().is_none_or(|expert| expert.gate_up.len() == 2)
    }
}

/// The weights of one expert. Its inputs and outputs have `L` columns: `E`, or another number ([`crate::Feature::ExpertLatents`]).
#[derive(Debug, Clone)]
pub struct ExpertSlice<'a> {
    /// gate and up, each `[I, L]`; up alone if the experts of the layer have no gates ([`crate::Feature::PlainExperts`]).
    pub gate_up: Vec<WeightSlice<'a>>,
    /// `[L, I]`.
    pub down: WeightSlice<'a>,
    /// Biases of gate and up, each `[I]`; none, or as many as `gate_up` has.
    pub gate_up_bias: Vec<WeightSlice<'a>>,
    /// Bias of down, `[L]`. Of the workers that share an expert, one has it.
    pub down_bias: Option<WeightSlice<'a>>,
}
