//! Outputs that threads share out.

/// An output that threads write disjoint parts of.
#[derive(Clone, Copy)]
pub(crate) struct SharedOut<T> {
    data: *mut T,
    len: usize,
}

// SAFETY: only `slice` gives access, whose caller vouches that parts are disjoint.
unsafe impl<T: Send> Sync for SharedOut<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for SharedOut<T> {}

impl<T> SharedOut<T> {
    pub(crate) fn new(out: &mut [T]) -> Self {
        Self { data: out.as_mut_ptr(), len: out.len() }
    }

    /// Elements `start..start + len`.
    ///
    /// # Safety
    /// The slice this was made of is still borrowed by the caller's op, and no other access overlaps.
    #[inline(always)]
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn slice<'a>(&self, start: usize, len: usize) -> &'a mut [T] {
        assert!(start + len <= self.len, "a part lies within its whole");
        // SAFETY: within bounds by the check, disjoint by the caller.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(start), len) }
    }
}
