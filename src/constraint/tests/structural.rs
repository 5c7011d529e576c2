//! Free text, a tag whose content follows a schema, and free text again.

use constraint::{Compiler, Constraint, ConstraintSpec, Limits, Token, Vocabulary};
use serde_json::json;

fn compiler() -> Compiler {
    let tokens = (0..=255).map(|byte| Token::Text(vec![byte])).chain([Token::Special("</s>".into())]).collect();
    Compiler::new(Vocabulary::new(tokens, &[256]).unwrap(), Limits::default()).unwrap()
}

fn constraint() -> Constraint {
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false});
    let tag = json!({"structures": [{"begin": "<f=x>", "schema": schema, "end": "</f>"}], "triggers": ["<f="]});
    compiler().compile(&ConstraintSpec::StructuralTag(tag)).unwrap()
}

/// How many bytes of a text are allowed, and whether it may end after them.
fn taken(text: &str) -> (usize, bool) {
    let mut constraint = constraint();
    let tokens: Vec<u32> = text.bytes().map(u32::from).collect();
    let taken = constraint.validate(&tokens).unwrap();
    tokens[..taken].iter().for_each(|&token| constraint.accept(token).unwrap());
    (taken, constraint.may_end().unwrap())
}

#[test]
fn text_outside_a_tag_is_free_and_its_content_follows_the_schema() {
    for text in ["", "plain < text", "so <f=x>{\"a\":1}</f> and on", "<f=x>{\"a\":1}</f><f=x>{\"a\":2}</f>."] {
        assert_eq!(taken(text), (text.len(), true), "{text}");
    }
    assert_eq!(taken("so <f=y"), ("so <f=".len(), false));
    assert_eq!(taken("so <f=x>{\"b\""), ("so <f=x>{\"".len(), false));
    assert_eq!(taken("<f=x>{\"a\":1}</g"), ("<f=x>{\"a\":1}</".len(), false));
}

#[test]
fn a_tag_may_be_json_text() {
    let compile = |text: &str| compiler().compile(&ConstraintSpec::StructuralTag(text.into()));
    let mut constraint = compile(r#"{"format": {"type": "const_string", "value": "ab"}}"#).unwrap();
    assert_eq!(constraint.validate(&[97, 98]).unwrap(), 2);
    assert_eq!(constraint.validate(&[98]).unwrap(), 0);
    let Err(error) = compile("{") else { panic!("it is not JSON") };
    assert!(error.to_string().contains("the structural tag is not valid: its text is not JSON"), "{error}");
}
