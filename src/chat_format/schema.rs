//! What the schema of a tool says of a parameter that was written as plain text.

use serde_json::{Map, Value};

use crate::escape::quoted;
use crate::json::is_number;

/// How deep references and alternatives are followed.
const MAX_DEPTH: usize = 16;

/// The types that a value may have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Types {
    pub(crate) string: bool,
    pub(crate) number: bool,
    pub(crate) integer: bool,
    pub(crate) boolean: bool,
    pub(crate) null: bool,
    pub(crate) object: bool,
    pub(crate) array: bool,
}

impl Types {
    const ANY: Types =
        Types { string: true, number: true, integer: true, boolean: true, null: true, object: true, array: true };

    /// A string and nothing else.
    pub(crate) fn only_string(self) -> bool {
        self == Types { string: true, ..Types::default() }
    }

    fn has(self, value: &Value) -> bool {
        match value {
            Value::String(_) => self.string,
            Value::Number(number) => self.number || self.integer && number.as_f64().is_some_and(|n| n.fract() == 0.0),
            Value::Bool(_) => self.boolean,
            Value::Null => self.null,
            Value::Object(_) => self.object,
            Value::Array(_) => self.array,
        }
    }

    fn add(&mut self, other: Types) {
        self.string |= other.string;
        self.number |= other.number;
        self.integer |= other.integer;
        self.boolean |= other.boolean;
        self.null |= other.null;
        self.object |= other.object;
        self.array |= other.array;
    }

    fn add_name(&mut self, name: &str) {
        match name {
            "string" => self.string = true,
            "number" => self.number = true,
            "integer" => self.integer = true,
            "boolean" => self.boolean = true,
            "null" => self.null = true,
            "object" => self.object = true,
            "array" => self.array = true,
            _ => {}
        }
    }

    fn add_value(&mut self, value: &Value) {
        self.add_name(match value {
            Value::String(_) => "string",
            Value::Number(_) => "number",
            Value::Bool(_) => "boolean",
            Value::Null => "null",
            Value::Object(_) => "object",
            Value::Array(_) => "array",
        });
    }
}

/// The schema of a parameter of the tool.
pub(crate) fn parameter<'a>(parameters: &'a Value, name: &str) -> Option<&'a Value> {
    parameters.get("properties")?.get(name)
}

/// The types that the parameter may have; any if the schema does not say.
pub(crate) fn types(parameters: &Value, name: &str) -> Types {
    parameter(parameters, name).map_or(Types::ANY, |schema| types_of(schema, parameters, 0))
}

/// The schema that a reference within `root` means.
pub(crate) fn resolved<'a>(schema: &'a Value, root: &'a Value) -> &'a Value {
    let mut schema = schema;
    for _ in 0..MAX_DEPTH {
        let Some(pointer) = schema.get("$ref").and_then(Value::as_str).and_then(|text| text.strip_prefix('#')) else {
            break;
        };
        let Some(target) = root.pointer(pointer) else { break };
        schema = target;
    }
    schema
}

pub(crate) fn types_of(schema: &Value, root: &Value, depth: usize) -> Types {
    let schema = resolved(schema, root);
    let Some(object) = schema.as_object().filter(|_| depth < MAX_DEPTH) else { return Types::ANY };
    let mut types = Types::default();
    match object.get("type") {
        Some(Value::String(name)) => types.add_name(name),
        Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).for_each(|name| types.add_name(name)),
        _ => values(object, root, depth, &mut types),
    }
    if object.get("nullable") == Some(&Value::Bool(true)) {
        types.null = true;
    }
    if types == Types::default() { Types::ANY } else { types }
}

fn values(object: &Map<String, Value>, root: &Value, depth: usize, types: &mut Types) {
    let list = |key: &str| object.get(key).and_then(Value::as_array).into_iter().flatten();
    list("enum").chain(object.get("const")).for_each(|value| types.add_value(value));
    list("anyOf")
        .chain(list("oneOf"))
        .chain(list("allOf").take(1))
        .for_each(|schema| types.add(types_of(schema, root, depth + 1)));
}

/// The JSON of a value that was written as `text`.
///
/// A text that is JSON of an allowed type other than a string is that value. So are Python's `True`, `False` and
/// `None`. Any other text is a string.
pub(crate) fn coerced(text: &str, types: Types) -> String {
    let trimmed = text.trim();
    let trimmed = match trimmed {
        "True" => "true",
        "False" => "false",
        "None" => "null",
        other => other,
    };
    match serde_json::from_str::<Value>(trimmed) {
        Ok(Value::String(_)) if !types.string => trimmed.to_owned(),
        Ok(Value::String(_)) => quoted(text),
        Ok(value) if types.has(&value) => trimmed.to_owned(),
        // `serde_json` reads no number beyond a double.
        Err(_) if types.number && is_number(trimmed) => trimmed.to_owned(),
        _ => quoted(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_text_becomes_a_value_of_an_allowed_type_or_a_string() {
        let root = json!({"properties": {
            "s": {"type": "string"}, "i": {"type": "integer"}, "n": {"anyOf": [{"type": "number"}, {"type": "null"}]},
            "u": {"type": ["string", "null"]}, "b": {"type": "boolean"}, "r": {"$ref": "#/$defs/list"}, "e": {"enum": ["1", "2"]},
            "loop": {"$ref": "#/properties/loop"},
        }, "$defs": {"list": {"type": "array"}}});
        for (name, text, json) in [
            ("s", "12", "\"12\""),
            ("i", " 12 ", "12"),
            ("i", "1.5", "\"1.5\""),
            ("n", "None", "null"),
            ("n", "1.5", "1.5"),
            ("n", "1e400", "1e400"),
            ("u", "null", "null"),
            ("u", "x\"\n", "\"x\\\"\\n\""),
            ("b", "True", "true"),
            ("r", "[1]", "[1]"),
            ("r", "[1", "\"[1\""),
            ("e", "1", "\"1\""),
            ("unknown", "1", "1"),
            ("loop", "\"a\"", "\"\\\"a\\\"\""),
        ] {
            assert_eq!(coerced(text, types(&root, name)), json, "{name} {text}");
        }
        assert!(types(&root, "s").only_string() && types(&root, "e").only_string());
    }
}
