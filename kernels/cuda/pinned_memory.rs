//! Host memory of another owner that is pinned while it is in use already.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use cudarc::driver::sys;
use rustix::mm::{Advice, madvise};

use super::error::check;
use super::{CudaError, Gpu};

/// Bytes that are pinned at once, for memory of any size. Launches of kernels wait for such a call.
pub const PINNED_PORTION: usize = 16 << 20;
const PAGE: usize = 4096;

/// Host memory of another owner, pinned as long as this value lives. What the driver refuses to pin stays as it is: copies work there, too, but
/// are slower, and standard error says so.
///
/// Pinning a GB takes 0.34 s where its pages do not exist yet, too long for a start. So only the first portion is pinned at once. A
/// thread pins the others in their order, and who needs one of them [waits](Self::wait_for) for it.
pub struct PinnedMemory {
    pointer: *mut u8,
    bytes: usize,
    portion: usize,
    gpu: Arc<Gpu>,
    progress: Arc<Progress>,
    thread: Option<JoinHandle<()>>,
    /// Dropped after the memory is unpinned. Nothing else uses it.
    _owner: Box<dyn AsMut<[u8]> + Send>,
}

// SAFETY: plain memory, accessed only through `&self` and `&mut self`, and its owner may move to another thread.
unsafe impl Send for PinnedMemory {}

/// How far the thread has come.
#[derive(Default)]
struct Progress {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Bytes from the beginning on.
    pinned: usize,
    /// Whether no more are pinned.
    has_failed: bool,
    stops: bool,
}

impl Progress {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that a portion of `bytes` bytes was pinned, or that none is any more. Returns whether it was.
    fn record(&self, bytes: usize, pinned: Result<(), CudaError>) -> bool {
        let mut state = self.lock();
        if let Err(error) = &pinned {
            let done = state.pinned >> 20;
            eprintln!("host memory behind the first {done} MiB is not pinned, so copies there are slower: {error}"); // Rank 0 logs it.
            state.has_failed = true;
        } else {
            state.pinned += bytes;
        }
        drop(state);
        self.changed.notify_all();
        pinned.is_ok()
    }
}

/// A part of the memory, for the thread that pins it.
struct Portion {
    pointer: *mut u8,
    bytes: usize,
}

// SAFETY: `PinnedMemory` joins the thread that has it before the memory is freed. The memory's content is not accessed.
unsafe impl Send for Portion {}

impl Portion {
    fn pin(&self) -> Result<(), CudaError> {
        touch(self.pointer, self.bytes);
        // SAFETY: the bytes live until the owner of the memory is dropped, before which they are unpinned.
        let code =
            unsafe { sys::cuMemHostRegister_v2(self.pointer.cast(), self.bytes, sys::CU_MEMHOSTREGISTER_PORTABLE) };
        check(code, "cuMemHostRegister")
    }
}

impl PinnedMemory {
    /// Pins the first `bytes` bytes of `owner`, which stay where they are when it moves, as those of a vector or of a mapping do, in
    /// portions of `portion` bytes, a multiple of 4 096.
    ///
    /// # Errors
    /// When no thread can be started.
    ///
    /// # Panics
    /// Panics if the owner has fewer bytes.
    pub fn new(
        gpu: &Arc<Gpu>,
        mut owner: Box<dyn AsMut<[u8]> + Send>,
        bytes: usize,
        portion: usize,
    ) -> Result<Self, CudaError> {
        assert!(portion > 0 && portion.is_multiple_of(PAGE), "portions of {portion} bytes");
        let pointer = (*owner).as_mut()[..bytes].as_mut_ptr();
        let (progress, gpu) = (Arc::<Progress>::default(), gpu.clone());
        let mut pinned = Self { pointer, bytes, portion, gpu, progress, thread: None, _owner: owner };
        let mut portions = pinned.pieces(0..bytes).map(|range| pinned.portion(&range)).collect::<Vec<_>>().into_iter();
        if let Some(first) = portions.next() {
            pinned.progress.record(first.bytes, first.pin());
        }
        if portions.len() > 0 && !pinned.progress.lock().has_failed {
            let (gpu, progress) = (pinned.gpu.clone(), pinned.progress.clone());
            let thread = thread::Builder::new().name("pin host memory".into());
            let thread = thread.spawn(move || pin_all(&gpu, portions, &progress));
            pinned.thread =
                Some(thread.map_err(|error| CudaError::Library {
                    call: "starting a thread".into(),
                    reason: error.to_string(),
                })?);
        }
        Ok(pinned)
    }

    /// The pieces of a range of bytes that lie in one portion each. A copy must not reach from one portion to another.
    pub fn pieces(&self, range: Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
        pieces(range, self.portion, self.pointer.addr() % PAGE)
    }

    fn portion(&self, range: &Range<usize>) -> Portion {
        // SAFETY: the range is one of the memory.
        Portion { pointer: unsafe { self.pointer.add(range.start) }, bytes: range.len() }
    }

    /// Waits until the first `end` bytes are pinned, or it is known that they cannot be.
    pub fn wait_for(&self, end: usize) {
        let mut state = self.progress.lock();
        while state.pinned < end && !state.has_failed {
            state = self.progress.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The address of bytes of the memory, for copies.
    ///
    /// # Panics
    /// Panics if the memory ends before.
    pub fn address(&self, range: &Range<usize>) -> *const u8 {
        assert!(range.start <= range.end && range.end <= self.bytes, "{range:?} of {} bytes", self.bytes);
        // SAFETY: in bounds.
        unsafe { self.pointer.add(range.start) }
    }

    /// As [`address`](Self::address), for copies to it.
    ///
    /// # Panics
    /// Panics if the memory ends before.
    pub fn address_mut(&mut self, range: &Range<usize>) -> *mut u8 {
        self.address(range).cast_mut()
    }
}

impl fmt::Debug for PinnedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedMemory").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        self.progress.lock().stops = true;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        if self.gpu.bind().is_ok() {
            let pinned = self.progress.lock().pinned;
            for range in self.pieces(0..pinned) {
                // SAFETY: registered by `Portion::pin`, unregistered once, and the memory is still there.
                let _ = unsafe { sys::cuMemHostUnregister(self.portion(&range).pointer.cast()) };
            }
        }
    }
}

/// The pieces of a range of bytes of memory that begins `before` bytes behind the start of a page. Portions begin at pages, so that no
/// page is in two of them.
fn pieces(range: Range<usize>, portion: usize, before: usize) -> impl Iterator<Item = Range<usize>> {
    let mut start = range.start;
    std::iter::from_fn(move || {
        let end = ((start + before) / portion + 1) * portion - before;
        let piece = start..end.min(range.end);
        start = piece.end;
        (!piece.is_empty()).then_some(piece)
    })
}

fn pin_all(gpu: &Gpu, portions: impl Iterator<Item = Portion>, progress: &Progress) {
    let mut bound = gpu.bind();
    for portion in portions {
        if progress.lock().stops {
            return;
        }
        let pinned = std::mem::replace(&mut bound, Ok(())).and_then(|()| portion.pin());
        if !progress.record(portion.bytes, pinned) {
            return;
        }
    }
}

/// Assigns pages, so that the driver needs less time. The content stays.
fn touch(pointer: *mut u8, bytes: usize) {
    let first = pointer.addr().next_multiple_of(PAGE);
    let pages = first..(pointer.addr() + bytes).max(first) / PAGE * PAGE;
    if !pages.is_empty() {
        // SAFETY: whole pages of the memory, whose content does not change. Where this fails, as before Linux 5.14, the driver assigns
        // the pages when it registers them.
        let _ = unsafe { madvise(pointer.with_addr(pages.start).cast(), pages.len(), Advice::LinuxPopulateWrite) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_end_where_portions_do() {
        let found = |start, end, before| {
            pieces(start..end, 2 * PAGE, before).map(|piece| (piece.start, piece.end)).collect::<Vec<_>>()
        };
        assert_eq!(found(0, 3 * PAGE, 0), [(0, 2 * PAGE), (2 * PAGE, 3 * PAGE)]);
        assert_eq!(found(10, 2 * PAGE, 0), [(10, 2 * PAGE)]);
        // The memory begins in a page, so its first portion is shorter.
        assert_eq!(found(0, 3 * PAGE, 16), [(0, 2 * PAGE - 16), (2 * PAGE - 16, 3 * PAGE)]);
        assert_eq!(found(2 * PAGE - 16, 2 * PAGE, 16), [(2 * PAGE - 16, 2 * PAGE)]);
        assert_eq!(found(5, 5, 0), []);
    }
}
