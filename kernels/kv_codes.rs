//! Eight-bit keys and values, the same on CPUs and GPUs.
//!
//! The D elements of K, or of V, of a token and KV head are codes with one scale: the size of the largest, divided by the largest
//! code. An element is `code * scale`. The scale is made when the token is written, and depends on nothing but these elements. So
//! a block never changes after it was written, and the same token has the same bytes in every block, batch and chunk.

/// How codes are numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KvCodes {
    /// e4m3: 4 bits of exponent, 3 of mantissa, up to 448.
    Fp8,
    /// Integers from -127 to 127.
    Int8,
}

impl KvCodes {
    /// Both kinds.
    pub const ALL: [Self; 2] = [Self::Fp8, Self::Int8];
    /// Bytes of a scale, an f32.
    pub const SCALE_BYTES: usize = size_of::<f32>();

    /// The name, as in the names of kernels.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fp8 => "fp8",
            Self::Int8 => "int8",
        }
    }

    /// The largest number that a code can be.
    pub fn largest(self) -> f32 {
        match self {
            Self::Fp8 => 448.0,
            Self::Int8 => 127.0,
        }
    }

    /// The scale of elements of at most this size; 0 where it would not be a normal number.
    pub fn scale(self, size: f32) -> f32 {
        let scale = size / self.largest();
        if scale < f32::MIN_POSITIVE { 0.0 } else { scale }
    }

    /// The nearest code of a number of at most [`KvCodes::largest`] in size, the even one of two.
    pub fn encode(self, value: f32) -> u8 {
        match self {
            Self::Fp8 => e4m3_code(value),
            Self::Int8 => (value.round_ties_even() as i8) as u8,
        }
    }

    /// The number that a code is.
    pub fn decode(self, code: u8) -> f32 {
        match self {
            // The exponent of e4m3 has a bias of 7, that of f32 one of 127.
            Self::Fp8 => {
                let bits = u32::from(code & 0x80) << 24 | u32::from(code & 0x7f) << 20;
                f32::from_bits(bits) * f32::from_bits((127 + 120) << 23)
            }
            Self::Int8 => f32::from(code as i8),
        }
    }

    /// Writes the codes of `values`, and returns their scale. Elements that are no numbers make the scale none.
    pub fn encode_all(self, values: &[f32], codes: &mut [u8]) -> f32 {
        let larger = |most: f32, size: f32| if size <= most || most.is_nan() { most } else { size };
        let size = values.iter().map(|value| value.abs()).fold(0.0, larger);
        let scale = self.scale(size);
        let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
        for (code, value) in codes.iter_mut().zip(values) {
            *code = self.encode((value * inverse).clamp(-self.largest(), self.largest()));
        }
        scale
    }

    /// The number of every code.
    pub fn table(self) -> [f32; 256] {
        std::array::from_fn(|code| self.decode(code as u8))
    }
}

fn e4m3_code(value: f32) -> u8 {
    /// Below it, numbers of e4m3 have steps of 2^-9.
    const SUBNORMAL: f32 = 0.015625;
    let size = value.abs();
    let code = if size < SUBNORMAL {
        (size * 512.0).round_ties_even() as u32
    } else {
        // Rounds the mantissa to 3 bits; a carry raises the exponent.
        let bits = size.to_bits();
        let rounded = bits + 0x7ffff + (bits >> 20 & 1);
        ((rounded >> 20) - (120 << 3)).min(0x7e)
    };
    code as u8 | if value.is_sign_negative() { 0x80 } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_between_two_codes_goes_to_the_nearer_one() {
        for (kind, last) in [(KvCodes::Fp8, 0x7e), (KvCodes::Int8, 0x7f)] {
            let numbers: Vec<f32> = (0..=last).map(|code| kind.decode(code)).collect();
            assert_eq!(numbers.last(), Some(&kind.largest()));
            for (code, pair) in numbers.windows(2).enumerate() {
                assert!(pair[0] < pair[1]);
                for eighth in 0..=8 {
                    let value = pair[0] + (pair[1] - pair[0]) * eighth as f32 / 8.0;
                    let upper = eighth > 4 || (eighth == 4 && code % 2 == 1);
                    let expected = kind.decode((code + usize::from(upper)) as u8);
                    assert_eq!(kind.decode(kind.encode(value)), expected, "{value} in {kind:?}");
                    assert_eq!(kind.decode(kind.encode(-value)), -expected, "-{value} in {kind:?}");
                }
            }
        }
    }

    #[test]
    fn the_largest_element_of_a_head_is_kept_and_zeros_stay_zeros() {
        for kind in KvCodes::ALL {
            let (mut codes, values) = ([0xffu8; 3], [0.5f32, -3.0, 0.0]);
            let scale = kind.encode_all(&values, &mut codes);
            let found = codes.map(|code| kind.decode(code) * scale);
            assert!((found[1] + 3.0).abs() < 1e-6 && found[2] == 0.0, "{found:?}");
            assert!((found[0] - 0.5).abs() < 0.04, "{found:?}");
            assert_eq!((kind.encode_all(&[0.0; 3], &mut codes), codes.map(|code| kind.decode(code))), (0.0, [0.0; 3]));
            assert!(kind.encode_all(&[1.0, f32::NAN, 2.0], &mut codes).is_nan());
        }
    }
}
