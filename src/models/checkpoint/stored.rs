//! The tensors of a checkpoint as they are stored, for programs that write another one.

use super::{Checkpoint, Tensor};
use crate::ModelError;

/// A tensor as it is stored.
#[derive(Debug, Clone, Copy)]
pub struct StoredTensor<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its type as safetensors names it, such as `BF16`.
    pub dtype: &'a str,
    /// Its dimensions.
    pub shape: &'a [usize],
    /// Its elements, row-major and little-endian, in the memory-mapped file.
    pub data: &'static [u8],
}

impl Checkpoint {
    /// All tensors as they are stored, in the order of their names.
    ///
    /// # Errors
    /// Returns an error if one of them cannot be used.
    pub fn stored_tensors(&self) -> Result<Vec<StoredTensor<'_>>, ModelError> {
        let mut names: Vec<&String> = self.tensors.keys().collect();
        names.sort();
        let stored = |name: &String| {
            let tensor = self.shaped(name, &self.tensors[name].shape)?;
            let Tensor { dtype, shape, data, .. } = tensor;
            let (name, _) = self.tensors.get_key_value(name).expect("the name is a key");
            Ok(StoredTensor { name, dtype, shape, data })
        };
        names.into_iter().map(stored).collect()
    }
}
