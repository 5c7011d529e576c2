//! Prometheus metrics: Triton's `nv_*` families from the models' statistics, and what others register.

use std::convert::Infallible;
use std::fmt::Write;
use std::sync::Arc;

use http::header::{CONTENT_TYPE, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use hyper::body::Incoming;
use serving::{FIRST_RESPONSE_BUCKETS_MS, ModelStatistics, StatisticDuration};

use crate::body::ReplyBody;
use crate::state::State;

/// Where further metrics come from, such as an LLM backend's. Read at each scrape.
pub trait MetricsSource: Send + Sync {
    /// Its families as of now. A name must not be another source's.
    fn families(&self) -> Vec<Family>;

    /// Further families, whose names only come up at run time, in Prometheus' text format.
    fn text(&self) -> String {
        String::new()
    }
}

/// One metric and its samples.
#[derive(Debug, Clone, PartialEq)]
pub struct Family {
    /// The metric's name.
    pub name: &'static str,
    /// One line on what it counts.
    pub help: &'static str,
    /// How it behaves.
    pub kind: FamilyKind,
    /// Its values by labels.
    pub samples: Vec<Sample>,
}

/// How a metric behaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)] // Prometheus' own names.
pub enum FamilyKind {
    Counter,
    Gauge,
    Histogram,
}

/// One value of a metric.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// What follows the family's name: empty, or `_bucket`, `_sum`, `_count` of a histogram.
    pub suffix: &'static str,
    /// Names and values.
    pub labels: Vec<(&'static str, String)>,
    /// The value.
    pub value: f64,
}

impl Sample {
    /// A plain sample.
    pub fn new(labels: Vec<(&'static str, String)>, value: f64) -> Self {
        Self { suffix: "", labels, value }
    }
}

/// Answers `GET /metrics`.
pub async fn handle(state: Arc<State>, request: Request<Incoming>) -> Result<Response<ReplyBody>, Infallible> {
    let status = match (request.uri().path(), request.method()) {
        ("/metrics", &Method::GET) => StatusCode::OK,
        ("/metrics", _) => StatusCode::METHOD_NOT_ALLOWED,
        _ => StatusCode::NOT_FOUND,
    };
    let text = if status == StatusCode::OK { scrape(&state) } else { String::new() };
    let mut response = Response::new(text.into_bytes().into());
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    Ok(response)
}

fn scrape(state: &State) -> String {
    let statistics = state.server.model_statistics("", "").unwrap_or_default();
    let mut families = model_families(&statistics);
    families.extend(process_families());
    families.extend(state.sources.iter().flat_map(|source| source.families()));
    let mut text = String::with_capacity(256 * families.len());
    families.iter().for_each(|family| write_family(&mut text, family));
    text.extend(state.sources.iter().map(|source| source.text()));
    text
}

/// Families with one sample for each model version.
type PerModel = (&'static str, &'static str, FamilyKind, fn(&ModelStatistics) -> f64);

const PER_MODEL: [PerModel; 9] = [
    (
        "nv_inference_request_success",
        "Number of successful inference requests, all batch sizes",
        FamilyKind::Counter,
        |m| m.inference.success.count as f64,
    ),
    (
        "nv_inference_count",
        "Number of inferences performed (does not include cached requests)",
        FamilyKind::Counter,
        |m| m.inference_count as f64,
    ),
    (
        "nv_inference_exec_count",
        "Number of model executions performed (does not include cached requests)",
        FamilyKind::Counter,
        |m| m.execution_count as f64,
    ),
    (
        "nv_inference_request_duration_us",
        "Cumulative inference request duration in microseconds (includes cached requests)",
        FamilyKind::Counter,
        |m| microseconds(m.inference.success),
    ),
    (
        "nv_inference_queue_duration_us",
        "Cumulative inference queuing duration in microseconds",
        FamilyKind::Counter,
        |m| microseconds(m.inference.queue),
    ),
    (
        "nv_inference_compute_input_duration_us",
        "Cumulative compute input duration in microseconds",
        FamilyKind::Counter,
        |m| microseconds(m.inference.compute_input),
    ),
    (
        "nv_inference_compute_infer_duration_us",
        "Cumulative compute inference duration in microseconds",
        FamilyKind::Counter,
        |m| microseconds(m.inference.compute_infer),
    ),
    (
        "nv_inference_compute_output_duration_us",
        "Cumulative inference compute output duration in microseconds",
        FamilyKind::Counter,
        |m| microseconds(m.inference.compute_output),
    ),
    (
        "nv_inference_pending_request_count",
        "Instantaneous number of pending requests awaiting execution per-model",
        FamilyKind::Gauge,
        |m| m.pending as f64,
    ),
];

fn microseconds(duration: StatisticDuration) -> f64 {
    (duration.ns / 1000) as f64
}

fn labels(model: &ModelStatistics) -> Vec<(&'static str, String)> {
    vec![("model", model.name.clone()), ("version", model.version.clone())]
}

fn model_families(models: &[ModelStatistics]) -> Vec<Family> {
    let mut families: Vec<Family> = PER_MODEL
        .into_iter()
        .map(|(name, help, kind, value)| {
            let samples = models.iter().map(|model| Sample::new(labels(model), value(model))).collect();
            Family { name, help, kind, samples }
        })
        .collect();
    families.push(failure_family(models));
    families.push(first_response_family(models));
    families
}

fn failure_family(models: &[ModelStatistics]) -> Family {
    let samples = models.iter().flat_map(|model| {
        let counts = &model.failures;
        let reasons = [
            ("REJECTED", counts.rejected),
            ("CANCELED", counts.canceled),
            ("BACKEND", counts.backend),
            ("OTHER", counts.other),
        ];
        reasons.map(|(reason, count)| {
            let mut labels = labels(model);
            labels.push(("reason", reason.to_owned()));
            Sample::new(labels, count as f64)
        })
    });
    Family {
        name: "nv_inference_request_failure",
        help: "Number of failed inference requests, all batch sizes",
        kind: FamilyKind::Counter,
        samples: samples.collect(),
    }
}

fn first_response_family(models: &[ModelStatistics]) -> Family {
    let samples = models.iter().flat_map(|model| {
        let first = &model.first_response;
        let mut so_far = 0;
        let bounds = FIRST_RESPONSE_BUCKETS_MS.iter().map(u64::to_string);
        let mut samples: Vec<Sample> = bounds
            .zip(first.buckets)
            .map(|(bound, count)| {
                so_far += count;
                bucket(model, bound, so_far)
            })
            .collect();
        samples.push(bucket(model, "+Inf".to_owned(), first.total.count));
        samples.push(Sample { suffix: "_sum", labels: labels(model), value: first.total.ns as f64 / 1e6 });
        samples.push(Sample { suffix: "_count", labels: labels(model), value: first.total.count as f64 });
        samples
    });
    Family {
        name: "nv_inference_first_response_histogram_ms",
        help: "Duration from request to first response in milliseconds",
        kind: FamilyKind::Histogram,
        samples: samples.collect(),
    }
}

fn bucket(model: &ModelStatistics, bound: String, count: u64) -> Sample {
    let mut labels = labels(model);
    labels.push(("le", bound));
    Sample { suffix: "_bucket", labels, value: count as f64 }
}

/// Memory of the machine, as /proc tells it; nothing where it does not.
fn process_families() -> Vec<Family> {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kibibytes = |key: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(key))?;
        line.trim().strip_suffix(" kB")?.parse::<f64>().ok()
    };
    let (Some(total), Some(available)) = (kibibytes("MemTotal:"), kibibytes("MemAvailable:")) else {
        return Vec::new();
    };
    let gauge = |name, help, value| Family {
        name,
        help,
        kind: FamilyKind::Gauge,
        samples: vec![Sample::new(Vec::new(), value)],
    };
    vec![
        gauge("nv_cpu_memory_total_bytes", "CPU total memory (RAM), in bytes", total * 1024.0),
        gauge("nv_cpu_memory_used_bytes", "CPU used memory (RAM), in bytes", (total - available) * 1024.0),
    ]
}

/// The text exposition format (https://prometheus.io/docs/instrumenting/exposition_formats/).
fn write_family(text: &mut String, family: &Family) {
    if family.samples.is_empty() {
        return;
    }
    let kind = match family.kind {
        FamilyKind::Counter => "counter",
        FamilyKind::Gauge => "gauge",
        FamilyKind::Histogram => "histogram",
    };
    let (name, help) = (family.name, family.help);
    let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}"); // A String takes every write.
    for sample in &family.samples {
        let _ = write!(text, "{name}{}", sample.suffix);
        for (index, (key, value)) in sample.labels.iter().enumerate() {
            let open = if index == 0 { '{' } else { ',' };
            let _ = write!(text, "{open}{key}=\"{}\"", escape(value));
        }
        let close = if sample.labels.is_empty() { "" } else { "}" };
        let _ = writeln!(text, "{close} {}", sample.value);
    }
}

fn escape(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_family_is_written_as_prometheus_reads_it() {
        let mut text = String::new();
        let samples = vec![
            Sample { suffix: "_bucket", labels: vec![("model", "a\"b".into()), ("le", "+Inf".into())], value: 3.0 },
            Sample::new(Vec::new(), 0.5),
        ];
        write_family(&mut text, &Family { name: "x", help: "Some help", kind: FamilyKind::Histogram, samples });
        assert_eq!(text, "# HELP x Some help\n# TYPE x histogram\nx_bucket{model=\"a\\\"b\",le=\"+Inf\"} 3\nx 0.5\n");
    }

    #[test]
    fn buckets_add_up() {
        let mut model = ModelStatistics { name: "m".into(), version: "1".into(), ..Default::default() };
        model.first_response.buckets[0] = 2;
        model.first_response.buckets[3] = 1;
        model.first_response.total = StatisticDuration { count: 4, ns: 8_000_000 };
        let family = first_response_family(&[model]);
        let values: Vec<f64> = family.samples.iter().map(|sample| sample.value).collect();
        assert_eq!(values[..5], [2.0, 2.0, 2.0, 3.0, 3.0]);
        assert_eq!(values[values.len() - 3..], [4.0, 8.0, 4.0]);
    }
}
