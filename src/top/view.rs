//! The figures to draw, computed from two snapshots.

use std::time::Duration;

use launcher::scrape::{Metrics, Sample};
use launcher::status::{self, ProcessStatus};

use crate::snapshot::Snapshot;

/// All figures of one frame.
#[derive(Debug, Clone, Default)]
pub struct View {
    /// Host and port of the metrics.
    pub server: String,
    /// `ready`, `loading` …; empty if it is unknown.
    pub state: String,
    /// Why there are no metrics.
    pub trouble: Option<String>,
    /// How often the world was restarted.
    pub world_restarts: Option<u32>,
    /// How its last failed run ended.
    pub last_failure: Option<String>,
    /// Language models.
    pub models: Vec<ModelView>,
    /// Launcher, ranks and workers.
    pub processes: Vec<ProcessView>,
}

/// One language model.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ModelView {
    /// Its name.
    pub name: String,
    /// Whether a step can run now.
    pub is_ready: bool,
    /// Steps per second.
    pub steps_per_s: f64,
    /// Mean time of a step; `None` if no step ended between the snapshots, or the server does not publish it.
    pub step_time: Option<Duration>,
    /// Generated tokens per second.
    pub tokens_per_s: f64,
    /// Accepted prompt tokens per second.
    pub prompt_tokens_per_s: f64,
    /// Sequences in the current steps.
    pub num_running: u64,
    /// Sequences in the queue.
    pub num_waiting: u64,
    /// KV blocks in use.
    pub kv_blocks_used: u64,
    /// Total KV blocks.
    pub kv_blocks: u64,
    /// Device memory of all workers of the model, in bytes.
    pub memory_bytes: Option<u64>,
    /// How often its workers were restarted.
    pub num_restarts: u64,
    /// The worker that lags most, and by how many steps; `None` if no worker lags.
    pub slowest: Option<(String, u64)>,
}

/// One process.
#[derive(Debug, Clone)]
pub struct ProcessView {
    /// The process, as in `launch status`.
    pub status: ProcessStatus,
    /// Steps that were sent to a worker and that it has not started yet.
    pub step_lag: Option<u64>,
}

impl View {
    /// The figures of `now`, and rates from `before` to `now`.
    pub fn of(before: &Snapshot, now: &Snapshot) -> Self {
        let mut view = Self { server: now.server.clone(), ..Self::default() };
        if let Some(world) = &now.world {
            world.state.clone_into(&mut view.state);
            view.world_restarts = Some(world.num_restarts);
            view.last_failure.clone_from(&world.last_failure);
            view.processes = world.processes.iter().cloned().map(ProcessView::new).collect();
        }
        let metrics = match &now.metrics {
            Ok(metrics) => metrics,
            Err(why) => {
                view.trouble = Some(format!("no metrics from {}: {why}", now.server));
                return view;
            }
        };
        let nothing = Metrics::default();
        let earlier = before.metrics.as_ref().unwrap_or(&nothing);
        view.models = models(earlier, metrics, now.at.saturating_duration_since(before.at));
        if now.world.is_none() {
            view.processes = workers(metrics);
        }
        for process in &mut view.processes {
            process.step_lag = lag(metrics, &process.status);
        }
        view
    }
}

impl ProcessView {
    fn new(status: ProcessStatus) -> Self {
        Self { status, step_lag: None }
    }
}

fn models(before: &Metrics, now: &Metrics, time: Duration) -> Vec<ModelView> {
    let of = |model: status::ModelStatus| {
        let name = &model.name;
        let grown = |metric: &str| {
            let value = |metrics: &Metrics| metrics.of_model(metric, name).unwrap_or(0.0);
            (value(now) - value(before)).max(0.0)
        };
        let num_steps = grown("trireme_llm_step_seconds_count");
        let step_time = (num_steps > 0.0).then(|| grown("trireme_llm_step_seconds_sum") / num_steps);
        ModelView {
            is_ready: model.is_ready,
            steps_per_s: model.steps_per_s,
            step_time: step_time.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()),
            tokens_per_s: model.tokens_per_s,
            prompt_tokens_per_s: grown("trireme_llm_prompt_tokens_total") / time.as_secs_f64().max(1e-3),
            num_running: model.num_running,
            num_waiting: model.num_waiting,
            kv_blocks_used: model.kv_blocks_used,
            kv_blocks: model.kv_blocks,
            memory_bytes: memory(now, name),
            num_restarts: model.num_restarts,
            slowest: slowest(now, name),
            name: model.name,
        }
    };
    status::models(before, now, time).into_iter().map(of).collect()
}

fn memory(metrics: &Metrics, model: &str) -> Option<u64> {
    let bytes = metrics.of_model("nv_trt_llm_runtime_memory_metrics", model)?;
    (bytes > 0.0).then_some(bytes as u64)
}

fn slowest(metrics: &Metrics, model: &str) -> Option<(String, u64)> {
    let of_model = metrics.all("trireme_llm_worker_step_lag").filter(|sample| sample.label("model") == model);
    let behind = of_model.filter(|sample| sample.value >= 1.0);
    let worst = behind.max_by(|left, right| left.value.total_cmp(&right.value))?;
    Some((worst.label("worker").to_owned(), worst.value as u64))
}

/// The workers that appear in the metrics.
fn workers(metrics: &Metrics) -> Vec<ProcessView> {
    let some = |sample: &Sample, label| Some(sample.label(label).to_owned()).filter(|value| !value.is_empty());
    let of = |sample: &Sample| {
        ProcessView::new(ProcessStatus {
            role: "worker",
            rank: sample.label("worker").parse().ok(),
            pid: sample.label("pid").parse().unwrap_or(0),
            node: sample.label("node").to_owned(),
            device: some(sample, "device"),
            model: some(sample, "model"),
            state: if sample.value > 0.0 { "ready" } else { "loading" }.to_owned(),
            memory_bytes: None,
            uptime_secs: None,
        })
    };
    metrics.all("trireme_llm_worker_ready").map(of).collect()
}

fn lag(metrics: &Metrics, process: &ProcessStatus) -> Option<u64> {
    let (rank, model) = (process.rank?.to_string(), process.model.as_deref()?);
    let is_its = |sample: &&Sample| sample.label("worker") == rank && sample.label("model") == model;
    metrics.all("trireme_llm_worker_step_lag").find(is_its).map(|sample| sample.value as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    fn snapshot(at: Instant, steps: u32, tokens: u32) -> Snapshot {
        let text = format!(
            "trireme_llm_ready{{model=\"m\",version=\"1\"}} 1\n\
             trireme_llm_steps_total{{model=\"m\",version=\"1\"}} {steps}\n\
             trireme_llm_output_tokens_total{{model=\"m\",version=\"1\"}} {tokens}\n\
             trireme_llm_step_seconds_count{{model=\"m\",kind=\"decode\"}} {steps}\n\
             trireme_llm_step_seconds_sum{{model=\"m\",kind=\"decode\"}} {}\n\
             trireme_llm_worker_ready{{model=\"m\",worker=\"0\",pid=\"7\",node=\"a\",device=\"cpu\"}} 1\n\
             trireme_llm_worker_ready{{model=\"m\",worker=\"1\",pid=\"8\",node=\"b\",device=\"cpu\"}} 0\n\
             trireme_llm_worker_step_lag{{model=\"m\",worker=\"0\"}} 0\n\
             trireme_llm_worker_step_lag{{model=\"m\",worker=\"1\"}} 2\n",
            f64::from(steps) * 0.02,
        );
        Snapshot { at, server: "far:8002".into(), world: None, metrics: Ok(Metrics::parse(&text)) }
    }

    #[test]
    fn rates_step_time_and_the_slowest_worker_come_from_two_snapshots() {
        let then = Instant::now();
        let view = View::of(&snapshot(then, 100, 1000), &snapshot(then + Duration::from_secs(2), 150, 1800));
        let model = &view.models[0];
        assert_eq!((model.steps_per_s, model.tokens_per_s), (25.0, 400.0));
        assert_eq!(model.step_time.unwrap().as_millis(), 20);
        assert_eq!(model.slowest, Some(("1".to_owned(), 2)));
        let seen: Vec<_> = view.processes.iter().map(|process| (process.status.pid, process.step_lag)).collect();
        assert_eq!(seen, [(7, Some(0)), (8, Some(2))]);
        assert_eq!(view.processes[1].status.state, "loading");
    }

    #[test]
    fn an_unreachable_server_is_reported_and_rates_restart_from_zero() {
        let then = Instant::now();
        let unreachable = Snapshot { metrics: Err("connection refused".into()), ..snapshot(then, 1, 1) };
        let view = View::of(&snapshot(then, 1, 1), &unreachable);
        assert_eq!(view.trouble.unwrap(), "no metrics from far:8002: connection refused");
        assert!(view.models.is_empty());
        // After a restart its counters begin at 0; no rate is negative.
        let view = View::of(&snapshot(then, 500, 500), &snapshot(then + Duration::from_secs(1), 3, 4));
        assert_eq!((view.models[0].steps_per_s, view.models[0].step_time), (0.0, None));
    }
}
