//! Keeps responses in the order of their requests (`preserve_ordering`).

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::watch;

/// Issues one ticket for each request of a model.
#[derive(Debug)]
pub(crate) struct ResponseOrder {
    state: Arc<Mutex<OrderState>>,
    /// Copy of [`OrderState::num_answered`], to wait for.
    num_answered: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct OrderState {
    num_issued: u64,
    /// All tickets with lower numbers are answered.
    num_answered: u64,
    /// Higher tickets that are answered already.
    answered_early: BTreeSet<u64>,
}

/// The position of a request in the order. Dropping it marks the request as answered.
#[derive(Debug)]
pub(crate) struct OrderTicket {
    number: u64,
    state: Arc<Mutex<OrderState>>,
    num_answered: watch::Sender<u64>,
}

impl Default for ResponseOrder {
    fn default() -> Self {
        Self { state: Arc::default(), num_answered: watch::Sender::new(0) }
    }
}

impl ResponseOrder {
    /// Issues the next ticket.
    pub fn ticket(&self) -> OrderTicket {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.num_issued += 1;
        let num_answered = self.num_answered.clone();
        OrderTicket { number: state.num_issued - 1, state: self.state.clone(), num_answered }
    }
}

impl OrderTicket {
    /// Resolves when all earlier requests are answered.
    pub fn earlier_answered(&self) -> impl Future<Output = ()> + Send + use<> {
        let (number, mut num_answered) = (self.number, self.num_answered.subscribe());
        async move {
            // An error means that all senders are dropped, so that no request is left to wait for.
            let _ = num_answered.wait_for(|&num_answered| num_answered >= number).await;
        }
    }
}

impl Drop for OrderTicket {
    fn drop(&mut self) {
        let mut guard = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let state = &mut *guard;
        state.answered_early.insert(self.number);
        while state.answered_early.remove(&state.num_answered) {
            state.num_answered += 1;
        }
        self.num_answered.send_replace(state.num_answered);
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[test]
    fn a_request_waits_until_all_earlier_ones_are_answered() {
        let order = ResponseOrder::default();
        let (first, second, third) = (order.ticket(), order.ticket(), order.ticket());
        let mut before_second = second.earlier_answered().boxed();
        let mut before_third = third.earlier_answered().boxed();
        assert!(first.earlier_answered().now_or_never().is_some());
        drop(second);
        assert!((&mut before_third).now_or_never().is_none(), "the first is not answered");
        drop(first);
        assert!((&mut before_second).now_or_never().is_some());
        assert!((&mut before_third).now_or_never().is_some());
    }
}
