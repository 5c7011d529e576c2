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
    pub world_restarts: Option<String>,
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
    /// Requests that ended per second.
    pub requests_per_s: f64,
    /// Requests that failed since the model was loaded.
    pub num_failed: u64,
    /// Time from a request's arrival to its first token, between the snapshots or, if no token came, since the model was loaded.
    pub first_token: Option<Latency>,
    /// Time between two tokens of a sequence, in the same way.
    pub inter_token: Option<Latency>,
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
    /// The prefix cache, if it has host memory.
    pub cache: Option<CacheView>,
    /// How often its workers were restarted.
    pub num_restarts: u64,
    /// The worker that lags most, and by how many steps; `None` if no worker lags.
    pub slowest: Option<(String, u64)>,
}

/// The prefix cache of a model, on the device, in host memory and on disk.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct CacheView {
    /// Share of the prompt tokens that it had, between the snapshots or, if no prompt came, since the model was loaded.
    pub hit_share: Option<f64>,
    /// Prompt tokens per second that were on the device.
    pub device_tokens_per_s: f64,
    /// Prompt tokens per second that were in host memory.
    pub host_tokens_per_s: f64,
    /// Prompt tokens per second that were on disk.
    pub disk_tokens_per_s: f64,
    /// Time of prefill that the cache saved, per second.
    pub saved_per_s: Duration,
    /// Host memory in use, of all workers.
    pub host_used_bytes: u64,
    /// Host memory of all workers.
    pub host_limit_bytes: u64,
}

/// Quantiles of a latency.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Latency {
    /// The median.
    pub p50: Duration,
    /// The 99th percentile.
    pub p99: Duration,
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
            view.world_restarts = Some(launcher::status::restarts(world.num_restarts, world.num_failures));
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
            requests_per_s: grown("trireme_llm_sequences_ended_total") / time.as_secs_f64().max(1e-3),
            num_failed: failed(now, name),
            first_token: latency(before, now, "trireme_llm_time_to_first_token_seconds", name),
            inter_token: latency(before, now, "trireme_llm_inter_token_latency_seconds", name),
            prompt_tokens_per_s: grown("trireme_llm_prompt_tokens_total") / time.as_secs_f64().max(1e-3),
            num_running: model.num_running,
            num_waiting: model.num_waiting,
            kv_blocks_used: model.kv_blocks_used,
            kv_blocks: model.kv_blocks,
            memory_bytes: memory(now, name),
            cache: cache(before, now, time, name),
            num_restarts: model.num_restarts,
            slowest: slowest(now, name),
            name: model.name,
        }
    };
    status::models(before, now, time).into_iter().map(of).collect()
}

fn failed(metrics: &Metrics, model: &str) -> u64 {
    let ended = metrics.all("trireme_llm_sequences_ended_total").filter(|sample| sample.label("model") == model);
    ended.filter(|sample| sample.label("reason") == "failed").map(|sample| sample.value as u64).sum()
}

/// Quantiles of the observations between two snapshots, or of all if there are none; `None` if the histogram is empty.
fn latency(before: &Metrics, now: &Metrics, metric: &str, model: &str) -> Option<Latency> {
    let (early, late) = (buckets(before, metric, model), buckets(now, metric, model));
    let total = |buckets: &[(f64, f64)]| buckets.last().map_or(0.0, |(_, count)| *count);
    // After a restart the counters begin at 0.
    let is_continued = early.len() == late.len() && total(&early) < total(&late);
    let recent: Vec<(f64, f64)> = match is_continued {
        true => late.iter().zip(&early).map(|((bound, count), (_, before))| (*bound, count - before)).collect(),
        false => late,
    };
    Some(Latency { p50: quantile(&recent, 0.5)?, p99: quantile(&recent, 0.99)? })
}

/// The upper bounds of a histogram's buckets with their cumulative counts, summed over the replicas of a model.
fn buckets(metrics: &Metrics, metric: &str, model: &str) -> Vec<(f64, f64)> {
    let name = format!("{metric}_bucket");
    let mut buckets: Vec<(f64, f64)> = Vec::new();
    for sample in metrics.all(&name).filter(|sample| sample.label("model") == model) {
        let Ok(bound) = sample.label("le").parse::<f64>() else { continue };
        match buckets.iter_mut().find(|(known, _)| *known == bound) {
            Some((_, count)) => *count += sample.value,
            None => buckets.push((bound, sample.value)),
        }
    }
    buckets
}

/// A quantile, linear within a bucket, as Prometheus computes it. The last bucket has no upper bound, so its lower one stands for it.
fn quantile(buckets: &[(f64, f64)], share: f64) -> Option<Duration> {
    let rank = share * buckets.last().map(|(_, count)| *count).filter(|count| *count > 0.0)?;
    let at = buckets.iter().position(|(_, count)| *count >= rank)?;
    let (lower, below) = at.checked_sub(1).map_or((0.0, 0.0), |before| buckets[before]);
    let (upper, count) = buckets[at];
    let inside = (rank - below) / (count - below).max(f64::MIN_POSITIVE);
    let seconds = if upper.is_finite() { lower + (upper - lower) * inside } else { lower };
    Duration::try_from_secs_f64(seconds).ok()
}

fn memory(metrics: &Metrics, model: &str) -> Option<u64> {
    let bytes = metrics.of_model("nv_trt_llm_runtime_memory_metrics", model)?;
    (bytes > 0.0).then_some(bytes as u64)
}

fn cache(before: &Metrics, now: &Metrics, time: Duration, model: &str) -> Option<CacheView> {
    let value = |metrics: &Metrics, metric: &str| metrics.of_model(metric, model).unwrap_or(0.0);
    let host_limit_bytes = value(now, "trireme_llm_host_cache_limit_bytes") as u64;
    let counters = |metrics: &Metrics| {
        [
            "trireme_llm_prompt_tokens_total",
            "trireme_llm_cached_prompt_tokens_total",
            "trireme_llm_prefix_cache_host_tokens_total",
            "trireme_llm_prefix_cache_disk_tokens_total",
            "trireme_llm_prefix_cache_saved_seconds_total",
        ]
        .map(|metric| value(metrics, metric))
    };
    let (early, late) = (counters(before), counters(now));
    // After a restart the counters begin at 0.
    let grown: [f64; 5] = std::array::from_fn(|index| (late[index] - early[index]).max(0.0));
    let [prompt, cached, ..] = if grown[0] > 0.0 { grown } else { late };
    let per_s = |grown: f64| grown.max(0.0) / time.as_secs_f64().max(1e-3);
    (host_limit_bytes > 0).then(|| CacheView {
        hit_share: (prompt > 0.0).then(|| (cached / prompt).min(1.0)),
        device_tokens_per_s: per_s(grown[1] - grown[2]),
        host_tokens_per_s: per_s(grown[2] - grown[3]),
        disk_tokens_per_s: per_s(grown[3]),
        saved_per_s: Duration::try_from_secs_f64(per_s(grown[4])).unwrap_or_default(),
        host_used_bytes: value(now, "trireme_llm_host_cache_used_bytes") as u64,
        host_limit_bytes,
    })
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
    fn latencies_are_those_between_two_snapshots() {
        let text = |counts: [u32; 3], failed: u32| {
            let [fast, slow, all] = counts;
            Metrics::parse(&format!(
                "trireme_llm_ready{{model=\"m\"}} 1\n\
                 trireme_llm_sequences_ended_total{{model=\"m\",reason=\"length\"}} {all}\n\
                 trireme_llm_sequences_ended_total{{model=\"m\",reason=\"failed\"}} {failed}\n\
                 trireme_llm_time_to_first_token_seconds_bucket{{model=\"m\",le=\"0.1\"}} {fast}\n\
                 trireme_llm_time_to_first_token_seconds_bucket{{model=\"m\",le=\"0.5\"}} {slow}\n\
                 trireme_llm_time_to_first_token_seconds_bucket{{model=\"m\",le=\"+Inf\"}} {all}\n"
            ))
        };
        let then = Instant::now();
        let at = |at, metrics| Snapshot { at, server: "far:8002".into(), world: None, metrics: Ok(metrics) };
        let before = at(then, text([100, 100, 100], 0));
        let now = at(then + Duration::from_secs(2), text([110, 120, 120], 2));
        let model = &View::of(&before, &now).models[0];
        let latency = model.first_token.unwrap();
        assert_eq!((latency.p50.as_millis(), latency.p99.as_millis()), (100, 492));
        assert_eq!((model.requests_per_s, model.num_failed, model.inter_token), (11.0, 2, None));
        // Without a token between them, all since the start count; beyond the last bound, that bound does.
        let idle = &View::of(&now, &now).models[0];
        assert_eq!(idle.first_token.unwrap().p50.as_millis(), 54);
        let slow = at(then, text([0, 0, 1], 0));
        assert_eq!(View::of(&slow, &slow).models[0].first_token.unwrap().p50.as_millis(), 500);
    }

    #[test]
    fn hits_of_the_prefix_cache_are_told_apart_by_tier() {
        let text = |prompt: u32, cached: u32, of_host: u32, limit: u64| {
            let (of_disk, saved) = (of_host / 6, f64::from(of_host) / 400.0);
            Metrics::parse(&format!(
                "trireme_llm_ready{{model=\"m\"}} 1\n\
                 trireme_llm_prompt_tokens_total{{model=\"m\"}} {prompt}\n\
                 trireme_llm_cached_prompt_tokens_total{{model=\"m\"}} {cached}\n\
                 trireme_llm_prefix_cache_host_tokens_total{{model=\"m\"}} {of_host}\n\
                 trireme_llm_prefix_cache_disk_tokens_total{{model=\"m\"}} {of_disk}\n\
                 trireme_llm_prefix_cache_saved_seconds_total{{model=\"m\",tier=\"device\"}} {saved}\n\
                 trireme_llm_prefix_cache_saved_seconds_total{{model=\"m\",tier=\"host\"}} {saved}\n\
                 trireme_llm_host_cache_used_bytes{{model=\"m\"}} 512\n\
                 trireme_llm_host_cache_limit_bytes{{model=\"m\"}} {limit}\n"
            ))
        };
        let then = Instant::now();
        let at = |at, metrics| Snapshot { at, server: "far:8002".into(), world: None, metrics: Ok(metrics) };
        let before = at(then, text(1000, 0, 0, 1024));
        let now = at(then + Duration::from_secs(2), text(2000, 800, 600, 1024));
        let expected = CacheView {
            hit_share: Some(0.8),
            device_tokens_per_s: 100.0,
            host_tokens_per_s: 250.0,
            disk_tokens_per_s: 50.0,
            saved_per_s: Duration::from_millis(1500),
            host_used_bytes: 512,
            host_limit_bytes: 1024,
        };
        assert_eq!(View::of(&before, &now).models[0].cache, Some(expected));
        // Without a prompt between them, all since the start count.
        let idle = View::of(&now, &now).models[0].cache.unwrap();
        assert_eq!((idle.hit_share, idle.host_tokens_per_s), (Some(0.4), 0.0));
        let without = at(then, text(1000, 500, 0, 0));
        assert_eq!(View::of(&without, &without).models[0].cache, None);
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
