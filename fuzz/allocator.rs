//! Counts allocated memory, so that a target fails on inputs that take more memory than their size allows.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Largest single allocation.
const MAX_BYTES: usize = 256 << 20;

struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

static ALLOCATED: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: each call is passed on to the system's allocator, or fails with a null pointer, which callers must expect.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.size() > MAX_BYTES {
            return std::ptr::null_mut();
        }
        let allocated = ALLOCATED.fetch_add(layout.size(), Relaxed) + layout.size();
        PEAK.fetch_max(allocated, Relaxed);
        // SAFETY: the caller upholds the contract of the trait.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        ALLOCATED.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

/// Runs `work` on an input of `len` bytes.
///
/// # Panics
/// If it allocated more than `base + times * len` bytes at once.
pub fn within(len: usize, base: usize, times: usize, work: impl FnOnce()) {
    let before = ALLOCATED.load(Relaxed);
    PEAK.store(before, Relaxed);
    work();
    let taken = PEAK.load(Relaxed).saturating_sub(before);
    assert!(taken <= base + times * len, "{taken} bytes of memory for an input of {len}");
}
