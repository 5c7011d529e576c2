//! Reads recordings.

use std::fs::{self, File};
use std::io::{self, BufRead as _, BufReader};
use std::path::{Path, PathBuf};

use crate::RecordError;
use crate::format::{End, Entry, Head, Request, Step, VERSION};

/// Start and end of a recording's file name.
const NAME: (&str, &str) = ("recording-", ".jsonl");

/// The name of a recording that begins at a time, in a process.
pub(crate) fn file_name(unix_ms: u64, pid: u32) -> String {
    format!("{}{unix_ms}-{pid}{}", NAME.0, NAME.1)
}

/// The recordings in a directory, oldest first.
pub(crate) fn recordings(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = fs::read_dir(dir)?.flatten();
    let is_one = |name: &str| name.starts_with(NAME.0) && name.ends_with(NAME.1);
    let of = entries.filter(|entry| entry.file_name().to_str().is_some_and(is_one)).map(|entry| entry.path());
    let mut found: Vec<PathBuf> = of.collect();
    found.sort();
    Ok(found)
}

/// A recording in memory.
#[derive(Debug, Clone, PartialEq)]
pub struct Recording {
    /// Its file.
    pub path: PathBuf,
    /// The first line.
    pub head: Head,
    /// Requests in the order of their arrival.
    pub requests: Vec<Request>,
    /// Steps in the order of their ends.
    pub steps: Vec<Step>,
    /// The last line; `None` if the server was killed.
    pub end: Option<End>,
}

impl Recording {
    /// Reads a file, or the only recording in a directory.
    ///
    /// # Errors
    /// When there is none or several, it cannot be read, or a line other than a cut-off last one is wrong.
    pub fn open(path: &Path) -> Result<Self, RecordError> {
        let io = |what, source| RecordError::Io { what, path: path.to_owned(), source };
        if !path.is_dir() {
            return Self::read(path);
        }
        match &recordings(path).map_err(|error| io("read the directory", error))?[..] {
            [] => Err(RecordError::None { dir: path.to_owned() }),
            [one] => Self::read(one),
            several => {
                let name = |path: &PathBuf| path.file_name().map(|name| name.to_string_lossy().into_owned());
                let names = several.iter().filter_map(name).collect::<Vec<_>>().join(", ");
                Err(RecordError::Several { dir: path.to_owned(), names })
            }
        }
    }

    fn read(path: &Path) -> Result<Self, RecordError> {
        let io = |source| RecordError::Io { what: "read", path: path.to_owned(), source };
        let wrong = |line: usize, reason: String| RecordError::Format { path: path.to_owned(), line, reason };
        let mut lines = BufReader::new(File::open(path).map_err(io)?).lines();
        let first = lines.next().transpose().map_err(io)?.unwrap_or_default();
        let value: serde_json::Value = serde_json::from_str(&first).unwrap_or_default();
        match value["trireme_recording"].as_u64() {
            None => return Err(wrong(1, "this is no recording of `launch --record=DIR`".to_owned())),
            Some(version) if version != u64::from(VERSION) => {
                let found = u32::try_from(version).unwrap_or(u32::MAX);
                return Err(RecordError::Version { path: path.to_owned(), found, expected: VERSION });
            }
            Some(_) => {}
        }
        let head = serde_json::from_value(value).map_err(|error| wrong(1, error.to_string()))?;
        let mut recording = Self { path: path.to_owned(), head, requests: Vec::new(), steps: Vec::new(), end: None };
        let mut broken = None;
        for (number, line) in (2..).zip(lines) {
            // A server that was killed leaves a part of a line, and nothing after it.
            if let Some((number, reason)) = broken {
                return Err(wrong(number, reason));
            }
            match serde_json::from_str(&line.map_err(io)?) {
                Ok(Entry::Request(request)) => recording.requests.push(request),
                Ok(Entry::Step(step)) => recording.steps.push(step),
                Ok(Entry::End(end)) => recording.end = Some(end),
                Err(error) => broken = Some((number, error.to_string())),
            }
        }
        recording.requests.sort_by_key(|request| request.at_us);
        Ok(recording)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Contents, Options, Recorder, RequestItem};
    use std::os::unix::fs::PermissionsExt as _;

    fn record(options: &Options, bodies: &[&str]) {
        let recorder = Recorder::start(options).unwrap();
        for body in bodies {
            let mut item =
                RequestItem { path: "/v1/completions?a=b".into(), ..RequestItem::new(recorder.arrival().unwrap()) };
            item.body = body.as_bytes().to_vec().into();
            item.reply = vec!["{}".into()];
            item.reply_bytes = 2;
            recorder.request(item);
        }
        recorder.finish();
    }

    #[test]
    fn a_recording_is_private_and_keeps_what_its_contents_say() {
        for (contents, body, path, reply) in [
            (Contents::Bodies, Some(r#"{"prompt":"Bob"}"#), "/v1/completions?a=b", true),
            (Contents::Redacted, Some(r#"{"prompt":"xxx"}"#), "/v1/completions", false),
            (Contents::Ids, None, "/v1/completions", false),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let inner = dir.path().join("inner");
            record(&Options { contents, ..Options::new(&inner) }, &[r#"{"prompt":"Bob"}"#]);
            let recording = Recording::open(&inner).unwrap();
            let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
            assert_eq!((mode(&recording.path), mode(&inner)), (0o600, 0o700));
            let request = &recording.requests[0];
            assert_eq!(request.body, body.map(|text| crate::Body::Text(text.to_owned())));
            assert_eq!((request.path.as_str(), request.reply.is_some(), request.body_bytes), (path, reply, 16));
        }
    }

    #[test]
    fn the_bytes_of_a_directory_are_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let options = Options { max_bytes: 1 << 16, ..Options::new(dir.path()) };
        let body = format!("\"{}\"", "x".repeat(20_000));
        record(&options, &[body.as_str(); 5]);
        let recording = Recording::open(dir.path()).unwrap();
        assert_eq!((recording.requests.len(), recording.end.unwrap().reason.as_str()), (3, "bytes"));
        assert!(fs::metadata(&recording.path).unwrap().len() <= 1 << 16);
        let full = Options { max_bytes: 1 << 12, ..options };
        assert!(matches!(Recorder::start(&full), Err(RecordError::Full { .. })));
    }

    #[test]
    fn a_cut_off_line_ends_a_recording_and_a_broken_one_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        record(&Options::new(dir.path()), &["{}", "{}"]);
        let path = recordings(dir.path()).unwrap().remove(0);
        let text = fs::read_to_string(&path).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        fs::write(&path, format!("{}\n{}\n{}", lines[0], lines[1], &lines[2][..30])).unwrap();
        let recording = Recording::open(&path).unwrap();
        assert_eq!((recording.requests.len(), recording.end), (1, None));
        fs::write(&path, format!("{}\n{}\n{}", lines[0], &lines[1][..30], lines[2])).unwrap();
        assert!(Recording::open(&path).unwrap_err().to_string().contains(":2: "));
        fs::write(&path, lines[0].replace(":1,", ":9,")).unwrap();
        assert!(Recording::open(&path).unwrap_err().to_string().contains("has version 9 of the format"));
        fs::write(&path, "hello").unwrap();
        assert!(Recording::open(&path).unwrap_err().to_string().contains("no recording of"));
    }
}
