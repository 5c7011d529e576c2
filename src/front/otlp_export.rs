//! Spans on their way to an OpenTelemetry collector: a bounded queue, and a thread that posts batches of it.

use std::hash::{BuildHasher as _, RandomState};
use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use prost::Message as _;
use serving::{TraceRecord, TraceSink};

use crate::otlp::{ExportRequest, KeyValue, Resource, ResourceSpans, Scope, ScopeSpans, Span, spans};

/// Longest time for connecting, for a write, and for a read.
const TIMEOUT: Duration = Duration::from_secs(10);

/// As much of a collector's answer as is read.
const MAX_ANSWER_BYTES: u64 = 1 << 16;

/// Where spans go, and in what batches. Defaults are Triton's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Collector {
    /// `http://HOST:PORT/PATH`.
    pub url: String,
    /// Attributes of this server; those of a name that is there already take its place.
    pub resource: Vec<(String, String)>,
    /// Spans that wait at most; more are dropped.
    pub max_queue_size: usize,
    /// Longest wait of a span for others.
    pub schedule_delay: Duration,
    /// Spans of one post at most.
    pub max_export_batch_size: usize,
}

impl Default for Collector {
    fn default() -> Self {
        Self {
            url: "http://localhost:4318/v1/traces".into(),
            resource: vec![("service.name".into(), "triton-inference-server".into())],
            max_queue_size: 2048,
            schedule_delay: Duration::from_secs(5),
            max_export_batch_size: 512,
        }
    }
}

impl Collector {
    /// Changes one setting, by Triton's name for it.
    ///
    /// # Errors
    /// When there is none of that name, or it cannot have that value.
    pub fn set(&mut self, key: &str, value: &str) -> Result<(), String> {
        let number = || value.parse::<u32>().ok().filter(|&number| number > 0).ok_or("expected a number from 1");
        match key {
            "url" => {
                self.url = value.to_owned();
                self.address()?;
            }
            "resource" => {
                let (name, value) = value.split_once('=').ok_or("expected resource=NAME=VALUE")?;
                self.resource.retain(|(known, _)| known != name);
                self.resource.push((name.to_owned(), value.to_owned()));
            }
            "bsp_max_queue_size" => self.max_queue_size = number()? as usize,
            "bsp_schedule_delay" => self.schedule_delay = Duration::from_millis(number()?.into()),
            "bsp_max_export_batch_size" => self.max_export_batch_size = number()? as usize,
            _ => return Err(format!("`{key}` is no setting of mode opentelemetry")),
        }
        Ok(())
    }

    /// Host with port, and path.
    fn address(&self) -> Result<(String, &str), String> {
        let rest = self.url.strip_prefix("http://").ok_or("expected http://HOST:PORT/PATH")?;
        let at = rest.find('/').unwrap_or(rest.len());
        let (host, path) = rest.split_at(at);
        if host.is_empty() || rest.bytes().any(|byte| byte.is_ascii_control() || byte == b' ') {
            return Err("expected http://HOST:PORT/PATH".to_owned());
        }
        let has_port = host.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
        let host = if has_port { host.to_owned() } else { format!("{host}:80") };
        Ok((host, if path.is_empty() { "/" } else { path }))
    }

    fn post(&self, spans: Vec<Span>) -> io::Result<()> {
        let (host, path) = self.address().map_err(io::Error::other)?;
        let attributes = self.resource.iter().map(|(key, value)| KeyValue::text(key, value)).collect();
        let scope_spans = vec![ScopeSpans { scope: Some(Scope { name: "triton-server".into() }), spans }];
        let resource_spans = vec![ResourceSpans { resource: Some(Resource { attributes }), scope_spans }];
        let body = ExportRequest { resource_spans }.encode_to_vec();
        let mut stream = connect(&host)?;
        let head = format!(
            "POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/x-protobuf\r\nContent-Length: {}\r\n\
             Connection: close\r\n\r\n",
            body.len()
        );
        stream.write_all(&[head.as_bytes(), &body].concat())?;
        let mut answer = Vec::new();
        stream.take(MAX_ANSWER_BYTES).read_to_end(&mut answer)?;
        let line = String::from_utf8_lossy(&answer).lines().next().unwrap_or_default().to_owned();
        match line.split(' ').nth(1) {
            Some(status) if status.len() == 3 && status.starts_with('2') => Ok(()),
            _ => Err(io::Error::other(format!("it answered `{line}`"))),
        }
    }
}

fn connect(host: &str) -> io::Result<TcpStream> {
    let mut failure = io::Error::new(io::ErrorKind::NotFound, "the host has no address");
    for address in host.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, TIMEOUT) {
            Ok(stream) => {
                stream.set_read_timeout(Some(TIMEOUT))?;
                stream.set_write_timeout(Some(TIMEOUT))?;
                return Ok(stream);
            }
            Err(error) => failure = error,
        }
    }
    Err(failure)
}

/// Takes traces, and posts them from a thread of its own; dropping it posts what waits.
#[derive(Debug)]
pub struct Exporter {
    queue: Option<SyncSender<Span>>,
    thread: Option<JoinHandle<()>>,
    seed: u64,
    num_lost: AtomicU64,
}

impl Exporter {
    /// Starts the thread.
    ///
    /// # Errors
    /// When there can be no more threads.
    pub fn new(collector: Collector) -> io::Result<Self> {
        let (queue, spans) = sync_channel(collector.max_queue_size);
        let thread = std::thread::Builder::new().name("otlp".to_owned()).spawn(move || export(&collector, &spans))?;
        // Bits that no count of traces reaches tell processes apart, so that no id is zero.
        let seed = RandomState::new().hash_one(0) | (1 << 63);
        Ok(Self { queue: Some(queue), thread: Some(thread), seed, num_lost: AtomicU64::new(0) })
    }
}

impl TraceSink for Exporter {
    fn write(&self, trace: &TraceRecord) {
        let Some(queue) = &self.queue else { return };
        for span in spans(trace, self.seed) {
            if queue.try_send(span).is_err() && self.num_lost.fetch_add(1, Relaxed) == 0 {
                tracing::warn!("spans are lost, which is said once: more wait than bsp_max_queue_size");
            }
        }
    }
}

impl Drop for Exporter {
    fn drop(&mut self) {
        self.queue = None;
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread that sends spans broke off");
        }
    }
}

fn export(collector: &Collector, queue: &Receiver<Span>) {
    let mut has_failed = false;
    // An idle server waits here for ever.
    while let Ok(first) = queue.recv() {
        let (batch, is_open) = fill(vec![first], collector, queue);
        let count = batch.len();
        match collector.post(batch) {
            Ok(()) => has_failed = false,
            Err(_) if !is_open => return, // Nobody waits for what comes behind it.
            Err(error) => {
                if !std::mem::replace(&mut has_failed, true) {
                    tracing::warn!("{count} spans are lost: cannot post to {}: {error}", collector.url);
                }
            }
        }
    }
}

/// A batch, and whether there may be more.
fn fill(mut batch: Vec<Span>, collector: &Collector, queue: &Receiver<Span>) -> (Vec<Span>, bool) {
    let until = Instant::now() + collector.schedule_delay;
    while batch.len() < collector.max_export_batch_size {
        match queue.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(span) => batch.push(span),
            Err(RecvTimeoutError::Timeout) => break,
            Err(RecvTimeoutError::Disconnected) => return (batch, false),
        }
    }
    (batch, true)
}
