//! Layers with a recurrent state in place of attention: Gated DeltaNet (Yang et al. 2024), Kimi Delta Attention (Kimi Linear, 2025),
//! Mamba-2 (Dao and Gu 2024), and the short convolutions of LFM2.

/// How such a layer computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecurrentRule {
    /// Gated DeltaNet. Its small projection has learning rates, then steps. Each head of the output is normed, then gated.
    GatedDelta {
        /// Whether learning rates are up to 2 in place of 1 ([`crate::Feature::DoubledRates`]).
        has_doubled_rates: bool,
    },
    /// Kimi Delta Attention: Gated DeltaNet with a step for each channel of k, so that each row of a state decays on its own. Each head
    /// has its own q and k ([`crate::Device::kimi_delta`]).
    KimiDelta,
    /// Mamba-2, where C, B and x are q, k and v. Its small projection has steps. The output is gated, then normed.
    Mamba2 {
        /// Neighbouring value heads that have one norm together; none without a norm. A worker has whole ones.
        norm_heads: Option<usize>,
    },
    /// A short convolution of v times the gates of its input, without q, k, matrices and norms. The second projection has the gates of
    /// the output.
    ShortConv,
}

/// Sizes of such a layer: of the whole model, or of this worker's shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecurrentShape {
    /// How it computes.
    pub rule: RecurrentRule,
    /// Heads of q and k.
    pub num_key_heads: usize,
    /// Heads of v, of the state and of the output; a multiple of the key heads. Neighbours share a key head.
    pub num_value_heads: usize,
    /// Size of a head of q and k; 0 for a short convolution.
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

    /// Outputs of the second projection: learning rates and steps, steps alone, or the gates of the output. Of Kimi Delta Attention the
    /// learning rates.
    pub fn num_steps(&self) -> usize {
        match self.rule {
            RecurrentRule::GatedDelta { .. } => 2 * self.num_value_heads,
            RecurrentRule::KimiDelta | RecurrentRule::Mamba2 { .. } => self.num_value_heads,
            RecurrentRule::ShortConv => self.widths()[1],
        }
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
    /// `[channels]`, or empty.
    pub conv_bias: Vec<f32>,
    /// `[value heads]`: logarithm of the decay. Empty for a short convolution, as the following.
    pub a_log: Vec<f32>,
    /// `[value heads]`; of Kimi Delta Attention `[value heads * key_dim]`.
    pub dt_bias: Vec<f32>,
    /// `[value heads]`: what of the convolution's v Mamba-2 adds to the output; else empty.
    pub skip: Vec<f32>,
    /// Norm of the output: `[value_dim]`, for each head; of Mamba-2 `[value heads * value_dim]`, or empty.
    pub norm: Vec<f32>,
}
