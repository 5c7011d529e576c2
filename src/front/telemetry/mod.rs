//! Metrics, traces and log settings.

pub(crate) mod exposition;
pub(crate) mod ledger;
pub(crate) mod log_settings;
pub(crate) mod metrics;
pub(crate) mod metrics_settings;
pub(crate) mod otlp;
pub(crate) mod otlp_export;
pub(crate) mod recording;
pub(crate) mod trace_file;
pub(crate) mod trace_settings;
