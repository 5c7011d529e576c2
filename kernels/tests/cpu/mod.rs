//! Common parts of the tests of CPU kernels.

/// Multiples of 1 / 64 with magnitudes below 2: exact in bf16 and f16.
pub fn random(seed: u64, len: usize) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 57) as f32 - 64.0) / 64.0
    };
    (0..len).map(|_| next()).collect()
}
