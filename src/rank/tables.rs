//! Tables of backends, models and options in Triton's format, written to the log before the server accepts requests.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serving::{ControlMode, ModelIndexEntry, ModelState, Server, ServerConfig};

use crate::args::RankArgs;
use crate::log::TABLE_TARGET;

/// Writes all tables. `config` is the configuration of `server`.
pub(crate) fn write(args: &RankArgs, config: &ServerConfig, server: &Server) {
    let index: Vec<ModelIndexEntry> = server.repository_index(false).into_iter().filter(was_tried).collect();
    let no_agents: [[String; 2]; 0] = [];
    let tables = [
        table(["Repository Agent", "Path"], &no_agents),
        table(["Backend", "Path", "Config"], &backends(args, server, &index)),
        table(["Model", "Version", "Status"], &models(&index)),
        table(["Option", "Value"], &options(args, config, server)),
    ];
    tables.iter().for_each(|table| tracing::info!(target: TABLE_TARGET, "\n{table}"));
}

fn was_tried(entry: &ModelIndexEntry) -> bool {
    entry.state != ModelState::Unknown
}

/// The backends that serve a model, with their settings from the command line. All of them are part of this program.
fn backends(args: &RankArgs, server: &Server, index: &[ModelIndexEntry]) -> Vec<[String; 3]> {
    let path = std::env::current_exe().map_or_else(|_| "trireme".to_owned(), |path| path.display().to_string());
    let configs = index.iter().filter_map(|entry| server.model_config(&entry.name, &entry.version).ok());
    let mut names: Vec<String> = configs.map(|config| config.backend.clone()).filter(|name| !name.is_empty()).collect();
    names.sort_unstable();
    names.dedup();
    names.into_iter().map(|name| [name.clone(), path.clone(), command_line(args, &name)]).collect()
}

/// The settings of a backend as JSON: those for all backends, overridden by its own.
fn command_line(args: &RankArgs, backend: &str) -> String {
    let completes = !args.disable_auto_complete_config && !args.strict_model_config;
    let mut settings = BTreeMap::from([("auto-complete-config", completes.to_string())]);
    for setting in &args.backend_config {
        let Some((name, (key, value))) =
            setting.split_once(',').and_then(|(name, setting)| Some((name, setting.split_once('=')?)))
        else {
            continue;
        };
        if name.is_empty() || name == backend {
            settings.insert(key, value.to_owned());
        }
    }
    serde_json::json!({ "cmdline": settings }).to_string()
}

fn models(index: &[ModelIndexEntry]) -> Vec<[String; 3]> {
    let row = |entry: &ModelIndexEntry| {
        let version = if entry.version.is_empty() { "-".to_owned() } else { entry.version.clone() };
        let reason = entry.reason.split_whitespace().collect::<Vec<_>>().join(" ");
        let status = match reason.as_str() {
            "" => entry.state.name().to_owned(),
            reason => format!("{}: {reason}", entry.state.name()),
        };
        [entry.name.clone(), version, status]
    };
    index.iter().map(row).collect()
}

fn options(args: &RankArgs, config: &ServerConfig, server: &Server) -> Vec<[String; 2]> {
    let metadata = server.server_metadata();
    let bit = |value: bool| u8::from(value).to_string();
    let mut rows = vec![
        ("server_id".to_owned(), metadata.name),
        ("server_version".to_owned(), metadata.version),
        ("server_extensions".to_owned(), metadata.extensions.join(" ")),
    ];
    for (number, path) in config.repositories.iter().enumerate() {
        rows.push((format!("model_repository_path[{number}]"), path.display().to_string()));
    }
    rows.push(("model_control_mode".to_owned(), control_mode(&config.control_mode).to_owned()));
    if let ControlMode::Explicit { load } = &config.control_mode {
        let row = |(number, name): (usize, &String)| (format!("startup_models_{number}"), name.clone());
        rows.extend(load.iter().enumerate().map(row));
    }
    let strict_config = args.disable_auto_complete_config || args.strict_model_config;
    rows.extend([
        ("strict_model_config".to_owned(), bit(strict_config)),
        ("strict_readiness".to_owned(), bit(config.strict_readiness)),
        ("exit_timeout".to_owned(), args.exit_timeout_secs.to_string()),
        ("cache_enabled".to_owned(), bit(config.response_cache_bytes > 0)),
    ]);
    rows.into_iter().map(|(option, value)| [option, value]).collect()
}

fn control_mode(mode: &ControlMode) -> &'static str {
    match mode {
        ControlMode::None => "MODE_NONE",
        ControlMode::Explicit { .. } => "MODE_EXPLICIT",
        ControlMode::Poll { .. } => "MODE_POLL",
    }
}

/// A table with rules, whose columns are as wide as their widest cells.
fn table<const N: usize>(heads: [&str; N], rows: &[[String; N]]) -> String {
    let width = |column: usize| {
        let cells = rows.iter().map(|row| row[column].chars().count());
        cells.chain([heads[column].chars().count()]).max().unwrap_or(0)
    };
    let widths: [usize; N] = std::array::from_fn(width);
    let rule: String = widths.iter().map(|width| format!("+{}", "-".repeat(width + 2))).collect::<String>() + "+\n";
    let line = |cells: &[&str]| {
        let mut text = String::new();
        for (cell, width) in cells.iter().zip(widths) {
            let _ = write!(text, "| {cell:width$} "); // Writes to a String do not fail.
        }
        text + "|\n"
    };
    let body: String = rows.iter().map(|row| line(&row.each_ref().map(String::as_str))).collect();
    format!("{rule}{}{rule}{body}{rule}", line(&heads))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let rows = [["llm".to_owned(), "READY".to_owned()], ["preprocessing".to_owned(), "é".to_owned()]];
        let wanted = "\
            +---------------+--------+\n\
            | Model         | Status |\n\
            +---------------+--------+\n\
            | llm           | READY  |\n\
            | preprocessing | é      |\n\
            +---------------+--------+\n";
        assert_eq!(table(["Model", "Status"], &rows), wanted);
        let no_rows: [[String; 1]; 0] = [];
        assert_eq!(table(["Path"], &no_rows), "+------+\n| Path |\n+------+\n+------+\n");
    }

    #[test]
    fn the_reason_of_a_model_that_failed_is_one_line() {
        let entry = ModelIndexEntry {
            name: "m".into(),
            version: String::new(),
            state: ModelState::Unavailable,
            reason: "no\n  file".into(),
        };
        assert_eq!(models(&[entry]), [["m", "-", "UNAVAILABLE: no file"]]);
    }
}
