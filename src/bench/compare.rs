//! `trireme bench compare`: measures two servers or models alternately, and computes their ratio with its confidence interval.

use std::path::PathBuf;

use clap::Args;
use client::ClientError;
use serde::Serialize;

use crate::figures::Figures;
use crate::files::{print_text, write_json};
use crate::serving::{self, WorkloadArgs};
use crate::target::{Protocol, Target};
use crate::target_grpc::CONNECTIONS;

/// Two servers or two models, alternately with the same requests: each figure as a ratio with its 95 % confidence interval
#[derive(Debug, Clone, Args)]
pub struct CompareArgs {
    /// The first: `ADDR`, `ADDR/MODEL` or `PROTOCOL://ADDR/MODEL` (grpc, http, openai, openai-chat)
    #[arg(value_name = "FIRST")]
    first: String,
    /// The second, in the same form; ratios are first to second
    #[arg(value_name = "SECOND")]
    second: String,
    /// Directory of the models' tokenizer; `-` for none
    #[arg(value_name = "TOKENIZER")]
    tokenizer_path: String,
    #[command(flatten)]
    workload: WorkloadArgs,
    /// Runs of each, alternately
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(2..=100))]
    rounds: u32,
    /// Requests in flight
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..))]
    concurrency: u32,
    /// Write the figures as JSON too; `-` is standard output
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// The ratio of a figure of the first to that of the second, over all rounds.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct Ratio {
    figure: &'static str,
    first: f64,
    second: f64,
    ratio: f64,
    /// Lower end of the 95 % confidence interval.
    low: f64,
    /// Upper end.
    high: f64,
}

#[derive(Debug, Serialize)]
struct Comparison {
    first: String,
    second: String,
    rounds: u32,
    ratios: Vec<Ratio>,
    first_runs: Vec<Figures>,
    second_runs: Vec<Figures>,
}

/// Name of a figure, and its accessor.
type Reading = (&'static str, fn(&Figures) -> f64);
const READINGS: [Reading; 5] = [
    ("output tokens/s", |run| run.output_tokens_per_second),
    ("requests/s", |run| run.requests_per_second),
    ("time to first token, mean ms", |run| run.time_to_first_token_ms.mean),
    ("inter-token latency, mean ms", |run| run.inter_token_latency_ms.mean),
    ("request latency, mean ms", |run| run.request_latency_ms.mean),
];

/// Measures both alternately and prints their ratios.
pub(crate) async fn run(args: CompareArgs) -> Result<(), ClientError> {
    let tokenizer = serving::tokenizer(&args.tokenizer_path)?;
    let prompts = args.workload.prompts(tokenizer.as_ref())?;
    let targets = [open(&args.first).await?, open(&args.second).await?];
    let mut runs = [Vec::new(), Vec::new()];
    for round in 0..args.rounds {
        // The order alternates, so that a drift of the machine affects both alike.
        let order = if round % 2 == 0 { [0, 1] } else { [1, 0] };
        for which in order {
            let what = format!("round {} of {}, {}", round + 1, args.rounds, ["first", "second"][which]);
            let concurrency = Some(args.concurrency as usize);
            let (_, target) = &targets[which];
            let run = args.workload.run(&what, target, &prompts, tokenizer.as_ref(), concurrency, None).await;
            if let Some(error) = &run.first_error {
                return Err(ClientError::Usage(format!("{what}: {} requests failed, one with: {error}", run.errors)));
            }
            runs[which].push(Figures { protocol: targets[which].0.name(), ..run });
        }
    }
    let [first_runs, second_runs] = runs;
    let ratios = ratios(&first_runs, &second_runs);
    print_text(args.json.as_ref(), &text(&args, &ratios));
    let comparison =
        Comparison { first: args.first, second: args.second, rounds: args.rounds, ratios, first_runs, second_runs };
    match &args.json {
        Some(path) => write_json(path, &comparison),
        None => Ok(()),
    }
}

async fn open(text: &str) -> Result<(Protocol, Target), ClientError> {
    let (protocol, address, model) = parse(text)?;
    Ok((protocol, Target::open(protocol, address, model, CONNECTIONS).await?))
}

fn parse(text: &str) -> Result<(Protocol, &str, Option<&str>), ClientError> {
    let (scheme, rest) = text.split_once("://").unwrap_or(("grpc", text));
    let protocol = <Protocol as clap::ValueEnum>::from_str(scheme, false)
        .map_err(|_| ClientError::Usage(format!("`{scheme}://` is none of grpc, http, openai, openai-chat")))?;
    let (address, model) = rest.split_once('/').map_or((rest, None), |(address, model)| (address, Some(model)));
    Ok((protocol, address, model.filter(|model| !model.is_empty())))
}

fn ratios(first: &[Figures], second: &[Figures]) -> Vec<Ratio> {
    let ratio = |&(figure, read): &Reading| {
        let (first, second): (Vec<f64>, Vec<f64>) =
            (first.iter().map(read).collect(), second.iter().map(read).collect());
        let logs: Vec<f64> = first.iter().zip(&second).map(|(first, second)| (first / second).ln()).collect();
        if logs.iter().any(|log| !log.is_finite()) {
            return None; // A missing figure, such as the time to first token without streaming.
        }
        let (middle, half) = confidence(&logs);
        let [ratio, low, high] = [middle, middle - half, middle + half].map(f64::exp);
        Some(Ratio { figure, first: mean(&first), second: mean(&second), ratio, low, high })
    };
    READINGS.iter().filter_map(ratio).collect()
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// Student's t at 97.5 % for 1, 2, … degrees of freedom.
const STUDENT: [f64; 30] = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
];
/// Used for more degrees of freedom; the interval is then slightly too wide.
const STUDENT_MANY: f64 = 2.042;

/// Mean of at least two values, and half the width of its 95 % confidence interval.
fn confidence(values: &[f64]) -> (f64, f64) {
    let (mean, degrees) = (mean(values), values.len() - 1);
    let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / degrees as f64;
    let student = STUDENT.get(degrees - 1).copied().unwrap_or(STUDENT_MANY);
    (mean, student * (variance / values.len() as f64).sqrt())
}

fn text(args: &CompareArgs, ratios: &[Ratio]) -> String {
    let head = format!(
        "first   {}\nsecond  {}\n{} rounds in turn\n\n{:30} {:>12} {:>12} {:>8}   95 % confidence\n",
        args.first, args.second, args.rounds, "", "first", "second", "ratio"
    );
    let line = |ratio: &Ratio| {
        let Ratio { figure, first, second, ratio, low, high } = ratio;
        let verdict = if *low <= 1.0 && 1.0 <= *high { "  no difference shown" } else { "" };
        format!("{figure:30} {first:12.3} {second:12.3} {ratio:8.3}   {low:.3} to {high:.3}{verdict}\n")
    };
    (head + &ratios.iter().map(line).collect::<String>()).trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_follow_students_distribution() {
        // 1, 2, 3, 4, 5: mean 3, standard error sqrt(2.5 / 5), t(4) = 2.776.
        let (mean, half) = confidence(&[1.0, 2.0, 3.0, 4.0, 5.0]);
        assert_eq!(mean, 3.0);
        assert!((half - 2.776 * 0.5f64.sqrt()).abs() < 1e-9);
    }

    #[test]
    fn ratios_are_taken_round_by_round() {
        let run = |tokens: f64| Figures { output_tokens_per_second: tokens, ..Figures::default() };
        // Both double from round to round: the ratio has no variance although the figures have.
        let ratios = ratios(&[run(20.0), run(40.0)], &[run(10.0), run(20.0)]);
        assert_eq!(ratios.len(), 1, "missing figures are left out");
        assert!((ratios[0].ratio - 2.0).abs() < 1e-12 && (ratios[0].high - 2.0).abs() < 1e-12, "{ratios:?}");
    }

    #[test]
    fn a_server_is_parsed_with_its_protocol_and_model() {
        assert_eq!(parse("h:1").unwrap(), (Protocol::Grpc, "h:1", None));
        assert_eq!(parse("openai://h:1/m/x").unwrap(), (Protocol::Openai, "h:1", Some("m/x")));
        assert!(parse("ftp://h").is_err());
    }
}
