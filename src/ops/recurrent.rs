//! Layers with a recurrent state in place of attention: Gated DeltaNet (Yang et al. 2024).

/// Sizes of such a layer: of the whole model, or of this worker's shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecurrentShape {
    /// Heads of q and k.
    pub num_key_heads: usize,
    /// Heads of v, of the state and of the output; a multiple of the key heads. Neighbours share a key head.
    pub num_value_heads: usize,
    /// Size of a head of q and k.
    pub key_dim: usize,
    /// Size of a head of v.
    pub value_dim: usize,
    /// Inputs of the convolution over q, k and v: the token's and those of the tokens before it.
    pub num_taps: usize,
}

impl RecurrentShape {
    /// Width of q and k, and of v.
    pub fn widths(&self) -> [usize; 2] {
        [self.num_key_heads * self.key_dim, self.num_value_heads * self.value_dim]
    }

    /// Channels of the convolution: q, k and v.
    pub fn channels(&self) -> usize {
        let [keys, values] = self.widths();
        2 * keys + values
    }

    /// Elements of a row's state, in f32: earlier inputs of the convolution, and a matrix for each value head.
    pub fn state_len(&self) -> usize {
        (self.num_taps - 1) * self.channels() + self.num_value_heads * self.key_dim * self.value_dim
    }
}

/// Weights of such a layer besides its projections, in f32.
#[derive(Debug, Clone, PartialEq)]
pub struct RecurrentWeights {
    /// Sizes of this worker's shard.
    pub shape: RecurrentShape,
    /// `[channels, taps]`.
    pub conv: Vec<f32>,
    /// `[value heads]`: logarithm of the decay.
    pub a_log: Vec<f32>,
    /// `[value heads]`.
    pub dt_bias: Vec<f32>,
    /// `[value_dim]`: norm of each head of the output.
    pub norm: Vec<f32>,
}
