//! Responses in the order of their requests, however their executions end.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::watch;

/// Gives each request its turn.
#[derive(Debug)]
pub(crate) struct Order {
    places: Arc<Mutex<Places>>,
    answered: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct Places {
    given: u64,
    /// All places below it are answered.
    next: u64,
    /// Answered before their turn.
    early: BTreeSet<u64>,
}

/// A request's place in the order. Dropping it says that the request is answered.
#[derive(Debug)]
pub(crate) struct Turn {
    place: u64,
    places: Arc<Mutex<Places>>,
    answered: watch::Sender<u64>,
}

impl Default for Order {
    fn default() -> Self {
        Self { places: Arc::default(), answered: watch::Sender::new(0) }
    }
}

impl Order {
    /// The next place.
    pub fn turn(&self) -> Turn {
        let mut places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        places.given += 1;
        Turn { place: places.given - 1, places: self.places.clone(), answered: self.answered.clone() }
    }
}

impl Turn {
    /// Resolves when every request before this one is answered.
    pub fn comes(&self) -> impl Future<Output = ()> + Send + use<> {
        let (place, mut answered) = (self.place, self.answered.subscribe());
        async move {
            // Without a sender left there is nobody to wait for.
            let _ = answered.wait_for(|&answered| answered >= place).await;
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut guard = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        let places = &mut *guard;
        places.early.insert(self.place);
        while places.early.remove(&places.next) {
            places.next += 1;
        }
        self.answered.send_replace(places.next);
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[test]
    fn a_turn_comes_when_all_before_it_are_answered() {
        let order = Order::default();
        let (first, second, third) = (order.turn(), order.turn(), order.turn());
        let mut second_comes = second.comes().boxed();
        let mut third_comes = third.comes().boxed();
        assert!(first.comes().now_or_never().is_some());
        drop(second);
        assert!((&mut third_comes).now_or_never().is_none(), "the first is not answered");
        drop(first);
        assert!((&mut second_comes).now_or_never().is_some());
        assert!((&mut third_comes).now_or_never().is_some());
    }
}
