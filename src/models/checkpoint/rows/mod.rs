//! Matrices whose rows are computed when a device reads them.

mod integers;
mod layout;
mod padded;
mod rounded;
mod scaled;

pub(super) use integers::{Awq, ColGroups, Gptq, PackedIntegers};
pub(super) use layout::{EvenFirst, Transposed, UnitRows};
pub(crate) use padded::{HeadPadding, padded_cols, padded_rows, padded_vector};
pub use rounded::rounded;
pub(super) use scaled::{Microscaled, ScaleValues, ScaledBytes, Scales};

use ops::DType;

use super::value::read;

/// A matrix in the memory-mapped file.
#[derive(Debug, Clone, Copy)]
pub(super) struct StoredMatrix {
    pub(super) data: &'static [u8],
    pub(super) dtype: DType,
    pub(super) cols: usize,
}

impl StoredMatrix {
    /// The element in this row and column.
    pub(super) fn get(&self, row: usize, col: usize) -> f64 {
        read(self.dtype, &self.data[(row * self.cols + col) * self.dtype.size()..])
    }
}

/// A matrix of 32-bit words in the memory-mapped file.
#[derive(Debug, Clone, Copy)]
pub(super) struct Words {
    pub(super) data: &'static [u8],
    pub(super) cols: usize,
}

impl Words {
    /// The word in this row and column.
    pub(super) fn get(&self, row: usize, col: usize) -> u32 {
        let at = (row * self.cols + col) * size_of::<u32>();
        u32::from_le_bytes(self.data[at..at + size_of::<u32>()].try_into().expect("a word has four bytes"))
    }
}
