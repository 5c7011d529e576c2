//! A hub over real sockets, with the documented paths of a Hugging Face hub, and faults on demand.
#![allow(dead_code)] // Each test file uses a part of it.

use std::collections::{BTreeMap, VecDeque};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;

use ring::digest::{SHA1_FOR_LEGACY_USE_ONLY, SHA256, digest};
use serde_json::{Value, json};

/// The commit of every model of [`Model::of`].
pub const COMMIT: &str = "1111111111111111111111111111111111111111";

/// A hub at `http://127.0.0.1:PORT`, whose large files are at `http://127.0.0.2:PORT`.
pub struct HubServer {
    pub url: String,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    models: BTreeMap<String, Model>,
    moved: BTreeMap<String, String>,
    requests: Vec<Request>,
}

/// A model at one commit.
#[derive(Debug, Clone, Default)]
pub struct Model {
    pub commit: String,
    /// Branches and tags that point to the commit.
    pub revisions: Vec<String>,
    pub files: BTreeMap<String, Vec<u8>>,
    /// What the listing adds to the names of `files`.
    pub more_names: Vec<String>,
    /// The listing has no sizes and hashes.
    pub hides_hashes: bool,
    pub access: Access,
    /// What goes wrong with the next requests for a file's bytes.
    pub faults: BTreeMap<String, VecDeque<Fault>>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Access {
    #[default]
    Public,
    /// Only a token with this text sees the model.
    Private(&'static str),
    /// A token with this text may download it; everybody sees that it exists.
    Gated(&'static str),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The connection is cut after this number of bytes.
    Cut(usize),
    Status(u16),
    /// One bit is wrong.
    WrongBytes,
    /// The answer has all bytes, whatever range was asked for.
    NoRange,
    /// One byte more than announced.
    TooLong,
    /// The answer waits until [`HubServer::release`].
    Wait,
}

#[derive(Debug, Clone, Default)]
pub struct Request {
    pub method: String,
    /// With the query.
    pub path: String,
    pub host: String,
    pub authorization: Option<String>,
    /// First byte of the range.
    pub from: Option<usize>,
}

impl Model {
    /// A model on branch `main` with these files.
    pub fn of(files: impl IntoIterator<Item = (&'static str, Vec<u8>)>) -> Self {
        Self {
            commit: COMMIT.to_owned(),
            revisions: vec!["main".to_owned()],
            files: files.into_iter().map(|(name, content)| (name.to_owned(), content)).collect(),
            ..Self::default()
        }
    }

    /// A model with the files of a directory.
    pub fn of_dir(dir: &Path) -> Self {
        let mut model = Self::of([]);
        for entry in
            fs::read_dir(dir).expect("the checkpoint is there").flatten().filter(|entry| entry.path().is_file())
        {
            let name = entry.file_name().into_string().expect("a name in UTF-8");
            model.files.insert(name, fs::read(entry.path()).expect("a file can be read"));
        }
        model
    }

    pub fn with_fault(mut self, file: &str, faults: impl IntoIterator<Item = Fault>) -> Self {
        self.faults.insert(file.to_owned(), faults.into_iter().collect());
        self
    }
}

/// Whether a file is in LFS, where it is named by its SHA-256.
fn is_large(name: &str) -> bool {
    name.ends_with(".safetensors") || name.ends_with(".bin")
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The hash by which a hub names a content.
pub fn hash_of(name: &str, content: &[u8]) -> String {
    if is_large(name) {
        return hex(digest(&SHA256, content).as_ref());
    }
    let blob = [format!("blob {}\0", content.len()).as_bytes(), content].concat();
    hex(digest(&SHA1_FOR_LEGACY_USE_ONLY, &blob).as_ref())
}

impl HubServer {
    pub fn start() -> Self {
        let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).expect("a free port");
        let port = listener.local_addr().expect("an address").port();
        let shared = Arc::new(Shared::default());
        let of_thread = Arc::clone(&shared);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let shared = Arc::clone(&of_thread);
                thread::spawn(move || {
                    // A client that goes away is no fault of the hub.
                    let _ = answer(&shared, stream, port);
                });
            }
        });
        Self { url: format!("http://127.0.0.1:{port}"), shared }
    }

    /// Adds a model, or replaces it.
    pub fn add(&self, id: &str, model: Model) {
        self.state().models.insert(id.to_owned(), model);
    }

    /// The model `from` has the new name `to`.
    pub fn move_model(&self, from: &str, to: &str) {
        self.state().moved.insert(from.to_owned(), to.to_owned());
    }

    /// The requests since the last call.
    pub fn requests(&self) -> Vec<Request> {
        std::mem::take(&mut self.state().requests)
    }

    /// Waits for a request whose path contains `part`.
    pub fn await_request(&self, part: &str) {
        let mut state = self.state();
        while !state.requests.iter().any(|request| request.path.contains(part)) {
            state = self.shared.changed.wait(state).expect("no thread panics");
        }
    }

    /// Number of requests so far for the files of a model.
    pub fn num_listings(&self) -> usize {
        self.state().requests.iter().filter(|request| request.path.starts_with("/api/")).count()
    }

    /// Ends all of [`Fault::Wait`].
    pub fn release(&self) {
        self.state().models.values_mut().for_each(|model| model.faults.clear());
        self.shared.changed.notify_all();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().expect("no thread panics")
    }
}

/// An answer without its body's bytes.
struct Head {
    status: u16,
    headers: Vec<(&'static str, String)>,
}

impl Head {
    fn of(status: u16) -> Self {
        Self { status, headers: Vec::new() }
    }

    fn with(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.headers.push((name, value.into()));
        self
    }

    fn refusal(status: u16, code: &str, message: &str) -> Self {
        Self::of(status).with("X-Error-Code", code).with("X-Error-Message", message)
    }
}

fn answer(shared: &Shared, stream: TcpStream, port: u16) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream);
    let Some(request) = read_request(&mut reader)? else { return Ok(()) };
    let mut stream = reader.into_inner();
    let mut state = shared.state.lock().expect("no thread panics");
    state.requests.push(request.clone());
    shared.changed.notify_all();
    let (head, mut body) = state.answer(&request, port);
    let fault = state.next_fault(&request);
    if fault == Some(Fault::Wait) {
        let waits = |state: &mut State| state.models.values().any(|model| !model.faults.is_empty());
        state = shared.changed.wait_while(state, waits).expect("no thread panics");
    }
    drop(state);
    match fault {
        Some(Fault::Status(status)) => return write(&mut stream, &Head::of(status), &[], 0),
        Some(Fault::WrongBytes) if !body.is_empty() => body[0] ^= 1,
        Some(Fault::TooLong) => body.push(0),
        _ => {}
    }
    let sent = match fault {
        Some(Fault::Cut(count)) => count.min(body.len()),
        _ if request.method == "HEAD" => 0,
        _ => body.len(),
    };
    write(&mut stream, &head, &body, sent)
}

/// Writes a head that announces all of `body`, and `sent` bytes of it.
fn write(stream: &mut TcpStream, head: &Head, body: &[u8], sent: usize) -> std::io::Result<()> {
    let mut text = format!("HTTP/1.1 {} Words\r\nConnection: close\r\nContent-Length: {}\r\n", head.status, body.len());
    head.headers.iter().for_each(|(name, value)| text += &format!("{name}: {value}\r\n"));
    stream.write_all(format!("{text}\r\n").as_bytes())?;
    stream.write_all(&body[..sent])
}

fn read_request(reader: &mut impl BufRead) -> std::io::Result<Option<Request>> {
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let mut words = line.split_whitespace();
    let (Some(method), Some(path)) = (words.next(), words.next()) else { return Ok(None) };
    let mut request = Request { method: method.to_owned(), path: path.to_owned(), ..Request::default() };
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let Some((name, value)) = line.trim_end().split_once(':') else { return Ok(Some(request)) };
        let value = value.trim();
        match name.to_ascii_lowercase().as_str() {
            "host" => request.host = value.to_owned(),
            "authorization" => request.authorization = Some(value.to_owned()),
            "range" => {
                let first = value.strip_prefix("bytes=").and_then(|range| range.split('-').next());
                request.from = first.and_then(|first| first.parse().ok());
            }
            _ => {}
        }
    }
}

impl State {
    fn answer(&mut self, request: &Request, port: u16) -> (Head, Vec<u8>) {
        let path = request.path.split('?').next().unwrap_or_default();
        let parts: Vec<&str> = path.trim_start_matches('/').split('/').collect();
        match parts[..] {
            ["api", "models", org, name, kind @ ("revision" | "tree"), revision] => {
                let id = format!("{org}/{name}");
                if let Some(to) = self.moved.get(&id) {
                    return (Head::of(307).with("Location", format!("/api/models/{to}/{kind}/{revision}")), Vec::new());
                }
                let model = match self.model(&id, &revision.replace("%2F", "/"), request) {
                    Ok(model) => model,
                    Err(head) => return (head, Vec::new()),
                };
                let has_blobs = request.path.contains("blobs=true") && !model.hides_hashes;
                let body = if kind == "tree" { model.tree() } else { model.info(&id, has_blobs) };
                (Head::of(200).with("Content-Type", "application/json"), body.to_string().into_bytes())
            }
            [org, name, "resolve", revision, ref file @ ..] => {
                let (id, file) = (format!("{org}/{name}"), file.join("/"));
                let id = self.moved.get(&id).cloned().unwrap_or(id);
                match self.model(&id, revision, request) {
                    Ok(model) => model.resolve(&id, &file, request, port),
                    Err(head) => (head, Vec::new()),
                }
            }
            // Large files, on another host.
            ["cdn", org, name, file] if request.host.starts_with("127.0.0.2") => {
                let model = &self.models[&format!("{org}/{name}")];
                model.bytes(Head::of(200), &model.files[file], request, file)
            }
            _ => (Head::refusal(404, "", "no such path"), Vec::new()),
        }
    }

    fn model(&self, id: &str, revision: &str, request: &Request) -> Result<&Model, Head> {
        let unknown = || match request.authorization {
            None => Head::refusal(401, "RepoNotFound", "Invalid username or password."),
            Some(_) => Head::refusal(404, "RepoNotFound", "Repository not found"),
        };
        let model = self.models.get(id).ok_or_else(unknown)?;
        let has = |token: &str| request.authorization.as_deref() == Some(&format!("Bearer {token}"));
        match model.access {
            Access::Private(token) if !has(token) => return Err(unknown()),
            Access::Gated(token) if !has(token) => {
                let status = if request.authorization.is_some() { 403 } else { 401 };
                return Err(Head::refusal(status, "GatedRepo", "Access to this model is restricted."));
            }
            _ => {}
        }
        let is_known = revision == model.commit || model.revisions.iter().any(|its| its == revision);
        is_known.then_some(model).ok_or_else(|| Head::refusal(404, "RevisionNotFound", "Invalid rev id"))
    }

    /// The fault of a request that would get bytes of a file.
    fn next_fault(&mut self, request: &Request) -> Option<Fault> {
        let path = request.path.split('?').next()?;
        let (file, is_cdn) = (path.rsplit('/').next()?, path.starts_with("/cdn/"));
        if request.method == "HEAD" || is_large(file) != is_cdn {
            return None;
        }
        let faults = self.models.values_mut().find_map(|model| model.faults.get_mut(file))?;
        // Those that wait are released all at once.
        if faults.front() == Some(&Fault::Wait) { Some(Fault::Wait) } else { faults.pop_front() }
    }
}

impl Model {
    fn info(&self, id: &str, has_blobs: bool) -> Value {
        let siblings = self.files.iter().map(|(name, content)| {
            let mut sibling = json!({"rfilename": name});
            if has_blobs {
                sibling["size"] = json!(content.len());
                sibling["blobId"] = json!(hash_of("", content));
                if is_large(name) {
                    let size = content.len();
                    sibling["lfs"] = json!({"sha256": hash_of(name, content), "size": size, "pointerSize": 134});
                }
            }
            sibling
        });
        let more = self.more_names.iter().map(|name| json!({"rfilename": name}));
        let siblings: Vec<Value> = siblings.chain(more).collect();
        json!({"id": id, "modelId": id, "sha": self.commit, "private": false, "tags": [], "downloads": 0, "likes": 0,
            "siblings": siblings})
    }

    fn tree(&self) -> Value {
        let files = self.files.iter().map(|(name, content)| {
            let mut file = json!({"type": "file", "path": name, "size": content.len(), "oid": hash_of("", content)});
            if is_large(name) {
                file["lfs"] = json!({"oid": hash_of(name, content), "size": content.len(), "pointerSize": 134});
            }
            file
        });
        files.collect()
    }

    fn resolve(&self, id: &str, file: &str, request: &Request, port: u16) -> (Head, Vec<u8>) {
        let Some(content) = self.files.get(file) else {
            return (
                Head::refusal(404, "EntryNotFound", "Entry not found").with("X-Repo-Commit", &self.commit),
                Vec::new(),
            );
        };
        let etag = format!("\"{}\"", hash_of(file, content));
        let head = |status| Head::of(status).with("X-Repo-Commit", &self.commit).with("Accept-Ranges", "bytes");
        if !is_large(file) {
            return self.bytes(head(200).with("ETag", etag), content, request, file);
        }
        let head = head(302).with("X-Linked-ETag", etag).with("X-Linked-Size", content.len().to_string());
        (head.with("Location", format!("http://127.0.0.2:{port}/cdn/{id}/{file}?signed")), Vec::new())
    }

    /// The bytes of a file from the first one that was asked for.
    fn bytes(&self, mut head: Head, content: &[u8], request: &Request, file: &str) -> (Head, Vec<u8>) {
        let ignores = self.faults.get(file).and_then(VecDeque::front) == Some(&Fault::NoRange);
        match request.from.filter(|_| !ignores) {
            Some(from) if from >= content.len() => (Head::of(416), Vec::new()),
            Some(from) => {
                head.status = 206;
                let range = format!("bytes {from}-{}/{}", content.len() - 1, content.len());
                (head.with("Content-Range", range), content[from..].to_vec())
            }
            None => (head, content.to_vec()),
        }
    }
}
