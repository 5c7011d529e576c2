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

/// The form of integers in groups along a row, whose scales have this type. Only those of 8 bits, and of 4 bits without scales in f32, have
/// one.
fn form(bits: usize, group: usize, has_zeros: bool, scale: DType) -> Option<Quantization> {
    match bits {
        8 => Some(Quantization::Int8 { group, has_zeros, scale }),
        4 if scale != DType::F32 => Some(Quantization::Int4 { group, has_zeros, scale }),
        _ => None,
    }
}

/// The code of a number of `bits` bits that is stored from 0 on. Those of 8 bits are in two's complement.
fn code(stored: i32, bits: usize) -> u8 {
    stored as u8 ^ if bits == 8 { 0x80 } else { 0 }
}

/// The groups of columns that are not in order, as GPTQ with act order divides them.
#[derive(Debug)]
pub(in crate::checkpoint) struct ColGroups {
    /// The group of each column.
    of: Words,
    /// The columns sorted by their groups, if each group has the same number of columns.
    sorted: Option<Vec<u32>>,
}

impl ColGroups {
    /// `of` has one row, and names groups from 0 to `groups`.
    pub(in crate::checkpoint) fn new(of: Words, groups: usize) -> Self {
        let mut sorted: Vec<u32> = (0..of.cols as u32).collect();
        sorted.sort_by_key(|&col| of.get(0, col as usize));
        let group = of.cols / groups;
        let is_even = of.cols.is_multiple_of(groups)
            && sorted.iter().enumerate().all(|(at, &col)| of.get(0, col as usize) as usize == at / group);
        Self { of, sorted: is_even.then_some(sorted) }
    }

    /// Whether each group has the same number of columns.
    pub(in crate::checkpoint) fn are_even(&self) -> bool {
        self.sorted.is_some()
    }

    fn group(&self, col: usize) -> usize {
        self.of.get(0, col) as usize
    }

    /// The form of a matrix with these groups, if its columns can be sorted by them.
    fn sortable(groups: Option<&Self>, form: Option<Quantization>) -> Option<Quantization> {
        form.filter(|_| groups.is_none_or(Self::are_even))
    }

    /// The columns of the matrix that are `cols` in [`QuantizedRows::col_order`].
    fn stored(groups: Option<&Self>, cols: Range<usize>) -> impl Iterator<Item = usize> {
        let sorted = groups.and_then(|groups| groups.sorted.as_deref());
        cols.map(move |col| sorted.map_or(col, |sorted| sorted[col] as usize))
    }
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
    /// If columns of a group are not neighbours.
    pub(in crate::checkpoint) col_groups: Option<ColGroups>,
}

impl PackedIntegers {
    fn form(&self) -> Option<Quantization> {
        let form = form(self.bits, self.group, self.zeros.is_some(), self.scales.dtype);
        ColGroups::sortable(self.col_groups.as_ref(), form)
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
        if let Some(groups) = &self.col_groups {
            let values = cols.map(|col| {
                let group = groups.group(col);
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

    fn col_order(&self) -> Option<&[u32]> {
        self.col_groups.as_ref()?.sorted.as_deref()
    }

    fn read_codes(&self, row: usize, cols: Range<usize>, out: &mut [u8]) {
        for (out, col) in out.iter_mut().zip(ColGroups::stored(self.col_groups.as_ref(), cols)) {
            *out = code(packed(|word| self.words.get(row, word), col, self.bits), self.bits);
        }
    }

    fn scale(&self, row: usize, col: usize) -> (f32, u8) {
        let group = col / self.group;
        let zero =
            self.zeros.map_or(1 << (self.bits - 1), |zeros| packed(|word| zeros.get(word, group), row, self.bits));
        (PackedIntegers::scale(self, row, group), code(zero, self.bits))
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
        form(4, self.group, true, self.scales.dtype)
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
    /// If columns of a group are not neighbours.
    pub(in crate::checkpoint) col_groups: Option<ColGroups>,
}

impl Gptq {
    fn form(&self) -> Option<Quantization> {
        let form = form(self.bits, self.group, true, self.scales.dtype);
        ColGroups::sortable(self.col_groups.as_ref(), form)
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
        if let Some(groups) = &self.col_groups {
            let values = cols.map(|col| {
                let (zero, scale) = self.zero_and_scale(row, groups.group(col));
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

    fn col_order(&self) -> Option<&[u32]> {
        self.col_groups.as_ref()?.sorted.as_deref()
    }

    fn read_codes(&self, row: usize, cols: Range<usize>, out: &mut [u8]) {
        for (out, col) in out.iter_mut().zip(ColGroups::stored(self.col_groups.as_ref(), cols)) {
            *out = code(packed(|word| self.words.get(word, row), col, self.bits), self.bits);
        }
    }

    fn scale(&self, row: usize, col: usize) -> (f32, u8) {
        let (zero, scale) = self.zero_and_scale(row, col / self.group);
        (scale, code(zero, self.bits))
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;

    const ROWS: usize = 8;
    const COLS: usize = 64;
    const GROUP: usize = 32;

    /// A matrix of words of numbers without order.
    fn words(rows: usize, cols: usize) -> Words {
        let word = |index: usize| (index as u32 + 1).wrapping_mul(2_654_435_761);
        let data: Vec<u8> = (0..rows * cols).flat_map(|index| word(index).to_le_bytes()).collect();
        Words { data: data.leak(), cols }
    }

    fn scales(rows: usize, cols: usize) -> StoredMatrix {
        let bytes = |index: usize| f16::from_f32(0.01 * (1 + index) as f32).to_le_bytes();
        let data: Vec<u8> = (0..rows * cols).flat_map(bytes).collect();
        StoredMatrix { data: data.leak(), dtype: DType::F16, cols }
    }

    fn groups(of: impl Iterator<Item = u32>, count: usize) -> ColGroups {
        let data: Vec<u8> = of.flat_map(u32::to_le_bytes).collect();
        let cols = data.len() / 4;
        ColGroups::new(Words { data: data.leak(), cols }, count)
    }

    #[test]
    fn columns_are_sorted_by_groups_that_have_equal_numbers_of_them() {
        let sorted = |of: &[u32], count| groups(of.iter().copied(), count).sorted;
        assert_eq!(sorted(&[1, 0, 2, 1, 0, 2], 3), Some(vec![1, 4, 0, 3, 2, 5]));
        assert_eq!(sorted(&[0, 1, 0, 0], 2), None);
        assert_eq!(sorted(&[2, 0, 1, 0], 3), None);
        // No column is in group 1.
        assert_eq!(sorted(&[2, 0, 2, 0], 3), None);
    }

    /// Checks that codes, scales and zero points give the values.
    fn assert_codes(what: &str, source: &dyn RowSource, expected: Quantization) {
        let rows = source.quantized().unwrap();
        assert_eq!(rows.quantization(), expected, "{what}");
        for (row, cols) in (0..ROWS).flat_map(|row| [0..COLS, 24..40].map(|cols| (row, cols))) {
            let [mut codes, mut bytes, mut whole] = [cols.len(), 2 * cols.len(), 2 * COLS].map(|len| vec![0; len]);
            rows.read_codes(row, cols.clone(), &mut codes);
            source.read_row(row, cols.clone(), &mut bytes);
            source.read_row(row, 0..COLS, &mut whole);
            assert_eq!(bytes, whole[2 * cols.start..2 * cols.end], "{what}: row {row}");
            for (col, code) in cols.zip(codes) {
                let stored = rows.col_order().map_or(col, |order| order[col] as usize);
                let (scale, zero) = rows.scale(row, col);
                let number = |code: u8| match expected {
                    Quantization::Int8 { .. } => f32::from(code.cast_signed()),
                    _ => f32::from(code),
                };
                let value = bf16::from_f32((number(code) - number(zero)) * scale);
                assert_eq!(whole.as_chunks::<2>().0[stored], value.to_le_bytes(), "{what}: row {row}, column {col}");
            }
        }
    }

    #[test]
    fn codes_scales_and_zero_points_of_a_form_give_the_values_of_its_rows() {
        let act_order = || groups((0..COLS).map(|col| (col * 5 % COLS / GROUP) as u32), COLS / GROUP);
        for (bits, is_ordered) in [(4, false), (8, false), (4, true), (8, true)] {
            let col_groups = || is_ordered.then(act_order);
            let form = |has_zeros| form(bits, GROUP, has_zeros, DType::F16).unwrap();
            for zeros in [None, Some(words(ROWS * bits / 32, COLS / GROUP))] {
                let packed = PackedIntegers {
                    words: words(ROWS, COLS * bits / 32),
                    bits,
                    scales: scales(ROWS, COLS / GROUP),
                    has_row_scales: true,
                    group: GROUP,
                    zeros,
                    col_groups: col_groups(),
                };
                assert_codes(&format!("packed {bits}"), &packed, form(zeros.is_some()));
            }
            let gptq = Gptq {
                words: words(COLS * bits / 32, ROWS),
                zeros: words(COLS / GROUP, ROWS * bits / 32),
                scales: scales(COLS / GROUP, ROWS),
                bits,
                zero_offset: 1,
                group: GROUP,
                col_groups: col_groups(),
            };
            assert_codes(&format!("gptq {bits}"), &gptq, form(true));
        }
        assert_eq!(form(4, GROUP, false, DType::F32), None);
        assert_eq!(form(5, GROUP, false, DType::F16), None);
    }
}
