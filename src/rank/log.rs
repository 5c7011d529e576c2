//! Log lines as Triton writes them, `I1121 06:57:12.185303 4711 server.rs:42] "text"`, and what of them is written.
//!
//! Clients may change what is written while the server runs (`v2/logging`), so the filter and the form are looked up
//! at each line.

use std::fmt::{self, Write as _};
use std::fs::OpenOptions;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

use front::{LogControl, LogFormat, LogOptions};
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::subscriber::Interest;
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::layer::{Context, Filter, Layer, SubscriberExt as _};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt as _;

/// Target of the lines that say how a request went.
const REQUEST_TARGET: &str = "request";

/// Crates of others that are only heard from warnings up.
const QUIET: [&str; 6] = ["h2", "hyper", "hyper_util", "tonic", "tower", "rustls"];

/// Which requests get a line of their own when they have ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum RequestLines {
    /// Those that generate text; all with `--log-verbose`.
    Auto,
    /// All.
    All,
    /// None.
    None,
}

/// What is written, and how.
#[derive(Debug, Default)]
struct Settings {
    info: AtomicBool,
    warning: AtomicBool,
    error: AtomicBool,
    verbose: AtomicU32,
    format: AtomicU8,
    requests: AtomicU8,
}

/// A log that has been started.
#[derive(Clone)]
pub struct Log(Arc<Settings>);

/// The log of this process, as it was started; clients may change it.
static STARTED: OnceLock<LogControl> = OnceLock::new();

/// What the front needs, so that clients can change what is logged.
pub fn control() -> LogControl {
    STARTED.get().cloned().unwrap_or_default()
}

impl Log {
    /// Writes every later log line to `file`, or to standard error.
    ///
    /// # Errors
    /// When the file cannot be opened for appending.
    pub fn start(options: &LogOptions, requests: RequestLines) -> std::io::Result<()> {
        let log = Log(Arc::default());
        log.0.requests.store(requests as u8, Relaxed);
        log.store(options);
        let layer = tracing_subscriber::fmt::layer().event_format(TritonFormat(log.0.clone()));
        // It would report a disk that is full to standard error, and panic when that is on the same disk.
        let layer = layer.log_internal_errors(false);
        let layer = match options.file.as_str() {
            "" => layer.with_writer(std::io::stderr).with_filter(log.clone()).boxed(),
            path => {
                let file = OpenOptions::new().create(true).append(true).open(Path::new(path))?;
                layer.with_writer(Mutex::new(file)).with_filter(log.clone()).boxed()
            }
        };
        tracing_subscriber::registry().with(layer).init();
        let follower = Arc::new(move |options: &LogOptions| log.set(options));
        let _ = STARTED.set(LogControl { options: options.clone(), follower: Some(follower) }); // A process starts one log.
        Ok(())
    }

    /// Follows changed options from the next line on. The file stays.
    fn set(&self, options: &LogOptions) {
        self.store(options);
        tracing::callsite::rebuild_interest_cache();
    }

    fn store(&self, options: &LogOptions) {
        self.0.info.store(options.info, Relaxed);
        self.0.warning.store(options.warning, Relaxed);
        self.0.error.store(options.error, Relaxed);
        self.0.verbose.store(options.verbose_level, Relaxed);
        self.0.format.store(options.format as u8, Relaxed);
    }

    fn writes(&self, metadata: &Metadata<'_>) -> bool {
        let (level, verbose) = (*metadata.level(), self.0.verbose.load(Relaxed));
        if metadata.target() == REQUEST_TARGET {
            let requests = self.0.requests.load(Relaxed);
            let is_asked = requests == RequestLines::All as u8 || level == Level::INFO || verbose > 0;
            return requests != RequestLines::None as u8 && is_asked && self.0.info.load(Relaxed);
        }
        let room = metadata.target().split("::").next().unwrap_or_default();
        if level > Level::WARN && QUIET.contains(&room) {
            return false;
        }
        match level {
            Level::ERROR => self.0.error.load(Relaxed),
            Level::WARN => self.0.warning.load(Relaxed),
            Level::INFO => self.0.info.load(Relaxed),
            Level::DEBUG => verbose >= 1,
            _ => verbose >= 2,
        }
    }
}

impl<S> Filter<S> for Log {
    fn enabled(&self, metadata: &Metadata<'_>, _: &Context<'_, S>) -> bool {
        self.writes(metadata)
    }

    /// Lines that are not written cost nothing, until the cache is built anew.
    fn callsite_enabled(&self, metadata: &'static Metadata<'static>) -> Interest {
        if self.writes(metadata) { Interest::always() } else { Interest::never() }
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(match self.0.verbose.load(Relaxed) {
            0 if self.0.requests.load(Relaxed) != RequestLines::All as u8 => LevelFilter::INFO,
            0 | 1 => LevelFilter::DEBUG,
            _ => LevelFilter::TRACE,
        })
    }
}

struct TritonFormat(Arc<Settings>);

impl<S, N> FormatEvent<S, N> for TritonFormat
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, _: &FmtContext<'_, S, N>, out: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let line = Line::new(event);
        match self.0.format.load(Relaxed) {
            format if format == LogFormat::Iso8601 as u8 => line.write_iso8601(out),
            format if format == LogFormat::Json as u8 => line.write_json(out),
            _ => line.write_default(out),
        }
    }
}

/// One line before it is written.
struct Line {
    level: Level,
    at: Time,
    file: &'static str,
    number: u32,
    text: Text,
}

impl Line {
    fn new(event: &Event<'_>) -> Self {
        let metadata = event.metadata();
        let file = metadata.file().and_then(|path| path.rsplit('/').next()).unwrap_or("?");
        let mut text = Text::default();
        event.record(&mut text);
        Self { level: *metadata.level(), at: Time::now(), file, number: metadata.line().unwrap_or(0), text }
    }

    fn letter(&self) -> char {
        match self.level {
            Level::ERROR => 'E',
            Level::WARN => 'W',
            _ => 'I',
        }
    }

    fn write_default(&self, mut out: Writer<'_>) -> fmt::Result {
        let Time { month, day, hour, minute, second, micros, .. } = self.at;
        write!(out, "{}{month:02}{day:02} {hour:02}:{minute:02}:{second:02}.{micros:06} ", self.letter())?;
        self.write_rest(out)
    }

    fn write_iso8601(&self, mut out: Writer<'_>) -> fmt::Result {
        let Time { year, month, day, hour, minute, second, .. } = self.at;
        write!(out, "{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z {} ", self.letter())?;
        self.write_rest(out)
    }

    fn write_rest(&self, mut out: Writer<'_>) -> fmt::Result {
        write!(out, "{} {}:{}] ", std::process::id(), self.file, self.number)?;
        if self.text.message.starts_with('\n') {
            return writeln!(out, "{}", self.text.message); // A table.
        }
        write!(out, "\"{}", self.text.message)?;
        self.text.fields.iter().try_for_each(|(name, value)| write!(out, " {name}={value}"))?;
        writeln!(out, "\"")
    }

    fn write_json(&self, mut out: Writer<'_>) -> fmt::Result {
        let Time { year, month, day, hour, minute, second, micros } = self.at;
        write!(out, "{{\"time\":\"{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{micros:06}Z\"")?;
        write!(out, ",\"level\":\"{}\",\"pid\":{}", self.level.as_str().to_lowercase(), std::process::id())?;
        write!(out, ",\"source\":\"{}:{}\",\"message\":{}", self.file, self.number, json_text(&self.text.message))?;
        for (name, value) in &self.text.fields {
            write!(out, ",{}:{}", json_text(name), value.json())?;
        }
        writeln!(out, "}}")
    }
}

/// A field's value; numbers and booleans are no strings in JSON.
enum Value {
    Bare(String),
    Text(String),
}

impl Value {
    fn json(&self) -> String {
        match self {
            Value::Bare(text) => text.clone(),
            Value::Text(text) => json_text(text),
        }
    }
}

impl fmt::Display for Value {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Value::Bare(text) | Value::Text(text)) = self;
        formatter.write_str(text)
    }
}

fn json_text(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len() + 2);
    quoted.push('"');
    for character in text.chars() {
        match character {
            '"' => quoted.push_str("\\\""),
            '\\' => quoted.push_str("\\\\"),
            '\n' => quoted.push_str("\\n"),
            control if control < ' ' => drop(write!(quoted, "\\u{:04x}", control as u32)), // A String takes it.
            other => quoted.push(other),
        }
    }
    quoted.push('"');
    quoted
}

/// The message, and the other fields in order.
#[derive(Default)]
struct Text {
    message: String,
    fields: Vec<(&'static str, Value)>,
}

impl Text {
    fn take(&mut self, field: &Field, value: Value) {
        match field.name() {
            "message" => self.message = value.to_string(),
            name => self.fields.push((name, value)),
        }
    }
}

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.take(field, Value::Text(format!("{value:?}")));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.take(field, Value::Text(value.to_owned()));
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

/// A moment in UTC.
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

/// Year, month and day of a day counted from 1970-01-01, UTC (Hinnant, "chrono-Compatible Low-Level Date Algorithms").
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
    fn a_line_is_one_line_of_json_whatever_it_says() {
        let text = Text {
            message: "a \"b\"\n\u{1}".into(),
            fields: vec![("id", Value::Text("x\\y".into())), ("n", Value::Bare("3".into()))],
        };
        let line = Line { level: Level::INFO, at: Time::now(), file: "x.rs", number: 7, text };
        let mut written = String::new();
        line.write_json(Writer::new(&mut written)).unwrap();
        let end = r#""source":"x.rs:7","message":"a \"b\"\n\u0001","id":"x\\y","n":3}"#;
        assert!(written.starts_with("{\"time\":\"20") && written.ends_with(&format!("{end}\n")), "{written}");
    }
}
