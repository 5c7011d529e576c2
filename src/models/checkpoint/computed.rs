//! Tensors whose rows are computed when a device reads them: transposed, normalized.

use std::ops::Range;
use std::sync::Arc;

use ops::{DType, RowSource, WeightData, WeightSlice};

use super::Checkpoint;
use super::rows::{EvenFirst, Microscaled, StoredMatrix, Transposed, UnitRows};
use crate::ModelError;

/// The order of the rows of a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowOrder {
    /// That of the file.
    AsStored,
    /// Those with even numbers, then those with odd ones.
    EvenFirst,
}

/// The given rows and columns of a matrix with `matrix_cols` columns.
pub(super) fn computed<'a>(
    name: &'a str,
    source: Arc<dyn RowSource>,
    dtype: DType,
    matrix_cols: usize,
    (rows, cols): (Range<usize>, Range<usize>),
) -> WeightSlice<'a> {
    WeightSlice { name, data: WeightData::Computed(source), dtype, matrix_cols, rows, cols, head_order: None }
}

/// A matrix with `num_rows` rows in another order.
fn in_order(source: Arc<dyn RowSource>, order: RowOrder, num_rows: usize) -> Arc<dyn RowSource> {
    match order {
        RowOrder::AsStored => source,
        RowOrder::EvenFirst => Arc::new(EvenFirst { source, num_rows }),
    }
}

impl Checkpoint {
    /// Like [`Checkpoint::matrix`], for a matrix that is stored as `[matrix_cols, matrix_rows]`.
    ///
    /// # Errors
    /// The same as of [`Checkpoint::matrix`].
    pub fn transposed<'a>(
        &self,
        name: &'a str,
        shape: [usize; 2],
        rows: Range<usize>,
        cols: Range<usize>,
    ) -> Result<WeightSlice<'a>, ModelError> {
        let (tensor, dtype) = self.tensor(name, &[shape[1], shape[0]])?;
        let source = Transposed(StoredMatrix { data: tensor.data, dtype, cols: shape[0] });
        Ok(computed(name, Arc::new(source), dtype, shape[1], (rows, cols)))
    }

    /// The given rows of the matrix `name`, each scaled to Euclidean norm 1.
    ///
    /// # Errors
    /// The same as of [`Checkpoint::matrix`].
    pub fn unit_rows<'a>(
        &self,
        name: &'a str,
        shape: [usize; 2],
        rows: Range<usize>,
    ) -> Result<WeightSlice<'a>, ModelError> {
        let (tensor, dtype) = self.tensor(name, &shape)?;
        let source = UnitRows(StoredMatrix { data: tensor.data, dtype, cols: shape[1] });
        Ok(computed(name, Arc::new(source), dtype, shape[1], (rows, 0..shape[1])))
    }

    /// The given rows and columns of matrix `index` of the tensor `name`, `[count, matrix_cols, matrix_rows]`. The rows are counted in
    /// the given order.
    ///
    /// # Errors
    /// The same as of [`Checkpoint::matrix`].
    pub fn transposed_of<'a>(
        &self,
        name: &'a str,
        (index, count): (usize, usize),
        shape: [usize; 2],
        order: RowOrder,
        part: (Range<usize>, Range<usize>),
    ) -> Result<WeightSlice<'a>, ModelError> {
        let (tensor, dtype) = self.tensor(name, &[count, shape[1], shape[0]])?;
        let bytes = shape[0] * shape[1] * dtype.size();
        let data = &tensor.data[index * bytes..(index + 1) * bytes];
        let source = Arc::new(Transposed(StoredMatrix { data, dtype, cols: shape[0] }));
        Ok(computed(name, in_order(source, order, shape[0]), dtype, shape[1], part))
    }

    /// The given rows and columns of matrix `index` of `count`, each of `shape` `[rows, cols]`, which are stored in MXFP4: the tensors
    /// `NAME_blocks` `[count, rows, cols / 32, 16]` and `NAME_scales` `[count, rows, cols / 32]`. bf16 holds every value exactly. The
    /// rows are counted in the given order. `None` if there are no such tensors.
    ///
    /// # Errors
    /// Returns an error if a tensor has another shape or type.
    pub fn mxfp4_of<'a>(
        &self,
        name: &'a str,
        (index, count): (usize, usize),
        shape: [usize; 2],
        order: RowOrder,
        part: (Range<usize>, Range<usize>),
    ) -> Result<Option<WeightSlice<'a>>, ModelError> {
        let (blocks, scales) = (format!("{name}_blocks"), format!("{name}_scales"));
        if !self.contains(&blocks) {
            return Ok(None);
        }
        let [rows, cols] = shape;
        let groups = cols / Microscaled::MXFP4_BLOCK;
        let nibbles = self.bytes(&blocks, "U8", &[count, rows, groups, Microscaled::MXFP4_BLOCK / 2])?;
        let exponents = self.bytes(&scales, "U8", &[count, rows, groups])?;
        let own = |data: &'static [u8]| &data[index * data.len() / count..(index + 1) * data.len() / count];
        let source = Arc::new(Microscaled::mxfp4(own(nibbles), own(exponents), cols));
        Ok(Some(computed(name, in_order(source, order, rows), DType::Bf16, cols, part)))
    }
}

impl Checkpoint {
    /// The vectors `NAME.number.weight` of length `len`, one behind the other.
    ///
    /// # Errors
    /// Returns an error if one is missing, or if its shape or type is not expected.
    ///
    /// # Panics
    /// Panics if `numbers` is empty.
    pub fn joined<'a>(&self, name: &'a str, len: usize, numbers: Range<usize>) -> Result<WeightSlice<'a>, ModelError> {
        let matrix_cols = numbers.len() * len;
        let (mut data, mut found) = (Vec::new(), None);
        for number in numbers {
            let (tensor, dtype) = self.tensor(&format!("{name}.{number}.weight"), &[len])?;
            data.extend_from_slice(tensor.data);
            found = Some(dtype);
        }
        let dtype = found.expect("there is a vector");
        let data = WeightData::Stored(data.into());
        Ok(WeightSlice { name, data, dtype, matrix_cols, rows: 0..1, cols: 0..matrix_cols, head_order: None })
    }
}
