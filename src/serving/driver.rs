//! Work that makes a stream's responses and goes on whenever the stream is read.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Poll};

use futures::future::{BoxFuture, FutureExt as _};
use tokio::runtime::Handle;

use crate::bell::Bell;
use crate::slot::Slot;
use crate::update::Sent;
use crate::{Changes, InferError, Update};

/// Makes responses when it is asked for them: what is left of the work behind a stream once all that it waits for is one
/// thing. Less than a future and a place for what it sends, which a token would have to pass.
pub trait Respond: Send {
    /// The next response, or, where the reader takes updates, what is new in it, put into `told`; `None` behind the last.
    fn poll_respond(
        &mut self,
        takes_updates: bool,
        told: &mut Changes,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Update, InferError>>>;

    /// Has the processor fetch what the next response needs of the memory behind this, by [`crate::near`]: what this points
    /// to at a depth of 0, what that points to at 1, and so on. What lies before that depth has been fetched.
    fn fetch(&self, _depth: usize) {}
}

/// Work that may leave the rest to what it ends with.
pub(crate) type Work = BoxFuture<'static, Option<Box<dyn Respond>>>;

/// The work that makes a stream's responses.
pub(crate) struct Driver {
    slot: Arc<Slot>,
    /// Rings when the work can go on.
    bell: Bell,
    work: Option<Work>,
    /// What the work ended with.
    respond: Option<Box<dyn Respond>>,
    /// Where it goes on when the stream is dropped; `None` when it ends with it.
    afterwards: Option<Handle>,
}

impl Drop for Driver {
    fn drop(&mut self) {
        // The sender is told that the client has left before its work goes on elsewhere.
        self.slot.close();
        if let (Some(work), Some(runtime)) = (self.work.take(), self.afterwards.take()) {
            runtime.spawn(work.map(drop));
        }
    }
}

/// What polling work has come to.
pub(crate) enum Driven {
    Sent(Poll<Option<Sent>>),
    /// It has ended, and all that it sent was taken.
    HandedOver(Box<dyn Respond>),
}

impl Driver {
    /// Drives `work`, which sends through `slot`.
    pub fn new(slot: Arc<Slot>, work: Work, afterwards: Option<Handle>) -> Self {
        Self { slot, bell: Bell::default(), work: Some(work), respond: None, afterwards }
    }

    /// Whether who reads takes updates.
    pub fn takes_updates(&self) -> bool {
        self.slot.takes_updates.load(Relaxed)
    }

    /// Says whether who reads takes updates.
    pub fn take_updates(&self, takes_updates: bool) {
        self.slot.takes_updates.store(takes_updates, Relaxed);
    }

    pub fn poll(&mut self, context: &mut Context<'_>) -> Driven {
        if let Some(item) = self.slot.take() {
            return Driven::Sent(Poll::Ready(Some(item)));
        }
        if let Some(work) = &mut self.work
            && let Poll::Ready(respond) = self.bell.poll(context, |context| work.as_mut().poll(context))
        {
            self.work = None;
            self.respond = respond;
        }
        if let Some(item) = self.slot.take() {
            return Driven::Sent(Poll::Ready(Some(item)));
        }
        match self.respond.take() {
            Some(respond) => Driven::HandedOver(respond),
            None if self.work.is_some() => Driven::Sent(Poll::Pending),
            None => Driven::Sent(Poll::Ready(None)),
        }
    }
}
