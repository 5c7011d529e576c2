//! Random schedules of requests, messages, faults, sleeps and restarts in virtual time: the engine of rank 0, the encoded messages
//! of the protocol and the rows of workers. A schedule is determined by its seed. Rank 0's and the worker's loops are those of
//! `backends::llm` and `worker`, without their threads.
//!
//! Whatever happens, each stream has the tokens of its request alone, each sequence ends once, and no resource is held at the end.

mod device;
mod rank0;
mod request;
#[path = "../../../engine/tests/support/tokens.rs"]
#[allow(dead_code)] // Beams are not simulated here.
mod tokens;
mod wire;
mod worker_process;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

/// Number of schedules; fewer without optimization.
const NUM_SCHEDULES: u64 = if cfg!(debug_assertions) { 1_000 } else { 100_000 };

/// The variable that plays a single schedule again.
const SEED: &str = "SCHEDULE_SEED";

fn play(seed: u64) -> rank0::Totals {
    let played = catch_unwind(AssertUnwindSafe(|| rank0::World::new(seed).run()));
    played.unwrap_or_else(|panic| {
        let message = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
        let message = message.unwrap_or("no message");
        panic!(
            "schedule {seed} failed: {message}; `{SEED}={seed} cargo test -p worker --test schedules` plays it again"
        )
    })
}

#[test]
fn tokens_survive_every_schedule_and_nothing_leaks() {
    if let Ok(seed) = std::env::var(SEED) {
        play(seed.parse().expect("the seed is a number"));
        return;
    }
    let next = AtomicU64::new(0);
    let play_some = || {
        let mut totals = rank0::Totals::default();
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= NUM_SCHEDULES {
                return totals;
            }
            totals.add(&play(seed));
        }
    };
    let totals = thread::scope(|scope| {
        let num_threads = thread::available_parallelism().map_or(1, usize::from);
        let threads: Vec<_> = (0..num_threads).map(|_| scope.spawn(play_some)).collect();
        let mut totals = rank0::Totals::default();
        for thread in threads {
            totals.add(&thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
        totals
    });
    println!("{NUM_SCHEDULES} schedules: {totals:?}");
    // What is to be tested has happened.
    let rates = [totals.finished, totals.faults, totals.restarts, totals.preempted, totals.sleeps, totals.lost_asleep];
    for (total, least) in rates.into_iter().zip([2 * NUM_SCHEDULES, NUM_SCHEDULES, NUM_SCHEDULES / 2, 10, 100, 5]) {
        assert!(total >= least, "{totals:?}");
    }
}
