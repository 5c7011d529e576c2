//! `trireme bench identity`: measures one batch of a fixed shape, like TensorRT-LLM's `identity_test.py`.

use std::time::{Duration, Instant};

use bytes::Bytes;
use clap::Args;
use client::ClientError;
use client::grpc::{Connection, frame};
use client::proto::{ModelInferRequest, ModelStreamInferResponse};
use client::tensor::{Model, push};
use futures::future::try_join_all;
use serde::Serialize;
use std::path::PathBuf;

use crate::files::{print_text, write_json};
use crate::infer::Protocol;
use crate::infer_http::HttpConnection;
use crate::percentiles::Percentiles;
use crate::progress;
use crate::random::Random;

/// Latency and sentences per second of one batch of a fixed shape, measured like TensorRT-LLM's identity_test
#[derive(Debug, Clone, Args)]
pub struct IdentityArgs {
    /// Address of the server's gRPC port
    #[arg(short, long, default_value = "localhost:8001", value_name = "HOST:PORT")]
    url: String,
    /// Protocol of the requests; HTTP needs a model that is not decoupled
    #[arg(short = 'i', long, value_enum, default_value_t = Protocol::Grpc)]
    protocol: Protocol,
    /// Address of the server's HTTP port
    #[arg(long, default_value = "localhost:8000", value_name = "HOST:PORT")]
    http_url: String,
    /// Name of a model with token ids as input
    #[arg(short, long, default_value = "tensorrt_llm")]
    model: String,
    /// Sequences of a request
    #[arg(short, long, default_value_t = 8)]
    batch_size: usize,
    /// Tokens of each prompt
    #[arg(short, long, default_value_t = 8)]
    start_len: usize,
    /// Tokens to generate for each sequence
    #[arg(short, long, default_value_t = 10)]
    output_len: usize,
    /// Beams of the search (`-beam`)
    #[arg(long = "beam", alias = "beam-width", default_value_t = 1)]
    beam_width: u32,
    /// Sample from this many most likely tokens (`-topk`)
    #[arg(long, default_value_t = 1)]
    topk: u32,
    /// Sample from the most likely tokens with this cumulative probability (`-topp`)
    #[arg(long, default_value_t = 0.0)]
    topp: f64,
    /// Concurrent requests of a run
    #[arg(short = 'p', long, default_value_t = 1)]
    request_parallelism: usize,
    /// Runs; the latency is their mean
    #[arg(short, long, default_value_t = 10)]
    num_runs: usize,
    /// Send requests before the measurement
    #[arg(short = 'w', long)]
    warm_up: bool,
    /// Upper bound of the ids in random prompts
    #[arg(long, default_value_t = 256)]
    vocab_size: usize,
    /// Seed of the prompts
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Also write the figures as JSON; `-` is standard output
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Debug, Serialize)]
struct Figures {
    batch_size: usize,
    start_len: usize,
    output_len: usize,
    /// Mean time of a run divided by its requests, as in the Python tool.
    latency_ms: f64,
    sentences_per_second: f64,
    output_tokens_per_second: f64,
    run_latency_ms: Percentiles,
}

/// Runs the batches and prints their figures.
pub(crate) async fn run(args: IdentityArgs) -> Result<(), ClientError> {
    let sizes = [args.batch_size, args.start_len, args.output_len, args.request_parallelism, args.num_runs];
    if sizes.contains(&0) || args.vocab_size < 2 {
        return Err(ClientError::Usage("sizes, lengths and counts must be at least 1".into()));
    }
    let connection = Connection::open(&args.url).await?;
    let model = Model::find(&connection, &args.model).await?;
    let mut senders = Vec::with_capacity(args.request_parallelism);
    let mut random = Random::new(args.seed);
    for _ in 0..args.request_parallelism {
        let request = request(&args, &model, &mut random)?;
        senders.push(match args.protocol {
            Protocol::Grpc => Sender::Grpc(connection.clone(), frame(&request)),
            Protocol::Http => Sender::Http(Box::new(HttpConnection::open(&args.http_url, &request).await?)),
        });
    }
    if args.warm_up {
        print_text(args.json.as_ref(), "[INFO] sending requests to warm up");
        try_join_all(senders.iter_mut().take(2).map(Sender::send)).await?;
    }
    let bar = progress::bar("identity", args.num_runs);
    let mut runs = Vec::with_capacity(args.num_runs);
    for _ in 0..args.num_runs {
        let started = Instant::now();
        try_join_all(senders.iter_mut().map(Sender::send)).await?;
        runs.push(started.elapsed() / args.request_parallelism as u32);
        bar.inc(1);
    }
    bar.finish_and_clear();
    let figures = figures(&args, &mut runs);
    let Figures { batch_size, start_len, output_len, latency_ms, sentences_per_second, .. } = &figures;
    let print_text = |text: String| print_text(args.json.as_ref(), &text);
    print_text(format!("[INFO] Batch size: {batch_size}, Start len: {start_len}, Output len: {output_len}"));
    print_text(format!("[INFO] Latency: {latency_ms:.3} ms"));
    print_text(format!("[INFO] Throughput: {sentences_per_second:.3} sentences / sec"));
    match &args.json {
        Some(path) => write_json(path, &figures),
        None => Ok(()),
    }
}

fn figures(args: &IdentityArgs, runs: &mut [Duration]) -> Figures {
    let run_latency_ms = Percentiles::of(runs);
    let sentences_per_second = 1e3 / run_latency_ms.mean * args.batch_size as f64;
    Figures {
        batch_size: args.batch_size,
        start_len: args.start_len,
        output_len: args.output_len,
        latency_ms: run_latency_ms.mean,
        sentences_per_second,
        output_tokens_per_second: sentences_per_second * args.output_len as f64,
        run_latency_ms,
    }
}

/// One request with the whole batch: the prompts are `[batch, start_len]`, each other input is `[batch, 1]`.
fn request(args: &IdentityArgs, model: &Model, random: &mut Random) -> Result<ModelInferRequest, ClientError> {
    let mut request = model.request();
    let (batch, length) = (args.batch_size as i64, args.start_len as i64);
    let ids: Vec<i32> = (0..batch * length).map(|_| random.below(args.vocab_size - 1) as i32 + 1).collect();
    let missing = |name: &str| {
        ClientError::Usage(format!("model `{}` has no input `{name}`; name one that takes token ids", args.model))
    };
    let mut add = |name: &str, width: i64, data: Vec<u8>| {
        let input = model.input(name).ok_or_else(|| missing(name))?;
        push(&mut request, input, vec![batch, width], Bytes::from(data));
        Ok::<(), ClientError>(())
    };
    let each = |value: [u8; 4]| value.repeat(args.batch_size);
    let whole = |value: i64| each((value as i32).to_le_bytes());
    add("input_ids", length, ids.iter().flat_map(|id| id.to_le_bytes()).collect())?;
    add("input_lengths", 1, whole(length))?;
    add("request_output_len", 1, whole(args.output_len as i64))?;
    let mut add_if_declared = |name: &str, data: Vec<u8>| match model.input(name).map(|input| input.datatype.as_str()) {
        Some("INT32" | "UINT32" | "FP32") => add(name, 1, data),
        _ => Ok(()),
    };
    add_if_declared("end_id", whole(-1))?;
    add_if_declared("beam_width", whole(i64::from(args.beam_width)))?;
    add_if_declared("runtime_top_k", whole(i64::from(args.topk)))?;
    if args.topp > 0.0 {
        add_if_declared("runtime_top_p", each((args.topp as f32).to_le_bytes()))?;
    }
    Ok(request)
}

enum Sender {
    Grpc(Connection, Bytes),
    Http(Box<HttpConnection>),
}

impl Sender {
    async fn send(&mut self) -> Result<(), ClientError> {
        match self {
            Sender::Http(connection) => connection.send().await,
            // The streaming call works for decoupled models and for others.
            Sender::Grpc(connection, framed) => {
                let mut replies = connection.call("ModelStreamInfer", framed.clone()).await?;
                while let Some(reply) = replies.next::<ModelStreamInferResponse>().await? {
                    if !reply.error_message.is_empty() {
                        return Err(ClientError::Refused { code: "from the model", message: reply.error_message });
                    }
                }
                Ok(())
            }
        }
    }
}
