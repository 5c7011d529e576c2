//! `trireme bench serve`: a workload of prompts against an LLM, with streaming answers.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::ClientError;
use crate::grpc::{Connection, frame};
use crate::proto::{ModelInferRequest, ModelStreamInferResponse};
use crate::report::Percentiles;
use crate::tensor::{Model, Values};

/// `trireme bench serve`
#[derive(Debug, Clone, Args)]
pub struct ServeArgs {
    /// Requests, one JSON object a line: {"prompt_token_ids": [..], "max_tokens": n}
    #[arg(long, value_name = "FILE")]
    pub workload: PathBuf,
    /// Where the server's gRPC port is
    #[arg(short, long, default_value = "localhost:8001", value_name = "HOST:PORT")]
    pub url: String,
    /// Model that takes token ids
    #[arg(short, long, default_value = "tensorrt_llm")]
    pub model: String,
    /// Requests in flight; all at once when absent
    #[arg(short, long)]
    pub concurrency: Option<usize>,
    /// Requests per second, at random times, instead of a fixed number in flight
    #[arg(short, long, conflicts_with = "concurrency")]
    pub request_rate: Option<f64>,
    /// Makes arrival times repeatable
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Connections to share
    #[arg(long, default_value_t = 4)]
    pub connections: usize,
    /// Write the figures as JSON too
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

#[derive(Debug, Deserialize)]
struct Line {
    prompt_token_ids: Vec<i64>,
    max_tokens: u32,
}

struct Work {
    request: ModelInferRequest,
    max_tokens: usize,
}

/// How one request went.
#[derive(Default)]
struct Outcome {
    to_first: Option<Duration>,
    between: Vec<Duration>,
    num_tokens: usize,
    whole: Duration,
    error: Option<String>,
}

/// The figures of a run.
#[derive(Debug, Serialize)]
struct Figures {
    requests: usize,
    errors: usize,
    short_answers: usize,
    seconds: f64,
    output_tokens: usize,
    output_tokens_per_second: f64,
    requests_per_second: f64,
    time_to_first_token_ms: Percentiles,
    inter_token_latency_ms: Percentiles,
    request_latency_ms: Percentiles,
}

/// Runs the workload and prints its figures.
pub(crate) async fn run(args: ServeArgs) -> Result<(), ClientError> {
    if args.connections == 0 || args.concurrency == Some(0) {
        return Err(ClientError::Usage("--connections and --concurrency must be at least 1".into()));
    }
    let mut connections = Vec::with_capacity(args.connections);
    for _ in 0..args.connections {
        connections.push(Connection::open(&args.url).await?);
    }
    let model = Model::find(&connections[0], &args.model).await?;
    let works = read_workload(&args.workload, &model)?;
    let begun = Instant::now();
    let outcomes = send_all(&args, &connections, works).await;
    let figures = summarize(outcomes, begun.elapsed());
    print(&figures);
    match &args.json {
        Some(path) => write_json(path, &figures),
        None => Ok(()),
    }
}

fn read_workload(path: &Path, model: &Model) -> Result<VecDeque<Work>, ClientError> {
    let text = std::fs::read_to_string(path)
        .map_err(|source| ClientError::Io { what: format!("reading the workload `{}`", path.display()), source })?;
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let works = lines.map(|(number, line)| {
        let line: Line = serde_json::from_str(line)
            .map_err(|error| ClientError::Usage(format!("{}:{}: {error}", path.display(), number + 1)))?;
        work(model, &line)
    });
    let works: VecDeque<Work> = works.collect::<Result<_, _>>()?;
    if works.is_empty() {
        return Err(ClientError::Usage(format!("the workload `{}` has no requests", path.display())));
    }
    Ok(works)
}

/// No end id, so that every answer has its full length.
const NO_END_ID: i64 = -1;

fn work(model: &Model, line: &Line) -> Result<Work, ClientError> {
    let mut request = model.request();
    model.add(&mut request, "input_ids", Values::Integers(&line.prompt_token_ids))?;
    model.add(&mut request, "input_lengths", Values::Integers(&[line.prompt_token_ids.len() as i64]))?;
    model.add(&mut request, "request_output_len", Values::Integers(&[i64::from(line.max_tokens)]))?;
    model.add(&mut request, "end_id", Values::Integers(&[NO_END_ID]))?;
    model.add(&mut request, "streaming", Values::Bool(true))?;
    Ok(Work { request, max_tokens: line.max_tokens as usize })
}

async fn send_all(args: &ServeArgs, connections: &[Connection], works: VecDeque<Work>) -> Vec<(Outcome, usize)> {
    let mut arrivals = Arrivals::new(args.request_rate, args.seed);
    let limit = args.concurrency.unwrap_or(usize::MAX);
    let (mut works, mut running, mut outcomes) = (works, FuturesUnordered::new(), Vec::new());
    let mut next_connection = connections.iter().cycle();
    let mut next_at = Instant::now() + arrivals.gap();
    loop {
        let may_start = !works.is_empty() && running.len() < limit;
        if !may_start && running.is_empty() {
            return outcomes;
        }
        tokio::select! {
            biased;
            () = tokio::time::sleep_until(next_at), if may_start => {
                if let (Some(work), Some(connection)) = (works.pop_front(), next_connection.next()) {
                    running.push(tokio::spawn(send(connection.clone(), work)));
                }
                next_at += arrivals.gap();
            }
            Some(done) = running.next() => {
                outcomes.push(done.unwrap_or_else(|error| (failed(error.to_string()), 0)));
            }
        }
    }
}

fn failed(error: String) -> Outcome {
    Outcome { error: Some(error), ..Outcome::default() }
}

async fn send(connection: Connection, work: Work) -> (Outcome, usize) {
    let mut outcome = Outcome::default();
    let begun = Instant::now();
    if let Err(error) = receive(&connection, &work, begun, &mut outcome).await {
        outcome.error = Some(error.to_string());
    }
    outcome.whole = begun.elapsed();
    (outcome, work.max_tokens)
}

async fn receive(
    connection: &Connection,
    work: &Work,
    begun: Instant,
    outcome: &mut Outcome,
) -> Result<(), ClientError> {
    let mut replies = connection.call("ModelStreamInfer", frame(&work.request)).await?;
    let mut last = begun;
    while let Some(reply) = replies.next::<ModelStreamInferResponse>().await? {
        if !reply.error_message.is_empty() {
            return Err(ClientError::Refused { code: "from the model", message: reply.error_message });
        }
        let count = reply.infer_response.map_or(0, |response| {
            let ids = response.outputs.iter().position(|output| output.name == "output_ids");
            ids.and_then(|at| response.raw_output_contents.get(at)).map_or(0, |ids| ids.len() / size_of::<i32>())
        });
        if count == 0 {
            continue;
        }
        let now = Instant::now();
        match outcome.to_first {
            None => outcome.to_first = Some(now - begun),
            Some(_) => outcome.between.extend(std::iter::repeat_n((now - last) / count as u32, count)),
        }
        outcome.num_tokens += count;
        last = now;
    }
    Ok(())
}

/// Gaps between requests: none, or those of a Poisson process.
struct Arrivals {
    rate: Option<f64>,
    state: u64,
}

impl Arrivals {
    fn new(rate: Option<f64>, seed: u64) -> Self {
        Self { rate: rate.filter(|rate| rate.is_finite() && *rate > 0.0), state: seed }
    }

    fn gap(&mut self) -> Duration {
        let Some(rate) = self.rate else { return Duration::ZERO };
        // splitmix64 (Steele, Lea, Flood 2014).
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let uniform = ((mixed ^ (mixed >> 31)) >> 11) as f64 / (1u64 << 53) as f64;
        Duration::from_secs_f64(-(1.0 - uniform).ln() / rate)
    }
}

fn summarize(outcomes: Vec<(Outcome, usize)>, elapsed: Duration) -> Figures {
    let seconds = elapsed.as_secs_f64();
    let failures: Vec<&str> = outcomes.iter().filter_map(|(outcome, _)| outcome.error.as_deref()).collect();
    if let Some(first) = failures.first() {
        eprintln!("{} requests failed, the first with: {first}", failures.len());
    }
    let errors = failures.len();
    let is_short = |(outcome, asked): &&(Outcome, usize)| outcome.error.is_none() && outcome.num_tokens < *asked;
    let short_answers = outcomes.iter().filter(is_short).count();
    let good = || outcomes.iter().map(|(outcome, _)| outcome).filter(|outcome| outcome.error.is_none());
    let output_tokens = outcomes.iter().map(|(outcome, _)| outcome.num_tokens).sum();
    let mut to_first: Vec<Duration> = good().filter_map(|outcome| outcome.to_first).collect();
    let mut between: Vec<Duration> = good().flat_map(|outcome| outcome.between.iter().copied()).collect();
    let mut whole: Vec<Duration> = good().map(|outcome| outcome.whole).collect();
    Figures {
        requests: outcomes.len(),
        errors,
        short_answers,
        seconds,
        output_tokens,
        output_tokens_per_second: output_tokens as f64 / seconds,
        requests_per_second: (outcomes.len() - errors) as f64 / seconds,
        time_to_first_token_ms: Percentiles::of(&mut to_first),
        inter_token_latency_ms: Percentiles::of(&mut between),
        request_latency_ms: Percentiles::of(&mut whole),
    }
}

fn print(figures: &Figures) {
    println!("requests             {} ({} failed, {} short)", figures.requests, figures.errors, figures.short_answers);
    println!("seconds              {:.2}", figures.seconds);
    println!("output tokens        {}, {:.1} tokens/s", figures.output_tokens, figures.output_tokens_per_second);
    println!("requests/s           {:.2}", figures.requests_per_second);
    println!("time to first token  {}", figures.time_to_first_token_ms);
    println!("inter-token latency  {}", figures.inter_token_latency_ms);
    println!("request latency      {}", figures.request_latency_ms);
}

/// Writes figures for scripts.
pub(crate) fn write_json(path: &Path, figures: &impl Serialize) -> Result<(), ClientError> {
    let text = serde_json::to_string_pretty(figures).expect("figures are numbers under names");
    std::fs::write(path, text + "\n")
        .map_err(|source| ClientError::Io { what: format!("writing `{}`", path.display()), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrivals_keep_their_rate_and_repeat() {
        let mean = |seed| {
            let mut arrivals = Arrivals::new(Some(100.0), seed);
            (0..10_000).map(|_| arrivals.gap().as_secs_f64()).sum::<f64>() / 10_000.0
        };
        assert!((mean(1) - 0.01).abs() < 0.0005, "{}", mean(1));
        assert_eq!(mean(1), mean(1));
        assert_ne!(mean(1), mean(2));
    }

    #[test]
    fn figures_leave_failed_requests_out_of_latencies() {
        let good = Outcome {
            to_first: Some(Duration::from_millis(10)),
            between: vec![Duration::from_millis(2); 3],
            num_tokens: 4,
            whole: Duration::from_millis(16),
            error: None,
        };
        let figures = summarize(vec![(good, 5), (failed("x".into()), 5)], Duration::from_secs(2));
        assert_eq!((figures.requests, figures.errors, figures.short_answers), (2, 1, 1));
        assert_eq!(figures.output_tokens_per_second, 2.0);
        assert_eq!(figures.time_to_first_token_ms.p99, 10.0);
        assert_eq!(figures.inter_token_latency_ms.p50, 2.0);
    }
}
