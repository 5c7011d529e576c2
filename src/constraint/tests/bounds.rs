//! Descriptions that would grow without bound are refused, or served, in bounded time and memory.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use constraint::{Compiler, ConstraintError, ConstraintSpec, Limits, Mask, Token, Vocabulary};
use serde_json::{Map, Value, json};

/// A mask takes milliseconds in a build without optimisation. The rest is for a machine that does other things, too.
const MAX_MASK: Duration = Duration::from_secs(5);
/// Resident memory over that of the start. The caches of all descriptions together stay far below it.
const MAX_GROWTH_MIB: usize = 1024;
const STEPS: usize = 200;

/// What becomes of a description.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fate {
    /// It is compiled, and each mask takes its time at most.
    Served,
    Refused,
    /// Its size depends on the build: either is bounded.
    Either,
}

fn compiler(limits: Limits) -> Compiler {
    let tokens = (0..=255).map(|byte| Token::Text(vec![byte])).chain([Token::Special("</s>".into())]).collect();
    Compiler::new(Vocabulary::new(tokens, &[256]).unwrap(), limits).unwrap()
}

fn resident_mib() -> usize {
    let pages = fs::read_to_string("/proc/self/statm").unwrap();
    (pages.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096) >> 20
}

fn check(name: &str, fate: Fate, spec: &ConstraintSpec) {
    let (limits, before) = (Limits::default(), resident_mib());
    let started = Instant::now();
    let compiled = compiler(limits.clone()).compile(spec);
    let took = started.elapsed();
    // The preparation of the vocabulary counts, too, and a machine may be busy.
    assert!(took < limits.compile_time + Duration::from_secs(10), "{name}: {took:?}");
    match compiled {
        Err(error) => {
            assert_ne!(fate, Fate::Served, "{name}: {error}");
            let is_its_own = matches!(
                error,
                ConstraintError::Invalid { .. }
                    | ConstraintError::TooLarge { .. }
                    | ConstraintError::TooDeep { .. }
                    | ConstraintError::TooSlow { .. }
            );
            assert!(is_its_own && error.to_string().len() < 4096, "{name}: {error}");
        }
        Ok(mut constraint) => {
            assert_ne!(fate, Fate::Refused, "{name} was compiled");
            let mut mask = Mask::default();
            for step in 0..STEPS {
                if constraint.is_ended() {
                    break;
                }
                let started = Instant::now();
                constraint.mask(&mut mask).unwrap_or_else(|error| panic!("{name}, step {step}: {error}"));
                assert!(started.elapsed() < MAX_MASK, "{name}: {:?} for mask {step}", started.elapsed());
                let allowed: Vec<u32> = mask.allowed().collect();
                constraint.accept(allowed[step * 7919 % allowed.len()]).unwrap();
            }
        }
    }
    let grown = resident_mib().saturating_sub(before);
    assert!(grown < MAX_GROWTH_MIB, "{name}: {grown} MiB");
}

#[test]
fn exploding_regular_expressions_are_bounded() {
    let deep = format!("{}a{}", "(".repeat(50_000), ")".repeat(50_000));
    for (fate, regex) in [
        (Fate::Served, "(a{1,1000}){1,1000}"),
        (Fate::Served, "((a{1,1000}){1,1000}){1,1000}"),
        (Fate::Served, "(.*a){40}"),
        (Fate::Served, "(.*[ab]){200}"),
        (Fate::Served, "(a|b)*a(a|b){30}"),
        (Fate::Served, "(.*a.{20}){5}"),
        (Fate::Served, r"(\p{L}{1,500}){1,500}"),
        (Fate::Served, "a{1000000000}"),
        (Fate::Refused, "(a{5000000000}){3}"),
        (Fate::Refused, &deep),
    ] {
        check(&regex[..regex.len().min(40)], fate, &ConstraintSpec::Regex(regex.into()));
    }
}

#[test]
fn exploding_grammars_are_bounded() {
    // Rule 0 stands for 2^40 times the last one.
    let doubling = |name: &str| -> String {
        let rules = (0..40).map(|n| format!("{name}{n}: {name}{} {name}{}\n", n + 1, n + 1));
        rules.chain([format!("{name}40: \"a\"\nstart: {name}0")]).collect()
    };
    let nested = |open: &str, close: &str| format!("start: {}\"a\"{}", open.repeat(20_000), close.repeat(20_000));
    for (name, fate, grammar) in [
        ("left and right recursion", Fate::Served, "start: start start | \"a\" | start \"b\" start".into()),
        ("ambiguous repetition", Fate::Served, "start: x*\nx: y*\ny: z*\nz: \"a\"*".into()),
        ("nested counts", Fate::Served, "start: (x{1,1000}){1,1000}\nx: (\"a\" | \"b\"){1,1000}".into()),
        ("doubling rules", Fate::Served, doubling("r")),
        ("doubling terminals", Fate::Refused, doubling("R")),
        ("circle of rules", Fate::Refused, "start: a\na: b\nb: a".into()),
        ("circle of terminals", Fate::Refused, "start: A\nA: B\nB: A".into()),
        ("nested groups", Fate::Refused, nested("(", ")")),
        ("nested options", Fate::Refused, nested("[", "]")),
        ("nested JSON", Fate::Refused, format!("start: %json {}", "{\"items\":".repeat(20_000))),
    ] {
        check(name, fate, &ConstraintSpec::Grammar(grammar));
    }
}

fn properties(count: usize) -> Value {
    let named: Map<String, Value> = (0..count).map(|n| (format!("p{n}"), json!({"type": "integer"}))).collect();
    json!({"type": "object", "properties": named})
}

#[test]
fn huge_and_circular_schemas_are_bounded() {
    let values: Vec<String> = (0..10_000).map(|n| format!("v{n}")).collect();
    let both = |n: usize| json!({"allOf": [{"$ref": format!("#/$defs/d{n}")}, {"$ref": format!("#/$defs/d{n}")}]});
    let mut doubling: Map<String, Value> = (0..30).map(|n| (format!("d{n}"), both(n + 1))).collect();
    doubling.insert("d30".into(), json!({"type": "string"}));
    let one_of =
        |k: usize, n: usize| json!({"type": "object", "properties": {format!("v{k}_{n}"): {"type": "integer"}}});
    let alternatives = |k: usize| json!({"anyOf": (0..8).map(|n| one_of(k, n)).collect::<Vec<_>>()});
    let long = json!({"type": "array", "items": {"type": "string", "maxLength": 1_000_000}, "minItems": 100_000, "maxItems": 1_000_000});
    let circle = json!({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}});
    for (name, fate, schema) in [
        ("300 optional properties", Fate::Served, properties(300)),
        ("480 optional properties", Fate::Served, properties(480)),
        ("2 000 optional properties", Fate::Refused, properties(2_000)),
        ("2 000 optional properties beside 2 000 other required names", Fate::Refused, {
            let mut schema = properties(2_000);
            schema["required"] = (0..2_000).map(|n| format!("other{n}")).collect();
            schema
        }),
        ("10 000 optional properties", Fate::Refused, properties(10_000)),
        ("10 000 values", Fate::Served, json!({"enum": values})),
        ("a reference to itself", Fate::Refused, json!({"$ref": "#"})),
        ("a circle of references", Fate::Refused, circle),
        ("a circle through allOf", Fate::Refused, json!({"allOf": [{"$ref": "#"}, {"$ref": "#"}]})),
        ("a recursive list", Fate::Served, json!({"type": "array", "items": {"$ref": "#"}})),
        ("allOf that doubles 30 times", Fate::Either, json!({"$ref": "#/$defs/d0", "$defs": doubling})),
        ("8^12 combinations", Fate::Refused, json!({"allOf": (0..12).map(alternatives).collect::<Vec<_>>()})),
        ("10^12 characters", Fate::Served, json!({"type": "array", "items": long, "minItems": 1_000_000})),
        ("small steps", Fate::Served, json!({"type": "number", "multipleOf": 1e-6, "minimum": -1e15, "maximum": 1e15})),
        ("a pattern", Fate::Either, json!({"type": "string", "pattern": "(.*a){40}", "maxLength": 1000})),
    ] {
        check(name, fate, &ConstraintSpec::JsonSchema(schema));
    }
}

#[test]
fn ten_thousand_choices_are_served_and_each_is_taken_literally() {
    let choices: Vec<String> = (0..10_000).map(|n| format!("value {n}")).collect();
    check("choices", Fate::Served, &ConstraintSpec::Choice(choices));
    // Each is taken literally.
    for text in ["a.b*c", r"\d+", "(x|y)[z]{2}", "^$ #&-~/<>", "ü\n\"%"] {
        let spec = ConstraintSpec::Choice(vec![text.to_owned(), "other".to_owned()]);
        let mut constraint = compiler(Limits::default()).compile(&spec).unwrap();
        let bytes: Vec<u32> = text.bytes().map(u32::from).collect();
        assert_eq!(constraint.validate(&bytes), Ok(bytes.len()), "{text}");
        bytes.iter().for_each(|&byte| constraint.accept(byte).unwrap());
        assert!(constraint.may_end().unwrap(), "{text}");
    }
    let spec = ConstraintSpec::Choice(vec!["a.b".into(), r"\d".into()]);
    let mut constraint = compiler(Limits::default()).compile(&spec).unwrap();
    assert_eq!(constraint.validate(&b"axb".map(u32::from)), Ok(1));
    assert_eq!(constraint.validate(&b"7".map(u32::from)), Ok(0));
}

/// Terminals that take long to compile, different for each number.
fn slow(number: usize) -> ConstraintSpec {
    let rules = (0..40).map(|n| format!("R{n}: R{} R{}\n", n + 1, n + 1));
    ConstraintSpec::Grammar(rules.chain([format!("R40: \"{number}\"\nstart: R0")]).collect())
}

#[test]
fn when_as_many_compile_as_may_the_next_is_told_that_it_is_too_busy() {
    let limits = Limits { max_compiling: 1, compile_time: Duration::from_millis(50), ..Limits::default() };
    let compiler = compiler(limits);
    let compiler = &compiler;
    thread::scope(|scope| {
        let first = scope.spawn(move || compiler.compile(&slow(0)).err().unwrap());
        // The first one runs until it has ended, though its caller has its answer after 50 ms.
        let first = first.join().unwrap();
        assert!(matches!(first, ConstraintError::TooSlow { limit_ms: 50, .. }), "{first}");
        let second = compiler.compile(&ConstraintSpec::Regex("b".into())).err().unwrap();
        assert!(matches!(second, ConstraintError::Busy { running: 1 }), "{second}");
        // A place is free again when it has ended.
        let deadline = Instant::now() + Duration::from_secs(60);
        while let Err(error) = compiler.compile(&ConstraintSpec::Regex("b".into())) {
            assert!(Instant::now() < deadline, "{error}");
        }
    });
}

#[test]
fn a_grammar_whose_next_token_takes_too_long_ends_with_an_error() {
    let limits = Limits { mask_time: Duration::from_millis(20), ..Limits::default() };
    let grammar = "start: e\ne: e e e | e e | /[a-z]/ | \" \"".to_owned();
    let mut constraint = compiler(limits).compile(&ConstraintSpec::Grammar(grammar)).unwrap();
    let mut mask = Mask::default();
    let started = Instant::now();
    let next = |_| {
        assert!(!constraint.is_ended(), "a text that is cut is not complete");
        constraint.mask(&mut mask).and_then(|()| constraint.accept(97)).err()
    };
    let error = (0..10_000).find_map(next);
    let words = error.expect("a text of 10 000 characters takes too long").to_string();
    assert!(words.contains("takes too long to compute"), "{words}");
    assert!(started.elapsed() < Duration::from_secs(60), "{:?}", started.elapsed());
}
