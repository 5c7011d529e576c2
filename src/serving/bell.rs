//! Polls a part of a task only when that part was woken.
//!
//! A task is polled again after each thing that it brought, and for each of its parts. A part that is many layers deep costs
//! as much to find at rest as to find with news.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::AcqRel, Ordering::Release};
use std::task::{Context, Poll, Wake, Waker};

use futures::task::AtomicWaker;

/// Tells whether a part of a task has something to do. The part is to be woken for everything that it waits for.
pub struct Bell {
    clapper: Arc<Clapper>,
    waker: Waker,
}

struct Clapper {
    is_rung: AtomicBool,
    task: AtomicWaker,
}

impl Default for Bell {
    fn default() -> Self {
        // What was never polled may have something.
        let clapper = Arc::new(Clapper { is_rung: AtomicBool::new(true), task: AtomicWaker::new() });
        Self { waker: Waker::from(clapper.clone()), clapper }
    }
}

impl Bell {
    /// Polls the part, if it was woken since it last had nothing.
    pub fn poll<T>(&mut self, context: &mut Context<'_>, part: impl FnOnce(&mut Context<'_>) -> Poll<T>) -> Poll<T> {
        self.poll_until_rest(context, |context| {
            let polled = part(context);
            let is_at_rest = polled.is_pending();
            (polled, is_at_rest)
        })
    }

    /// As [`Bell::poll`], for a part that says, too, whether it was at rest after all that it brought.
    pub fn poll_until_rest<T>(
        &mut self,
        context: &mut Context<'_>,
        part: impl FnOnce(&mut Context<'_>) -> (Poll<T>, bool),
    ) -> Poll<T> {
        self.clapper.task.register(context.waker());
        if !self.clapper.is_rung.swap(false, AcqRel) {
            return Poll::Pending;
        }
        let (polled, is_at_rest) = part(&mut Context::from_waker(&self.waker));
        if !is_at_rest {
            self.ring();
        }
        polled
    }

    /// Has the next poll look, without waking the task.
    pub fn ring(&self) {
        self.clapper.is_rung.store(true, Release);
    }
}

impl Wake for Clapper {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.is_rung.store(true, Release);
        self.task.wake();
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use futures::task::noop_waker_ref;

    use super::*;

    #[test]
    fn a_part_at_rest_is_left_alone_until_it_is_woken() {
        let mut context = Context::from_waker(noop_waker_ref());
        let (mut bell, kept, news) = (Bell::default(), RefCell::new(None), RefCell::new(1));
        let polls = RefCell::new(0);
        let mut look = |bell: &mut Bell| {
            bell.poll(&mut context, |context| {
                *polls.borrow_mut() += 1;
                *kept.borrow_mut() = Some(context.waker().clone());
                let mut news = news.borrow_mut();
                if *news == 0 {
                    return Poll::Pending;
                }
                *news -= 1;
                Poll::Ready(())
            })
        };
        assert!(look(&mut bell).is_ready() && look(&mut bell).is_pending());
        assert!(look(&mut bell).is_pending());
        assert_eq!(*polls.borrow(), 2, "it was polled at rest");
        *news.borrow_mut() = 2;
        kept.borrow().as_ref().unwrap().wake_by_ref();
        assert!(look(&mut bell).is_ready() && look(&mut bell).is_ready() && look(&mut bell).is_pending());
        bell.ring();
        assert!(look(&mut bell).is_pending());
        assert_eq!(*polls.borrow(), 6);
    }
}
