//! Weights in 8 or 4 bits as the kernels read them: sizes, and the order of codes. `quantized.cuh` describes it, too.

use half::{bf16, f16};

use super::Span;

/// Rows of a weight whose scales lie together.
pub const TILE: usize = 64;
/// Bytes of a row in a slice of the inputs.
const SLICE_BYTES: usize = 128;
/// Bytes of the scales of the rows of a tile.
const ROW_SCALES_BYTES: usize = TILE * size_of::<f32>();

/// How the elements of a weight are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PackedFormat {
    /// e4m3; each row has a scale in f32.
    Fp8Rows,
    /// e4m3; 128 inputs of neighbouring rows have a scale in f32. In each tile of 64 rows there are two scales: of the
    /// rows `r` with `r % 16 < 8`, and of the others. So gate and up, which alternate, may have different ones.
    Fp8Blocks,
    /// Integers of 4 bits less a zero point; each group of a row has a scale and a zero point.
    Int4 {
        /// Inputs of a group: 128 or 32.
        group: usize,
        /// Whether groups have zero points; otherwise they are 8.
        has_zeros: bool,
        /// Whether scales are f16; otherwise they are bf16.
        scale_is_f16: bool,
    },
    /// Integers of 8 bits; each row has a scale in f32.
    Int8Rows,
    /// Integers of 8 bits less a zero point; each group of a row has a scale and a zero point.
    Int8 {
        /// Inputs of a group: 128 or 32.
        group: usize,
        /// Whether groups have zero points; otherwise they are 0.
        has_zeros: bool,
        /// Whether scales are f16; otherwise they are bf16.
        scale_is_f16: bool,
    },
    /// e2m1; groups of 32 inputs of a row have a scale that is a power of two, stored as its exponent.
    Mxfp4,
    /// e2m1; groups of 16 inputs of a row have a scale in e4m3, and each row has a factor in f32.
    Nvfp4,
}

impl PackedFormat {
    /// Inputs of a slice.
    pub fn slice_cols(self) -> usize {
        match self {
            PackedFormat::Int4 { .. } | PackedFormat::Mxfp4 | PackedFormat::Nvfp4 => 2 * SLICE_BYTES,
            PackedFormat::Fp8Rows | PackedFormat::Fp8Blocks | PackedFormat::Int8Rows | PackedFormat::Int8 { .. } => {
                SLICE_BYTES
            }
        }
    }

    /// Slices of `cols` inputs.
    pub fn slices(self, cols: usize) -> usize {
        cols.div_ceil(self.slice_cols())
    }

    /// Bytes of the codes of one row.
    pub fn row_bytes(self, cols: usize) -> usize {
        self.slices(cols) * SLICE_BYTES
    }

    /// Groups of a row in a slice.
    pub fn slice_groups(self) -> usize {
        match self {
            PackedFormat::Fp8Rows | PackedFormat::Fp8Blocks | PackedFormat::Int8Rows => 1,
            PackedFormat::Int4 { group, .. } | PackedFormat::Int8 { group, .. } => self.slice_cols() / group,
            PackedFormat::Mxfp4 => self.slice_cols() / 32,
            PackedFormat::Nvfp4 => self.slice_cols() / 16,
        }
    }

    /// Bytes of the scales and zero points of a tile in a slice, without those of whole rows.
    pub fn meta_bytes(self) -> usize {
        match self {
            PackedFormat::Fp8Rows | PackedFormat::Int8Rows => 0,
            PackedFormat::Fp8Blocks => 16,
            PackedFormat::Int4 { has_zeros, .. } | PackedFormat::Int8 { has_zeros, .. } => {
                self.slice_groups() * TILE * (2 + usize::from(has_zeros))
            }
            PackedFormat::Mxfp4 | PackedFormat::Nvfp4 => self.slice_groups() * TILE,
        }
    }

    /// [`PackedFormat::meta_bytes`], with zero points.
    pub(super) fn max_meta_bytes(self) -> usize {
        match self {
            PackedFormat::Int4 { group, scale_is_f16, .. } => {
                PackedFormat::Int4 { group, has_zeros: true, scale_is_f16 }.meta_bytes()
            }
            PackedFormat::Int8 { group, scale_is_f16, .. } => {
                PackedFormat::Int8 { group, has_zeros: true, scale_is_f16 }.meta_bytes()
            }
            other => other.meta_bytes(),
        }
    }

    /// Bytes of all codes of a weight.
    pub fn codes_bytes(self, rows: usize, cols: usize) -> usize {
        rows * self.row_bytes(cols)
    }

    /// Bytes of the scales and zero points of a tile.
    pub fn tile_meta_bytes(self, cols: usize) -> usize {
        let has_row_scales = matches!(self, PackedFormat::Fp8Rows | PackedFormat::Int8Rows | PackedFormat::Nvfp4);
        self.slices(cols) * self.meta_bytes() + if has_row_scales { ROW_SCALES_BYTES } else { 0 }
    }

    /// Bytes of all scales and zero points of a weight.
    pub fn scales_bytes(self, rows: usize, cols: usize) -> usize {
        rows.div_ceil(TILE) * self.tile_meta_bytes(cols)
    }

    /// The part of a kernel's name.
    pub(super) fn name(self) -> &'static str {
        match self {
            PackedFormat::Fp8Rows => "fp8_rows",
            PackedFormat::Fp8Blocks => "fp8_blocks",
            PackedFormat::Int4 { group: 32, .. } => "int4_g32",
            PackedFormat::Int4 { .. } => "int4_g128",
            PackedFormat::Int8Rows => "int8_rows",
            PackedFormat::Int8 { group: 32, .. } => "int8_g32",
            PackedFormat::Int8 { .. } => "int8_g128",
            PackedFormat::Mxfp4 => "mxfp4",
            PackedFormat::Nvfp4 => "nvfp4",
        }
    }

    /// Whether scales are f16, as the kernels take it.
    pub(super) fn scale_is_f16(self) -> u32 {
        let is_f16 = matches!(
            self,
            PackedFormat::Int4 { scale_is_f16: true, .. } | PackedFormat::Int8 { scale_is_f16: true, .. }
        );
        u32::from(is_f16)
    }

    /// Stores the codes of a row, one byte for each input, in the order of the kernels. `out` has
    /// [`PackedFormat::row_bytes`] bytes. Inputs that the row lacks in its last slice become 0.
    ///
    /// # Panics
    /// Panics if `out` has another length.
    pub fn pack_row(self, codes: &[u8], out: &mut [u8]) {
        assert_eq!(out.len(), self.row_bytes(codes.len()), "a row's bytes");
        let cols = self.slice_cols();
        for (codes, out) in codes.chunks(cols).zip(out.chunks_exact_mut(SLICE_BYTES)) {
            let mut slice = [0; 2 * SLICE_BYTES];
            slice[..codes.len()].copy_from_slice(codes);
            match self {
                PackedFormat::Int4 { .. } | PackedFormat::Mxfp4 | PackedFormat::Nvfp4 => pack_nibbles(&slice, out),
                _ => pack_bytes(&slice, out),
            }
        }
    }

    /// Stores the scale and the zero point of group `group` of row `row` of a tile in `tile`, which has
    /// [`PackedFormat::tile_meta_bytes`] bytes. `Fp8Rows` and `Int8Rows` have one group, `Fp8Blocks` one for each slice, and rows
    /// with the same scale may be stored again. Scales of groups of integers are of the format's type. For `Nvfp4` `scale` is the row's factor
    /// and `zero` the code of the group's scale.
    ///
    /// # Panics
    /// Panics if there is no such row or group.
    pub fn put_scale(self, tile: &mut [u8], row: usize, group: usize, scale: f32, zero: u8) {
        assert!(row < TILE, "row {row} of a tile");
        let (slice, within) = (group / self.slice_groups(), group % self.slice_groups());
        let meta = &mut tile[slice * self.meta_bytes()..];
        match self {
            PackedFormat::Fp8Rows | PackedFormat::Int8Rows => {
                meta[4 * row..][..4].copy_from_slice(&scale.to_le_bytes())
            }
            PackedFormat::Fp8Blocks => meta[row % 16 / 8 * 4..][..4].copy_from_slice(&scale.to_le_bytes()),
            // A power of two, whose exponent is 0 if it is subnormal.
            PackedFormat::Mxfp4 => meta[within * TILE + row] = (scale.to_bits() >> 23) as u8,
            // The scales of four groups of a row lie together, and the factors of rows behind all slices.
            PackedFormat::Nvfp4 => {
                meta[(within / 4 * TILE + row) * 4 + within % 4] = zero;
                let rows = tile.len() - ROW_SCALES_BYTES;
                tile[rows + 4 * row..][..4].copy_from_slice(&scale.to_le_bytes());
            }
            PackedFormat::Int4 { has_zeros, scale_is_f16, .. } | PackedFormat::Int8 { has_zeros, scale_is_f16, .. } => {
                let bits = if scale_is_f16 { f16::from_f32(scale).to_bits() } else { bf16::from_f32(scale).to_bits() };
                meta[2 * (within * TILE + row)..][..2].copy_from_slice(&bits.to_le_bytes());
                if has_zeros {
                    meta[self.slice_groups() * TILE * 2 + within * TILE + row] = zero;
                }
            }
        }
    }
}

/// Inputs within a step of 16 that thread `t` of four takes.
fn columns_of(t: usize) -> [usize; 4] {
    [2 * t, 2 * t + 8, 2 * t + 1, 2 * t + 9]
}

/// One slice of bytes: chunk `2 t + h` has the steps `4 h .. 4 h + 4` of thread `t`, a word each.
fn pack_bytes(codes: &[u8], out: &mut [u8]) {
    for (chunk, out) in out.chunks_exact_mut(16).enumerate() {
        let columns = columns_of(chunk / 2);
        for (word, out) in out.chunks_exact_mut(4).enumerate() {
            let step = 16 * (4 * (chunk % 2) + word);
            for (byte, column) in out.iter_mut().zip(columns) {
                *byte = codes[step + column];
            }
        }
    }
}

/// One slice of 4-bit codes: chunk `2 t + h` has the steps `8 h .. 8 h + 8` of thread `t`, two in each word: the first in
/// the nibbles 0, 4, 1, 5, the second in 2, 6, 3, 7, with their inputs in ascending order.
fn pack_nibbles(codes: &[u8], out: &mut [u8]) {
    for (chunk, out) in out.chunks_exact_mut(16).enumerate() {
        let columns = columns_of(chunk / 2);
        for (word, out) in out.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            let first = 16 * (8 * (chunk % 2) + 2 * word);
            let code = |step: usize, column: usize| u32::from(codes[first + 16 * step + columns[column]]);
            // Nibble 2 s + i of step s has input 2 t + 8 i, nibble 2 s + 4 + i input 2 t + 8 i + 1.
            let step = |s: usize| code(s, 0) | code(s, 1) << 4 | code(s, 2) << 16 | code(s, 3) << 20;
            *out = (step(0) | step(1) << 8).to_le_bytes();
        }
    }
}

/// A linear layer's weight in 8 or 4 bits, and its bias `[n]` in bf16.
#[derive(Debug, Clone, Copy)]
pub struct PackedWeight {
    /// [`PackedFormat::codes_bytes`], row by row.
    pub codes: Span,
    /// [`PackedFormat::scales_bytes`]. `Fp8Rows` and `Int8Rows`: `[n]` f32, padded to whole tiles. Otherwise, for each tile and slice,
    /// [`PackedFormat::meta_bytes`]: `Fp8Blocks` two f32 and padding, `Int4` and `Int8` scales `[groups, 64]`, then zero points
    /// `[groups, 64]` u8, `Mxfp4` exponents `[groups, 64]`, `Nvfp4` scales `[groups / 4, 64, 4]` e4m3; behind those of all slices of a
    /// tile of `Nvfp4` the factors of its rows, `[64]` f32.
    pub scales: Span,
    /// `[n]`, or [`Span::NULL`].
    pub bias: Span,
    /// Number of outputs.
    pub n: usize,
    /// Number of inputs.
    pub k: usize,
    /// How codes and scales are stored.
    pub format: PackedFormat,
}

#[cfg(test)]
mod tests {
    use super::*;

    const INT4: PackedFormat = PackedFormat::Int4 { group: 128, has_zeros: true, scale_is_f16: true };

    #[test]
    fn every_code_of_a_row_is_stored_once() {
        let codes: Vec<u8> = (0..=255).collect();
        let mut out = vec![0; 256];
        PackedFormat::Fp8Rows.pack_row(&codes, &mut out);
        // Thread 1 takes inputs 2, 10, 3, 11 of the first step.
        assert_eq!(out[32..36], [2, 10, 3, 11]);
        out.sort_unstable();
        assert_eq!(out, codes);
    }

    #[test]
    fn halves_of_bytes_have_two_steps_in_a_word() {
        let codes: Vec<u8> = (0..256).map(|col| (col % 16) as u8).collect();
        let mut out = vec![0; 128];
        INT4.pack_row(&codes, &mut out);
        // Thread 0 takes inputs 0, 1 (nibbles 0, 4) and 8, 9 (nibbles 1, 5) of each step.
        assert_eq!(u32::from_le_bytes(out[..4].try_into().unwrap()), 0x9191_8080);
    }

    #[test]
    fn scales_of_four_groups_of_nvfp4_are_a_word_and_factors_lie_behind_all_slices() {
        let format = PackedFormat::Nvfp4;
        let mut tile = vec![0; format.tile_meta_bytes(264)];
        assert_eq!(tile.len(), 2 * 16 * TILE + 4 * TILE);
        for group in 0..17 {
            format.put_scale(&mut tile, 5, group, 0.375, 100 + group as u8);
        }
        assert_eq!(tile[4 * 5..][..4], [100, 101, 102, 103]);
        assert_eq!(tile[4 * (3 * TILE + 5)..][..4], [112, 113, 114, 115]);
        assert_eq!(tile[16 * TILE + 4 * 5..][..4], [116, 0, 0, 0]);
        assert_eq!(tile[2 * 16 * TILE + 4 * 5..][..4], 0.375f32.to_le_bytes());
        assert_eq!(tile.iter().filter(|byte| **byte != 0).count(), 17 + 2);
    }

    #[test]
    fn a_row_that_ends_in_a_slice_is_padded() {
        let mut out = vec![0xff; 128];
        PackedFormat::Fp8Blocks.pack_row(&[7; 8], &mut out);
        assert_eq!(out.iter().map(|&byte| usize::from(byte)).sum::<usize>(), 8 * 7);
        assert_eq!((INT4.codes_bytes(3, 264), INT4.scales_bytes(65, 264)), (3 * 256, 2 * 2 * 384));
    }
}
