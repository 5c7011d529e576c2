//! Random turns of every family are parsed to what was written, however their text is split.

mod support;

use support::turns::check;
use support::with_calls;

fn run(cases: u64, seed: u64) {
    let names: Vec<_> = with_calls().collect();
    let failed: Vec<_> = names
        .iter()
        .filter(|name| {
            let all = || (0..cases / names.len() as u64).for_each(|case| check(name, seed.wrapping_add(case)));
            std::panic::catch_unwind(all).is_err()
        })
        .collect();
    assert!(failed.is_empty(), "{failed:?}");
}

#[test]
fn ten_thousand_random_turns_are_parsed_to_what_was_written() {
    run(10_000, 0);
}
