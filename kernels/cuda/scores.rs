//! How the scores of attention follow from products of queries and keys; the same for all attention kernels.

use super::error::ensure;
use super::rope_cache::HeadShape;
use super::{Arg, CudaError, Span};

/// Head dimensions of the fast kernels.
pub const HEAD_DIMS: [usize; 4] = [64, 96, 128, 256];
/// The same with ALiBi.
pub const ALIBI_HEAD_DIMS: [usize; 3] = [64, 96, 128];
/// The same with capped scores.
pub const CAPPED_HEAD_DIMS: [usize; 2] = [128, 256];

/// How scores follow from products.
#[derive(Debug, Clone, Copy)]
pub struct Scores {
    /// Multiplier of q·k.
    pub scale: f32,
    /// Number of newest positions that a token attends to; 0 means all.
    pub window: u32,
    /// If not 0, a token attends only to positions from `position / chunk * chunk` on.
    pub chunk: u32,
    /// What happens with scaled scores.
    pub change: ScoreChange,
    /// `[H]` f32: a logit of each head that takes part in the softmax and has no value.
    pub sinks: Option<Span>,
}

/// A change of scaled scores.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ScoreChange {
    /// None.
    None,
    /// `slopes[h]` times the distance to the query's position (0 or negative) is added. `slopes` `[H]` f32.
    Alibi(Span),
    /// A score `s` becomes `cap * tanh(s / cap)`.
    Capped(f32),
}

impl Scores {
    /// Scaled scores of all positions.
    pub fn scaled(scale: f32) -> Self {
        Self { scale, window: 0, chunk: 0, change: ScoreChange::None, sinks: None }
    }

    /// Whether fast kernels exist for heads of this size.
    pub fn has_fast_kernels(&self, head_dim: usize) -> bool {
        self.head_dims().contains(&head_dim)
    }

    fn head_dims(&self) -> &'static [usize] {
        match self.change {
            ScoreChange::None => &HEAD_DIMS,
            ScoreChange::Alibi(_) => &ALIBI_HEAD_DIMS,
            ScoreChange::Capped(_) => &CAPPED_HEAD_DIMS,
        }
    }

    /// The start of the names of kernels with this change.
    pub(super) fn prefix(&self) -> &'static str {
        match self.change {
            ScoreChange::None => "",
            ScoreChange::Alibi(_) => "alibi_",
            ScoreChange::Capped(_) => "capped_",
        }
    }

    /// The last argument of kernels with this change.
    pub(super) fn argument(&self) -> Option<Arg<'static>> {
        match self.change {
            ScoreChange::None => None,
            ScoreChange::Alibi(slopes) => Some(slopes.into()),
            ScoreChange::Capped(cap) => Some(cap.into()),
        }
    }

    /// Checks that there is a slope and a sink for each head.
    pub(super) fn check(&self, op: &'static str, shape: HeadShape) -> Result<(), CudaError> {
        let heads = shape.num_heads;
        let has_all = |span: Span| span.count::<f32>() >= heads;
        let slopes = match self.change {
            ScoreChange::Alibi(slopes) => Some(slopes),
            ScoreChange::None | ScoreChange::Capped(_) => None,
        };
        ensure!(op, slopes.is_none_or(has_all), "fewer slopes than {heads} heads");
        ensure!(op, self.sinks.is_none_or(has_all), "fewer sinks than {heads} heads");
        Ok(())
    }

    /// The same, and that a fast kernel exists for the heads.
    pub(super) fn check_fast(&self, op: &'static str, shape: HeadShape) -> Result<(), CudaError> {
        let HeadShape { num_heads, num_kv_heads, head_dim, block_size, .. } = shape;
        let dims = self.head_dims();
        ensure!(op, dims.contains(&head_dim), "head_dim {head_dim}; expected one of {dims:?}");
        ensure!(
            op,
            num_kv_heads > 0 && num_heads.is_multiple_of(num_kv_heads),
            "{num_heads} heads for {num_kv_heads} KV heads"
        );
        ensure!(
            op,
            block_size >= 16 && block_size.is_power_of_two(),
            "block_size {block_size}; a power of two from 16"
        );
        self.check(op, shape)
    }

    /// The sinks' address; 0 without sinks.
    pub(super) fn sinks_address(&self) -> u64 {
        self.sinks.map_or(0, |sinks| sinks.address())
    }
}
