//! Whether there are requests, for a launcher that ends a world without any, and starts it for the next one.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use crate::relay::upstream::RankZero;

/// The open requests, probes left out.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Open {
    count: usize,
    /// When the last one began or ended.
    since: Instant,
}

/// Counts the open requests if someone asks for them.
#[derive(Debug, Clone, Default)]
pub(crate) struct Demand(Option<Arc<watch::Sender<Open>>>);

/// An open request, until it is dropped.
#[derive(Debug)]
pub(crate) struct OpenRequest(Option<Arc<watch::Sender<Open>>>);

impl Demand {
    /// Counts from now on. The receiver gets the count.
    pub(crate) fn counted() -> (Self, watch::Receiver<Open>) {
        let (sender, receiver) = watch::channel(Open { count: 0, since: Instant::now() });
        (Self(Some(Arc::new(sender))), receiver)
    }

    /// A request has come.
    pub(crate) fn begin(&self) -> OpenRequest {
        change(self.0.as_ref(), 1);
        OpenRequest(self.0.clone())
    }
}

impl Drop for OpenRequest {
    fn drop(&mut self) {
        change(self.0.as_ref(), -1);
    }
}

fn change(open: Option<&Arc<watch::Sender<Open>>>, by: isize) {
    if let Some(open) = open {
        open.send_modify(|open| {
            *open = Open { count: open.count.saturating_add_signed(by), since: Instant::now() };
        });
    }
}

/// What a launcher must know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    /// A world serves, and no request has come for the time.
    Idle,
    /// The world sleeps, and a request waits.
    Wanted,
}

/// Reports changes until no more requests can come or no world follows. [`Change::Idle`] is repeated while it lasts.
pub(crate) async fn watch(
    mut open: watch::Receiver<Open>,
    mut rank_zero: watch::Receiver<RankZero>,
    idle: Duration,
    report: impl Fn(Change),
) {
    let (mut idle_since, mut is_reported) = (Instant::now(), false);
    loop {
        let now = *open.borrow_and_update();
        let (is_asleep, serves) = {
            let state = rank_zero.borrow_and_update();
            (state.is_asleep, state.sockets.is_some())
        };
        idle_since = idle_since.max(now.since);
        if is_asleep && now.count > 0 && !is_reported {
            report(Change::Wanted);
            is_reported = true;
        }
        is_reported &= is_asleep;
        tokio::select! {
            changed = open.changed() => if changed.is_err() { return },
            changed = rank_zero.changed() => match changed {
                Ok(()) => idle_since = Instant::now(),
                Err(_) => return,
            },
            () = sleep_until(idle_since + idle), if serves && now.count == 0 => {
                report(Change::Idle);
                idle_since = Instant::now();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use tokio::sync::mpsc;

    use super::*;

    #[tokio::test]
    async fn an_idle_world_and_a_request_for_one_that_sleeps_are_reported() {
        const IDLE: Duration = Duration::from_millis(50);
        let (demand, open) = Demand::counted();
        let (state, rank_zero) = watch::channel(RankZero::default());
        let (sender, mut reported) = mpsc::unbounded_channel();
        tokio::spawn(watch(open, rank_zero, IDLE, move |change| sender.send(change).unwrap()));
        let nothing_is_reported = async |reported: &mut mpsc::UnboundedReceiver<Change>| {
            tokio::time::sleep(3 * IDLE).await;
            assert_eq!(reported.try_recv(), Err(mpsc::error::TryRecvError::Empty));
        };
        nothing_is_reported(&mut reported).await; // No world serves yet.
        let request = demand.begin();
        state.send_modify(|state| state.sockets = Some(Arc::from(Path::new("/world"))));
        nothing_is_reported(&mut reported).await; // A request runs.
        drop(request);
        assert_eq!(reported.recv().await, Some(Change::Idle));
        // The launcher may not have been able to end the world.
        assert_eq!(reported.recv().await, Some(Change::Idle));

        state.send_modify(|state| (state.sockets, state.is_asleep) = (None, true));
        while reported.try_recv().is_ok() {}
        nothing_is_reported(&mut reported).await;
        let requests = [demand.begin(), demand.begin()];
        assert_eq!(reported.recv().await, Some(Change::Wanted));
        nothing_is_reported(&mut reported).await;
        state.send_modify(|state| (state.sockets, state.is_asleep) = (Some(Arc::from(Path::new("/next"))), false));
        nothing_is_reported(&mut reported).await;
        drop(requests);
        assert_eq!(reported.recv().await, Some(Change::Idle));
    }
}
