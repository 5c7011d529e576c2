//! Weight matrices in 8 or 4 bits, quantized from a checkpoint in groups along `K`, and quantized inputs.
//!
//! A group of 64 weights of one output shares a scale in f16: 8.25 or 4.25 bits per weight. Weights are stored in
//! panels of 16 outputs, with four adjacent elements of `K` of each output together, as byte dot products need them. In
//! 4 bits, a byte contains an element of the group's first half in its lower bits and one of the second half in its
//! upper bits. The quads of two panels alternate, and the scales of each group follow it, so that a matrix is read
//! sequentially. Weights are stored unsigned, shifted by [`QuantType::shift`]; inputs contain the term that this shift
//! adds to each group's sum.

use half::f16;

use crate::cpu::shared::SharedOut;
use crate::cpu::{Buffer, Matrix, Pool};

/// Number of weights that share a scale.
pub(crate) const GROUP_K: usize = 64;
/// Number of outputs in a panel.
pub(crate) const PANEL: usize = 16;
/// Number of panels that are stored together.
pub(crate) const PAIR: usize = 2;
/// Number of adjacent elements of `K` that one lane multiplies.
pub(crate) const QUAD: usize = 4;
/// Distance in bytes from one quad of a panel pair to the next.
pub(crate) const QUAD_BYTES: usize = PAIR * PANEL * QUAD;

/// Size of the scales of a panel's group, in bytes.
pub(crate) const SCALE_BYTES: usize = PANEL * size_of::<u16>();

/// Storage format of weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QuantType {
    /// 8 bits: the largest weight of a group is 127 steps.
    Int8,
    /// 4 bits: the largest weight of a group is -8 steps.
    Int4,
}

impl QuantType {
    /// The value added to a weight's steps to store them unsigned.
    pub(crate) fn shift(self) -> i32 {
        match self {
            QuantType::Int8 => 128,
            QuantType::Int4 => 8,
        }
    }

    /// Size of a panel's group, in bytes.
    pub(crate) fn block_bytes(self) -> usize {
        match self {
            QuantType::Int8 => PANEL * GROUP_K,
            QuantType::Int4 => PANEL * GROUP_K / 2,
        }
    }

    /// Size of a group of two panels with their scales, in bytes.
    pub(crate) fn pair_bytes(self) -> usize {
        PAIR * (self.block_bytes() + SCALE_BYTES)
    }
}

/// A quantized matrix `[N, K]`.
pub struct QuantMatrix {
    pub(super) quant_type: QuantType,
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) data: Buffer<u8>, // [pairs of panels, groups, {[quads, PAIR, PANEL, QUAD], [PAIR, PANEL] f16}]
    pub(super) bias: Option<Vec<f32>>,
}

impl QuantMatrix {
    /// Quantizes a matrix of a checkpoint; its bias is not quantized.
    pub fn new(pool: &mut Pool, matrix: &Matrix, quant_type: QuantType) -> Self {
        let (rows, cols) = (matrix.rows(), matrix.cols());
        let (pairs, groups) = (rows.div_ceil(PAIR * PANEL), cols.div_ceil(GROUP_K));
        let pair_len = groups * quant_type.pair_bytes();
        let mut data = Buffer::new(pairs * pair_len);
        let shared = SharedOut::new(&mut data);
        pool.each(pairs, 1, |range| {
            let mut row = vec![0.0; groups * GROUP_K];
            for pair in range {
                // SAFETY: each pair has one thread.
                let data: &mut [u8] = unsafe { shared.slice(pair * pair_len, pair_len) };
                let first = pair * PAIR * PANEL;
                // Padding outputs have scales of 0.
                for output in first..rows.min(first + PAIR * PANEL) {
                    matrix.read_row(output, &mut row[..cols]);
                    let groups = row.chunks_exact(GROUP_K).zip(data.chunks_exact_mut(quant_type.pair_bytes()));
                    for (weights, group) in groups {
                        quantize(quant_type, weights, group, output - first);
                    }
                }
            }
        });
        Self { quant_type, rows, cols, data, bias: matrix.bias.clone() }
    }

    /// [`QuantMatrix::bytes`] of a matrix `[rows, cols]`.
    pub fn bytes_of(rows: usize, cols: usize, quant_type: QuantType) -> usize {
        rows.div_ceil(PAIR * PANEL) * cols.div_ceil(GROUP_K) * quant_type.pair_bytes()
    }

    /// `N`.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// `K`.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Storage format of the weights.
    pub fn quant_type(&self) -> QuantType {
        self.quant_type
    }

    /// Number of bytes that one product reads.
    pub fn bytes(&self) -> usize {
        self.data.len()
    }

    pub(crate) fn groups(&self) -> usize {
        self.cols.div_ceil(GROUP_K)
    }

    /// The stored weight of output `row` at `col`, for tests.
    ///
    /// # Panics
    /// Panics if there is none.
    pub fn weight(&self, row: usize, col: usize) -> f32 {
        assert!(row < self.rows && col < self.cols, "the weight is in the matrix");
        let pair_bytes = self.quant_type.pair_bytes();
        let group = &self.data[(row / (PAIR * PANEL) * self.groups() + col / GROUP_K) * pair_bytes..][..pair_bytes];
        let (at, is_high) = place(self.quant_type, row % (PAIR * PANEL), col % GROUP_K);
        let steps = match self.quant_type {
            QuantType::Int8 => group[at],
            QuantType::Int4 => group[at] >> if is_high { 4 } else { 0 } & 15,
        };
        let scale = scale_place(self.quant_type, row % (PAIR * PANEL));
        let scale = f16::from_le_bytes([group[scale], group[scale + 1]]).to_f32();
        (i32::from(steps) - self.quant_type.shift()) as f32 * scale
    }
}

/// The byte, within a pair's group, of a weight of one of its outputs, and whether it is in the upper half of the byte.
fn place(quant_type: QuantType, output: usize, k: usize) -> (usize, bool) {
    let half = GROUP_K / 2;
    let (k, is_high) = if quant_type == QuantType::Int4 && k >= half { (k - half, true) } else { (k, false) };
    (k / QUAD * QUAD_BYTES + output * QUAD + k % QUAD, is_high)
}

/// The first byte, within a pair's group, of an output's scale.
fn scale_place(quant_type: QuantType, output: usize) -> usize {
    PAIR * quant_type.block_bytes() + output * size_of::<u16>()
}

/// Stores the weights of one output in a pair's group.
fn quantize(quant_type: QuantType, weights: &[f32], group: &mut [u8], output: usize) {
    let largest = weights.iter().fold(0.0f32, |largest, w| if w.abs() > largest.abs() { *w } else { largest });
    let scale = match quant_type {
        QuantType::Int8 => f16::from_f32(largest.abs() / 127.0),
        QuantType::Int4 => f16::from_f32(largest / -8.0),
    };
    let inverse = if scale.to_f32() == 0.0 { 0.0 } else { 1.0 / scale.to_f32() };
    for (k, weight) in weights.iter().enumerate() {
        let (at, is_high) = place(quant_type, output, k);
        let steps = (weight * inverse).round_ties_even();
        match quant_type {
            QuantType::Int8 => group[at] = (steps.clamp(-127.0, 127.0) as i32 + 128) as u8,
            QuantType::Int4 => {
                let nibble = (steps.clamp(-8.0, 7.0) as i32 + 8) as u8;
                group[at] = if is_high { group[at] & 0x0f | nibble << 4 } else { group[at] & 0xf0 | nibble };
            }
        }
    }
    group[scale_place(quant_type, output)..][..size_of::<u16>()].copy_from_slice(&scale.to_le_bytes());
}

/// Inputs of a quantized layer: each group of a row has steps of its own scale.
pub struct QuantInput {
    pub(super) steps: Buffer<i8>,    // [rows, groups, GROUP_K]
    pub(super) scales: Buffer<f32>,  // [rows, groups]
    pub(super) offsets: Buffer<i32>, // [rows, groups]: term that cancels the shift of the weights
    pub(super) rows: usize,
    pub(super) cols: usize,
}

impl QuantInput {
    /// A buffer for `max_rows` rows of `max_cols`.
    pub fn new(max_rows: usize, max_cols: usize) -> Self {
        let groups = max_rows * max_cols.div_ceil(GROUP_K);
        let (steps, scales, offsets) = (Buffer::new(groups * GROUP_K), Buffer::new(groups), Buffer::new(groups));
        Self { steps, scales, offsets, rows: 0, cols: 0 }
    }

    /// Quantizes `x [rows, cols]` to at most 127 steps in either direction for each group.
    ///
    /// # Panics
    /// Panics if `x` is too short, or larger than the buffer.
    pub fn pack(&mut self, pool: &mut Pool, x: &[f32], rows: usize, cols: usize, quant_type: QuantType) {
        let groups = cols.div_ceil(GROUP_K);
        assert!(x.len() >= rows * cols, "inputs are [rows, cols]");
        assert!(rows * groups <= self.scales.len(), "quantised inputs fit");
        (self.rows, self.cols) = (rows, cols);
        let (steps, scales) = (SharedOut::new(&mut self.steps), SharedOut::new(&mut self.scales));
        let offsets = SharedOut::new(&mut self.offsets);
        let chunk = if rows * cols < 1 << 15 { rows.max(1) } else { 1 };
        pool.each(rows, chunk, |range| {
            for row in range {
                // SAFETY: each row has one thread, here and below.
                let steps: &mut [i8] = unsafe { steps.slice(row * groups * GROUP_K, groups * GROUP_K) };
                // SAFETY: as above.
                let scales: &mut [f32] = unsafe { scales.slice(row * groups, groups) };
                // SAFETY: as above.
                let offsets: &mut [i32] = unsafe { offsets.slice(row * groups, groups) };
                pack_row(&x[row * cols..][..cols], steps, scales, offsets, quant_type.shift());
            }
        });
    }
}

for_each_isa! {
    fn pack_row(x: &[f32], steps: &mut [i8], scales: &mut [f32], offsets: &mut [i32], shift: i32) {
        for (group, (x, steps)) in x.chunks(GROUP_K).zip(steps.chunks_exact_mut(GROUP_K)).enumerate() {
            let mut padded = [0.0; GROUP_K];
            padded[..x.len()].copy_from_slice(x);
            let sum;
            (scales[group], sum) = pack_group(&padded, steps.try_into().expect("a group has 64 steps"));
            offsets[group] = -shift * sum;
        }
    }
}

/// Quantizes one group; returns its scale and the sum of its steps.
#[inline(always)]
fn pack_group(x: &[f32; GROUP_K], steps: &mut [i8; GROUP_K]) -> (f32, i32) {
    let mut lanes = [0.0f32; 16];
    for x in x.chunks_exact(16) {
        for (lane, x) in lanes.iter_mut().zip(x) {
            *lane = if x.abs() > *lane { x.abs() } else { *lane };
        }
    }
    let largest = lanes.iter().fold(0.0f32, |largest, x| largest.max(*x));
    let inverse = if largest > 0.0 { 127.0 / largest } else { 0.0 };
    // Adding and subtracting 1.5 * 2^23 rounds to an integer, ties to even.
    const ROUND: f32 = 12_582_912.0;
    let mut sum = 0;
    for (steps, x) in steps.iter_mut().zip(x) {
        let rounded = ((x * inverse + ROUND).to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
        *steps = rounded as i8;
        sum += i32::from(*steps);
    }
    (largest / 127.0, sum)
}
