//! Every grammar compiles in llguidance, accepts what the families write, and lets only calls through that the parser
//! reads and that hold to their schema.

mod support;

use std::sync::Arc;

use chat_format::{ChatFormat, Choice, ToolGrammar, TurnStart};
use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, SimpleVob, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use support::{Forms, Parsed, Rng, joined, tools, write};

const END: u32 = 256;

/// One token a byte, the end, and the special tokens.
struct Vocabulary {
    env: TokEnv,
    special: Vec<String>,
}

impl Vocabulary {
    fn new(special: &[String]) -> Self {
        let mut words: Vec<Vec<u8>> = (0..=255u8).map(|byte| if byte == 255 { vec![] } else { vec![byte] }).collect();
        words.push(b"\xff<|eos|>".to_vec());
        words.extend(special.iter().map(|name| [b"\xff", name.as_bytes()].concat()));
        let info = TokRxInfo::new(words.len() as u32, END);
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(TokTrie::from(&info, &words)));
        Self { env, special: special.to_vec() }
    }

    fn id(&self, name: &str) -> Option<u32> {
        self.special.iter().position(|special| special == name).map(|index| END + 1 + index as u32)
    }

    fn matcher(&self, grammar: &ToolGrammar) -> Matcher {
        let factory = ParserFactory::new_simple(&self.env).unwrap();
        let grammar = grammar.clone().with_ids(&|name| self.id(name)).unwrap();
        let parser = factory.create_parser(TopLevelGrammar::from_lark(grammar.lark.clone()));
        let mut matcher = Matcher::new(parser);
        assert_eq!(matcher.get_error(), None, "{}", grammar.lark);
        assert!(matcher.grammar_warnings().is_empty(), "{}", grammar.lark);
        matcher
    }

    fn tokens(&self, text: &str) -> Vec<u32> {
        let (mut tokens, mut rest) = (Vec::new(), text);
        while let Some(c) = rest.chars().next() {
            let special = self.special.iter().find(|name| rest.starts_with(name.as_str()));
            match special {
                Some(name) => tokens.push(self.id(name).unwrap()),
                None => tokens.extend(rest.bytes().take(c.len_utf8()).map(u32::from)),
            }
            rest = &rest[special.map_or(c.len_utf8(), String::len)..];
        }
        tokens
    }

    fn text(&self, tokens: &[u32]) -> String {
        let mut bytes = Vec::new();
        for &token in tokens {
            match token {
                END => {}
                0..END => bytes.push(token as u8),
                _ => bytes.extend(self.special[(token - END - 1) as usize].bytes()),
            }
        }
        String::from_utf8(bytes).unwrap()
    }
}

/// The vocabularies where no marker is a special token, and where all are.
fn vocabularies(format: &ChatFormat) -> [Vocabulary; 2] {
    let marker = |name: &&String| name.starts_with(['<', '[']) && name.ends_with(['>', ']']);
    let special: Vec<_> = format.special_tokens().iter().filter(marker).cloned().collect();
    [Vocabulary::new(&[]), Vocabulary::new(&special)]
}

fn grammar(format: &ChatFormat, vocabulary: &Vocabulary, choice: Choice, parallel: bool, strict: bool) -> ToolGrammar {
    let special = |name: &str| vocabulary.id(name).is_some();
    let grammar = format.tool_grammar(&tools(strict), choice, parallel, walk_start(format.name()), &special);
    grammar.unwrap().unwrap()
}

/// Follows the grammar at random, and prefers what ends a text.
fn walk(matcher: &mut Matcher, rng: &mut Rng, vocabulary: &Vocabulary) -> Option<Vec<u32>> {
    let mut tokens = Vec::new();
    for _ in 0..1500 {
        // Closing markers hardly come by chance.
        let ends = ["\n</parameter>", "</arg_value>", "<|\"|>", "</think>", "[/THINK]", "<channel|>", "<|end|>"];
        let end = vocabulary.tokens(rng.pick(&ends));
        if rng.one_in(8) && matcher.validate_tokens(&end).unwrap() == end.len() {
            matcher.consume_tokens(&end).unwrap();
            tokens.extend(end);
            if matcher.is_stopped() {
                return Some(tokens);
            }
        }
        let mask: SimpleVob = matcher.compute_mask().unwrap();
        let allowed: Vec<u32> = mask.iter().collect();
        assert!(!allowed.is_empty(), "{}", vocabulary.text(&tokens));
        let closing: Vec<u32> =
            allowed.iter().copied().filter(|&t| t >= END || b"\"'}])</>|".contains(&(t as u8))).collect();
        let list = if !closing.is_empty() && !rng.one_in(4) { &closing } else { &allowed };
        let token = list[rng.below(list.len())];
        matcher.consume_token(token).unwrap();
        if token == END {
            return Some(tokens);
        }
        tokens.push(token);
        if matcher.is_stopped() {
            return Some(tokens);
        }
    }
    None
}

/// Checks all families and names those that failed.
fn each_family(check: impl Fn(&str)) {
    let check = |family: &&str| std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| check(family))).is_err();
    let failed: Vec<_> = ChatFormat::names().filter(check).collect();
    assert!(failed.is_empty(), "{failed:?}");
}

/// Where the turns of the walks begin. In Harmony, a turn that begins in content has no calls.
fn walk_start(family: &str) -> TurnStart {
    if family == "harmony" { TurnStart::Fresh } else { TurnStart::Content }
}

#[test]
fn walks_through_the_grammar_are_calls_that_hold_to_their_schema() {
    let tools = tools(true);
    let valid = |name: &str, value: &serde_json::Value| {
        let tool = tools.iter().find(|tool| tool.name == name).unwrap();
        jsonschema::is_valid(&tool.parameters, value)
    };
    each_family(|family| {
        let format = ChatFormat::named(family).unwrap();
        for (vocabulary, seed) in vocabularies(&format).iter().zip(0..) {
            let cases = [
                (Choice::Required, true),
                (Choice::Required, false),
                (Choice::Named("get_weather".into()), true),
                (Choice::Auto, true),
                (Choice::Auto, false),
            ];
            for (choice, parallel) in cases {
                let grammar = grammar(&format, vocabulary, choice.clone(), parallel, true);
                let matcher = vocabulary.matcher(&grammar);
                let (mut rng, mut finished) = (Rng(seed), 0);
                for _ in 0..30 {
                    let Some(tokens) = walk(&mut matcher.deep_clone(), &mut rng, vocabulary) else { continue };
                    finished += 1;
                    let text = vocabulary.text(&tokens);
                    let (mut parser, mut out) = (format.parser(walk_start(family), &tools), Vec::new());
                    parser.push(&text, &mut out);
                    parser.finish(&mut out);
                    let parsed = Parsed::of(&joined(&out));
                    if parsed.is_out_of_range() {
                        continue;
                    }
                    let turn = parsed.turn();
                    for (name, value) in &turn.calls {
                        assert!(valid(name, value), "{family} {choice:?}: {text}\n{turn:?}");
                    }
                    let context =
                        format!("{family} {choice:?} parallel {parallel}: {text}\n{turn:?}\n{}", grammar.lark);
                    match &choice {
                        Choice::Auto => assert!(parallel || turn.calls.len() <= 1, "{context}"),
                        Choice::Required => assert!(!turn.calls.is_empty(), "{context}"),
                        Choice::Named(name) => assert!(turn.calls.iter().all(|call| call.0 == *name), "{context}"),
                    }
                    if choice != Choice::Auto && family != "harmony" {
                        assert_eq!(turn.content, "", "{context}");
                        assert!(parallel && !matches!(choice, Choice::Named(_)) || turn.calls.len() == 1, "{context}");
                    }
                }
                assert!(finished > 0, "{family} {choice:?}: no walk ended in {}", grammar.lark);
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
                let grammar = grammar(&format, &vocabulary, choice, true, strict);
                let lark = grammar.with_ids(&|name| vocabulary.id(name)).unwrap().lark;
                compiler.compile(&ConstraintSpec::Lark(lark)).unwrap_or_else(|error| panic!("{family}: {error}"));
            }
        }
    });
}
