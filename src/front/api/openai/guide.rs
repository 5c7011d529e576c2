//! What the answer must be: OpenAI's `response_format`, and the fields of other servers for the same.

use generation::ConstraintSpec;
use serde_json::{Map, Value};

use super::error::ApiError;
use super::fields::Fields;
use crate::api::status::shown;

/// Fields of other servers: their name, and what their value is.
const FIELDS: [(&str, Kind); 8] = [
    ("guided_json", Kind::JsonSchema),
    ("guided_regex", Kind::Regex),
    ("guided_choice", Kind::Choice),
    ("guided_grammar", Kind::Grammar),
    ("regex", Kind::Regex),
    ("ebnf", Kind::Grammar),
    ("json_schema", Kind::JsonSchema),
    ("structural_tag", Kind::StructuralTag),
];

#[derive(Debug, Clone, Copy)]
enum Kind {
    JsonObject,
    JsonSchema,
    Regex,
    Choice,
    Grammar,
    StructuralTag,
}

/// Reads `response_format`, `structured_outputs`, and the fields of vLLM and SGLang with the same meaning. Returns the name of
/// the field and its constraint.
///
/// # Errors
/// When a field has an invalid value, or several fields say what the answer must be.
pub(super) fn read(fields: &mut Fields) -> Result<Option<(&'static str, ConstraintSpec)>, ApiError> {
    let mut found: Vec<(&'static str, ConstraintSpec)> = Vec::new();
    let mut add = |name, spec: Option<ConstraintSpec>| found.extend(spec.map(|spec| (name, spec)));
    if let Some(format) = fields.object("response_format")? {
        add("response_format", read_format("response_format", format)?);
    }
    if let Some(outputs) = fields.object("structured_outputs")? {
        add("structured_outputs", Some(structured_outputs(outputs)?));
    }
    for (name, kind) in FIELDS {
        if let Some(value) = fields.take(name) {
            add(name, Some(spec(name, name, kind, value)?));
        }
    }
    if fields.flag("guided_json_object")?.unwrap_or(false) {
        add("guided_json_object", Some(ConstraintSpec::JsonObject));
    }
    let why = "white space is that of the schema's grammar";
    fields.refuse_unless("guided_whitespace_pattern", |_| false, why)?;
    // All models are constrained by the same library.
    fields.ignore(&["guided_decoding_backend"]);
    match found.len() {
        0 | 1 => Ok(found.pop()),
        _ => {
            let (first, second) = (found[0].0, found[1].0);
            let words = format!("`{first}` and `{second}` both say what the answer must be; send one of them.");
            Err(ApiError::of_field(second, words))
        }
    }
}

/// An object with a `type`: `response_format` of chats, `text.format` of responses, `output_config.format` of messages. The
/// schema is in `json_schema.schema`, or in `schema` directly.
///
/// # Errors
/// When the type is not known, or its schema is missing.
pub(super) fn read_format(
    field: &'static str,
    mut format: Map<String, Value>,
) -> Result<Option<ConstraintSpec>, ApiError> {
    let wrong = |words: String| Err(ApiError::of_field(field, words));
    let kind = format.get("type").and_then(Value::as_str).unwrap_or_default().to_owned();
    match kind.as_str() {
        "text" => Ok(None),
        "json_object" => Ok(Some(ConstraintSpec::JsonObject)),
        "json_schema" => {
            let schema = match format.remove("json_schema") {
                Some(Value::Object(mut inner)) => inner.remove("schema"),
                Some(_) => return wrong(format!("`{field}.json_schema` must be an object.")),
                None => format.remove("schema"),
            };
            match schema {
                Some(schema @ (Value::Object(_) | Value::Bool(_))) => Ok(Some(ConstraintSpec::JsonSchema(schema))),
                _ => wrong(format!("`{field}` has the type `json_schema`, but no object `schema`.")),
            }
        }
        "regex" => match format.remove("pattern") {
            Some(Value::String(pattern)) => Ok(Some(ConstraintSpec::Regex(pattern))),
            _ => wrong(format!("`{field}` has the type `regex`, but no string `pattern`.")),
        },
        "grammar" => match format.remove("grammar").or_else(|| format.remove("definition")) {
            Some(Value::String(grammar)) => Ok(Some(ConstraintSpec::Grammar(grammar))),
            _ => wrong(format!("`{field}` has the type `grammar`, but no string `grammar`.")),
        },
        "structural_tag" => Ok(Some(ConstraintSpec::StructuralTag(Value::Object(format)))),
        other => {
            let kinds = "text, json_object, json_schema, regex, grammar or structural_tag";
            wrong(format!("`{field}.type` is `{}`, expected {kinds}.", shown(other)))
        }
    }
}

/// vLLM's `structured_outputs`: one of its kinds.
fn structured_outputs(outputs: Map<String, Value>) -> Result<ConstraintSpec, ApiError> {
    const FIELD: &str = "structured_outputs";
    let mut found = None;
    for (name, value) in outputs.into_iter().filter(|(_, value)| !value.is_null()) {
        let kind = match name.as_str() {
            "json" => Kind::JsonSchema,
            "json_object" => Kind::JsonObject,
            "regex" => Kind::Regex,
            "choice" => Kind::Choice,
            "grammar" => Kind::Grammar,
            "structural_tag" => Kind::StructuralTag,
            "disable_fallback" | "disable_any_whitespace" | "disable_additional_properties" if value == false => {
                continue;
            }
            _ => {
                let words = format!("`{FIELD}.{}` is not supported.", shown(&name));
                return Err(ApiError::of_field(FIELD, words));
            }
        };
        if matches!(kind, Kind::JsonObject) && value == false {
            continue;
        }
        let place = format!("{FIELD}.{name}");
        if found.replace(spec(FIELD, &place, kind, value)?).is_some() {
            let words = format!("`{FIELD}` says more than once what the answer must be; send one kind.");
            return Err(ApiError::of_field(FIELD, words));
        }
    }
    let missing =
        || ApiError::of_field(FIELD, format!("`{FIELD}` has no json, regex, choice, grammar or structural_tag."));
    found.ok_or_else(missing)
}

/// The value at `place` of a field.
fn spec(field: &'static str, place: &str, kind: Kind, value: Value) -> Result<ConstraintSpec, ApiError> {
    let wrong = |expected: &str| ApiError::of_field(field, format!("`{place}` must be {expected}."));
    let text = |value| match value {
        Value::String(text) => Ok(text),
        _ => Err(wrong("a string")),
    };
    Ok(match kind {
        Kind::JsonObject if value == true => ConstraintSpec::JsonObject,
        Kind::JsonObject => return Err(wrong("true or false")),
        Kind::JsonSchema => match value {
            Value::Object(_) | Value::Bool(_) | Value::String(_) => ConstraintSpec::JsonSchema(value),
            _ => return Err(wrong("a JSON schema")),
        },
        Kind::Regex => ConstraintSpec::Regex(text(value)?),
        Kind::Grammar => ConstraintSpec::Grammar(text(value)?),
        Kind::StructuralTag => ConstraintSpec::StructuralTag(value),
        Kind::Choice => {
            let choices = match value {
                Value::Array(items) => items.into_iter().map(text).collect::<Result<Vec<_>, _>>(),
                _ => Err(wrong("a list of strings")),
            };
            ConstraintSpec::Choice(choices.map_err(|_| wrong("a list of strings"))?)
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn guide(body: Value) -> Result<Option<ConstraintSpec>, String> {
        let mut fields = Fields::read(body.to_string().as_bytes()).unwrap();
        let found = read(&mut fields).map(|found| found.map(|(_, spec)| spec));
        found.map_err(|error| error.json()["error"]["message"].as_str().unwrap().to_owned())
    }

    #[test]
    fn each_form_of_a_constraint_is_read() {
        let schema = json!({"type": "object"});
        let as_schema = Ok(Some(ConstraintSpec::JsonSchema(schema.clone())));
        assert_eq!(guide(json!({"response_format": {"type": "text"}})), Ok(None));
        assert_eq!(guide(json!({"response_format": {"type": "json_object"}})), Ok(Some(ConstraintSpec::JsonObject)));
        let strict = json!({"name": "n", "strict": true, "schema": schema});
        assert_eq!(guide(json!({"response_format": {"type": "json_schema", "json_schema": strict}})), as_schema);
        assert_eq!(guide(json!({"response_format": {"type": "json_schema", "schema": schema}})), as_schema);
        assert_eq!(guide(json!({"structured_outputs": {"json": schema, "regex": null}})), as_schema);
        assert_eq!(guide(json!({"guided_json": schema})), as_schema);
        let choices = Ok(Some(ConstraintSpec::Choice(vec!["a".into(), "b".into()])));
        assert_eq!(guide(json!({"structured_outputs": {"choice": ["a", "b"]}})), choices);
        assert_eq!(guide(json!({"guided_choice": ["a", "b"]})), choices);
        assert_eq!(guide(json!({"regex": "a+"})), Ok(Some(ConstraintSpec::Regex("a+".into()))));
        assert_eq!(guide(json!({})), Ok(None));
    }

    #[test]
    fn what_is_not_valid_is_named() {
        for (body, words) in [
            (json!({"response_format": {"type": "yaml"}}), "`response_format.type` is `yaml`"),
            (json!({"response_format": {"type": "json_schema"}}), "no object `schema`"),
            (json!({"response_format": "json_object"}), "`response_format` must be an object"),
            (json!({"structured_outputs": {"json": {}, "regex": "a"}}), "more than once"),
            (json!({"structured_outputs": {}}), "has no json"),
            (json!({"structured_outputs": {"disable_any_whitespace": true}}), "disable_any_whitespace"),
            (json!({"guided_json": {}, "guided_regex": "a"}), "`guided_json` and `guided_regex`"),
            (json!({"guided_choice": ["a", 1]}), "`guided_choice` must be a list of strings"),
            (json!({"guided_regex": 3}), "`guided_regex` must be a string"),
            (json!({"guided_whitespace_pattern": " "}), "`guided_whitespace_pattern` is not supported"),
        ] {
            let error = guide(body).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
    }
}
