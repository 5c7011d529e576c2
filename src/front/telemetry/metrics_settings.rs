//! The options of metrics, and the interface of further sources.

use crate::telemetry::exposition::Family;

/// A source of further metrics, such as the LLM backend. It is read at each scrape.
pub trait MetricsSource: Send + Sync {
    /// The current metrics. Names must be unique over all sources.
    fn families(&self) -> Vec<Family>;

    /// Further metrics whose names are known at run time only, in Prometheus' text format.
    fn text(&self) -> String {
        String::new()
    }
}

/// The form of the latency metrics of models, as in tritonserver's `--metrics-config`.
#[derive(Debug, Clone, PartialEq)]
pub struct MetricsOptions {
    /// Sums, as counters.
    pub counter_latencies: bool,
    /// Histograms.
    pub histogram_latencies: bool,
    /// Summaries of the last minute, with these quantiles from 0 to 1. Needs
    /// [`ServerConfig::keeps_recent_durations`](serving::ServerConfig).
    pub summary_quantiles: Option<Vec<f64>>,
}

impl Default for MetricsOptions {
    fn default() -> Self {
        Self { counter_latencies: true, histogram_latencies: false, summary_quantiles: None }
    }
}
