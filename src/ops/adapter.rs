//! Low-rank products of adapters.

/// A product `scale * B (A x)` that is added to some outputs of a linear layer: `N` of this worker's outputs, with its `K` inputs.
#[derive(Debug, Clone, PartialEq)]
pub struct LowRankPart {
    /// The first of these outputs.
    pub first_row: usize,
    /// `R`, the rank.
    pub rank: usize,
    /// Multiplies the product.
    pub scale: f32,
    /// `[R, K]`.
    pub a: Vec<f32>,
    /// `[N, R]`.
    pub b: Vec<f32>,
}
