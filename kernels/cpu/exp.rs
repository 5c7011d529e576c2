//! The exponential function. It has the same result on every processor, and the compiler can vectorize it.

/// `e^x` within 2 units in the last place; 0 below -87.3, infinity above 88.7, NaN for NaN.
///
/// `x = n ln 2 + r` with `|r| <= ln 2 / 2`, and a polynomial of degree 6 for `e^r` (Cephes `expf`).
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // Below this the result would be a denormal number, which costs a hundred cycles, and is 0 anyway.
    let clamped = x.clamp(-87.3, 88.8);
    let n = (clamped * std::f32::consts::LOG2_E + 12_582_912.0) - 12_582_912.0;
    let r = (clamped - n * LN2_HIGH) - n * LN2_LOW;
    let mut p = 1.987_569_1e-4;
    p = p * r + 1.398_2e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_5e-1;
    p = p * r + 0.5;
    let p = p * r * r + r + 1.0;
    // 2^n is computed as two factors, because 2^128 is not representable as f32.
    let half = (n as i32) >> 1;
    let power = |n: i32| f32::from_bits(((n + 127) << 23) as u32);
    let result = p * power(half) * power(n as i32 - half);
    if x < -87.3 { 0.0 } else { result }
}

#[cfg(test)]
mod tests {
    use super::exp;

    #[test]
    fn it_agrees_with_double_precision() {
        for i in -87_000..88_000 {
            let x = i as f32 / 1000.0;
            let expected = f64::from(x).exp();
            let error = (f64::from(exp(x)) - expected).abs() / expected;
            assert!(error < 2.4e-7, "exp({x}) is off by {error}");
        }
    }

    #[test]
    fn its_ends_are_exact() {
        assert_eq!((exp(0.0), exp(f32::NEG_INFINITY), exp(-1000.0)), (1.0, 0.0, 0.0));
        assert_eq!((exp(f32::INFINITY), exp(100.0)), (f32::INFINITY, f32::INFINITY));
        assert!(exp(f32::NAN).is_nan());
    }
}
