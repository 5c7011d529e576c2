//! Downloads from a real hub server over sockets.

#[path = "support/hub_server.rs"]
mod hub_server;

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use hub::{HubError, ModelName, Pulled, Settings, list, pull, remove, size};
use hub_server::{Access, COMMIT, Fault, HubServer, Model, hash_of};

const NAME: &str = "org/tiny";
const INDEX: &str = r#"{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}"#;

/// Content that is not alike in two places.
fn weights(len: usize) -> Vec<u8> {
    (0..len).map(|index| (index * 31 + index / 256) as u8).collect()
}

fn model() -> Model {
    Model::of([
        ("README.md", b"words".to_vec()),
        ("config.json", b"{}".to_vec()),
        ("tokenizer.json", b"{\"a\": 1}".to_vec()),
        ("additional_chat_templates/rag.jinja", b"{{ a }}".to_vec()),
        ("model.safetensors", weights(3_000_000)),
        ("consolidated.safetensors", weights(10)),
        ("pytorch_model.bin", weights(11)),
        ("model.gguf", weights(12)),
    ])
}

/// A hub with a model, and a cache.
struct Site {
    hub: HubServer,
    cache: tempfile::TempDir,
}

impl Site {
    fn with(model: Model) -> Self {
        let site = Self { hub: HubServer::start(), cache: tempfile::tempdir().unwrap() };
        site.hub.add(NAME, model);
        site
    }

    fn settings_with(&self, more: &[(&str, &str)]) -> Settings {
        let cache = self.cache.path().display().to_string();
        let of = |name: &str| match name {
            "HF_ENDPOINT" => Some(self.hub.url.clone()),
            "HF_HUB_CACHE" => Some(cache.clone()),
            // Without the token of who runs the tests.
            "HF_TOKEN_PATH" => Some("/nonexistent".to_owned()),
            name => more.iter().find(|(its, _)| *its == name).map(|(_, value)| (*value).to_owned()),
        };
        Settings::of(of).unwrap().with_retry_pause(Duration::from_millis(1))
    }

    fn settings(&self) -> Settings {
        self.settings_with(&[])
    }

    fn pull(&self) -> Result<Pulled, HubError> {
        self.pull_as(NAME)
    }

    fn pull_as(&self, name: &str) -> Result<Pulled, HubError> {
        pull(&name.parse().unwrap(), &self.settings(), |_| Ok(()))
    }

    fn error(&self, name: &str) -> String {
        self.pull_as(name).unwrap_err().to_string()
    }

    fn blobs(&self) -> PathBuf {
        self.cache.path().join("models--org--tiny/blobs")
    }

    /// Names of the blobs, those that are incomplete too.
    fn blob_names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.blobs()).unwrap().flatten();
        let mut names: Vec<String> = entries.map(|entry| entry.file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// The first bytes of the ranges that were asked for.
    fn ranges(&self, file: &str) -> Vec<Option<usize>> {
        let path = format!("/cdn/{NAME}/{file}");
        self.hub
            .requests()
            .iter()
            .filter(|request| request.path.starts_with(&path))
            .map(|request| request.from)
            .collect()
    }
}

fn names_in(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(dir).unwrap().flatten().map(|entry| entry.file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn only_what_serving_needs_is_downloaded_into_the_layout_of_huggingface_hub() {
    let site = Site::with(model());
    let pulled = site.pull().unwrap();
    let root = site.cache.path().join("models--org--tiny");
    assert_eq!(pulled.dir, root.join("snapshots").join(COMMIT));
    assert!(pulled.trouble.is_none());
    let names = ["additional_chat_templates", "config.json", "model.safetensors", "tokenizer.json"];
    assert_eq!(names_in(&pulled.dir), names);
    assert_eq!(fs::read(pulled.dir.join("model.safetensors")).unwrap(), weights(3_000_000));
    let sha256 = hash_of("model.safetensors", &weights(3_000_000));
    let link = fs::read_link(pulled.dir.join("model.safetensors")).unwrap();
    assert_eq!(link, Path::new("../../blobs").join(sha256));
    let link = fs::read_link(pulled.dir.join("additional_chat_templates/rag.jinja")).unwrap();
    assert_eq!(link, Path::new("../../../blobs").join(hash_of("rag.jinja", b"{{ a }}")));
    assert_eq!(fs::read_to_string(root.join("refs/main")).unwrap(), COMMIT);
    assert!(site.blob_names().iter().all(|name| !name.contains("incomplete")));

    // A second time only the listing is asked for; without a network nothing is.
    site.hub.requests();
    site.pull().unwrap();
    let paths: Vec<String> = site.hub.requests().into_iter().map(|request| request.path).collect();
    assert_eq!(paths, ["/api/models/org/tiny/revision/main?blobs=true"]);
    let again = pull(&NAME.parse().unwrap(), &site.settings().offline(), |_| Ok(())).unwrap();
    assert_eq!(again.dir, pulled.dir);
    // A commit never changes.
    site.pull_as(&format!("{NAME}@{COMMIT}")).unwrap();
    assert!(site.hub.requests().is_empty());
}

#[test]
fn weights_are_chosen_by_the_index_and_torch_files_only_without_safetensors() {
    let mut sharded = model();
    sharded.files.remove("model.safetensors");
    sharded.files.insert("model.safetensors.index.json".to_owned(), INDEX.into());
    for shard in ["model-1.safetensors", "model-2.safetensors"] {
        sharded.files.insert(shard.to_owned(), weights(1000));
    }
    let site = Site::with(sharded.clone());
    let names = names_in(&site.pull().unwrap().dir).join(" ");
    assert!(
        names.ends_with("model-1.safetensors model-2.safetensors model.safetensors.index.json tokenizer.json"),
        "{names}"
    );

    sharded.files.remove("model-2.safetensors");
    let error = Site::with(sharded).error(NAME);
    assert!(error.contains("names `model-2.safetensors`, which the model does not have"), "{error}");

    let mut torch = model();
    torch.files.retain(|name, _| !name.ends_with(".safetensors"));
    let dir = Site::with(torch.clone()).pull().unwrap().dir;
    assert!(dir.ends_with(COMMIT));
    torch.files.remove("pytorch_model.bin");
    let site = Site::with(torch.clone());
    let error = site.error(NAME);
    assert!(error.contains("`org/tiny` cannot be served: it has GGUF files only"), "{error}");
    torch.files.remove("config.json");
    torch.files.remove("model.gguf");
    site.hub.add(NAME, torch.clone());
    assert!(site.error(NAME).contains("no *.safetensors"));
    torch.files.insert("model.safetensors".to_owned(), weights(1));
    site.hub.add(NAME, torch);
    assert!(site.error(NAME).contains("no config.json"));
}

#[test]
fn a_model_that_cannot_be_served_is_refused_before_its_weights_are_downloaded() {
    let site = Site::with(model());
    let refuse = |dir: &Path| Err(format!("config.json is {}", fs::read_to_string(dir.join("config.json")).unwrap()));
    let error = pull(&NAME.parse().unwrap(), &site.settings(), refuse).unwrap_err().to_string();
    assert_eq!(error, "`org/tiny` cannot be served: config.json is {}");
    assert!(site.ranges("model.safetensors").is_empty());
}

#[test]
fn a_cut_download_continues_where_it_was_cut() {
    let site = Site::with(model().with_fault("model.safetensors", [Fault::Cut(1_000_000), Fault::Status(503)]));
    site.pull().unwrap();
    let ranges = site.ranges("model.safetensors");
    assert_eq!(ranges.len(), 3);
    assert_eq!((ranges[0], ranges[1]), (None, ranges[2]));
    // A client need not have read all that was sent before the cut.
    assert!(ranges[1].is_some_and(|from| (1..=1_000_000).contains(&from)), "{ranges:?}");
}

#[test]
fn a_download_of_an_ended_process_continues() {
    let site = Site::with(model().with_fault("model.safetensors", [Fault::Cut(500_000); 5]));
    // It gives up after 5 attempts of less than a mebibyte each.
    let error = site.error(NAME);
    assert!(error.contains("cannot reach http") && error.contains("HF_ENDPOINT"), "{error}");
    assert_eq!(site.ranges("model.safetensors").len(), 5);
    let part = site.blob_names().into_iter().find(|name| name.ends_with(".incomplete")).unwrap();
    let len = fs::metadata(site.blobs().join(part)).unwrap().len() as usize;
    assert!(len > 0);
    let pulled = site.pull().unwrap();
    assert_eq!(site.ranges("model.safetensors"), [Some(len)]);
    assert_eq!(fs::read(pulled.dir.join("model.safetensors")).unwrap(), weights(3_000_000));
}

#[test]
fn a_server_without_ranges_and_a_damaged_part_cost_a_whole_download() {
    for (fault, part) in [(Some(Fault::NoRange), weights(1000)), (None, vec![9; 1000]), (None, vec![9; 3_000_001])] {
        let site = Site::with(model().with_fault("model.safetensors", fault));
        fs::create_dir_all(site.blobs()).unwrap();
        let sha256 = hash_of("model.safetensors", &weights(3_000_000));
        fs::write(site.blobs().join(format!("{sha256}.incomplete")), part).unwrap();
        let pulled = site.pull().unwrap();
        assert_eq!(fs::read(pulled.dir.join("model.safetensors")).unwrap(), weights(3_000_000));
    }
}

#[test]
fn bytes_that_the_hub_did_not_announce_are_deleted() {
    for (fault, file, words) in [
        (Fault::WrongBytes, "model.safetensors", "SHA-256"),
        (Fault::WrongBytes, "tokenizer.json", "git hash"),
        (Fault::TooLong, "tokenizer.json", "size of 9 bytes, and the hub announced 8 bytes"),
    ] {
        let site = Site::with(model().with_fault(file, [fault]));
        let error = site.error(NAME);
        assert!(error.contains(file) && error.contains(words) && error.contains("download it again"), "{error}");
        let hash = hash_of(file, &model().files[file]);
        assert!(site.blob_names().iter().all(|name| !name.starts_with(&hash)));
        assert!(!site.cache.path().join("models--org--tiny/refs/main").exists());
        site.pull().unwrap();
    }
}

#[test]
fn a_mirror_without_hashes_in_its_listing_is_asked_for_the_headers_of_each_file() {
    let site = Site::with(Model { hides_hashes: true, ..model() });
    let pulled = site.pull().unwrap();
    assert_eq!(fs::read(pulled.dir.join("model.safetensors")).unwrap(), weights(3_000_000));
    let requests = site.hub.requests();
    let heads: Vec<_> = requests.iter().filter(|request| request.method == "HEAD").collect();
    assert!(heads.iter().any(|head| head.path.ends_with("/model.safetensors")), "{heads:?}");
    assert!(heads.iter().all(|head| !head.path.starts_with("/cdn")), "{heads:?}");
}

#[test]
fn the_token_goes_to_the_hub_alone() {
    let site = Site::with(Model { access: Access::Gated("hf_secret"), ..model() });
    let name: ModelName = NAME.parse().unwrap();
    let with = |token| pull(&name, &site.settings_with(&[("HF_TOKEN", token)]), |_| Ok(()));
    let gated = with("hf_other").unwrap_err().to_string();
    assert!(gated.contains("is gated: accept its terms at http") && gated.contains("HF_TOKEN"), "{gated}");
    assert!(site.error(NAME).contains("is gated"));
    site.hub.requests();
    with("hf_secret").unwrap();
    let (elsewhere, here): (Vec<_>, Vec<_>) =
        site.hub.requests().into_iter().partition(|request| request.host.starts_with("127.0.0.2"));
    assert!(!elsewhere.is_empty() && elsewhere.iter().all(|request| request.authorization.is_none()), "{elsewhere:?}");
    assert!(here.iter().all(|request| request.authorization.as_deref() == Some("Bearer hf_secret")), "{here:?}");
}

#[test]
fn refusals_say_what_to_do() {
    let site = Site::with(Model { access: Access::Private("hf_secret"), ..model() });
    let error = site.error(NAME);
    assert!(error.contains("has no model `org/tiny`, or does not show it without a token"), "{error}");
    let error = pull(&NAME.parse().unwrap(), &site.settings_with(&[("HF_TOKEN", "hf_other")]), |_| Ok(())).unwrap_err();
    assert!(error.to_string().contains("does not show it to this token; check the name"), "{error}");
    site.hub.add(NAME, model());
    let error = site.error(&format!("{NAME}@v9"));
    assert!(error.contains("`org/tiny` has no revision `v9`; look at http"), "{error}");
    let offline = pull(&NAME.parse().unwrap(), &site.settings_with(&[("HF_HUB_OFFLINE", "1")]), |_| Ok(()));
    let error = offline.unwrap_err().to_string();
    assert!(error.starts_with("`org/tiny` is not complete in /") && error.contains("unset it"), "{error}");
    let nowhere = site.settings_with(&[]);
    drop(site);
    // Nothing listens on port 1.
    let nowhere = Settings::of(|name| match name {
        "HF_ENDPOINT" => Some("http://127.0.0.1:1".to_owned()),
        "HF_HUB_CACHE" => Some(nowhere.cache().display().to_string()),
        _ => None,
    });
    let nowhere = nowhere.unwrap().with_retry_pause(Duration::from_millis(1));
    let error = pull(&NAME.parse().unwrap(), &nowhere, |_| Ok(())).unwrap_err().to_string();
    assert!(error.starts_with("cannot reach http://127.0.0.1:1/") && error.contains("proxy"), "{error}");
}

#[test]
fn names_of_files_that_leave_the_directory_are_refused() {
    for name in ["../evil.json", "/etc/evil", "a/../../evil"] {
        let site = Site::with(Model { more_names: vec![name.to_owned()], ..model() });
        let error = site.error(NAME);
        assert!(error.contains("cannot be the name of a file") && error.contains(name), "{error}");
        assert!(!site.blobs().exists());
    }
    let mut evil = model();
    evil.files.insert("model.safetensors.index.json".to_owned(), br#"{"weight_map": {"a": "../../x"}}"#.to_vec());
    assert!(Site::with(evil).error(NAME).contains("is no name of a file"));
}

#[test]
fn branches_move_and_names_too() {
    let site = Site::with(model());
    let old = site.pull().unwrap().dir;
    let mut newer = model();
    newer.commit = "2".repeat(40);
    newer.revisions.push("refs/pr/1".to_owned());
    newer.files.insert("tokenizer.json".to_owned(), b"{}".to_vec());
    site.hub.add(NAME, newer.clone());
    site.hub.requests();
    let new = site.pull().unwrap().dir;
    assert_eq!(fs::read(new.join("tokenizer.json")).unwrap(), b"{}");
    assert_eq!(fs::read(old.join("tokenizer.json")).unwrap(), b"{\"a\": 1}");
    assert!(site.ranges("model.safetensors").is_empty(), "the weights are the same");
    assert_eq!(site.pull_as(&format!("{NAME}@refs/pr/1")).unwrap().dir, new);
    assert!(site.cache.path().join("models--org--tiny/refs/refs/pr/1").is_file());

    site.hub.add("neworg/tiny", newer);
    site.hub.move_model("oldorg/tiny", "neworg/tiny");
    let dir = site.pull_as("oldorg/tiny").unwrap().dir;
    assert!(dir.starts_with(site.cache.path().join("models--oldorg--tiny")));
}

#[test]
fn a_hub_with_trouble_leaves_the_model_of_the_cache() {
    let site = Site::with(model());
    let dir = site.pull().unwrap().dir;
    let mut newer = model().with_fault("model.safetensors", [Fault::Status(404); 9]);
    newer.commit = "2".repeat(40);
    newer.files.insert("model.safetensors".to_owned(), weights(2_000_000));
    site.hub.add(NAME, newer);
    let pulled = site.pull().unwrap();
    assert_eq!(pulled.dir, dir);
    assert!(pulled.trouble.unwrap().to_string().contains("answered 404"));
    // A cut download does not look like a model.
    let offline = pull(&format!("{NAME}@{}", "2".repeat(40)).parse().unwrap(), &site.settings().offline(), |_| Ok(()));
    assert!(offline.is_err());
}

#[test]
fn two_processes_that_pull_at_once_share_one_download() {
    let site = Site::with(model().with_fault("model.safetensors", [Fault::Wait]));
    let dirs: Vec<PathBuf> = thread::scope(|scope| {
        let first = scope.spawn(|| site.pull().unwrap().dir);
        site.hub.await_request("/cdn/");
        // It opens the lock of its own, as another process does.
        let second = scope.spawn(|| site.pull().unwrap().dir);
        while site.hub.num_listings() < 2 {
            thread::yield_now();
        }
        site.hub.release();
        [first, second].map(|thread| thread.join().unwrap()).to_vec()
    });
    assert_eq!(dirs[0], dirs[1]);
    assert_eq!(fs::read(dirs[0].join("model.safetensors")).unwrap(), weights(3_000_000));
    assert_eq!(site.ranges("model.safetensors").len(), 1, "one of both downloads the weights");
}

#[test]
fn the_cache_is_listed_and_models_are_removed_unless_in_use() {
    let site = Site::with(model());
    assert!(list(&site.settings()).unwrap().is_empty());
    site.pull().unwrap();
    let mut newer = model().with_fault("model.safetensors", [Fault::Status(404)]);
    newer.commit = "2".repeat(40);
    newer.files.insert("model.safetensors".to_owned(), weights(2_000_000));
    site.hub.add(NAME, newer);
    site.pull().unwrap();
    let found = list(&site.settings()).unwrap();
    let of = |index: usize| (found[index].id.as_str(), found[index].refs.join(","), found[index].is_complete);
    assert_eq!([of(0), of(1)], [(NAME, "main".to_owned(), true), (NAME, String::new(), false)]);
    // Its weights and three small files.
    assert_eq!(found[0].bytes, 3_000_000 + 7 + 2 + 8);
    assert!(found[0].last_used.is_some());
    let name: ModelName = NAME.parse().unwrap();
    assert_eq!(size(&name, &site.settings()).unwrap(), found[0].bytes);

    let root = site.cache.path().join("models--org--tiny");
    let error = remove(&name, &site.settings(), |dir| (dir == root).then(|| "somebody".to_owned())).unwrap_err();
    assert_eq!(error.to_string(), "`org/tiny` is in use by somebody");
    let lock = fs::read_dir(site.cache.path().join(".locks/models--org--tiny")).unwrap().flatten().next().unwrap();
    let held = fs::File::open(lock.path()).unwrap();
    held.lock().unwrap();
    let error = remove(&name, &site.settings(), |_| None).unwrap_err().to_string();
    assert!(error.contains("is in use by a process that downloads it"), "{error}");
    assert!(root.exists());
    drop(held);
    remove(&name, &site.settings(), |_| None).unwrap();
    assert!(list(&site.settings()).unwrap().is_empty() && !root.exists());
    let error = remove(&name, &site.settings(), |_| None).unwrap_err().to_string();
    assert!(error.contains("has no model `org/tiny`") && error.contains("trireme list"), "{error}");
}
