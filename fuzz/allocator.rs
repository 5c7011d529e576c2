//! Memory that an input takes, counted: an input that makes more of it than its size allows has found something.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Largest single allocation.
const MAX_BYTES: usize = 256 << 20;

struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

static HELD: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: all that is asked is asked of the system's allocator, or refused with a null pointer, which the caller must expect.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.size() > MAX_BYTES {
            return std::ptr::null_mut();
        }
        let held = HELD.fetch_add(layout.size(), Relaxed) + layout.size();
        PEAK.fetch_max(held, Relaxed);
        // SAFETY: the caller upholds what the trait asks.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

/// Runs `work` on an input of `len` bytes.
///
/// # Panics
/// When it held more than `base + times * len` bytes at once.
pub fn within(len: usize, base: usize, times: usize, work: impl FnOnce()) {
    let before = HELD.load(Relaxed);
    PEAK.store(before, Relaxed);
    work();
    let taken = PEAK.load(Relaxed).saturating_sub(before);
    assert!(taken <= base + times * len, "{taken} bytes of memory for an input of {len}");
}
