//! The figures of a run.

use std::collections::BTreeSet;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use text::Tokenizer;

use crate::outcome::Outcome;
use crate::percentiles::{Histogram, Percentiles};

/// Latencies of the requests of one priority.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct PriorityFigures {
    /// The priority, as it was sent.
    pub priority: i64,
    /// Requests sent.
    pub requests: usize,
    /// Failed requests.
    pub errors: usize,
    /// Time from a request to its first token.
    pub time_to_first_token_ms: Percentiles,
    /// Time from one token to the next.
    pub inter_token_latency_ms: Percentiles,
    /// Time from a request to the end of its response.
    pub request_latency_ms: Percentiles,
}

impl PriorityFigures {
    /// Those of all priorities of a run, in ascending order; requests without a priority are left out.
    fn of_all(outcomes: &[Outcome]) -> Vec<Self> {
        let priorities: BTreeSet<i64> = outcomes.iter().filter_map(|outcome| outcome.priority).collect();
        priorities.into_iter().map(|priority| Self::of(outcomes, priority)).collect()
    }

    fn of(outcomes: &[Outcome], priority: i64) -> Self {
        let sent = || outcomes.iter().filter(|outcome| outcome.priority == Some(priority));
        let successful = || sent().filter(|outcome| outcome.error.is_none());
        let (requests, answers) = (sent().count(), successful().count());
        let mut time_to_first: Vec<Duration> = successful().filter_map(|outcome| outcome.time_to_first).collect();
        let mut between: Vec<Duration> = successful().flat_map(|outcome| outcome.gaps.iter().copied()).collect();
        let mut whole: Vec<Duration> = successful().map(|outcome| outcome.latency).collect();
        Self {
            priority,
            requests,
            errors: requests - answers,
            time_to_first_token_ms: Percentiles::of(&mut time_to_first),
            inter_token_latency_ms: Percentiles::of(&mut between),
            request_latency_ms: Percentiles::of(&mut whole),
        }
    }
}

/// The figures of a run. Latencies do not include failed requests.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Figures {
    /// The protocol, by its name on the command line.
    pub protocol: String,
    /// The model.
    pub model: String,
    /// Maximum number of requests in flight; `None` for no limit.
    pub concurrency: Option<usize>,
    /// Requests sent per second; `None` if only `concurrency` limits them.
    pub request_rate: Option<f64>,
    /// Whether responses were streamed.
    pub is_streaming: bool,
    /// Requests sent.
    pub requests: usize,
    /// Failed requests.
    pub errors: usize,
    /// Responses with fewer tokens than requested.
    pub short_answers: usize,
    /// Time from the first request to the last response.
    pub seconds: f64,
    /// Tokens of the prompts.
    pub prompt_tokens: usize,
    /// Generated tokens.
    pub output_tokens: usize,
    /// Generated tokens per second.
    pub output_tokens_per_second: f64,
    /// Tokens per second, prompts included.
    pub total_tokens_per_second: f64,
    /// Successful requests per second.
    pub requests_per_second: f64,
    /// Time from a request to its first token.
    pub time_to_first_token_ms: Percentiles,
    /// Time from one token to the next.
    pub inter_token_latency_ms: Percentiles,
    /// Mean time of the tokens after the first, one value per request.
    pub time_per_output_token_ms: Percentiles,
    /// Time from a request to the end of its response.
    pub request_latency_ms: Percentiles,
    /// Histogram of `time_to_first_token_ms`.
    pub time_to_first_token_histogram: Histogram,
    /// Histogram of `inter_token_latency_ms`.
    pub inter_token_latency_histogram: Histogram,
    /// Histogram of `request_latency_ms`.
    pub request_latency_histogram: Histogram,
    /// Mean number of tokens that a step gave a stream: 1 and its accepted drafts. `None` without `--metrics`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens_per_step: Option<f64>,
    /// Share of the drafts that were accepted. `None` without `--metrics`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accepted_drafts: Option<f64>,
    /// Latencies by priority, if requests had one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub by_priority: Vec<PriorityFigures>,
    /// Error of the first failed request.
    pub first_error: Option<String>,
}

impl Figures {
    /// Summarizes a run. The number of tokens comes from the server, else from the tokenizer and the text, else from the number of
    /// streamed pieces.
    pub(crate) fn of(outcomes: &mut [Outcome], elapsed: Duration, tokenizer: Option<&Tokenizer>) -> Self {
        for outcome in outcomes.iter_mut().filter(|outcome| outcome.num_tokens.is_none()) {
            let encoded = tokenizer.and_then(|tokenizer| tokenizer.encode(&outcome.text, false).ok());
            outcome.num_tokens = Some(encoded.map_or(outcome.num_pieces, |ids| ids.len()));
        }
        let tokens = |outcome: &Outcome| outcome.num_tokens.unwrap_or(0);
        let successful = || outcomes.iter().filter(|outcome| outcome.error.is_none());
        let first_error = outcomes.iter().find_map(|outcome| outcome.error.clone());
        let (seconds, answers) = (elapsed.as_secs_f64(), successful().count());
        let prompt_tokens = successful().map(|outcome| outcome.prompt_tokens).sum();
        let output_tokens = outcomes.iter().map(tokens).sum();
        let mut time_to_first: Vec<Duration> = successful().filter_map(|outcome| outcome.time_to_first).collect();
        let mut between: Vec<Duration> = successful().flat_map(|outcome| outcome.gaps.iter().copied()).collect();
        let mut whole: Vec<Duration> = successful().map(|outcome| outcome.latency).collect();
        let per_token = |outcome: &Outcome| {
            let after = u32::try_from(tokens(outcome).checked_sub(1)?).ok().filter(|&after| after > 0)?;
            Some((outcome.latency - outcome.time_to_first?) / after)
        };
        let mut per_token: Vec<Duration> =
            successful().filter(|outcome| outcome.num_pieces > 1).filter_map(per_token).collect();
        Self {
            requests: outcomes.len(),
            errors: outcomes.len() - answers,
            short_answers: successful().filter(|outcome| tokens(outcome) < outcome.max_tokens).count(),
            seconds,
            prompt_tokens,
            output_tokens,
            output_tokens_per_second: output_tokens as f64 / seconds,
            total_tokens_per_second: (prompt_tokens + output_tokens) as f64 / seconds,
            requests_per_second: answers as f64 / seconds,
            time_to_first_token_histogram: Histogram::of(&time_to_first),
            inter_token_latency_histogram: Histogram::of(&between),
            request_latency_histogram: Histogram::of(&whole),
            time_to_first_token_ms: Percentiles::of(&mut time_to_first),
            inter_token_latency_ms: Percentiles::of(&mut between),
            time_per_output_token_ms: Percentiles::of(&mut per_token),
            request_latency_ms: Percentiles::of(&mut whole),
            by_priority: PriorityFigures::of_all(outcomes),
            first_error,
            ..Self::default()
        }
    }

    /// Successful requests per minute.
    pub(crate) fn requests_per_minute(&self) -> f64 {
        self.requests_per_second * 60.0
    }

    /// The output of LMDeploy's profile scripts, followed by the latencies.
    pub(crate) fn text(&self) -> String {
        let rule = "-".repeat(50);
        let first = &self.time_to_first_token_ms;
        let mut text = format!("\n{rule}\nconcurrency: {}\nelapsed_time: {:.3}s\n\n", self.pace(), self.seconds);
        if self.is_streaming {
            text += &format!(
                "first_token latency(min, max, ave): {:.3}s, {:.3}s, {:.3}s\n\n",
                first.min / 1e3,
                first.max / 1e3,
                first.mean / 1e3
            );
        }
        text += &format!(
            "number of prompt tokens: {}\nnumber of completion tokens: {}\n",
            self.prompt_tokens, self.output_tokens
        );
        text += &format!("token throughput (completion token): {:.3} token/s\n", self.output_tokens_per_second);
        text += &format!("token throughput (prompt + completion token): {:.3} token/s\n", self.total_tokens_per_second);
        text += &format!("RPS (request per second): {:.3} req/s\n", self.requests_per_second);
        text += &format!("RPM (request per minute): {:.3} req/min\n{rule}\n", self.requests_per_minute());
        if self.is_streaming {
            text += &format!("time to first token    {first}\n");
            text += &format!("inter-token latency    {}\n", self.inter_token_latency_ms);
            text += &format!("time per output token  {}\n", self.time_per_output_token_ms);
        }
        text += &format!("request latency        {}", self.request_latency_ms);
        if let Some((tokens, share)) = self.tokens_per_step.zip(self.accepted_drafts) {
            text += &format!("\ntokens a step          {tokens:.3}, {:.1} % of the drafts accepted", 100.0 * share);
        }
        text += &self.priorities();
        text + &self.problems()
    }

    /// Lines about each priority; empty if requests had none.
    pub(crate) fn priorities(&self) -> String {
        let lines = self.by_priority.iter().map(|it| {
            let (first, whole) = (&it.time_to_first_token_ms, &it.request_latency_ms);
            let head = format!("\npriority {}: {} requests, {} failed", it.priority, it.requests, it.errors);
            format!("{head}\n  time to first token  {first}\n  request latency      {whole}")
        });
        lines.collect()
    }

    /// Lines about short and failed responses; empty if there are none.
    pub(crate) fn problems(&self) -> String {
        let mut text = String::new();
        if self.short_answers > 0 {
            text += &format!("\n{} of {} answers are shorter than requested", self.short_answers, self.requests);
        }
        if let Some(error) = &self.first_error {
            text += &format!("\n{} of {} requests failed, one of them with: {error}", self.errors, self.requests);
        }
        text
    }

    /// The request rate or the number of requests in flight, as text.
    pub(crate) fn pace(&self) -> String {
        match (self.request_rate, self.concurrency) {
            (Some(rate), _) => format!("{rate} req/s"),
            (None, Some(concurrency)) => concurrency.to_string(),
            (None, None) => "all".to_owned(),
        }
    }

    /// The columns of LMDeploy's CSV.
    pub(crate) const CSV_HEAD: &str =
        "batch,num_prompts,RPS,RPM,FTL(ave)(s),FTL(min)(s),FTL(max)(s),throughput(out tok/s),throughput(total tok/s)\n";

    /// A line of LMDeploy's CSV.
    pub(crate) fn csv_line(&self) -> String {
        let first = &self.time_to_first_token_ms;
        let seconds = |ms: f64| if self.is_streaming { format!("{:.3}", ms / 1e3) } else { "-".to_owned() };
        format!(
            "{},{},{:.3},{:.3},{},{},{},{:.3},{:.3}\n",
            self.concurrency.unwrap_or(self.requests),
            self.requests,
            self.requests_per_second,
            self.requests_per_minute(),
            seconds(first.mean),
            seconds(first.min),
            seconds(first.max),
            self.output_tokens_per_second,
            self.total_tokens_per_second
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dataset::Prompt;

    fn outcome(num_tokens: Option<usize>, error: Option<&str>) -> Outcome {
        let prompt = Prompt { text: "a".into(), ids: vec![1, 2], max_tokens: 5, priority: None };
        Outcome {
            time_to_first: Some(Duration::from_millis(10)),
            gaps: vec![Duration::from_millis(2); 3],
            num_pieces: 4,
            num_tokens,
            latency: Duration::from_millis(16),
            error: error.map(str::to_owned),
            ..Outcome::begin(&prompt, Duration::ZERO)
        }
    }

    #[test]
    fn failed_requests_are_left_out_of_latencies() {
        let mut outcomes = [outcome(Some(4), None), outcome(Some(0), Some("x"))];
        let figures = Figures::of(&mut outcomes, Duration::from_secs(2), None);
        assert_eq!((figures.requests, figures.errors, figures.short_answers), (2, 1, 1));
        assert_eq!((figures.prompt_tokens, figures.output_tokens), (2, 4));
        assert_eq!(figures.output_tokens_per_second, 2.0);
        assert_eq!(figures.requests_per_minute(), 30.0);
        assert_eq!(figures.time_to_first_token_ms.p99, 10.0);
        assert_eq!(figures.inter_token_latency_ms.p50, 2.0);
        assert_eq!(figures.time_per_output_token_ms.p50, 2.0);
    }

    #[test]
    fn each_priority_has_latencies_of_its_own() {
        let of = |priority, millis| Outcome {
            priority,
            time_to_first: Some(Duration::from_millis(millis)),
            latency: Duration::from_millis(millis + 6),
            ..outcome(Some(4), None)
        };
        let failed = Outcome { priority: Some(1), ..outcome(None, Some("x")) };
        let mut outcomes = [of(Some(2), 30), of(Some(1), 10), of(None, 90), of(Some(2), 50), failed];
        let figures = Figures::of(&mut outcomes, Duration::from_secs(1), None);
        let found: Vec<_> = figures.by_priority.iter().map(|it| (it.priority, it.requests, it.errors)).collect();
        assert_eq!(found, [(1, 2, 1), (2, 2, 0)]);
        let slowest = |at: usize| figures.by_priority[at].time_to_first_token_ms.max;
        assert_eq!((slowest(0), slowest(1)), (10.0, 50.0));
        assert!(figures.priorities().contains("priority 1: 2 requests, 1 failed"), "{}", figures.priorities());
    }

    #[test]
    fn the_csv_has_a_value_for_each_column() {
        let figures =
            Figures { is_streaming: true, ..Figures::of(&mut [outcome(None, None)], Duration::from_secs(1), None) };
        let (line, head) = (figures.csv_line(), Figures::CSV_HEAD);
        assert_eq!(line.split(',').count(), head.split(',').count());
        assert_eq!(line, "1,1,1.000,60.000,0.010,0.010,0.010,4.000,6.000\n");
    }
}
