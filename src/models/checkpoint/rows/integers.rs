//! Matrices of packed integers of 2 to 8 bits in groups along the input, each with a scale and a zero point.

use std::ops::Range;

use ops::{DType, Quantization, QuantizedRows, RowSource};

use super::scaled::blocks;
use super::{StoredMatrix, Words};
use crate::checkpoint::value::write_bf16;

/// Value `index` of values of `bits` bits that are one behind the other in words, the first in the low bits.
fn packed(word: impl Fn(usize) -> u32, index: usize, bits: usize) -> i32 {
    let (first, shift) = (index * bits / 32, index * bits % 32);
    let low = u64::from(word(first));
    // A value may continue in the next word.
    let high = if shift + bits > 32 { u64::from(word(first + 1)) } else { 0 };
    (((low | high << 32) >> shift) as u32 & ((1 << bits) - 1)).cast_signed()
}

/// The form of 4-bit integers in groups along a row, whose scales have this type. Scales in f32 are no part of it.
fn int4(bits: usize, group: usize, has_zeros: bool, scale: DType) -> Option<Quantization> {
    (bits == 4 && scale != DType::F32).then_some(Quantization::Int4 { group, has_zeros, scale })
}

/// compressed-tensors' `pack-quantized`: values of a row are packed along the row, offset by half of their range.
#[derive(Debug)]
pub(in crate::checkpoint) struct PackedIntegers {
    pub(in crate::checkpoint) words: Words,
    pub(in crate::checkpoint) bits: usize,
    /// `[rows, groups]`; one for all groups of a row, or for all of the matrix, if there is only one.
    pub(in crate::checkpoint) scales: StoredMatrix,
    /// Whether each row has scales of its own.
    pub(in crate::checkpoint) has_row_scales: bool,
    /// Columns of a group.
    pub(in crate::checkpoint) group: usize,
    /// Packed along the rows of the matrix: `[rows * bits / 32, groups]`.
    pub(in crate::checkpoint) zeros: Option<Words>,
    /// The group of each column, if they are not in order.
    pub(in crate::checkpoint) group_of: Option<Words>,
}

impl PackedIntegers {
    fn form(&self) -> Option<Quantization> {
        int4(self.bits, self.group, self.zeros.is_some(), self.scales.dtype).filter(|_| self.group_of.is_none())
    }

    fn zero(&self, row: usize, group: usize) -> i32 {
        let Some(zeros) = self.zeros else { return 0 };
        packed(|word| zeros.get(word, group), row, self.bits) - (1 << (self.bits - 1))
    }

    fn scale(&self, row: usize, group: usize) -> f32 {
        self.scales.get(if self.has_row_scales { row } else { 0 }, group) as f32
    }
}

impl RowSource for PackedIntegers {
    fn read_row(&self, row: usize, cols: Range<usize>, out: &mut [u8]) {
        let half = 1 << (self.bits - 1);
        let value = |col: usize| packed(|word| self.words.get(row, word), col, self.bits) - half;
        if let Some(group_of) = self.group_of {
            let values = cols.map(|col| {
                let group = group_of.get(0, col) as usize;
                (value(col) - self.zero(row, group)) as f32 * self.scale(row, group)
            });
            return write_bf16(values, out);
        }
        let mut out = out;
        for (group, cols) in blocks(cols, self.group) {
            let (zero, scale) = (self.zero(row, group), self.scale(row, group));
            let (part, rest) = out.split_at_mut(2 * cols.len());
            write_bf16(cols.map(|col| (value(col) - zero) as f32 * scale), part);
            out = rest;
        }
    }

    fn quantized(&self) -> Option<&dyn QuantizedRows> {
        self.form().map(|_| self as &dyn QuantizedRows)
    }
}

impl QuantizedRows for PackedIntegers {
    fn quantization(&self) -> Quantization {
        self.form().expect("only rows of this form are quantized rows")
    }

    fn read_codes(&self, row: usize, cols: Range<usize>, out: &mut [u8]) {
        for (out, col) in out.iter_mut().zip(cols) {
            *out = packed(|word| self.words.get(row, word), col, self.bits) as u8;
        }
    }

    fn scale(&self, row: usize, col: usize) -> (f32, u8) {
        let group = col / self.group;
        let zero = self.zeros.map_or(8, |zeros| packed(|word| zeros.get(word, group), row, self.bits));
        (PackedIntegers::scale(self, row, group), zero as u8)
    }
}

/// AWQ with 4 bits: the matrix is transposed, and eight neighbouring outputs share a word.
#[derive(Debug)]
pub(in crate::checkpoint) struct Awq {
    /// `[cols, rows / 8]`.
    pub(in crate::checkpoint) words: Words,
    /// `[groups, rows / 8]`.
    pub(in crate::checkpoint) zeros: Words,
    /// `[groups, rows]`.
    pub(in crate::checkpoint) scales: StoredMatrix,
    /// Columns of a group.
    pub(in crate::checkpoint) group: usize,
}

impl Awq {
    fn form(&self) -> Option<Quantization> {
        int4(4, self.group, true, self.scales.dtype)
    }

    /// The code of output `row` in row `at` of `words`.
    fn value(&self, words: &Words, at: usize, row: usize) -> i32 {
        /// Where the outputs of a word are in it, in halves of bytes.
        const ORDER: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];
        (words.get(at, row / 8) >> (4 * ORDER[row % 8]) & 15).cast_signed()
    }
}

impl RowSource for Awq {
    fn read_row(&self, row: usize, cols: Range<usize>, out: &mut [u8]) {
        let mut out = out;
        for (group, cols) in blocks(cols, self.group) {
            let (zero, scale) = (self.value(&self.zeros, group, row), self.scales.get(group, row) as f32);
            let (part, rest) = out.split_at_mut(2 * cols.len());
            write_bf16(cols.map(|col| (self.value(&self.words, col, row) - zero) as f32 * scale), part);
            out = rest;
        }
    }

    fn quantized(&self) -> Option<&dyn QuantizedRows> {
        self.form().map(|_| self as &dyn QuantizedRows)
    }
}

impl QuantizedRows for Awq {
    fn quantization(&self) -> Quantization {
        self.form().expect("only rows of this form are quantized rows")
    }

    fn read_codes(&self, row: usize, cols: Range<usize>, out: &mut [u8]) {
        for (out, col) in out.iter_mut().zip(cols) {
            *out = self.value(&self.words, col, row) as u8;
        }
    }

    fn scale(&self, row: usize, col: usize) -> (f32, u8) {
        let group = col / self.group;
        (self.scales.get(group, row) as f32, self.value(&self.zeros, group, row) as u8)
    }
}

/// GPTQ: the matrix is transposed, and neighbouring inputs share a word.
#[derive(Debug)]
pub(in crate::checkpoint) struct Gptq {
    /// `[cols * bits / 32, rows]`.
    pub(in crate::checkpoint) words: Words,
    /// `[groups, rows * bits / 32]`.
    pub(in crate::checkpoint) zeros: Words,
    /// `[groups, rows]`.
    pub(in crate::checkpoint) scales: StoredMatrix,
    pub(in crate::checkpoint) bits: usize,
    /// What is added to each stored zero point.
    pub(in crate::checkpoint) zero_offset: i32,
    /// Columns of a group.
    pub(in crate::checkpoint) group: usize,
    /// The group of each column, if they are not in order.
    pub(in crate::checkpoint) group_of: Option<Words>,
}

impl Gptq {
    fn form(&self) -> Option<Quantization> {
        int4(self.bits, self.group, true, self.scales.dtype).filter(|_| self.group_of.is_none())
    }

    fn zero_and_scale(&self, row: usize, group: usize) -> (i32, f32) {
        let zero = packed(|word| self.zeros.get(group, word), row, self.bits) + self.zero_offset;
        // A zero point of 0 is stored as the largest number.
        let zero = zero & ((1 << self.bits) - 1);
        (zero, self.scales.get(group, row) as f32)
    }
}

impl RowSource for Gptq {
    fn read_row(&self, row: usize, cols: Range<usize>, out: &mut [u8]) {
        let value = |col: usize| packed(|word| self.words.get(word, row), col, self.bits);
        if let Some(group_of) = self.group_of {
            let values = cols.map(|col| {
                let (zero, scale) = self.zero_and_scale(row, group_of.get(0, col) as usize);
                (value(col) - zero) as f32 * scale
            });
            return write_bf16(values, out);
        }
        let mut out = out;
        for (group, cols) in blocks(cols, self.group) {
            let (zero, scale) = self.zero_and_scale(row, group);
            let (part, rest) = out.split_at_mut(2 * cols.len());
            write_bf16(cols.map(|col| (value(col) - zero) as f32 * scale), part);
            out = rest;
        }
    }

    fn quantized(&self) -> Option<&dyn QuantizedRows> {
        self.form().map(|_| self as &dyn QuantizedRows)
    }
}

impl QuantizedRows for Gptq {
    fn quantization(&self) -> Quantization {
        self.form().expect("only rows of this form are quantized rows")
    }

    fn read_codes(&self, row: usize, cols: Range<usize>, out: &mut [u8]) {
        for (out, col) in out.iter_mut().zip(cols) {
            *out = packed(|word| self.words.get(word, row), col, self.bits) as u8;
        }
    }

    fn scale(&self, row: usize, col: usize) -> (f32, u8) {
        let (zero, scale) = self.zero_and_scale(row, col / self.group);
        (scale, zero as u8)
    }
}
