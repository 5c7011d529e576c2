//! One line of the log, in each of the formats.

use std::fmt;
use std::time::{SystemTime, UNIX_EPOCH};

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
    at: Time,
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
        Self { is_table, level: *metadata.level(), at: Time::now(), file, number: metadata.line().unwrap_or(0), text }
    }

    fn level_char(&self) -> char {
        match self.level {
            Level::ERROR => 'E',
            Level::WARN => 'W',
            _ => 'I',
        }
    }

    pub(super) fn write_default(&self, mut out: Writer<'_>) -> fmt::Result {
        let Time { month, day, hour, minute, second, micros, .. } = self.at;
        write!(out, "{}{month:02}{day:02} {hour:02}:{minute:02}:{second:02}.{micros:06} ", self.level_char())?;
        self.write_rest(out)
    }

    pub(super) fn write_iso8601(&self, mut out: Writer<'_>) -> fmt::Result {
        let Time { year, month, day, hour, minute, second, .. } = self.at;
        write!(out, "{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z {} ", self.level_char())?;
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
        let Time { year, month, day, hour, minute, second, micros } = self.at;
        write!(out, "{{\"time\":\"{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{micros:06}Z\"")?;
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

/// A time in UTC.
#[derive(Clone, Copy)]
struct Time {
    year: u64,
    month: u64,
    day: u64,
    hour: u64,
    minute: u64,
    second: u64,
    micros: u32,
}

impl Time {
    fn now() -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let (year, month, day) = date(since.as_secs() / 86_400);
        let seconds = since.as_secs() % 86_400;
        let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
        Self { year, month, day, hour, minute, second, micros: since.subsec_micros() }
    }
}

/// Year, month and day of the day number `days` since 1970-01-01 (Hinnant, "chrono-Compatible Low-Level Date Algorithms").
fn date(days: u64) -> (u64, u64, u64) {
    let shifted = days + 719_468;
    let day_of_era = shifted % 146_097;
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    (shifted / 146_097 * 400 + year_of_era + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_become_dates() {
        assert_eq!(date(0), (1970, 1, 1));
        assert_eq!(date(59), (1970, 3, 1));
        assert_eq!(date(19_782), (2024, 2, 29));
        assert_eq!(date(20_778), (2026, 11, 21));
    }

    #[test]
    fn a_json_line_is_one_line_for_any_text() {
        let text = Text {
            message: "a \"b\"\n\u{1}".into(),
            fields: vec![("id", Value::Text("x\\y".into())), ("n", Value::Bare("3".into()))],
            max_message: 0,
        };
        let line = Line { is_table: false, level: Level::INFO, at: Time::now(), file: "x.rs", number: 7, text };
        let mut written = String::new();
        line.write_json(Writer::new(&mut written)).unwrap();
        let end = r#""source":"x.rs:7","message":"a \"b\"\n\u0001","id":"x\\y","n":3}"#;
        assert!(written.starts_with("{\"time\":\"20") && written.ends_with(&format!("{end}\n")), "{written}");
    }
}
