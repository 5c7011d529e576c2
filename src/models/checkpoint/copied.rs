//! Tensors that are converted when they are loaded. Copies stay in memory until the process ends.

use std::ops::Range;

use ops::{DType, WeightSlice};

use super::Checkpoint;
use super::convert::{self, RowOrder};
use crate::ModelError;

impl Checkpoint {
    /// Like [`Checkpoint::matrix`], for a matrix that is stored as `[matrix_cols, matrix_rows]`. The part is copied;
    /// the copy stays in memory until the process ends.
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
        let data = convert::transpose(tensor.data, dtype, shape[0], rows.clone(), cols.clone());
        let (rows, cols) = (0..rows.len(), 0..cols.len());
        Ok(WeightSlice { name, data: Vec::leak(data), dtype, matrix_cols: cols.len(), rows, cols, head_order: None })
    }

    /// The given rows of the matrix `name`, each scaled to Euclidean norm 1. They are copied; the copy stays in memory
    /// until the process ends.
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
        let data = convert::unit_rows(tensor.data, dtype, shape[1], rows.clone());
        Ok(WeightSlice {
            name,
            data: Vec::leak(data),
            dtype,
            matrix_cols: shape[1],
            rows,
            cols: 0..shape[1],
            head_order: None,
        })
    }

    /// The given rows and columns of matrix `index` of the tensor `name`, `[count, matrix_cols, matrix_rows]`. The part is
    /// copied; the copy stays in memory until the process ends.
    ///
    /// # Errors
    /// The same as of [`Checkpoint::matrix`].
    pub fn transposed_of<'a>(
        &self,
        name: &'a str,
        (index, count): (usize, usize),
        shape: [usize; 2],
        rows: Range<usize>,
        cols: Range<usize>,
    ) -> Result<WeightSlice<'a>, ModelError> {
        let (tensor, dtype) = self.tensor(name, &[count, shape[1], shape[0]])?;
        let bytes = shape[0] * shape[1] * dtype.size();
        let own = &tensor.data[index * bytes..(index + 1) * bytes];
        let data = convert::transpose(own, dtype, shape[0], rows.clone(), cols.clone());
        let (rows, cols) = (0..rows.len(), 0..cols.len());
        Ok(WeightSlice { name, data: Vec::leak(data), dtype, matrix_cols: cols.len(), rows, cols, head_order: None })
    }

    /// The same with all rows, in the given order.
    ///
    /// # Errors
    /// The same as of [`Checkpoint::matrix`].
    pub fn transposed_of_in<'a>(
        &self,
        name: &'a str,
        matrix: (usize, usize),
        shape: [usize; 2],
        (order, cols): (RowOrder, Range<usize>),
    ) -> Result<WeightSlice<'a>, ModelError> {
        let (tensor, dtype) = self.tensor(name, &[matrix.1, shape[1], shape[0]])?;
        let bytes = shape[0] * shape[1] * dtype.size();
        let own = &tensor.data[matrix.0 * bytes..(matrix.0 + 1) * bytes];
        let rows = convert::transpose(own, dtype, shape[0], 0..shape[0], cols.clone());
        let data = Vec::leak(convert::ordered(rows, cols.len() * dtype.size(), order));
        let (rows, cols) = (0..shape[0], 0..cols.len());
        Ok(WeightSlice { name, data, dtype, matrix_cols: cols.len(), rows, cols, head_order: None })
    }

    /// A slice of `rows` and `cols` of the tensor `name`, which must have the shape `stored`, for a device that does not
    /// read its data ([`ops::Device::reads_weights`]).
    ///
    /// # Errors
    /// The same as of [`Checkpoint::matrix`].
    pub fn unread<'a>(
        &self,
        name: &'a str,
        stored: &[usize],
        rows: Range<usize>,
        cols: Range<usize>,
    ) -> Result<WeightSlice<'a>, ModelError> {
        let (tensor, dtype) = self.tensor(name, stored)?;
        Ok(WeightSlice { name, data: tensor.data, dtype, matrix_cols: cols.end, rows, cols, head_order: None })
    }

    /// Whether a tensor is stored in fp8.
    pub(crate) fn is_fp8(&self, name: &str) -> bool {
        self.tensors.get(name).is_some_and(|tensor| tensor.dtype == "F8_E4M3")
    }

    /// The given rows and columns of the matrix `name`, which is stored in fp8, times its scales: `NAME_scale_inv` or
    /// `NAME_scale`, one for each `block`, for each row, or for the matrix. The part is rounded to bf16; the copy stays in
    /// memory until the process ends. With `is_read` false, only shapes are checked.
    ///
    /// # Errors
    /// Returns an error if a tensor is missing or has another shape or type.
    pub(crate) fn fp8<'a>(
        &self,
        name: &'a str,
        shape: [usize; 2],
        (rows, cols): (Range<usize>, Range<usize>),
        (block, is_read): (Option<[usize; 2]>, bool),
    ) -> Result<WeightSlice<'a>, ModelError> {
        let bytes = self.bytes(name, "F8_E4M3", &shape)?;
        let scales_name = ["_scale_inv", "_scale"].map(|end| format!("{name}{end}"));
        let scales_name = scales_name.iter().find(|name| self.contains(name)).unwrap_or(&scales_name[1]);
        let scales = self.fp8_scales(scales_name, shape, block)?;
        // The scale of activations, which are not quantized here.
        if let Some(layer) = name.strip_suffix("weight") {
            self.used.borrow_mut().insert(format!("{layer}input_scale"));
        }
        let dtype = DType::Bf16;
        if !is_read {
            return Ok(WeightSlice { name, data: bytes, dtype, matrix_cols: shape[1], rows, cols, head_order: None });
        }
        let data = Vec::leak(convert::expand_fp8(bytes, shape[1], &scales, (rows.clone(), cols.clone())));
        let (rows, cols) = (0..rows.len(), 0..cols.len());
        Ok(WeightSlice { name, data, dtype, matrix_cols: cols.len(), rows, cols, head_order: None })
    }

    fn fp8_scales(
        &self,
        name: &str,
        [rows, cols]: [usize; 2],
        block: Option<[usize; 2]>,
    ) -> Result<convert::Scales, ModelError> {
        let stored = self.tensors.get(name).map(|tensor| tensor.shape.as_slice());
        // A layer may have a scale for each row or for the matrix although others have blocks.
        let (block, shape) = match (stored, block) {
            (Some([]), _) => ([rows, cols], vec![]),
            (Some([1]), _) => ([rows, cols], vec![1]),
            (Some([found, 1]), block) if *found == rows && block.is_none_or(|[height, _]| height != 1) => {
                ([1, cols], vec![rows, 1])
            }
            (_, Some(block)) => (block, vec![rows.div_ceil(block[0]), cols.div_ceil(block[1])]),
            (_, None) => ([1, cols], vec![rows, 1]),
        };
        let values = self.values(name, &shape, 0..shape.iter().product())?;
        Ok(convert::Scales { values, block, cols: cols.div_ceil(block[1]) })
    }

    /// Matrix `index` of `count`, each of `shape` `[rows, cols]`, which are stored in MXFP4: the tensors `blocks`
    /// `[count, rows, cols / 32, 16]` and `scales` `[count, rows, cols / 32]`. It is expanded to bf16, which holds every
    /// value exactly; the copy stays in memory until the process ends. With `is_read` false, only shapes are checked. The
    /// slice has no name.
    ///
    /// # Errors
    /// Returns an error if a tensor is missing or has another shape or type.
    pub fn mxfp4<'a>(
        &self,
        (blocks, scales): (&str, &str),
        (index, count): (usize, usize),
        shape: [usize; 2],
        (order, is_read): (RowOrder, bool),
    ) -> Result<WeightSlice<'a>, ModelError> {
        let [rows, cols] = shape;
        let groups = cols / convert::MXFP4_BLOCK;
        let nibbles = self.bytes(blocks, "U8", &[count, rows, groups, convert::MXFP4_BLOCK / 2])?;
        let exponents = self.bytes(scales, "U8", &[count, rows, groups])?;
        let data: &'static [u8] = match is_read {
            true => {
                let part = |data: &'static [u8]| &data[index * data.len() / count..(index + 1) * data.len() / count];
                let expanded = convert::expand_mxfp4(part(nibbles), part(exponents));
                Vec::leak(convert::ordered(expanded, cols * DType::Bf16.size(), order))
            }
            false => nibbles,
        };
        let dtype = DType::Bf16;
        Ok(WeightSlice { name: "", data, dtype, matrix_cols: cols, rows: 0..rows, cols: 0..cols, head_order: None })
    }
}
