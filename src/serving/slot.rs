//! One response between the work that makes it and who reads it, where reading is what carries that work on.
//!
//! Less than a channel: the work runs only while somebody reads, so nothing has to wake the reader, and the one place is
//! free again whenever the work is asked for more.

use std::sync::atomic::{
    AtomicBool,
    Ordering::{Acquire, Release, SeqCst},
};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use crate::update::Sent;

/// The place of one response.
#[derive(Debug, Default)]
pub(crate) struct Slot {
    place: Mutex<Place>,
    /// Whether there is something to take: most looks find nothing.
    is_full: AtomicBool,
    is_closed: AtomicBool,
    /// Who reads takes responses as what is new in them.
    pub takes_updates: AtomicBool,
}

#[derive(Debug, Default)]
struct Place {
    item: Option<Sent>,
    /// Parts of the work that have something for a place that is taken.
    waiting: Vec<Waker>,
}

impl Slot {
    fn place(&self) -> MutexGuard<'_, Place> {
        self.place.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts a response there; gives it back when the one before was not read yet. One that nobody will read is dropped.
    #[must_use]
    pub fn try_put(&self, item: Sent) -> Option<Sent> {
        let mut place = self.place();
        if self.is_closed() {
            return None;
        }
        if place.item.is_some() {
            return Some(item);
        }
        place.item = Some(item);
        self.is_full.store(true, Release);
        None
    }

    /// As [`Slot::try_put`], and has the work that polls this go on when the place is free.
    pub fn poll_put(&self, item: &mut Option<Sent>, context: &mut Context<'_>) -> Poll<()> {
        let mut place = self.place();
        if place.item.is_some() && !self.is_closed() {
            place.waiting.push(context.waker().clone());
            return Poll::Pending;
        }
        if !self.is_closed() {
            place.item = item.take();
            self.is_full.store(true, Release);
        }
        Poll::Ready(())
    }

    /// The response that is there.
    #[inline]
    pub fn take(&self) -> Option<Sent> {
        if !self.is_full.load(Acquire) {
            return None;
        }
        let mut place = self.place();
        self.is_full.store(false, Release);
        std::mem::take(&mut place.waiting).into_iter().for_each(Waker::wake);
        place.item.take()
    }

    /// Nobody reads any more.
    pub fn close(&self) {
        self.is_closed.store(true, SeqCst);
        self.take();
    }

    pub fn is_closed(&self) -> bool {
        self.is_closed.load(SeqCst)
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;
    use futures::task::noop_waker_ref;

    use super::*;
    use crate::InferResponse;
    use crate::update::Letter;

    fn response(id: &str) -> Sent {
        Ok(InferResponse { id: id.into(), ..InferResponse::default() }.into())
    }

    fn taken(slot: &Slot) -> String {
        match slot.take() {
            Some(Ok(Letter::Response(response))) => response.id.to_string(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_finds_the_place_taken_waits_until_it_was_read() {
        let slot = Slot::default();
        assert!(slot.try_put(response("a")).is_none());
        assert!(slot.try_put(response("b")).is_some());
        let mut second = Some(response("b"));
        let mut put = std::future::poll_fn(|context| slot.poll_put(&mut second, context));
        let mut context = Context::from_waker(noop_waker_ref());
        assert!(put.poll_unpin(&mut context).is_pending());
        assert_eq!(taken(&slot), "a");
        assert!(put.poll_unpin(&mut context).is_ready());
        assert_eq!(taken(&slot), "b");
    }

    #[test]
    fn a_closed_slot_takes_everything_and_keeps_nothing() {
        let slot = Slot::default();
        assert!(slot.try_put(response("a")).is_none());
        slot.close();
        assert!(slot.try_put(response("b")).is_none() && slot.is_closed());
        assert!(slot.take().is_none());
    }
}
