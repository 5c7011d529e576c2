//! Rounds weights to the codes of small formats.
//!
//! What is written here for one row or group depends on its values alone, so a matrix gets the same codes whole or in parts. The loops have
//! no branches, which lets the compiler use vector instructions.

use half::f16;

/// The largest number of e4m3.
const E4M3_MAX: f32 = 448.0;
/// The largest integer of 8 bits.
const INT8_MAX: f32 = 127.0;
/// The largest code of 4 bits.
const INT4_MAX: f32 = 15.0;
/// Added to a number of small size, it rounds it to an integer, to the even one of two, which is then in the low bits of the sum.
const TO_INTEGER: f32 = 12_582_912.0;

/// The scale of e4m3 for values of at most this size: the largest becomes 448. Values that are all 0 have the scale 1.
pub fn fp8_scale(largest: f32) -> f32 {
    let scale = largest / E4M3_MAX;
    if scale == 0.0 { 1.0 } else { scale }
}

/// Writes the code in e4m3 of each value divided by `scale`, rounded to the nearest, to the even one of two.
///
/// # Panics
/// Panics if the lengths differ.
pub fn fp8_codes(values: &[f32], scale: f32, out: &mut [u8]) {
    assert_eq!(values.len(), out.len(), "a code for each value");
    for (out, value) in out.iter_mut().zip(values) {
        *out = e4m3_code(value / scale);
    }
}

/// The scale of integers of 8 bits for values of at most this size: the largest becomes 127. Values that are all 0 have the scale 1.
pub fn int8_scale(largest: f32) -> f32 {
    let scale = largest / INT8_MAX;
    if scale == 0.0 { 1.0 } else { scale }
}

/// Writes each value divided by `scale` as an integer of 8 bits in two's complement, rounded to the nearest, to the even one of two.
///
/// # Panics
/// Panics if the lengths differ.
pub fn int8_codes(values: &[f32], scale: f32, out: &mut [u8]) {
    assert_eq!(values.len(), out.len(), "a code for each value");
    for (out, value) in out.iter_mut().zip(values) {
        *out = ((value / scale).clamp(-INT8_MAX, INT8_MAX) + TO_INTEGER).to_bits() as u8;
    }
}

/// The nearest number of e4m3, at most 448 in size.
fn e4m3_code(value: f32) -> u8 {
    /// 2^-6, the smallest number with a leading 1.
    const SMALLEST_NORMAL: i32 = (127 - 6) << 23;
    /// 2^14, where f32 has steps of 2^-9, as e4m3 has below 2^-6.
    const STEPS: f32 = 16_384.0;
    let bits = value.to_bits();
    let size = (bits & 0x7fff_ffff).cast_signed();
    // Rounds to 3 bits of mantissa; the exponent's bias changes from 127 to 7.
    let normal = ((size.wrapping_add(0x7_ffff + (size >> 20 & 1))) >> 20) - (120 << 3);
    let small = (f32::from_bits(bits & 0x7fff_ffff) + STEPS).to_bits().cast_signed() - STEPS.to_bits().cast_signed();
    let code = if size < SMALLEST_NORMAL { small } else { normal };
    code.min(0x7e) as u8 | (bits >> 24) as u8 & 0x80
}

/// Scale and zero point of a group: `value = (code - zero) * scale`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Affine {
    /// More than 0.
    pub scale: f32,
    /// The code of 0, from 0 to 15.
    pub zero: u8,
}

impl Affine {
    /// For 4-bit codes of values from `low`, which is at most 0, to `high`, which is at least 0. `stored` is the scale as it will be read,
    /// more than 0.
    pub fn of_range(low: f32, high: f32, stored: impl Fn(f32) -> f32) -> Self {
        if low == high {
            return Self { scale: 1.0, zero: 0 };
        }
        let scale = stored((high - low) / INT4_MAX);
        Self { scale, zero: (-low / scale).round_ties_even().clamp(0.0, INT4_MAX) as u8 }
    }

    /// For these values. The scale is one of f16.
    pub fn of(values: &[f32]) -> Self {
        let (low, high) = range(values);
        Self::of_range(low, high, |scale| f16::from_f32(scale).clamp(f16::from_bits(1), f16::MAX).to_f32())
    }

    /// Writes the 4-bit code of each value.
    ///
    /// # Panics
    /// Panics if the lengths differ.
    pub fn codes(self, values: &[f32], out: &mut [u8]) {
        assert_eq!(values.len(), out.len(), "a code for each value");
        let zero = f32::from(self.zero);
        for (out, value) in out.iter_mut().zip(values) {
            let steps = (value / self.scale + zero).clamp(0.0, INT4_MAX);
            *out = (steps + TO_INTEGER).to_bits() as u8 & 15;
        }
    }

    /// The value of a code.
    pub fn value(self, code: u8) -> f32 {
        f32::from(i16::from(code) - i16::from(self.zero)) * self.scale
    }
}

/// The smallest and the largest of some values and 0.
pub fn range(values: &[f32]) -> (f32, f32) {
    values.iter().fold((0f32, 0f32), |(low, high), value| {
        (if *value < low { *value } else { low }, if *value > high { *value } else { high })
    })
}

/// Scale of a group without zero point: `value = (code - 2^(bits - 1)) * scale`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Symmetric {
    /// More than 0.
    pub scale: f32,
    bits: u32,
}

impl Symmetric {
    /// For codes of at most 8 bits of these values: the largest is half a step beyond the last code. `stored` is the scale as it will be
    /// read, more than 0.
    pub fn of(values: &[f32], bits: u32, stored: impl Fn(f32) -> f32) -> Self {
        let (low, high) = range(values);
        let largest = high.max(-low);
        let scale = if largest == 0.0 { 1.0 } else { stored(largest / ((1 << bits) - 1) as f32 * 2.0) };
        Self { scale, bits }
    }

    /// Writes the code of each value.
    ///
    /// # Panics
    /// Panics if the lengths differ.
    pub fn codes(self, values: &[f32], out: &mut [u8]) {
        assert_eq!(values.len(), out.len(), "a code for each value");
        let (half, last) = ((1 << (self.bits - 1)) as f32, ((1 << self.bits) - 1) as f32);
        for (out, value) in out.iter_mut().zip(values) {
            *out = ((value / self.scale + half).clamp(0.0, last) + TO_INTEGER).to_bits() as u8;
        }
    }

    /// The value of a code.
    pub fn value(self, code: u8) -> f32 {
        f32::from(i16::from(code) - (1 << (self.bits - 1))) * self.scale
    }
}

/// Columns of a group of 4-bit codes in rows of `cols`: 128, or fewer if these do not divide the row; `None` if none do.
pub fn int4_group(cols: usize) -> Option<usize> {
    [128, 64, 32].into_iter().find(|group| cols.is_multiple_of(*group))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::e4m3;

    #[test]
    fn every_number_between_two_of_e4m3_goes_to_the_nearer_one() {
        let numbers: Vec<f32> = (0..=0x7e).map(e4m3).collect();
        for (code, pair) in numbers.windows(2).enumerate() {
            let (code, middle) = (code as u8, (pair[0] + pair[1]) / 2.0);
            let even = if code % 2 == 0 { code } else { code + 1 };
            for (value, expected) in [
                (pair[0], code),
                (pair[1], code + 1),
                (middle, even),
                (middle.next_down(), code),
                (middle.next_up(), code + 1),
            ] {
                assert_eq!(e4m3_code(value), expected, "{value}");
                assert_eq!(e4m3_code(-value), expected | 0x80, "-{value}");
            }
        }
        assert_eq!([e4m3_code(1e9), e4m3_code(-465.0), e4m3_code(0.0)], [0x7e, 0xfe, 0]);
    }

    #[test]
    fn the_largest_value_of_a_row_becomes_448() {
        for largest in [1e-30f32, 0.013, 1.0, 7.3e4] {
            let mut codes = [0; 3];
            fp8_codes(&[largest, -largest, 0.0], fp8_scale(largest), &mut codes);
            assert_eq!(codes, [0x7e, 0xfe, 0]);
        }
        assert_eq!(fp8_scale(0.0), 1.0);
    }

    #[test]
    fn integers_of_8_bits_are_the_nearest() {
        let largest = 0.37f32;
        let scale = int8_scale(largest);
        let values: Vec<f32> = (-254..=254).map(|half| half as f32 / 254.0 * largest).collect();
        let mut codes = vec![0; values.len()];
        int8_codes(&values, scale, &mut codes);
        for (value, code) in values.iter().zip(&codes) {
            let found = f32::from(code.cast_signed()) * scale;
            assert!((found - value).abs() <= scale * 0.5001, "{value} became {found}");
        }
        assert_eq!((codes[0], codes[254], codes[508]), (0x81, 0, 0x7f));
        int8_codes(&[0.5, 1.5, -2.5, 1e9], 1.0, &mut codes[..4]);
        assert_eq!(codes[..4], [0, 2, 0xfe, 0x7f]);
        assert_eq!(int8_scale(0.0), 1.0);
    }

    #[test]
    fn four_bits_are_within_half_a_step_and_keep_zero() {
        let mut state = 1u32;
        for _ in 0..1000 {
            let values: Vec<f32> = (0..32)
                .map(|_| {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    (state >> 8) as f32 / (1 << 24) as f32 - 0.3
                })
                .collect();
            let affine = Affine::of(&values);
            let mut codes = vec![0; values.len()];
            affine.codes(&values, &mut codes);
            // The scale is rounded to 11 bits, and the ends are moved by less than half a step with the zero point.
            for (value, code) in values.iter().zip(&codes) {
                assert!((affine.value(*code) - value).abs() <= affine.scale * 1.01, "{value} {affine:?}");
            }
            affine.codes(&[0.0], &mut codes[..1]);
            assert_eq!(affine.value(codes[0]), 0.0);
        }
        for bits in [4, 8] {
            let values: Vec<f32> = (0..64).map(|index| (index * 37 % 64) as f32 / 63.0 - 0.4).collect();
            let symmetric = Symmetric::of(&values, bits, |scale| scale);
            let mut codes = vec![0; values.len()];
            symmetric.codes(&values, &mut codes);
            for (value, code) in values.iter().zip(codes) {
                assert!((symmetric.value(code) - value).abs() <= symmetric.scale * 0.501, "{value} in {bits} bits");
            }
        }
        assert_eq!(Affine::of(&[0.0; 4]), Affine { scale: 1.0, zero: 0 });
        let positive = Affine::of(&[1.5, 0.1]);
        assert_eq!((positive.zero, positive.scale), (0, f16::from_f32(0.1).to_f32()));
    }
}
