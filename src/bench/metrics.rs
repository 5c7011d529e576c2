//! Counters of the server: what its metrics say that no client sees.

use client::ClientError;
use launcher::scrape::Metrics;

/// Reads the metrics at `HOST:PORT`, the value of `--metrics`.
///
/// # Errors
/// When the address is not of this form, or the metrics cannot be read.
pub(crate) fn read(address: &str) -> Result<Metrics, ClientError> {
    let place = address.trim_start_matches("http://").trim_end_matches('/').rsplit_once(':');
    let (host, port) = place
        .and_then(|(host, port)| Some((host, port.parse().ok()?)))
        .ok_or_else(|| ClientError::Usage(format!("--metrics is `{address}`, expected HOST:PORT")))?;
    Metrics::of(host, port)
        .map_err(|source| ClientError::Io { what: format!("reading the metrics of `{address}`"), source })
}

/// Tokens that steps generated, of all models.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct DraftCounts {
    output: f64,
    drafted: f64,
    accepted: f64,
}

impl DraftCounts {
    pub(crate) fn of(metrics: &Metrics) -> Self {
        let sum = |name: &str| metrics.all(name).map(|sample| sample.value).sum();
        Self {
            output: sum("trireme_llm_output_tokens_total"),
            drafted: sum("trireme_llm_drafted_tokens_total"),
            accepted: sum("trireme_llm_accepted_draft_tokens_total"),
        }
    }

    /// Mean number of tokens that a step gave a sequence since `before`, and the share of the drafts that were accepted; `None` if no
    /// token was generated. A step gives a sequence one token and those of its accepted drafts.
    pub(crate) fn since(self, before: Self) -> Option<(f64, f64)> {
        let output = self.output - before.output;
        let (drafted, accepted) = (self.drafted - before.drafted, self.accepted - before.accepted);
        let share = if drafted > 0.0 { accepted / drafted } else { 0.0 };
        (output > accepted).then(|| (output / (output - accepted), share))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_of_a_step_follow_from_the_accepted_drafts() {
        let counts = |output, drafted, accepted| DraftCounts { output, drafted, accepted };
        assert_eq!(counts(100.0, 60.0, 60.0).since(counts(0.0, 0.0, 0.0)), Some((2.5, 1.0)));
        assert_eq!(counts(150.0, 100.0, 70.0).since(counts(100.0, 60.0, 60.0)), Some((1.25, 0.25)));
        assert_eq!(counts(150.0, 60.0, 60.0).since(counts(100.0, 60.0, 60.0)), Some((1.0, 0.0)));
        assert_eq!(counts(5.0, 1.0, 1.0).since(counts(5.0, 1.0, 1.0)), None);
    }
}
