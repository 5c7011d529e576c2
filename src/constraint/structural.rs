//! Structural tags as a grammar in Lark's syntax.

use serde_json::Value;

use crate::ConstraintError;
use crate::lark::literal;
use crate::limits::Limits;
use crate::schema;
use crate::subschemas::Place;

const WHAT: &str = "the structural tag";
/// Text of any kind, as a terminal.
const ANY_TEXT: &str = "/(?s:.*)/";

/// The name of the grammar of the schema with this index.
pub(crate) fn schema_name(index: usize) -> String {
    format!("schema_{index}")
}

/// The grammar of a structural tag, which may be given as JSON text, and the schemas that it names with [`schema_name`].
///
/// # Errors
/// When the tag is too large or too deep, is not valid, or uses a format that is not implemented.
pub(crate) fn lark(value: &Value, limits: &Limits) -> Result<(String, Vec<Value>), ConstraintError> {
    let parsed = match value {
        Value::String(text) => Some(parse(text, limits)?),
        _ => None,
    };
    let value = parsed.as_ref().unwrap_or(value);
    limits.check_bytes(WHAT, value.to_string().len())?;
    let mut rules = Rules { text: Vec::new(), schemas: Vec::new(), limits, depth: 0 };
    let mut place = Place::default();
    let start = match (value.get("format"), value.get("structures")) {
        (Some(format), None) => place.within("format", |place| rules.format(format, place))?,
        (None, Some(_)) => rules.legacy(value, &mut place)?,
        _ => return Err(invalid(&place, "expected `format`, or `structures` with `triggers`")),
    };
    rules.text.push(format!("start: {start}"));
    Ok((rules.text.join("\n"), rules.schemas))
}

fn parse(text: &str, limits: &Limits) -> Result<Value, ConstraintError> {
    limits.check_bytes(WHAT, text.len())?;
    serde_json::from_str(text)
        .map_err(|error| ConstraintError::Invalid { what: WHAT, reason: format!("its text is not JSON: {error}") })
}

struct Rules<'a> {
    text: Vec<String>,
    schemas: Vec<Value>,
    limits: &'a Limits,
    depth: usize,
}

/// A part of the text with its beginning and its end.
struct Tag {
    begin: String,
    content: String,
    end: String,
}

impl Rules<'_> {
    /// Adds a rule; its name.
    fn rule(&mut self, attributes: &str, body: &str) -> String {
        let name = format!("r{}", self.text.len());
        self.text.push(format!("{name}{attributes}: {body}"));
        name
    }

    fn schema(&mut self, value: &Value, place: &mut Place) -> Result<String, ConstraintError> {
        let parsed = schema::parse(value, self.limits)?;
        let checked = schema::check(&parsed, self.limits).map_err(|error| match error {
            ConstraintError::Unsupported { feature, place: inner } => {
                ConstraintError::Unsupported { feature, place: format!("{place}{}", &inner[1..]) }
            }
            other => other,
        })?;
        self.schemas.push(checked);
        Ok(format!("@{}", schema_name(self.schemas.len() - 1)))
    }

    /// The expression of one format.
    fn format(&mut self, value: &Value, place: &mut Place) -> Result<String, ConstraintError> {
        if self.depth > self.limits.max_nesting {
            return Err(ConstraintError::TooDeep { place: place.to_string(), max: self.limits.max_nesting });
        }
        self.depth += 1;
        let expression = self.format_of(value, place);
        self.depth -= 1;
        expression
    }

    fn format_of(&mut self, value: &Value, place: &mut Place) -> Result<String, ConstraintError> {
        match string(value, "type", place)? {
            "const_string" => Ok(terminal(string(value, "value", place)?)),
            "json_schema" => {
                let schema = field(value, "json_schema", place)?;
                place.within("json_schema", |place| self.schema(schema, place))
            }
            "regex" => {
                let regex = llguidance::regex_to_lark(string(value, "pattern", place)?, "");
                Ok(self.rule("", &format!("/{regex}/")))
            }
            "any_text" => Ok(self.rule("", ANY_TEXT)),
            "sequence" => {
                let parts = self.formats(value, "elements", place)?;
                Ok(self.rule("", &parts.join(" ")))
            }
            "or" => {
                let parts = self.formats(value, "elements", place)?;
                Ok(self.rule("", &parts.join(" | ")))
            }
            "tag" => {
                let tag = self.tag(value, place)?;
                Ok(self.rule("", &format!("{} {} {}", terminal(&tag.begin), tag.content, terminal(&tag.end))))
            }
            "triggered_tags" => self.triggered(value, place),
            "tags_with_separator" => self.separated(value, place),
            other => Err(ConstraintError::Unsupported { feature: other.into(), place: place.to_string() }),
        }
    }

    fn formats(&mut self, value: &Value, key: &str, place: &mut Place) -> Result<Vec<String>, ConstraintError> {
        let items = list(value, key, place)?;
        place.within(key, |place| {
            let each =
                |(index, item): (usize, &Value)| place.within(&index.to_string(), |place| self.format(item, place));
            items.iter().enumerate().map(each).collect()
        })
    }

    /// A tag of the current form. Free text in it goes up to its end.
    fn tag(&mut self, value: &Value, place: &mut Place) -> Result<Tag, ConstraintError> {
        let (begin, end) = (string(value, "begin", place)?, string(value, "end", place)?);
        if begin.is_empty() {
            return Err(invalid(place, "`begin` is empty"));
        }
        let content = field(value, "content", place)?;
        if content.get("type").and_then(Value::as_str) == Some("any_text") && !end.is_empty() {
            let text = self.rule(&format!("[suffix={}]", literal(end)), ANY_TEXT);
            return Ok(Tag { begin: begin.into(), content: text, end: String::new() });
        }
        let content = place.within("content", |place| self.format(content, place))?;
        Ok(Tag { begin: begin.into(), content, end: end.into() })
    }

    fn tags(&mut self, value: &Value, place: &mut Place) -> Result<Vec<Tag>, ConstraintError> {
        let items = list(value, "tags", place)?;
        place.within("tags", |place| {
            let each = |(index, item): (usize, &Value)| place.within(&index.to_string(), |place| self.tag(item, place));
            items.iter().enumerate().map(each).collect()
        })
    }

    fn triggered(&mut self, value: &Value, place: &mut Place) -> Result<String, ConstraintError> {
        let triggers = strings(value, "triggers", place)?;
        let tags = self.tags(value, place)?;
        let at_least_one = flag(value, "at_least_one", place)?;
        let stop_after_first = flag(value, "stop_after_first", place)?;
        self.triggered_tags(&triggers, &tags, at_least_one, stop_after_first, place)
    }

    fn separated(&mut self, value: &Value, place: &mut Place) -> Result<String, ConstraintError> {
        let separator = terminal(string(value, "separator", place)?);
        let at_least_one = flag(value, "at_least_one", place)?;
        let stop_after_first = flag(value, "stop_after_first", place)?;
        let tags = self.tags(value, place)?;
        let alternatives: Vec<String> =
            tags.iter().map(|tag| format!("{} {} {}", terminal(&tag.begin), tag.content, terminal(&tag.end))).collect();
        let one = self.rule("", &alternatives.join(" | "));
        let all = if stop_after_first { one } else { format!("{one} ({separator} {one})*") };
        Ok(self.rule("", &if at_least_one { all } else { format!("({all})?") }))
    }

    /// The older form: `structures` of `begin`, `schema` and `end`, after `triggers`.
    fn legacy(&mut self, value: &Value, place: &mut Place) -> Result<String, ConstraintError> {
        let triggers = strings(value, "triggers", place)?;
        let items = list(value, "structures", place)?;
        let tags = place.within("structures", |place| {
            let each =
                |(index, item): (usize, &Value)| place.within(&index.to_string(), |place| self.structure(item, place));
            items.iter().enumerate().map(each).collect::<Result<Vec<_>, _>>()
        })?;
        self.triggered_tags(&triggers, &tags, false, false, place)
    }

    fn structure(&mut self, value: &Value, place: &mut Place) -> Result<Tag, ConstraintError> {
        let (begin, end) = (string(value, "begin", place)?.into(), string(value, "end", place)?.into());
        let schema = field(value, "schema", place)?;
        let content = place.within("schema", |place| self.schema(schema, place))?;
        Ok(Tag { begin, content, end })
    }

    /// Free text in which each trigger is the beginning of a tag.
    fn triggered_tags(
        &mut self,
        triggers: &[&str],
        tags: &[Tag],
        at_least_one: bool,
        stop_after_first: bool,
        place: &Place,
    ) -> Result<String, ConstraintError> {
        let mut alternatives = Vec::new();
        for &trigger in triggers {
            let text = self.rule(&format!("[suffix={}]", literal(trigger)), ANY_TEXT);
            let ends: Vec<String> = tags
                .iter()
                .filter_map(|tag| {
                    let rest = tag.begin.strip_prefix(trigger)?;
                    Some(format!("{} {} {}", terminal(rest), tag.content, terminal(&tag.end)))
                })
                .collect();
            if ends.is_empty() {
                return Err(invalid(place, &format!("no tag begins with the trigger `{trigger}`")));
            }
            let rest = self.rule("", &ends.join(" | "));
            alternatives.push(format!("{text} {rest}"));
        }
        if let Some(tag) = tags.iter().find(|tag| !triggers.iter().any(|&trigger| tag.begin.starts_with(trigger))) {
            return Err(invalid(place, &format!("no trigger begins the tag `{}`", tag.begin)));
        }
        let one = self.rule("", &alternatives.join(" | "));
        if stop_after_first {
            let text = self.rule("", ANY_TEXT);
            return Ok(if at_least_one { one } else { self.rule("", &format!("{one} | {text}")) });
        }
        let text = self.rule("", ANY_TEXT);
        let times = if at_least_one { "+" } else { "*" };
        Ok(self.rule("", &format!("({one}){times} {text}")))
    }
}

/// A literal of the grammar; nothing for an empty text.
fn terminal(text: &str) -> String {
    if text.is_empty() { String::new() } else { literal(text) }
}

fn invalid(place: &Place, reason: &str) -> ConstraintError {
    ConstraintError::Invalid { what: WHAT, reason: format!("{reason}, at `{place}`") }
}

fn field<'a>(value: &'a Value, key: &str, place: &Place) -> Result<&'a Value, ConstraintError> {
    value.get(key).ok_or_else(|| invalid(place, &format!("`{key}` is missing")))
}

fn string<'a>(value: &'a Value, key: &str, place: &Place) -> Result<&'a str, ConstraintError> {
    field(value, key, place)?.as_str().ok_or_else(|| invalid(place, &format!("`{key}` is not a string")))
}

fn list<'a>(value: &'a Value, key: &str, place: &Place) -> Result<&'a [Value], ConstraintError> {
    match field(value, key, place)?.as_array() {
        Some(items) if !items.is_empty() => Ok(items),
        _ => Err(invalid(place, &format!("`{key}` is not a list with at least one element"))),
    }
}

fn strings<'a>(value: &'a Value, key: &str, place: &Place) -> Result<Vec<&'a str>, ConstraintError> {
    let texts = list(value, key, place)?.iter().map(|item| item.as_str().filter(|text| !text.is_empty()));
    texts.collect::<Option<_>>().ok_or_else(|| invalid(place, &format!("`{key}` has an element that is no text")))
}

fn flag(value: &Value, key: &str, place: &Place) -> Result<bool, ConstraintError> {
    match value.get(key) {
        None => Ok(false),
        Some(flag) => flag.as_bool().ok_or_else(|| invalid(place, &format!("`{key}` is not a boolean"))),
    }
}
