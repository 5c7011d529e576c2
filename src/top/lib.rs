//! `trireme top`: shows the current state of a world in a terminal, from the metrics of rank 0 and `/proc`.
//!
//! [`TopArgs`] is the command line, [`run`] executes it. A [`Snapshot`] holds the metrics and processes of one moment. A [`View`]
//! holds the figures to draw, with rates and step times from two snapshots. Processes are known for worlds that `launch`
//! started on this machine; for another server there are only metrics.
//!
//! ```
//! use launcher::scrape::Metrics;
//! use std::time::{Duration, Instant};
//! use top::{Snapshot, View};
//!
//! let snapshot = |steps, at| Snapshot {
//!     at,
//!     server: "localhost:8002".into(),
//!     world: None,
//!     metrics: Ok(Metrics::parse(&format!("trireme_llm_ready{{model=\"m\"}} 1\ntrireme_llm_steps_total{{model=\"m\"}} {steps}\n"))),
//! };
//! let then = Instant::now();
//! let view = View::of(&snapshot(10, then), &snapshot(30, then + Duration::from_secs(2)));
//! assert_eq!(view.models[0].steps_per_s, 10.0);
//! ```
#![forbid(unsafe_code)]

mod draw;
mod snapshot;
mod view;

use std::io::{self, IsTerminal as _};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use clap::Args;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::{DefaultTerminal, Terminal};

pub use snapshot::{Snapshot, Source};
pub use view::{CacheView, Latency, ModelView, ProcessView, View};

/// Shortest interval between two snapshots, in seconds.
const MIN_INTERVAL: f64 = 0.1;

/// Lines and columns of a printed frame.
const PRINTED_HEIGHT: u16 = 200;
const PRINTED_WIDTH: u16 = 100;

/// `trireme top`
#[derive(Debug, Clone, Args)]
pub struct TopArgs {
    /// Host of rank 0; a world on this machine is found without it
    #[arg(short, long, value_name = "HOST")]
    pub url: Option<String>,
    /// Port of the metrics [default: that of the world on this machine, else 8002]
    #[arg(short, long, value_name = "PORT")]
    pub metrics_port: Option<u16>,
    /// HTTP port of the world to show, if several run on this machine
    #[arg(long, value_name = "PORT")]
    pub http_port: Option<u16>,
    /// Seconds between two updates
    #[arg(short, long, default_value_t = 1.0)]
    pub interval: f64,
    /// Print one frame and exit; the exit code is 0 if the server answers
    #[arg(long)]
    pub once: bool,
}

/// Shows a world until `q`, Esc or Ctrl-C; or prints one frame.
///
/// # Errors
/// When a flag is invalid, the terminal cannot be used, or, with `--once`, no server answers.
pub fn run(args: &TopArgs) -> Result<()> {
    if !args.interval.is_finite() || args.interval < MIN_INTERVAL {
        bail!("--interval={} is too short: {MIN_INTERVAL} s is the least", args.interval);
    }
    let interval = Duration::from_secs_f64(args.interval);
    let source = Source { host: args.url.clone(), metrics_port: args.metrics_port, http_port: args.http_port };
    if args.once {
        return once(&source, interval);
    }
    if !io::stdout().is_terminal() {
        bail!("standard output is no terminal; print one frame with --once");
    }
    let mut terminal = ratatui::try_init().context("cannot use the terminal")?;
    let result = live(&mut terminal, source, interval);
    ratatui::restore();
    result
}

fn once(source: &Source, interval: Duration) -> Result<()> {
    let before = source.snapshot()?;
    thread::sleep(interval);
    let view = View::of(&before, &source.snapshot()?);
    print!("{}", frame(&view)?);
    match view.trouble {
        Some(trouble) => bail!("{trouble}"),
        None => Ok(()),
    }
}

/// A view as lines of text.
fn frame(view: &View) -> Result<String> {
    let mut terminal = Terminal::new(TestBackend::new(PRINTED_WIDTH, PRINTED_HEIGHT))?;
    terminal.draw(|frame| draw::draw(frame, view, false))?;
    let buffer = terminal.backend().buffer();
    let line = |row| (0..PRINTED_WIDTH).map(|column| buffer[(column, row)].symbol()).collect::<String>();
    let lines: Vec<String> = (0..PRINTED_HEIGHT).map(|row| line(row).trim_end().to_owned()).collect();
    let num_lines = lines.iter().rposition(|line| !line.is_empty()).map_or(0, |last| last + 1);
    Ok(lines[..num_lines].iter().map(|line| format!("{line}\n")).collect())
}

/// Redraws until the user quits. A thread of its own takes the snapshots, so that keys work while a server does not respond.
fn live(terminal: &mut DefaultTerminal, source: Source, interval: Duration) -> Result<()> {
    let (sender, snapshots) = mpsc::sync_channel(1);
    thread::Builder::new().name("snapshots".into()).spawn(move || {
        while sender.send(source.snapshot()).is_ok() {
            thread::sleep(interval);
        }
    })?;
    let mut last: Option<Snapshot> = None;
    let mut view = View::default();
    loop {
        terminal.draw(|frame| draw::draw(frame, &view, true))?;
        if wait_for_quit(Duration::from_millis(100))? {
            return Ok(());
        }
        while let Ok(snapshot) = snapshots.try_recv() {
            let snapshot = snapshot?;
            view = View::of(last.as_ref().unwrap_or(&snapshot), &snapshot);
            last = Some(snapshot);
        }
    }
}

/// Waits up to `timeout` for a key; whether it was a key that quits.
fn wait_for_quit(timeout: Duration) -> Result<bool> {
    if !event::poll(timeout)? {
        return Ok(false);
    }
    let Event::Key(key) = event::read()? else { return Ok(false) };
    let is_control_c = key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
    Ok(key.kind == KeyEventKind::Press && (is_control_c || matches!(key.code, KeyCode::Char('q') | KeyCode::Esc)))
}
