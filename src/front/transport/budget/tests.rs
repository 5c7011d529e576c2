use std::future::poll_fn;

use super::*;

/// Limits that every body meets.
pub const NO_PROGRESS_LIMITS: ProgressLimits = ProgressLimits { timeout: Duration::from_secs(3600), min_rate: 0 };

#[test]
fn released_bytes_can_be_charged_again() {
    let budget = Budget::new(100, NO_PROGRESS_LIMITS);
    let (one, two) = (budget.charge(), budget.charge());
    one.add(60).unwrap();
    let error = two.add(50).unwrap_err();
    assert_eq!(error.message, "requests in flight hold 60 bytes, and all together may hold 100; try again later");
    two.add(40).unwrap();
    let part = one.split();
    drop(one);
    assert_eq!(budget.used(), 100, "the new charge holds the bytes");
    drop(part);
    assert_eq!(budget.used(), 40);
    two.add(60).unwrap();
    assert!(two.add(usize::MAX).is_err());
    let part = two.split_off(30);
    assert_eq!((part.held(), two.held(), budget.used()), (30, 70, 100));
    drop((part, two));
    assert_eq!(budget.used(), 0);
}

fn watched(budget: &Arc<Budget>, num_bytes: usize) -> WatchedBody {
    let now = Instant::now();
    WatchedBody::new(budget.clone(), ArrivalStart { since: now, last_data: now, num_bytes }, num_bytes)
}

#[tokio::test]
async fn an_incomplete_body_is_watched_after_the_check_interval() {
    let budget = Budget::new(100, ProgressLimits { timeout: Duration::from_millis(300), min_rate: 0 });
    let (charge, mut waiting) = (budget.charge(), ArrivalWatch::default());
    let mut poll = || waiting.poll_late(&charge, &mut Context::from_waker(std::task::Waker::noop())).is_ready();
    assert!(!poll() && !poll() && budget.arrivals().is_empty());
    tokio::time::sleep(budget.progress.check_interval()).await;
    assert!(!poll() && budget.arrivals().len() == 1);
    tokio::time::sleep(budget.progress.timeout).await;
    assert!(poll(), "the time without data counts from the start");
    drop(waiting);
    assert!(budget.arrivals().is_empty());
}

async fn late(watched: &mut WatchedBody) -> String {
    poll_fn(|context| watched.poll_late(context)).await.message
}

const TIMEOUT: Duration = Duration::from_secs(1);

#[tokio::test]
async fn a_body_that_stalls_or_trickles_is_late() {
    let budget = Budget::new(100, ProgressLimits { timeout: TIMEOUT, min_rate: 100_000 });
    let watched = || watched(&budget, 5);
    let (mut silent, mut slow, mut steady) = (watched(), watched(), watched());
    let trickle = async |watched: &mut WatchedBody, count: usize| {
        loop {
            tokio::select! {
                words = late(watched) => break words,
                () = tokio::time::sleep(TIMEOUT / 20) => watched.received(count),
            }
        }
    };
    let long = tokio::time::timeout(3 * TIMEOUT, trickle(&mut steady, 1_000_000));
    let (silent, slow, steady) = tokio::join!(late(&mut silent), trickle(&mut slow, 10), long);
    assert_eq!(silent, "request body stopped for 1s before its end");
    assert!(slow.ends_with(" bytes in 1s, at least 100000 a second are expected (--min-body-rate)"), "{slow}");
    assert!(steady.is_err(), "{steady:?}");
}

#[tokio::test]
async fn the_slowest_body_is_dropped_after_the_timeout() {
    let budget = Budget::new(100, ProgressLimits { timeout: TIMEOUT, min_rate: 0 });
    let (charge, other) = (budget.charge(), budget.charge());
    charge.add(90).unwrap();
    let (mut slow, mut fast) = (watched(&budget, 30), watched(&budget, 60));
    assert!(other.add(20).is_err());
    assert!(!slow.arrival.is_dropped(), "the timeout has not elapsed");
    tokio::time::sleep(TIMEOUT).await;
    slow.received(0);
    fast.received(0);
    assert!(other.add(20).is_err());
    assert!(other.add(20).is_err(), "the dropped body still counts");
    assert!(late(&mut slow).await.contains("others wait for the memory"));
    assert!(!fast.arrival.is_dropped(), "the faster one goes on");
    drop((slow, fast));
    assert!(budget.arrivals().is_empty());
}
