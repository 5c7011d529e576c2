//! Descriptions that cannot be compiled are refused by name, and a limit bounds each.

use constraint::{Compiler, ConstraintError, ConstraintSpec, Limits, Token, Vocabulary};
use serde_json::{Value, json};

fn refused(spec: &ConstraintSpec) -> ConstraintError {
    let tokens = (0..=255).map(|byte| Token::Text(vec![byte])).chain([Token::Special("</s>".into())]).collect();
    let compiler = Compiler::new(Vocabulary::new(tokens, &[256]).unwrap(), Limits::default()).unwrap();
    compiler.compile(spec).err().unwrap_or_else(|| panic!("{spec:?} was taken"))
}

fn schema(value: Value) -> ConstraintError {
    refused(&ConstraintSpec::JsonSchema(value))
}

#[test]
fn a_keyword_that_is_not_implemented_is_named() {
    for (keyword, value) in [("not", json!({"type": "null"})), ("uniqueItems", json!(true)), ("if", json!({}))] {
        let error = schema(json!({"type": "array", keyword: value}));
        assert!(matches!(&error, ConstraintError::Unsupported { feature, .. } if feature == keyword), "{error}");
    }
}

#[test]
fn depth_and_size_are_bounded() {
    let deep = (0..200).fold(json!({"type": "null"}), |inner, _| json!({"type": "array", "items": inner}));
    assert!(matches!(schema(deep), ConstraintError::TooDeep { .. }));
    assert!(matches!(schema(json!({"const": "x".repeat(300 << 10)})), ConstraintError::TooLarge { .. }));
    assert!(matches!(refused(&ConstraintSpec::Regex("a".repeat(300 << 10))), ConstraintError::TooLarge { .. }));
    assert!(matches!(refused(&ConstraintSpec::Grammar("a".repeat(300 << 10))), ConstraintError::TooLarge { .. }));
}

#[test]
fn text_that_is_not_in_its_syntax_is_refused() {
    assert!(matches!(schema(json!("{\"type\": ")), ConstraintError::Invalid { .. }));
    for spec in [ConstraintSpec::Regex("(a".into()), ConstraintSpec::Grammar("start: missing_rule".into())] {
        let error = refused(&spec);
        assert!(matches!(error, ConstraintError::Invalid { .. }), "{error}");
    }
}
