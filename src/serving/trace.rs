//! Traces of requests: timestamps and tensors (Triton's trace extension, `v2/trace/setting`).

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use crate::Tensor;

/// Timestamps, and tensors, that a trace keeps at most: a stream may have any number of them.
const MAX_ENTRIES: usize = 1 << 16;

/// Receives complete traces.
pub trait TraceSink: Send + Sync {
    /// Receives a trace. Called once for each trace, in the order in which traces end.
    fn write(&self, trace: &TraceRecord);
}

/// The trace of a request in flight; cheap to clone. Dropping the last clone passes it to its sink.
#[derive(Clone)]
pub struct Trace(Arc<OpenTrace>);

struct OpenTrace {
    record: Mutex<TraceRecord>,
    with_times: bool,
    with_tensors: bool,
    sink: Arc<dyn TraceSink>,
}

/// The client's span, which is the parent of the trace (W3C Trace Context).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpanContext {
    /// Id of the whole trace.
    pub trace_id: [u8; 16],
    /// Id of the client's span.
    pub span_id: [u8; 8],
}

impl SpanContext {
    /// Parses a header `traceparent`; `None` if it is invalid.
    pub fn parse(traceparent: &str) -> Option<Self> {
        let mut parts = traceparent.split('-');
        let (version, trace, span, flags) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
        let is_known = version.len() == 2 && version != "ff" && (version != "00" || parts.next().is_none());
        let (trace_id, span_id) = (from_hex::<16>(trace)?, from_hex::<8>(span)?);
        let is_valid = is_known && flags.len() == 2 && trace_id != [0; 16] && span_id != [0; 8];
        is_valid.then_some(Self { trace_id, span_id })
    }
}

fn from_hex<const N: usize>(text: &str) -> Option<[u8; N]> {
    if text.len() != 2 * N || !text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f')) {
        return None;
    }
    let mut bytes = [0; N];
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * at..2 * at + 2], 16).ok()?;
    }
    Some(bytes)
}

/// The contents of a trace.
#[derive(Debug, Clone, Default)]
pub struct TraceRecord {
    /// Its number, from 1.
    pub id: u64,
    /// Number of the parent trace: of the ensemble that this request is a step of, or of the request that caused it.
    pub parent_id: Option<u64>,
    /// Number of the trace of the client's request: this trace, or its first ancestor.
    pub root_id: u64,
    /// The client's own span.
    pub context: Option<SpanContext>,
    /// The model's name.
    pub model: String,
    /// The model's version; -1 until it is known.
    pub version: i64,
    /// The client's id; may be empty.
    pub request_id: String,
    /// Timestamps: name, and nanoseconds since 1970.
    pub times: Vec<(&'static str, u64)>,
    /// Tensors: activity, and the tensor.
    pub tensors: Vec<(&'static str, Tensor)>,
}

impl Trace {
    /// A new trace of timestamps, tensors or both. `context` is the client's span, where it sent one.
    pub fn new(sink: Arc<dyn TraceSink>, with_times: bool, with_tensors: bool, context: Option<SpanContext>) -> Self {
        let id = next_id();
        let record = TraceRecord { id, root_id: id, context, version: -1, ..TraceRecord::default() };
        Self(Arc::new(OpenTrace { record: Mutex::new(record), with_times, with_tensors, sink }))
    }

    /// A new trace for a step of this request, or for a request that it causes.
    pub fn child(&self) -> Self {
        let (parent, root_id, context) = self.change(|record| (record.id, record.root_id, record.context));
        let OpenTrace { with_times, with_tensors, sink, .. } = &*self.0;
        let (id, parent_id) = (next_id(), Some(parent));
        let record = TraceRecord { id, parent_id, root_id, context, version: -1, ..TraceRecord::default() };
        let (with_times, with_tensors, sink) = (*with_times, *with_tensors, sink.clone());
        Self(Arc::new(OpenTrace { record: Mutex::new(record), with_times, with_tensors, sink }))
    }

    fn change<R>(&self, change: impl FnOnce(&mut TraceRecord) -> R) -> R {
        change(&mut self.0.record.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn name(&self, model: &str, version: i64, request_id: &str) {
        self.change(|record| {
            (record.model, record.version, record.request_id) = (model.to_owned(), version, request_id.to_owned());
        });
    }

    /// Records the current time as timestamp `name`.
    pub fn mark(&self, name: &'static str) {
        self.mark_at(name, Instant::now());
    }

    /// Records `at` as timestamp `name`.
    pub fn mark_at(&self, name: &'static str, at: Instant) {
        if self.0.with_times {
            self.change(|record| {
                if record.times.len() < MAX_ENTRIES {
                    record.times.push((name, unix_ns(at)));
                }
            });
        }
    }

    pub(crate) fn tensors(&self, activity: &'static str, tensors: &[Tensor]) {
        if self.0.with_tensors {
            self.change(|record| {
                let room = MAX_ENTRIES.saturating_sub(record.tensors.len());
                record.tensors.extend(tensors.iter().take(room).map(|tensor| (activity, tensor.clone())));
            });
        }
    }
}

impl fmt::Debug for Trace {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.change(|record| write!(formatter, "Trace({})", record.id))
    }
}

impl Drop for OpenTrace {
    fn drop(&mut self) {
        let record = self.record.get_mut().unwrap_or_else(PoisonError::into_inner);
        self.sink.write(record);
    }
}

fn next_id() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    LAST.fetch_add(1, Relaxed) + 1
}

/// Nanoseconds since 1970, by a monotonic clock.
fn unix_ns(at: Instant) -> u64 {
    static BASE: OnceLock<(Instant, u64)> = OnceLock::new();
    let (base, base_ns) = BASE.get_or_init(|| {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        (Instant::now(), since.as_nanos() as u64)
    });
    let after = at.saturating_duration_since(*base).as_nanos() as u64;
    let before = base.saturating_duration_since(at).as_nanos() as u64;
    base_ns + after - before
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn valid_traceparents_are_parsed_and_invalid_ones_are_not() {
        let context = SpanContext::parse("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01").unwrap();
        assert_eq!((context.trace_id[0], context.trace_id[15], context.span_id[1]), (0x4b, 0x36, 0xf0));
        for wrong in [
            "",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7",
            "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-x",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "00-4BF92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-+bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-äbf92f3577b34da6a3ce929d0e0e473-00f067aa0ba902b7-01",
        ] {
            assert_eq!(SpanContext::parse(wrong), None, "{wrong}");
        }
    }
}
