//! Objects without `additionalProperties` are closed: they have the listed properties only.
//!
//! A text that follows the closed schema follows the schema, too. Without it, a model may add properties that no client
//! expects, and need not come to an end. Clients leave the keyword out, as pydantic does.

use serde_json::{Map, Value};

/// Keywords that say which other properties an object has.
const OPEN: [&str; 4] = ["additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames"];

/// The schema with its objects closed. A schema that joins several ones for the same object is returned as it is: each of
/// them lists a part of the properties.
pub fn close_objects(schema: &Value) -> Value {
    if joins(schema) { schema.clone() } else { closed(schema) }
}

/// Whether the schema, or one within it, has several schemas for one object.
fn joins(schema: &Value) -> bool {
    match schema {
        Value::Array(items) => items.iter().any(joins),
        Value::Object(fields) => {
            let parts = |name: &str| fields.get(name).and_then(Value::as_array).map_or(0, Vec::len);
            let has_choice = ["anyOf", "oneOf", "$ref", "if"].iter().any(|name| fields.contains_key(*name));
            let has_own = fields.contains_key("properties") || fields.contains_key("required");
            let has_all = parts("allOf") > 0 && (has_own || has_choice || parts("allOf") > 1);
            has_all || (has_own && has_choice) || fields.values().any(joins)
        }
        _ => false,
    }
}

fn closed(schema: &Value) -> Value {
    match schema {
        Value::Array(items) => items.iter().map(closed).collect(),
        Value::Object(fields) => {
            let mut kept: Map<String, Value> = Map::new();
            for (key, value) in fields {
                // Values of these are not schemas.
                let is_value = matches!(key.as_str(), "enum" | "const" | "default" | "examples" | "required");
                kept.insert(key.clone(), if is_value { value.clone() } else { closed(value) });
            }
            let lists = fields.get("properties").is_some_and(Value::is_object);
            if lists && !OPEN.iter().any(|key| fields.contains_key(*key)) {
                kept.insert("additionalProperties".to_owned(), Value::Bool(false));
            }
            Value::Object(kept)
        }
        other => other.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn objects_that_list_their_properties_are_closed_unless_they_say_otherwise() {
        let inner = json!({"type": "object", "properties": {"b": {"type": "string"}}});
        let schema = json!({"type": "object", "properties": {"a": inner, "properties": {"type": "object"}}, "$defs": {"D": inner}});
        let found = close_objects(&schema);
        assert_eq!(found["additionalProperties"], false);
        assert_eq!(found["properties"]["a"]["additionalProperties"], false);
        assert_eq!(found["$defs"]["D"]["additionalProperties"], false);
        assert_eq!(found["properties"]["properties"], json!({"type": "object"}));
        for open in [
            json!({"type": "object"}),
            json!({"type": "object", "properties": {}, "additionalProperties": true}),
            json!({"properties": {}, "patternProperties": {"^x": {}}}),
            json!({"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}),
            json!({"properties": {"a": {}}, "anyOf": [{"properties": {"b": {}}}, {"required": ["a"]}]}),
            json!({"enum": [{"properties": {"a": 1}}]}),
        ] {
            assert_eq!(close_objects(&open), open);
        }
    }
}
