//! Draws a view with ratatui.

use std::time::Duration;

use launcher::status::ProcessStatus;
use ratatui::Frame;
use ratatui::layout::Constraint::{self, Fill, Length};
use ratatui::layout::{Layout, Rect};
use ratatui::style::{Color, Style, Stylize as _};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Cell, Paragraph, Row, Table};

use crate::view::{CacheView, Latency, ModelView, ProcessView, View};

/// In wider terminals, names would be far from their figures.
const MAX_WIDTH: u16 = 100;

/// Draws a view; `with_keys` adds a line with the key bindings.
pub(crate) fn draw(frame: &mut Frame<'_>, view: &View, with_keys: bool) {
    let head = head(view);
    let num_models = view.models.len().max(1) as u16;
    let num_caches = view.models.iter().filter(|model| model.cache.is_some()).count() as u16;
    let areas = Layout::vertical([
        Length(head.len() as u16 + 1),
        Length(num_models + 2),
        Length(num_models + 2),
        Length(if num_caches > 0 { num_caches + 2 } else { 0 }),
        Fill(1),
        Length(u16::from(with_keys)),
    ]);
    let [top, models, latencies, caches, processes, keys]: [Rect; 6] =
        areas.areas(Rect { width: frame.area().width.min(MAX_WIDTH), ..frame.area() });
    frame.render_widget(Paragraph::new(head), top);
    frame.render_widget(model_table(&view.models), models);
    frame.render_widget(latency_table(&view.models), latencies);
    frame.render_widget(cache_table(&view.models), caches);
    frame.render_widget(process_table(&view.processes), processes);
    if with_keys {
        frame.render_widget(Paragraph::new("q quits").dim(), keys);
    }
}

fn head(view: &View) -> Vec<Line<'_>> {
    let mut first = vec![Span::from("trireme ").bold(), Span::from(view.server.as_str())];
    if !view.state.is_empty() {
        first.push(Span::from("  "));
        first.push(Span::styled(view.state.as_str(), state_style(&view.state)));
    }
    if let Some(restarts) = &view.world_restarts {
        first.push(Span::from(format!("  {restarts}")));
    }
    let mut lines = vec![Line::from(first)];
    lines.extend(view.trouble.as_ref().map(|trouble| Line::from(trouble.as_str()).red()));
    lines.extend(view.last_failure.as_ref().map(|failure| Line::from(format!("last failure: {failure}")).yellow()));
    lines
}

fn state_style(state: &str) -> Style {
    match state {
        "ready" | "running" => Style::new().fg(Color::Green),
        "loading" | "waiting" | "ending" => Style::new().fg(Color::Yellow),
        _ => Style::new().fg(Color::Red),
    }
}

/// What models do now. It fits 80 columns.
fn model_table(models: &[ModelView]) -> Table<'_> {
    let head = ["MODEL", "STATE", "TOKENS/S", "PROMPT/S", "STEPS/S", "REQ/S", "RUN", "QUEUE", "KV", "FAILED"];
    let widths =
        [Fill(1), Length(9), Length(8), Length(8), Length(7), Length(6), Length(4), Length(5), Length(4), Length(6)];
    Table::new(models.iter().map(model_row), widths).header(Row::new(head).dim())
}

fn model_row(model: &ModelView) -> Row<'_> {
    let state = if model.is_ready { "ready" } else { "not ready" };
    let kv = 100 * model.kv_blocks_used / model.kv_blocks.max(1);
    Row::new(vec![
        Cell::from(model.name.as_str()).bold(),
        Cell::from(state).style(state_style(state)),
        Cell::from(format!("{:.0}", model.tokens_per_s)),
        Cell::from(format!("{:.0}", model.prompt_tokens_per_s)),
        Cell::from(format!("{:.0}", model.steps_per_s)),
        Cell::from(format!("{:.1}", model.requests_per_s)),
        Cell::from(model.num_running.to_string()),
        Cell::from(model.num_waiting.to_string()),
        Cell::from(format!("{kv}%")).style(if kv >= 90 { Color::Red } else { Color::Reset }),
        Cell::from(model.num_failed.to_string()).style(if model.num_failed > 0 { Color::Red } else { Color::Reset }),
    ])
}

/// How long models take, what they hold, and what they lost. It fits 80 columns.
fn latency_table(models: &[ModelView]) -> Table<'_> {
    let head = ["MODEL", "STEP", "TTFT 50%", "99%", "ITL 50%", "99%", "MEMORY", "SLOWEST", "RESTARTS"];
    let widths = [Fill(1), Length(6), Length(8), Length(6), Length(7), Length(6), Length(9), Length(9), Length(8)];
    Table::new(models.iter().map(latency_row), widths).header(Row::new(head).dim())
}

fn latency_row(model: &ModelView) -> Row<'_> {
    let slowest = model.slowest.as_ref().map(|(rank, steps)| format!("rank {rank} -{steps}"));
    let [p50, p99]: [fn(Latency) -> String; 2] = [|latency| time(latency.p50), |latency| time(latency.p99)];
    Row::new(vec![
        Cell::from(model.name.as_str()).bold(),
        or_dash(model.step_time.map(time)),
        or_dash(model.first_token.map(p50)),
        or_dash(model.first_token.map(p99)),
        or_dash(model.inter_token.map(p50)),
        or_dash(model.inter_token.map(p99)),
        or_dash(model.memory_bytes.map(bytes)),
        or_dash(slowest),
        Cell::from(model.num_restarts.to_string()),
    ])
}

/// Where the prompt tokens were that models with host memory did not compute. It fits 80 columns.
fn cache_table(models: &[ModelView]) -> Table<'_> {
    let head = ["MODEL", "CACHED", "DEVICE/S", "HOST/S", "DISK/S", "SAVED/S", "HOST MEMORY", "OF"];
    let widths = [Fill(1), Length(6), Length(8), Length(8), Length(8), Length(7), Length(11), Length(10)];
    let rows = models.iter().filter_map(|model| Some(cache_row(&model.name, model.cache?)));
    Table::new(rows, widths).header(Row::new(head).dim())
}

fn cache_row(name: &str, cache: CacheView) -> Row<'_> {
    Row::new(vec![
        Cell::from(name).bold(),
        or_dash(cache.hit_share.map(|share| format!("{:.1}%", 100.0 * share))),
        Cell::from(format!("{:.0}", cache.device_tokens_per_s)),
        Cell::from(format!("{:.0}", cache.host_tokens_per_s)),
        Cell::from(format!("{:.0}", cache.disk_tokens_per_s)),
        Cell::from(time(cache.saved_per_s)),
        Cell::from(bytes(cache.host_used_bytes)),
        Cell::from(bytes(cache.host_limit_bytes)),
    ])
}

/// Columns whose processes all have one value, or none, are left out.
fn process_table(processes: &[ProcessView]) -> Table<'_> {
    let has_several = |value: fn(&ProcessStatus) -> &str| {
        let mut values = processes.iter().map(|process| value(&process.status)).filter(|value| !value.is_empty());
        values.next().is_some_and(|first| values.any(|value| value != first))
    };
    let shows_node = has_several(|status| status.node.as_str());
    let shows_model = has_several(|status| status.model.as_deref().unwrap_or_default());
    let is_shown = |name: &str| (name != "NODE" || shows_node) && (name != "MODEL" || shows_model);
    let columns = PROCESS_COLUMNS.iter().filter(|(name, _)| is_shown(name));
    let rows = processes.iter().map(move |process| {
        let cells = process_cells(process).into_iter().zip(PROCESS_COLUMNS);
        Row::new(cells.filter(|(_, (name, _))| is_shown(name)).map(|(cell, _)| cell).collect::<Vec<_>>())
    });
    let head = Row::new(columns.clone().map(|(name, _)| *name)).dim();
    Table::new(rows, columns.map(|(_, width)| *width)).header(head)
}

/// The columns of a process, with their widths.
const PROCESS_COLUMNS: [(&str, Constraint); 10] = [
    ("ROLE", Length(9)),
    ("RANK", Length(4)),
    ("PID", Length(8)),
    ("NODE", Fill(1)),
    ("DEVICE", Length(8)),
    ("MODEL", Fill(1)),
    ("STATE", Length(12)),
    ("BEHIND", Length(6)),
    ("MEMORY", Length(9)),
    ("UPTIME", Length(6)),
];

fn process_cells(process: &ProcessView) -> [Cell<'_>; 10] {
    let ProcessView { status, step_lag } = process;
    [
        Cell::from(status.role),
        or_dash(status.rank.map(|rank| rank.to_string())),
        Cell::from(status.pid.to_string()),
        Cell::from(status.node.as_str()),
        or_dash(status.device.clone()),
        or_dash(status.model.clone()),
        Cell::from(status.state.as_str()).style(state_style(&status.state)),
        or_dash(step_lag.map(|steps| steps.to_string())),
        or_dash(status.memory_bytes.map(bytes)),
        or_dash(status.uptime_secs.map(uptime)),
    ]
}

fn or_dash(text: Option<String>) -> Cell<'static> {
    Cell::from(text.unwrap_or_else(|| "-".to_owned()))
}

/// `850us`, `12.3ms`, `250ms`, `1.25s`.
fn time(time: Duration) -> String {
    match time.as_secs_f64() {
        seconds if seconds < 1e-3 => format!("{:.0}us", seconds * 1e6),
        seconds if seconds < 0.1 => format!("{:.1}ms", seconds * 1e3),
        seconds if seconds < 1.0 => format!("{:.0}ms", seconds * 1e3),
        seconds => format!("{seconds:.2}s"),
    }
}

/// `512 MiB`, `3.2 GiB`.
fn bytes(count: u64) -> String {
    if count < 1 << 30 {
        format!("{} MiB", count >> 20)
    } else {
        format!("{:.1} GiB", count as f64 / (1u64 << 30) as f64)
    }
}

/// `59s`, `3m07s`, `2h05m`, `4d02h`.
fn uptime(secs: u64) -> String {
    match secs {
        0..60 => format!("{secs}s"),
        60..3600 => format!("{}m{:02}s", secs / 60, secs % 60),
        3600..86_400 => format!("{}h{:02}m", secs / 3600, secs / 60 % 60),
        _ => format!("{}d{:02}h", secs / 86_400, secs / 3600 % 24),
    }
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::*;

    fn worker(rank: u32, node: &str) -> ProcessView {
        let status = ProcessStatus {
            role: "worker",
            rank: Some(rank),
            pid: 1_234_567,
            node: node.into(),
            device: Some("cuda:0".into()),
            model: Some("tensorrt_llm".into()),
            state: "ready".into(),
            memory_bytes: Some(70 << 30),
            uptime_secs: Some(90_000),
        };
        ProcessView { status, step_lag: Some(2) }
    }

    fn lines(view: &View) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(80, 24)).unwrap();
        terminal.draw(|frame| draw(frame, view, true)).unwrap();
        let buffer = terminal.backend().buffer();
        let line = |row| (0..80).map(|column| buffer[(column, row)].symbol()).collect::<String>();
        (0..24).map(|row| line(row).trim_end().to_owned()).collect()
    }

    #[test]
    fn eighty_columns_hold_every_figure() {
        let latency = |ms| Some(Latency { p50: Duration::from_millis(ms), p99: Duration::from_millis(10 * ms) });
        let model = ModelView {
            name: "tensorrt_llm".into(),
            is_ready: true,
            steps_per_s: 812.0,
            step_time: Some(Duration::from_micros(3800)),
            tokens_per_s: 123_456.0,
            prompt_tokens_per_s: 654_321.0,
            requests_per_s: 87.5,
            num_failed: 3,
            first_token: latency(250),
            inter_token: latency(12),
            num_running: 256,
            num_waiting: 1024,
            kv_blocks_used: 60,
            kv_blocks: 80,
            memory_bytes: Some(140 << 30),
            cache: Some(CacheView {
                hit_share: Some(0.987),
                device_tokens_per_s: 456_789.0,
                host_tokens_per_s: 123_456.0,
                disk_tokens_per_s: 98_765.0,
                saved_per_s: Duration::from_millis(12_300),
                host_used_bytes: 511 << 30,
                host_limit_bytes: 1023 << 30,
            }),
            num_restarts: 1,
            slowest: Some(("1".into(), 2)),
        };
        let mut view = View { models: vec![model], processes: vec![worker(0, "a"), worker(1, "a")], ..View::default() };
        let shown = lines(&view).join("\n");
        for figures in [
            "tensorrt_llm ready     123456   654321   812     87.5   256  1024  75%  3",
            "tensorrt_llm 3.8ms 250ms 2.50s 12.0ms 120ms 140.0 GiB rank 1 -2 1",
            "tensorrt_llm 98.7% 456789 123456 98765 12.30s 511.0 GiB 1023.0 GiB",
        ] {
            let words: Vec<&str> = figures.split_whitespace().collect();
            let has = |line: &str| line.split_whitespace().collect::<Vec<_>>() == words;
            assert!(shown.lines().any(has), "{figures}\n{shown}");
        }
        assert!(shown.contains("1d01h") && !shown.contains("NODE"), "{shown}");
        view.processes[1] = worker(1, "node-b");
        view.models[0].cache = None;
        let shown = lines(&view).join("\n");
        assert!(!shown.contains("HOST MEMORY"), "{shown}");
        assert!(shown.contains("NODE") && shown.contains("node-b") && shown.contains("1d01h"), "{shown}");
    }
}
