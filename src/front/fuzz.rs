//! Entry points for the fuzz targets in `fuzz/`: the parsers of clients' bytes. Only with feature `fuzzing`.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use prost::Message;
use repository::ModelConfig;
use serving::{ClientMemory, DataType, InferError, InferRequest, InferResponse, Limits, Server};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};

use crate::Config;
use crate::api::triton::grpc::request as grpc_request;
use crate::api::triton::grpc::response::InferReply;
use crate::api::triton::grpc::scan::{Kind, scan};
use crate::api::triton::grpc::service::grpc_service;
use crate::api::triton::http::{self as triton_http, generate, infer as http_infer, json, route as http_route};
use crate::api::triton::output_request::{OutputRequest, RegionSlice};
use crate::api::triton::shared_memory::{ClientObjects, MemoryKind, SharedMemory};
use crate::state::State;
use crate::transport::budget::{Budget, ProgressLimits};
use crate::transport::content_coding::Coding;
use crate::transport::http2::{GrpcConnection, KeepAliveConfig};

/// Maximum decompressed body.
const LIMIT: usize = 1 << 20;

/// Parses an infer request over HTTP from its body and the length of its JSON head, if given.
///
/// # Errors
/// When the request is invalid.
pub fn http_infer(body: &[u8], head_len: Option<usize>) -> Result<InferRequest, InferError> {
    let memory = SharedMemory::new(false, ClientObjects::default());
    let read = http_infer::read("m", Bytes::copy_from_slice(body), head_len, &memory, &Limits::default());
    read.map(|parsed| parsed.request)
}

/// Parses a body that is the data of the model's only input.
///
/// # Errors
/// When the body is invalid for the model.
pub fn http_raw(body: &[u8], config: &ModelConfig) -> Result<InferRequest, InferError> {
    http_infer::read_raw(Bytes::copy_from_slice(body), config).map(|parsed| parsed.request)
}

/// Parses a `generate` request.
///
/// # Errors
/// When the request is invalid.
pub fn generate(body: &[u8], config: &ModelConfig) -> Result<InferRequest, InferError> {
    generate::read(body, config, &Limits::default(), &|| true)
}

/// Parses a `ModelInferRequest`.
///
/// # Errors
/// When the request is invalid.
pub fn grpc(message: &[u8]) -> Result<InferRequest, InferError> {
    let memory = SharedMemory::new(false, ClientObjects::default());
    scan(Kind::Infer, message, &Limits::default()).map_err(|error| InferError::internal(format!("{error:?}")))?;
    let message = crate::api::triton::grpc::proto::ModelInferRequest::decode(message)
        .map_err(|error| InferError::internal(error.to_string()))?;
    grpc_request::read(message, &memory, &|_, _, _| None).map(|parsed| parsed.request)
}

/// Parses a path, and decompresses a body.
pub fn http_head(path: &str, body: &[u8]) {
    let _ = http_route::Route::of(path);
    let progress = ProgressLimits { timeout: Duration::MAX, min_rate: 0 };
    let charge = Budget::new(usize::MAX, progress).charge();
    for coding in [Coding::Gzip, Coding::Deflate] {
        if let Ok(decompressed) = coding.decode(body, LIMIT, &charge) {
            assert!(decompressed.len() <= LIMIT);
        }
    }
    let _ = Coding::accepted(path);
}

/// Writes a response in every form. JSON output must be valid.
pub fn write(response: InferResponse) {
    let reply = InferReply { response: response.clone(), final_response: Some(true) };
    let bytes = reply.encode_to_vec();
    assert_eq!(bytes.len(), reply.encoded_len());
    if let Ok(text) = generate::write(response.clone()) {
        // Elements of BYTES are not changed, so the text may not be UTF-8.
        let text = String::from_utf8_lossy(&text);
        json::parse(text.as_bytes(), &Limits::default()).expect("a generate answer is JSON");
    }
    for is_binary in [false, true] {
        let _ = http_infer::write(response.clone(), &[], is_binary);
    }
    for (num_classes, output) in response.outputs.iter().enumerate() {
        let form = OutputRequest { name: output.name.to_string(), num_classes, ..OutputRequest::default() };
        let _ = crate::api::triton::classification::classify(output, form.num_classes.max(1), false, None);
    }
}

/// In-memory servers of both protocols.
pub struct Front(Arc<State>);

impl Front {
    /// The front of `server`, with HTTP bodies of up to 1 MiB.
    pub fn new(server: Arc<Server>) -> Self {
        let config = Config { max_http_body_bytes: LIMIT, ..Config::default() };
        Self(Arc::new(State::new(config, server, Vec::new()).expect("tracing is off")))
    }

    /// Sends a `POST` of JSON over HTTP/1.1, and returns the head and body of the response.
    pub async fn post(&self, path: &str, body: &[u8]) -> Vec<u8> {
        let head = format!(
            "POST {path} HTTP/1.1\r\nHost: fuzz\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
            body.len()
        );
        let serve = |io: DuplexStream| async {
            let service = service_fn(|request| triton_http::handle(self.0.clone(), request));
            let _ = http1::Builder::new().serve_connection(TokioIo::new(io), service).await;
        };
        exchange(&[head.as_bytes(), body].concat(), false, serve).await
    }

    /// Sends bytes to the gRPC port after the HTTP/2 preface, and returns everything that is received.
    pub async fn grpc(&self, frames: &[u8]) -> Vec<u8> {
        const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
        let (idle_time, timeout) = (self.0.config.grpc_keepalive_time, self.0.config.grpc_keepalive_timeout);
        let mut service = grpc_service(self.0.clone());
        let serve = |io: DuplexStream| async move {
            let begin = |request, respond| service.begin(request, respond);
            let _ = GrpcConnection::new(
                io,
                Arc::default(),
                KeepAliveConfig { idle_time, timeout, check_interval: idle_time },
                begin,
            )
            .await;
        };
        exchange(&[PREFACE, frames].concat(), true, serve).await
    }
}

/// Sends bytes to a server and reads everything that it sends. With `closes`, the client closes after the server has been polled
/// some times.
async fn exchange<S: Future<Output = ()>>(
    bytes: &[u8],
    closes: bool,
    serve: impl FnOnce(DuplexStream) -> S,
) -> Vec<u8> {
    const TURNS: usize = 16;
    let (server, client) = tokio::io::duplex(1 << 16);
    let (mut reader, mut writer) = tokio::io::split(client);
    let write = async {
        // The server may have closed the connection.
        let _ = writer.write_all(bytes).await;
        for _ in 0..TURNS {
            tokio::task::yield_now().await;
        }
        if closes {
            let _ = writer.shutdown().await;
        }
    };
    let mut received = Vec::new();
    let (_, _, read) = tokio::join!(serve(server), write, reader.read_to_end(&mut received));
    read.expect("memory can be read");
    received
}

/// Shared memory, through the operations of clients.
pub struct Regions(SharedMemory);

impl Default for Regions {
    fn default() -> Self {
        let reserved_prefixes = vec!["reserved_".into()];
        Self(SharedMemory::new(true, ClientObjects { reserved_prefixes, ..ClientObjects::default() }))
    }
}

impl Regions {
    /// Registers a region.
    ///
    /// # Errors
    /// When the region is invalid.
    pub fn register(&self, name: &str, key: &str, offset: u64, byte_size: u64) -> Result<(), InferError> {
        self.0.register(name, key, offset, byte_size)
    }

    /// Removes a region, or all.
    pub fn unregister(&self, name: &str) {
        self.0.unregister(MemoryKind::System, name);
    }

    /// Reads a slice of a region.
    ///
    /// # Errors
    /// When the slice is not inside of its region.
    pub fn read(&self, region: &str, offset: u64, byte_size: u64) -> Result<Bytes, InferError> {
        // Strings are read immediately.
        let slice = RegionSlice { region: region.to_owned(), offset, byte_size };
        self.0.input(&slice, "in", DataType::Bytes, &mut ClientMemory::default())
    }

    /// Writes a slice of a region.
    ///
    /// # Errors
    /// When the slice is not inside of its region.
    pub fn write(&self, region: &str, offset: u64, byte_size: u64, data: &[u8]) -> Result<(), InferError> {
        self.0.write(&RegionSlice { region: region.to_owned(), offset, byte_size }, "out", data)
    }
}
