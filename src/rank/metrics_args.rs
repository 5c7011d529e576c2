//! tritonserver's options of metrics, and the front's configuration from them.

use std::time::Duration;

use clap::{ArgAction, Args};
use front::MetricsOptions;

use crate::boolean::boolean;

/// Default quantiles of a summary, as tritonserver's.
const QUANTILES: [f64; 5] = [0.5, 0.9, 0.95, 0.99, 0.999];

/// Options of metrics beside port and address.
#[derive(Debug, Clone, Args)]
pub struct MetricsArgs {
    /// `counter_latencies=BOOL`, `histogram_latencies=BOOL`, `summary_latencies=BOOL`, `summary_quantiles=Q:ERROR,...`;
    /// may be given more than once
    #[arg(long, value_name = "SETTING=VALUE")]
    pub metrics_config: Vec<String>,
    /// Milliseconds between two measurements of CPU and GPUs
    #[arg(long, default_value_t = 2000, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..))]
    pub metrics_interval_ms: u64,
    /// Show metrics of this node's CPU and memory
    #[arg(long, default_value = "true", value_parser = boolean, action = ArgAction::Set)]
    pub allow_cpu_metrics: bool,
    /// Show metrics of this node's GPUs, where NVIDIA's management library is found
    #[arg(long, default_value = "true", value_parser = boolean, action = ArgAction::Set)]
    pub allow_gpu_metrics: bool,
}

impl MetricsArgs {
    /// Which metrics of models' durations are shown.
    ///
    /// # Errors
    /// With the setting that is invalid.
    pub(crate) fn options(&self) -> Result<MetricsOptions, String> {
        let mut options = MetricsOptions::default();
        let (mut has_summaries, mut quantiles) = (false, QUANTILES.to_vec());
        for setting in &self.metrics_config {
            let invalid = |why: &str| format!("--metrics-config={setting}: {why}");
            let (key, value) = setting.split_once('=').ok_or_else(|| invalid("expected SETTING=VALUE"))?;
            match key {
                "counter_latencies" => options.counter_latencies = boolean(value).map_err(|why| invalid(&why))?,
                "histogram_latencies" => options.histogram_latencies = boolean(value).map_err(|why| invalid(&why))?,
                "summary_latencies" => has_summaries = boolean(value).map_err(|why| invalid(&why))?,
                "summary_quantiles" => quantiles = quantiles_of(value).map_err(|why| invalid(&why))?,
                _ => {
                    let known = "counter_latencies, histogram_latencies, summary_latencies or summary_quantiles";
                    return Err(invalid(&format!("expected {known}")));
                }
            }
        }
        options.summary_quantiles = has_summaries.then_some(quantiles);
        Ok(options)
    }

    /// Age at which metrics of the host are measured again.
    pub(crate) fn interval(&self) -> Duration {
        Duration::from_millis(self.metrics_interval_ms)
    }
}

/// Parses `0.5:0.05,0.9:0.01`: quantiles with allowed errors. Our quantiles are exact, so the errors are only validated.
fn quantiles_of(text: &str) -> Result<Vec<f64>, String> {
    let share = |text: &str| text.trim().parse::<f64>().ok().filter(|share| (0.0..=1.0).contains(share));
    let pair = |pair: &str| {
        let (quantile, error) = pair.split_once(':').unwrap_or((pair, "0"));
        let quantile = share(quantile).filter(|_| share(error).is_some());
        quantile.ok_or_else(|| format!("`{pair}` is not QUANTILE:ERROR, both from 0 to 1"))
    };
    text.split(',').map(pair).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(settings: &[&str]) -> Result<MetricsOptions, String> {
        let metrics_config = settings.iter().map(|&setting| setting.to_owned()).collect();
        let args =
            MetricsArgs { metrics_config, metrics_interval_ms: 1, allow_cpu_metrics: true, allow_gpu_metrics: true };
        args.options()
    }

    #[test]
    fn settings_are_those_of_tritonserver() {
        assert_eq!(options(&[]).unwrap(), MetricsOptions::default());
        let all = options(&["summary_latencies=true", "histogram_latencies=true", "counter_latencies=false"]).unwrap();
        assert_eq!((all.counter_latencies, all.histogram_latencies), (false, true));
        assert_eq!(all.summary_quantiles.unwrap(), QUANTILES);
        let own = options(&["summary_quantiles=0.5:0.1,0.75:0.05", "summary_latencies=1"]).unwrap();
        assert_eq!(own.summary_quantiles.unwrap(), [0.5, 0.75]);
        for wrong in ["summary_latencies", "summary_latencies=maybe", "summary_quantiles=2:0.1", "nothing=1"] {
            assert!(options(&[wrong]).unwrap_err().starts_with(&format!("--metrics-config={wrong}: ")), "{wrong}");
        }
    }
}
