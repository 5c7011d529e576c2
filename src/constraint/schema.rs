//! Checks a JSON schema before it is compiled, so that a refusal names the place.

use std::collections::HashSet;

use serde_json::{Map, Value};

use crate::ConstraintError;
use crate::limits::Limits;
use crate::reference;
use crate::subschemas::{LIST, NAMED, ONE, Place, WHAT};

/// Keywords that restrict a value, and that `llguidance` does not implement.
const UNSUPPORTED: [&str; 21] = [
    "not",
    "if",
    "then",
    "else",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "contains",
    "minContains",
    "maxContains",
    "uniqueItems",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
    "$dynamicRef",
    "$recursiveRef",
    "$dynamicAnchor",
    "$recursiveAnchor",
    "contentSchema",
    "$vocabulary",
    // Its options would make the compiler ignore keywords.
    "x-guidance",
];

/// Optional properties of an object. Each takes four of the 2 000 items that `llguidance` allows for one place of a text.
const MAX_OPTIONAL: usize = 480;

/// A schema that may be given as JSON text.
///
/// # Errors
/// When the text is too long, or is not JSON.
pub(crate) fn parse(value: &Value, limits: &Limits) -> Result<Value, ConstraintError> {
    let Value::String(text) = value else { return Ok(value.clone()) };
    limits.check_bytes(WHAT, text.len())?;
    serde_json::from_str(text)
        .map_err(|error| ConstraintError::Invalid { what: WHAT, reason: format!("its text is not JSON: {error}") })
}

/// The schema without keywords that restrict nothing.
///
/// # Errors
/// When the schema is too large or too deep, is no schema, or uses a keyword that is not implemented.
pub(crate) fn check(schema: &Value, limits: &Limits) -> Result<Value, ConstraintError> {
    let place = Place::default();
    shallow(schema, &mut place.clone(), 0, limits)?;
    limits.check_bytes(WHAT, schema.to_string().len())?;
    reference::plain(checked(schema, &mut place.clone())?, limits)
}

/// Refuses a deep value wherever the depth is: in schemas, and in the values of `enum` and `const`.
fn shallow(value: &Value, place: &mut Place, depth: usize, limits: &Limits) -> Result<(), ConstraintError> {
    if depth > limits.max_nesting {
        return Err(ConstraintError::TooDeep { place: place.to_string(), max: limits.max_nesting });
    }
    match value {
        Value::Array(items) => items.iter().enumerate().try_for_each(|(index, item)| {
            place.within(&index.to_string(), |place| shallow(item, place, depth + 1, limits))
        }),
        Value::Object(fields) => fields
            .iter()
            .try_for_each(|(key, field)| place.within(key, |place| shallow(field, place, depth + 1, limits))),
        _ => Ok(()),
    }
}

/// Refuses an object with more than [`MAX_OPTIONAL`] optional properties.
fn check_optional(fields: &Map<String, Value>, place: &Place) -> Result<(), ConstraintError> {
    let Some(properties) = fields.get("properties").and_then(Value::as_object) else { return Ok(()) };
    let required = fields.get("required").and_then(Value::as_array).into_iter().flatten();
    let required: HashSet<&str> = required.filter_map(Value::as_str).collect();
    let optional = properties.keys().filter(|name| !required.contains(name.as_str())).count();
    if optional <= MAX_OPTIONAL {
        return Ok(());
    }
    let reason = format!(
        "`{place}` has {optional} optional properties, over the limit of {MAX_OPTIONAL}: make some of them required, or leave \
         some out"
    );
    Err(ConstraintError::Invalid { what: WHAT, reason })
}

fn checked(schema: &Value, place: &mut Place) -> Result<Value, ConstraintError> {
    let fields = match schema {
        Value::Bool(_) => return Ok(schema.clone()),
        Value::Object(fields) => fields,
        other => {
            let reason = format!("`{}` is {}, expected an object or a boolean", place, kind(other));
            return Err(ConstraintError::Invalid { what: WHAT, reason });
        }
    };
    check_optional(fields, place)?;
    let mut kept = Map::new();
    for (key, value) in fields.iter().filter(|(key, value)| !is_void(key, value)) {
        if UNSUPPORTED.contains(&key.as_str()) {
            return Err(ConstraintError::Unsupported { feature: key.clone(), place: place.to_string() });
        }
        kept.insert(key.clone(), place.within(key, |place| checked_keyword(key, value, place))?);
    }
    Ok(Value::Object(kept))
}

/// The value of one keyword, its schemas checked.
fn checked_keyword(key: &str, value: &Value, place: &mut Place) -> Result<Value, ConstraintError> {
    match value {
        Value::Array(items) if LIST.contains(&key) => items
            .iter()
            .enumerate()
            .map(|(index, item)| place.within(&index.to_string(), |place| checked(item, place)))
            .collect::<Result<_, _>>()
            .map(Value::Array),
        Value::Object(fields) if NAMED.contains(&key) => fields
            .iter()
            .map(|(name, field)| Ok((name.clone(), place.within(name, |place| checked(field, place))?)))
            .collect::<Result<_, _>>()
            .map(Value::Object),
        value if ONE.contains(&key) => checked(value, place),
        value => Ok(value.clone()),
    }
}

/// Whether a keyword is one that `llguidance` lacks, with a value that accepts everything.
fn is_void(key: &str, value: &Value) -> bool {
    match key {
        "uniqueItems" => *value == Value::Bool(false),
        "unevaluatedItems" | "unevaluatedProperties" | "propertyNames" => {
            *value == Value::Bool(true) || value.as_object().is_some_and(Map::is_empty)
        }
        _ => false,
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn refused(schema: Value) -> String {
        let limits = Limits::default();
        parse(&schema, &limits).and_then(|schema| check(&schema, &limits)).unwrap_err().to_string()
    }

    #[test]
    fn a_keyword_that_is_not_implemented_is_named_with_its_place() {
        let schema = json!({"properties": {"a/b": {"items": {"anyOf": [{}, {"not": {}}]}}}});
        assert!(refused(schema).contains("`not` at `#/properties/a~1b/items/anyOf/1`"));
        assert!(refused(json!({"$defs": {"x": {"uniqueItems": true}}})).contains("`uniqueItems` at `#/$defs/x`"));
        assert!(refused(json!({"x-guidance": {"lenient": true}})).contains("`x-guidance` at `#`"));
        assert!(refused(json!({"properties": {"a": 3}})).contains("`#/properties/a` is a number"));
    }

    #[test]
    fn names_of_properties_and_values_are_not_keywords() {
        let schema = json!({"properties": {"not": {"enum": [{"if": 1}]}, "if": true}, "required": ["not"]});
        assert_eq!(check(&schema, &Limits::default()).unwrap(), schema);
        let void = json!({"type": "array", "uniqueItems": false, "unevaluatedItems": {}});
        assert_eq!(check(&void, &Limits::default()).unwrap(), json!({"type": "array"}));
    }

    #[test]
    fn size_and_depth_are_limited() {
        let mut deep = json!({});
        for _ in 0..100 {
            deep = json!({"items": deep});
        }
        assert!(refused(deep).contains("deeper than 64 levels at `#/…/items/"));
        assert!(refused(json!({"const": "x".repeat(1 << 20)})).contains("over the limit"));
        assert!(refused(json!("{\"type\":")).contains("not JSON"));
        assert_eq!(parse(&json!("{\"type\":\"null\"}"), &Limits::default()).unwrap(), json!({"type": "null"}));
    }
}
