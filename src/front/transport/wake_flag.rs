//! Polls a sub-future of a task only if it was woken.
//!
//! A task is polled after each item and for each of its sub-futures. Polling a pending sub-future costs as much as polling a
//! ready one.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::AcqRel, Ordering::Release};
use std::task::{Context, Poll, Wake, Waker};

use futures::task::AtomicWaker;

/// Whether a sub-future of a task was woken since it was last pending. The sub-future must register its waker for everything
/// that it waits for.
pub struct WakeFlag {
    state: Arc<State>,
    waker: Waker,
}

struct State {
    is_woken: AtomicBool,
    task: AtomicWaker,
}

impl Default for WakeFlag {
    fn default() -> Self {
        // A sub-future that was never polled may be ready.
        let state = Arc::new(State { is_woken: AtomicBool::new(true), task: AtomicWaker::new() });
        Self { waker: Waker::from(state.clone()), state }
    }
}

impl WakeFlag {
    /// Polls the sub-future if it was woken since it was last pending.
    pub fn poll<T>(&mut self, context: &mut Context<'_>, poll: impl FnOnce(&mut Context<'_>) -> Poll<T>) -> Poll<T> {
        self.state.task.register(context.waker());
        if !self.state.is_woken.swap(false, AcqRel) {
            return Poll::Pending;
        }
        let polled = poll(&mut Context::from_waker(&self.waker));
        if polled.is_ready() {
            self.set(); // It may have more items.
        }
        polled
    }

    /// Lets the next poll reach the sub-future, without waking the task.
    pub fn set(&self) {
        self.state.is_woken.store(true, Release);
    }
}

impl Wake for State {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.is_woken.store(true, Release);
        self.task.wake();
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use futures::task::noop_waker_ref;

    use super::*;

    #[test]
    fn a_pending_sub_future_is_polled_only_after_a_wake_up() {
        let mut context = Context::from_waker(noop_waker_ref());
        let (mut flag, kept, items) = (WakeFlag::default(), RefCell::new(None), RefCell::new(1));
        let polls = RefCell::new(0);
        let mut poll = |flag: &mut WakeFlag| {
            flag.poll(&mut context, |context| {
                *polls.borrow_mut() += 1;
                *kept.borrow_mut() = Some(context.waker().clone());
                let mut items = items.borrow_mut();
                if *items == 0 {
                    return Poll::Pending;
                }
                *items -= 1;
                Poll::Ready(())
            })
        };
        assert!(poll(&mut flag).is_ready() && poll(&mut flag).is_pending());
        assert!(poll(&mut flag).is_pending());
        assert_eq!(*polls.borrow(), 2, "it was polled without a wake-up");
        *items.borrow_mut() = 2;
        kept.borrow().as_ref().unwrap().wake_by_ref();
        assert!(poll(&mut flag).is_ready() && poll(&mut flag).is_ready() && poll(&mut flag).is_pending());
        flag.set();
        assert!(poll(&mut flag).is_pending());
        assert_eq!(*polls.borrow(), 6);
    }
}
