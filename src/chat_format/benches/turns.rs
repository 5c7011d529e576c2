//! Both properties of tool calls over many random cases: a turn is parsed to what was written however its text is split, and the
//! calls of every text that a grammar allows are valid. Prints the number and the time of each; a failure is printed with its case.
//!
//! `cargo bench -p trireme -p chat_format --bench turns -- [CASES] [SEED] [THREADS]`, by default a million cases of each on all cores.

#[path = "../tests/support/mod.rs"]
mod support;

use std::any::Any;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use chat_format::ChatFormat;
use support::Rng;
use support::random_tools::random_tools;
use support::walks::{Case, vocabularies};
use support::with_calls;

/// Walks through one grammar.
const WALKS_PER_GRAMMAR: usize = 100;
/// Cases that a thread takes at once. The cases depend on the seed, not on the number of threads.
const CASES_PER_SLICE: u64 = 2000;

/// Some cases of one family.
struct Slice {
    family: &'static str,
    seed: u64,
    cases: u64,
}

/// What the slices of one family, or of all, gave.
#[derive(Default)]
struct Total {
    cases: u64,
    failed_slices: usize,
    elapsed: Duration,
}

fn main() -> ExitCode {
    let mut numbers = std::env::args().skip(1).filter_map(|argument| argument.parse::<u64>().ok());
    let (cases, seed) = (numbers.next().unwrap_or(1_000_000), numbers.next().unwrap_or(1 << 32));
    let threads = numbers.next().map_or_else(|| thread::available_parallelism().map_or(1, usize::from), |n| n as usize);
    let slices = slices(cases, seed);
    let failed = report("turns parsed", &slices, threads, |slice| {
        (0..slice.cases).for_each(|case| support::turns::check(slice.family, slice.seed.wrapping_add(case)));
        slice.cases
    }) + report("constrained walks finished", &slices, threads, walks);
    ExitCode::from(u8::from(failed > 0))
}

/// At least `cases` cases, the same number for each family, with seeds that follow each other.
fn slices(cases: u64, seed: u64) -> Vec<Slice> {
    let families: Vec<&'static str> = with_calls().collect();
    let per_family = cases.div_ceil(families.len() as u64);
    let starts = (0..per_family).step_by(CASES_PER_SLICE as usize);
    let slice = |family, start| {
        let cases = CASES_PER_SLICE.min(per_family - start);
        Slice { family, seed: seed.wrapping_add(start), cases }
    };
    starts.flat_map(|start| families.iter().map(move |&family| slice(family, start))).collect()
}

/// Finishes at least the slice's number of walks through grammars of random tools. Returns the number of walks.
fn walks(slice: &Slice) -> u64 {
    let format = ChatFormat::named(slice.family).expect("it is one of the names");
    let vocabularies = vocabularies(&format);
    let (mut rng, mut finished) = (Rng(slice.seed), 0);
    while finished < slice.cases {
        let vocabulary = &vocabularies[rng.below(vocabularies.len())];
        let case = Case::random(slice.family, random_tools(&mut rng), &mut rng);
        finished += case.check(vocabulary, &mut rng, WALKS_PER_GRAMMAR) as u64;
    }
    finished
}

/// Runs the slices on threads and prints a line for each family. Returns the number of slices that failed.
fn report(what: &str, slices: &[Slice], threads: usize, run: impl Fn(&Slice) -> u64 + Sync) -> usize {
    let (started, next) = (Instant::now(), AtomicUsize::new(0));
    let totals = Mutex::new(BTreeMap::<&str, Total>::new());
    let work = || {
        while let Some(slice) = slices.get(next.fetch_add(1, Ordering::Relaxed)) {
            let begun = Instant::now();
            let outcome = catch_unwind(AssertUnwindSafe(|| run(slice)));
            totals
                .lock()
                .expect("no thread panics with it")
                .entry(slice.family)
                .or_default()
                .add(outcome, begun.elapsed());
        }
    };
    thread::scope(|scope| (0..threads.max(1)).for_each(|_| drop(scope.spawn(work))));
    let totals = totals.into_inner().expect("no thread panics with it");
    for (family, total) in &totals {
        total.print(what, family, "of all threads");
    }
    let all = Total {
        cases: totals.values().map(|total| total.cases).sum(),
        failed_slices: totals.values().map(|total| total.failed_slices).sum(),
        elapsed: started.elapsed(),
    };
    all.print(what, "all", &format!("on {threads} threads"));
    all.failed_slices
}

impl Total {
    fn add(&mut self, outcome: Result<u64, Box<dyn Any + Send>>, elapsed: Duration) {
        match outcome {
            Ok(cases) => self.cases += cases,
            Err(_) => self.failed_slices += 1,
        }
        self.elapsed += elapsed;
    }

    fn print(&self, what: &str, family: &str, note: &str) {
        let Self { cases, failed_slices, elapsed } = self;
        println!(
            "{what:28} {family:16} {cases:>9} in {:>7.1} s {note}, {failed_slices} slices failed",
            elapsed.as_secs_f64()
        );
    }
}
