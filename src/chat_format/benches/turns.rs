//! Both properties of tool calls over many random cases: a turn is parsed to what was written however its text is split, and the
//! calls of every text that a grammar allows are valid. Prints the rate of each.
//!
//! `cargo bench -p trireme -p chat_format --bench turns -- [CASES] [SEED]`, by default a million cases of each.

#[path = "../tests/support/mod.rs"]
mod support;

use std::time::Instant;

use chat_format::ChatFormat;
use support::Rng;
use support::random_tools::random_tools;
use support::walks::{Case, vocabularies};
use support::with_calls;

/// Walks through one grammar.
const WALKS_PER_GRAMMAR: usize = 100;

fn main() {
    let mut numbers = std::env::args().skip(1).filter_map(|argument| argument.parse::<u64>().ok());
    let (cases, seed) = (numbers.next().unwrap_or(1_000_000), numbers.next().unwrap_or(1 << 32));
    let families: Vec<&'static str> = with_calls().collect();
    let per_family = cases.div_ceil(families.len() as u64);
    report("turns parsed", &families, |family| {
        (0..per_family).for_each(|case| support::turns::check(family, seed.wrapping_add(case)));
        per_family
    });
    report("constrained walks finished", &families, |family| walks(family, per_family, seed));
}

/// Finishes at least `wanted` walks through grammars of random tools. Returns their number.
fn walks(family: &'static str, wanted: u64, seed: u64) -> u64 {
    let format = ChatFormat::named(family).expect("it is one of the names");
    let vocabularies = vocabularies(&format);
    let (mut rng, mut finished) = (Rng(seed), 0);
    while finished < wanted {
        let vocabulary = &vocabularies[rng.below(vocabularies.len())];
        let case = Case::random(family, random_tools(&mut rng), &mut rng);
        finished += case.check(vocabulary, &mut rng, WALKS_PER_GRAMMAR) as u64;
    }
    finished
}

fn report(what: &str, families: &[&'static str], run: impl Fn(&'static str) -> u64) {
    let (started, mut total) = (Instant::now(), 0);
    for family in families {
        let (begun, count) = (Instant::now(), run(family));
        total += count;
        println!("{what:28} {family:16} {count:>9} in {:>7.1} s", begun.elapsed().as_secs_f64());
    }
    println!("{what:28} {:16} {total:>9} in {:>7.1} s", "all", started.elapsed().as_secs_f64());
}
