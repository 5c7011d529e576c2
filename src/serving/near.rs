//! Brings memory near before it is needed.
//!
//! Between two steps of a model its streams' memory grows cold. What serves a token follows pointers through it, and would
//! wait for each of its lines in turn; fetched for the next streams while one is served, they come together.

/// Has the processor fetch all of `value`, and goes on.
#[inline]
pub fn fetch<T: ?Sized>(value: &T) {
    const LINE_BYTES: usize = 64;
    let begin = std::ptr::from_ref(value).cast::<i8>();
    for offset in (0..size_of_val(value)).step_by(LINE_BYTES) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the hint neither reads nor faults, whatever the address; this one lies within `value`.
        unsafe {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            _mm_prefetch::<_MM_HINT_T0>(begin.add(offset));
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = begin.wrapping_add(offset);
    }
}
