//! `trireme bench infer`: repeats one request over gRPC or HTTP.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use bytes::Bytes;
use clap::{Args, ValueEnum};
use futures::future::join_all;
use serde::Serialize;

use crate::files::{print_text, write_json};
use crate::infer_http::HttpConnection;
use crate::percentiles::Percentiles;
use client::ClientError;
use client::grpc::{Connection, frame};
use client::proto::ModelInferRequest;
use client::proto::model_metadata_response::TensorMetadata;
use client::tensor::{Model, push};

/// Requests per second and latencies of any model
#[derive(Debug, Clone, Args)]
pub struct InferArgs {
    /// Name of the model
    #[arg(short, long, default_value = "identity")]
    pub model: String,
    /// Protocol of the requests
    #[arg(short = 'i', long, value_enum, default_value_t = Protocol::Grpc)]
    pub protocol: Protocol,
    /// Address of the server's gRPC port
    #[arg(short, long, default_value = "localhost:8001", value_name = "HOST:PORT")]
    pub url: String,
    /// Address of the server's HTTP port
    #[arg(long, default_value = "localhost:8000", value_name = "HOST:PORT")]
    pub http_url: String,
    /// Bytes of each input tensor
    #[arg(short, long, default_value_t = 16)]
    pub bytes: usize,
    /// Requests in flight; each value is a run
    #[arg(short, long, value_delimiter = ',', default_value = "1,8,64")]
    pub concurrency: Vec<usize>,
    /// Number of shared gRPC connections [default: one for each 16 requests in flight]. HTTP has one for each request in flight
    #[arg(long)]
    pub connections: Option<usize>,
    /// Duration of each run in seconds
    #[arg(short, long, default_value_t = 5.0)]
    pub seconds: f64,
    /// Seconds of warm-up before each run
    #[arg(long, default_value_t = 1.0)]
    pub warmup: f64,
    /// Also write the figures as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// Protocol of the requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)] // The names are self-explanatory.
pub enum Protocol {
    Grpc,
    Http,
}

#[derive(Debug, Serialize)]
struct Figures {
    protocol: Protocol,
    bytes: usize,
    concurrency: usize,
    requests: usize,
    requests_per_second: f64,
    latency_ms: Percentiles,
}

/// The time in which latencies are recorded.
struct Window {
    start: Instant,
    end: Instant,
}

/// Runs every concurrency and prints its figures.
pub(crate) async fn run(args: InferArgs) -> Result<(), ClientError> {
    let is_span = |seconds: f64| seconds.is_finite() && seconds >= 0.0;
    if args.concurrency.contains(&0) || args.connections == Some(0) || !is_span(args.seconds) || !is_span(args.warmup) {
        return Err(ClientError::Usage("--concurrency, --connections and --seconds must be at least 1".into()));
    }
    let connection = Connection::open(&args.url).await?;
    let model = Model::find(&connection, &args.model).await?;
    let request = request(&model, args.bytes)?;
    let mut all = Vec::new();
    for &concurrency in &args.concurrency {
        let figures = measure(&args, &request, concurrency).await?;
        let line = format!(
            "{:<5} {:>7} B  concurrency {:>4}  {:>9.0} requests/s   {}",
            format!("{:?}", figures.protocol).to_lowercase(),
            figures.bytes,
            figures.concurrency,
            figures.requests_per_second,
            figures.latency_ms
        );
        print_text(args.json.as_ref(), &line);
        all.push(figures);
    }
    match &args.json {
        Some(path) => write_json(path, &all),
        None => Ok(()),
    }
}

/// A request with about `bytes` bytes in each required input.
fn request(model: &Model, bytes: usize) -> Result<ModelInferRequest, ClientError> {
    let mut request = model.request();
    for input in &model.metadata.inputs {
        let (shape, data) = fill(input, bytes)?;
        push(&mut request, input, shape, data);
    }
    Ok(request)
}

fn fill(input: &TensorMetadata, bytes: usize) -> Result<(Vec<i64>, Bytes), ClientError> {
    let size = match input.datatype.as_str() {
        "BOOL" | "UINT8" | "INT8" => 1,
        "UINT16" | "INT16" | "FP16" | "BF16" => 2,
        "UINT32" | "INT32" | "FP32" => 4,
        "UINT64" | "INT64" | "FP64" => 8,
        other => return Err(ClientError::Usage(format!("input `{}` is {other}, expected numbers", input.name))),
    };
    let fixed: i64 = input.shape.iter().filter(|&&size| size > 0).product();
    let mut shape = input.shape.iter().map(|&size| size.max(1)).collect::<Vec<_>>();
    // The innermost variable dimension is set to the length; a batch dimension stays 1.
    if let Some(open) = input.shape.iter().rposition(|&size| size < 0) {
        shape[open] = (bytes as i64 / (size * fixed)).max(1);
    }
    let num_bytes = shape.iter().product::<i64>() * size;
    Ok((shape, vec![0; num_bytes as usize].into()))
}

async fn measure(args: &InferArgs, request: &ModelInferRequest, concurrency: usize) -> Result<Figures, ClientError> {
    let mut senders = Vec::with_capacity(concurrency);
    match args.protocol {
        Protocol::Grpc => {
            let num_connections = args.connections.unwrap_or(concurrency.div_ceil(16)).min(concurrency);
            let mut connections = Vec::with_capacity(num_connections);
            for _ in 0..num_connections {
                connections.push(Connection::open(&args.url).await?);
            }
            let framed = frame(request);
            let shared = connections.iter().cycle().take(concurrency);
            senders.extend(shared.map(|connection| Sender::Grpc(connection.clone(), framed.clone())));
        }
        Protocol::Http => {
            for _ in 0..concurrency {
                let connection = HttpConnection::open(&args.http_url, request).await?;
                senders.push(Sender::Http(connection));
            }
        }
    }
    let start = Instant::now() + Duration::from_secs_f64(args.warmup);
    let window = Window { start, end: start + Duration::from_secs_f64(args.seconds) };
    let latencies = join_all(senders.into_iter().map(|sender| repeat(sender, &window))).await;
    let latencies: Result<Vec<Vec<Duration>>, ClientError> = latencies.into_iter().collect();
    let mut latencies = latencies?.concat();
    Ok(Figures {
        protocol: args.protocol,
        bytes: args.bytes,
        concurrency,
        requests: latencies.len(),
        requests_per_second: latencies.len() as f64 / args.seconds,
        latency_ms: Percentiles::of(&mut latencies),
    })
}

enum Sender {
    Grpc(Connection, Bytes),
    Http(HttpConnection),
}

async fn repeat(mut sender: Sender, window: &Window) -> Result<Vec<Duration>, ClientError> {
    let mut latencies = Vec::new();
    loop {
        let started = Instant::now();
        match &mut sender {
            Sender::Grpc(connection, framed) => {
                let mut replies = connection.call("ModelInfer", framed.clone()).await?;
                while replies.next_bytes().await?.is_some() {}
            }
            Sender::Http(connection) => connection.send().await?,
        }
        let ended = Instant::now();
        if ended >= window.end {
            return Ok(latencies);
        }
        if ended >= window.start {
            latencies.push(ended - started);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn input(datatype: &str, shape: &[i64]) -> TensorMetadata {
        TensorMetadata { name: "IN".into(), datatype: datatype.into(), shape: shape.to_vec() }
    }

    #[test]
    fn tensors_have_the_asked_size() {
        let (shape, data) = fill(&input("FP32", &[-1, -1]), 64).unwrap();
        assert_eq!((shape, data.len()), (vec![1, 16], 64));
        let (shape, data) = fill(&input("INT64", &[2, 3]), 64).unwrap();
        assert_eq!((shape, data.len()), (vec![2, 3], 48));
        assert!(fill(&input("BYTES", &[1]), 64).is_err());
    }
}
