//! A thread pool that runs one op at a time. Its threads spin briefly between ops, and park if there is no op.

use std::cell::UnsafeCell;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

/// How long an idle thread spins before it parks.
const SPIN: Duration = Duration::from_micros(100);

type Job = dyn Fn(usize) + Sync;

fn nothing(_: usize) {}

/// A fixed number of threads; the caller is the first.
pub struct Pool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    ranges: Arc<[ChunkRange]>, // one per thread
}

struct Shared {
    epoch: AtomicU32,                   // counts jobs; a change starts a job
    remaining: AtomicUsize,             // number of threads still running the current job
    stop: AtomicBool,                   // the threads end at the next epoch
    job: UnsafeCell<*const Job>,        // written while no thread runs, read after `epoch` changes
    caller: UnsafeCell<Option<Thread>>, // likewise; unparked when `remaining` becomes 0
    parked: Vec<AtomicBool>,            // which threads are parked
}

// SAFETY: `job` and `caller` are written only while no thread runs a job (`remaining` is 0), before the release store
// to `epoch` that every reader acquires.
unsafe impl Sync for Shared {}
// SAFETY: as above; the pointer is used only while `run` keeps its target alive.
unsafe impl Send for Shared {}

impl Pool {
    /// Starts `threads - 1` threads; the caller of [`Pool::run`] is the other.
    pub fn new(threads: usize) -> Self {
        let threads = threads.max(1);
        let shared = Arc::new(Shared {
            epoch: AtomicU32::new(0),
            remaining: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            job: UnsafeCell::new(&nothing as *const Job),
            caller: UnsafeCell::new(None),
            parked: (0..threads).map(|_| AtomicBool::new(false)).collect(),
        });
        let start = |index: usize| {
            let shared = Arc::clone(&shared);
            let body = move || shared.work(index);
            std::thread::Builder::new().name(format!("cpu{index}")).spawn(body).expect("a thread can be started")
        };
        Self {
            threads: (1..threads).map(start).collect(),
            shared: Arc::clone(&shared),
            ranges: (0..threads).map(|_| ChunkRange::default()).collect(),
        }
    }

    /// Number of threads, including the caller.
    pub fn threads(&self) -> usize {
        self.threads.len() + 1
    }

    /// Calls `job(i)` once on each thread `i`, and returns when all calls have returned.
    ///
    /// A panic in a job aborts the process, because other threads still use what the job borrowed.
    pub fn run(&mut self, job: &(dyn Fn(usize) + Sync)) {
        if self.threads.is_empty() {
            return job(0);
        }
        let shared = &*self.shared;
        // SAFETY: no thread runs a job, so nobody reads `job` and `caller` now. The lifetime is erased, but this
        // function does not return before every thread has finished the job.
        unsafe {
            *shared.job.get() = std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), *const Job>(job);
            *shared.caller.get() = Some(std::thread::current());
        }
        shared.remaining.store(self.threads.len(), Ordering::Relaxed);
        shared.epoch.fetch_add(1, Ordering::SeqCst);
        self.wake_parked();
        let guard = AbortOnPanic;
        job(0);
        std::mem::forget(guard);
        wait_until(|| shared.remaining.load(Ordering::Acquire) == 0);
    }

    /// The results of `job(i)` on each thread `i`.
    pub(super) fn map_threads<T: Send + Sync>(&mut self, job: impl Fn(usize) -> T + Sync) -> Vec<T> {
        let results: Vec<OnceLock<T>> = (0..self.threads()).map(|_| OnceLock::new()).collect();
        self.run(&|thread| drop(results[thread].set(job(thread)))); // Each is set once.
        results.into_iter().map(|result| result.into_inner().expect("every thread gave a result")).collect()
    }

    /// Distributes `0..count` in chunks of `chunk`: each thread takes the next chunk.
    pub fn each(&mut self, count: usize, chunk: usize, job: impl Fn(Range<usize>) + Sync) {
        if self.threads.is_empty() || count <= chunk {
            return (0..count).step_by(chunk.max(1)).for_each(|start| job(start..(start + chunk).min(count)));
        }
        let next = AtomicUsize::new(0);
        self.run(&|_| {
            loop {
                let start = next.fetch_add(chunk, Ordering::Relaxed);
                if start >= count {
                    return;
                }
                job(start..(start + chunk).min(count));
            }
        });
    }

    /// Like [`Pool::each`], but each thread has its own contiguous range, so that memory is read sequentially. A thread
    /// that has finished its range takes chunks from the end of another's.
    ///
    /// # Panics
    /// Panics if `chunk` is 0, or if `count` does not fit into 32 bits.
    pub fn each_contiguous(&mut self, count: usize, chunk: usize, job: impl Fn(Range<usize>) + Sync) {
        if self.threads.is_empty() || count <= chunk {
            return self.each(count, chunk, job);
        }
        let threads = self.threads();
        for (index, range) in self.ranges.iter().enumerate() {
            range.set(count * index / threads..count * (index + 1) / threads);
        }
        let ranges = Arc::clone(&self.ranges);
        self.run(&|own| {
            while let Some(range) = ranges[own].take(chunk, false) {
                job(range);
            }
            for other in (own + 1..threads).chain(0..own) {
                while let Some(range) = ranges[other].take(chunk, true) {
                    job(range);
                }
            }
        });
    }

    fn wake_parked(&self) {
        for (index, thread) in self.threads.iter().enumerate() {
            if self.shared.parked[index + 1].load(Ordering::SeqCst) {
                thread.thread().unpark();
            }
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.epoch.fetch_add(1, Ordering::SeqCst);
        for thread in self.threads.drain(..) {
            thread.thread().unpark();
            let _ = thread.join(); // A job's panic has aborted the process; there is no other error.
        }
    }
}

impl Shared {
    fn work(&self, index: usize) {
        let mut seen = 0;
        loop {
            self.wait_for_change(index, seen);
            seen = seen.wrapping_add(1);
            if self.stop.load(Ordering::SeqCst) {
                return;
            }
            // SAFETY: `run` wrote the job before it changed `epoch`, and keeps it alive until `remaining` is 0.
            let (job, caller) = unsafe { (&**self.job.get(), (*self.caller.get()).clone()) };
            let guard = AbortOnPanic;
            job(index);
            std::mem::forget(guard);
            if self.remaining.fetch_sub(1, Ordering::AcqRel) == 1
                && let Some(caller) = caller
            {
                caller.unpark();
            }
        }
    }

    fn wait_for_change(&self, index: usize, seen: u32) {
        let changed = || self.epoch.load(Ordering::SeqCst) != seen;
        if spin(changed) {
            return;
        }
        self.parked[index].store(true, Ordering::SeqCst);
        while !changed() {
            std::thread::park();
        }
        self.parked[index].store(false, Ordering::SeqCst);
    }
}

/// The remaining items of a thread's range, in its own cache line.
#[derive(Default)]
#[repr(align(128))]
struct ChunkRange(AtomicU64); // start and end, 32 bits each

impl ChunkRange {
    fn set(&self, range: Range<usize>) {
        assert!(range.end <= u32::MAX as usize, "items are counted in 32 bits");
        self.0.store(pack(&range), Ordering::Relaxed); // `Pool::run` publishes it.
    }

    /// Up to `chunk` items from the start, or from the end.
    fn take(&self, chunk: usize, from_end: bool) -> Option<Range<usize>> {
        let mut taken = 0..0;
        let take = |word: u64| {
            let (start, end) = ((word >> 32) as usize, word as u32 as usize);
            let len = chunk.min(end - start);
            let split = if from_end { end - len } else { start + len };
            let left = if from_end { start..split } else { split..end };
            taken = if from_end { split..end } else { start..split };
            (len > 0).then_some(pack(&left))
        };
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).ok()?;
        Some(taken)
    }
}

fn pack(range: &Range<usize>) -> u64 {
    (range.start as u64) << 32 | range.end as u64
}

/// Spins, then parks until the last thread of a job unparks this one.
fn wait_until(done: impl Fn() -> bool) {
    if !spin(&done) {
        while !done() {
            std::thread::park();
        }
    }
}

/// Whether `done` became true while spinning.
fn spin(done: impl Fn() -> bool) -> bool {
    let mut deadline = None;
    loop {
        for _ in 0..64 {
            if done() {
                return true;
            }
            std::hint::spin_loop();
        }
        let now = Instant::now();
        if now > *deadline.get_or_insert(now + SPIN) {
            return false;
        }
    }
}

struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        std::process::abort();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_is_done_once_by_any_number_of_threads() {
        for threads in [1, 2, 3, 7] {
            let mut pool = Pool::new(threads);
            for round in 0..200 {
                let done: Vec<AtomicU32> = (0..round).map(|_| AtomicU32::new(0)).collect();
                pool.each(round, 3, |range| {
                    for item in range {
                        done[item].fetch_add(1, Ordering::Relaxed);
                    }
                });
                assert!(done.iter().all(|count| count.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn every_item_of_contiguous_ranges_is_done_once_by_any_number_of_threads() {
        for threads in [1, 2, 3, 7] {
            let mut pool = Pool::new(threads);
            for round in 0..200 {
                let done: Vec<AtomicU32> = (0..round).map(|_| AtomicU32::new(0)).collect();
                pool.each_contiguous(round, 1 + round % 3, |range| {
                    for item in range {
                        done[item].fetch_add(1, Ordering::Relaxed);
                    }
                });
                assert!(done.iter().all(|count| count.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn other_threads_take_the_range_of_a_blocked_thread() {
        let mut pool = Pool::new(2);
        let others = AtomicU32::new(0);
        pool.each_contiguous(100, 1, |range| match range.start {
            0 => while others.load(Ordering::Relaxed) < 99 {},
            _ => drop(others.fetch_add(1, Ordering::Relaxed)),
        });
        assert_eq!(others.into_inner(), 99);
    }

    #[test]
    fn threads_that_parked_are_woken() {
        let mut pool = Pool::new(3);
        for _ in 0..5 {
            std::thread::sleep(3 * SPIN);
            let done = AtomicU32::new(0);
            pool.run(&|_| {
                done.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(done.into_inner(), 3);
        }
    }
}
