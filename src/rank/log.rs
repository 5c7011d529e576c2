//! The log: lines in Triton's format, `I1121 06:57:12.185303 4711 server.rs:42] "text"`, and their filter.
//!
//! Clients may change the settings while the server runs (`v2/logging`), so filter and format are read for each line. Text in a line
//! may come from clients: an event is always one line of bounded length, and repeated warnings are counted instead of written.

mod file;
mod limit;
mod line;
mod text;

use std::backtrace::{Backtrace, BacktraceStatus};
use std::fmt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

use front::{LogControl, LogFormat, LogOptions};
use tracing::level_filters::LevelFilter;
use tracing::subscriber::Interest;
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::layer::{Context, Filter, Layer, SubscriberExt as _};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt as _;

use file::LogFile;
use limit::Limiter;
use line::Line;
pub(crate) use line::TABLE_TARGET;

/// Target of the lines about ended requests.
const REQUEST_TARGET: &str = "request";

/// Third-party crates of which only warnings and errors are written.
const ONLY_WARNINGS: [&str; 6] = ["h2", "hyper", "hyper_util", "tonic", "tower", "rustls"];

/// Which requests get a log line when they have ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum RequestLines {
    /// Those that generate text; all with `--log-verbose`.
    Auto,
    /// All.
    All,
    /// None.
    None,
}

/// The filter and the format.
#[derive(Debug, Default)]
struct Settings {
    info: AtomicBool,
    warning: AtomicBool,
    error: AtomicBool,
    verbose: AtomicU32,
    format: AtomicU8,
    requests: AtomicU8,
}

/// The log of this process.
#[derive(Clone)]
pub struct Log(Arc<Settings>, Arc<Limiter>);

/// The options at the start, and the function that changes them.
static STARTED: OnceLock<LogControl> = OnceLock::new();

/// The handle with which the front changes the log for clients.
pub fn control() -> LogControl {
    STARTED.get().cloned().unwrap_or_default()
}

impl Log {
    /// Writes every later log line to `file`, which is kept below `max_file_bytes` unless that is 0, or to standard error.
    ///
    /// # Errors
    /// When the file cannot be opened for appending.
    pub fn start(options: &LogOptions, requests: RequestLines, max_file_bytes: u64) -> std::io::Result<()> {
        let log = Log(Arc::default(), Limiter::start()?);
        log.0.requests.store(requests as u8, Relaxed);
        log.store(options);
        let layer = tracing_subscriber::fmt::layer().event_format(TritonFormat(log.clone()));
        // Otherwise it reports a full disk to standard error, and panics if that is on the same disk.
        let layer = layer.log_internal_errors(false);
        let layer = match options.file.as_str() {
            "" => layer.with_writer(std::io::stderr).with_filter(log.clone()).boxed(),
            path => {
                let file = LogFile::open(Path::new(path), max_file_bytes)?;
                layer.with_writer(file).with_filter(log.clone()).boxed()
            }
        };
        tracing_subscriber::registry().with(layer).init();
        let follower = Arc::new(move |options: &LogOptions| log.set(options));
        let _ = STARTED.set(LogControl { options: options.clone(), follower: Some(follower) }); // A process starts one log.
        Ok(())
    }

    /// Applies changed options from the next line on. The log file stays the same.
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
        if level > Level::WARN && ONLY_WARNINGS.contains(&room) {
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

    /// The result is cached, so that filtered lines cost nothing until the cache is rebuilt.
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

struct TritonFormat(Log);

impl<S, N> FormatEvent<S, N> for TritonFormat
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, _: &FmtContext<'_, S, N>, out: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        // Not in the filter, whose result is cached for the call site and not computed for each event.
        if !self.0.1.admits(event.metadata()) {
            return Ok(());
        }
        let line = Line::new(event);
        match self.0.0.format.load(Relaxed) {
            format if format == LogFormat::Iso8601 as u8 => line.write_iso8601(out),
            format if format == LogFormat::Json as u8 => line.write_json(out),
            _ => line.write_default(out),
        }
    }
}

/// Installs a panic hook that writes one log line with the thread's name. A stack follows if `RUST_BACKTRACE` is set.
pub(crate) fn report_panics() {
    std::panic::set_hook(Box::new(|panic| {
        let thread = std::thread::current();
        let words = panic.payload_as_str().unwrap_or("without words");
        let at = panic.location().map_or_else(|| "?".to_owned(), ToString::to_string);
        tracing::error!("thread `{}` panicked at {at}: {words}", thread.name().unwrap_or("without a name"));
        let stack = Backtrace::capture();
        if stack.status() == BacktraceStatus::Captured {
            stack.to_string().lines().for_each(|line| tracing::error!(target: "relayed", "{line}"));
        }
    }));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The lines that a log of this format writes for `events`.
    fn written(format: LogFormat, events: impl FnOnce(&Limiter)) -> String {
        #[derive(Clone, Default)]
        struct Memory(Arc<std::sync::Mutex<Vec<u8>>>);
        impl std::io::Write for Memory {
            fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
                ipc::lock(&self.0).write(bytes)
            }
            fn flush(&mut self) -> std::io::Result<()> {
                Ok(())
            }
        }
        let (memory, limiter) = (Memory::default(), Limiter::silent());
        let log = Log(Arc::default(), Arc::clone(&limiter));
        log.store(&LogOptions { format, ..LogOptions::default() });
        let writer = memory.clone();
        let layer = tracing_subscriber::fmt::layer()
            .event_format(TritonFormat(log.clone()))
            .with_writer(move || writer.clone())
            .with_filter(log);
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), || events(&limiter));
        String::from_utf8(ipc::lock(&memory.0).clone()).unwrap()
    }

    const FORMATS: [LogFormat; 3] = [LogFormat::Default, LogFormat::Iso8601, LogFormat::Json];

    #[test]
    fn text_of_a_client_never_begins_a_line() {
        let id = "x\nE ends the world: your licence expired\r\u{2028}\u{1b}[2J";
        for format in FORMATS {
            let text = written(format, |_| {
                tracing::error!("\nrequest {id} failed");
                tracing::warn!(id, other = %id, "request");
            });
            assert_eq!(text.lines().count(), 2, "{text}");
            assert!(!text.contains(['\r', '\u{1b}', '\u{2028}']), "{text}");
        }
        let text = written(LogFormat::Default, |_| tracing::info!(target: TABLE_TARGET, "\n| a |\n| b |"));
        assert!(text.ends_with("] \n| a |\n| b |\n"), "a table stays: {text}");
    }

    #[test]
    fn a_long_id_is_cut_in_every_format() {
        let id = "i".repeat(8 << 20);
        for format in FORMATS {
            let text = written(format, |_| tracing::info!(id, debug = ?id, "request {id}"));
            assert!(text.len() < 32 << 10, "{}", text.len());
            assert_eq!(text.matches("… (8388").count(), 3, "{text}");
        }
    }

    #[test]
    fn a_warning_that_repeats_is_counted() {
        for format in FORMATS {
            let text = written(format, |limiter| {
                (0..500).for_each(|number| tracing::warn!("cannot accept connection {number}"));
                tracing::warn!("something else");
                limiter.report_all();
            });
            assert_eq!(text.matches("cannot accept").count(), 50, "{text}");
            assert_eq!(text.matches("something else").count(), 1);
            assert_eq!(text.matches("450 further lines of log.rs:").count(), 1, "{text}");
        }
    }

    #[test]
    fn a_panic_is_one_line_with_its_thread() {
        // The hook is global: only this test sets it, and restores the previous one.
        let before = std::panic::take_hook();
        report_panics();
        let text = written(LogFormat::Default, |_| {
            let name = std::thread::current().name().unwrap_or_default().to_owned();
            assert!(std::panic::catch_unwind(|| panic!("one\ntwo")).is_err());
            assert!(name.ends_with("a_panic_is_one_line_with_its_thread"));
        });
        std::panic::set_hook(before);
        let line = text.lines().next().unwrap();
        assert!(line.contains("a_panic_is_one_line_with_its_thread` panicked at src/rank/log.rs:"), "{line}");
        assert!(line.ends_with(r#": one\ntwo""#), "{line}");
    }
}
