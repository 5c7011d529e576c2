//! The disk tier of the prefix cache: conversations that fit neither on the device nor into host memory come back from a file, with the
//! tokens of a cold start. A file that lies or fails costs time, and no token changes.
//!
//! The models are those of `tests/goldens`, with a context of 256 positions. A block has 16 positions.

mod support;

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use support::{Options, TestWorld, eventually, golden_repository, output_ids, signal};

/// Enough for the longest sequence.
const POOL: (&str, &str) = ("max_tokens_in_paged_kv_cache", "272");
const NUM_CONVERSATIONS: u64 = 6;
/// Blocks of host memory, which two conversations fill.
const NUM_HOST_BLOCKS: u64 = 30;
/// More than all blocks need.
const DISK_BYTES: &str = "16777216";

/// A golden model with little host memory and a file in `directory`.
fn world(golden: &str, world_size: u32, host_bytes: u64, directory: &Path) -> (TestWorld, tempfile::TempDir) {
    let host_bytes = host_bytes.to_string();
    let parameters = [POOL, ("kv_cache_host_memory_bytes", host_bytes.as_str()), ("kv_cache_disk_bytes", DISK_BYTES)];
    let repository = golden_repository(golden, &parameters);
    let args = vec![format!("--kv-cache-disk-dir={}", directory.display())];
    let options = Options { world_size, repository: repository.path().to_owned(), args, ..Options::default() };
    (TestWorld::start(options), repository)
}

/// The tokens of all turns without a prefix cache.
fn cold(golden: &str, world_size: u32) -> Vec<Vec<u64>> {
    let repository = golden_repository(golden, &[("enable_kv_cache_reuse", "false")]);
    let mut world =
        TestWorld::start(Options { world_size, repository: repository.path().to_owned(), ..Options::default() });
    conversations(&mut world, |_, _| {})
}

/// The tokens after a text.
fn tokens_after(world: &TestWorld, text: &[u64]) -> Vec<u64> {
    let request = json!({"input_ids": text, "input_lengths": text.len(), "request_output_len": 20, "end_id": -1});
    output_ids(world, "tensorrt_llm", &request)
}

/// Conversations by turns, three turns each, with a call before each round. Returns the outputs of all turns.
fn conversations(world: &mut TestWorld, mut before_round: impl FnMut(&mut TestWorld, u64)) -> Vec<Vec<u64>> {
    let prompt = |n: u64, len: u64| (0..len).map(move |i| 3 + (i * 31 + n * 17) % 190);
    let mut texts: Vec<Vec<u64>> = (0..NUM_CONVERSATIONS).map(|n| prompt(n, 130).collect()).collect();
    let mut outputs = Vec::new();
    for round in 0..3 {
        before_round(world, round);
        for text in &mut texts {
            let output = tokens_after(world, text);
            text.extend(&output);
            text.extend(prompt(10 + round, 12));
            outputs.push(output);
        }
    }
    outputs
}

fn metrics<const N: usize>(world: &mut TestWorld, names: [&str; N]) -> [f64; N] {
    let (status, text) = world.get_metrics("/metrics");
    assert_eq!(status, 200, "{text}");
    names.map(|name| {
        let values = text.lines().filter(|line| line.starts_with(name) && line[name.len()..].starts_with(['{', ' ']));
        values.map(|line| line.rsplit_once(' ').unwrap().1.parse::<f64>().unwrap()).sum()
    })
}

/// Waits until as many blocks are on disk as one round leaves there at least.
fn await_stored(world: &mut TestWorld) {
    eventually("blocks are on disk", || metrics(world, ["trireme_llm_disk_cache_stored_blocks_total"])[0] >= 20.0);
}

/// The file of a rank.
fn file_of(pid: u32) -> File {
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten().map(|entry| entry.path());
    let is_file =
        |path: &PathBuf| fs::read_link(path).is_ok_and(|link| link.to_string_lossy().contains("/trireme-kv-cache-"));
    let found: Vec<PathBuf> = descriptors.filter(is_file).collect();
    assert_eq!(found.len(), 1, "{found:?}");
    OpenOptions::new().read(true).write(true).open(&found[0]).unwrap()
}

const DISK_TOKENS: &str = "trireme_llm_prefix_cache_disk_tokens_total";
const FAILED_LOADS: &str = "trireme_llm_disk_cache_failed_loads_total";
const LIMIT: &str = "trireme_llm_disk_cache_limit_bytes";

/// Bytes of a block of a golden model, of each of some workers.
fn block_bytes(golden: &str, world_size: u32) -> u64 {
    let repository = golden_repository(golden, &[POOL, ("kv_cache_host_memory_bytes", "16777216")]);
    let options = Options { world_size, repository: repository.path().to_owned(), ..Options::default() };
    let mut world = TestWorld::start(options);
    tokens_after(&world, &(0..200).collect::<Vec<u64>>());
    tokens_after(&world, &(3..203).collect::<Vec<u64>>());
    let [bytes, blocks] =
        metrics(&mut world, ["trireme_llm_host_cache_used_bytes", "trireme_llm_host_cache_stored_blocks_total"]);
    (bytes / blocks / f64::from(world_size)) as u64
}

#[test]
fn blocks_go_to_disk_and_come_back_with_the_tokens_of_a_cold_start() {
    for world_size in [1, 2] {
        let cold = cold("llama3_gqa", world_size);
        let directory = tempfile::tempdir().unwrap();
        let host_bytes = NUM_HOST_BLOCKS * block_bytes("llama3_gqa", world_size);
        let (mut world, _repository) = world("llama3_gqa", world_size, host_bytes, directory.path());
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0, "the file has no name");
        let outputs = conversations(&mut world, |world, round| {
            if round > 0 {
                await_stored(world)
            }
        });
        assert_eq!(outputs, cold, "world size {world_size}");
        let [of_disk, of_host, cached, failed, used, limit] = metrics(
            &mut world,
            [
                DISK_TOKENS,
                "trireme_llm_prefix_cache_host_tokens_total",
                "trireme_llm_cached_prompt_tokens_total",
                FAILED_LOADS,
                "trireme_llm_disk_cache_used_bytes",
                LIMIT,
            ],
        );
        assert!(of_disk >= 128.0 && of_disk <= of_host && of_host <= cached, "{of_disk}, {of_host}, {cached}");
        assert_eq!(failed, 0.0);
        assert!(used > 0.0 && used <= limit && limit <= f64::from(world_size) * 16_777_216.0, "{used} of {limit}");
        let text = world.get_metrics("/metrics").1;
        let saved = text.lines().find(|line| {
            line.starts_with("trireme_llm_prefix_cache_saved_seconds_total") && line.contains("tier=\"disk\"")
        });
        assert!(saved.unwrap().rsplit_once(' ').unwrap().1.parse::<f64>().unwrap() > 0.0, "{saved:?}");
        eventually("blocks are free", || metrics(&mut world, ["trireme_llm_kv_blocks_used"])[0] == 0.0);

        // A reset empties all tiers.
        assert_eq!(world.post("/reset_prefix_cache", &json!({})).0, 200);
        eventually("the disk is empty", || metrics(&mut world, ["trireme_llm_disk_cache_used_bytes"])[0] == 0.0);
        let before = metrics(&mut world, [DISK_TOKENS]);
        tokens_after(&world, &(0..130).map(|i| 3 + (i * 31) % 190).collect::<Vec<u64>>());
        assert_eq!(metrics(&mut world, [DISK_TOKENS]), before);
        assert!(world.stop().success());
    }
}

#[test]
fn wrong_bytes_in_the_file_are_a_miss_and_are_logged_once() {
    let (cold, directory) = (cold("llama3_gqa", 1), tempfile::tempdir().unwrap());
    let (mut world, _repository) =
        world("llama3_gqa", 1, NUM_HOST_BLOCKS * block_bytes("llama3_gqa", 1), directory.path());
    let rank = world.rank0();
    let outputs = conversations(&mut world, |world, round| {
        if round == 0 {
            return;
        }
        await_stored(world);
        let file = file_of(rank);
        let len = file.metadata().unwrap().len();
        // A byte of each 64 suffices for all blocks.
        for start in (0..len).step_by(64) {
            let mut byte = [0];
            file.read_exact_at(&mut byte, start).unwrap();
            file.write_all_at(&[byte[0] ^ 1], start).unwrap();
        }
    });
    assert_eq!(outputs, cold);
    assert!(metrics(&mut world, [FAILED_LOADS])[0] > 0.0 && metrics(&mut world, [LIMIT])[0] > 0.0);
    assert_eq!(world.log_text().matches("is not what was written there").count(), 1, "{}", world.log_text());
    assert!(world.stop().success());
}

#[test]
fn a_full_disk_turns_the_tier_off_and_serving_goes_on() {
    let directory = tempfile::tempdir().unwrap();
    let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", "size=64k", "tmpfs"]).arg(directory.path()).status();
    if !mounted.is_ok_and(|status| status.success()) {
        println!("skipped: a small file system cannot be mounted here");
        return;
    }
    let cold = cold("llama3_gqa", 1);
    let (mut world, _repository) =
        world("llama3_gqa", 1, NUM_HOST_BLOCKS * block_bytes("llama3_gqa", 1), directory.path());
    let outputs = conversations(&mut world, |_, _| {});
    assert_eq!(outputs, cold);
    let line = world.await_log("the disk tier of the KV cache is off until the model is loaded again");
    let is_named = line.contains("rank 0 cannot write its file in") && line.contains("No space left on device");
    assert!(is_named && line.contains(directory.path().to_str().unwrap()), "{line}");
    assert_eq!(metrics(&mut world, [LIMIT, "trireme_llm_disk_cache_used_bytes"]), [0.0, 0.0]);
    assert!(metrics(&mut world, ["trireme_llm_host_cache_used_bytes"])[0] > 0.0, "host memory is still used");
    // The file and its memory are given back at once.
    let free = nix::sys::statvfs::statvfs(directory.path()).unwrap();
    assert_eq!(free.blocks_free(), free.blocks());
    assert!(world.stop().success());
    assert!(Command::new("umount").arg(directory.path()).status().unwrap().success());
}

#[test]
fn what_is_on_disk_outlives_workers_with_the_tokens_of_a_cold_start() {
    for (golden, world_size) in [("llama3_gqa", 2), ("qwen3_5", 1)] {
        let (cold, directory) = (cold(golden, world_size), tempfile::tempdir().unwrap());
        // Half of the memory is for recurrent states, if there are any.
        let host_bytes = match golden {
            "qwen3_5" => 1 << 20,
            _ => NUM_HOST_BLOCKS * block_bytes(golden, world_size),
        };
        let (mut world, _repository) = world(golden, world_size, host_bytes, directory.path());
        let outputs = conversations(&mut world, |world, round| {
            if round != 2 {
                return;
            }
            await_stored(world);
            let lost = world.workers();
            signal(lost[world_size as usize - 1], Signal::SIGKILL);
            eventually("workers run again", || {
                metrics(world, ["trireme_llm_worker_restarts_total", "trireme_llm_ready"]) == [1.0, 1.0]
                    && world.workers().iter().all(|pid| !lost.contains(pid))
            });
        });
        assert_eq!(outputs, cold, "{golden}");
        assert!(metrics(&mut world, [DISK_TOKENS])[0] > 0.0, "{golden}");
        assert!(world.stop().success());
    }
}

#[test]
fn a_client_that_loads_a_model_chooses_no_larger_tiers_than_the_operator() {
    let directory = tempfile::tempdir().unwrap();
    // The flags give less of the disk than the repository, and more of host memory.
    let parameters = [POOL, ("kv_cache_host_memory_bytes", "8388608"), ("kv_cache_disk_bytes", DISK_BYTES)];
    let repository = golden_repository("llama3_gqa", &parameters);
    let mut args = ["--kv-cache-host-memory=12MiB", "--kv-cache-disk=1MiB", "--model-control-mode=explicit"]
        .map(str::to_owned)
        .to_vec();
    args.extend(["--load-model=*".to_owned(), format!("--kv-cache-disk-dir={}", directory.path().display())]);
    let mut world = TestWorld::start(Options { repository: repository.path().to_owned(), args, ..Options::default() });
    let (status, config) = world.get("/v2/models/tensorrt_llm/config");
    assert_eq!(status, 200, "{config}");
    let load = |key: &str, bytes: &str| {
        let mut config: Value = serde_json::from_str(&config).unwrap();
        config["parameters"][key] = json!({"string_value": bytes});
        let body = json!({"parameters": {"config": config.to_string()}});
        world.post("/v2/repository/models/tensorrt_llm/load", &body)
    };
    for (key, bytes, most) in
        [("kv_cache_disk_bytes", "16777217", DISK_BYTES), ("kv_cache_host_memory_bytes", "12582913", "12582912")]
    {
        let (status, text) = load(key, bytes);
        let expected = format!(
            "`{key}` is {bytes} in a configuration that a client sent, expected at most {most}, which the operator"
        );
        assert!(status == 400 && text.contains(&expected), "{status}: {text}");
        // The old load serves on.
        tokens_after(&world, &[5, 6, 7]);
    }
    for (key, bytes) in [("kv_cache_disk_bytes", DISK_BYTES), ("kv_cache_host_memory_bytes", "12582912")] {
        let (status, text) = load(key, bytes);
        assert_eq!(status, 200, "{text}");
        tokens_after(&world, &[5, 6, 7]);
    }
    assert!(world.stop().success());
}

#[test]
fn a_directory_that_is_missing_is_named_at_the_start() {
    let directory = tempfile::tempdir().unwrap();
    let absent = directory.path().join("absent");
    let parameters = [POOL, ("kv_cache_host_memory_bytes", "16777216"), ("kv_cache_disk_bytes", DISK_BYTES)];
    let repository = golden_repository("llama3_gqa", &parameters);
    let start = |args: Vec<String>| {
        let args = [vec!["--exit-on-error=false".to_owned()], args].concat();
        TestWorld::start(Options { repository: repository.path().to_owned(), args, ..Options::default() })
    };
    let mut world = start(vec![format!("--kv-cache-disk-dir={}", absent.display())]);
    let line = world.await_log("(`--kv-cache-disk-dir`)");
    assert!(line.contains(absent.to_str().unwrap()) && line.contains("cannot create its file in"), "{line}");
    assert!(world.stop().success());
    let mut world = start(Vec::new());
    world.await_log("no directory is named for it: start the world with `--kv-cache-disk-dir=DIR`");
    assert!(world.stop().success());
}
