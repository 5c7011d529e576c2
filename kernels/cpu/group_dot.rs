//! Dot products of quantized groups: the innermost loop of quantized linear layers.

use crate::cpu::quantized::PANEL;

/// Products of one group of a panel.
pub(crate) trait GroupDot {
    /// Sums of 16 outputs in f32.
    type Sums: Copy;

    /// Sums of zero.
    ///
    /// # Safety
    /// The processor must have the instructions of this implementation; the same holds for all functions here.
    unsafe fn zero() -> Self::Sums;

    /// Adds the products of one group of `R` rows and `P` panels.
    ///
    /// # Safety
    /// `weights` and `weight_scales` must be readable for a group of a panel, `x` for `R` groups `x_stride` bytes
    /// apart, and `x_scales` and `offsets` for `R` numbers `scale_stride` apart.
    unsafe fn add<const R: usize, const P: usize>(sums: &mut [[Self::Sums; P]; R], group: Group<P>);

    /// The 16 sums.
    ///
    /// # Safety
    /// The same as for [`GroupDot::zero`].
    unsafe fn get(sums: Self::Sums) -> [f32; PANEL];
}

/// The location of one group of a tile.
#[derive(Clone, Copy)]
pub(crate) struct Group<const P: usize> {
    pub(crate) weights: [*const u8; P],
    pub(crate) weight_scales: [*const u16; P],
    pub(crate) x: *const i8,
    pub(crate) x_stride: usize,
    pub(crate) x_scales: *const f32,
    pub(crate) offsets: *const i32,
    pub(crate) scale_stride: usize,
}
