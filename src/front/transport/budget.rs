//! Bounds what requests hold together: the bytes of their bodies, and what these become, from when they arrive until they
//! are answered.
//!
//! One request has a bound of its own; many large ones at once would still fill the memory. A body must also arrive at
//! some rate: one that stops holds what others need.

use std::future::Future as _;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use futures::task::AtomicWaker;
use serving::{InferError, SharedLimit};
use tokio::time::{Instant, Sleep, sleep_until};

/// What all requests may hold at once.
#[derive(Debug)]
pub struct Budget {
    limit: usize,
    used: AtomicUsize,
    pace: Pace,
    /// Bodies that have begun and are not whole, those alone that were waited for.
    arrivals: Mutex<Vec<Arc<Arrival>>>,
}

/// How fast a body must arrive.
#[derive(Debug, Clone, Copy)]
pub struct Pace {
    /// Longest silence; also the time over which the rate is measured.
    pub patience: Duration,
    /// Least bytes a second.
    pub min_rate: usize,
}

/// A body that arrives.
#[derive(Debug)]
struct Arrival {
    since: Instant,
    num_bytes: AtomicU64,
    /// It has to make room for others.
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
    /// A budget of `limit` bytes, for bodies that keep `pace`.
    pub fn new(limit: usize, pace: Pace) -> Arc<Self> {
        Arc::new(Self { limit, used: AtomicUsize::new(0), pace, arrivals: Mutex::default() })
    }

    /// What one request holds: nothing yet.
    pub fn charge(self: &Arc<Self>) -> Charge {
        Charge { budget: self.clone(), held: AtomicUsize::new(0) }
    }

    /// How fast bodies must arrive.
    pub fn pace(&self) -> Pace {
        self.pace
    }

    fn arrivals(&self) -> MutexGuard<'_, Vec<Arc<Arrival>>> {
        self.arrivals.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Drops the slowest bodies that have taken longer than the patience, until they have held `count` bytes. They end when
    /// their tasks run, so the room is there for a later request.
    fn make_room(&self, count: usize) {
        let arrivals = self.arrivals();
        let mut room: u64 = arrivals.iter().filter(|it| it.is_dropped()).map(|it| it.num_bytes()).sum();
        let now = Instant::now();
        let is_late = |it: &&Arc<Arrival>| !it.is_dropped() && now - it.since >= self.pace.patience;
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

/// What one request holds; given back when it is dropped.
#[derive(Debug)]
pub struct Charge {
    budget: Arc<Budget>,
    held: AtomicUsize,
}

impl Charge {
    /// Holds `count` bytes more.
    ///
    /// # Errors
    /// When the budget has no room for them; then it holds no more than before.
    pub fn add(&self, count: usize) -> Result<(), InferError> {
        let Budget { limit, used, .. } = &*self.budget;
        // Compared before it is added: a sum that wraps around would have room for others meanwhile.
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

    /// Bytes held.
    pub fn held(&self) -> usize {
        self.held.load(Relaxed)
    }

    /// Holds what `other` does, too.
    pub fn join(&self, other: Charge) {
        let mut other = other;
        self.held.fetch_add(std::mem::take(other.held.get_mut()), Relaxed);
    }

    /// What is held so far, as a charge of its own; nothing is left here.
    pub fn split(&self) -> Charge {
        self.split_off(usize::MAX)
    }

    /// `count` of the bytes held, or all, as a charge of their own.
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

/// A body that is waited for. Most arrive at once and get no timer and no entry in a list. A request that waits is polled
/// again after [`Pace::first_look`] at the latest, by a timer that its connection has for all of its requests.
#[derive(Debug, Default)]
pub enum Waiting {
    /// For nothing.
    #[default]
    Not,
    /// For a short time.
    Since(Begun),
    /// For longer.
    Watched(Watched),
}

/// When a body was first waited for, when more of it came last, and how much had come first.
#[derive(Debug, Clone, Copy)]
pub struct Begun {
    since: Instant,
    last_data: Instant,
    num_bytes: usize,
}

impl Begun {
    /// A body of which `charge` holds what has come.
    fn now(charge: &Charge) -> Self {
        let now = Instant::now();
        Self { since: now, last_data: now, num_bytes: charge.held() }
    }
}

impl Pace {
    /// How long a body is waited for before it is watched.
    pub fn first_look(&self) -> Duration {
        self.patience / 6
    }
}

impl Waiting {
    /// `count` more bytes have come.
    pub fn came(&mut self, count: usize) {
        match self {
            Self::Not => {}
            Self::Since(begun) => begun.last_data = Instant::now(),
            Self::Watched(watched) => watched.came(count),
        }
    }

    /// Watches a body from now on, with a timer of its own. For tasks that poll it only when it has woken them.
    pub fn watch(&mut self, charge: &Charge) {
        if let Self::Not = self {
            let begun = Begun::now(charge);
            *self = Self::Watched(Watched::new(charge.budget.clone(), begun, begun.num_bytes));
        }
    }

    /// Ready with the error of a body that has stopped, is too slow, or has to make room. For when nothing more has come;
    /// `charge` holds what has.
    pub fn poll_late(&mut self, charge: &Charge, context: &mut Context<'_>) -> Poll<InferError> {
        match self {
            Self::Not => {
                *self = Self::Since(Begun::now(charge));
                Poll::Pending
            }
            Self::Since(begun) if begun.since.elapsed() < charge.budget.pace.first_look() => Poll::Pending,
            Self::Since(begun) => {
                let mut watched = Watched::new(charge.budget.clone(), *begun, charge.held());
                let late = watched.poll_late(context);
                *self = Self::Watched(watched);
                late
            }
            Self::Watched(watched) => watched.poll_late(context),
        }
    }
}

/// Watches a body that has begun and is not whole.
#[derive(Debug)]
pub struct Watched {
    budget: Arc<Budget>,
    arrival: Arc<Arrival>,
    last_data: Instant,
    /// When the rate is next looked at, and the bytes that had come when it last was.
    next_look: Instant,
    num_looked_at: u64,
    timer: Pin<Box<Sleep>>,
}

impl Watched {
    fn new(budget: Arc<Budget>, begun: Begun, held: usize) -> Self {
        let Begun { since, last_data, num_bytes } = begun;
        let arrival = Arc::new(Arrival {
            since,
            num_bytes: AtomicU64::new(held as u64),
            is_dropped: AtomicBool::new(false),
            waker: AtomicWaker::new(),
        });
        budget.arrivals().push(arrival.clone());
        let next_look = since + budget.pace.patience;
        let timer = Box::pin(sleep_until(next_look.min(last_data + budget.pace.patience)));
        Self { budget, arrival, last_data, next_look, num_looked_at: num_bytes as u64, timer }
    }

    /// `count` more bytes have come.
    pub fn came(&mut self, count: usize) {
        self.arrival.num_bytes.fetch_add(count as u64, Relaxed);
        self.last_data = Instant::now();
    }

    /// Ready with the error of a body that has stopped, is too slow, or has to make room. For when nothing more has come.
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
            let (now, Pace { patience, min_rate }) = (Instant::now(), self.budget.pace);
            if now - self.last_data >= patience {
                let words = format!("request body stopped for {patience:?} before its end");
                return Poll::Ready(refused(InferError::invalid(words)));
            }
            if now >= self.next_look {
                let num_bytes = self.arrival.num_bytes();
                let came = num_bytes.saturating_sub(self.num_looked_at);
                if (came as f64) < min_rate as f64 * patience.as_secs_f64() {
                    return Poll::Ready(refused(InferError::invalid(format!(
                        "request body brought {came} bytes in {patience:?}, at least {min_rate} a second are expected \
                         (--min-body-rate)"
                    ))));
                }
                (self.num_looked_at, self.next_look) = (num_bytes, now + patience);
            }
            self.timer.as_mut().reset(self.next_look.min(self.last_data + patience));
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

impl Drop for Watched {
    fn drop(&mut self) {
        let mut arrivals = self.budget.arrivals();
        if let Some(index) = arrivals.iter().position(|it| Arc::ptr_eq(it, &self.arrival)) {
            arrivals.swap_remove(index);
        }
    }
}

#[cfg(test)]
pub mod tests;
