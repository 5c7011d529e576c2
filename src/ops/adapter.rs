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

/// The slots for adapters beside a linear layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdapterSlots {
    /// Number of slots.
    pub count: usize,
    /// Largest rank of an adapter.
    pub max_rank: usize,
    /// `K`, this worker's inputs of the layer.
    pub cols: usize,
    /// This worker's outputs of each module of which the layer consists. A part begins with the first output of a module.
    pub modules: Vec<usize>,
}

impl AdapterSlots {
    /// Bytes of adapters of the largest rank in all slots, in f32.
    pub fn f32_bytes(&self) -> usize {
        let values: usize = self.modules.iter().map(|rows| self.max_rank * (rows + self.cols)).sum();
        self.count * values * size_of::<f32>()
    }
}
