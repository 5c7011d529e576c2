//! Log lines as Triton writes them: `I1121 06:57:12.185303 4711 server.rs:42] "text"`.

use std::fmt::{self, Write as _};
use std::fs::OpenOptions;
use std::path::Path;
use std::sync::Mutex;
use std::time::{SystemTime, UNIX_EPOCH};

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

/// Writes every later log line to `file`, or to standard error.
///
/// # Errors
/// When the file cannot be opened for appending.
pub fn start(verbose: u32, file: Option<&Path>) -> std::io::Result<()> {
    let level = match verbose {
        0 => "info",
        1 => "debug",
        _ => "trace",
    };
    let quiet = "h2=warn,hyper=warn,tonic=warn,tower=warn";
    let builder = tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::new(format!("{level},{quiet}")))
        .event_format(TritonFormat);
    match file {
        Some(path) => {
            let file = OpenOptions::new().create(true).append(true).open(path)?;
            builder.with_writer(Mutex::new(file)).init();
        }
        None => builder.with_writer(std::io::stderr).init(),
    }
    Ok(())
}

struct TritonFormat;

impl<S, N> FormatEvent<S, N> for TritonFormat
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, _: &FmtContext<'_, S, N>, mut out: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let metadata = event.metadata();
        let letter = match *metadata.level() {
            Level::ERROR => 'E',
            Level::WARN => 'W',
            _ => 'I',
        };
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let (month, day) = month_and_day(since.as_secs() / 86_400);
        let seconds = since.as_secs() % 86_400;
        let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
        let file = metadata.file().and_then(|path| path.rsplit('/').next()).unwrap_or("?");
        write!(out, "{letter}{month:02}{day:02} {hour:02}:{minute:02}:{second:02}.{:06} ", since.subsec_micros())?;
        write!(out, "{} {file}:{}] ", std::process::id(), metadata.line().unwrap_or(0))?;
        let mut text = Text::default();
        event.record(&mut text);
        writeln!(out, "\"{}{}\"", text.message, text.fields)
    }
}

/// The message, and other fields as ` key=value`.
#[derive(Default)]
struct Text {
    message: String,
    fields: String,
}

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, " {name}={value:?}"),
        };
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        let _ = match field.name() {
            "message" => write!(self.message, "{value}"),
            name => write!(self.fields, " {name}={value}"),
        };
    }
}

/// Month and day of a day counted from 1970-01-01, UTC (Hinnant, "chrono-Compatible Low-Level Date Algorithms").
fn month_and_day(days: u64) -> (u64, u64) {
    let day_of_era = (days + 719_468) % 146_097;
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    (if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 }, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_become_dates() {
        assert_eq!(month_and_day(0), (1, 1));
        assert_eq!(month_and_day(59), (3, 1));
        assert_eq!(month_and_day(19_782), (2, 29));
        assert_eq!(month_and_day(20_778), (11, 21));
    }
}
