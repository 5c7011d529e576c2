//! Random schedules of requests, messages, faults, hangs, sleeps and restarts in virtual time: the engine of rank 0, the encoded messages
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
use std::time::Instant;

/// The variable with the number of schedules, and the number without it.
const COUNT: (&str, u64) = ("SCHEDULES", 1_000);

/// The variable that plays a single schedule again.
const SEED: &str = "SCHEDULE_SEED";

/// Plays a schedule.
///
/// # Errors
/// Says what is wrong, and how to play the schedule again.
fn play(seed: u64) -> Result<rank0::Totals, String> {
    let played = catch_unwind(AssertUnwindSafe(|| rank0::World::new(seed).run()));
    played.map_err(|panic| {
        let message = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
        let message = message.unwrap_or("no message");
        format!(
            "schedule {seed} failed: {message}; `{SEED}={seed} cargo test -p worker --test schedules` plays it again"
        )
    })
}

#[test]
fn tokens_survive_every_schedule_and_nothing_leaks() {
    if let Ok(seed) = std::env::var(SEED) {
        play(seed.parse().expect("the seed is a number")).unwrap_or_else(|wrong| panic!("{wrong}"));
        return;
    }
    let (name, usual) = COUNT;
    let num_schedules = std::env::var(name).map_or(usual, |count| count.parse().expect("SCHEDULES is a number"));
    let next = AtomicU64::new(0);
    let play_some = || {
        let mut totals = rank0::Totals::default();
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= num_schedules {
                return Ok(totals);
            }
            // The other threads need not play to the end.
            totals.add(&play(seed).inspect_err(|_| next.store(num_schedules, Ordering::Relaxed))?);
        }
    };
    let begun = Instant::now();
    let totals = thread::scope(|scope| {
        let num_threads = thread::available_parallelism().map_or(1, usize::from);
        let threads: Vec<_> = (0..num_threads).map(|_| scope.spawn(play_some)).collect();
        let mut totals = rank0::Totals::default();
        for thread in threads {
            let played: Result<_, String> = thread.join().expect("panics of schedules are caught");
            totals.add(&played.unwrap_or_else(|wrong| panic!("{wrong}")));
        }
        totals
    });
    println!("{num_schedules} schedules in {:.1?}: {totals:?}", begun.elapsed());
    // What is to be tested has happened.
    let rates = [
        (totals.finished, 2 * num_schedules),
        (totals.faults, num_schedules),
        (totals.hangs, num_schedules / 4),
        (totals.restarts, num_schedules / 2),
        (totals.preempted, num_schedules / 100),
        (totals.sleeps, num_schedules / 10),
        (totals.lost_asleep, num_schedules / 200),
    ];
    for (total, least) in rates {
        assert!(total >= least, "{totals:?}");
    }
}
