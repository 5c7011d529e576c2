//! Attention over latent vectors (DeepSeek-V2, 2024): a position has one vector from which k and v of all heads follow.

use crate::WeightSlice;

/// Sizes of such a layer, the same on every worker.
///
/// A KV block has for each position a row of [`LatentShape::width`] elements: the latent vector, normed, then the rotated part
/// of k, which all heads share. k of a head is a product with the latent vector followed by this part; v is another product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LatentShape {
    /// Elements of the latent vector; a multiple of 16.
    pub rank: usize,
    /// Rotated elements of q and k, behind the others; a multiple of 8.
    pub rotary_dim: usize,
    /// Elements of a head of q and k that are not rotated; a multiple of 8.
    pub key_dim: usize,
    /// Elements of a head of v; a multiple of 8.
    pub value_dim: usize,
    /// Whether rotated pairs are neighbours `(2i, 2i + 1)`; otherwise `(i, i + rotary_dim / 2)`.
    pub is_interleaved: bool,
}

impl LatentShape {
    /// Elements of one position in a KV block.
    pub fn width(&self) -> usize {
        self.rank + self.rotary_dim
    }

    /// Elements of a head of q.
    pub fn query_dim(&self) -> usize {
        self.key_dim + self.rotary_dim
    }
}

/// Weights of such a layer besides its projections.
#[derive(Debug, Clone)]
pub struct LatentWeights<'a> {
    /// Sizes.
    pub shape: LatentShape,
    /// `H`, heads of this worker.
    pub num_heads: usize,
    /// `[rank]`: gain of the norm of the latent vector.
    pub norm: WeightSlice<'a>,
    /// Added to the mean square of the latent vector.
    pub eps: f32,
    /// `[H (key_dim + value_dim), rank]`: for each head the products that give k, then those that give v.
    pub up: WeightSlice<'a>,
}
