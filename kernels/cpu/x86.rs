//! Dot products with AVX-512 and AVX2.

use std::arch::x86_64::*;
use std::marker::PhantomData;

use crate::cpu::dot::{Bf16, Dot, Element, F16, F32};

/// bf16 weights and inputs, 32 products per instruction.
pub(crate) struct Avx512Bf16;

impl Dot for Avx512Bf16 {
    type X = u16;
    type W = __m512i;
    type Acc = __m512;
    const WEIGHT_BYTES: usize = 2;

    #[inline(always)]
    unsafe fn zero() -> __m512 {
        // SAFETY: the caller guarantees the instructions, here and below.
        unsafe { _mm512_setzero_ps() }
    }

    #[inline(always)]
    unsafe fn load(weights: *const u8) -> __m512i {
        // SAFETY: the caller guarantees 64 bytes.
        unsafe { _mm512_loadu_si512(weights.cast()) }
    }

    #[inline(always)]
    unsafe fn add(acc: __m512, x: *const u16, w: __m512i) -> __m512 {
        // SAFETY: the caller guarantees 32 inputs; all of these types are 64 plain bytes.
        unsafe {
            let x: __m512bh = std::mem::transmute(_mm512_loadu_si512(x.cast()));
            _mm512_dpbf16_ps(acc, x, std::mem::transmute::<__m512i, __m512bh>(w))
        }
    }

    #[inline(always)]
    unsafe fn sum4(acc: [__m512; 4]) -> [f32; 4] {
        // SAFETY: as above.
        unsafe { sum4_512(acc) }
    }
}

/// 32 numbers as two registers.
pub(crate) trait Load512: Element {
    /// # Safety
    /// 32 weights must be readable.
    unsafe fn weights512(weights: *const u8) -> [__m512; 2];
    /// # Safety
    /// 32 inputs must be readable.
    unsafe fn inputs512(x: *const Self::X) -> [__m512; 2];
}

impl Load512 for Bf16 {
    #[inline(always)]
    unsafe fn weights512(weights: *const u8) -> [__m512; 2] {
        // SAFETY: passed on. Even elements are the lower halves of 32 bits, odd ones the upper halves.
        unsafe {
            let pairs = _mm512_loadu_si512(weights.cast());
            let odd = _mm512_and_si512(pairs, _mm512_set1_epi32(0xffff_0000_u32 as i32));
            [_mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs)), _mm512_castsi512_ps(odd)]
        }
    }

    #[inline(always)]
    unsafe fn inputs512(x: *const u16) -> [__m512; 2] {
        // SAFETY: passed on.
        unsafe { Self::weights512(x.cast()) }
    }
}

impl Load512 for F16 {
    #[inline(always)]
    unsafe fn weights512(weights: *const u8) -> [__m512; 2] {
        // SAFETY: passed on.
        unsafe {
            let low = _mm256_loadu_si256(weights.cast());
            let high = _mm256_loadu_si256(weights.add(32).cast());
            [_mm512_cvtph_ps(low), _mm512_cvtph_ps(high)]
        }
    }

    #[inline(always)]
    unsafe fn inputs512(x: *const f32) -> [__m512; 2] {
        // SAFETY: passed on.
        unsafe { [_mm512_loadu_ps(x), _mm512_loadu_ps(x.add(16))] }
    }
}

impl Load512 for F32 {
    #[inline(always)]
    unsafe fn weights512(weights: *const u8) -> [__m512; 2] {
        // SAFETY: passed on.
        unsafe { F16::inputs512(weights.cast()) }
    }

    #[inline(always)]
    unsafe fn inputs512(x: *const f32) -> [__m512; 2] {
        // SAFETY: passed on.
        unsafe { F16::inputs512(x) }
    }
}

/// Weights of any type, multiplied in f32.
pub(crate) struct Avx512<E>(PhantomData<E>);

impl<E: Load512> Dot for Avx512<E> {
    type X = E::X;
    type W = [__m512; 2];
    type Acc = __m512;
    const WEIGHT_BYTES: usize = E::BYTES;

    #[inline(always)]
    unsafe fn zero() -> __m512 {
        // SAFETY: passed on.
        unsafe { _mm512_setzero_ps() }
    }

    #[inline(always)]
    unsafe fn load(weights: *const u8) -> [__m512; 2] {
        // SAFETY: passed on.
        unsafe { E::weights512(weights) }
    }

    #[inline(always)]
    unsafe fn add(acc: __m512, x: *const E::X, w: [__m512; 2]) -> __m512 {
        // SAFETY: passed on.
        unsafe {
            let x = E::inputs512(x);
            _mm512_fmadd_ps(x[1], w[1], _mm512_fmadd_ps(x[0], w[0], acc))
        }
    }

    #[inline(always)]
    unsafe fn sum4(acc: [__m512; 4]) -> [f32; 4] {
        // SAFETY: passed on.
        unsafe { sum4_512(acc) }
    }
}

/// Adds the lanes of each of four sums, pairwise, into one register.
#[inline(always)]
unsafe fn sum4_512(acc: [__m512; 4]) -> [f32; 4] {
    // SAFETY: the caller guarantees AVX-512.
    unsafe {
        let [a, b, c, d] = acc;
        let ab = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
        let cd = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)));
        let low = _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd));
        let high = _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd));
        let quads = _mm512_add_ps(low, high);
        let halves = _mm256_add_ps(_mm512_castps512_ps256(quads), _mm512_extractf32x8_ps::<1>(quads));
        let sums = _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps::<1>(halves));
        std::mem::transmute(sums)
    }
}

/// 32 numbers as four registers.
pub(crate) trait Load256: Element {
    /// # Safety
    /// 32 weights must be readable.
    unsafe fn weights256(weights: *const u8) -> [__m256; 4];
    /// # Safety
    /// 32 inputs must be readable.
    unsafe fn inputs256(x: *const Self::X) -> [__m256; 4];
}

impl Load256 for Bf16 {
    #[inline(always)]
    unsafe fn weights256(weights: *const u8) -> [__m256; 4] {
        // SAFETY: passed on. Even elements are the lower halves of 32 bits, odd ones the upper halves.
        unsafe {
            let (low, high) = (_mm256_loadu_si256(weights.cast()), _mm256_loadu_si256(weights.add(32).cast()));
            let mask = _mm256_set1_epi32(0xffff_0000_u32 as i32);
            [
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)),
                _mm256_castsi256_ps(_mm256_and_si256(low, mask)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)),
                _mm256_castsi256_ps(_mm256_and_si256(high, mask)),
            ]
        }
    }

    #[inline(always)]
    unsafe fn inputs256(x: *const u16) -> [__m256; 4] {
        // SAFETY: passed on.
        unsafe { Self::weights256(x.cast()) }
    }
}

impl Load256 for F16 {
    #[inline(always)]
    unsafe fn weights256(weights: *const u8) -> [__m256; 4] {
        // SAFETY: passed on.
        unsafe {
            [
                _mm256_cvtph_ps(_mm_loadu_si128(weights.cast())),
                _mm256_cvtph_ps(_mm_loadu_si128(weights.add(16).cast())),
                _mm256_cvtph_ps(_mm_loadu_si128(weights.add(32).cast())),
                _mm256_cvtph_ps(_mm_loadu_si128(weights.add(48).cast())),
            ]
        }
    }

    #[inline(always)]
    unsafe fn inputs256(x: *const f32) -> [__m256; 4] {
        // SAFETY: passed on.
        unsafe {
            [_mm256_loadu_ps(x), _mm256_loadu_ps(x.add(8)), _mm256_loadu_ps(x.add(16)), _mm256_loadu_ps(x.add(24))]
        }
    }
}

impl Load256 for F32 {
    #[inline(always)]
    unsafe fn weights256(weights: *const u8) -> [__m256; 4] {
        // SAFETY: passed on.
        unsafe { F16::inputs256(weights.cast()) }
    }

    #[inline(always)]
    unsafe fn inputs256(x: *const f32) -> [__m256; 4] {
        // SAFETY: passed on.
        unsafe { F16::inputs256(x) }
    }
}

/// Weights of any type, multiplied in f32.
pub(crate) struct Avx2<E>(PhantomData<E>);

impl<E: Load256> Dot for Avx2<E> {
    type X = E::X;
    type W = [__m256; 4];
    type Acc = __m256;
    const WEIGHT_BYTES: usize = E::BYTES;

    #[inline(always)]
    unsafe fn zero() -> __m256 {
        // SAFETY: passed on.
        unsafe { _mm256_setzero_ps() }
    }

    #[inline(always)]
    unsafe fn load(weights: *const u8) -> [__m256; 4] {
        // SAFETY: passed on.
        unsafe { E::weights256(weights) }
    }

    #[inline(always)]
    unsafe fn add(acc: __m256, x: *const E::X, w: [__m256; 4]) -> __m256 {
        // SAFETY: passed on.
        unsafe {
            let x = E::inputs256(x);
            let low = _mm256_fmadd_ps(x[1], w[1], _mm256_fmadd_ps(x[0], w[0], acc));
            _mm256_fmadd_ps(x[3], w[3], _mm256_fmadd_ps(x[2], w[2], low))
        }
    }

    #[inline(always)]
    unsafe fn sum4(acc: [__m256; 4]) -> [f32; 4] {
        // SAFETY: the caller guarantees AVX2.
        unsafe {
            let quads = _mm256_hadd_ps(_mm256_hadd_ps(acc[0], acc[1]), _mm256_hadd_ps(acc[2], acc[3]));
            std::mem::transmute(_mm_add_ps(_mm256_castps256_ps128(quads), _mm256_extractf128_ps::<1>(quads)))
        }
    }
}
