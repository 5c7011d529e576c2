//! Parts of grammars in Lark's syntax.

use serde_json::Value;

/// A string literal of Lark: JSON's.
pub(crate) fn literal(text: &str) -> String {
    Value::from(text).to_string()
}
