//! Output buffers that are divided among threads.

/// An output buffer in which threads write disjoint parts.
#[derive(Clone, Copy)]
pub(crate) struct SharedOut<T> {
    data: *mut T,
    len: usize,
}

// SAFETY: only `slice` gives access, and its caller guarantees that parts are disjoint.
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
    /// The slice from which this was created must still be borrowed by the caller's op, and no other access may
    /// overlap.
    #[inline(always)]
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn slice<'a>(&self, start: usize, len: usize) -> &'a mut [T] {
        let is_within = start.checked_add(len).is_some_and(|end| end <= self.len);
        assert!(is_within, "a part lies within its whole");
        // SAFETY: within bounds by the check, disjoint by the caller's guarantee.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(start), len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_beyond_the_whole_is_refused_whatever_its_numbers() {
        let mut data = [0_u32; 8];
        for (start, len) in [(0, 9), (8, 1), (9, 0), (usize::MAX, 1), (1, usize::MAX), (usize::MAX - 3, 8)] {
            let out = SharedOut::new(&mut data);
            // SAFETY: the array outlives the part, and there is no other.
            let taken = std::panic::catch_unwind(|| unsafe { out.slice(start, len).len() });
            assert!(taken.is_err(), "{len} from {start} were given");
        }
        // SAFETY: as above.
        assert_eq!(unsafe { SharedOut::new(&mut data).slice(3, 5).len() }, 5);
    }
}
