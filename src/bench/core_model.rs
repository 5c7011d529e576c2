//! `trireme bench core`: measures a model with token ids as input and output, with the options and the table of TensorRT-LLM's
//! `benchmark_core_model.py`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};
use client::ClientError;
use serde_json::{Value, json};

use crate::dataset::{self, Choice, Length, Prompt, Source};
use crate::figures::Figures;
use crate::files::{self, print_text, write_json};
use crate::load::{self, Pace};
use crate::outcome::{Outcome, Sampling};
use crate::random::{Arrivals, Random};
use crate::target::{Protocol, Target};
use crate::target_grpc::CONNECTIONS;
use crate::{core_table, progress, serving};

/// A language model without tokenizers, measured like TensorRT-LLM's benchmark_core_model
#[derive(Debug, Clone, Args)]
pub struct CoreArgs {
    /// Address of the server's gRPC port
    #[arg(short, long, default_value = "localhost:8001", value_name = "HOST:PORT")]
    url: String,
    /// Name of a model with token ids as input
    #[arg(short, long, default_value = "tensorrt_llm")]
    model: String,
    /// Maximum number of requests in flight [default: no limit]
    #[arg(short, long)]
    concurrency: Option<usize>,
    /// Maximum prompt length in tokens; longer prompts are left out
    #[arg(long, default_value_t = 1 << 20)]
    max_input_len: usize,
    /// Maximum number of requests
    #[arg(long, default_value_t = 30000)]
    num_requests: usize,
    /// Requests per second; -1 sends all at once
    #[arg(long, default_value_t = -1.0, allow_negative_numbers = true)]
    request_rate: f64,
    /// Distribution of the intervals between requests
    #[arg(long, default_value = "exponential_dist", value_parser = ["constant", "exponential_dist"])]
    time_delay_dist: String,
    /// Stream the responses, if the model can
    #[arg(long, default_value = "true", value_parser = crate::outcome::boolean, action = clap::ArgAction::Set, num_args = 0..=1, default_missing_value = "true")]
    streaming: bool,
    /// Requests that are sent before the measurement
    #[arg(long, default_value_t = 0)]
    warmup: usize,
    /// Seed of generated requests and arrival times
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Write the start and end of each request, for Perfetto and chrome://tracing
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "perfetto.json")]
    dump_perfetto_trace: Option<PathBuf>,
    /// Append the table to a CSV file
    #[arg(long, value_name = "FILE")]
    op_stats_csv: Option<PathBuf>,
    /// Also write the figures as JSON; `-` is standard output
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// The requests to send.
    #[command(subcommand)]
    workload: Workload,
}

/// The requests to send.
#[derive(Debug, Clone, Subcommand)]
enum Workload {
    /// Requests of a file: {"prompt_token_ids": [..], "max_tokens": n, "priority": level}, one a line; `priority` is optional
    File {
        /// The file
        path: PathBuf,
    },
    /// Prompts with example outputs: CNN/DailyMail JSON, ShareGPT JSON or JSON lines
    Dataset {
        /// The file
        #[arg(long)]
        dataset: PathBuf,
        /// Directory of the tokenizer
        #[arg(long)]
        tokenizer_dir: String,
        /// Tokens to request for each word of an example output
        #[arg(long, default_value_t = 1.3)]
        op_tokens_per_word: f64,
    },
    /// Normally distributed lengths
    TokenNormDist {
        /// Mean prompt length in tokens
        #[arg(long)]
        input_mean: f64,
        /// Standard deviation of the prompt length
        #[arg(long)]
        input_stdev: f64,
        /// Mean number of tokens to generate
        #[arg(long)]
        output_mean: f64,
        /// Standard deviation of the number of tokens to generate
        #[arg(long)]
        output_stdev: f64,
    },
    /// Lengths of a histogram: `example`, or a JSON file {"input": [[from, to, count], ..], "output": [..]}
    TokenFromHistogram {
        /// `example`, or the path of the file
        #[arg(long)]
        histogram_key: String,
    },
}

/// The histogram `example` of TensorRT-LLM's tool: ranges of lengths with their numbers of requests.
const EXAMPLE: [&[(usize, usize, usize)]; 2] = [
    &[(151, 175, 220), (176, 200, 225), (201, 225, 150), (226, 250, 150), (251, 275, 140)],
    &[(6, 10, 76), (11, 15, 210), (16, 20, 174), (21, 25, 130), (26, 30, 152)],
];

/// Runs the workload and prints its figures.
pub(crate) async fn run(args: CoreArgs) -> Result<(), ClientError> {
    if args.concurrency == Some(0) {
        return Err(ClientError::Usage("--concurrency must be at least 1".into()));
    }
    let prompts = prompts(&args)?;
    let target = Target::open(Protocol::Grpc, &args.url, Some(&args.model), CONNECTIONS).await?;
    let sampling = Sampling {
        top_k: 1,
        top_p: 0.0,
        temperature: 1.0,
        stream_output: args.streaming,
        ignore_eos: true,
        extra_body: Default::default(),
    };
    let print_text = |text: &str| print_text(args.json.as_ref(), text);
    if args.warmup > 0 {
        print_text("[INFO] Warm up for benchmarking.");
        let warmup: Vec<Prompt> = prompts.iter().cycle().take(args.warmup).cloned().collect();
        let pace = Pace { limit: 1, arrivals: Arrivals::new(None, true, 0) };
        load::run(&target, &warmup, &sampling, pace, &progress::bar("warm-up", warmup.len())).await;
    }
    print_text(&format!("[INFO] Start benchmarking on {} prompts.", prompts.len()));
    let rate = (args.request_rate > 0.0).then_some(args.request_rate);
    let arrivals = Arrivals::new(rate, args.time_delay_dist == "constant", args.seed);
    let pace = Pace { limit: args.concurrency.unwrap_or(usize::MAX), arrivals };
    let (mut outcomes, elapsed) =
        load::run(&target, &prompts, &sampling, pace, &progress::bar(&args.model, prompts.len())).await;
    let figures = Figures {
        protocol: Protocol::Grpc.name(),
        model: args.model.clone(),
        concurrency: args.concurrency,
        request_rate: rate,
        is_streaming: args.streaming && outcomes.iter().any(|outcome| outcome.num_pieces > 1),
        ..Figures::of(&mut outcomes, elapsed, None)
    };
    print_text(&text(&figures, &outcomes, elapsed));
    finish(&args, &figures, &outcomes)
}

fn text(figures: &Figures, outcomes: &[Outcome], elapsed: Duration) -> String {
    let latencies: f64 = outcomes.iter().map(|outcome| outcome.latency.as_secs_f64() * 1e3).sum();
    let mut text = format!("[INFO] Total Latency: {:.3} ms\n", elapsed.as_secs_f64() * 1e3);
    text += &format!("[INFO] Total request latencies: {latencies:.3} ms\n");
    text += &core_table::text(figures);
    if figures.is_streaming {
        text += &format!("\ntime to first token    {}", figures.time_to_first_token_ms);
        text += &format!("\ninter-token latency    {}", figures.inter_token_latency_ms);
    }
    text += &figures.priorities();
    text + &figures.problems()
}

fn finish(args: &CoreArgs, figures: &Figures, outcomes: &[Outcome]) -> Result<(), ClientError> {
    if let Some(path) = &args.op_stats_csv {
        let before = if path.exists() { files::read(path)? } else { String::new() };
        files::write(path, &(before.clone() + &core_table::csv(figures, before.is_empty())))?;
    }
    if let Some(path) = &args.dump_perfetto_trace {
        let events: Vec<Value> = outcomes.iter().enumerate().map(|(at, outcome)| event(at, outcome)).collect();
        files::write(path, &Value::from(events).to_string())?;
    }
    if let Some(path) = &args.json {
        write_json(path, figures)?;
    }
    match figures.errors == figures.requests {
        true => Err(ClientError::Usage("every request failed".into())),
        false => Ok(()),
    }
}

/// A request in the trace event format; times are in microseconds.
fn event(at: usize, outcome: &Outcome) -> Value {
    let micros = |time: Duration| time.as_secs_f64() * 1e6;
    json!({
        "name": format!("req_{at}"), "cat": "batch", "ph": "X", "ts": micros(outcome.at), "dur": micros(outcome.latency), "pid": "1",
        "args": {"isl": outcome.prompt_tokens, "osl": outcome.num_tokens},
    })
}

fn prompts(args: &CoreArgs) -> Result<Vec<Prompt>, ClientError> {
    let mut random = Random::new(args.seed);
    match &args.workload {
        Workload::File { path } => read(args, path, None, 1.0),
        Workload::Dataset { dataset, tokenizer_dir, op_tokens_per_word } => {
            read(args, dataset, Some(tokenizer_dir), *op_tokens_per_word)
        }
        Workload::TokenNormDist { input_mean, input_stdev, output_mean, output_stdev } => {
            let (input, output) = (Length::new(*input_mean, *input_stdev), Length::new(*output_mean, *output_stdev));
            let lengths = (0..args.num_requests).map(|_| (input.draw(&mut random), output.draw(&mut random)));
            let lengths: Vec<_> = lengths.filter(|(input, _)| *input <= args.max_input_len).collect();
            Ok(of_lengths(lengths, &mut random))
        }
        Workload::TokenFromHistogram { histogram_key } => {
            let [inputs, outputs] = histogram(histogram_key)?;
            let lengths = |bins: &[(usize, usize, usize)], random: &mut Random| -> Vec<usize> {
                let bins = bins.iter().flat_map(|&(from, to, count)| std::iter::repeat_n((from, to), count));
                bins.map(|(from, to)| from + random.below(to - from + 1)).collect()
            };
            let (inputs, outputs) = (lengths(&inputs, &mut random), lengths(&outputs, &mut random));
            let count = inputs.len().min(args.num_requests);
            let (inputs, outputs) = (random.sample(inputs, count), random.sample(outputs, count));
            Ok(of_lengths(inputs.into_iter().zip(outputs).collect(), &mut random))
        }
    }
}

fn read(
    args: &CoreArgs,
    path: &std::path::Path,
    tokenizer: Option<&str>,
    tokens_per_word: f64,
) -> Result<Vec<Prompt>, ClientError> {
    let tokenizer = serving::tokenizer(tokenizer.unwrap_or("-"))?;
    let choice =
        Choice { count: args.num_requests, seed: args.seed, max_input_len: args.max_input_len, tokens_per_word };
    dataset::load(&Source::File(path.to_owned()), tokenizer.as_ref(), choice)
}

/// Prompts of given lengths, of random ids that are ordinary tokens in all common vocabularies.
fn of_lengths(lengths: Vec<(usize, usize)>, random: &mut Random) -> Vec<Prompt> {
    let mut ids = |count: usize| (0..count).map(|_| 10 + random.below(200) as u32).collect();
    let prompt = |(input, max_tokens)| Prompt { ids: ids(input), max_tokens, ..Prompt::default() };
    lengths.into_iter().map(prompt).collect()
}

type Bins = Vec<(usize, usize, usize)>;

fn histogram(key: &str) -> Result<[Bins; 2], ClientError> {
    if key == "example" {
        return Ok(EXAMPLE.map(<[_]>::to_vec));
    }
    let wrong = |words: String| ClientError::Usage(format!("histogram `{key}`: {words}"));
    let file: Value = serde_json::from_str(&files::read(key.as_ref())?).map_err(|error| wrong(error.to_string()))?;
    let bins = |name: &str| -> Result<Bins, ClientError> {
        let bins: Bins =
            serde_json::from_value(file[name].clone()).map_err(|error| wrong(format!("`{name}`: {error}")))?;
        let is_good = !bins.is_empty() && bins.iter().all(|&(from, to, _)| 1 <= from && from <= to);
        if is_good {
            Ok(bins)
        } else {
            Err(wrong(format!("`{name}` needs bins [from, to, count] with 1 <= from <= to")))
        }
    };
    Ok([bins("input")?, bins("output")?])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_example_histogram_is_the_published_one() {
        let [inputs, outputs] = histogram("example").unwrap();
        let count = |bins: &Bins| bins.iter().map(|(_, _, count)| count).sum::<usize>();
        assert_eq!((count(&inputs), count(&outputs)), (885, 742));
    }

    #[test]
    fn a_histogram_of_a_file_is_checked() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("h.json");
        std::fs::write(&path, r#"{"input": [[4, 2, 1]], "output": [[1, 2, 1]]}"#).unwrap();
        let error = histogram(path.to_str().unwrap()).unwrap_err().to_string();
        assert!(error.contains("`input` needs bins"), "{error}");
    }
}
