//! `GET /metrics`: Triton's `nv_*` metrics from the statistics of models, and the metrics of further sources.

use std::convert::Infallible;
use std::sync::Arc;

use http::header::{CONTENT_TYPE, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use hyper::body::Incoming;
use serving::{CacheStatistics, Limit, ModelStatistics, RecentDurations, SharedLimit, StatisticDuration};

use crate::api::triton::http::reply::{denial, plain_error};
use crate::state::State;
use crate::telemetry::exposition::{Family, FamilyKind, Labels, Sample, write_family};
use crate::telemetry::metrics_settings::MetricsOptions;
use crate::transport::body::ReplyBody;
use crate::transport::restricted::Api;

/// Answers `GET /metrics`, also with a trailing slash, and `GET /debug/ledger` if it is enabled.
pub async fn handle(state: Arc<State>, request: Request<Incoming>) -> Result<Response<ReplyBody>, Infallible> {
    if let Err(denied) = state.config.http_restrictions.check(Api::Metrics, request.headers()) {
        return Ok(denial(denied));
    }
    if let ("/debug/ledger", &Method::GET, Some(ledger)) =
        (request.uri().path(), request.method(), &state.config.ledger)
    {
        let mut response = Response::new(ledger.read().await.into_bytes().into());
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        return Ok(response);
    }
    match (request.uri().path(), request.method()) {
        ("/metrics" | "/metrics/", &Method::GET) => {}
        ("/metrics" | "/metrics/", _) => {
            return Ok(plain_error(StatusCode::METHOD_NOT_ALLOWED, "Method Not Allowed"));
        }
        _ => return Ok(plain_error(StatusCode::NOT_FOUND, "Not Found")),
    }
    let mut response = Response::new(scrape(&state).into_bytes().into());
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    Ok(response)
}

fn scrape(state: &State) -> String {
    let families = families(state);
    let mut text = String::with_capacity(256 * families.len());
    families.iter().for_each(|family| write_family(&mut text, family));
    text.extend(state.sources.iter().map(|source| source.text()));
    text
}

/// The current metrics, but those whose names are known at run time only.
pub(crate) fn families(state: &State) -> Vec<Family> {
    let statistics = state.server.model_statistics("", "").unwrap_or_default();
    let mut families = model_families(&statistics, &state.config.metrics_options);
    families.push(refused_requests());
    families.push(readiness(state));
    families.extend(state.server.cache_statistics().iter().flat_map(cache_families));
    families.extend(state.sources.iter().flat_map(|source| source.families()));
    families
}

/// The number of requests refused by each limit.
fn refused_requests() -> Family {
    let counts = Limit::all().map(|limit| (limit.name(), limit.num_refused()));
    let counts = counts.chain(SharedLimit::all().map(|shared| (shared.name(), shared.num_refused())));
    let sample = |(name, count): (&str, u64)| Sample::new(vec![("limit".into(), name.to_owned())], count as f64);
    Family {
        name: "trireme_refused_requests_total",
        help: "Requests refused because of a limit, on what one contains or on what all share",
        kind: FamilyKind::Counter,
        samples: counts.map(sample).collect(),
    }
}

/// What `/v2/health/ready` and the gRPC health service say.
fn readiness(state: &State) -> Family {
    Family {
        name: "trireme_server_ready",
        help: "1 when the server is ready, as its health checks say",
        kind: FamilyKind::Gauge,
        samples: vec![Sample::new(Vec::new(), f64::from(u8::from(state.is_ready())))],
    }
}

/// A metric with one sample per model version that has the value: name, help, kind, value.
type PerModel = (&'static str, &'static str, FamilyKind, fn(&ModelStatistics) -> Option<f64>);

const COUNTS: [PerModel; 3] = [
    (
        "nv_inference_request_success",
        "Number of successful inference requests, all batch sizes",
        FamilyKind::Counter,
        |m| Some(m.inference.success.count as f64),
    ),
    (
        "nv_inference_count",
        "Number of inferences performed (does not include cached requests)",
        FamilyKind::Counter,
        |m| Some(m.inference_count as f64),
    ),
    (
        "nv_inference_exec_count",
        "Number of model executions performed (does not include cached requests)",
        FamilyKind::Counter,
        |m| Some(m.execution_count as f64),
    ),
];

const DURATIONS: [PerModel; 7] = [
    (
        "nv_inference_request_duration_us",
        "Cumulative inference request duration in microseconds (includes cached requests)",
        FamilyKind::Counter,
        |m| Some(microseconds(m.inference.success)),
    ),
    (
        "nv_inference_queue_duration_us",
        "Cumulative inference queuing duration in microseconds (includes cached requests)",
        FamilyKind::Counter,
        |m| Some(microseconds(m.inference.queue)),
    ),
    (
        "nv_inference_compute_input_duration_us",
        "Cumulative compute input duration in microseconds (does not include cached requests)",
        FamilyKind::Counter,
        |m| Some(microseconds(m.inference.compute_input)),
    ),
    (
        "nv_inference_compute_infer_duration_us",
        "Cumulative compute inference duration in microseconds (does not include cached requests)",
        FamilyKind::Counter,
        |m| Some(microseconds(m.inference.compute_infer)),
    ),
    (
        "nv_inference_compute_output_duration_us",
        "Cumulative inference compute output duration in microseconds (does not include cached requests)",
        FamilyKind::Counter,
        |m| Some(microseconds(m.inference.compute_output)),
    ),
    (
        "nv_cache_hit_duration_per_model",
        "Total cache hit duration per model, in microseconds",
        FamilyKind::Counter,
        |m| m.is_cached.then_some(microseconds(m.inference.cache_hit)),
    ),
    (
        "nv_cache_miss_duration_per_model",
        "Total cache miss (insert+lookup) duration per model, in microseconds",
        FamilyKind::Counter,
        |m| m.is_cached.then_some(microseconds(m.inference.cache_miss)),
    ),
];

const OTHERS: [PerModel; 4] = [
    ("nv_cache_num_hits_per_model", "Number of cache hits per model", FamilyKind::Counter, |m| {
        m.is_cached.then_some(m.inference.cache_hit.count as f64)
    }),
    ("nv_cache_num_misses_per_model", "Number of cache misses per model", FamilyKind::Counter, |m| {
        m.is_cached.then_some(m.inference.cache_miss.count as f64)
    }),
    (
        "nv_inference_pending_request_count",
        "Instantaneous number of pending requests awaiting execution per-model.",
        FamilyKind::Gauge,
        |m| Some(m.pending as f64),
    ),
    ("nv_model_load_duration_secs", "Model load time in seconds", FamilyKind::Gauge, |m| {
        Some(m.load_time.as_secs_f64())
    }),
];

/// A summary: name, help, sum of all durations, durations of the last minute.
type SummaryOf =
    (&'static str, &'static str, fn(&ModelStatistics) -> Option<StatisticDuration>, fn(&RecentDurations) -> &Vec<u64>);

const SUMMARIES: [SummaryOf; 7] = [
    (
        "nv_inference_request_summary_us",
        "Summary of inference request duration in microseconds (includes cached requests)",
        |m| Some(m.inference.success),
        |recent| &recent.request,
    ),
    (
        "nv_inference_queue_summary_us",
        "Summary of inference queuing duration in microseconds (includes cached requests)",
        |m| Some(m.inference.queue),
        |recent| &recent.queue,
    ),
    (
        "nv_inference_compute_input_summary_us",
        "Cumulative compute input duration in microseconds (does not include cached requests)",
        |m| Some(m.inference.compute_input),
        |recent| &recent.compute_input,
    ),
    (
        "nv_inference_compute_infer_summary_us",
        "Cumulative compute inference duration in microseconds (does not include cached requests)",
        |m| Some(m.inference.compute_infer),
        |recent| &recent.compute_infer,
    ),
    (
        "nv_inference_compute_output_summary_us",
        "Cumulative inference compute output duration in microseconds (does not include cached requests)",
        |m| Some(m.inference.compute_output),
        |recent| &recent.compute_output,
    ),
    (
        "nv_cache_hit_summary_per_model",
        "Summary of cache hit counts/durations per model, in microseconds.",
        |m| m.is_cached.then_some(m.inference.cache_hit),
        |recent| &recent.cache_hit,
    ),
    (
        "nv_cache_miss_summary_per_model",
        "Summary of cache miss counts/durations per model, in microseconds.",
        |m| m.is_cached.then_some(m.inference.cache_miss),
        |recent| &recent.cache_miss,
    ),
];

fn microseconds(duration: StatisticDuration) -> f64 {
    (duration.ns / 1000) as f64
}

/// The labels of a model. The tags of its configuration come first; as in Triton, their names begin with `_`.
fn labels(model: &ModelStatistics) -> Labels {
    let tags = model.tags.iter().map(|(key, value)| (format!("_{key}").into(), value.clone()));
    tags.chain([("model".into(), model.name.clone()), ("version".into(), model.version.clone())]).collect()
}

fn labels_with(model: &ModelStatistics, name: &'static str, value: String) -> Labels {
    labels(model).into_iter().chain([(name.into(), value)]).collect()
}

fn model_families(models: &[ModelStatistics], options: &MetricsOptions) -> Vec<Family> {
    let mut families = per_model(models, &COUNTS);
    families.push(failure_family(models));
    if options.counter_latencies {
        families.extend(per_model(models, &DURATIONS));
    }
    families.extend(per_model(models, &OTHERS));
    if options.histogram_latencies {
        families.push(first_response_family(models));
    }
    if let Some(quantiles) = &options.summary_quantiles {
        families.extend(SUMMARIES.iter().map(|summary| summary_family(models, summary, quantiles)));
    }
    families
}

fn per_model(models: &[ModelStatistics], families: &[PerModel]) -> Vec<Family> {
    let family = |&(name, help, kind, value): &PerModel| {
        let sample = |model: &ModelStatistics| Some(Sample::new(labels(model), value(model)?));
        Family { name, help, kind, samples: models.iter().filter_map(sample).collect() }
    };
    families.iter().map(family).collect()
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
            let mut labels = labels_with(model, "reason", reason.to_owned());
            labels.sort_unstable();
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

/// The time to the first response, of decoupled models only: for others it is the duration of the request.
fn first_response_family(models: &[ModelStatistics]) -> Family {
    let decoupled = models.iter().filter(|model| model.is_decoupled);
    Family {
        name: "nv_inference_first_response_histogram_ms",
        help: "Duration from request to first response in milliseconds",
        kind: FamilyKind::Histogram,
        samples: decoupled.flat_map(|model| Sample::of_histogram(&labels(model), &model.first_response)).collect(),
    }
}

fn summary_family(models: &[ModelStatistics], summary: &SummaryOf, quantiles: &[f64]) -> Family {
    let &(name, help, total, recent) = summary;
    let samples = models.iter().flat_map(|model| {
        let Some((total, kept)) = total(model).zip(model.recent.as_ref()) else { return Vec::new() };
        let sorted = recent(kept);
        let quantile =
            |&share: &f64| Sample::new(labels_with(model, "quantile", share.to_string()), quantile_us(sorted, share));
        let sum = Sample { suffix: "_sum", labels: labels(model), value: microseconds(total) };
        let count = Sample { suffix: "_count", labels: labels(model), value: total.count as f64 };
        quantiles.iter().map(quantile).chain([sum, count]).collect()
    });
    Family { name, help, kind: FamilyKind::Summary, samples: samples.collect() }
}

/// A quantile in microseconds of sorted durations in nanoseconds; NaN if there are none.
fn quantile_us(sorted: &[u64], quantile: f64) -> f64 {
    let rank = (quantile * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.clamp(1, sorted.len().max(1)) - 1).map_or(f64::NAN, |&ns| (ns / 1000) as f64)
}

/// The metrics of the response cache.
fn cache_families(cache: &CacheStatistics) -> Vec<Family> {
    let gauge = |name, help, value| Family {
        name,
        help,
        kind: FamilyKind::Gauge,
        samples: vec![Sample::new(Vec::new(), value)],
    };
    let lookups = cache.num_hits + cache.num_misses;
    let (lookup_us, insertion_us) = (cache.lookup.as_micros() as f64, cache.insertion.as_micros() as f64);
    vec![
        gauge("nv_cache_util", "Cache utilization [0.0 - 1.0]", cache.utilization),
        gauge("nv_cache_num_entries", "Number of responses stored in response cache", cache.num_entries as f64),
        gauge("nv_cache_num_hits", "Number of cache hits in response cache", cache.num_hits as f64),
        gauge("nv_cache_num_misses", "Number of cache misses in response cache", cache.num_misses as f64),
        gauge("nv_cache_num_lookups", "Number of cache lookups in response cache", lookups as f64),
        gauge("nv_cache_num_evictions", "Number of cache evictions in response cache", cache.num_evictions as f64),
        gauge("nv_cache_lookup_duration", "Total cache lookup duration (hit and miss), in microseconds", lookup_us),
        gauge("nv_cache_insertion_duration", "Total cache insertion duration, in microseconds", insertion_us),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model() -> ModelStatistics {
        ModelStatistics { name: "m".into(), version: "1".into(), ..Default::default() }
    }

    fn names(models: &[ModelStatistics], options: &MetricsOptions) -> Vec<&'static str> {
        let families = model_families(models, options).into_iter();
        families.filter(|family| !family.samples.is_empty()).map(|family| family.name).collect()
    }

    #[test]
    fn quantiles_are_observed_values() {
        let sorted: Vec<u64> = (1..=100).map(|us| us * 1000).collect();
        assert_eq!(
            [0.0, 0.5, 0.9, 0.999, 1.0].map(|share| quantile_us(&sorted, share)),
            [1.0, 50.0, 90.0, 100.0, 100.0]
        );
        assert!(quantile_us(&[], 0.5).is_nan());
    }

    #[test]
    fn tags_of_the_configuration_become_labels() {
        let tagged = ModelStatistics { tags: vec![("team".into(), "a".into())], ..model() };
        let text: Vec<String> = labels(&tagged).iter().map(|(name, value)| format!("{name}={value}")).collect();
        assert_eq!(text, ["_team=a", "model=m", "version=1"]);
    }

    #[test]
    fn the_options_select_the_latencies() {
        let decoupled = ModelStatistics { is_decoupled: true, recent: Some(RecentDurations::default()), ..model() };
        let without = MetricsOptions { counter_latencies: false, ..MetricsOptions::default() };
        assert!(!names(std::slice::from_ref(&decoupled), &without).contains(&"nv_inference_request_duration_us"));
        let usual = names(std::slice::from_ref(&decoupled), &MetricsOptions::default());
        assert!(usual.contains(&"nv_inference_request_duration_us") && usual.contains(&"nv_inference_request_success"));
        assert!(usual.iter().all(|name| !name.contains("summary") && !name.contains("histogram")));
        let all = MetricsOptions {
            histogram_latencies: true,
            summary_quantiles: Some(vec![0.5]),
            ..MetricsOptions::default()
        };
        let shown = names(&[decoupled, model()], &all);
        assert!(shown.contains(&"nv_inference_request_summary_us"));
        assert!(shown.contains(&"nv_inference_first_response_histogram_ms"));
        assert!(!shown.contains(&"nv_cache_hit_summary_per_model"), "no model has a cache");
    }
}
