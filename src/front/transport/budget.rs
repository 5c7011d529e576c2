//! A budget for the memory of all requests in flight: their bodies and what these are decoded into, from arrival until the
//! response is sent.
//!
//! Each request also has a limit of its own, but many large requests at once would still exhaust the memory. A body must
//! arrive at a minimum rate, because a stalled body holds memory that other requests need.

use std::future::Future as _;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use futures::task::AtomicWaker;
use serving::{InferError, SharedLimit};
use tokio::time::{Instant, Sleep, sleep_until};

/// The memory budget of all requests.
#[derive(Debug)]
pub struct Budget {
    limit: usize,
    used: AtomicUsize,
    progress: ProgressLimits,
    /// Incomplete bodies that are watched, see [`ArrivalWatch::Watched`].
    arrivals: Mutex<Vec<Arc<Arrival>>>,
}

/// The progress that a body must make.
#[derive(Debug, Clone, Copy)]
pub struct ProgressLimits {
    /// Longest time without data, and the time over which the rate is measured.
    pub timeout: Duration,
    /// Minimum rate in bytes per second.
    pub min_rate: usize,
}

/// The progress of an incomplete body.
#[derive(Debug)]
struct Arrival {
    since: Instant,
    num_bytes: AtomicU64,
    /// Whether the body is dropped to free memory for other requests.
    is_dropped: AtomicBool,
    waker: AtomicWaker,
}

impl Arrival {
    fn num_bytes(&self) -> u64 {
        self.num_bytes.load(Relaxed)
    }

    fn is_dropped(&self) -> bool {
        self.is_dropped.load(Relaxed)
    }
}

impl Budget {
    /// A budget of `limit` bytes; bodies must make the progress of `progress`.
    pub fn new(limit: usize, progress: ProgressLimits) -> Arc<Self> {
        Arc::new(Self { limit, used: AtomicUsize::new(0), progress, arrivals: Mutex::default() })
    }

    /// A charge of 0 bytes for a new request.
    pub fn charge(self: &Arc<Self>) -> Charge {
        Charge { budget: self.clone(), held: AtomicUsize::new(0) }
    }

    fn arrivals(&self) -> MutexGuard<'_, Vec<Arc<Arrival>>> {
        self.arrivals.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Drops the slowest bodies that have taken longer than the timeout, until they hold `count` bytes in total. Their tasks
    /// release the memory when they run next, so it is available to later requests only.
    fn make_room(&self, count: usize) {
        let arrivals = self.arrivals();
        let mut room: u64 = arrivals.iter().filter(|it| it.is_dropped()).map(|it| it.num_bytes()).sum();
        let now = Instant::now();
        let is_late = |it: &&Arc<Arrival>| !it.is_dropped() && now - it.since >= self.progress.timeout;
        let mut late: Vec<&Arc<Arrival>> = arrivals.iter().filter(is_late).collect();
        let rate = |it: &Arrival| it.num_bytes() as f64 / (now - it.since).as_secs_f64().max(1e-3);
        late.sort_by(|left, right| rate(left).total_cmp(&rate(right)));
        for arrival in late {
            if room >= count as u64 {
                break;
            }
            room += arrival.num_bytes();
            arrival.is_dropped.store(true, Relaxed);
            arrival.waker.wake();
        }
    }

    #[cfg(test)]
    pub fn used(&self) -> usize {
        self.used.load(Relaxed)
    }
}

/// The bytes that one request holds of the budget. Dropping the charge releases them.
#[derive(Debug)]
pub struct Charge {
    budget: Arc<Budget>,
    held: AtomicUsize,
}

impl Charge {
    /// Adds `count` bytes.
    ///
    /// # Errors
    /// When the budget does not have them; the charge is then unchanged.
    pub fn add(&self, count: usize) -> Result<(), InferError> {
        let Budget { limit, used, .. } = &*self.budget;
        // Checked before it is added, because a sum that overflows would admit other requests until it is corrected.
        let add = |before: usize| before.checked_add(count).filter(|after| after <= limit);
        if let Err(before) = used.fetch_update(Relaxed, Relaxed, add) {
            self.budget.make_room(count);
            SharedLimit::BytesInFlight.count_refusal();
            return Err(InferError::unavailable(format!(
                "requests in flight hold {before} bytes, and all together may hold {limit}; try again later"
            )));
        }
        self.held.fetch_add(count, Relaxed);
        Ok(())
    }

    /// The bytes of this charge.
    pub fn held(&self) -> usize {
        self.held.load(Relaxed)
    }

    /// Adds the bytes of `other`.
    pub fn join(&self, other: Charge) {
        let mut other = other;
        self.held.fetch_add(std::mem::take(other.held.get_mut()), Relaxed);
    }

    /// Moves all bytes into a new charge.
    pub fn split(&self) -> Charge {
        self.split_off(usize::MAX)
    }

    /// Moves `count` bytes, or all if there are fewer, into a new charge.
    pub fn split_off(&self, count: usize) -> Charge {
        let take = |held: usize| Some(held.saturating_sub(count));
        let held = self.held.fetch_update(Relaxed, Relaxed, take).unwrap_or_else(|held| held);
        Charge { budget: self.budget.clone(), held: AtomicUsize::new(held.min(count)) }
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(*self.held.get_mut(), Relaxed);
    }
}

/// Detects a body that stalls or arrives too slowly. Most bodies arrive at once and need no timer and no entry in the
/// budget's list. A pending request is polled again after [`ProgressLimits::check_interval`] at the latest, by one timer of
/// its connection.
#[derive(Debug, Default)]
pub enum ArrivalWatch {
    /// No data is awaited.
    #[default]
    Idle,
    /// The body has been incomplete for a short time.
    Short(ArrivalStart),
    /// The body has been incomplete for longer than [`ProgressLimits::check_interval`].
    Watched(WatchedBody),
}

/// When a body was first awaited, when data arrived last, and how many bytes had arrived at first.
#[derive(Debug, Clone, Copy)]
pub struct ArrivalStart {
    since: Instant,
    last_data: Instant,
    num_bytes: usize,
}

impl ArrivalStart {
    /// Starts now; `charge` holds the bytes that have arrived.
    fn now(charge: &Charge) -> Self {
        let now = Instant::now();
        Self { since: now, last_data: now, num_bytes: charge.held() }
    }
}

impl ProgressLimits {
    /// The interval in which incomplete bodies are checked; after the first interval a body is watched.
    pub fn check_interval(&self) -> Duration {
        self.timeout / 6
    }
}

impl ArrivalWatch {
    /// Notes that `count` bytes have arrived.
    pub fn received(&mut self, count: usize) {
        match self {
            Self::Idle => {}
            Self::Short(start) => start.last_data = Instant::now(),
            Self::Watched(watched) => watched.received(count),
        }
    }

    /// Watches the body from now on, with a timer of its own. Needed by tasks that are polled only after a wake-up.
    pub fn watch(&mut self, charge: &Charge) {
        if let Self::Idle = self {
            let start = ArrivalStart::now(charge);
            *self = Self::Watched(WatchedBody::new(charge.budget.clone(), start, start.num_bytes));
        }
    }

    /// Ready with the error of a body that stalls, is too slow, or is dropped to free memory. To be called when no data is
    /// available; `charge` holds the bytes that have arrived.
    pub fn poll_late(&mut self, charge: &Charge, context: &mut Context<'_>) -> Poll<InferError> {
        match self {
            Self::Idle => {
                *self = Self::Short(ArrivalStart::now(charge));
                Poll::Pending
            }
            Self::Short(start) if start.since.elapsed() < charge.budget.progress.check_interval() => Poll::Pending,
            Self::Short(start) => {
                let mut watched = WatchedBody::new(charge.budget.clone(), *start, charge.held());
                let late = watched.poll_late(context);
                *self = Self::Watched(watched);
                late
            }
            Self::Watched(watched) => watched.poll_late(context),
        }
    }
}

/// An incomplete body with a timer and an entry in the budget's list.
#[derive(Debug)]
pub struct WatchedBody {
    budget: Arc<Budget>,
    arrival: Arc<Arrival>,
    last_data: Instant,
    /// When the rate is checked next, and the bytes that had arrived at the last check.
    next_check: Instant,
    bytes_at_check: u64,
    timer: Pin<Box<Sleep>>,
}

impl WatchedBody {
    fn new(budget: Arc<Budget>, start: ArrivalStart, held: usize) -> Self {
        let ArrivalStart { since, last_data, num_bytes } = start;
        let arrival = Arc::new(Arrival {
            since,
            num_bytes: AtomicU64::new(held as u64),
            is_dropped: AtomicBool::new(false),
            waker: AtomicWaker::new(),
        });
        budget.arrivals().push(arrival.clone());
        let next_check = since + budget.progress.timeout;
        let timer = Box::pin(sleep_until(next_check.min(last_data + budget.progress.timeout)));
        Self { budget, arrival, last_data, next_check, bytes_at_check: num_bytes as u64, timer }
    }

    /// Notes that `count` bytes have arrived.
    pub fn received(&mut self, count: usize) {
        self.arrival.num_bytes.fetch_add(count as u64, Relaxed);
        self.last_data = Instant::now();
    }

    /// As [`ArrivalWatch::poll_late`].
    pub fn poll_late(&mut self, context: &mut Context<'_>) -> Poll<InferError> {
        self.arrival.waker.register(context.waker());
        if self.arrival.is_dropped() {
            return Poll::Ready(refused(InferError::unavailable(format!(
                "request body brought {} bytes in {:?}, and others wait for the memory that it holds; send it faster",
                self.arrival.num_bytes(),
                rounded(self.arrival.since.elapsed())
            ))));
        }
        while self.timer.as_mut().poll(context).is_ready() {
            let (now, ProgressLimits { timeout, min_rate }) = (Instant::now(), self.budget.progress);
            if now - self.last_data >= timeout {
                let words = format!("request body stopped for {timeout:?} before its end");
                return Poll::Ready(refused(InferError::invalid(words)));
            }
            if now >= self.next_check {
                let num_bytes = self.arrival.num_bytes();
                let received = num_bytes.saturating_sub(self.bytes_at_check);
                if (received as f64) < min_rate as f64 * timeout.as_secs_f64() {
                    return Poll::Ready(refused(InferError::invalid(format!(
                        "request body brought {received} bytes in {timeout:?}, at least {min_rate} a second are expected \
                         (--min-body-rate)"
                    ))));
                }
                (self.bytes_at_check, self.next_check) = (num_bytes, now + timeout);
            }
            self.timer.as_mut().reset(self.next_check.min(self.last_data + timeout));
        }
        Poll::Pending
    }
}

fn refused(error: InferError) -> InferError {
    SharedLimit::BodyProgress.count_refusal();
    error
}

fn rounded(duration: Duration) -> Duration {
    Duration::from_millis(duration.as_millis() as u64)
}

impl Drop for WatchedBody {
    fn drop(&mut self) {
        let mut arrivals = self.budget.arrivals();
        if let Some(index) = arrivals.iter().position(|it| Arc::ptr_eq(it, &self.arrival)) {
            arrivals.swap_remove(index);
        }
    }
}

#[cfg(test)]
pub mod tests;
