//! Single values of tensors.

use half::{bf16, f16};
use ops::DType;

/// The first element of `bytes`.
///
/// # Panics
/// Panics if there are too few.
pub(super) fn read(dtype: DType, bytes: &[u8]) -> f64 {
    match dtype {
        DType::Bf16 => bf16::from_le_bytes([bytes[0], bytes[1]]).to_f64(),
        DType::F16 => f16::from_le_bytes([bytes[0], bytes[1]]).to_f64(),
        DType::F32 => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]).into(),
    }
}

/// Writes an element to `out`.
///
/// # Panics
/// Panics if its length is not that of an element.
pub(super) fn write(dtype: DType, x: f64, out: &mut [u8]) {
    match dtype {
        DType::Bf16 => out.copy_from_slice(&bf16::from_f64(x).to_le_bytes()),
        DType::F16 => out.copy_from_slice(&f16::from_f64(x).to_le_bytes()),
        DType::F32 => out.copy_from_slice(&(x as f32).to_le_bytes()),
    }
}

/// Writes elements of bf16 to `out`.
pub(super) fn write_bf16(values: impl Iterator<Item = f32>, out: &mut [u8]) {
    for (out, value) in out.as_chunks_mut::<2>().0.iter_mut().zip(values) {
        *out = bf16::from_f32(value).to_le_bytes();
    }
}

/// The value of a number in e4m3: a sign, 4 bits of exponent with bias 7, 3 of mantissa; no infinities
/// (Micikevicius et al. 2022).
pub(crate) fn e4m3(byte: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f32::from(byte & 7));
    let magnitude = match (exponent, byte & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa / 8.0 * 2f32.powi(-6),
        _ => (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7),
    };
    if byte & 0x80 == 0 { magnitude } else { -magnitude }
}

/// The value of a number in e2m1, a sign and an index of eight magnitudes (OCP Microscaling Formats 1.0).
pub(super) fn e2m1(nibble: u8) -> f32 {
    const MAGNITUDES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let magnitude = MAGNITUDES[usize::from(nibble & 7)];
    if nibble & 8 == 0 { magnitude } else { -magnitude }
}

/// The value of a number in e8m0: a power of two (OCP Microscaling Formats 1.0). Its range is larger than that of f32.
pub(super) fn e8m0(byte: u8) -> f64 {
    match byte {
        u8::MAX => f64::NAN,
        exponent => 2f64.powi(i32::from(exponent) - 127),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_floats_have_the_values_of_their_formats() {
        // 1, -1, the largest number, the smallest, 0.
        assert_eq!([0x38, 0xb8, 0x7e, 0x01, 0x00].map(e4m3), [1.0, -1.0, 448.0, 0.125 / 64.0, 0.0]);
        assert!(e4m3(0x7f).is_nan() && e8m0(255).is_nan());
        assert_eq!([1, 2, 7, 8, 15].map(e2m1), [0.5, 1.0, 6.0, -0.0, -6.0]);
        assert_eq!([127, 128, 124].map(e8m0), [1.0, 2.0, 0.125]);
    }
}
