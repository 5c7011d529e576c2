//! What happened to one request and when, for who asked to know (`v2/trace/setting`).

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use crate::Tensor;

/// Where traces go when they are complete.
pub trait TraceSink: Send + Sync {
    /// Takes a trace. Called once for each, in the order in which they end.
    fn write(&self, trace: &TraceRecord);
}

/// A request's trace while it is written; cheap to clone. It goes to its sink when the last clone is dropped.
#[derive(Clone)]
pub struct Trace(Arc<Open>);

struct Open {
    record: Mutex<TraceRecord>,
    with_times: bool,
    with_tensors: bool,
    sink: Arc<dyn TraceSink>,
}

/// A trace as it is written.
#[derive(Debug, Clone, Default)]
pub struct TraceRecord {
    /// Its number, from 1.
    pub id: u64,
    /// The trace of the ensemble that this request is a step of, or of the request that caused it.
    pub parent_id: Option<u64>,
    /// The model.
    pub model: String,
    /// Its version; -1 until it is known.
    pub version: i64,
    /// The client's id; may be empty.
    pub request_id: String,
    /// Moments: name, and nanoseconds since 1970.
    pub times: Vec<(&'static str, u64)>,
    /// Tensors: activity, and the tensor.
    pub tensors: Vec<(&'static str, Tensor)>,
}

impl Trace {
    /// A trace of moments, of tensors, or of both.
    pub fn new(sink: Arc<dyn TraceSink>, with_times: bool, with_tensors: bool) -> Self {
        let record = TraceRecord { id: next_id(), version: -1, ..TraceRecord::default() };
        Self(Arc::new(Open { record: Mutex::new(record), with_times, with_tensors, sink }))
    }

    /// The trace of a step of this request, or of a request that it causes.
    pub fn child(&self) -> Self {
        let parent_id = Some(self.change(|record| record.id));
        let Open { with_times, with_tensors, sink, .. } = &*self.0;
        let record = TraceRecord { id: next_id(), parent_id, version: -1, ..TraceRecord::default() };
        let (with_times, with_tensors, sink) = (*with_times, *with_tensors, sink.clone());
        Self(Arc::new(Open { record: Mutex::new(record), with_times, with_tensors, sink }))
    }

    fn change<R>(&self, change: impl FnOnce(&mut TraceRecord) -> R) -> R {
        change(&mut self.0.record.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn name(&self, model: &str, version: i64, request_id: &str) {
        self.change(|record| {
            (record.model, record.version, record.request_id) = (model.to_owned(), version, request_id.to_owned());
        });
    }

    /// Now is the moment called `name`.
    pub fn mark(&self, name: &'static str) {
        self.mark_at(name, Instant::now());
    }

    /// `at` was the moment called `name`.
    pub fn mark_at(&self, name: &'static str, at: Instant) {
        if self.0.with_times {
            self.change(|record| record.times.push((name, unix_ns(at))));
        }
    }

    pub(crate) fn tensors(&self, activity: &'static str, tensors: &[Tensor]) {
        if self.0.with_tensors {
            self.change(|record| record.tensors.extend(tensors.iter().map(|tensor| (activity, tensor.clone()))));
        }
    }
}

impl fmt::Debug for Trace {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.change(|record| write!(formatter, "Trace({})", record.id))
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        let record = self.record.get_mut().unwrap_or_else(PoisonError::into_inner);
        self.sink.write(record);
    }
}

fn next_id() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    LAST.fetch_add(1, Relaxed) + 1
}

/// Nanoseconds since 1970, of a clock that never goes back.
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
