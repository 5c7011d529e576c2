//! `trireme serve` with a model of a hub: one command downloads it, serves it and ends; the second start needs no network.

#[path = "../src/hub/tests/support/hub_server.rs"]
mod hub_server;

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use hub_server::{Access, HubServer, Model};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

/// Timeout of each wait; large enough for a busy machine.
const TIMEOUT: Duration = Duration::from_secs(90);
const NAME: &str = "demo/tiny-stories";

/// Directories, ports and environment of one test.
struct Site {
    hub: HubServer,
    dir: tempfile::TempDir,
    ports: [u16; 3],
}

/// A `trireme serve` that runs, and the lines of its standard error.
struct Serving {
    child: Child,
    lines: Arc<Mutex<Vec<String>>>,
}

fn checkpoint() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("model_repository/tensorrt_llm/1")
}

impl Site {
    fn new() -> Self {
        let hub = HubServer::start();
        hub.add(NAME, Model::of_dir(&checkpoint()));
        let listeners = [(); 3].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        let ports = listeners.map(|listener| listener.local_addr().unwrap().port());
        let dir = tempfile::tempdir().unwrap();
        for name in ["run", "cache"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        Self { hub, dir, ports }
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_trireme"));
        command.args(words).stdin(Stdio::null()).env("HF_ENDPOINT", &self.hub.url).env("HOME", self.dir.path());
        command.env("HF_HUB_CACHE", self.dir.path().join("cache")).env("XDG_RUNTIME_DIR", self.dir.path().join("run"));
        for variable in ["HF_HOME", "HF_TOKEN", "HF_TOKEN_PATH", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"] {
            command.env_remove(variable);
        }
        command
    }

    fn run(&self, words: &[&str]) -> Output {
        self.command(words).output().unwrap()
    }

    fn serve(&self, model: &str, words: &[&str]) -> Command {
        let [http, grpc, metrics] = self.ports.map(|port| port.to_string());
        let mut command = self.command(&["serve", model, "--device=cpu", "--host=127.0.0.1", "--port", &http]);
        command.args(["--grpc-port", &grpc, "--metrics_port", &metrics]).args(words);
        command
    }

    /// Starts a server and waits until it serves.
    fn start(&self, mut command: Command) -> Serving {
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let lines = Arc::new(Mutex::new(Vec::new()));
        let (reader, of_thread) = (BufReader::new(child.stderr.take().unwrap()), Arc::clone(&lines));
        thread::spawn(move || {
            reader.lines().map_while(Result::ok).for_each(|line| of_thread.lock().unwrap().push(line))
        });
        let mut serving = Serving { child, lines };
        serving.await_line("  curl http://");
        serving
    }

    /// The repositories that `serve` has made.
    fn repositories(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.dir.path().join("run/trireme")).unwrap().flatten();
        entries.map(|entry| entry.path()).filter(|path| path.to_string_lossy().contains("/serve-")).collect()
    }

    fn url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}{path}", self.ports[0])
    }

    fn get(&self, path: &str) -> Value {
        let mut response = ureq::get(self.url(path)).call().unwrap();
        serde_json::from_str(&response.body_mut().read_to_string().unwrap()).unwrap()
    }

    /// The text of a streamed completion, and the names of the model in its chunks.
    fn stream(&self, model: &str) -> (String, Vec<String>) {
        let body =
            json!({"model": model, "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "stream": true});
        let response = ureq::post(self.url("/v1/completions")).send(body.to_string()).unwrap();
        let (mut text, mut models) = (String::new(), Vec::new());
        for line in BufReader::new(response.into_body().into_reader()).lines() {
            let line = line.unwrap();
            let Some(data) = line.strip_prefix("data: ").filter(|data| *data != "[DONE]") else { continue };
            let chunk: Value = serde_json::from_str(data).unwrap();
            text += chunk["choices"][0]["text"].as_str().unwrap_or_default();
            models.push(chunk["model"].as_str().unwrap().to_owned());
        }
        models.dedup();
        (text, models)
    }
}

impl Serving {
    fn text(&self) -> String {
        self.lines.lock().unwrap().join("\n")
    }

    fn await_line(&mut self, start: &str) {
        let deadline = Instant::now() + TIMEOUT;
        while !self.lines.lock().unwrap().iter().any(|line| line.starts_with(start)) {
            let ended = self.child.try_wait().unwrap();
            assert!(ended.is_none() && Instant::now() < deadline, "no `{start}` ({ended:?}):\n{}", self.text());
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Ends it as Ctrl-C does.
    fn interrupt(mut self) {
        kill(Pid::from_raw(self.child.id() as i32), Signal::SIGINT).unwrap();
        let deadline = Instant::now() + TIMEOUT;
        let status = loop {
            match self.child.try_wait().unwrap() {
                Some(status) => break status,
                None => assert!(Instant::now() < deadline, "it does not end:\n{}", self.text()),
            }
            thread::sleep(Duration::from_millis(10));
        };
        assert!(status.success(), "{status}:\n{}", self.text());
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        // After `interrupt` it has ended; after a failed check the launcher ends its world.
        if self.child.try_wait().is_ok_and(|status| status.is_none()) {
            let _ = kill(Pid::from_raw(self.child.id() as i32), Signal::SIGTERM);
            let _ = self.child.wait();
        }
    }
}

fn words(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

#[test]
fn one_command_downloads_and_serves_and_the_second_start_is_offline() {
    let site = Site::new();
    let serving = site.start(site.serve(NAME, &[]));
    let log = serving.text();
    assert!(log.contains("downloading model.safetensors"), "{log}");
    assert!(
        log.contains("demo/tiny-stories: 1 rank(s), on CPUs") && log.contains("of KV cache, 2048 a sequence"),
        "{log}"
    );
    let models = site.get("/v1/models");
    assert_eq!(models["data"].as_array().unwrap().len(), 1, "{models}");
    assert_eq!((&models["data"][0]["id"], &models["data"][0]["root"]), (&json!(NAME), &json!("tiny-stories")));
    assert_eq!(site.get("/v1/models/demo%2Ftiny-stories")["id"], json!(NAME));
    let (text, names) = site.stream(NAME);
    assert!(text.len() > 8 && names == [NAME], "{text} {names:?}");
    // The name in the repository, which Triton's clients use, is accepted too; a chat finds its template by either.
    assert_eq!(site.stream("tiny-stories").0, text);
    let body = json!({"model": NAME, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2});
    let chat = ureq::post(site.url("/v1/chat/completions")).send(body.to_string()).unwrap();
    assert_eq!(chat.status().as_u16(), 200);

    let list = words(&site.run(&["list"]));
    assert!(list.contains(NAME) && list.contains("main (11111111)") && !list.contains("incomplete"), "{list}");
    let refused = site.run(&["rm", "--yes", NAME]);
    let port = site.ports[0];
    assert!(!refused.status.success(), "{}", words(&refused));
    assert!(words(&refused).contains(&format!("in use by the world on http port {port}")), "{}", words(&refused));
    serving.interrupt();

    site.hub.requests();
    let mut offline = site.serve(NAME, &["--served-model-name", "story", "other", "--max-model-len", "64"]);
    offline.env("HF_HUB_OFFLINE", "1");
    let serving = site.start(offline);
    assert_eq!(site.stream("story"), (text.clone(), vec!["story".to_owned()]));
    assert_eq!(site.stream("other").0, text);
    let models = site.get("/v1/models");
    assert_eq!(models["data"][0]["max_model_len"], json!(64), "{models}");
    assert!(site.hub.requests().is_empty());
    serving.interrupt();
    let removed = site.run(&["rm", "--yes", NAME]);
    assert!(
        removed.status.success() && words(&removed).starts_with("removed demo/tiny-stories ("),
        "{}",
        words(&removed)
    );
    assert!(words(&site.run(&["list"])).contains("no models in /"));
}

#[test]
fn a_directory_is_served_in_the_background() {
    let site = Site::new();
    let copy = site.dir.path().join("copy");
    fs::create_dir(&copy).unwrap();
    for entry in fs::read_dir(checkpoint()).unwrap().flatten() {
        fs::copy(entry.path(), copy.join(entry.file_name())).unwrap();
    }
    let output = site.serve(copy.to_str().unwrap(), &["--detach", "--quantization=fp8"]).output().unwrap();
    let text = words(&output);
    assert!(output.status.success() && text.contains("serves `copy` at http://127.0.0.1:"), "{text}");
    assert!(site.stream("copy").0.len() > 8);
    // The repository of a world that runs is not removed by the next start.
    let repository = site.repositories().pop().unwrap();
    let dry = site.serve(copy.to_str().unwrap(), &["--dry-run", "--quantization=fp8"]).output().unwrap();
    assert!(words(&dry).contains(" rank --model-repository=/"), "{}", words(&dry));
    assert!(words(&dry).contains(" --weight-only-precision=fp8 "), "{}", words(&dry));
    let in_use = site.serve(copy.to_str().unwrap(), &[]).output().unwrap();
    assert!(words(&in_use).contains("a world already serves on port"), "{}", words(&in_use));
    assert!(repository.join("copy/1/weights/config.json").is_file());
    let stopped = site.run(&["launch", "stop"]);
    assert!(stopped.status.success(), "{}", words(&stopped));
    // One that has ended leaves it for the next start to remove.
    site.run(&["serve", copy.to_str().unwrap(), "--device=cpu", "--kv-memory-fraction=0.0000001"]);
    assert_eq!(site.repositories(), Vec::<PathBuf>::new());
}

#[test]
fn what_cannot_be_served_is_refused_with_what_to_do() {
    let site = Site::new();
    let error = |output: Output| {
        assert!(!output.status.success(), "{}", words(&output));
        words(&output)
    };
    let checkpoint = checkpoint().display().to_string();
    for (model, flags, expected) in [
        ("./none", &[][..], "there is no directory ./none"),
        ("demo/none", &[], "has no model `demo/none`, or does not show it without a token"),
        ("demo/tiny-stories@v9", &[], "has no revision `v9`"),
        ("model_repository", &[], "it is a model repository: `launch --model_repo=model_repository` serves it"),
        (&checkpoint, &["--revision=main"], "is a directory, which has no revisions"),
        (&checkpoint, &["--kv-memory-fraction=0.0000001"], "does not fit"),
        (&checkpoint, &["--kv-memory-fraction=2"], "expected a number above 0 and at most 1"),
        (&checkpoint, &["--gpu_memory_utilization", "0.9"], "`--kv-memory-fraction` is the share"),
        (&checkpoint, &["--max-model-length=7"], "'--max-model-len'"),
        (&checkpoint, &["--quantization=awq"], "names `awq`, and the checkpoint has `quant_method` none"),
        (&checkpoint, &["--quantization=fp4"], "expected `none`, `fp8`, `int8` or `int4`, or one of: awq,"),
    ] {
        let text = error(site.serve(model, flags).output().unwrap());
        assert!(text.contains(expected), "{model} {flags:?}: {text}");
    }
    let mut unknown = Model::of_dir(Path::new(&checkpoint));
    unknown.files.insert("config.json".to_owned(), br#"{"architectures": ["NoSuchModel"]}"#.to_vec());
    site.hub.add("demo/unknown", unknown);
    site.hub.requests();
    let text = error(site.run(&["pull", "demo/unknown"]));
    assert!(text.contains("`demo/unknown` cannot be served") && text.contains("NoSuchModel"), "{text}");
    assert!(site.hub.requests().iter().all(|request| !request.path.contains("model.safetensors")));
    let text = error(site.run(&["rm", "demo/unknown"]));
    assert!(text.contains("no terminal; say --yes"), "{text}");
    assert_eq!(site.repositories(), Vec::<PathBuf>::new());
    // `launch` says where checkpoints and models of a hub are served.
    for model in [NAME, &checkpoint] {
        let text = error(site.run(&["launch", "--model_repo", model]));
        assert!(text.contains(&format!("with `trireme serve {model}`")), "{text}");
    }
}

#[test]
fn doctor_finds_before_the_start_what_the_start_would_report() {
    let site = Site::new();
    site.hub.add("demo/gated", Model { access: Access::Gated("key"), ..Model::of_dir(&checkpoint()) });
    let bare = site.dir.path().join("bare");
    fs::create_dir(&bare).unwrap();
    for file in ["config.json", "model.safetensors"] {
        fs::copy(checkpoint().join(file), bare.join(file)).unwrap();
    }
    let (whole, bare) = (checkpoint().display().to_string(), bare.display().to_string());
    let doctor = |model: &str, flags: &[&str]| {
        let [http, grpc, metrics] = site.ports.map(|port| port.to_string());
        let ports = ["--port", &http, "--grpc-port", &grpc, "--metrics-port", &metrics];
        let line = [&["doctor", model, "--json", "--device=cpu"][..], &ports, flags].concat();
        let output = site.run(&line);
        let findings: Vec<Value> =
            serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {}", words(&output)));
        let of = |level: &str| findings.iter().filter(|finding| finding["level"] == level).cloned().collect::<Vec<_>>();
        assert_eq!(output.status.code(), Some(i32::from(!of("fail").is_empty())), "{findings:?}");
        (of("ok"), of("fail"))
    };
    let text = |findings: &[Value]| serde_json::to_string(findings).unwrap();
    let (ok, fail) = doctor(&whole, &[]);
    assert!(fail.is_empty(), "{fail:?}");
    assert!(text(&ok).contains("KV cache") && text(&ok).contains("1 rank(s), on CPUs"), "{ok:?}");
    for (model, flags, check, found, advice) in [
        (&*bare, &[][..], "models", "has a tokenizer", "`tokenizer_dir`"),
        (&whole, &["--kv-memory-fraction=0.0000001"], "world size", "does not fit", "lower `max_sequence_len`"),
        ("demo/gated", &[], "model", "is gated", "HF_TOKEN"),
        ("demo/none", &[], "model", "has no model `demo/none`", "check the name"),
        ("./none", &[], "model", "there is no directory ./none", "name one with config.json"),
    ] {
        let (_, fail) = doctor(model, flags);
        assert_eq!(fail.len(), 1, "{model}: {fail:?}");
        assert_eq!(fail[0]["check"], check);
        assert!(text(&fail).contains(found) && text(&fail).contains(advice), "{model}: {fail:?}");
    }
    // A model that is not here is looked at, and its weights stay where they are.
    site.hub.requests();
    let (ok, fail) = doctor(NAME, &[]);
    assert!(fail.is_empty() && text(&ok).contains("can be downloaded"), "{ok:?} {fail:?}");
    let requests = site.hub.requests();
    let gets = |name: &str| requests.iter().any(|request| request.method == "GET" && request.path.ends_with(name));
    assert!(gets("config.json") && !gets("model.safetensors"));
    let taken = TcpListener::bind(("0.0.0.0", site.ports[0])).unwrap();
    let (_, fail) = doctor(&whole, &[]);
    assert!(text(&fail).contains("is in use by process") && fail[0]["check"] == "ports", "{fail:?}");
    drop(taken);
    assert_eq!(site.repositories(), Vec::<PathBuf>::new());
}
