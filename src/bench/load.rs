//! Sends prompts at a given rate or concurrency, and collects the outcomes.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use indicatif::ProgressBar;
use tokio::time::Instant;

use crate::dataset::Prompt;
use crate::outcome::{Outcome, Sampling};
use crate::random::Arrivals;
use crate::target::Target;

/// How many requests are sent, and when.
pub(crate) struct Pace {
    /// Maximum number of requests in flight.
    pub limit: usize,
    pub arrivals: Arrivals,
}

/// Sends all prompts. Returns the outcomes in the order of completion, and the total time.
pub(crate) async fn run(
    target: &Target,
    prompts: &[Prompt],
    sampling: &Sampling,
    mut pace: Pace,
    bar: &ProgressBar,
) -> (Vec<Outcome>, Duration) {
    let sampling = Arc::new(sampling.clone());
    let mut prompts: VecDeque<Prompt> = prompts.iter().cloned().collect();
    let (mut running, mut outcomes) = (FuturesUnordered::new(), Vec::with_capacity(prompts.len()));
    let started = Instant::now();
    let mut next_at = started + pace.arrivals.gap();
    loop {
        let may_start = !prompts.is_empty() && running.len() < pace.limit;
        if !may_start && running.is_empty() {
            break;
        }
        tokio::select! {
            biased;
            () = tokio::time::sleep_until(next_at), if may_start => {
                let Some(prompt) = prompts.pop_front() else { continue };
                let (target, sampling) = (target.clone(), Arc::clone(&sampling));
                running.push(tokio::spawn(async move {
                    let mut outcome = Outcome::begin(&prompt, started.elapsed());
                    target.send(&prompt, &sampling, &mut outcome).await;
                    outcome
                }));
                next_at += pace.arrivals.gap();
            }
            Some(done) = running.next() => {
                outcomes.push(done.expect("a request does not panic"));
                bar.inc(1);
                let pieces: usize = outcomes.iter().map(|outcome| outcome.num_pieces).sum();
                bar.set_message(format!("{:.0} pieces/s,", pieces as f64 / started.elapsed().as_secs_f64()));
            }
        }
    }
    let elapsed = started.elapsed();
    bar.finish_and_clear();
    (outcomes, elapsed)
}
