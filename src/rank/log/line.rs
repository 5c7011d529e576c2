//! One line of the log, in each of the formats.

use std::fmt;

use jiff::Timestamp;
use jiff::civil::DateTime;
use jiff::tz::Offset;
use tracing::field::{Field, Visit};
use tracing::{Event, Level};
use tracing_subscriber::fmt::format::Writer;

use super::text::{self, Cut, Escaped, Json, Table};

/// Target of this program's own tables, whose line breaks are kept.
pub(crate) const TABLE_TARGET: &str = "table";

/// One line of the log.
pub(super) struct Line {
    is_table: bool,
    level: Level,
    at: DateTime,
    file: &'static str,
    number: u32,
    text: Text,
}

impl Line {
    pub(super) fn new(event: &Event<'_>) -> Self {
        let metadata = event.metadata();
        let file = metadata.file().and_then(|path| path.rsplit('/').next()).unwrap_or("?");
        let is_table = metadata.target() == TABLE_TARGET;
        let mut text = Text { message: String::new(), fields: Vec::new(), max_message: text::MAX_MESSAGE };
        if is_table {
            text.max_message = usize::MAX;
        }
        event.record(&mut text);
        Self { is_table, level: *metadata.level(), at: now(), file, number: metadata.line().unwrap_or(0), text }
    }

    fn level_char(&self) -> char {
        match self.level {
            Level::ERROR => 'E',
            Level::WARN => 'W',
            _ => 'I',
        }
    }

    pub(super) fn write_default(&self, mut out: Writer<'_>) -> fmt::Result {
        write!(out, "{}{} ", self.level_char(), self.at.strftime("%m%d %H:%M:%S.%6f"))?;
        self.write_rest(out)
    }

    pub(super) fn write_iso8601(&self, mut out: Writer<'_>) -> fmt::Result {
        write!(out, "{} {} ", self.at.strftime("%Y-%m-%dT%H:%M:%SZ"), self.level_char())?;
        self.write_rest(out)
    }

    fn write_rest(&self, mut out: Writer<'_>) -> fmt::Result {
        write!(out, "{} {}:{}] ", std::process::id(), self.file, self.number)?;
        if self.is_table {
            return writeln!(out, "{}", Table(&self.text.message));
        }
        write!(out, "\"{}", Escaped(&self.text.message))?;
        self.text.fields.iter().try_for_each(|(name, value)| write!(out, " {name}={value}"))?;
        writeln!(out, "\"")
    }

    pub(super) fn write_json(&self, mut out: Writer<'_>) -> fmt::Result {
        write!(out, "{{\"time\":\"{}\"", self.at.strftime("%Y-%m-%dT%H:%M:%S.%6fZ"))?;
        write!(out, ",\"level\":\"{}\",\"pid\":{}", self.level.as_str().to_lowercase(), std::process::id())?;
        write!(out, ",\"source\":\"{}:{}\",\"message\":{}", self.file, self.number, Json(&self.text.message))?;
        for (name, value) in &self.text.fields {
            write!(out, ",{}:", Json(name))?;
            match value {
                Value::Bare(text) => write!(out, "{text}")?,
                Value::Text(text) => write!(out, "{}", Json(text))?,
            }
        }
        writeln!(out, "}}")
    }
}

/// The value of a field. In JSON, numbers and booleans are not quoted.
enum Value {
    Bare(String),
    Text(String),
}

impl fmt::Display for Value {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Value::Bare(text) | Value::Text(text)) = self;
        write!(formatter, "{}", Escaped(text))
    }
}

/// The message of an event, and its other fields in order.
struct Text {
    message: String,
    fields: Vec<(&'static str, Value)>,
    max_message: usize,
}

impl Text {
    fn take(&mut self, field: &Field, value: Value) {
        match (field.name(), value) {
            ("message", Value::Bare(text) | Value::Text(text)) => self.message = text,
            (name, value) => self.fields.push((name, value)),
        }
    }

    fn take_text(&mut self, field: &Field, value: impl fmt::Display) {
        let max = if field.name() == "message" { self.max_message } else { text::max_field(field.name()) };
        self.take(field, Value::Text(Cut::display(value, max)));
    }
}

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.take_text(field, format_args!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.take_text(field, value);
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.take(field, Value::Bare(value.to_string()));
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.take(field, Value::Bare(value.to_string()));
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.take(field, Value::Bare(value.to_string()));
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        let value = if value.is_finite() { Value::Bare(format!("{value:.3}")) } else { Value::Text(value.to_string()) };
        self.take(field, value);
    }
}

/// The current time in UTC.
fn now() -> DateTime {
    Offset::UTC.to_datetime(Timestamp::now())
}

#[cfg(test)]
mod tests {
    use jiff::civil::date;

    use super::*;

    #[test]
    fn each_format_has_the_time_in_its_own_form() {
        let text = Text { message: "text".into(), fields: Vec::new(), max_message: 0 };
        let at = date(2024, 2, 29).at(3, 4, 5, 678_000);
        let line = Line { is_table: false, level: Level::WARN, at, file: "x.rs", number: 7, text };
        let mut written = [String::new(), String::new(), String::new()];
        let [default, iso8601, json] = &mut written;
        line.write_default(Writer::new(default)).unwrap();
        line.write_iso8601(Writer::new(iso8601)).unwrap();
        line.write_json(Writer::new(json)).unwrap();
        let expected =
            ["W0229 03:04:05.000678 ", "2024-02-29T03:04:05Z W ", "{\"time\":\"2024-02-29T03:04:05.000678Z\","];
        written.iter().zip(expected).for_each(|(line, begin)| assert!(line.starts_with(begin), "{line}"));
    }

    #[test]
    fn a_json_line_is_one_line_for_any_text() {
        let text = Text {
            message: "a \"b\"\n\u{1}".into(),
            fields: vec![("id", Value::Text("x\\y".into())), ("n", Value::Bare("3".into()))],
            max_message: 0,
        };
        let line = Line { is_table: false, level: Level::INFO, at: now(), file: "x.rs", number: 7, text };
        let mut written = String::new();
        line.write_json(Writer::new(&mut written)).unwrap();
        let end = r#""source":"x.rs:7","message":"a \"b\"\n\u0001","id":"x\\y","n":3}"#;
        assert!(written.starts_with("{\"time\":\"20") && written.ends_with(&format!("{end}\n")), "{written}");
    }
}
