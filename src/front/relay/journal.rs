//! The answers to requests with an `Idempotency-Key`. A client that sends such a request again gets the answer to the first one.
//!
//! Each answer is a file in a directory of the launcher as well, so that the next relay has it when this one dies. The numbers that an
//! answer draws are written before the request is sent, so that an answer that was not finished is computed again as it would have been.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};
use std::{fs, io};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue};
use ring::digest::{SHA256, digest};
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::api::request_key::RequestKey;

/// How long an answer is kept.
pub(crate) const KEPT_FOR: Duration = Duration::from_secs(600);

/// Most requests that are known.
const MAX_JOURNALS: usize = 4096;

/// Most bytes of all answers that are kept.
const MAX_BYTES: usize = 64 << 20;

/// SHA-256.
pub(crate) type Digest = [u8; 32];

/// The digest of parts, each with its length before it.
pub(crate) fn digest_of<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> Digest {
    let mut bytes = Vec::new();
    for part in parts {
        bytes.extend((part.len() as u64).to_le_bytes());
        bytes.extend(part);
    }
    let mut found = Digest::default();
    found.copy_from_slice(digest(&SHA256, &bytes).as_ref());
    found
}

/// An answer of rank 0 as a whole, of status 200.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

/// What is known of a request.
#[derive(Debug, Clone)]
enum Outcome {
    /// It is being answered. The receiver changes at the end of that.
    Running(watch::Receiver<()>),
    /// Its answer is not kept, because it is a stream or too large; it draws the numbers of the first one.
    NotKept,
    Kept(Arc<Answer>),
}

#[derive(Debug)]
struct Journal {
    /// The digest of the request's body.
    request: Digest,
    key: RequestKey,
    outcome: Outcome,
    since: Instant,
}

impl Journal {
    fn num_bytes(&self) -> usize {
        match &self.outcome {
            Outcome::Kept(answer) => answer.body.len(),
            _ => 0,
        }
    }

    fn is_running(&self) -> bool {
        matches!(self.outcome, Outcome::Running(_))
    }
}

/// What to do with a request.
#[derive(Debug)]
pub(crate) enum Turn {
    /// It is answered now, and [`Writer`] takes the answer.
    First(Writer),
    /// It is answered now, with the numbers of the first one, and the answer is not kept.
    Again(RequestKey),
    /// The first one is being answered: wait until this changes, and ask again.
    Wait(watch::Receiver<()>),
    Answered(Arc<Answer>),
    /// Another request had this key.
    OtherRequest,
    /// Too many requests with a key are being answered.
    TooMany,
}

/// The journals of a relay.
#[derive(Debug)]
pub(crate) struct Journals {
    /// `None`: they do not outlive this process.
    directory: Option<PathBuf>,
    all: Mutex<HashMap<Digest, Journal>>,
}

impl Journals {
    /// Those that an earlier relay has left in `directory`, which is created if it is missing.
    pub(crate) fn open(directory: Option<PathBuf>) -> Arc<Self> {
        let mut all = HashMap::new();
        if let Some(directory) = &directory {
            if let Err(error) = fs::create_dir_all(directory) {
                tracing::error!("answers to requests with an Idempotency-Key do not outlive the relay: {error}");
            }
            for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
                match read(&entry.path()) {
                    Some((name, journal)) if journal.since.elapsed() < KEPT_FOR => drop(all.insert(name, journal)),
                    _ => drop(fs::remove_file(entry.path())),
                }
            }
        }
        Arc::new(Self { directory, all: Mutex::new(all) })
    }

    fn all(&self) -> MutexGuard<'_, HashMap<Digest, Journal>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What to do with the request `name`, whose body has the digest `request`.
    pub(crate) fn begin(self: &Arc<Self>, name: Digest, request: Digest) -> Turn {
        let mut all = self.all();
        self.make_room(&mut all);
        if let Some(known) = all.get(&name) {
            return match &known.outcome {
                _ if known.request != request => Turn::OtherRequest,
                Outcome::Running(end) => Turn::Wait(end.clone()),
                Outcome::NotKept => Turn::Again(known.key),
                Outcome::Kept(answer) => Turn::Answered(Arc::clone(answer)),
            };
        }
        if all.len() >= MAX_JOURNALS {
            return Turn::TooMany;
        }
        let (ended, end) = watch::channel(());
        let key = RequestKey::new();
        all.insert(name, Journal { request, key, outcome: Outcome::Running(end), since: Instant::now() });
        self.write(&name, &request, key, None);
        Turn::First(Writer { journals: Arc::clone(self), name, request, key, is_done: false, _ended: ended })
    }

    /// Removes what is too old, and the oldest if they are too many.
    fn make_room(&self, all: &mut HashMap<Digest, Journal>) {
        let old = |journal: &Journal| !journal.is_running() && journal.since.elapsed() >= KEPT_FOR;
        let names: Vec<Digest> = all.iter().filter(|(_, journal)| old(journal)).map(|(name, _)| *name).collect();
        names.iter().for_each(|name| self.remove(all, name));
        let mut num_bytes: usize = all.values().map(Journal::num_bytes).sum();
        while all.len() >= MAX_JOURNALS || num_bytes > MAX_BYTES {
            let ended = all.iter().filter(|(_, journal)| !journal.is_running());
            let Some((&name, oldest)) = ended.min_by_key(|(_, journal)| journal.since) else { return };
            num_bytes -= oldest.num_bytes();
            self.remove(all, &name);
        }
    }

    fn remove(&self, all: &mut HashMap<Digest, Journal>, name: &Digest) {
        all.remove(name);
        // It may not have been written.
        let _ = self.directory.as_ref().map(|directory| fs::remove_file(directory.join(hex(name))));
    }

    /// Writes the file of a journal. Its first line describes it, and the rest is the body of the answer.
    fn write(&self, name: &Digest, request: &Digest, key: RequestKey, answer: Option<&Answer>) {
        let Some(directory) = &self.directory else { return };
        let headers: Option<Value> = answer.map(|answer| {
            let text = |(name, value): (&HeaderName, &HeaderValue)| Some(json!([name.as_str(), value.to_str().ok()?]));
            answer.headers.iter().filter_map(text).collect()
        });
        let mut bytes =
            json!({"key": key.to_string(), "request": hex(request), "headers": headers}).to_string().into_bytes();
        bytes.push(b'\n');
        bytes.extend(answer.map(|answer| &answer.body[..]).unwrap_or_default());
        let path = directory.join(hex(name));
        let unfinished = path.with_extension("new");
        if let Err(error) = fs::write(&unfinished, bytes).and_then(|()| fs::rename(&unfinished, &path)) {
            tracing::warn!("an answer to a request with an Idempotency-Key does not outlive the relay: {error}");
        }
    }
}

/// Takes the answer to the first request of a key. Dropping it before that forgets the request.
#[derive(Debug)]
pub(crate) struct Writer {
    journals: Arc<Journals>,
    name: Digest,
    request: Digest,
    key: RequestKey,
    is_done: bool,
    /// Dropped at the end, which those who wait notice.
    _ended: watch::Sender<()>,
}

impl Writer {
    /// The numbers that the answer draws.
    pub(crate) fn key(&self) -> RequestKey {
        self.key
    }

    /// Keeps the answer.
    pub(crate) fn keep(mut self, answer: Answer) {
        self.journals.write(&self.name, &self.request, self.key, Some(&answer));
        self.end(Outcome::Kept(Arc::new(answer)));
    }

    /// Keeps the numbers that the answer draws, and not the answer.
    pub(crate) fn keep_numbers(mut self) {
        self.end(Outcome::NotKept);
    }

    fn end(&mut self, outcome: Outcome) {
        self.is_done = true;
        let journal = Journal { request: self.request, key: self.key, outcome, since: Instant::now() };
        self.journals.all().insert(self.name, journal);
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        if !self.is_done {
            self.journals.remove(&mut self.journals.all(), &self.name);
        }
    }
}

/// Reads the file of a journal. One without an answer was running.
fn read(path: &Path) -> Option<(Digest, Journal)> {
    let name = of_hex(path.file_name()?.to_str()?)?;
    let bytes = Bytes::from(fs::read(path).ok()?);
    let end = bytes.iter().position(|byte| *byte == b'\n')?;
    let head: Value = serde_json::from_slice(&bytes[..end]).ok()?;
    let header = |pair: &Value| -> Option<(HeaderName, HeaderValue)> {
        Some((pair[0].as_str()?.parse().ok()?, pair[1].as_str()?.parse().ok()?))
    };
    let headers = head["headers"].as_array().map(|pairs| pairs.iter().filter_map(header).collect());
    let outcome = match headers {
        Some(headers) => Outcome::Kept(Arc::new(Answer { headers, body: bytes.slice(end + 1..) })),
        None => Outcome::NotKept,
    };
    let age = age_of(path).ok()?;
    let since = Instant::now().checked_sub(age)?;
    let request = of_hex(head["request"].as_str()?)?;
    Some((name, Journal { request, key: RequestKey::parse(head["key"].as_str()?)?, outcome, since }))
}

/// The time since a file was written.
fn age_of(path: &Path) -> io::Result<Duration> {
    let written = fs::metadata(path)?.modified()?;
    // The clock may have been set back.
    Ok(SystemTime::now().duration_since(written).unwrap_or_default())
}

fn hex(digest: &Digest) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn of_hex(text: &str) -> Option<Digest> {
    let digits = text.as_bytes();
    if digits.len() != 64 || !digits.is_ascii() {
        return None;
    }
    let mut digest = Digest::default();
    for (byte, at) in digest.iter_mut().zip((0..64).step_by(2)) {
        *byte = u8::from_str_radix(&text[at..at + 2], 16).ok()?;
    }
    Some(digest)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(body: &str) -> Answer {
        let headers =
            HeaderMap::from_iter([(http::header::CONTENT_TYPE, HeaderValue::from_static("application/json"))]);
        Answer { headers, body: Bytes::copy_from_slice(body.as_bytes()) }
    }

    fn name(text: &str) -> Digest {
        digest_of([text.as_bytes()])
    }

    fn first(journals: &Arc<Journals>, key: &str) -> Writer {
        match journals.begin(name(key), name("body")) {
            Turn::First(writer) => writer,
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test]
    async fn a_request_waits_for_the_first_of_its_key_and_gets_its_answer() {
        let journals = Journals::open(None);
        let writer = first(&journals, "a");
        let Turn::Wait(mut end) = journals.begin(name("a"), name("body")) else { panic!("it does not wait") };
        assert!(matches!(journals.begin(name("a"), name("another body")), Turn::OtherRequest));
        writer.keep(answer("{}"));
        assert!(end.changed().await.is_err());
        assert!(matches!(journals.begin(name("a"), name("body")), Turn::Answered(kept) if *kept == answer("{}")));

        // One that failed is forgotten, and the numbers of a stream are kept.
        drop(first(&journals, "b"));
        let writer = first(&journals, "b");
        let key = writer.key();
        writer.keep_numbers();
        assert!(matches!(journals.begin(name("b"), name("body")), Turn::Again(again) if again == key));
    }

    #[test]
    fn the_next_relay_has_the_answers_and_the_numbers_of_unfinished_ones() {
        let folder = tempfile::tempdir().unwrap();
        let directory = folder.path().join("journals");
        let journals = Journals::open(Some(directory.clone()));
        first(&journals, "answered").keep(answer("{\"a\":\n1}"));
        drop(first(&journals, "failed"));
        let running = first(&journals, "running");
        fs::write(directory.join("not a journal"), "x").unwrap();

        let next = Journals::open(Some(directory.clone()));
        let turn = next.begin(name("answered"), name("body"));
        assert!(matches!(turn, Turn::Answered(kept) if *kept == answer("{\"a\":\n1}")));
        assert!(matches!(next.begin(name("running"), name("body")), Turn::Again(key) if key == running.key()));
        assert!(matches!(next.begin(name("failed"), name("body")), Turn::First(_)));
        assert!(!directory.join("not a journal").exists());

        let old = SystemTime::now() - KEPT_FOR;
        fs::File::options()
            .write(true)
            .open(directory.join(hex(&name("answered"))))
            .unwrap()
            .set_modified(old)
            .unwrap();
        let later = Journals::open(Some(directory));
        assert!(matches!(later.begin(name("answered"), name("body")), Turn::First(_)));
    }

    #[test]
    fn the_oldest_answers_make_room() {
        let folder = tempfile::tempdir().unwrap();
        let journals = Journals::open(Some(folder.path().to_owned()));
        let large = Answer { headers: HeaderMap::new(), body: Bytes::from(vec![0; MAX_BYTES / 4]) };
        for index in 0..5 {
            first(&journals, &index.to_string()).keep(large.clone());
        }
        assert!(matches!(journals.begin(name("0"), name("body")), Turn::First(_)));
        assert!(matches!(journals.begin(name("4"), name("body")), Turn::Answered(_)));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 4);
        // Those that run are never removed.
        let running: Vec<_> =
            (10..10 + MAX_JOURNALS).map(|index| journals.begin(name(&index.to_string()), name(""))).collect();
        assert!(running.iter().all(|turn| matches!(turn, Turn::First(_))));
        assert!(matches!(journals.begin(name("one more"), name("")), Turn::TooMany));
    }
}
