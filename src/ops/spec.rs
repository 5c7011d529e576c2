//! Descriptions of weights, attention and limits that a model passes to a device.

use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

use crate::QuantizedRows;

/// Element type of a tensor in a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DType {
    /// bfloat16.
    Bf16,
    /// IEEE half precision.
    F16,
    /// IEEE single precision.
    F32,
}

impl DType {
    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            DType::Bf16 | DType::F16 => 2,
            DType::F32 => 4,
        }
    }
}

/// Rows that are computed when they are read: those of a matrix that is quantized, or stored in another order.
pub trait RowSource: Debug + Send + Sync {
    /// Writes the columns `cols` of row `row` to `out`, little-endian, in the type of the [`WeightSlice`].
    ///
    /// # Panics
    /// Panics if there is no such row or column, or if `out` has another length.
    fn read_row(&self, row: usize, cols: Range<usize>, out: &mut [u8]);

    /// The same rows as codes and scales, if a device can keep them so.
    fn quantized(&self) -> Option<&dyn QuantizedRows> {
        None
    }
}

/// The elements of a matrix.
#[derive(Debug, Clone)]
pub enum WeightData {
    /// Row-major and little-endian. Bytes of a memory-mapped file stay mapped until the process ends.
    Stored(Bytes),
    /// Computed row by row.
    Computed(Arc<dyn RowSource>),
}

/// A rectangle of a row-major matrix `[matrix_rows, matrix_cols]` of a checkpoint. A vector has one row, which is stored.
#[derive(Debug, Clone)]
pub struct WeightSlice<'a> {
    /// Name in the checkpoint, for messages.
    pub name: &'a str,
    /// The whole matrix.
    pub data: WeightData,
    /// Its element type.
    pub dtype: DType,
    /// Number of columns of the whole matrix.
    pub matrix_cols: usize,
    /// The rows of the slice.
    pub rows: Range<usize>,
    /// The columns of the slice.
    pub cols: Range<usize>,
    /// If set, the rows (of a vector: the elements) belong to heads whose elements are stored in another order.
    pub head_order: Option<HeadOrder>,
}

impl WeightSlice<'_> {
    /// The row of the stored matrix that is row `row` of the model; of a vector, the element.
    pub fn stored(&self, row: usize) -> usize {
        self.head_order.map_or(row, |order| order.stored(row))
    }

    /// Writes row `row` of the model, as far as it belongs to the slice, to `out`: little-endian, in the type of the
    /// slice.
    ///
    /// # Panics
    /// Panics if there is no such row, or if `out` has another length.
    pub fn read_row(&self, row: usize, out: &mut [u8]) {
        let row = self.stored(row);
        match &self.data {
            WeightData::Stored(bytes) => {
                let start = (row * self.matrix_cols + self.cols.start) * self.dtype.size();
                out.copy_from_slice(&bytes[start..start + self.cols.len() * self.dtype.size()]);
            }
            WeightData::Computed(source) => source.read_row(row, self.cols.clone(), out),
        }
    }

    /// The bytes of the slice of a vector.
    ///
    /// # Panics
    /// Panics if the elements are not stored.
    pub fn vector_bytes(&self) -> &[u8] {
        match &self.data {
            WeightData::Stored(bytes) => &bytes[self.cols.start * self.dtype.size()..self.cols.end * self.dtype.size()],
            WeightData::Computed(_) => unreachable!("vectors are stored"),
        }
    }
}

/// Where the elements of a query or key head are stored.
///
/// Devices rotate the pairs `(i, i + D / 2)` of a head. Some checkpoints pair other elements: neighbours, or only the
/// first elements of a head. Scores do not change if q and k are permuted in the same way, so their rows are loaded in
/// the order that devices expect. Elements that are not rotated have an angle of zero in the table. Those of the first half of a stored
/// head, and those of the second half, are divided evenly among both halves, so that neighbours stay together in runs of at least a
/// quarter of a head: blocks of quantized rows that have a common scale are not mixed more than necessary.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadOrder {
    /// `D`, the size of a head.
    pub head_dim: usize,
    /// The first elements of a head that are rotated; even.
    pub rotary_dim: usize,
    /// Whether pairs are neighbours `(2i, 2i + 1)`; otherwise `(i, i + rotary_dim / 2)`.
    pub is_interleaved: bool,
}

impl HeadOrder {
    /// The stored index of element `index` of heads that follow each other.
    pub fn stored(self, index: usize) -> usize {
        let (head, element) = (index / self.head_dim, index % self.head_dim);
        let (half, pairs) = (self.head_dim / 2, self.rotary_dim / 2);
        let (pair, is_second) = (element % half, element >= half);
        let within = match pair.checked_sub(pairs) {
            None if self.is_interleaved => 2 * pair + usize::from(is_second),
            None => pair + if is_second { pairs } else { 0 },
            Some(rest) => self.stored_unrotated(rest, is_second),
        };
        head * self.head_dim + within
    }

    /// The stored index of an element that is not rotated: number `index` of those in the first or second half of a head.
    fn stored_unrotated(self, index: usize, is_second: bool) -> usize {
        let half = self.head_dim / 2;
        let of_each = half - self.rotary_dim / 2;
        let (low, high) = (self.rotary_dim, half.max(self.rotary_dim));
        let num_low = high - low;
        let low_of_first = num_low / 2;
        let (own_low, before_low, before_high) = match is_second {
            false => (low_of_first, 0, 0),
            true => (num_low - low_of_first, low_of_first, of_each - low_of_first),
        };
        match index.checked_sub(own_low) {
            None => low + before_low + index,
            Some(index) => high + before_high + index,
        }
    }
}

/// A norm as it is stored in a checkpoint. Its gain is `(weight + offset) * factor`, where an absent weight is 1.
#[derive(Debug, Clone)]
pub struct NormSlices<'a> {
    /// Kind of the norm.
    pub kind: NormKind,
    /// Number of elements that are normalized together times the number of such groups.
    pub width: usize,
    /// `[width]`.
    pub weight: Option<WeightSlice<'a>>,
    /// `[width]`; only layer norms have one.
    pub bias: Option<WeightSlice<'a>>,
    /// Added to the weight: 1 where the checkpoint stores the difference from 1.
    pub offset: f32,
    /// Multiplies gain and bias.
    pub factor: f32,
}

/// Kind of a norm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormKind {
    /// RMS norm: divides by the root of the mean square.
    Rms,
    /// Layer norm: subtracts the mean, divides by the standard deviation.
    Layer,
}

/// The role of a linear layer, which determines how its output is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinearRole {
    /// q, k and v stacked; split by output (heads).
    Qkv,
    /// Attention output; split by input, so its product is a partial sum.
    Out,
    /// gate and up stacked; split by output.
    GateUp,
    /// Up projection without a gate; split by output.
    Up,
    /// Down projection; split by input, so its product is a partial sum.
    Down,
    /// Vocabulary head; split by output.
    Head,
}

/// The activation function of an MLP.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Activation {
    /// `x * sigmoid(x)`.
    Silu,
    /// Gaussian error linear unit, tanh approximation.
    GeluTanh,
    /// Gaussian error linear unit, `x * normal_cdf(x)`.
    Gelu,
    /// `max(x, 0)`.
    Relu,
    /// `max(x, 0)^2`.
    ReluSquared,
    /// `positive x^2 + slope x` above 0, else `negative (e^min(x, edge) - 1 - x) + slope x`. Requires [`crate::Feature::Xielu`].
    #[allow(missing_docs)] // Fields are named by the formula.
    Xielu { positive: f32, negative: f32, slope: f32, edge: f32 },
    /// Of experts alone: the gated product is `g * sigmoid(alpha * g) * (u + 1)`, where `g` is the gate up to `limit` and `u` is
    /// up within `-limit..=limit`.
    #[allow(missing_docs)] // Fields are named by the formula.
    ClampedSwiglu { alpha: f32, limit: f32 },
}

/// A worker's rank in its tensor-parallel group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorParallel {
    /// In `0..size`.
    pub rank: u32,
    /// Number of workers in the group.
    pub size: u32,
}

/// A worker's stage in a pipeline, which determines its layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PipelineStage {
    /// In `0..count`, in the order of the layers.
    pub index: u32,
    /// Number of stages.
    pub count: u32,
}

impl PipelineStage {
    /// A single stage with all layers.
    pub const WHOLE: Self = Self { index: 0, count: 1 };

    /// Whether this stage embeds the tokens.
    pub fn is_first(self) -> bool {
        self.index == 0
    }

    /// Whether this stage chooses the tokens.
    pub fn is_last(self) -> bool {
        self.index + 1 == self.count
    }

    /// The layers of this stage. If the layers cannot be divided equally, earlier stages have one more.
    pub fn layers(self, num_layers: usize) -> std::ops::Range<usize> {
        let (index, count) = (self.index as usize, self.count as usize);
        let (share, rest) = (num_layers / count, num_layers % count);
        let start = index * share + index.min(rest);
        start..start + share + usize::from(index < rest)
    }
}

/// How logits follow from the products of the output head.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct LogitSpec {
    /// If set, a logit `x` becomes `cap * tanh(x / cap)`. Requires [`crate::Feature::LogitCap`].
    pub cap: Option<f32>,
}

/// What the norms of q and k are computed over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeadNormSpan {
    /// Each head with the same weight `[D]`.
    Head,
    /// Each head with its own weight, `[H, D]` and `[K, D]`.
    EachHead,
    /// All heads of the whole model together, with weights `[H D]` and `[K D]`.
    AllHeads,
}

/// Limits of every step. They are set when a device is created, and its buffers have the corresponding sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepLimits {
    /// Maximum number of tokens in a step.
    pub max_tokens: usize,
    /// Maximum number of rows, in a step and in the row table.
    pub max_rows: usize,
    /// Maximum length of a sequence, prompt and output together.
    pub max_sequence_len: usize,
    /// Number of tokens in the vocabulary of the whole model.
    pub vocab_size: usize,
}

/// A worker's memory use, and the number of KV blocks that fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryPlan {
    /// Bytes used by weights.
    pub weights_bytes: u64,
    /// Bytes used by activations and scratch buffers.
    pub workspace_bytes: u64,
    /// Bytes of one KV block: of all layers of one KV group.
    pub block_bytes: u64,
    /// Number of KV blocks that fit, with some memory left to others.
    pub max_blocks: usize,
    /// Number of KV blocks that fit where as many were taken before: with less memory left to others.
    pub max_blocks_again: usize,
}

#[cfg(test)]
mod tests {
    use super::HeadOrder;

    #[test]
    fn every_element_of_a_head_is_stored_once_and_pairs_are_those_of_the_checkpoint() {
        for (head_dim, rotary_dim) in [(8, 8), (8, 2), (80, 32), (96, 72), (128, 64), (256, 64), (10, 4), (10, 8)] {
            for is_interleaved in [false, true] {
                let order = HeadOrder { head_dim, rotary_dim, is_interleaved };
                let mut stored: Vec<usize> = (0..2 * head_dim).map(|index| order.stored(index)).collect();
                for pair in 0..rotary_dim / 2 {
                    let expected = match is_interleaved {
                        true => [2 * pair, 2 * pair + 1],
                        false => [pair, pair + rotary_dim / 2],
                    };
                    assert_eq!([stored[pair], stored[pair + head_dim / 2]], expected, "{order:?}");
                }
                assert!(stored[..head_dim].iter().all(|&index| index < head_dim), "{order:?}");
                stored.sort_unstable();
                assert!(stored.into_iter().eq(0..2 * head_dim), "{order:?}");
            }
        }
    }

    #[test]
    fn elements_that_are_not_rotated_are_divided_half_by_half() {
        let order = HeadOrder { head_dim: 16, rotary_dim: 4, is_interleaved: false };
        let stored: Vec<usize> = (0..16).map(|index| order.stored(index)).collect();
        assert_eq!(stored, [0, 1, 4, 5, 8, 9, 10, 11, 2, 3, 6, 7, 12, 13, 14, 15]);
    }
}
