//! Draws a view with ratatui.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Style, Stylize as _};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Cell, Paragraph, Row, Table};

use crate::view::{ModelView, ProcessView, View};

/// Draws a view; `with_keys` adds a line with the key bindings.
pub(crate) fn draw(frame: &mut Frame<'_>, view: &View, with_keys: bool) {
    let head = head(view);
    let num_models = view.models.len().max(1) as u16;
    let areas = Layout::vertical([
        Constraint::Length(head.len() as u16 + 1),
        Constraint::Length(num_models + 2),
        Constraint::Fill(1),
        Constraint::Length(u16::from(with_keys)),
    ]);
    let [top, models, processes, keys]: [Rect; 4] = areas.areas(frame.area());
    frame.render_widget(Paragraph::new(head), top);
    frame.render_widget(model_table(&view.models), models);
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
    if let Some(restarts) = view.world_restarts {
        first.push(Span::from(format!("  {restarts} world restart(s)")));
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

fn model_table(models: &[ModelView]) -> Table<'_> {
    let head = [
        "MODEL", "STATE", "STEPS/S", "STEP MS", "TOKENS/S", "PROMPT/S", "RUN", "QUEUE", "KV", "MEMORY", "SLOWEST",
        "RESTARTS",
    ];
    let widths = [14, 9, 7, 9, 8, 8, 5, 5, 14, 9, 11, 8].map(Constraint::Length);
    Table::new(models.iter().map(model_row), widths).header(Row::new(head).dim())
}

fn model_row(model: &ModelView) -> Row<'_> {
    let state = if model.is_ready { "ready" } else { "not ready" };
    let step_ms = model.step_time.map(|time| format!("{:.1}", time.as_secs_f64() * 1e3));
    let kv = 100 * model.kv_blocks_used / model.kv_blocks.max(1);
    let slowest = model.slowest.as_ref().map(|(rank, steps)| format!("rank {rank} -{steps}"));
    Row::new(vec![
        Cell::from(model.name.as_str()).bold(),
        Cell::from(state).style(state_style(state)),
        Cell::from(format!("{:.0}", model.steps_per_s)),
        or_dash(step_ms),
        Cell::from(format!("{:.0}", model.tokens_per_s)),
        Cell::from(format!("{:.0}", model.prompt_tokens_per_s)),
        Cell::from(model.num_running.to_string()),
        Cell::from(model.num_waiting.to_string()),
        Cell::from(format!("{kv}% of {}", model.kv_blocks)).style(if kv >= 90 { Color::Red } else { Color::Reset }),
        or_dash(model.memory_bytes.map(bytes)),
        or_dash(slowest),
        Cell::from(model.num_restarts.to_string()),
    ])
}

fn process_table(processes: &[ProcessView]) -> Table<'_> {
    let head = ["ROLE", "RANK", "PID", "NODE", "DEVICE", "MODEL", "STATE", "BEHIND", "MEMORY", "UPTIME"];
    let widths = [9, 5, 8, 20, 10, 14, 19, 7, 9, 8].map(Constraint::Length);
    Table::new(processes.iter().map(process_row), widths).header(Row::new(head).dim())
}

fn process_row(process: &ProcessView) -> Row<'_> {
    let ProcessView { status, step_lag } = process;
    Row::new(vec![
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
    ])
}

fn or_dash(text: Option<String>) -> Cell<'static> {
    Cell::from(text.unwrap_or_else(|| "-".to_owned()))
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
