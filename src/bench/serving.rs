//! `trireme bench serving`: sends the prompts of a dataset to a server, with the options of LMDeploy's profile scripts.

use std::path::{Path, PathBuf};

use clap::Args;
use client::ClientError;
use serde::{Deserialize, Serialize};
use text::Tokenizer;

use crate::dataset::{self, Choice, Prompt, Source};
use crate::figures::Figures;
use crate::files::{self, print_text, write_json};
use crate::load::{self, Pace};
use crate::metrics::{self, DraftCounts};
use crate::outcome::Sampling;
use crate::progress;
use crate::random::Arrivals;
use crate::target::{Protocol, Target};
use crate::target_grpc::CONNECTIONS;

/// Throughput and latencies of a language model with a dataset
#[derive(Debug, Clone, Args)]
pub struct ServingArgs {
    /// Address of the server
    #[arg(value_name = "ADDR")]
    server_addr: String,
    /// Directory of the model's tokenizer, to count tokens with; `-` for none
    #[arg(value_name = "TOKENIZER")]
    tokenizer_path: String,
    #[command(flatten)]
    workload: WorkloadArgs,
    /// Requests in flight; each value is a run
    #[arg(long, value_delimiter = ',', default_value = "32")]
    concurrency: Vec<usize>,
    /// Requests per second at random times (Poisson), instead of a number in flight; each value is a run
    #[arg(long, value_delimiter = ',', conflicts_with = "concurrency")]
    request_rate: Vec<f64>,
    /// Protocol of the server
    #[arg(long, value_enum, default_value = "grpc")]
    protocol: Protocol,
    /// gRPC connections that requests share; over HTTP each has its own
    #[arg(long, default_value_t = CONNECTIONS)]
    connections: usize,
    /// Address of the server's metrics, to tell how many tokens a step gave a stream and how many drafts were accepted
    #[arg(long, value_name = "HOST:PORT")]
    metrics: Option<String>,
    /// Name of the model [default: a usual one, such as `ensemble`]
    #[arg(short, long)]
    model: Option<String>,
    /// Also write the figures as CSV
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Also write the figures as JSON, for `bench report`; `-` is standard output
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// The requests to send.
#[derive(Debug, Clone, Args)]
pub(crate) struct WorkloadArgs {
    /// ShareGPT JSON, CNN/DailyMail JSON (`input`, `instruction`, `output`), JSON lines (`prompt` or `prompt_token_ids`,
    /// `max_tokens`), or `generated:INPUT[~DEVIATION]:OUTPUT[~DEVIATION]` tokens
    #[arg(value_parser = Source::parse)]
    dataset: Source,
    /// Requests of a run
    #[arg(long, default_value_t = 1000)]
    num_prompts: usize,
    /// Seed of the choice of prompts and of the arrival times
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Maximum prompt length in tokens; longer prompts are left out
    #[arg(long, default_value_t = 1 << 20)]
    max_input_len: usize,
    /// Tokens to request for each word of an example output (CNN/DailyMail)
    #[arg(long, default_value_t = 1.3)]
    op_tokens_per_word: f64,
    #[command(flatten)]
    pub sampling: Sampling,
}

impl WorkloadArgs {
    /// The prompts to send.
    pub(crate) fn prompts(&self, tokenizer: Option<&Tokenizer>) -> Result<Vec<Prompt>, ClientError> {
        let choice = Choice {
            count: self.num_prompts.max(1),
            seed: self.seed,
            max_input_len: self.max_input_len,
            tokens_per_word: self.op_tokens_per_word,
        };
        let prompts = dataset::load(&self.dataset, tokenizer, choice)?;
        if prompts.len() < self.num_prompts {
            eprintln!("the dataset holds {} requests of fitting length; all of them are sent", prompts.len());
        }
        Ok(prompts)
    }

    /// Sends all prompts once.
    pub(crate) async fn run(
        &self,
        what: &str,
        target: &Target,
        prompts: &[Prompt],
        tokenizer: Option<&Tokenizer>,
        concurrency: Option<usize>,
        request_rate: Option<f64>,
    ) -> Figures {
        let arrivals = Arrivals::new(request_rate, false, self.seed);
        let pace = Pace { limit: concurrency.unwrap_or(usize::MAX), arrivals };
        let bar = progress::bar(what, prompts.len());
        let (mut outcomes, elapsed) = load::run(target, prompts, &self.sampling, pace, &bar).await;
        Figures {
            model: target.model().to_owned(),
            concurrency,
            request_rate,
            is_streaming: self.sampling.stream_output,
            ..Figures::of(&mut outcomes, elapsed, tokenizer)
        }
    }
}

/// The format of `--json`, which `bench report` reads.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Runs {
    /// Address of the server.
    pub address: String,
    /// One run for each concurrency or rate.
    pub runs: Vec<Figures>,
}

/// The tokenizer of a directory, or of the directory of a file; `None` for `-`.
pub(crate) fn tokenizer(path: &str) -> Result<Option<Tokenizer>, ClientError> {
    if path == "-" {
        return Ok(None);
    }
    let path = Path::new(path);
    let dir = if path.is_file() { path.parent().unwrap_or(path) } else { path };
    Tokenizer::from_dir(dir).map(Some).map_err(|error| ClientError::Usage(error.to_string()))
}

/// Runs every concurrency or rate and prints its figures.
pub(crate) async fn run(args: ServingArgs) -> Result<(), ClientError> {
    if args.connections == 0 {
        return Err(ClientError::Usage("--connections must be more than 0".into()));
    }
    if args.concurrency.contains(&0) || args.request_rate.iter().any(|rate| !rate.is_finite() || *rate <= 0.0) {
        return Err(ClientError::Usage("--concurrency and --request-rate must be more than 0".into()));
    }
    let tokenizer = tokenizer(&args.tokenizer_path)?;
    let prompts = args.workload.prompts(tokenizer.as_ref())?;
    let target = Target::open(args.protocol, &args.server_addr, args.model.as_deref(), args.connections).await?;
    let paces: Vec<(Option<usize>, Option<f64>)> = match args.request_rate.is_empty() {
        true => args.concurrency.iter().map(|&concurrency| (Some(concurrency), None)).collect(),
        false => args.request_rate.iter().map(|&rate| (None, Some(rate))).collect(),
    };
    let mut runs = Runs { address: args.server_addr.clone(), runs: Vec::new() };
    let counts = || args.metrics.as_deref().map(|at| Ok(DraftCounts::of(&metrics::read(at)?))).transpose();
    let mut drafts = counts()?;
    for (concurrency, rate) in paces {
        let what =
            rate.map_or_else(|| format!("{} in flight", concurrency.unwrap_or(0)), |rate| format!("{rate} req/s"));
        let run = args.workload.run(&what, &target, &prompts, tokenizer.as_ref(), concurrency, rate).await;
        let counted = counts()?;
        let steps = counted.zip(drafts).and_then(|(after, before)| after.since(before));
        drafts = counted;
        let run = Figures {
            protocol: args.protocol.name(),
            tokens_per_step: steps.map(|(tokens, _)| tokens),
            accepted_drafts: steps.map(|(_, share)| share),
            ..run
        };
        print_text(args.json.as_ref(), &run.text());
        runs.runs.push(run);
    }
    if let Some(path) = &args.csv {
        let lines: String = runs.runs.iter().map(Figures::csv_line).collect();
        files::write(path, &format!("{}{lines}", Figures::CSV_HEAD))?;
    }
    if let Some(path) = &args.json {
        write_json(path, &runs)?;
    }
    match runs.runs.iter().find(|run| run.errors == run.requests) {
        Some(run) => Err(ClientError::Usage(format!("every request failed{}", run.problems()))),
        None => Ok(()),
    }
}
