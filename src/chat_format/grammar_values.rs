//! The grammar of arguments that are not written as JSON.

use serde_json::{Map, Value, json};

use crate::arguments_schema::Hold;
use crate::format::Parameters;
use crate::lark::Lark;
use crate::schema;
use crate::{FormatError, ToolSchema};

/// Keywords of a schema of arguments that only JSON Schema itself can express.
const WHOLE: [&str; 12] = [
    "allOf",
    "anyOf",
    "dependentRequired",
    "dependentSchemas",
    "if",
    "maxProperties",
    "minProperties",
    "not",
    "oneOf",
    "patternProperties",
    "propertyNames",
    "unevaluatedProperties",
];

/// Keywords that say nothing of a value.
const NOTES: [&str; 9] =
    ["$comment", "$defs", "default", "definitions", "deprecated", "description", "examples", "nullable", "title"];

/// How deep a schema nests.
const MAX_DEPTH: usize = 32;

/// One tool whose rules are made.
struct Tool<'a> {
    tool: &'a ToolSchema,
    format: &'a str,
    strict: bool,
}

/// A field of an object.
struct Field {
    rule: String,
    required: bool,
}

impl Tool<'_> {
    fn refuse(&self, reason: String) -> FormatError {
        FormatError::Schema { tool: self.tool.name.clone(), format: self.format.to_owned(), reason }
    }

    /// Refuses what the rules do not express; the schema of a tool that is not strict is held to as far as they do.
    fn lacks(&self, reason: impl FnOnce() -> String) -> Result<(), FormatError> {
        if self.strict { Err(self.refuse(reason())) } else { Ok(()) }
    }

    /// The properties of an object with whether each is required.
    fn properties<'s>(&self, schema: &'s Value) -> Result<Vec<(&'s str, &'s Value, bool)>, FormatError> {
        let empty = Vec::new();
        let required = schema.get("required").and_then(Value::as_array).unwrap_or(&empty);
        let none = || schema.as_object().into_iter().flat_map(Map::keys).find(|key| WHOLE.contains(&key.as_str()));
        if let Some(keyword) = none() {
            self.lacks(|| format!("`{keyword}` cannot be expressed"))?;
        }
        let properties: Vec<_> = schema.get("properties").and_then(Value::as_object).into_iter().flatten().collect();
        for name in required.iter().filter_map(Value::as_str) {
            if !properties.iter().any(|(key, _)| *key == name) {
                self.lacks(|| format!("`{name}` is required and not among the properties"))?;
            }
        }
        let is_required = |key: &str| required.iter().any(|name| name.as_str() == Some(key));
        Ok(properties.into_iter().map(|(key, schema)| (key.as_str(), schema, is_required(key))).collect())
    }

    /// A value as JSON, with the definitions that it may refer to.
    fn json(&self, schema: &Value, lark: &Lark) -> String {
        lark.json(&self.with_definitions(schema))
    }

    /// A value as JSON whose strings do not have the marker, because the parser ends the value there.
    fn json_without(&self, marker: &str, schema: &Value, lark: &Lark) -> String {
        let mut schema = self.with_definitions(schema);
        if let Some(pattern) = pattern_without(marker) {
            restrict_strings(&mut schema, &pattern);
        }
        lark.json(&schema)
    }

    fn with_definitions(&self, schema: &Value) -> Value {
        let mut schema = schema.clone();
        if let Some(object) = schema.as_object_mut() {
            for key in ["$defs", "definitions"] {
                if let Some(definitions) = self.tool.parameters.get(key) {
                    object.entry(key).or_insert_with(|| definitions.clone());
                }
            }
            if !self.strict {
                object.insert("x-guidance".into(), json!({"lenient": true}));
            }
        }
        schema
    }
}

/// A regular expression for texts without the marker. `None` if the first character of the marker occurs in it again.
fn pattern_without(marker: &str) -> Option<String> {
    let escaped = |c: char| if r"\.+*?()|[]{}^$#&-~".contains(c) { format!("\\{c}") } else { c.to_string() };
    let characters: Vec<char> = marker.chars().collect();
    let (first, rest) = characters.split_first()?;
    if rest.is_empty() || rest.contains(first) {
        return None;
    }
    let first = escaped(*first);
    let prefix = |end: usize| characters[..end].iter().copied().map(escaped).collect::<String>();
    // Each prefix of the marker, and each prefix followed by a character that neither continues nor restarts the marker.
    let begun = (1..characters.len()).map(prefix).collect::<Vec<_>>().join("|");
    let other = |end: usize| format!("{}[^{first}{}]", prefix(end), escaped(characters[end]));
    let ended = (1..characters.len()).map(other).collect::<Vec<_>>().join("|");
    Some(format!("^([^{first}]|({begun})*({ended}))*({begun})*$"))
}

/// Gives strings of a schema a pattern, unless the schema says already what they are.
fn restrict_strings(schema: &mut Value, pattern: &str) {
    match schema {
        Value::Array(items) => items.iter_mut().for_each(|item| restrict_strings(item, pattern)),
        Value::Object(fields) => {
            let is_string = match fields.get("type") {
                Some(Value::Array(types)) => types.iter().any(|name| name == "string"),
                name => name.is_some_and(|name| name == "string"),
            };
            let is_known = ["enum", "const", "pattern", "format"].iter().any(|key| fields.contains_key(*key));
            for (key, value) in fields.iter_mut() {
                if !matches!(key.as_str(), "enum" | "const" | "default" | "examples" | "required") {
                    restrict_strings(value, pattern);
                }
            }
            if is_string && !is_known {
                fields.insert("pattern".to_owned(), pattern.into());
            }
        }
        _ => {}
    }
}

/// Fields with a comma between each two.
fn fields(fields: &[Field], comma: &str, lark: &mut Lark) -> String {
    let mut alternatives = Vec::new();
    for (index, first) in fields.iter().enumerate() {
        let more = fields[index + 1..].iter().map(|field| match field.required {
            true => format!("{comma} {}", field.rule),
            false => format!("({comma} {})?", field.rule),
        });
        let more: Vec<_> = more.collect();
        alternatives.push(format!("{} {}", first.rule, more.join(" ")));
        if first.required {
            break;
        }
    }
    if !fields.iter().any(|field| field.required) {
        alternatives.push("\"\"".into());
    }
    lark.rule("", &alternatives.join(" | "))
}

/// The strings that a value may be, if the schema lists them all.
fn choices(schema: &Value) -> Option<Vec<&str>> {
    match (schema.get("enum"), schema.get("const")) {
        (Some(Value::Array(values)), _) => values.iter().map(Value::as_str).collect(),
        (_, Some(Value::String(value))) => Some(vec![value]),
        _ => None,
    }
}

/// The first keyword beside the type.
fn keyword(schema: &Value) -> Option<&str> {
    let plain = |key: &str| key == "type" || NOTES.contains(&key);
    schema.as_object()?.keys().map(String::as_str).find(|key| !plain(key))
}

/// The rule of a call with its parameters between markers.
pub(crate) fn parameters(
    format: &str,
    syntax: &Parameters,
    (tool, hold): &(&ToolSchema, Hold),
    lark: &mut Lark,
) -> Result<String, FormatError> {
    let tool = Tool { tool, format, strict: *hold == Hold::Strict };
    let line = if syntax.lines { "\n" } else { "" };
    let begin = if syntax.name.0.is_empty() { "" } else { "\n" };
    let head = lark.texts(&format!("{begin}{}{}{}\n", syntax.name.0, tool.tool.name, syntax.name.1));
    let end = if syntax.end.is_empty() { String::new() } else { lark.texts(&format!("{}\n", syntax.end)) };
    let between = if syntax.value.0.is_empty() { line.to_owned() } else { format!("\n{}", syntax.value.0) };
    let mut list = String::new();
    if *hold == Hold::Free {
        let (open, middle) = (lark.texts(&syntax.key.0), lark.texts(&format!("{}{between}", syntax.key.1)));
        let value = text_up_to(syntax, lark);
        list = format!("({open} /[A-Za-z0-9_.-]{{1,64}}/ {middle} {value} \"\\n\")*");
    } else {
        for (key, property, required) in tool.properties(&tool.tool.parameters)? {
            let open = lark.texts(&format!("{}{key}{}{between}", syntax.key.0, syntax.key.1));
            let value = parameter(&tool, syntax, key, property, lark)?;
            let rule = lark.rule("", &format!("{open} {value} \"\\n\""));
            list.push_str(&if required { format!("{rule} ") } else { format!("{rule}? ") });
        }
    }
    Ok(lark.rule("", &format!("{head} {list} {end}")))
}

/// Free text and the marker behind it.
fn text_up_to(syntax: &Parameters, lark: &mut Lark) -> String {
    match (syntax.lines, lark.is_special(&syntax.value.1)) {
        // The parser takes the line break before the marker away.
        (true, false) => lark.text_without(&syntax.value.1, "\n"),
        _ => lark.text_to(&syntax.value.1, None),
    }
}

fn parameter(
    tool: &Tool,
    syntax: &Parameters,
    key: &str,
    property: &Value,
    lark: &mut Lark,
) -> Result<String, FormatError> {
    let root = &tool.tool.parameters;
    let property = schema::resolved(property, root);
    let types = schema::types_of(property, root, 0);
    let line = if syntax.lines { "\n" } else { "" };
    let close = lark.texts(&format!("{line}{}", syntax.value.1));
    if let Some(choices) = choices(property).filter(|_| types.only_string()) {
        if choices.iter().any(|choice| choice.contains(&syntax.value.1)) {
            return Err(tool.refuse(format!("a value of `{key}` has the marker `{}`", syntax.value.1)));
        }
        let choices: Vec<_> = choices.iter().map(|choice| lark.literal(&format!("{choice}{line}"))).collect();
        let close = lark.token(&syntax.value.1);
        let choices = choices.iter().map(|choice| if choice.is_empty() { "\"\"" } else { choice }).collect::<Vec<_>>();
        return Ok(format!("({}) {close}", choices.join(" | ")));
    }
    if !types.string {
        return Ok(format!("{} {close}", tool.json_without(&syntax.value.1, property, lark)));
    }
    if let Some(keyword) = keyword(property) {
        tool.lacks(|| format!("`{keyword}` of `{key}` cannot be expressed"))?;
    }
    Ok(text_up_to(syntax, lark))
}

/// The rule of a call of Python.
pub(crate) fn python(format: &str, (tool, hold): &(&ToolSchema, Hold), lark: &mut Lark) -> Result<String, FormatError> {
    let tool = Tool { tool, format, strict: *hold == Hold::Strict };
    let head = lark.literal(&format!("{}(", tool.tool.name));
    if *hold == Hold::Free {
        let field = lark.rule("", "/[A-Za-z_][A-Za-z0-9_]{0,63}/ \"=\" (\"True\" | \"False\" | \"None\" | %json {})");
        return Ok(lark.rule("", &format!("{head} ({field} (\", \" {field})*)? \")\"")));
    }
    let mut list = Vec::new();
    for (key, property, required) in tool.properties(&tool.tool.parameters)? {
        let valid = |c: char| c.is_ascii_alphanumeric() || c == '_';
        if key.is_empty() || !key.chars().all(valid) || key.starts_with(|c: char| c.is_ascii_digit()) {
            return Err(tool.refuse(format!("`{key}` is not a name of Python")));
        }
        let types = schema::types_of(property, &tool.tool.parameters, 0);
        let name = lark.literal(&format!("{key}="));
        let mut values = vec![tool.json(property, lark)];
        if keyword(schema::resolved(property, &tool.tool.parameters)).is_none() {
            values.extend(types.boolean.then(|| "\"True\" | \"False\"".to_owned()));
            values.extend(types.null.then(|| "\"None\"".to_owned()));
        }
        let value = format!("({})", values.join(" | "));
        list.push(Field { rule: lark.rule("", &format!("{name} {value}")), required });
    }
    let list = fields(&list, "\", \"", lark);
    Ok(lark.rule("", &format!("{head} {list} \")\"")))
}

/// The rule of a call of Gemma 4.
pub(crate) fn loose(
    format: &str,
    quote: &str,
    (tool, hold): &(&ToolSchema, Hold),
    lark: &mut Lark,
) -> Result<String, FormatError> {
    let tool = Tool { tool, format, strict: *hold == Hold::Strict };
    let head = lark.literal(&format!("call:{}", tool.tool.name));
    let schema = if *hold == Hold::Free { json!({"type": "object"}) } else { tool.tool.parameters.clone() };
    let mut rules = Loose { tool: &tool, any: any(quote, lark), string: string(quote, lark), quote };
    let value = rules.object(&schema, 0, lark)?;
    Ok(lark.rule("", &format!("{head} {value}")))
}

fn string(quote: &str, lark: &mut Lark) -> String {
    let (open, text) = (lark.token(quote), lark.text_to(quote, None));
    lark.rule("", &format!("{open} {text}"))
}

/// A value of any kind.
fn any(quote: &str, lark: &mut Lark) -> String {
    let string = string(quote, lark);
    let scalar = "%json {\"type\": [\"number\", \"boolean\", \"null\"]}";
    let name = lark.next_rule();
    let pair = format!("/[A-Za-z_][A-Za-z0-9_]{{0,63}}/ \":\" {name}");
    let object = format!("\"{{\" ({pair} (\",\" {pair})*)? \"}}\"");
    lark.rule("", &format!("{string} | {scalar} | \"[\" ({name} (\",\" {name})*)? \"]\" | {object}"))
}

struct Loose<'a> {
    tool: &'a Tool<'a>,
    any: String,
    string: String,
    quote: &'a str,
}

impl Loose<'_> {
    fn object(&mut self, schema: &Value, depth: usize, lark: &mut Lark) -> Result<String, FormatError> {
        let properties = self.tool.properties(schema)?;
        if properties.is_empty()
            && schema.get("additionalProperties") != Some(&Value::Bool(false))
            && schema.get("properties").is_none()
        {
            let pair = format!("/[A-Za-z_][A-Za-z0-9_]{{0,63}}/ \":\" {}", self.any);
            return Ok(lark.rule("", &format!("\"{{\" ({pair} (\",\" {pair})*)? \"}}\"")));
        }
        let mut list = Vec::new();
        for (key, property, required) in properties {
            if key.is_empty() || key.chars().any(|c| ",:{}[]<>\"'".contains(c) || c.is_whitespace()) {
                return Err(self.tool.refuse(format!("`{key}` cannot be written without quotes")));
            }
            let (name, value) = (lark.literal(&format!("{key}:")), self.value(key, property, depth + 1, lark)?);
            list.push(Field { rule: lark.rule("", &format!("{name} {value}")), required });
        }
        let list = fields(&list, "\",\"", lark);
        Ok(lark.rule("", &format!("\"{{\" {list} \"}}\"")))
    }

    fn value(&mut self, key: &str, schema: &Value, depth: usize, lark: &mut Lark) -> Result<String, FormatError> {
        let schema = schema::resolved(schema, &self.tool.tool.parameters);
        if depth > MAX_DEPTH {
            return Err(self.tool.refuse(format!("`{key}` nests deeper than {MAX_DEPTH}")));
        }
        if let Some(choices) = choices(schema) {
            let quote = lark.token(self.quote);
            let choices: Vec<_> =
                choices.iter().map(|choice| format!("{quote} {} {quote}", lark.literal(choice))).collect();
            return Ok(format!("({})", choices.join(" | ")));
        }
        match schema.get("type").and_then(Value::as_str) {
            Some("object") => self.object(schema, depth, lark),
            Some("array") => {
                let other = keyword(schema).filter(|_| {
                    schema
                        .as_object()
                        .is_some_and(|s| s.keys().any(|k| k != "items" && k != "type" && !NOTES.contains(&k.as_str())))
                });
                if let Some(keyword) = other {
                    self.tool.lacks(|| format!("`{keyword}` of `{key}` cannot be expressed"))?;
                }
                let item = match schema.get("items") {
                    Some(items) => self.value(key, items, depth + 1, lark)?,
                    None => self.any.clone(),
                };
                Ok(lark.rule("", &format!("\"[\" ({item} (\",\" {item})*)? \"]\"")))
            }
            Some("string") => {
                if let Some(keyword) = keyword(schema) {
                    self.tool.lacks(|| format!("`{keyword}` of `{key}` cannot be expressed"))?;
                }
                Ok(self.string.clone())
            }
            Some("number" | "integer" | "boolean" | "null") => Ok(self.tool.json(schema, lark)),
            _ if schema::types_of(schema, schema, 0).string => {
                if let Some(Value::Array(_)) = schema.get("type") {
                    self.tool.lacks(|| format!("the types of `{key}` cannot be expressed"))?;
                }
                if keyword(schema).is_some() {
                    self.tool.lacks(|| format!("the schema of `{key}` cannot be expressed"))?;
                }
                Ok(self.any.clone())
            }
            // Without strings, arrays and objects, a value is written as JSON.
            _ => Ok(self.tool.json(schema, lark)),
        }
    }
}
