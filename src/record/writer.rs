//! The thread that writes a recording.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::Serialize;

use crate::format::{Body, Contents, Entry, Head, Request, Step, VERSION};
use crate::items::{Item, RequestItem, Shared, StepItem};
use crate::options::Options;
use crate::{RecordError, reader, redact};

/// Bytes that are kept free for the last line.
const END_BYTES: u64 = 1 << 10;
/// The file has every line that is older than this, so that little is lost when the server is killed.
const FLUSH_INTERVAL: Duration = Duration::from_millis(500);

/// Owns the file.
pub(crate) struct Writer {
    file: BufWriter<File>,
    path: PathBuf,
    contents: Contents,
    window: Duration,
    /// Bytes that may still be written.
    left: u64,
    has_head: bool,
    shared: Arc<Shared>,
}

impl Writer {
    /// Creates a file that did not exist, for this user alone.
    pub(crate) fn new(options: &Options, shared: Arc<Shared>) -> Result<Self, RecordError> {
        let dir = &options.dir;
        let io = |what, path: &Path| {
            let path = path.to_owned();
            move |source| RecordError::Io { what, path, source }
        };
        fs::DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(io("make the directory", dir))?;
        let earlier = reader::recordings(dir).map_err(io("read the directory", dir))?;
        let bytes = earlier.iter().filter_map(|path| fs::metadata(path).ok()).map(|meta| meta.len()).sum::<u64>();
        if bytes + END_BYTES >= options.max_bytes {
            return Err(RecordError::Full { dir: dir.clone(), bytes, max_bytes: options.max_bytes });
        }
        let path = dir.join(reader::file_name(unix_ms(), std::process::id()));
        let file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path);
        let file = BufWriter::new(file.map_err(io("create the file", &path))?);
        let left = options.max_bytes - bytes - END_BYTES;
        let Options { contents, window, .. } = *options;
        tracing::info!(
            "records requests and steps in {}: {window:?} from the first request on, at most {left} bytes",
            path.display()
        );
        Ok(Self { file, path, contents, window, left, has_head: false, shared })
    }

    /// Writes until the window has passed, the bytes are used up, or the server ends.
    pub(crate) fn run(mut self, items: &Receiver<Item>) {
        let reason = self.write_all(items);
        self.shared.end();
        let end = self.shared.end_line(reason);
        let (requests, steps) = (end.dropped_requests, end.dropped_steps);
        // It ends in any case; the last line tells readers that it is whole.
        let _ = self.write_head().and_then(|()| self.write(&Entry::End(end), true)).and_then(|_| self.file.flush());
        tracing::info!(
            "the recording {} is over ({reason}); {requests} requests and {steps} steps did not fit into its queue",
            self.path.display()
        );
        // Those that arrive late are not counted.
        while items.try_recv().is_ok() {}
    }

    /// The reason of the end.
    fn write_all(&mut self, items: &Receiver<Item>) -> &'static str {
        let mut flushed = Instant::now();
        loop {
            let item = match items.recv_timeout(FLUSH_INTERVAL) {
                Ok(Item::Finish) | Err(RecvTimeoutError::Disconnected) => return "stopped",
                Ok(item) => Some(item),
                Err(RecvTimeoutError::Timeout) => None,
            };
            let written = item.map_or(Ok(true), |item| self.write_item(item));
            let is_late = flushed.elapsed() >= FLUSH_INTERVAL;
            let flush = if is_late { self.file.flush() } else { Ok(()) };
            flushed = if is_late { Instant::now() } else { flushed };
            match written.and_then(|fits| flush.map(|()| fits)) {
                Ok(true) => {}
                Ok(false) => return "bytes",
                Err(error) => {
                    tracing::warn!("the recording ends: cannot write {}: {error}", self.path.display());
                    return "failed";
                }
            }
            if self.shared.began.get().is_some_and(|began| began.elapsed() >= self.window) {
                return "window";
            }
        }
    }

    /// `false` if there is no room for it.
    fn write_item(&mut self, item: Item) -> io::Result<bool> {
        let Some(began) = self.shared.began.get().copied() else { return Ok(true) };
        self.write_head()?;
        let entry = match item {
            Item::Request(item) => {
                let held_bytes = item.held_bytes;
                let entry = Entry::Request(request(*item, began, self.contents));
                self.shared.release(held_bytes);
                entry
            }
            Item::Step(item) => Entry::Step(step(&item, began)),
            Item::Finish => return Ok(true),
        };
        self.write(&entry, false)
    }

    /// Writes the first line, if it is not there.
    fn write_head(&mut self) -> io::Result<()> {
        if self.has_head {
            return Ok(());
        }
        self.has_head = true;
        let since = self.shared.began.get().map_or(0, |began| began.elapsed().as_millis() as u64);
        let head = Head {
            trireme_recording: VERSION,
            program: env!("CARGO_PKG_VERSION").to_owned(),
            started_unix_ms: unix_ms() - since,
            contents: self.contents,
        };
        self.write(&head, true).map(drop)
    }

    fn write(&mut self, line: &impl Serialize, is_small: bool) -> io::Result<bool> {
        let mut text = serde_json::to_vec(line)?;
        text.push(b'\n');
        match self.left.checked_sub(text.len() as u64) {
            Some(left) => self.left = left,
            None if is_small => {}
            None => return Ok(false),
        }
        self.file.write_all(&text).map(|()| true)
    }
}

fn unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_millis() as u64)
}

fn micros(duration: Duration) -> u64 {
    duration.as_micros() as u64
}

fn request(item: RequestItem, began: Instant, contents: Contents) -> Request {
    let RequestItem { arrival, path, request_id, content_type, json_bytes, body, status, first, last, .. } = item;
    let kept = match contents {
        Contents::Bodies => Some(Body::of(&body)),
        Contents::Redacted => match item.redact {
            Some(redact) => redact(&body).map(|bytes| Body::of(&bytes)),
            None => redact::body(&body),
        },
        Contents::Ids => None,
    };
    let is_kept = contents == Contents::Bodies
        && item.reply.iter().map(|part| part.len() as u64).sum::<u64>() == item.reply_bytes;
    Request {
        id: arrival.id,
        at_us: micros(arrival.at.duration_since(began)),
        // A query may have a text of the client.
        path: if contents == Contents::Bodies { path } else { path.split('?').next().unwrap_or_default().to_owned() },
        request_id,
        content_type,
        json_bytes,
        body_bytes: body.len() as u64,
        body: kept,
        status,
        first_us: first.map(|first| micros(first.duration_since(arrival.at))),
        last_us: micros(last.duration_since(arrival.at)),
        pieces: item.pieces,
        reply_bytes: item.reply_bytes,
        reply: is_kept.then(|| Body::of(&item.reply.concat())),
        is_whole: item.is_whole,
    }
}

fn step(item: &StepItem, began: Instant) -> Step {
    let [at, planned, sent, arrived, settled, delivered] = item.times;
    let between = |from: Instant, to: Instant| micros(to.duration_since(from));
    Step {
        model: item.model.to_string(),
        replica: item.replica,
        step: item.step,
        at_us: between(began, at),
        plan_us: between(at, planned),
        send_us: between(planned, sent),
        wait_us: between(sent, arrived),
        settle_us: between(arrived, settled),
        deliver_us: between(settled, delivered),
        joined: item.joined.clone(),
        left: item.left.clone(),
        rows: item.rows.clone(),
    }
}
