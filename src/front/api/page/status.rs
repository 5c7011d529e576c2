//! `GET /ui/status.json`: the facts of the page, from the metrics that `GET /metrics` and `trireme top` show.

use std::mem::take;

use http::HeaderMap;
use serde_json::{Map, Value, json};

use crate::config::Config;
use crate::state::State;
use crate::telemetry::exposition::{Family, Labels};
use crate::telemetry::metrics;
use crate::transport::restricted::Api;

/// The metrics that the page uses: these, and all whose names begin with one of `PREFIXES`.
const NAMES: [&str; 3] = ["nv_inference_request_success", "nv_inference_request_failure", "nv_llm_output_token_len"];
const PREFIXES: [&str; 3] = ["trireme_", "nv_cpu_", "nv_gpu_"];

/// The status of the server. `headers` are those of the request, whose keys decide which models it may list.
pub(super) fn status(state: &State, headers: &HeaderMap) -> Value {
    let metrics = shows_metrics(&state.config).then(|| {
        let families = metrics::families(state);
        let shown = families.iter().filter(|family| is_shown(family.name) && !family.samples.is_empty());
        shown.map(|family| (family.name.to_owned(), samples(family).into())).collect::<Map<String, Value>>()
    });
    json!({"server": server(state), "models": models(state, headers), "metrics": metrics})
}

/// Whether the metrics service is on and has the address of HTTP. At another address, it may be meant for fewer clients.
fn shows_metrics(config: &Config) -> bool {
    config.metrics.as_ref().zip(config.http.as_ref()).is_some_and(|(metrics, http)| metrics.host == http.host)
}

fn is_shown(name: &str) -> bool {
    NAMES.contains(&name) || PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

fn server(state: &State) -> Value {
    let (config, metadata) = (&state.config, state.server.server_metadata());
    let addresses = state.addresses.get().copied().unwrap_or_default();
    json!({
        "name": metadata.name,
        "version": metadata.version,
        "is_ready": state.is_ready(),
        "is_draining": state.is_draining(),
        "needs_key": config.http_restrictions.restricts(Api::Inference),
        "ranks": config.world.hosts,
        "world_restarts": config.world.num_restarts,
        "grpc_port": addresses.grpc.map(|address| address.port()),
        "grpc_tls": config.grpc_tls.is_some(),
    })
}

/// The models that clients with these headers may list: all with their states, or the ready ones.
fn models(state: &State, headers: &HeaderMap) -> Value {
    let ready_only = state.config.http_restrictions.check(Api::ModelRepository, headers).is_err();
    let entry = |model: serving::ModelIndexEntry| json!({"name": model.name, "version": model.version, "state": model.state.name(), "reason": model.reason});
    state.server.repository_index(ready_only).into_iter().map(entry).collect()
}

/// One value for each sample, and one object for each histogram. Its last bound, infinity, is null.
fn samples(family: &Family) -> Vec<Value> {
    let (mut bounds, mut counts, mut sum) = (Vec::new(), Vec::new(), 0.0);
    let mut values = Vec::new();
    for sample in &family.samples {
        match (sample.suffix, sample.labels.last()) {
            ("_bucket", Some((_, bound))) => {
                bounds.push(bound.parse::<f64>().ok().filter(|bound| bound.is_finite()));
                counts.push(sample.value);
            }
            ("_sum", _) => sum = sample.value,
            ("_count", _) => values.push(json!({
                "labels": labels(&sample.labels), "bounds": take(&mut bounds), "counts": take(&mut counts), "sum": sum,
                "count": sample.value,
            })),
            _ => values.push(json!({"labels": labels(&sample.labels), "value": sample.value})),
        }
    }
    values
}

fn labels(labels: &Labels) -> Map<String, Value> {
    labels.iter().map(|(name, value)| (name.to_string(), value.as_str().into())).collect()
}

#[cfg(test)]
mod tests {
    use serving::HistogramValues;

    use super::*;
    use crate::config::Address;
    use crate::telemetry::exposition::{FamilyKind, Sample};

    #[test]
    fn a_histogram_is_one_object_and_a_gauge_one_value() {
        let of = |model: &str| -> Labels { vec![("model".into(), model.to_owned())] };
        let values = HistogramValues { bounds: vec![0.5, 2.0], counts: vec![1, 3], count: 4, sum: 7.25 };
        let mut all = Sample::of_histogram(&of("a"), &values);
        all.extend(Sample::of_histogram(&of("b"), &values));
        all.push(Sample::new(of("c"), f64::NAN));
        let family = Family { name: "x", help: "", kind: FamilyKind::Histogram, samples: all };
        let histogram = |model| json!({"labels": {"model": model}, "bounds": [0.5, 2.0, null], "counts": [1.0, 3.0, 4.0], "sum": 7.25, "count": 4.0});
        let expected = [histogram("a"), histogram("b"), json!({"labels": {"model": "c"}, "value": null})];
        assert_eq!(samples(&family), expected);
    }

    #[test]
    fn metrics_are_shown_only_where_their_service_has_the_address_of_http() {
        let mut config = Config::default();
        assert!(shows_metrics(&config));
        config.metrics = Some(Address::new("127.0.0.1", 8002));
        assert!(!shows_metrics(&config));
        config.http = Some(Address::new("127.0.0.1", 8000));
        assert!(shows_metrics(&config));
        config.metrics = None;
        assert!(!shows_metrics(&config));
    }
}
