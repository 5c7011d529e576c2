//! Traces as a file of JSON, in the form of Triton's own (its user guide, "Trace").
//!
//! The file is whole JSON after every trace, so that it can be read while the server runs.

use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

use serving::{Tensor, TraceRecord, TraceSink};

use crate::json_writer::JsonWriter;

/// Elements of a tensor that are written; of longer ones the rest is left out.
const MAX_ELEMENTS: usize = 4096;

/// Where traces are written.
#[derive(Debug)]
pub struct TraceFile {
    path: PathBuf,
    /// Traces of one file `PATH.N`; 0 writes all into `PATH`.
    frequency: AtomicU64,
    open: Mutex<Open>,
}

#[derive(Debug, Default)]
struct Open {
    file: Option<File>,
    num_traces: u64,
    index: u64,
}

impl TraceFile {
    /// A file that is made with the first trace, over what was there.
    pub fn new(path: PathBuf) -> Self {
        Self { path, frequency: AtomicU64::new(0), open: Mutex::default() }
    }

    /// Traces of one file `PATH.N`; 0 writes all into `PATH`.
    pub fn set_frequency(&self, frequency: u64) {
        self.frequency.store(frequency, Relaxed);
    }

    fn append(&self, text: &[u8]) -> io::Result<()> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let frequency = self.frequency.load(Relaxed);
        if frequency > 0 && open.num_traces >= frequency {
            *open = Open { index: open.index + 1, ..Open::default() };
        }
        if open.file.is_none() {
            let path = match frequency {
                0 => self.path.clone(),
                _ => PathBuf::from(format!("{}.{}", self.path.display(), open.index)),
            };
            open.file = Some(File::create(path)?);
        }
        let is_first = open.num_traces == 0;
        let file = open.file.as_mut().expect("opened above");
        if is_first {
            file.write_all(b"[")?;
        } else {
            file.seek(SeekFrom::End(-2))?; // Over the `]` of the trace before.
            file.write_all(b",")?;
        }
        file.write_all(&[text, b"]\n"].concat())?;
        open.num_traces += 1;
        Ok(())
    }
}

impl TraceSink for TraceFile {
    fn write(&self, trace: &TraceRecord) {
        if let Err(error) = self.append(&json(trace)) {
            tracing::warn!("a trace is lost: cannot write {}: {error}", self.path.display());
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

/// The first elements, separated by commas, as JSON writes them.
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
        return String::new(); // FP16 and BF16 have no form in JSON.
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
    fn the_file_is_whole_json_after_every_trace_and_a_new_one_begins_as_often_as_asked() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trace.json");
        let sink = TraceFile::new(path.clone());
        for id in 1..=2 {
            sink.write(&record(id));
            let read: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
            assert_eq!(read.as_array().unwrap().len() as u64, 4 * id);
            assert_eq!(read[1]["timestamps"][0], serde_json::json!({"name": "REQUEST_START", "ns": 5}));
            assert_eq!(read[3]["tensor"]["data"], "0.5,2.0");
            assert_eq!(read[0]["request_id"], "r\"7");
        }
        let sink = TraceFile::new(path.clone());
        sink.set_frequency(1);
        (1..=2).for_each(|id| sink.write(&record(id)));
        let second = std::fs::read(folder.path().join("trace.json.1")).unwrap();
        assert_eq!(serde_json::from_slice::<serde_json::Value>(&second).unwrap()[0]["id"], 2);
    }
}
