//! The calls of a connection, and which of them can go on.

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::AcqRel, Ordering::Acquire};
use std::task::{Context, Poll, Wake, Waker};

use serving::RateLimitedLog;
use tokio::task::coop::has_budget_remaining;

use super::connection_waker::ConnectionWaker;
use crate::transport::connections::{Activity, Busy};

static BROKEN_CALLS: RateLimitedLog = RateLimitedLog::new(8);

/// One call on a connection.
pub trait Call: Send {
    /// Goes on as far as it can, and has whatever it waits for wake it.
    fn proceed(&mut self, context: &mut Context<'_>) -> Progress;

    /// Passes to the connection what made it return [`Progress::Made`]. Ready when that was the call's end.
    fn send(&mut self) -> Poll<()> {
        Poll::Pending
    }
}

/// How far a call has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// It waits.
    Waits,
    /// It has something to send.
    Made,
    /// It has ended.
    Ended,
}

/// A call that sends for itself.
impl Call for Pin<Box<dyn Future<Output = ()> + Send>> {
    fn proceed(&mut self, context: &mut Context<'_>) -> Progress {
        match self.as_mut().poll(context) {
            Poll::Ready(()) => Progress::Ended,
            Poll::Pending => Progress::Waits,
        }
    }
}

/// All calls of a connection. The slot of a call that has ended is used again.
pub struct Calls {
    activity: Arc<Activity>,
    /// While there are calls.
    busy: Option<Busy>,
    slots: Vec<CallSlot>,
    free: Vec<usize>,
    /// One for each 64 slots.
    groups: Vec<Arc<Group>>,
    /// Slots of calls that were woken.
    woken: Vec<usize>,
    /// Slots of calls that have something to send.
    made: Vec<usize>,
}

struct CallSlot {
    call: Option<Box<dyn Call>>,
    waker: Waker,
}

/// Which of 64 calls were woken, a bit each.
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
    /// No calls yet; `activity` is notified when there are some.
    pub fn new(activity: Arc<Activity>) -> Self {
        Self { activity, busy: None, slots: vec![], free: vec![], groups: vec![], woken: vec![], made: vec![] }
    }

    /// Adds a call, which wakes the connection whenever it can proceed, as it can now.
    pub fn push(&mut self, call: Box<dyn Call>, connection_waker: &Arc<ConnectionWaker>) {
        self.busy.get_or_insert_with(|| self.activity.request());
        let index = self.free.pop().unwrap_or_else(|| self.add_slot(connection_waker));
        let slot = &mut self.slots[index];
        slot.call = Some(call);
        slot.waker.wake_by_ref();
    }

    /// Whether there is no call.
    pub fn are_none(&self) -> bool {
        self.busy.is_none()
    }

    /// Has every call proceed.
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

    /// Has all calls proceed that were woken, then those send that have made something: each of the two is more code than a
    /// processor's first cache holds together with the other. Whether there were any.
    pub fn proceed(&mut self) -> bool {
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
            self.settle(index, |call, waker| call.proceed(&mut Context::from_waker(waker)));
        }
        let mut made = std::mem::take(&mut self.made);
        let send = |call: &mut Box<dyn Call>| if call.send().is_ready() { Progress::Ended } else { Progress::Waits };
        made.drain(..).for_each(|index| self.settle(index, |call, _| send(call)));
        self.made = made;
        woken.clear();
        self.woken = woken;
        has_budget_remaining() // Without budget calls wake themselves, and find nothing.
    }

    /// Does what there is to do for a call, and with what comes of it. One that panics takes no other with it.
    fn settle(&mut self, index: usize, act: impl FnOnce(&mut Box<dyn Call>, &Waker) -> Progress) {
        let CallSlot { call: slot, waker } = &mut self.slots[index];
        let Some(call) = slot else { return }; // It was woken after its end.
        let progress = catch_unwind(AssertUnwindSafe(|| act(call, waker)));
        match progress {
            Ok(Progress::Waits) => {}
            Ok(Progress::Made) => self.made.push(index),
            Ok(Progress::Ended) => self.remove(index),
            Err(_) => {
                if let Some(suppressed) = BROKEN_CALLS.allow() {
                    tracing::error!("a call broke off{suppressed}");
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
