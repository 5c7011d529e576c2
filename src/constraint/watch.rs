//! Ends computations that take too long. The limits of `llguidance` count states and items, but not the work for each of them.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use llguidance::CancellationHandle;

/// Time between two looks at the computations that run.
const INTERVAL: Duration = Duration::from_millis(50);

/// Number of looks without a computation after which the thread waits for the next one.
const MAX_IDLE: u32 = 20;

static START: LazyLock<Instant> = LazyLock::new(Instant::now);

/// `None` if the system gives no thread.
static WATCHER: LazyLock<Option<Watcher>> = LazyLock::new(|| {
    let thread = thread::Builder::new().name("constraint-time".into()).spawn(|| WATCHER.as_ref().map(Watcher::run));
    thread.ok().map(|handle| Watcher {
        thread: handle.thread().clone(),
        is_awake: AtomicBool::new(true),
        all: Mutex::default(),
    })
});

struct Watcher {
    thread: Thread,
    is_awake: AtomicBool,
    all: Mutex<Vec<Weak<State>>>,
}

/// The computations of one constraint, of which one runs at a time.
struct State {
    handle: CancellationHandle,
    /// When the one that runs must have ended, in milliseconds since [`START`]; 0 when none runs.
    ends_at: AtomicU64,
}

/// Limits the time of the computations of one constraint.
pub(crate) struct Watch {
    state: Arc<State>,
    /// For one computation.
    limit: Duration,
    /// What is left for all of them.
    left: Duration,
}

impl Watch {
    /// `limit` is for one computation, `total` for all. `handle` cancels those of the constraint.
    pub(crate) fn new(handle: CancellationHandle, limit: Duration, total: Duration) -> Self {
        let state = Arc::new(State { handle, ends_at: AtomicU64::new(0) });
        if let Some(watcher) = &*WATCHER {
            watcher.all().push(Arc::downgrade(&state));
        }
        Self { state, limit, left: total }
    }

    /// A watch for a copy of the constraint.
    pub(crate) fn with_handle(&self, handle: CancellationHandle) -> Self {
        Self::new(handle, self.limit, self.left)
    }

    /// Runs a computation, which fails when it takes too long.
    pub(crate) fn run<T>(&mut self, compute: impl FnOnce() -> T) -> T {
        let started = Instant::now();
        let ends_at = (started - *START) + self.limit.min(self.left);
        self.state.ends_at.store((ends_at.as_millis() as u64).max(1), Ordering::SeqCst);
        if let Some(watcher) = WATCHER.as_ref().filter(|watcher| !watcher.is_awake.swap(true, Ordering::SeqCst)) {
            watcher.thread.unpark();
        }
        let result = compute();
        self.state.ends_at.store(0, Ordering::SeqCst);
        self.left = self.left.saturating_sub(started.elapsed());
        result
    }
}

impl Watcher {
    fn all(&self) -> MutexGuard<'_, Vec<Weak<State>>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let mut num_idle = 0;
        loop {
            num_idle = if self.look() { 0 } else { num_idle + 1 };
            if num_idle < MAX_IDLE {
                thread::sleep(INTERVAL);
                continue;
            }
            num_idle = 0;
            self.is_awake.store(false, Ordering::SeqCst);
            // A computation that started before the line above did not wake the thread.
            while !self.look() && !self.is_awake.load(Ordering::SeqCst) {
                thread::park();
            }
            self.is_awake.store(true, Ordering::SeqCst);
        }
    }

    /// Cancels what takes too long. Returns whether something runs.
    fn look(&self) -> bool {
        let now = START.elapsed().as_millis() as u64;
        let mut is_busy = false;
        self.all().retain(|state| {
            let Some(state) = state.upgrade() else { return false };
            let ends_at = state.ends_at.load(Ordering::SeqCst);
            is_busy |= ends_at > 0;
            if ends_at > 0 && ends_at < now {
                state.handle.cancel();
            }
            true
        });
        is_busy
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_computation_that_takes_too_long_is_cancelled_and_others_are_not() {
        let handles: [_; 2] = std::array::from_fn(|_| CancellationHandle::default());
        let [mut slow, mut quick] =
            handles.clone().map(|handle| Watch::new(handle, Duration::from_millis(20), Duration::from_secs(60)));
        quick.run(|| {});
        // The thread sleeps after a second without work, and must wake up again.
        thread::sleep(INTERVAL * (MAX_IDLE + 5));
        let deadline = Instant::now() + Duration::from_secs(30);
        slow.run(|| {
            while !handles[0].is_cancelled() {
                assert!(Instant::now() < deadline, "it is not cancelled");
                thread::sleep(Duration::from_millis(1));
            }
        });
        assert!(!handles[1].is_cancelled());
    }
}
