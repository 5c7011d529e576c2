//! `launch status`: the worlds of this user, with their processes from `/proc` and their models from rank 0's metrics.

use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use serde::Serialize;

use crate::health;
use crate::processes;
use crate::scrape::Metrics;
use crate::state::{Phase, RunDir, WorldState};

/// Time between the two scrapes from which rates are computed.
const RATE_INTERVAL: Duration = Duration::from_millis(500);

/// A world and all of its parts.
#[derive(Debug, Clone, Serialize)]
pub struct WorldStatus {
    /// Port of the HTTP protocol.
    pub http_port: u16,
    /// Port of the gRPC protocol.
    pub grpc_port: u16,
    /// Port of the metrics.
    pub metrics_port: u16,
    /// `loading`, `ready`, `not ready` (after it has served), `ending`, `waiting` (for its next start after a failure), `unknown`
    /// (its launcher has another version).
    pub state: &'static str,
    /// Number of ranks.
    pub world_size: u32,
    /// With `--elastic`, the hosts without which it goes on, with fewer ranks.
    pub hosts_lost: Vec<String>,
    /// Number of restarts, those included that the user wanted.
    pub num_restarts: u32,
    /// Number of restarts after a failure.
    pub num_failures: u32,
    /// The exit status of its last failed run, in words.
    pub last_failure: Option<String>,
    /// The newest crash report.
    pub crash_report: Option<PathBuf>,
    /// The model repository that it serves.
    pub model_repository: PathBuf,
    /// Its log file.
    pub log: PathBuf,
    /// Launcher, ranks and workers.
    pub processes: Vec<ProcessStatus>,
    /// Language models that rank 0 has loaded.
    pub models: Vec<ModelStatus>,
}

/// One process of a world.
#[derive(Debug, Clone, Serialize)]
pub struct ProcessStatus {
    /// `launcher`, `rank`, `worker` or `relay`.
    pub role: &'static str,
    /// Its rank; for a worker its tensor-parallel rank.
    pub rank: Option<u32>,
    /// Its pid on its node.
    pub pid: u32,
    /// The host name of its node.
    pub node: String,
    /// The device of a worker.
    pub device: Option<String>,
    /// The model of a worker.
    pub model: Option<String>,
    /// `running`, `stopped` or `stuck in the kernel`; for running workers `loading` or `ready`, as rank 0 reports.
    pub state: String,
    /// Resident memory in bytes; None on other nodes.
    pub memory_bytes: Option<u64>,
    /// Seconds since it started; None on other nodes.
    pub uptime_secs: Option<u64>,
}

/// One language model.
#[derive(Debug, Clone, Serialize)]
pub struct ModelStatus {
    /// Its name.
    pub name: String,
    /// Whether it can run steps now.
    pub is_ready: bool,
    /// Steps per second, measured over half a second.
    pub steps_per_s: f64,
    /// Generated tokens per second, measured over half a second.
    pub tokens_per_s: f64,
    /// Sequences in the current steps.
    pub num_running: u64,
    /// Sequences in the queue.
    pub num_waiting: u64,
    /// KV blocks in use.
    pub kv_blocks_used: u64,
    /// KV blocks in total.
    pub kv_blocks: u64,
    /// Number of restarts of its workers.
    pub num_restarts: u64,
}

/// `launch status`: prints all worlds, or only the one on `http_port`.
pub(crate) fn print(run_dir: &RunDir, http_port: Option<u16>, json: bool) -> Result<()> {
    for file in run_dir.scan().unknown {
        eprintln!(
            "launch: {} cannot be understood, and is left alone; another version may have written it",
            file.display()
        );
    }
    let mut worlds = collect(run_dir);
    if let Some(port) = http_port {
        worlds.retain(|world| world.http_port == port);
        if worlds.is_empty() {
            bail!("no world of this user serves HTTP on port {port}; `launch status` lists those there are");
        }
    }
    if json {
        println!("{}", serde_json::to_string_pretty(&worlds)?);
    } else {
        print!("{}", table(&worlds));
    }
    Ok(())
}

/// Every world of this user on this machine.
pub(crate) fn collect(run_dir: &RunDir) -> Vec<WorldStatus> {
    let worlds = run_dir.worlds();
    let scrape = |world: &WorldState| Metrics::of(&world.http_host, world.metrics_port).ok();
    let first: Vec<_> = worlds.iter().map(|world| (scrape(world), Instant::now())).collect();
    if first.iter().any(|(metrics, _)| metrics.is_some()) {
        thread::sleep(RATE_INTERVAL);
    }
    let status = |(world, (before, then)): (&WorldState, &(Option<Metrics>, Instant))| {
        let now = scrape(world).unwrap_or_default();
        world_status(world, before.as_ref().unwrap_or(&now), &now, then.elapsed())
    };
    worlds.iter().zip(&first).map(status).collect()
}

fn world_status(world: &WorldState, before: &Metrics, now: &Metrics, time: Duration) -> WorldStatus {
    let state = match world.phase {
        Phase::Loading => "loading",
        Phase::Ending => "ending",
        Phase::Waiting => "waiting",
        Phase::Asleep => "asleep",
        Phase::Other => "unknown",
        Phase::Serving if health::of(world).is_some_and(|health| health.is_ready) => "ready",
        Phase::Serving => "not ready",
    };
    WorldStatus {
        http_port: world.http_port,
        grpc_port: world.grpc_port,
        metrics_port: world.metrics_port,
        state,
        world_size: world.world_size,
        hosts_lost: world.hosts_lost.clone(),
        num_restarts: world.num_restarts,
        num_failures: world.num_failures,
        last_failure: world.last_failure.clone(),
        crash_report: newest_report(world),
        model_repository: world.model_repository.clone(),
        log: world.log.clone(),
        processes: process_statuses(world, now),
        models: models(before, now, time),
    }
}

/// The newest file among the crash reports of this world.
fn newest_report(world: &WorldState) -> Option<PathBuf> {
    let start = format!("crash-{}-", world.http_port);
    let entries = fs::read_dir(&world.crash_dir).ok()?.flatten();
    let reports = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(&start));
    reports.map(|entry| entry.path()).max_by_key(|path| fs::metadata(path).and_then(|meta| meta.modified()).ok())
}

/// The models in the metrics, with rates over the `time` between the scrapes `before` and `now`.
pub fn models(before: &Metrics, now: &Metrics, time: Duration) -> Vec<ModelStatus> {
    let status = |name: &str| {
        let value = |metric: &str| now.of_model(metric, name).unwrap_or(0.0);
        let rate = |metric: &str| {
            let grown = value(metric) - before.of_model(metric, name).unwrap_or(0.0);
            (grown / time.as_secs_f64().max(1e-3)).max(0.0)
        };
        ModelStatus {
            name: name.to_owned(),
            is_ready: value("trireme_llm_ready") > 0.0,
            steps_per_s: rate("trireme_llm_steps_total"),
            tokens_per_s: rate("trireme_llm_output_tokens_total"),
            num_running: value("trireme_llm_requests_running") as u64,
            num_waiting: (value("trireme_llm_requests_waiting") + value("trireme_llm_requests_queued")) as u64,
            kv_blocks_used: value("trireme_llm_kv_blocks_used") as u64,
            kv_blocks: value("trireme_llm_kv_blocks") as u64,
            num_restarts: value("trireme_llm_worker_restarts_total") as u64,
        }
    };
    // Each replica of a model has a sample.
    let mut names: Vec<&str> = now.all("trireme_llm_ready").map(|sample| sample.label("model")).collect();
    names.dedup();
    names.into_iter().map(status).collect()
}

fn process_statuses(world: &WorldState, metrics: &Metrics) -> Vec<ProcessStatus> {
    let node = nix::unistd::gethostname().unwrap_or_default().to_string_lossy().into_owned();
    let local = |pid: u32, role, rank, model: Option<String>| ProcessStatus {
        role,
        rank,
        pid,
        node: node.clone(),
        device: None,
        model,
        state: processes::state(pid).unwrap_or("gone").to_owned(),
        memory_bytes: processes::memory_bytes(pid),
        uptime_secs: processes::uptime(pid).map(|time| time.as_secs()),
    };
    let mut found = vec![local(world.launcher_pid, "launcher", None, None)];
    for pid in processes::descendants(world.launcher_pid) {
        match processes::title(pid) {
            Some(processes::Title::Rank(rank)) => found.push(local(pid, "rank", Some(rank), None)),
            Some(processes::Title::Worker(rank, model)) => found.push(local(pid, "worker", Some(rank), Some(model))),
            Some(processes::Title::Relay) => found.push(local(pid, "relay", None, None)),
            None => {}
        }
    }
    for worker in metrics.all("trireme_llm_worker_ready") {
        let pid = worker.label("pid").parse().unwrap_or(0);
        let state = if worker.value > 0.0 { "ready" } else { "loading" };
        let device = Some(worker.label("device").to_owned()).filter(|device| !device.is_empty());
        match found.iter_mut().find(|process| process.pid == pid && process.node == worker.label("node")) {
            Some(process) => {
                process.device = device;
                // A stopped or stuck process is shown as such, whatever rank 0 reports.
                if process.state == "running" {
                    process.state = state.to_owned();
                }
            }
            None => found.push(ProcessStatus {
                role: "worker",
                rank: worker.label("worker").parse().ok(),
                pid,
                node: worker.label("node").to_owned(),
                device,
                model: Some(worker.label("model").to_owned()),
                state: state.to_owned(),
                memory_bytes: None,
                uptime_secs: None,
            }),
        }
    }
    found.sort_by_key(|process| (process.role, process.rank));
    found
}

fn table(worlds: &[WorldStatus]) -> String {
    let mut out = String::new();
    if worlds.is_empty() {
        return "no world runs\n".to_owned();
    }
    for world in worlds {
        let WorldStatus { http_port, grpc_port, metrics_port, state, world_size, .. } = world;
        let restarts = restarts(world.num_restarts, world.num_failures);
        let _ = writeln!(
            out,
            "http {http_port} grpc {grpc_port} metrics {metrics_port}: {state}, {world_size} rank(s), \
             {restarts}, {}, log {}",
            world.model_repository.display(),
            world.log.display()
        );
        if !world.hosts_lost.is_empty() {
            let _ = writeln!(out, "  without host(s) {}, until they answer again", world.hosts_lost.join(", "));
        }
        if let Some(failure) = &world.last_failure {
            let report = world.crash_report.as_ref().map(|path| format!("; see {}", path.display()));
            let _ = writeln!(out, "  last failure: {failure}{}", report.unwrap_or_default());
        }
        for model in &world.models {
            let _ = writeln!(
                out,
                "  model {}: {}, {:.0} steps/s, {:.0} tokens/s, {} running, {} waiting, KV {} of {}, {} restart(s)",
                model.name,
                if model.is_ready { "ready" } else { "not ready" },
                model.steps_per_s,
                model.tokens_per_s,
                model.num_running,
                model.num_waiting,
                model.kv_blocks_used,
                model.kv_blocks,
                model.num_restarts
            );
        }
        let head = ["role", "rank", "pid", "node", "device", "model", "state", "memory", "uptime"].map(str::to_owned);
        let rows: Vec<_> = std::iter::once(head).chain(world.processes.iter().map(row)).collect();
        out.push_str(&aligned(&rows));
    }
    out
}

/// `2 restarts, 1 after a failure`
pub fn restarts(all: u32, failures: u32) -> String {
    let plural = if all == 1 { "" } else { "s" };
    match (all, failures) {
        (0, _) => "no restart".to_owned(),
        (_, 0) => format!("{all} restart{plural}, all wanted"),
        _ => format!("{all} restart{plural}, {failures} after a failure"),
    }
}

fn row(process: &ProcessStatus) -> [String; 9] {
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    [
        process.role.to_owned(),
        or_dash(process.rank.map(|rank| rank.to_string())),
        process.pid.to_string(),
        process.node.clone(),
        or_dash(process.device.clone()),
        or_dash(process.model.clone()),
        process.state.clone(),
        or_dash(process.memory_bytes.map(|bytes| format!("{} MiB", bytes >> 20))),
        or_dash(process.uptime_secs.map(duration)),
    ]
}

/// `59s`, `3m07s`, `2h05m`, `4d02h`.
fn duration(secs: u64) -> String {
    match secs {
        0..60 => format!("{secs}s"),
        60..3600 => format!("{}m{:02}s", secs / 60, secs % 60),
        3600..86_400 => format!("{}h{:02}m", secs / 3600, secs / 60 % 60),
        _ => format!("{}d{:02}h", secs / 86_400, secs / 3600 % 24),
    }
}

/// Columns as wide as their widest cell, indented.
fn aligned<const N: usize>(rows: &[[String; N]]) -> String {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; N] = std::array::from_fn(width);
    let line = |row: &[String; N]| {
        let cells: Vec<_> = row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        format!("  {}\n", cells.join("  ").trim_end())
    };
    rows.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_computed_from_the_growth_of_counters() {
        let text = |steps| {
            format!(
                "trireme_llm_ready{{model=\"m\"}} 1\ntrireme_llm_steps_total{{model=\"m\"}} {steps}\ntrireme_llm_kv_blocks{{model=\"m\"}} 7\n"
            )
        };
        let (before, now) = (Metrics::parse(&text(100)), Metrics::parse(&text(150)));
        let models = models(&before, &now, Duration::from_millis(500));
        assert_eq!((models[0].steps_per_s, models[0].kv_blocks, models[0].is_ready), (100.0, 7, true));
    }

    #[test]
    fn durations_have_two_units_at_most() {
        assert_eq!([59, 187, 7500, 352_800].map(duration), ["59s", "3m07s", "2h05m", "4d02h"]);
    }
}
