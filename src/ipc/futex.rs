//! Waits on a word of shared memory, across processes.
//!
//! ```no_run
//! # fn f(region: &ipc::Region) -> Result<(), ipc::IpcError> {
//! use std::sync::atomic::Ordering;
//! let word = &region.atomics_u32(0, 1)?[0];
//! // One process waits until the word is no longer 0 …
//! while word.load(Ordering::Acquire) == 0 {
//!     ipc::futex::wait(word, 0, None);
//! }
//! // … and another ends the wait.
//! word.store(1, Ordering::Release);
//! ipc::futex::wake_all(word);
//! # Ok(()) }
//! ```

use std::sync::atomic::AtomicU32;
use std::time::Duration;

use rustix::thread::futex;
use rustix::time::Timespec;

/// Sleeps while `word` is `expected`, until woken or until `timeout` has passed.
///
/// Returns false only when the timeout has passed. It may return true without a wake-up: check the condition again.
pub fn wait(word: &AtomicU32, expected: u32, timeout: Option<Duration>) -> bool {
    let timeout = timeout.map(timespec);
    // No PRIVATE flag: the word is shared with other processes.
    let result = futex::wait(word, futex::Flags::empty(), expected, timeout.as_ref());
    result != Err(rustix::io::Errno::TIMEDOUT)
}

/// Wakes one waiter of `word`, in any process.
pub fn wake_one(word: &AtomicU32) {
    wake(word, 1);
}

/// Wakes every waiter of `word`.
pub fn wake_all(word: &AtomicU32) {
    wake(word, i32::MAX as u32);
}

fn wake(word: &AtomicU32, count: u32) {
    // The call fails only for an address that is not mapped, and a reference is always mapped.
    let woken = futex::wake(word, futex::Flags::empty(), count);
    debug_assert!(woken.is_ok(), "futex wake failed: {woken:?}");
}

fn timespec(duration: Duration) -> Timespec {
    let tv_sec = i64::try_from(duration.as_secs()).unwrap_or(i64::MAX);
    Timespec { tv_sec, tv_nsec: i64::from(duration.subsec_nanos()) }
}
