//! Matrices that are stored in another order, or whose rows are normalized.

use std::ops::Range;
use std::sync::Arc;

use ops::{Quantization, QuantizedRows, RowSource};

use super::StoredMatrix;
use crate::checkpoint::value::{read, write};

/// The transpose of a stored matrix.
#[derive(Debug)]
pub(in crate::checkpoint) struct Transposed(pub(in crate::checkpoint) StoredMatrix);

impl RowSource for Transposed {
    fn read_row(&self, row: usize, cols: Range<usize>, out: &mut [u8]) {
        let StoredMatrix { data, dtype, cols: stored_cols } = self.0;
        let size = dtype.size();
        for (out, col) in out.chunks_exact_mut(size).zip(cols) {
            out.copy_from_slice(&data[(col * stored_cols + row) * size..][..size]);
        }
    }
}

/// A stored matrix whose rows are divided by their Euclidean norm.
#[derive(Debug)]
pub(in crate::checkpoint) struct UnitRows(pub(in crate::checkpoint) StoredMatrix);

impl RowSource for UnitRows {
    fn read_row(&self, row: usize, cols: Range<usize>, out: &mut [u8]) {
        let StoredMatrix { data, dtype, cols: width } = self.0;
        let size = dtype.size();
        let row = &data[row * width * size..][..width * size];
        let length = row.chunks_exact(size).map(|x| read(dtype, x).powi(2)).sum::<f64>().sqrt().max(1e-12);
        for (out, x) in out.chunks_exact_mut(size).zip(row[cols.start * size..].chunks_exact(size)) {
            write(dtype, read(dtype, x) / length, out);
        }
    }
}

/// The rows with even numbers of another matrix, then those with odd ones.
#[derive(Debug)]
pub(in crate::checkpoint) struct EvenFirst {
    pub(in crate::checkpoint) source: Arc<dyn RowSource>,
    pub(in crate::checkpoint) num_rows: usize,
}

impl EvenFirst {
    /// The row of the other matrix.
    fn stored(&self, row: usize) -> usize {
        let num_even = self.num_rows.div_ceil(2);
        if row < num_even { 2 * row } else { 2 * (row - num_even) + 1 }
    }

    fn codes(&self) -> &dyn QuantizedRows {
        self.source.quantized().expect("only the rows of quantized matrices have codes")
    }
}

impl RowSource for EvenFirst {
    fn read_row(&self, row: usize, cols: Range<usize>, out: &mut [u8]) {
        self.source.read_row(self.stored(row), cols, out);
    }

    /// A scale must not belong to several rows.
    fn quantized(&self) -> Option<&dyn QuantizedRows> {
        let source = self.source.quantized()?;
        matches!(source.quantization(), Quantization::Mxfp4 | Quantization::Nvfp4).then_some(self as &dyn QuantizedRows)
    }
}

impl QuantizedRows for EvenFirst {
    fn quantization(&self) -> Quantization {
        self.codes().quantization()
    }

    fn read_codes(&self, row: usize, cols: Range<usize>, out: &mut [u8]) {
        self.codes().read_codes(self.stored(row), cols, out);
    }

    fn scale(&self, row: usize, col: usize) -> (f32, u8) {
        self.codes().scale(self.stored(row), col)
    }
}

#[cfg(test)]
mod tests {
    use ops::DType;

    use super::*;

    fn stored(values: &[f32], cols: usize) -> StoredMatrix {
        let data: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        StoredMatrix { data: data.leak(), dtype: DType::F32, cols }
    }

    fn row(source: &dyn RowSource, row: usize, cols: Range<usize>) -> Vec<f32> {
        let mut out = vec![0; cols.len() * 4];
        source.read_row(row, cols, &mut out);
        out.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    }

    #[test]
    fn a_transposed_row_is_a_column() {
        let transposed = Transposed(stored(&[0.0, 1.0, 2.0, 10.0, 11.0, 12.0, 20.0, 21.0, 22.0], 3));
        assert_eq!(row(&transposed, 1, 1..3), [11.0, 21.0]);
        let even_first = EvenFirst { source: Arc::new(transposed), num_rows: 3 };
        let first: Vec<f32> = (0..3).map(|index| row(&even_first, index, 0..1)[0]).collect();
        assert_eq!(first, [0.0, 2.0, 1.0]);
    }

    #[test]
    fn rows_of_length_one_keep_their_direction() {
        let rows = UnitRows(stored(&[3.0, 4.0, 0.0, 0.0, 0.0, -2.0], 2));
        assert_eq!(row(&rows, 0, 0..2), [0.6, 0.8]);
        assert_eq!((row(&rows, 1, 0..2), row(&rows, 2, 1..2)), (vec![0.0, 0.0], vec![-1.0]));
    }
}
