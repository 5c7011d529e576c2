//! The schema of a call's arguments.

use serde_json::{Value, json};

use crate::ToolSchema;

/// How far the arguments of a tool are held to its schema.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hold {
    /// In full, or the grammar is refused.
    Strict,
    /// As far as the grammar can tell.
    Lenient,
    /// They are an object.
    Free,
}

/// The schema that the arguments are held to.
pub(crate) fn arguments_schema((tool, hold): &(&ToolSchema, Hold)) -> Value {
    let free = json!({"type": "object"});
    let Some(object) = tool.parameters.as_object().filter(|_| *hold != Hold::Free) else { return free };
    let mut object = object.clone();
    // Arguments are an object although the schema may not say so.
    object.entry("type").or_insert_with(|| "object".into());
    if *hold == Hold::Lenient {
        object.insert("x-guidance".into(), json!({"lenient": true}));
    }
    Value::Object(object)
}
