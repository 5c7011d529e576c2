//! The grammar of a specification, in the form that `llguidance` takes.

use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use serde_json::{Value, json};

use crate::closed::close_objects;
use crate::limits::Limits;
use crate::{ConstraintError, ConstraintSpec, gbnf, schema, structural};

pub(crate) fn grammar_of(spec: &ConstraintSpec, limits: &Limits) -> Result<TopLevelGrammar, ConstraintError> {
    let what = spec.what();
    match spec {
        ConstraintSpec::JsonObject => {
            Ok(TopLevelGrammar::from_json_schema(with_white_space(json!({"type": "object"}))))
        }
        ConstraintSpec::JsonSchema(value) => {
            let parsed = schema::parse(value, limits)?;
            Ok(TopLevelGrammar::from_json_schema(with_white_space(close_objects(&schema::check(&parsed, limits)?))))
        }
        ConstraintSpec::Regex(regex) => {
            limits.check_bytes(what, regex.len())?;
            Ok(TopLevelGrammar::from_regex(regex))
        }
        ConstraintSpec::Choice(choices) => {
            limits.check_bytes(what, choices.iter().map(|choice| choice.len() + 1).sum())?;
            Ok(TopLevelGrammar::from_regex(&choice(choices)?))
        }
        ConstraintSpec::Grammar(text) if gbnf::is_gbnf(text) => {
            limits.check_bytes(what, text.len())?;
            Ok(TopLevelGrammar::from_lark(gbnf::lark(text, limits)?))
        }
        ConstraintSpec::Grammar(text) => {
            check_lark(text)?;
            limits.check_bytes(what, text.len())?;
            Ok(TopLevelGrammar::from_lark(text.clone()))
        }
        ConstraintSpec::Lark(text) => {
            limits.check_bytes(what, text.len())?;
            Ok(TopLevelGrammar::from_lark(text.clone()))
        }
        ConstraintSpec::StructuralTag(value) => {
            let (lark, schemas) = structural::lark(value, limits)?;
            let mut grammars = vec![GrammarWithLexer::from_lark(lark)];
            grammars.extend(schemas.into_iter().enumerate().map(|(index, schema)| GrammarWithLexer {
                name: Some(structural::schema_name(index)),
                ..GrammarWithLexer::from_json_schema(with_white_space(schema))
            }));
            Ok(TopLevelGrammar { grammars, max_tokens: None })
        }
    }
}

/// White space between the parts of a JSON text: a line break with indentation, or blanks. It is bounded, because models
/// whose prompt does not mention JSON write white space without end.
const WHITE_SPACE: &str = r"[\x20\x09]{1,64}|[\x0D\x0A]{1,2}[\x20\x09]{0,64}";

/// The schema with the option of `llguidance` for white space.
fn with_white_space(schema: Value) -> Value {
    let options = json!({"whitespace_pattern": WHITE_SPACE});
    match schema {
        Value::Object(mut fields) => {
            fields.insert("x-guidance".to_owned(), options);
            Value::Object(fields)
        }
        Value::Bool(true) => json!({"x-guidance": options}),
        other => other,
    }
}

/// The choices as one regular expression: the parser bounds the alternatives of a rule.
fn choice(choices: &[String]) -> Result<String, ConstraintError> {
    let invalid = |reason: &str| ConstraintError::Invalid { what: "the list of choices", reason: reason.into() };
    if choices.is_empty() {
        return Err(invalid("it is empty, expected at least one text"));
    }
    if choices.iter().any(String::is_empty) {
        return Err(invalid("one of its texts is empty"));
    }
    let choices: Vec<String> = choices.iter().map(|choice| escaped(choice)).collect();
    Ok(choices.join("|"))
}

/// A regular expression that matches the text alone.
fn escaped(text: &str) -> String {
    let escape = |char: char| [Some('\\').filter(|_| r"\.+*?()|[]{}^$#&-~/".contains(char)), Some(char)];
    text.chars().flat_map(escape).flatten().collect()
}

/// Refuses what would change the meaning of the rest of a grammar: options of `llguidance` that ignore parts of a schema.
fn check_lark(text: &str) -> Result<(), ConstraintError> {
    match text.contains("x-guidance") {
        true => Err(ConstraintError::Unsupported { feature: "x-guidance".into(), place: "the grammar".into() }),
        false => Ok(()),
    }
}
