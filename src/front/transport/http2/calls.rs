//! The calls of a connection, and the polling of those that were woken.

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::AcqRel, Ordering::Acquire};
use std::task::{Context, Poll, Wake, Waker};

use serving::RateLimitedLog;
use tokio::task::coop::has_budget_remaining;

use super::connection_waker::ConnectionWaker;
use crate::transport::connections::{Activity, BusyGuard};

static PANICS: RateLimitedLog = RateLimitedLog::new(8);

/// A call on a connection.
pub trait Call: Send {
    /// Advances as far as possible, and registers the waker for whatever the call waits for.
    fn advance(&mut self, context: &mut Context<'_>) -> Progress;

    /// Passes the output to the connection after [`Progress::HasOutput`]. Ready if the call has then ended.
    fn send(&mut self) -> Poll<()> {
        Poll::Pending
    }
}

/// The result of [`Call::advance`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// The call waits for an event.
    Pending,
    /// The call has output to send.
    HasOutput,
    /// The call has ended.
    Ended,
}

/// A future that sends its output itself.
impl Call for Pin<Box<dyn Future<Output = ()> + Send>> {
    fn advance(&mut self, context: &mut Context<'_>) -> Progress {
        match self.as_mut().poll(context) {
            Poll::Ready(()) => Progress::Ended,
            Poll::Pending => Progress::Pending,
        }
    }
}

/// All calls of a connection. Slots of calls that have ended are reused.
pub struct Calls {
    activity: Arc<Activity>,
    /// Set while there are calls.
    busy: Option<BusyGuard>,
    slots: Vec<CallSlot>,
    free: Vec<usize>,
    /// One group per 64 slots.
    groups: Vec<Arc<Group>>,
    /// Slots of calls that were woken.
    woken: Vec<usize>,
    /// Slots of calls that have output to send.
    with_output: Vec<usize>,
}

struct CallSlot {
    call: Option<Box<dyn Call>>,
    waker: Waker,
}

/// The calls of 64 slots that were woken, one bit each.
struct Group {
    woken: AtomicU64,
    connection_waker: Arc<ConnectionWaker>,
}

/// Wakes one call.
struct CallWaker {
    group: Arc<Group>,
    bit: u64,
}

impl Wake for CallWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // The first wake-up of a group wakes the connection for all calls that are woken before it checks the group.
        if self.group.woken.fetch_or(self.bit, AcqRel) == 0 {
            self.group.connection_waker.wake_connection();
        }
    }
}

impl Calls {
    /// An empty set; `activity` is busy while there are calls.
    pub fn new(activity: Arc<Activity>) -> Self {
        Self { activity, busy: None, slots: vec![], free: vec![], groups: vec![], woken: vec![], with_output: vec![] }
    }

    /// Adds a call. It is woken at once, and wakes the connection whenever it can advance.
    pub fn push(&mut self, call: Box<dyn Call>, connection_waker: &Arc<ConnectionWaker>) {
        self.busy.get_or_insert_with(|| self.activity.request());
        let index = self.free.pop().unwrap_or_else(|| self.add_slot(connection_waker));
        let slot = &mut self.slots[index];
        slot.call = Some(call);
        slot.waker.wake_by_ref();
    }

    pub fn is_empty(&self) -> bool {
        self.busy.is_none()
    }

    /// Wakes every call.
    pub fn wake_all(&self) {
        self.slots.iter().filter(|slot| slot.call.is_some()).for_each(|slot| slot.waker.wake_by_ref());
    }

    fn add_slot(&mut self, connection_waker: &Arc<ConnectionWaker>) -> usize {
        let index = self.slots.len();
        if index.is_multiple_of(64) {
            self.groups.push(Arc::new(Group { woken: AtomicU64::new(0), connection_waker: connection_waker.clone() }));
        }
        let call_waker = CallWaker { group: self.groups[index / 64].clone(), bit: 1 << (index % 64) };
        self.slots.push(CallSlot { call: None, waker: Arc::new(call_waker).into() });
        index
    }

    /// Advances all calls that were woken, then sends the output of those that have some. The two passes are separate because the
    /// code of both does not fit into the instruction cache together. Returns whether calls were woken and the task may go on.
    pub fn advance(&mut self) -> bool {
        let mut woken = std::mem::take(&mut self.woken);
        for (group, slots) in self.groups.iter().zip((0..).step_by(64)) {
            if group.woken.load(Acquire) == 0 {
                continue;
            }
            let mut bits = group.woken.swap(0, AcqRel);
            while bits != 0 {
                woken.push(slots + bits.trailing_zeros() as usize);
                bits &= bits - 1;
            }
        }
        if woken.is_empty() {
            self.woken = woken;
            return false;
        }
        for &index in &woken {
            self.run(index, |call, waker| call.advance(&mut Context::from_waker(waker)));
        }
        let mut with_output = std::mem::take(&mut self.with_output);
        let send = |call: &mut Box<dyn Call>| if call.send().is_ready() { Progress::Ended } else { Progress::Pending };
        with_output.drain(..).for_each(|index| self.run(index, |call, _| send(call)));
        self.with_output = with_output;
        woken.clear();
        self.woken = woken;
        has_budget_remaining() // Without a budget, calls wake themselves and make no progress.
    }

    /// Runs `act` for a call and handles its result. A panic ends this call alone.
    fn run(&mut self, index: usize, act: impl FnOnce(&mut Box<dyn Call>, &Waker) -> Progress) {
        let CallSlot { call: slot, waker } = &mut self.slots[index];
        let Some(call) = slot else { return }; // The call was woken after its end.
        let progress = catch_unwind(AssertUnwindSafe(|| act(call, waker)));
        match progress {
            Ok(Progress::Pending) => {}
            Ok(Progress::HasOutput) => self.with_output.push(index),
            Ok(Progress::Ended) => self.remove(index),
            Err(_) => {
                if let Some(suppressed) = PANICS.allow() {
                    tracing::error!("a call panicked{suppressed}");
                }
                self.remove(index);
            }
        }
    }

    fn remove(&mut self, index: usize) {
        self.slots[index].call = None;
        self.free.push(index);
        if self.free.len() == self.slots.len() {
            self.busy = None;
        }
    }
}
