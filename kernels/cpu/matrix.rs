//! Weight matrices in the memory layout of a checkpoint.

use std::ops::Range;

use bytes::Bytes;

use crate::cpu::dot::{Bf16, Element, F16, F32};

/// Number of rows whose products are computed together.
pub(crate) const GROUP: usize = 4;

/// Element type of weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightType {
    /// bfloat16.
    Bf16,
    /// IEEE half precision.
    F16,
    /// IEEE single precision.
    F32,
}

impl WeightType {
    /// Bytes of one weight.
    pub fn size(self) -> usize {
        match self {
            WeightType::Bf16 | WeightType::F16 => 2,
            WeightType::F32 => 4,
        }
    }
}

/// A weight matrix `[N, K]` in parts stacked along `N`. Clones share their memory.
#[derive(Debug, Clone)]
pub struct Matrix {
    pub(super) weight_type: WeightType,
    pub(super) cols: usize,
    pub(super) rows: usize,
    pub(super) parts: Vec<Part>,
    pub(super) bias: Option<Vec<f32>>,
}

#[derive(Debug, Clone)]
pub(crate) struct Part {
    pub(super) data: Bytes, // starting at the first element used
    pub(super) rows: usize,
    pub(super) row_bytes: usize,   // distance from one row to the next
    pub(super) first_row: usize,   // index in the matrix
    pub(super) first_group: usize, // number of groups in the parts before
}

impl Part {
    fn groups(&self) -> usize {
        self.rows.div_ceil(GROUP)
    }

    /// The part of the matrix's `groups` that belongs to this part, counted from its first group.
    pub(crate) fn groups_in(&self, groups: &Range<usize>) -> Range<usize> {
        let end = groups.end.min(self.first_group + self.groups()).saturating_sub(self.first_group);
        groups.start.saturating_sub(self.first_group).min(end)..end
    }
}

impl Matrix {
    /// A matrix without rows; `cols` is `K`.
    pub fn new(weight_type: WeightType, cols: usize) -> Self {
        Self { weight_type, cols, rows: 0, parts: Vec::new(), bias: None }
    }

    /// Appends `rows` rows: row `i` starts at `data[i * row_bytes]`.
    ///
    /// # Panics
    /// Panics if `data` ends before its last row.
    pub fn stack(&mut self, data: impl Into<Bytes>, rows: usize, row_bytes: usize) {
        let data = data.into();
        let width = self.cols * self.weight_type.size();
        assert!(rows == 0 || (rows - 1) * row_bytes + width <= data.len(), "weights end before their last row");
        let first_group = self.num_groups();
        self.parts.push(Part { data, rows, row_bytes, first_row: self.rows, first_group });
        self.rows += rows;
    }

    /// Adds `bias [N]` to each output.
    ///
    /// # Panics
    /// Panics if its length is not `N`.
    pub fn set_bias(&mut self, bias: Vec<f32>) {
        assert_eq!(bias.len(), self.rows, "one bias for each output");
        self.bias = Some(bias);
    }

    /// `N`, the number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// `K`, the number of columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Element type.
    pub fn weight_type(&self) -> WeightType {
        self.weight_type
    }

    /// Number of bytes that one product reads.
    pub fn bytes(&self) -> usize {
        self.rows * self.cols * self.weight_type.size()
    }

    /// Row `index` as f32, for an embedding.
    ///
    /// # Panics
    /// Panics if there is no such row, or if `out` is not `[K]`.
    pub fn read_row(&self, index: usize, out: &mut [f32]) {
        assert_eq!(out.len(), self.cols, "a row has K elements");
        read_weights(self.weight_type, self.row_bytes(index), out);
    }

    /// The bytes of row `index` in the checkpoint.
    ///
    /// # Panics
    /// Panics if there is no such row.
    pub(crate) fn row_bytes(&self, index: usize) -> &[u8] {
        let part = self.parts.iter().find(|part| (part.first_row..part.first_row + part.rows).contains(&index));
        let part = part.expect("the row is in the matrix");
        &part.data[(index - part.first_row) * part.row_bytes..][..self.cols * self.weight_type.size()]
    }

    pub(crate) fn num_groups(&self) -> usize {
        self.parts.last().map_or(0, |part| part.first_group + part.groups())
    }
}

/// `out[i]` = weight `i` of `bytes`.
///
/// # Panics
/// Panics if their lengths differ.
pub fn read_weights(weight_type: WeightType, bytes: &[u8], out: &mut [f32]) {
    let size = weight_type.size();
    assert_eq!(bytes.len(), out.len() * size, "one output for each weight");
    for (out, bytes) in out.iter_mut().zip(bytes.chunks_exact(size)) {
        *out = match weight_type {
            WeightType::Bf16 => Bf16::weight(bytes),
            WeightType::F16 => F16::weight(bytes),
            WeightType::F32 => F32::weight(bytes),
        };
    }
}
