//! Random walks: each text that a schema's masks allow must parse, and validate by an independent validator.

use std::path::Path;

use constraint::{Compiler, ConstraintSpec, Limits, Mask, Token, Vocabulary};
use serde_json::{Value, json};
use text::Tokenizer;

const MAX_TOKENS: usize = 600;
/// After this many tokens a walk takes what closes a value.
const LONG: usize = 40;

fn schemas() -> Vec<Value> {
    let object = |name: &str, schema: Value| json!({"type": "object", "properties": {name: schema}, "required": [name], "additionalProperties": false});
    let mut all: Vec<Value> = [
        json!({"type": "string"}),
        json!({"type": "string", "minLength": 2, "maxLength": 5}),
        json!({"type": "string", "pattern": "^[a-f]{2,4}-[0-9]+$"}),
        json!({"type": "string", "format": "date-time"}),
        json!({"type": "string", "format": "uuid"}),
        json!({"type": "string", "format": "date"}),
        json!({"type": "integer", "minimum": -7, "maximum": 130}),
        json!({"type": "number", "minimum": 0.5, "maximum": 9.25}),
        json!({"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 5}),
        json!({"type": "boolean"}),
        json!({"type": "null"}),
        json!({"enum": ["red", 3, null, {"a": [1]}]}),
        json!({"const": {"k": "v"}}),
        json!({"type": ["integer", "null"]}),
        json!({"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]}),
        json!({"oneOf": [{"type": "integer"}, {"type": "boolean"}]}),
        json!({"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3}),
        json!({"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "null"}], "items": false, "minItems": 2}),
        json!({"type": "object", "additionalProperties": {"type": "integer"}}),
        json!({"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}}, "additionalProperties": false}),
    ]
    .to_vec();
    all.extend(all.clone().into_iter().map(|schema| object("value", schema)));
    all.push(json!({"$ref": "#/$defs/Node", "$defs": {"Node": {"type": "object", "additionalProperties": false, "required": ["id", "children"],
        "properties": {"id": {"type": "integer"}, "children": {"type": "array", "items": {"$ref": "#/$defs/Node"}}}}}}));
    all.push(json!({"anyOf": [
        {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}}, "required": ["kind", "lives"], "additionalProperties": false},
        {"type": "object", "properties": {"kind": {"const": "dog"}, "good": {"type": "boolean"}}, "required": ["kind"], "additionalProperties": false}]}));
    all
}

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

/// The text of one walk, if it ended within its bound.
fn walk(
    compiler: &Compiler,
    spec: &ConstraintSpec,
    closing: &[u32],
    bytes: &[Vec<u8>],
    random: &mut Random,
) -> Option<Vec<u8>> {
    let (mut constraint, mut mask, mut text) = (compiler.compile(spec).unwrap(), Mask::default(), Vec::new());
    for step in 0..MAX_TOKENS {
        if constraint.is_ended() {
            return Some(text);
        }
        constraint.mask(&mut mask).unwrap();
        let allowed: Vec<u32> = mask.allowed().collect();
        let close = closing.iter().copied().find(|&id| step >= LONG && mask.allows(id));
        let token = close.unwrap_or_else(|| allowed[random.below(allowed.len())]);
        constraint.accept(token).unwrap();
        text.extend_from_slice(&bytes[token as usize]);
    }
    None
}

fn check(vocabulary: Vocabulary, bytes: &[Vec<u8>], walks: usize) {
    let end = vocabulary.end_ids()[0];
    let id_of = |byte: u8| bytes.iter().position(|word| *word == [byte]).map(|id| id as u32);
    let closing: Vec<u32> = [end].into_iter().chain(b"\"}],".iter().filter_map(|&byte| id_of(byte))).collect();
    let compiler = Compiler::new(vocabulary, Limits::default()).unwrap();
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    for schema in schemas() {
        let validator = jsonschema::options().should_validate_formats(true).build(&schema).unwrap();
        let spec = ConstraintSpec::JsonSchema(schema.clone());
        let texts: Vec<_> = (0..walks).filter_map(|_| walk(&compiler, &spec, &closing, bytes, &mut random)).collect();
        assert!(!texts.is_empty(), "no walk ended: {schema}");
        for text in texts {
            let value: Value = serde_json::from_slice(&text)
                .unwrap_or_else(|error| panic!("{error}: {schema}: {}", String::from_utf8_lossy(&text)));
            // llguidance allows second 60 at any time of day, RFC 3339 only at 23:59 UTC: such a text is compared with second 59.
            let leap = schema.to_string().contains("date-time") && value.to_string().contains(":60");
            let value = if leap { value.to_string().replacen(":60", ":59", 1).parse().unwrap() } else { value };
            assert!(validator.is_valid(&value), "{schema} does not accept {value}");
        }
    }
}

#[test]
fn texts_of_a_byte_vocabulary_are_valid() {
    let bytes: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).chain([vec![]]).collect();
    let tokens = bytes[..256].iter().cloned().map(Token::Text).chain([Token::Special("</s>".into())]).collect();
    check(Vocabulary::new(tokens, &[256]).unwrap(), &bytes, 6);
}

#[test]
fn texts_of_the_tokenizer_of_the_repository_are_valid() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../model_repository/tensorrt_llm/1");
    let tokenizer = Tokenizer::from_dir(&folder).unwrap();
    let end = tokenizer.special_ids()[0];
    let size = tokenizer.vocab_size();
    let mut bytes: Vec<Vec<u8>> =
        (0..size as u32).map(|id| tokenizer.token_bytes(id).unwrap_or_default().into_owned()).collect();
    tokenizer.special_ids().iter().for_each(|&id| bytes[id as usize].clear());
    check(Vocabulary::of(&tokenizer, size, &[end]).unwrap(), &bytes, 3);
}
