//! Dot products along `K`, 32 inputs and weights at a time: the innermost loop of every linear layer.
//!
//! A [`Dot`] keeps the sum of one output in several lanes. The order of additions depends only on the implementation,
//! never on the number of rows or columns computed together.

use bytemuck::Pod;

/// Number of inputs and weights per step.
pub(crate) const STEP: usize = 32;

/// A method to multiply 32 inputs by weights and add the products.
pub(crate) trait Dot {
    /// Element of a packed input.
    type X: Pod;
    /// 32 weights in registers.
    type W: Copy;
    /// The sum of one output, in lanes.
    type Acc: Copy;
    /// Bytes of one weight.
    const WEIGHT_BYTES: usize;

    /// A sum of zero.
    ///
    /// # Safety
    /// The processor must have the instructions of this implementation; the same holds for all functions here.
    unsafe fn zero() -> Self::Acc;

    /// Loads 32 weights.
    ///
    /// # Safety
    /// `weights` must be readable for 32 weights, with any alignment.
    unsafe fn load(weights: *const u8) -> Self::W;

    /// Adds 32 products.
    ///
    /// # Safety
    /// `x` must be readable for 32 elements.
    unsafe fn add(acc: Self::Acc, x: *const Self::X, w: Self::W) -> Self::Acc;

    /// Adds up the lanes of four sums.
    ///
    /// # Safety
    /// The same as for [`Dot::zero`].
    unsafe fn sum4(acc: [Self::Acc; 4]) -> [f32; 4];
}

/// Element types of weights, as bytes at any alignment.
pub(crate) trait Element {
    /// Element of a packed input for such weights.
    type X: Pod;
    /// Bytes of one weight.
    const BYTES: usize;
    /// Reads one weight.
    fn weight(bytes: &[u8]) -> f32;
    /// Reads one input.
    fn input(x: Self::X) -> f32;
}

/// bfloat16 weights with inputs rounded to bfloat16.
pub(crate) struct Bf16;
/// Half weights with f32 inputs.
pub(crate) struct F16;
/// Single weights with f32 inputs.
pub(crate) struct F32;

impl Element for Bf16 {
    type X = u16;
    const BYTES: usize = 2;

    #[inline(always)]
    fn weight(bytes: &[u8]) -> f32 {
        f32::from_bits(u32::from(u16::from_le_bytes([bytes[0], bytes[1]])) << 16)
    }

    #[inline(always)]
    fn input(x: u16) -> f32 {
        f32::from_bits(u32::from(x) << 16)
    }
}

impl Element for F16 {
    type X = f32;
    const BYTES: usize = 2;

    #[inline(always)]
    fn weight(bytes: &[u8]) -> f32 {
        half::f16::from_le_bytes([bytes[0], bytes[1]]).to_f32()
    }

    #[inline(always)]
    fn input(x: f32) -> f32 {
        x
    }
}

impl Element for F32 {
    type X = f32;
    const BYTES: usize = 4;

    #[inline(always)]
    fn weight(bytes: &[u8]) -> f32 {
        f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
    }

    #[inline(always)]
    fn input(x: f32) -> f32 {
        x
    }
}

/// Plain Rust, for processors without a faster implementation.
pub(crate) struct Portable<E>(std::marker::PhantomData<E>);

impl<E: Element> Dot for Portable<E> {
    type X = E::X;
    type W = [f32; STEP];
    type Acc = [f32; 8];
    const WEIGHT_BYTES: usize = E::BYTES;

    #[inline(always)]
    unsafe fn zero() -> Self::Acc {
        [0.0; 8]
    }

    #[inline(always)]
    unsafe fn load(weights: *const u8) -> Self::W {
        // SAFETY: the caller guarantees 32 weights.
        let bytes = unsafe { std::slice::from_raw_parts(weights, STEP * E::BYTES) };
        std::array::from_fn(|i| E::weight(&bytes[i * E::BYTES..]))
    }

    #[inline(always)]
    unsafe fn add(mut acc: Self::Acc, x: *const E::X, w: Self::W) -> Self::Acc {
        // SAFETY: the caller guarantees 32 inputs.
        let x = unsafe { std::slice::from_raw_parts(x, STEP) };
        for (x, w) in x.chunks_exact(8).zip(w.chunks_exact(8)) {
            for lane in 0..8 {
                acc[lane] += E::input(x[lane]) * w[lane];
            }
        }
        acc
    }

    #[inline(always)]
    unsafe fn sum4(acc: [Self::Acc; 4]) -> [f32; 4] {
        acc.map(|a| ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7])))
    }
}
