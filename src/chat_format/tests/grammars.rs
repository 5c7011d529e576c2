//! Every grammar compiles in llguidance, accepts what the families write, and lets only calls through that the parser
//! reads and that hold to their schema.

mod support;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use chat_format::{ChatFormat, Choice, TurnStart};
use support::random_tools::random_tools;
use support::walks::{Case, END, vocabularies};
use support::{Forms, Rng, tools, with_calls, write};

/// Walks through one grammar, whose compilation takes longer than a walk.
const WALKS_PER_GRAMMAR: usize = 40;

/// Checks all families, as many at once as this machine has cores, and names those that failed.
fn each_family(check: impl Fn(&'static str) + Sync) {
    let families: Vec<&'static str> = with_calls().collect();
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let work = || {
        while let Some(family) = families.get(next.fetch_add(1, Relaxed)) {
            if catch_unwind(AssertUnwindSafe(|| check(family))).is_err() {
                failed.lock().unwrap().push(*family);
            }
        }
    };
    std::thread::scope(|scope| {
        let threads = std::thread::available_parallelism().map_or(1, |count| count.get());
        (0..threads).for_each(|_| drop(scope.spawn(work)));
    });
    let failed = failed.into_inner().unwrap();
    assert!(failed.is_empty(), "{failed:?}");
}

#[test]
fn walks_through_the_grammar_are_calls_that_hold_to_their_schema() {
    each_family(|family| {
        let format = ChatFormat::named(family).unwrap();
        for (vocabulary, seed) in vocabularies(&format).iter().zip(0..) {
            let mut rng = Rng(seed);
            for (choice, parallel) in [
                (Choice::Required, true),
                (Choice::Required, false),
                (Choice::Named("get_weather".into()), true),
                (Choice::Auto, true),
                (Choice::Auto, false),
            ] {
                let case = Case { family, tools: tools(true), choice, parallel };
                let finished = case.check(vocabulary, &mut rng, 10);
                assert!(finished > 0, "{family} {:?}: no walk ended", case.choice);
            }
        }
    });
}

#[test]
fn ten_thousand_walks_over_random_schemas_are_calls_that_hold_to_them() {
    let families = with_calls().count();
    let wanted = 10_000 / (2 * families) + 1;
    each_family(|family| {
        let format = ChatFormat::named(family).unwrap();
        for (vocabulary, seed) in vocabularies(&format).iter().zip(0..) {
            let (mut rng, mut finished, mut attempts) = (Rng(seed), 0, 0);
            while finished < wanted {
                let case = Case::random(family, random_tools(&mut rng), &mut rng);
                finished += case.check(vocabulary, &mut rng, WALKS_PER_GRAMMAR);
                attempts += WALKS_PER_GRAMMAR;
                assert!(attempts < 10 * wanted, "{family}: {finished} of {attempts} walks ended");
            }
        }
    });
}

#[test]
fn turns_as_the_families_write_them_are_accepted() {
    each_family(|family| {
        let format = ChatFormat::named(family).unwrap();
        for vocabulary in vocabularies(&format) {
            let special = |name: &str| vocabulary.id(name).is_some();
            let tools = tools(true);
            let grammar = format.tool_grammar(&tools, Choice::Auto, true, TurnStart::Fresh, &special).unwrap().unwrap();
            let matcher = vocabulary.matcher(&grammar);
            let mut accepted = 0;
            for seed in 0..60 {
                let mut rng = Rng(seed);
                let turn = write::turn(family, &mut rng);
                let (mut text, _) = write::write(family, &turn, &mut rng, Forms::Canonical);
                if let Some(marker) = &grammar.starts_after {
                    let Some((_, rest)) = text.split_once(marker.as_str()) else { continue };
                    text = rest.to_owned();
                }
                // llguidance writes characters as they are and not as `\\u` escapes, and U+007F not at all.
                if text.contains("\\u") || text.contains('\u{7f}') {
                    continue;
                }
                // A special token is never a part of a text.
                let texts = [&turn.reasoning, &turn.content];
                if texts.iter().any(|text| vocabulary.tokens(text).iter().any(|&token| token > END)) {
                    continue;
                }
                accepted += 1;
                let tokens = vocabulary.tokens(&text);
                let mut matcher = matcher.deep_clone();
                let taken = matcher.try_consume_tokens(&tokens).unwrap();
                assert_eq!(
                    taken,
                    tokens.len(),
                    "{family}: {} | {}",
                    vocabulary.text(&tokens[..taken]),
                    vocabulary.text(&tokens[taken..])
                );
                assert!(matcher.is_accepting().unwrap(), "{family}: {text}");
            }
            assert!(accepted > 5, "{family}: {accepted}");
        }
    });
}

#[test]
fn grammars_pass_the_checks_of_the_crate_that_applies_them() {
    use constraint::{Compiler, ConstraintSpec, Limits, Token, Vocabulary as Tokens};
    each_family(|family| {
        let format = ChatFormat::named(family).unwrap();
        for vocabulary in vocabularies(&format) {
            let bytes = (0..=255u8).map(|byte| Token::Text(vec![byte]));
            let special = std::iter::once("<|eos|>").chain(vocabulary.special.iter().map(String::as_str));
            let tokens = bytes.chain(special.map(|name| Token::Special(name.into()))).collect();
            let compiler = Compiler::new(Tokens::new(tokens, &[END]).unwrap(), Limits::default()).unwrap();
            for (choice, strict) in [(Choice::Required, true), (Choice::Auto, true), (Choice::Required, false)] {
                let case = Case { family, tools: tools(strict), choice, parallel: true };
                let grammar = case.grammar(&format, &vocabulary).unwrap();
                let lark = grammar.with_ids(&|name| vocabulary.id(name)).unwrap().lark;
                compiler.compile(&ConstraintSpec::Lark(lark)).unwrap_or_else(|error| panic!("{family}: {error}"));
            }
        }
    });
}
