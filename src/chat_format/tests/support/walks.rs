//! Random walks through the grammars of tool calls: texts that the grammar allows, which the parser must read.

use std::sync::Arc;

use chat_format::{ChatFormat, Choice, FormatError, ToolGrammar, ToolSchema, TurnStart};
use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, SimpleVob, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};

use super::{Parsed, Rng, joined};

pub const END: u32 = 256;

/// One token a byte, the end, and the special tokens.
pub struct Vocabulary {
    pub env: TokEnv,
    pub special: Vec<String>,
}

impl Vocabulary {
    pub fn new(special: &[String]) -> Self {
        let mut words: Vec<Vec<u8>> = (0..=255u8).map(|byte| if byte == 255 { vec![] } else { vec![byte] }).collect();
        words.push(b"\xff<|eos|>".to_vec());
        words.extend(special.iter().map(|name| [b"\xff", name.as_bytes()].concat()));
        let info = TokRxInfo::new(words.len() as u32, END);
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(TokTrie::from(&info, &words)));
        Self { env, special: special.to_vec() }
    }

    pub fn id(&self, name: &str) -> Option<u32> {
        self.special.iter().position(|special| special == name).map(|index| END + 1 + index as u32)
    }

    pub fn matcher(&self, grammar: &ToolGrammar) -> Matcher {
        let factory = ParserFactory::new_simple(&self.env).unwrap();
        let grammar = grammar.clone().with_ids(&|name| self.id(name)).unwrap();
        let parser = factory.create_parser(TopLevelGrammar::from_lark(grammar.lark.clone()));
        let mut matcher = Matcher::new(parser);
        assert_eq!(matcher.get_error(), None, "{}", grammar.lark);
        assert!(matcher.grammar_warnings().is_empty(), "{}", grammar.lark);
        matcher
    }

    pub fn tokens(&self, text: &str) -> Vec<u32> {
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

    pub fn text(&self, tokens: &[u32]) -> String {
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
pub fn vocabularies(format: &ChatFormat) -> [Vocabulary; 2] {
    let marker = |name: &&String| name.starts_with(['<', '[']) && name.ends_with(['>', ']']);
    let special: Vec<_> = format.special_tokens().iter().filter(marker).cloned().collect();
    [Vocabulary::new(&[]), Vocabulary::new(&special)]
}

/// Follows the grammar at random, and prefers what ends a text.
fn walk(matcher: &mut Matcher, rng: &mut Rng, vocabulary: &Vocabulary) -> Option<Vec<u32>> {
    let mut tokens = Vec::new();
    for _ in 0..1500 {
        // Closing markers hardly come by chance.
        let ends = [
            "\n</parameter>",
            "</parameter>",
            "</arg_value>",
            "<|\"|>",
            "<escape>",
            "</think>",
            "</seed:think>",
            "[/THINK]",
            "<channel|>",
            "<|end|>",
        ];
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

/// Where the turns of the walks begin. In Harmony, a turn that begins in content has no calls.
pub fn walk_start(family: &str) -> TurnStart {
    if family == "harmony" { TurnStart::Fresh } else { TurnStart::Content }
}

/// Whether a text may have a number beyond a double, inside of a value that is then read as text.
fn has_huge_number(text: &str) -> bool {
    let exponents = text.split(['e', 'E']).skip(1).map(|part| part.strip_prefix('+').unwrap_or(part));
    exponents.into_iter().any(|part| part.bytes().take_while(u8::is_ascii_digit).count() >= 3)
}

/// What the calls of a turn must be, and the grammar for it.
pub struct Case {
    pub family: &'static str,
    pub tools: Vec<ToolSchema>,
    pub choice: Choice,
    pub parallel: bool,
}

impl Case {
    /// A random case with these tools.
    pub fn random(family: &'static str, tools: Vec<ToolSchema>, rng: &mut Rng) -> Self {
        let choice = match rng.below(5) {
            0 => Choice::Auto,
            1 => Choice::Named(tools[rng.below(tools.len())].name.clone()),
            _ => Choice::Required,
        };
        Self { family, tools, choice, parallel: rng.one_in(2) }
    }

    /// The grammar; `None` where the family cannot express a schema, which a request is refused for.
    pub fn grammar(&self, format: &ChatFormat, vocabulary: &Vocabulary) -> Option<ToolGrammar> {
        let special = |name: &str| vocabulary.id(name).is_some();
        let (choice, start) = (self.choice.clone(), walk_start(format.name()));
        match format.tool_grammar(&self.tools, choice, self.parallel, start, &special) {
            Err(FormatError::Schema { .. }) => None,
            grammar => Some(grammar.unwrap().expect("the tools are strict or demanded")),
        }
    }

    /// Walks `attempts` times. Each text that ends must be read as calls that are valid and that the choice allows. Returns the
    /// number of these texts.
    pub fn check(&self, vocabulary: &Vocabulary, rng: &mut Rng, attempts: usize) -> usize {
        let format = ChatFormat::named(self.family).unwrap();
        let Some(grammar) = self.grammar(&format, vocabulary) else { return 0 };
        let matcher = vocabulary.matcher(&grammar);
        let validator = |tool: &ToolSchema| (tool.name.clone(), jsonschema::validator_for(&tool.parameters).unwrap());
        let validators: Vec<_> = self.tools.iter().map(validator).collect();
        let valid = |name: &str, value: &serde_json::Value| {
            validators.iter().any(|(known, validator)| known == name && validator.is_valid(value))
        };
        let mut finished = 0;
        for _ in 0..attempts {
            let Some(tokens) = walk(&mut matcher.deep_clone(), rng, vocabulary) else { continue };
            finished += 1;
            let text = vocabulary.text(&tokens);
            let (mut parser, mut out) = (format.parser(walk_start(self.family), &self.tools), Vec::new());
            parser.push(&text, &mut out);
            parser.finish(&mut out);
            let parsed = Parsed::of(&joined(&out));
            if !parsed.is_out_of_range() && !has_huge_number(&text) {
                self.check_turn(&parsed.turn(), &valid, &format!("{}: {text}\n{}", self.family, grammar.lark));
            }
        }
        finished
    }

    fn check_turn(&self, turn: &super::Turn, valid: &dyn Fn(&str, &serde_json::Value) -> bool, context: &str) {
        let (choice, parallel, calls) = (&self.choice, self.parallel, &turn.calls);
        let context = || format!("{choice:?} parallel {parallel}: {turn:?}\n{context}");
        assert!(calls.iter().all(|(name, value)| valid(name, value)), "{}", context());
        match choice {
            Choice::Auto => assert!(parallel || calls.len() <= 1, "{}", context()),
            Choice::Required => assert!(!calls.is_empty(), "{}", context()),
            Choice::Named(name) => assert!(calls.iter().all(|call| call.0 == *name), "{}", context()),
        }
        if *choice != Choice::Auto && self.family != "harmony" {
            assert_eq!(turn.content, "", "{}", context());
            assert!(parallel && !matches!(choice, Choice::Named(_)) || calls.len() == 1, "{}", context());
        }
    }
}
