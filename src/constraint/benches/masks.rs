//! The time of one mask, and of compiling, for the vocabulary of the repository's tokenizer and for a synthetic one of 128 000 tokens.
//!
//! Run it with `cargo bench -p constraint`.

use std::collections::HashSet;
use std::hint::black_box;
use std::path::Path;

use constraint::{Compiler, Constraint, ConstraintSpec, Limits, Mask, Token, Vocabulary};
use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use serde_json::json;
use text::Tokenizer;

const SYNTHETIC: usize = 128_000;
const LETTERS: &[u8] = b"etaoinshrdlucmfwypvbgkjqxz0123456789,.:{}[]\"";
/// Tokens of the text whose masks are measured.
const STEPS: usize = 24;

/// The generator of Marsaglia (xorshift), with a fixed seed.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % bound as u64) as usize
    }
}

fn repository() -> Vocabulary {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../model_repository/tensorrt_llm/1");
    let tokenizer = Tokenizer::from_dir(&folder).unwrap();
    let end = tokenizer.special_ids()[0];
    Vocabulary::of(&tokenizer, tokenizer.vocab_size(), &[end]).unwrap()
}

/// All bytes, and words of 2 to 12 letters of which half begin with a blank, as in the vocabularies of large models.
fn synthetic() -> Vocabulary {
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let mut words: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
    let mut known: HashSet<Vec<u8>> = words.iter().cloned().collect();
    while words.len() < SYNTHETIC - 1 {
        let blank = (random.below(2) == 0).then_some(b' ');
        let length = 2 + random.below(11);
        let letters = (0..length).map(|_| LETTERS[random.below(LETTERS.len())]);
        let word: Vec<u8> = blank.into_iter().chain(letters).collect();
        if known.insert(word.clone()) {
            words.push(word);
        }
    }
    let end = words.len() as u32;
    let tokens = words.into_iter().map(Token::Text).chain([Token::Special("</s>".into())]).collect();
    Vocabulary::new(tokens, &[end]).unwrap()
}

fn specs() -> [(&'static str, ConstraintSpec); 3] {
    let schema = json!({
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "kind": {"enum": ["city", "river", "mountain"]},
            "height": {"type": "number", "minimum": 0},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 8},
        },
        "required": ["name", "kind", "height", "tags"],
        "additionalProperties": false,
    });
    let choices = (0..1_000).map(|number| format!("choice number {number}")).collect();
    [
        ("schema", ConstraintSpec::JsonSchema(schema)),
        ("regex", ConstraintSpec::Regex(r"[A-Z][a-z]{2,40}, [0-9]{4}-[0-9]{2}-[0-9]{2}(; [a-z ]{1,200})*".into())),
        ("choice", ConstraintSpec::Choice(choices)),
    ]
}

/// Constraints at the beginning of a text and after each of its tokens, which a fixed seed chooses among the allowed ones.
fn states(compiler: &Compiler, spec: &ConstraintSpec) -> Vec<Constraint> {
    let (mut random, mut mask) = (Random(7), Mask::default());
    let mut states = vec![compiler.compile(spec).unwrap()];
    while states.len() < STEPS {
        let mut next = states[states.len() - 1].clone();
        next.mask(&mut mask).unwrap();
        let allowed: Vec<u32> = mask.allowed().collect();
        next.accept(allowed[random.below(allowed.len())]).unwrap();
        if next.is_ended() {
            break;
        }
        states.push(next);
    }
    states
}

fn masks(criterion: &mut Criterion) {
    for (name, vocabulary) in [("3072", repository()), ("128000", synthetic())] {
        let mut group = criterion.benchmark_group(format!("vocabulary {name}"));
        let compiler = Compiler::new(vocabulary, Limits::default()).unwrap();
        for (kind, spec) in specs() {
            let states = states(&compiler, &spec);
            let mut mask = Mask::default();
            let mut next = 0;
            // Each state is new, as in a sequence that has never been in it: its mask is computed and not remembered.
            let mut state = || {
                next += 1;
                states[next % states.len()].clone()
            };
            let mut compute = |mut constraint: Constraint| {
                constraint.mask(&mut mask).unwrap();
                black_box(mask.allowed().next());
                constraint
            };
            group.bench_function(format!("mask of a {kind}"), |bencher| {
                bencher.iter_batched(&mut state, &mut compute, BatchSize::SmallInput);
            });
            group.bench_function(format!("cached {kind}"), |bencher| {
                bencher.iter(|| black_box(compiler.compile(&spec).unwrap()));
            });
        }
        group.finish();
    }
}

criterion_group!(benches, masks);
criterion_main!(benches);
