//! The recorder of a running server.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use crate::RecordError;
use crate::items::{Arrival, Item, RequestItem, Shared, StepItem};
use crate::options::Options;
use crate::writer::Writer;

/// Requests and steps in the queue.
const MAX_QUEUED: usize = 4096;
/// Bytes of bodies in the queue, and of replies that are in the queue or still arrive.
const MAX_HELD_BYTES: u64 = 64 << 20;

/// Records a window of a server's work. Cheap to ask, and never waits.
#[derive(Debug)]
pub struct Recorder {
    sender: SyncSender<Item>,
    shared: Arc<Shared>,
    next_id: AtomicU64,
    writer: Mutex<Option<JoinHandle<()>>>,
}

impl Recorder {
    /// Creates the file and starts the thread that writes it.
    ///
    /// # Errors
    /// When the directory or the file cannot be made, or the recordings there have the most bytes already.
    pub fn start(options: &Options) -> Result<Arc<Self>, RecordError> {
        let shared = Arc::new(Shared::default());
        let (sender, receiver): (_, Receiver<Item>) = sync_channel(MAX_QUEUED);
        let writer = Writer::new(options, Arc::clone(&shared))?;
        let spawned = std::thread::Builder::new().name("recorder".into()).spawn(move || writer.run(&receiver));
        let thread = spawned.map_err(|source| RecordError::Io {
            what: "start a thread for",
            path: options.dir.clone(),
            source,
        })?;
        Ok(Arc::new(Self { sender, shared, next_id: AtomicU64::new(0), writer: Mutex::new(Some(thread)) }))
    }

    /// The arrival of a request now; `None` if the recording is over.
    pub fn arrival(&self) -> Option<Arrival> {
        if self.is_over() {
            return None;
        }
        let at = Instant::now();
        self.shared.began.get_or_init(|| at);
        Some(Arrival { id: self.next_id.fetch_add(1, Relaxed), at })
    }

    /// Whether nothing more is taken.
    pub fn is_over(&self) -> bool {
        self.shared.is_over.load(Relaxed)
    }

    /// Whether a request may hold so many bytes more until it is written.
    pub fn hold(&self, bytes: u64) -> bool {
        let fits = self.shared.held_bytes.fetch_add(bytes, Relaxed) + bytes <= MAX_HELD_BYTES;
        if !fits {
            self.shared.release(bytes);
        }
        fits
    }

    /// Keeps a request, unless the queue is full.
    pub fn request(&self, mut item: RequestItem) {
        let (body_bytes, reply_bytes) = (item.body.len() as u64, item.held_bytes);
        item.held_bytes += body_bytes;
        let has_room = self.hold(body_bytes);
        if !has_room || self.sender.try_send(Item::Request(Box::new(item))).is_err() {
            self.shared.release(reply_bytes + if has_room { body_bytes } else { 0 });
            self.shared.dropped_requests.fetch_add(1, Relaxed);
        }
    }

    /// Whether steps are kept now: from the first request on.
    pub fn takes_steps(&self) -> bool {
        !self.is_over() && self.shared.began.get().is_some()
    }

    /// Keeps a step, unless the queue is full.
    pub fn step(&self, item: StepItem) {
        if self.sender.try_send(Item::Step(Box::new(item))).is_err() {
            self.shared.dropped_steps.fetch_add(1, Relaxed);
        }
    }

    /// Writes what is in the queue, and ends the recording.
    pub fn finish(&self) {
        let thread = self.writer.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(thread) = thread else { return };
        // Waits while the queue is full. An error means that the writer has ended.
        if self.sender.send(Item::Finish).is_ok() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use bytes::Bytes;

    use super::*;
    use crate::Recording;

    #[test]
    fn what_does_not_fit_into_the_queue_is_dropped_and_counted() {
        let dir = tempfile::tempdir().unwrap();
        let recorder = Recorder::start(&Options::new(dir.path())).unwrap();
        let body = Bytes::from(vec![b'x'; MAX_HELD_BYTES as usize + 1]);
        recorder.request(RequestItem { body, ..RequestItem::new(recorder.arrival().unwrap()) });
        recorder.request(RequestItem::new(recorder.arrival().unwrap()));
        assert!(recorder.hold(MAX_HELD_BYTES) && !recorder.hold(1), "a dropped request holds nothing");
        recorder.finish();
        let recording = Recording::open(dir.path()).unwrap();
        assert_eq!(recording.requests.iter().map(|request| request.id).collect::<Vec<_>>(), [1]);
        let end = recording.end.unwrap();
        assert_eq!((end.reason.as_str(), end.dropped_requests), ("stopped", 1));
    }

    #[test]
    fn the_window_begins_with_the_first_request_and_ends_after_its_time() {
        let dir = tempfile::tempdir().unwrap();
        let options = Options { window: Duration::from_millis(1), ..Options::new(dir.path()) };
        let recorder = Recorder::start(&options).unwrap();
        assert!(!recorder.takes_steps());
        recorder.request(RequestItem::new(recorder.arrival().unwrap()));
        let deadline = Instant::now() + Duration::from_secs(20);
        while recorder.arrival().is_some() {
            assert!(Instant::now() < deadline, "the window has no end");
            std::thread::sleep(Duration::from_millis(5));
        }
        recorder.finish();
        assert_eq!(Recording::open(dir.path()).unwrap().end.unwrap().reason, "window");
    }
}
