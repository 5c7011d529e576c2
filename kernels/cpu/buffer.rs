//! Zeroed memory that starts on a cache line.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use bytemuck::Pod;

const ALIGN: usize = 64;
/// Size of a huge page on x86-64 and most other processors.
const HUGE: usize = 2 << 20;

/// `len` zeroed elements on a 64-byte boundary.
///
/// A large buffer is a separate mapping: memory is assigned when a page is first written, in huge pages if the system
/// has them.
pub struct Buffer<T> {
    data: NonNull<T>,
    len: usize,
}

// SAFETY: a `Buffer` owns its elements as a `Vec` does.
unsafe impl<T: Send> Send for Buffer<T> {}
// SAFETY: as above; shared access only reads.
unsafe impl<T: Sync> Sync for Buffer<T> {}

impl<T: Pod> Buffer<T> {
    /// Allocates zeroed memory. A page is assigned near the thread that first writes it.
    pub fn new(len: usize) -> Self {
        let layout = layout::<T>(len);
        let data = match layout.size() {
            0 => return Self { data: NonNull::dangling(), len },
            #[cfg(target_os = "linux")]
            HUGE.. => huge::map(layout.size()),
            // SAFETY: the layout has a size above 0.
            _ => unsafe { alloc_zeroed(layout) },
        };
        match NonNull::new(data.cast::<T>()) {
            Some(data) => Self { data, len },
            None => handle_alloc_error(layout),
        }
    }
}

fn layout<T>(len: usize) -> Layout {
    let bytes = len.checked_mul(size_of::<T>()).expect("a buffer's size fits in memory");
    Layout::from_size_align(bytes, ALIGN).expect("a buffer's size fits in memory")
}

impl<T> Drop for Buffer<T> {
    fn drop(&mut self) {
        let layout = layout::<T>(self.len);
        match layout.size() {
            0 => {}
            // SAFETY: `new` took this pointer for the same layout in the same way, here and below.
            #[cfg(target_os = "linux")]
            HUGE.. => unsafe { huge::unmap(self.data.as_ptr().cast(), layout.size()) },
            // SAFETY: as above.
            _ => unsafe { dealloc(self.data.as_ptr().cast(), layout) },
        }
    }
}

impl<T> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `data` points to `len` initialised elements for as long as `self` lives.
        unsafe { std::slice::from_raw_parts(self.data.as_ptr(), self.len) }
    }
}

impl<T> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`; `&mut self` is the only access.
        unsafe { std::slice::from_raw_parts_mut(self.data.as_ptr(), self.len) }
    }
}

/// Mappings of whole huge pages. Weights are read sequentially at memory speed: with pages of 4 KiB, half of the time
/// is spent on address translation, and more in a virtual machine.
#[cfg(target_os = "linux")]
mod huge {
    use std::ptr;

    use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

    use super::HUGE;

    /// Zeroed memory aligned to a huge page; null on failure.
    pub(super) fn map(bytes: usize) -> *mut u8 {
        let size = bytes.next_multiple_of(HUGE);
        // SAFETY: a new mapping; the part that is cut off is inside it and not used by anything.
        unsafe {
            let access = ProtFlags::READ | ProtFlags::WRITE;
            let Ok(start) = mmap_anonymous(ptr::null_mut(), size + HUGE, access, MapFlags::PRIVATE) else {
                return ptr::null_mut();
            };
            let skipped = start.cast::<u8>().align_offset(HUGE);
            let data = start.cast::<u8>().add(skipped);
            let cut = [(start, skipped), (data.add(size).cast(), HUGE - skipped)];
            for (start, len) in cut.into_iter().filter(|(_, len)| *len > 0) {
                let _ = munmap(start, len); // Otherwise it remains as address space that is never touched.
            }
            let _ = madvise(data.cast(), size, Advice::LinuxHugepage); // The system may have no huge pages; small ones work too.
            data
        }
    }

    /// # Safety
    /// `data` must come from [`map`] with the same number of bytes, and must not be used any more.
    pub(super) unsafe fn unmap(data: *mut u8, bytes: usize) {
        // SAFETY: passed on.
        let _ = unsafe { munmap(data.cast(), bytes.next_multiple_of(HUGE)) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_any_size_is_zero_aligned_and_writable_to_its_end() {
        for len in [0, 1, 1000, HUGE / 4, HUGE / 4 + 1, HUGE] {
            let mut buffer = Buffer::<u32>::new(len);
            assert!(buffer.len() == len && buffer.as_ptr().is_aligned() && buffer.iter().all(|x| *x == 0));
            assert!(len == 0 || buffer.as_ptr().addr().is_multiple_of(ALIGN));
            buffer.fill(7);
            assert!(buffer.iter().all(|x| *x == 7));
        }
    }
}
