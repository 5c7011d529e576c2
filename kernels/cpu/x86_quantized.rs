//! Products of quantized groups with AVX-512 VNNI and AVX2.

use std::arch::x86_64::*;

use crate::cpu::group_dot::{Group, GroupDot};
use crate::cpu::quantized::{PANEL, QUAD_BYTES};

/// Number of quads of a group with one weight per byte; with 4-bit weights, twice as many fit into the same bytes.
const QUADS: usize = 16;

/// 64 byte products per instruction.
pub(crate) struct Vnni<const BITS: usize>;

impl<const BITS: usize> GroupDot for Vnni<BITS> {
    type Sums = __m512;

    #[inline(always)]
    unsafe fn zero() -> __m512 {
        // SAFETY: the caller guarantees the instructions, here and below.
        unsafe { _mm512_setzero_ps() }
    }

    #[inline(always)]
    unsafe fn add<const R: usize, const P: usize>(sums: &mut [[__m512; P]; R], at: Group<P>) {
        // SAFETY: the caller guarantees a group of each row and panel.
        unsafe {
            let mut acc = [[_mm512_setzero_si512(); P]; R];
            for (r, acc) in acc.iter_mut().enumerate() {
                *acc = [_mm512_set1_epi32(*at.offsets.add(r * at.scale_stride)); P];
            }
            if BITS == 8 {
                for quad in 0..QUADS {
                    let mut weights = [_mm512_setzero_si512(); P];
                    for (weights, from) in weights.iter_mut().zip(at.weights) {
                        *weights = _mm512_load_si512(from.add(quad * QUAD_BYTES).cast());
                    }
                    add_quad(&mut acc, &at, quad, weights);
                }
            } else {
                let mask = _mm512_set1_epi8(15);
                for quad in 0..QUADS / 2 {
                    let mut low = [_mm512_setzero_si512(); P];
                    let mut high = low;
                    for p in 0..P {
                        let both = _mm512_load_si512(at.weights[p].add(quad * QUAD_BYTES).cast());
                        low[p] = _mm512_and_si512(both, mask);
                        high[p] = _mm512_and_si512(_mm512_srli_epi16::<4>(both), mask);
                    }
                    add_quad(&mut acc, &at, quad, low);
                    add_quad(&mut acc, &at, quad + QUADS / 2, high);
                }
            }
            let mut scales = [_mm512_setzero_ps(); P];
            for (scales, from) in scales.iter_mut().zip(at.weight_scales) {
                *scales = _mm512_cvtph_ps(_mm256_loadu_si256(from.cast()));
            }
            for r in 0..R {
                let scale = _mm512_set1_ps(*at.x_scales.add(r * at.scale_stride));
                for p in 0..P {
                    let scale = _mm512_mul_ps(scales[p], scale);
                    sums[r][p] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc[r][p]), scale, sums[r][p]);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn get(sums: __m512) -> [f32; PANEL] {
        // SAFETY: both are 64 plain bytes.
        unsafe { std::mem::transmute(sums) }
    }
}

/// Adds four adjacent elements of `K` of each row and output.
#[inline(always)]
unsafe fn add_quad<const R: usize, const P: usize>(
    acc: &mut [[__m512i; P]; R],
    at: &Group<P>,
    quad: usize,
    weights: [__m512i; P],
) {
    for (r, acc) in acc.iter_mut().enumerate() {
        // SAFETY: the caller guarantees the group of each row.
        unsafe {
            let x = _mm512_set1_epi32(at.x.add(r * at.x_stride + quad * 4).cast::<i32>().read_unaligned());
            for (acc, weights) in acc.iter_mut().zip(weights) {
                *acc = _mm512_dpbusd_epi32(*acc, weights, x);
            }
        }
    }
}

/// 32 byte products in two instructions.
pub(crate) struct Avx2<const BITS: usize>;

impl<const BITS: usize> GroupDot for Avx2<BITS> {
    type Sums = [__m256; 2];

    #[inline(always)]
    unsafe fn zero() -> [__m256; 2] {
        // SAFETY: the caller guarantees the instructions, here and below.
        unsafe { [_mm256_setzero_ps(); 2] }
    }

    #[inline(always)]
    unsafe fn add<const R: usize, const P: usize>(sums: &mut [[[__m256; 2]; P]; R], at: Group<P>) {
        for (r, sums) in sums.iter_mut().enumerate() {
            for (p, sums) in sums.iter_mut().enumerate() {
                for (half, sums) in sums.iter_mut().enumerate() {
                    // SAFETY: the caller guarantees a group of each row and panel.
                    unsafe {
                        let x = at.x.add(r * at.x_stride);
                        let weights = at.weights[p].add(half * 32);
                        let offset = *at.offsets.add(r * at.scale_stride);
                        let total = if BITS == 8 { signed_bytes(weights, x) } else { nibbles(weights, x, offset) };
                        let scales = _mm256_cvtph_ps(_mm_loadu_si128(at.weight_scales[p].add(half * 8).cast()));
                        let scale = _mm256_mul_ps(scales, _mm256_set1_ps(*at.x_scales.add(r * at.scale_stride)));
                        *sums = _mm256_fmadd_ps(_mm256_cvtepi32_ps(total), scale, *sums);
                    }
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn get(sums: [__m256; 2]) -> [f32; PANEL] {
        // SAFETY: both are 64 plain bytes.
        unsafe { std::mem::transmute(sums) }
    }
}

/// A group of 8 outputs. The shift of the weights is subtracted first: sums of two products of unsigned bytes could
/// overflow 16 bits, those with at most 127 steps in either direction cannot.
#[inline(always)]
unsafe fn signed_bytes(weights: *const u8, x: *const i8) -> __m256i {
    // SAFETY: the caller guarantees both groups.
    unsafe {
        let (shift, ones) = (_mm256_set1_epi8(-128), _mm256_set1_epi16(1));
        let mut total = _mm256_setzero_si256();
        for quad in 0..QUADS {
            let x = _mm256_set1_epi32(x.add(quad * 4).cast::<i32>().read_unaligned());
            let weights = _mm256_xor_si256(_mm256_loadu_si256(weights.add(quad * QUAD_BYTES).cast()), shift);
            let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(x, weights));
            total = _mm256_add_epi32(total, _mm256_madd_epi16(pairs, ones));
        }
        total
    }
}

/// A group of 8 outputs. Sums of sixteen products of at most 15 * 127 fit into 16 bits, so eight pairs are added there.
#[inline(always)]
unsafe fn nibbles(weights: *const u8, x: *const i8, offset: i32) -> __m256i {
    // SAFETY: the caller guarantees both groups.
    unsafe {
        let (mask, ones) = (_mm256_set1_epi8(15), _mm256_set1_epi16(1));
        let (mut low_pairs, mut high_pairs) = (_mm256_setzero_si256(), _mm256_setzero_si256());
        for quad in 0..QUADS / 2 {
            let low_x = _mm256_set1_epi32(x.add(quad * 4).cast::<i32>().read_unaligned());
            let high_x = _mm256_set1_epi32(x.add((quad + QUADS / 2) * 4).cast::<i32>().read_unaligned());
            let both = _mm256_loadu_si256(weights.add(quad * QUAD_BYTES).cast());
            let (low, high) = (_mm256_and_si256(both, mask), _mm256_and_si256(_mm256_srli_epi16::<4>(both), mask));
            low_pairs = _mm256_add_epi16(low_pairs, _mm256_maddubs_epi16(low, low_x));
            high_pairs = _mm256_add_epi16(high_pairs, _mm256_maddubs_epi16(high, high_x));
        }
        let total = _mm256_add_epi32(_mm256_madd_epi16(low_pairs, ones), _mm256_madd_epi16(high_pairs, ones));
        _mm256_add_epi32(total, _mm256_set1_epi32(offset))
    }
}
