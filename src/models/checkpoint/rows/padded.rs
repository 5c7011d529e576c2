//! Matrices and vectors whose heads have zeros behind the elements that a checkpoint has.

use std::ops::Range;
use std::sync::Arc;

use ops::{RowSource, WeightData, WeightSlice};

use super::scaled::blocks;

/// Heads of `dim` elements, of which the checkpoint has the first `stored` ones. The others are 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HeadPadding {
    pub(crate) stored: usize,
    pub(crate) dim: usize,
}

impl HeadPadding {
    /// The stored index of element `index` of heads that follow each other; `None` if it is a zero.
    pub(crate) fn stored(self, index: usize) -> Option<usize> {
        let (head, element) = (index / self.dim, index % self.dim);
        (element < self.stored).then_some(head * self.stored + element)
    }
}

/// The rows `taken` of a matrix whose rows are padded. `slice` is the whole stored matrix.
pub(crate) fn padded_rows<'a>(slice: WeightSlice<'a>, padding: HeadPadding, taken: Range<usize>) -> WeightSlice<'a> {
    let source = PaddedRows { stored: WeightSlice { name: "", ..slice.clone() }, padding };
    WeightSlice { data: WeightData::Computed(Arc::new(source)), rows: taken, ..slice }
}

/// The columns `taken` of a matrix whose columns are padded. `slice` is the whole stored matrix.
pub(crate) fn padded_cols<'a>(slice: WeightSlice<'a>, padding: HeadPadding, taken: Range<usize>) -> WeightSlice<'a> {
    let matrix_cols = slice.matrix_cols / padding.stored * padding.dim;
    let source = PaddedCols { stored: WeightSlice { name: "", ..slice.clone() }, padding };
    WeightSlice { data: WeightData::Computed(Arc::new(source)), matrix_cols, cols: taken, ..slice }
}

/// The elements `taken` of a padded vector. `slice` is the whole stored vector.
pub(crate) fn padded_vector<'a>(slice: &WeightSlice<'a>, padding: HeadPadding, taken: Range<usize>) -> WeightSlice<'a> {
    let (stored, size) = (slice.vector_bytes(), slice.dtype.size());
    let mut data = vec![0; taken.len() * size];
    for (element, index) in data.chunks_exact_mut(size).zip(taken.clone()) {
        if let Some(index) = padding.stored(index) {
            element.copy_from_slice(&stored[index * size..(index + 1) * size]);
        }
    }
    let data = WeightData::Stored(data.into());
    WeightSlice { data, matrix_cols: taken.len(), cols: 0..taken.len(), ..slice.clone() }
}

#[derive(Debug)]
struct PaddedRows {
    stored: WeightSlice<'static>,
    padding: HeadPadding,
}

impl RowSource for PaddedRows {
    fn read_row(&self, row: usize, cols: Range<usize>, out: &mut [u8]) {
        match self.padding.stored(row) {
            Some(row) => WeightSlice { cols, ..self.stored.clone() }.read_row(row, out),
            None => out.fill(0),
        }
    }
}

#[derive(Debug)]
struct PaddedCols {
    stored: WeightSlice<'static>,
    padding: HeadPadding,
}

impl RowSource for PaddedCols {
    fn read_row(&self, row: usize, cols: Range<usize>, out: &mut [u8]) {
        out.fill(0);
        let (first, size) = (cols.start, self.stored.dtype.size());
        for (head, part) in blocks(cols, self.padding.dim) {
            let end = part.end.min(head * self.padding.dim + self.padding.stored);
            if let (Some(start), 1..) = (self.padding.stored(part.start), end.saturating_sub(part.start)) {
                let (at, len) = ((part.start - first) * size, end - part.start);
                let own = WeightSlice { cols: start..start + len, ..self.stored.clone() };
                own.read_row(row, &mut out[at..at + len * size]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use ops::DType;

    use super::*;

    /// Two heads of three elements, of which two are stored.
    const PADDING: HeadPadding = HeadPadding { stored: 2, dim: 3 };

    /// A matrix of four rows whose elements are `10 * row + col`, and whose rows are computed if `is_computed`.
    fn matrix(cols: usize, is_computed: bool) -> WeightSlice<'static> {
        let values = (0..4).flat_map(|row| (0..cols).map(move |col| (10 * row + col) as f32));
        let data = WeightData::Stored(values.flat_map(f32::to_le_bytes).collect::<Vec<u8>>().into());
        let slice = WeightSlice {
            name: "w",
            data,
            dtype: DType::F32,
            matrix_cols: cols,
            rows: 0..4,
            cols: 0..cols,
            head_order: None,
        };
        match is_computed {
            true => padded_rows(slice, HeadPadding { stored: 1, dim: 1 }, 0..4),
            false => slice,
        }
    }

    fn values(slice: &WeightSlice<'_>) -> Vec<Vec<f32>> {
        let row = |row| {
            let mut out = vec![0xff; slice.cols.len() * 4];
            slice.read_row(row, &mut out);
            out.as_chunks().0.iter().map(|value| f32::from_le_bytes(*value)).collect()
        };
        slice.rows.clone().map(row).collect()
    }

    #[test]
    fn rows_and_columns_of_padded_heads_are_zeros() {
        for is_computed in [false, true] {
            let rows = padded_rows(matrix(2, is_computed), PADDING, 1..6);
            assert_eq!(values(&rows), [[10.0, 11.0], [0.0, 0.0], [20.0, 21.0], [30.0, 31.0], [0.0, 0.0]]);
            let cols = padded_cols(matrix(4, is_computed), PADDING, 0..6);
            assert_eq!(cols.matrix_cols, 6);
            assert_eq!(values(&cols)[1], [10.0, 11.0, 0.0, 12.0, 13.0, 0.0]);
            let own = padded_cols(matrix(4, is_computed), PADDING, 3..6);
            assert_eq!(values(&own)[3], [32.0, 33.0, 0.0]);
        }
    }

    #[test]
    fn any_part_of_padded_columns_is_that_of_all() {
        let all = values(&padded_cols(matrix(4, false), PADDING, 0..6));
        for (start, end) in (0..6).flat_map(|start| (start..=6).map(move |end| (start, end))) {
            let part = values(&padded_cols(matrix(4, false), PADDING, start..end));
            assert_eq!(part[2], all[2][start..end], "{start}..{end}");
        }
    }

    #[test]
    fn elements_of_padded_vectors_are_zeros() {
        let vector = WeightSlice { rows: 0..1, ..matrix(4, false) };
        assert_eq!(values(&padded_vector(&vector, PADDING, 1..5)), [[1.0, 0.0, 2.0, 3.0]]);
    }
}
