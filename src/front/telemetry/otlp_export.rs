//! The export of spans to an OpenTelemetry collector: a bounded queue, and a thread that posts batches.
//!
//! `opentelemetry-otlp` would add an HTTP client and would create the spans itself; here they are made of Triton's trace records.

use std::hash::{BuildHasher as _, RandomState};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use http::Uri;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::InstrumentationScope;
use opentelemetry_proto::tonic::resource::v1::Resource;
use opentelemetry_proto::tonic::trace::v1::{ResourceSpans, ScopeSpans, Span};
use prost::Message as _;
use serving::{TraceRecord, TraceSink};
use ureq::Agent;

use crate::telemetry::otlp::{spans, text};

/// Timeout of a post.
const TIMEOUT: Duration = Duration::from_secs(10);

/// The collector and the settings of batches. Defaults are Triton's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Collector {
    /// `http://HOST:PORT/PATH`.
    pub url: String,
    /// Resource attributes of this server; a later attribute of the same name replaces an earlier one.
    pub resource: Vec<(String, String)>,
    /// Maximum queued spans; further spans are dropped.
    pub max_queue_size: usize,
    /// Maximum delay of a span.
    pub schedule_delay: Duration,
    /// Maximum spans per post.
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
    /// Changes the setting with Triton's name `key`.
    ///
    /// # Errors
    /// When the name is unknown or the value is invalid.
    pub fn set(&mut self, key: &str, value: &str) -> Result<(), String> {
        let number = || value.parse::<u32>().ok().filter(|&number| number > 0).ok_or("expected a number from 1");
        match key {
            "url" => {
                self.url = value.to_owned();
                self.check_url()?;
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

    fn check_url(&self) -> Result<(), String> {
        let is_http = |url: &Uri| url.scheme_str() == Some("http") && url.host().is_some_and(|host| !host.is_empty());
        match self.url.parse::<Uri>() {
            Ok(url) if is_http(&url) => Ok(()),
            _ => Err("expected http://HOST:PORT/PATH".to_owned()),
        }
    }

    fn post(&self, agent: &Agent, spans: Vec<Span>) -> Result<(), ureq::Error> {
        let attributes = self.resource.iter().map(|(key, value)| text(key, value)).collect();
        let scope = InstrumentationScope { name: "triton-server".into(), ..InstrumentationScope::default() };
        let scope_spans = ScopeSpans { scope: Some(scope), spans, ..ScopeSpans::default() };
        let resource_spans = ResourceSpans {
            resource: Some(Resource { attributes, ..Resource::default() }),
            scope_spans: vec![scope_spans],
            ..ResourceSpans::default()
        };
        let body = ExportTraceServiceRequest { resource_spans: vec![resource_spans] }.encode_to_vec();
        agent.post(&self.url).content_type("application/x-protobuf").send(body)?;
        Ok(())
    }
}

/// Posts traces from a thread of its own. Dropping it posts the queued spans.
#[derive(Debug)]
pub struct Exporter {
    queue: Option<SyncSender<Span>>,
    thread: Option<JoinHandle<()>>,
    seed: u64,
    num_dropped: AtomicU64,
}

impl Exporter {
    /// Starts the thread.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub fn new(collector: Collector) -> io::Result<Self> {
        let (queue, spans) = sync_channel(collector.max_queue_size);
        let thread = std::thread::Builder::new().name("otlp".to_owned()).spawn(move || export(&collector, &spans))?;
        // A random seed distinguishes processes. Its highest bit is set, so that no id is zero.
        let seed = RandomState::new().hash_one(0) | (1 << 63);
        Ok(Self { queue: Some(queue), thread: Some(thread), seed, num_dropped: AtomicU64::new(0) })
    }
}

impl TraceSink for Exporter {
    fn write(&self, trace: &TraceRecord) {
        let Some(queue) = &self.queue else { return };
        for span in spans(trace, self.seed) {
            if queue.try_send(span).is_err() && self.num_dropped.fetch_add(1, Relaxed) == 0 {
                tracing::warn!(
                    "spans are dropped: the queue of bsp_max_queue_size is full; further drops are not logged"
                );
            }
        }
    }
}

impl Drop for Exporter {
    fn drop(&mut self) {
        self.queue = None;
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread that exports spans panicked");
        }
    }
}

fn export(collector: &Collector, queue: &Receiver<Span>) {
    let agent: Agent = Agent::config_builder().timeout_global(Some(TIMEOUT)).max_idle_connections(0).build().into();
    let mut has_failed = false;
    while let Ok(first) = queue.recv() {
        let (batch, is_open) = fill(vec![first], collector, queue);
        let count = batch.len();
        match collector.post(&agent, batch) {
            Ok(()) => has_failed = false,
            Err(_) if !is_open => return, // The server is shutting down.
            Err(error) => {
                if !std::mem::replace(&mut has_failed, true) {
                    tracing::warn!("{count} spans are lost: cannot post to {}: {error}", collector.url);
                }
            }
        }
    }
}

/// Completes a batch. Returns it and whether the queue is still open.
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
