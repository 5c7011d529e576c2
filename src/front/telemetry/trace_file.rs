//! Writes traces to JSON files in Triton's format (its user guide, "Trace").
//!
//! A file is valid JSON after every trace, so that it can be read while the server runs.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

use serving::{RateLimitedLog, Tensor, TraceRecord, TraceSink};

use crate::api::triton::http::json_writer::JsonWriter;

/// Maximum elements of a tensor that are written; further ones are omitted.
const MAX_ELEMENTS: usize = 4096;

/// A file has at most this fraction of the maximum bytes of all files; then a new file is created.
const NUM_SHARES: u64 = 8;

static LOST_TRACES: RateLimitedLog = RateLimitedLog::new(4);

/// Maximum disk space of trace files. Beyond it, the oldest files are removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceBounds {
    /// Maximum number of files.
    pub max_files: usize,
    /// Maximum bytes of all files.
    pub max_bytes: u64,
}

impl Default for TraceBounds {
    fn default() -> Self {
        Self { max_files: 1000, max_bytes: 1 << 30 }
    }
}

/// A sink that writes traces to files.
#[derive(Debug)]
pub struct TraceFile {
    path: PathBuf,
    bounds: TraceBounds,
    /// Traces per file `PATH.N`; 0 writes all traces to `PATH`.
    frequency: AtomicU64,
    open: Mutex<Open>,
}

#[derive(Debug, Default)]
struct Open {
    file: Option<File>,
    path: PathBuf,
    num_traces: u64,
    num_bytes: u64,
    index: u64,
    /// Complete files with their lengths, oldest first.
    complete: VecDeque<(PathBuf, u64)>,
}

impl Open {
    /// Completes the file, and removes the oldest files until another file of `share` bytes is within the bounds.
    fn complete(&mut self, bounds: TraceBounds, share: u64) {
        let last = std::mem::take(self);
        (self.index, self.complete) = (last.index + 1, last.complete);
        self.complete.push_back((last.path, last.num_bytes));
        let mut sum: u64 = self.complete.iter().map(|(_, num_bytes)| num_bytes).sum();
        while self.complete.len() >= bounds.max_files || sum.saturating_add(share) > bounds.max_bytes {
            let Some((path, num_bytes)) = self.complete.pop_front() else { return };
            sum -= num_bytes;
            let _ = std::fs::remove_file(path); // The file may have been removed already.
        }
    }
}

impl TraceFile {
    /// A sink for `path`. The first trace creates the file and replaces an existing one.
    pub fn new(path: PathBuf, bounds: TraceBounds) -> Self {
        Self { path, bounds, frequency: AtomicU64::new(0), open: Mutex::default() }
    }

    /// Sets the number of traces per file `PATH.N`; 0 writes all traces to `PATH`.
    pub fn set_frequency(&self, frequency: u64) {
        self.frequency.store(frequency, Relaxed);
    }

    fn append(&self, text: &[u8]) -> io::Result<()> {
        let share = self.bounds.max_bytes / NUM_SHARES;
        let entry = [text, b"]\n"].concat();
        let num_bytes = entry.len() as u64 + 1;
        if num_bytes > share {
            let words =
                format!("it has {num_bytes} bytes, and a file has at most {share} (an eighth of --trace-max-bytes)");
            return Err(io::Error::other(words));
        }
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let frequency = self.frequency.load(Relaxed);
        let is_due = frequency > 0 && open.num_traces >= frequency;
        if open.num_traces > 0 && (is_due || open.num_bytes + num_bytes > share) {
            open.complete(self.bounds, share);
        }
        if open.file.is_none() {
            open.path = match (frequency, open.index) {
                (0, 0) => self.path.clone(),
                (_, index) => PathBuf::from(format!("{}.{index}", self.path.display())),
            };
            open.file = Some(File::create(&open.path)?);
        }
        let is_first = open.num_traces == 0;
        let file = open.file.as_mut().expect("opened above");
        if is_first {
            file.write_all(b"[")?;
        } else {
            file.seek(SeekFrom::End(-2))?; // Overwrites the closing bracket.
            file.write_all(b",")?;
        }
        file.write_all(&entry)?;
        open.num_traces += 1;
        open.num_bytes += num_bytes;
        Ok(())
    }
}

impl TraceSink for TraceFile {
    fn write(&self, trace: &TraceRecord) {
        if let Err(error) = self.append(&json(trace))
            && let Some(suppressed) = LOST_TRACES.allow()
        {
            tracing::warn!("a trace is lost: cannot write {}: {error}{suppressed}", self.path.display());
        }
    }
}

/// The entries of a trace, separated by commas.
fn json(trace: &TraceRecord) -> Vec<u8> {
    let mut entries = vec![head(trace)];
    entries.extend(trace.times.iter().map(|(name, ns)| {
        let mut writer = entry(trace.id);
        writer.key("timestamps");
        writer.begin_array();
        writer.begin_object();
        writer.member("name", name.as_bytes());
        writer.key("ns");
        writer.integer(ns);
        writer.end_object();
        writer.end_array();
        writer.end_object();
        writer.finish()
    }));
    entries.extend(trace.tensors.iter().map(|(activity, tensor)| {
        let mut writer = entry(trace.id);
        writer.member("activity", activity.as_bytes());
        writer.key("tensor");
        writer.begin_object();
        writer.member("name", tensor.name.as_bytes());
        writer.member("data", elements(tensor).as_bytes());
        writer.member("shape", tensor.shape.iter().map(i64::to_string).collect::<Vec<_>>().join(",").as_bytes());
        writer.member("dtype", tensor.datatype.name().as_bytes());
        writer.end_object();
        writer.end_object();
        writer.finish()
    }));
    entries.join(&b",\n"[..])
}

fn entry(id: u64) -> JsonWriter {
    let mut writer = JsonWriter::with_capacity(96);
    writer.begin_object();
    writer.key("id");
    writer.integer(id);
    writer
}

fn head(trace: &TraceRecord) -> Vec<u8> {
    let mut writer = entry(trace.id);
    writer.member("model_name", trace.model.as_bytes());
    writer.key("model_version");
    writer.integer(trace.version);
    if !trace.request_id.is_empty() {
        writer.member("request_id", trace.request_id.as_bytes());
    }
    if let Some(parent) = trace.parent_id {
        writer.key("parent_id");
        writer.integer(parent);
    }
    writer.end_object();
    writer.finish()
}

/// The first elements, separated by commas, in JSON form.
fn elements(tensor: &Tensor) -> String {
    let size = tensor.datatype.size();
    let mut first = tensor.clone();
    if let Some(size) = size {
        first.data.truncate(MAX_ELEMENTS * size);
    }
    first.shape =
        [size.map_or(tensor.shape.iter().product(), |size| (first.data.len() / size) as i64)].as_slice().into();
    let mut writer = JsonWriter::with_capacity(256);
    if writer.tensor(&first).is_err() {
        return String::new(); // FP16 and BF16 have no JSON form.
    }
    let text = String::from_utf8_lossy(&writer.finish()).into_owned();
    text.trim_start_matches('[').trim_end_matches(']').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(id: u64) -> TraceRecord {
        TraceRecord {
            id,
            model: "m".into(),
            version: 1,
            request_id: "r\"7".into(),
            times: vec![("REQUEST_START", 5), ("REQUEST_END", 9)],
            tensors: vec![("TENSOR_QUEUE_INPUT", Tensor::from_f32("IN", &[1, 2], &[0.5, 2.0]))],
            ..TraceRecord::default()
        }
    }

    #[test]
    fn a_file_is_valid_json_after_every_trace_and_the_frequency_creates_new_files() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trace.json");
        let sink = TraceFile::new(path.clone(), TraceBounds::default());
        for id in 1..=2 {
            sink.write(&record(id));
            let read: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
            assert_eq!(read.as_array().unwrap().len() as u64, 4 * id);
            assert_eq!(read[1]["timestamps"][0], serde_json::json!({"name": "REQUEST_START", "ns": 5}));
            assert_eq!(read[3]["tensor"]["data"], "0.5,2.0");
            assert_eq!(read[0]["request_id"], "r\"7");
        }
        let sink = TraceFile::new(path.clone(), TraceBounds::default());
        sink.set_frequency(1);
        (1..=2).for_each(|id| sink.write(&record(id)));
        let second = std::fs::read(folder.path().join("trace.json.1")).unwrap();
        assert_eq!(serde_json::from_slice::<serde_json::Value>(&second).unwrap()[0]["id"], 2);
    }

    /// Names and lengths of all files.
    fn files(folder: &std::path::Path) -> Vec<(String, u64)> {
        let entries = std::fs::read_dir(folder).unwrap().map(Result::unwrap);
        let mut files: Vec<(String, u64)> =
            entries.map(|entry| (entry.file_name().into_string().unwrap(), entry.metadata().unwrap().len())).collect();
        files.sort();
        files
    }

    #[test]
    fn the_number_of_files_is_bounded() {
        let folder = tempfile::tempdir().unwrap();
        let sink = TraceFile::new(folder.path().join("t"), TraceBounds { max_files: 3, ..TraceBounds::default() });
        sink.set_frequency(1);
        (1..=20).for_each(|id| sink.write(&record(id)));
        let names: Vec<String> = files(folder.path()).into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["t.17", "t.18", "t.19"], "the newest files are kept");
    }

    #[test]
    fn the_bytes_of_all_files_are_bounded() {
        let folder = tempfile::tempdir().unwrap();
        let max_bytes = 16 << 10;
        let sink = TraceFile::new(folder.path().join("t"), TraceBounds { max_files: 1000, max_bytes });
        (1..=500).for_each(|id| sink.write(&record(id)));
        let long = TraceRecord { request_id: "x".repeat(64 << 10), ..record(501) };
        sink.write(&long);
        let written = files(folder.path());
        let sum: u64 = written.iter().map(|(_, num_bytes)| num_bytes).sum();
        assert!(sum <= max_bytes && sum > max_bytes / 2, "{written:?}");
        for (name, _) in &written {
            let text = std::fs::read(folder.path().join(name)).unwrap();
            let read: serde_json::Value = serde_json::from_slice(&text).unwrap();
            assert!(read.as_array().is_some_and(|entries| !entries.is_empty()), "{name}");
        }
    }
}
