//! Quantized matrices. Their values are computed in bf16.
//!
//! The types and shapes of a layer's tensors tell most of its form: layers that are left out of the quantization, or have other
//! numbers of bits or groups, need no rules from the configuration.

use std::ops::Range;
use std::sync::Arc;

use ops::{DType, RowSource, WeightSlice};

use super::Checkpoint;
use super::computed::computed;
use super::rows::{
    Awq, ColGroups, Gptq, Microscaled, PackedIntegers, ScaleValues, ScaledBytes, Scales, StoredMatrix, Words,
};
use crate::ModelError;
use crate::config::WeightFormat;

/// Ends of the names of a layer's tensors that are not needed: scales of activations, which are not quantized here, and a shape that
/// the configuration gives, too.
const UNNEEDED: [&str; 3] = ["input_scale", "input_global_scale", "weight_shape"];

impl Checkpoint {
    /// Like [`Checkpoint::matrix`], for a matrix that may be quantized. `name` is what it is called without quantization, and ends
    /// with `weight`.
    ///
    /// # Errors
    /// Returns an error if a tensor is missing, or has another shape or type than the format says.
    pub(crate) fn maybe_quantized<'a>(
        &self,
        name: &'a str,
        shape: [usize; 2],
        part: (Range<usize>, Range<usize>),
        format: WeightFormat,
    ) -> Result<WeightSlice<'a>, ModelError> {
        let layer = Layer { checkpoint: self, prefix: name.strip_suffix("weight").unwrap_or(name), shape };
        let source = match format {
            WeightFormat::Plain | WeightFormat::Mxfp4Experts => None,
            WeightFormat::Awq => layer.awq()?,
            WeightFormat::Gptq { zero_offset } => layer.gptq(zero_offset)?,
            WeightFormat::ByTensors { block, has_fp8_inputs } => layer.by_tensors(block, has_fp8_inputs)?,
        };
        match source {
            Some(source) => {
                for end in UNNEEDED {
                    self.used.borrow_mut().insert(layer.name(end));
                }
                Ok(computed(name, source, DType::Bf16, shape[1], part))
            }
            None => self.matrix(name, shape, part.0, part.1),
        }
    }

    fn dtype(&self, name: &str) -> Option<&str> {
        self.tensors.get(name).map(|tensor| tensor.dtype.as_str())
    }

    /// A matrix of 32-bit words, `[rows, cols]`.
    fn words(&self, name: &str, [rows, cols]: [usize; 2]) -> Result<Words, ModelError> {
        let data = self.integers(name, "I32", &[rows, cols], size_of::<u32>())?;
        Ok(Words { data, cols })
    }

    fn stored(&self, name: &str, shape: &[usize], cols: usize) -> Result<StoredMatrix, ModelError> {
        let (tensor, dtype) = self.tensor(name, shape)?;
        Ok(StoredMatrix { data: tensor.data, dtype, cols })
    }
}

/// A linear layer `[rows, cols]` whose tensors begin with `prefix`.
struct Layer<'c> {
    checkpoint: &'c Checkpoint,
    prefix: &'c str,
    shape: [usize; 2],
}

type Found = Option<Arc<dyn RowSource>>;

impl Layer<'_> {
    fn name(&self, end: &str) -> String {
        format!("{}{end}", self.prefix)
    }

    /// The stored shape of a tensor of the layer; none if it is missing or has another number of dimensions than two.
    fn stored_shape(&self, end: &str) -> Option<[usize; 2]> {
        self.checkpoint.tensors.get(&self.name(end))?.shape.as_slice().try_into().ok()
    }

    fn wrong(&self, end: &str, reason: &str) -> ModelError {
        let name = self.name(end);
        let path = self.checkpoint.tensors.get(&name).map_or(self.checkpoint.dir.clone(), |tensor| tensor.path.clone());
        ModelError::Header { path, reason: format!("tensor `{name}` {reason}") }
    }

    /// Columns of each of `groups` groups.
    fn group(&self, end: &str, groups: usize) -> Result<usize, ModelError> {
        let cols = self.shape[1];
        match groups > 0 && cols.is_multiple_of(groups) {
            true => Ok(cols / groups),
            false => Err(self.wrong(end, &format!("has {groups} groups, which do not divide {cols} inputs"))),
        }
    }

    /// The groups of columns; none if they are in order. The tensor may be missing.
    fn col_groups(&self, end: &str, groups: usize) -> Result<Option<ColGroups>, ModelError> {
        let (name, cols) = (self.name(end), self.shape[1]);
        if !self.checkpoint.contains(&name) {
            return Ok(None);
        }
        let data = self.checkpoint.integers(&name, "I32", &[cols], size_of::<u32>())?;
        let words = Words { data, cols };
        if let Some(wrong) = (0..cols).map(|col| words.get(0, col)).find(|group| *group as usize >= groups) {
            return Err(self.wrong(end, &format!("names group {wrong}, but the scales have {groups}")));
        }
        let in_order = cols.is_multiple_of(groups).then(|| cols / groups);
        let is_in_order = in_order.is_some_and(|group| (0..cols).all(|col| words.get(0, col) as usize == col / group));
        Ok((!is_in_order).then(|| ColGroups::new(words, groups)))
    }

    fn awq(&self) -> Result<Found, ModelError> {
        if !self.checkpoint.contains(&self.name("qweight")) {
            return Ok(None);
        }
        let [rows, cols] = self.shape;
        let words = self.checkpoint.words(&self.name("qweight"), [cols, rows / 8])?;
        let groups = self.stored_shape("scales").map_or(1, |shape| shape[0]);
        let scales = self.checkpoint.stored(&self.name("scales"), &[groups, rows], rows)?;
        let zeros = self.checkpoint.words(&self.name("qzeros"), [groups, rows / 8])?;
        let group = self.group("scales", groups)?;
        Ok(Some(Arc::new(Awq { words, zeros, scales, group })))
    }

    fn gptq(&self, zero_offset: i32) -> Result<Found, ModelError> {
        let Some([num_words, _]) = self.stored_shape("qweight") else { return Ok(None) };
        let [rows, cols] = self.shape;
        let is_right = |bits: &usize| (cols * bits).is_multiple_of(32) && num_words == cols * bits / 32;
        let bits = [2, 3, 4, 8].into_iter().find(is_right).ok_or_else(|| {
            self.wrong("qweight", &format!("has {num_words} words for {cols} inputs; expected 2, 3, 4 or 8 bits each"))
        })?;
        let words = self.checkpoint.words(&self.name("qweight"), [num_words, rows])?;
        let groups = self.stored_shape("scales").map_or(1, |shape| shape[0]);
        let scales = self.checkpoint.stored(&self.name("scales"), &[groups, rows], rows)?;
        let zeros = self.checkpoint.words(&self.name("qzeros"), [groups, (rows * bits).div_ceil(32)])?;
        let col_groups = self.col_groups("g_idx", groups)?;
        let has_neighbours = col_groups.as_ref().is_none_or(ColGroups::are_even);
        let group = if has_neighbours { self.group("scales", groups)? } else { cols };
        Ok(Some(Arc::new(Gptq { words, zeros, scales, bits, zero_offset, group, col_groups })))
    }

    /// The forms of compressed-tensors, ModelOpt and fp8.
    fn by_tensors(&self, block: Option<[usize; 2]>, has_fp8_inputs: bool) -> Result<Found, ModelError> {
        let dtype = |end| self.checkpoint.dtype(&self.name(end));
        match (dtype("weight_packed"), dtype("weight")) {
            (Some("I32"), _) => self.packed_integers().map(Some),
            (Some("U8"), _) => match dtype("weight_scale") {
                Some(scale @ ("U8" | "F8_E8M0")) => self.mxfp4(scale).map(Some),
                _ => {
                    let divisor = self.checkpoint.scalar(&self.name("weight_global_scale"))?;
                    self.nvfp4("weight_packed", 1.0 / divisor).map(Some)
                }
            },
            (_, Some("U8")) => {
                let factor = self.checkpoint.scalar(&self.name("weight_scale_2"))?;
                self.nvfp4("weight", factor).map(Some)
            }
            (_, Some("F8_E4M3")) => self.scaled_bytes(block, Some(has_fp8_inputs)).map(Some),
            (_, Some("I8")) => self.scaled_bytes(block, None).map(Some),
            _ => Ok(None),
        }
    }

    fn packed_integers(&self) -> Result<Arc<dyn RowSource>, ModelError> {
        let [rows, cols] = self.shape;
        let num_words = self.stored_shape("weight_packed").map_or(0, |shape| shape[1]);
        let bits = (2..=8).find(|bits| (cols * bits).div_ceil(32) == num_words).ok_or_else(|| {
            let reason = format!("has {num_words} words for {cols} inputs; expected 2 to 8 bits each");
            self.wrong("weight_packed", &reason)
        })?;
        let words = self.checkpoint.words(&self.name("weight_packed"), [rows, num_words])?;
        let (scale_shape, has_row_scales) = match self.stored_shape("weight_scale") {
            Some([1, groups]) if rows != 1 => (vec![1, groups], false),
            Some([_, groups]) => (vec![rows, groups], true),
            None => (vec![1], false),
        };
        let groups = scale_shape.last().copied().unwrap_or(1);
        let scales = self.checkpoint.stored(&self.name("weight_scale"), &scale_shape, groups)?;
        let zeros = match self.checkpoint.contains(&self.name("weight_zero_point")) {
            true => {
                let shape = [(rows * bits).div_ceil(32), groups];
                Some(self.checkpoint.words(&self.name("weight_zero_point"), shape)?)
            }
            false => None,
        };
        let col_groups = self.col_groups("weight_g_idx", groups)?;
        let has_neighbours = col_groups.as_ref().is_none_or(ColGroups::are_even);
        let group = if has_neighbours { self.group("weight_scale", groups)? } else { cols };
        Ok(Arc::new(PackedIntegers { words, bits, scales, has_row_scales, group, zeros, col_groups }))
    }

    fn mxfp4(&self, scale_dtype: &str) -> Result<Arc<dyn RowSource>, ModelError> {
        let [rows, cols] = self.shape;
        let nibbles = self.checkpoint.bytes(&self.name("weight_packed"), "U8", &[rows, cols / 2])?;
        let shape = [rows, cols / Microscaled::MXFP4_BLOCK];
        let scales = self.checkpoint.bytes(&self.name("weight_scale"), scale_dtype, &shape)?;
        Ok(Arc::new(Microscaled::mxfp4(nibbles, scales, cols)))
    }

    fn nvfp4(&self, weight: &str, factor: f32) -> Result<Arc<dyn RowSource>, ModelError> {
        let [rows, cols] = self.shape;
        let nibbles = self.checkpoint.bytes(&self.name(weight), "U8", &[rows, cols / 2])?;
        let shape = [rows, cols / Microscaled::NVFP4_BLOCK];
        let scales = self.checkpoint.bytes(&self.name("weight_scale"), "F8_E4M3", &shape)?;
        Ok(Arc::new(Microscaled::nvfp4(nibbles, scales, cols, factor)))
    }

    /// One byte an element, with a scale for the matrix, for each row, for groups of a row, or for blocks.
    /// `fp8`: whether the inputs of fp8 may be rounded to it; none for integers.
    fn scaled_bytes(&self, block: Option<[usize; 2]>, fp8: Option<bool>) -> Result<Arc<dyn RowSource>, ModelError> {
        let [rows, cols] = self.shape;
        let (is_integer, has_fp8_inputs) = (fp8.is_none(), fp8 == Some(true));
        let dtype = if is_integer { "I8" } else { "F8_E4M3" };
        let data = self.checkpoint.bytes(&self.name("weight"), dtype, &[rows, cols])?;
        let end = match self.checkpoint.contains(&self.name("weight_scale_inv")) {
            true => "weight_scale_inv",
            false => "weight_scale",
        };
        let name = self.name(end);
        if matches!(self.checkpoint.dtype(&name), Some("U8" | "F8_E8M0")) {
            return self.mxfp8(data, &name, has_fp8_inputs);
        }
        let stored = self.checkpoint.tensors.get(&name).map(|tensor| tensor.shape.as_slice());
        // A layer may have a scale for each row or for the matrix although others have blocks.
        let (block, shape) = match (stored, block) {
            (Some([]), _) => ([rows, cols], vec![]),
            (Some([1]), _) => ([rows, cols], vec![1]),
            (Some([found]), _) if *found == rows => ([1, cols], vec![rows]),
            (Some([found, 1]), block) if *found == rows && block.is_none_or(|[height, _]| height != 1) => {
                ([1, cols], vec![rows, 1])
            }
            // ModelOpt's blocks have a dimension of 1 behind each of the two.
            (Some([_, 1, _, 1]), Some(block)) => (block, vec![rows.div_ceil(block[0]), 1, cols.div_ceil(block[1]), 1]),
            (_, Some(block)) => (block, vec![rows.div_ceil(block[0]), cols.div_ceil(block[1])]),
            (Some([_, groups]), None) => ([1, self.group(end, *groups)?], vec![rows, *groups]),
            (_, None) => ([1, cols], vec![rows, 1]),
        };
        let scales = self.checkpoint.stored(&name, &shape, cols.div_ceil(block[1]))?;
        let zeros = match is_integer && self.checkpoint.contains(&self.name("weight_zero_point")) {
            true => Some(self.checkpoint.bytes(&self.name("weight_zero_point"), "I8", &shape)?),
            false => None,
        };
        let scales = Scales { values: ScaleValues::Floats(scales), block };
        Ok(Arc::new(ScaledBytes { data, cols, scales, is_integer, zeros, has_fp8_inputs }))
    }

    /// fp8 with a power of two for each 32 columns of a row. Its name and type tell what the tensor `scales` holds.
    fn mxfp8(&self, data: &'static [u8], scales: &str, has_fp8_inputs: bool) -> Result<Arc<dyn RowSource>, ModelError> {
        let [rows, cols] = self.shape;
        let (width, dtype) = (ScaledBytes::MXFP8_BLOCK, self.checkpoint.dtype(scales).unwrap_or_default());
        let groups = cols.div_ceil(width);
        let values = self.checkpoint.bytes(scales, dtype, &[rows, groups])?;
        let scales = Scales { values: ScaleValues::E8m0(values, groups), block: [1, width] };
        Ok(Arc::new(ScaledBytes { data, cols, scales, is_integer: false, zeros: None, has_fp8_inputs }))
    }
}
