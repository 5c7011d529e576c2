//! Which metrics are shown, and the interface of further sources.

use crate::telemetry::exposition::Family;

/// Where further metrics come from, such as an LLM backend's. Read at each scrape.
pub trait MetricsSource: Send + Sync {
    /// Its families as of now. A name must not be another source's.
    fn families(&self) -> Vec<Family>;

    /// Further families, whose names only come up at run time, in Prometheus' text format.
    fn text(&self) -> String {
        String::new()
    }
}

/// Which durations of models are shown, and how: tritonserver's `--metrics-config`.
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
