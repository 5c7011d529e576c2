//! Bounds what requests hold together: the bytes of their bodies, from when they arrive until they are answered.
//!
//! One request has a bound of its own; many large ones at once would still fill the memory.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};
use serving::InferError;
use tonic::Status;

use crate::http2::RequestBody;
use crate::status::grpc_status;

/// What all requests may hold at once.
#[derive(Debug)]
pub struct Budget {
    limit: usize,
    used: AtomicUsize,
}

impl Budget {
    /// A budget of `limit` bytes.
    pub fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self { limit, used: AtomicUsize::new(0) })
    }

    /// What one request holds: nothing yet.
    pub fn charge(self: &Arc<Self>) -> Charge {
        Charge { budget: self.clone(), held: AtomicUsize::new(0) }
    }

    #[cfg(test)]
    fn used(&self) -> usize {
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
        let Budget { limit, used } = &*self.budget;
        let before = used.fetch_add(count, Relaxed);
        if before.saturating_add(count) > *limit {
            used.fetch_sub(count, Relaxed);
            return Err(InferError::unavailable(format!(
                "requests in flight hold {before} bytes, and all together may hold {limit}; try again later"
            )));
        }
        self.held.fetch_add(count, Relaxed);
        Ok(())
    }

    /// What is held so far, as a charge of its own; nothing is left here.
    pub fn split(&self) -> Charge {
        Charge { budget: self.budget.clone(), held: AtomicUsize::new(self.held.swap(0, Relaxed)) }
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(*self.held.get_mut(), Relaxed);
    }
}

/// The body of a gRPC call, which charges for what it brings.
pub struct Counted {
    body: RequestBody,
    charge: Arc<Charge>,
}

impl Counted {
    /// `body`, paid from `charge`.
    pub fn new(body: RequestBody, charge: Arc<Charge>) -> Self {
        Self { body, charge }
    }
}

impl Body for Counted {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let frame = std::task::ready!(Pin::new(&mut self.body).poll_frame(context));
        Poll::Ready(frame.map(|frame| {
            let frame = frame.map_err(|error| Status::from_error(Box::new(error)))?;
            self.charge.add(frame.data_ref().map_or(0, Bytes::len)).map_err(grpc_status)?;
            Ok(frame)
        }))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_given_back_can_be_held_again() {
        let budget = Budget::new(100);
        let (one, two) = (budget.charge(), budget.charge());
        one.add(60).unwrap();
        let error = two.add(50).unwrap_err();
        assert_eq!(error.message, "requests in flight hold 60 bytes, and all together may hold 100; try again later");
        two.add(40).unwrap();
        let part = one.split();
        drop(one);
        assert_eq!(budget.used(), 100, "the part holds what was held");
        drop(part);
        assert_eq!(budget.used(), 40);
        two.add(60).unwrap();
        assert!(two.add(usize::MAX).is_err());
        drop(two);
        assert_eq!(budget.used(), 0);
    }
}
