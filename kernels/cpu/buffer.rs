//! Memory that starts on a cache line.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use bytemuck::Pod;

const ALIGN: usize = 64;

/// `len` zeroed elements on a 64-byte boundary.
pub struct Buffer<T> {
    data: NonNull<T>,
    len: usize,
}

// SAFETY: a `Buffer` owns its elements as a `Vec` does.
unsafe impl<T: Send> Send for Buffer<T> {}
// SAFETY: as above; shared access only reads.
unsafe impl<T: Sync> Sync for Buffer<T> {}

impl<T: Pod> Buffer<T> {
    /// Takes zeroed memory. Pages are touched first by whoever writes them.
    pub fn new(len: usize) -> Self {
        let layout = Self::layout(len);
        if layout.size() == 0 {
            return Self { data: NonNull::dangling(), len };
        }
        // SAFETY: the layout has a size above 0.
        let data = unsafe { alloc_zeroed(layout) };
        match NonNull::new(data.cast::<T>()) {
            Some(data) => Self { data, len },
            None => handle_alloc_error(layout),
        }
    }
}

impl<T> Buffer<T> {
    fn layout(len: usize) -> Layout {
        let bytes = len.checked_mul(size_of::<T>()).expect("a buffer's size fits in memory");
        Layout::from_size_align(bytes, ALIGN).expect("a buffer's size fits in memory")
    }
}

impl<T> Drop for Buffer<T> {
    fn drop(&mut self) {
        let layout = Self::layout(self.len);
        if layout.size() > 0 {
            // SAFETY: `new` allocated this pointer with the same layout.
            unsafe { dealloc(self.data.as_ptr().cast(), layout) }
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
