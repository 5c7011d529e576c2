//! The command line: the flags of Triton's launch script under the same names, and those of Trireme.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Parser};
use settings::{ByteSize, DeviceKind, KvCacheType, MAX_SECONDS, WeightPrecision};

pub use crate::actions::{Action, BatchFlags, DoctorFlags, LiveWorld, SleepLevel};
pub use crate::choices::{Backend, Bind, ContainerRuntime};
use crate::command::text_with_dashes;
use crate::keys::Keys;

/// The repository that is served where none is named.
pub(crate) const DEFAULT_REPOSITORY: &str = "model_repository";

const AFTER_HELP: &str = "\
Flags may be written with `_` or `-`, as `--flag=value` or `--flag value`, or shortened while unambiguous.
Flags of the server (`trireme rank --help`) are passed to every rank: those that this program does not know, and all after a bare `--`.

Examples:
  launch --world_size=2 --model_repo=model_repository
  launch --world_size=8 --model_repo=/models --detach && curl localhost:8000/v2/health/ready
  launch stop --all";

/// Starts a world of ranks that serves a model repository, and keeps it running.
#[derive(Debug, Parser)]
#[command(name = "launch", version = env!("TRIREME_VERSION"), infer_long_args = true, args_conflicts_with_subcommands = true)]
#[command(after_help = AFTER_HELP)]
pub struct Flags {
    /// An action instead of starting a world.
    #[command(subcommand)]
    pub action: Option<Action>,
    /// The world to start.
    #[command(flatten)]
    pub world: WorldFlags,
}

/// The world to start.
#[derive(Debug, Clone, Args)]
pub struct WorldFlags {
    /// Number of ranks: one per GPU.
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub world_size: u32,
    /// The model repository to serve.
    #[arg(long, alias = "model-repository", default_value = DEFAULT_REPOSITORY, value_name = "DIR")]
    pub model_repo: PathBuf,
    /// Port of the gRPC protocol.
    #[arg(long, default_value_t = 8001, value_name = "PORT")]
    pub grpc_port: u16,
    /// Port of the HTTP protocol.
    #[arg(long, default_value_t = 8000, value_name = "PORT")]
    pub http_port: u16,
    /// Port of the metrics.
    #[arg(long, default_value_t = 8002, value_name = "PORT")]
    pub metrics_port: u16,
    /// The device of the workers.
    #[arg(long, value_enum, default_value_t = DeviceKind::Auto)]
    pub device: DeviceKind,
    /// Quantizes linear layers while they are loaded; a model's parameter `quantization` overrides it. [default: auto]
    #[arg(long, visible_alias = "quantization", value_enum, value_name = "PRECISION")]
    pub weight_only_precision: Option<WeightPrecision>,
    /// The type of keys and values in the KV cache: auto, bf16, fp8 or int8; a model's parameter `kv_cache_dtype` overrides it. [default: auto]
    #[arg(long, value_name = "TYPE", value_parser = str::parse::<KvCacheType>)]
    pub kv_cache_dtype: Option<KvCacheType>,
    /// Host memory of each rank for KV blocks that are evicted from the device, such as 16GiB; a model's parameter
    /// `kv_cache_host_memory_bytes` overrides it. [default: on GPUs an equal share of a quarter of the host's free memory, 16GiB at most; 0 on CPUs and with sleep]
    #[arg(long, value_name = "SIZE", value_parser = str::parse::<ByteSize>)]
    pub kv_cache_host_memory: Option<ByteSize>,
    /// File of each rank for KV blocks that leave host memory, such as 200GiB; needs `--kv-cache-host-memory`; a model's parameter
    /// `kv_cache_disk_bytes` overrides it. [default: 0]
    #[arg(long, value_name = "SIZE", value_parser = str::parse::<ByteSize>, requires = "kv_cache_disk_dir")]
    pub kv_cache_disk: Option<ByteSize>,
    /// Directory of these files, on a local disk of each node.
    #[arg(long, value_name = "DIR")]
    pub kv_cache_disk_dir: Option<PathBuf>,
    /// TensorRT-LLM's name for `--weight-only-precision=int8`, if no precision is named.
    #[arg(long, hide = true)]
    pub use_weight_only: bool,
    /// The hosts to run on, with their numbers of ranks: `a:4,b:4`; without numbers an equal share. [default: this host]
    #[arg(long, value_name = "HOST[:RANKS],...", conflicts_with = "hostfile")]
    pub hosts: Option<String>,
    /// A file with the hosts to run on, one per line: `a slots=4`.
    #[arg(long, value_name = "FILE")]
    pub hostfile: Option<PathBuf>,
    /// Number of ranks on hosts without a given number, usually that of their GPUs.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub ranks_per_node: Option<u32>,
    /// The network between the hosts: an interface (`eth0`) or a subnet (`10.0.0.0/16`). [default: any]
    #[arg(long, value_name = "NETWORK")]
    pub network: Option<String>,
    /// The cores that each rank may run on.
    #[arg(long, value_enum, default_value_t = Bind::None)]
    pub bind: Bind,
    /// The models that ranks other than rank 0 load, separated by commas.
    #[arg(long, default_value = "tensorrt_llm", value_name = "NAMES", value_delimiter = ',')]
    pub tensorrt_llm_model_name: Vec<String>,
    /// Log verbosely to files.
    #[arg(long)]
    pub log: bool,
    /// Rank 0's log file; rank i logs to the same name with `.rank<i>` before the extension.
    /// [default with --log: triton_log.txt]
    #[arg(long, value_name = "FILE")]
    pub log_file: Option<PathBuf>,
    /// Seconds that requests in flight may take at shutdown.
    #[arg(long, alias = "exit-timeout-secs", value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(..=MAX_SECONDS))]
    pub exit_timeout: Option<u64>,
    /// Start even if the ports are in use.
    #[arg(long, short)]
    pub force: bool,
    /// Allow more ranks than cores. [default: only if there are more]
    #[arg(long)]
    pub oversubscribe: bool,
    /// The program that starts the ranks.
    #[arg(long, value_enum, default_value_t = Backend::Auto)]
    pub backend: Backend,
    /// The `mpirun` of Open MPI or MPICH that starts ranks. [default: that in PATH]
    #[arg(long, value_name = "PROGRAM")]
    pub mpirun: Option<PathBuf>,
    /// Like --backend=local: start without mpirun; only for one rank.
    #[arg(long)]
    pub no_mpi: bool,
    /// Only print the command that would be run.
    #[arg(long)]
    pub dry_run: bool,
    /// Only print the memory that each language model would take of each device, and the number of sequences this allows.
    #[arg(long)]
    pub plan: bool,
    /// Stop the world if it does not serve within this time. [without a value: 600]
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "600", value_name = "SECONDS",
        value_parser = clap::value_parser!(u64).range(1..=MAX_SECONDS))]
    pub wait_ready: Option<u64>,
    /// Run the world in the background: return 0 once it serves, otherwise print the reason.
    #[arg(long)]
    pub detach: bool,
    /// Do not restart the world after a failure.
    #[arg(long)]
    pub exit_on_failure: bool,
    /// Restart the world if rank 0 has not answered for this time; 0 disables this.
    #[arg(long, default_value_t = 15, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(..=MAX_SECONDS))]
    pub liveness_timeout: u64,
    /// Keep the connections of clients when rank 0 dies: a relay holds them, and sends unfinished requests to the next rank 0. A request
    /// waits for this time. [without a value: 120]
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "120", value_name = "SECONDS",
        value_parser = clap::value_parser!(u64).range(..=MAX_SECONDS))]
    pub keep_connections: Option<u64>,
    /// With the relay of --keep-connections: end the world when no request has come for this time, and start it for the next one.
    /// Health checks and metrics do not count.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=MAX_SECONDS))]
    pub idle_exit: Option<u64>,
    /// Stop after more than this number of failures in a row. [default: no limit]
    #[arg(long, value_name = "N")]
    pub max_restarts: Option<u32>,
    /// Smaller numbers of ranks, the largest first, with which the world goes on while hosts are lost: `--world_size=16 --elastic=8,4`.
    /// It goes back when they return.
    #[arg(long, value_name = "N,...", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub elastic: Vec<u32>,
    /// With --elastic: use a lost host again once it has answered for this time, which doubles after each loss in a row.
    #[arg(long, default_value_t = 30, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86400))]
    pub elastic_return: u64,
    /// With --elastic: wait for this time, at most, for a moment without requests in which the world goes back to a host.
    #[arg(long, default_value_t = 600, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(..=86400))]
    pub elastic_wait: u64,
    /// The server program. [default: `trireme` beside this program]
    #[arg(long, alias = "tritonserver", value_name = "PROGRAM")]
    pub trireme: Option<PathBuf>,
    /// Run ranks in this image: as pyxis takes it (`registry#name:tag`, a `.sqsh` file), or Apptainer (a `.sif` file, a
    /// folder). `--trireme` is then the program's path inside. [default there: `trireme` in PATH]
    #[arg(long, value_name = "IMAGE")]
    pub container_image: Option<String>,
    /// The program that runs the image.
    #[arg(long, value_enum, default_value_t = ContainerRuntime::Pyxis)]
    pub container_runtime: ContainerRuntime,
    /// Further mounts in the container, besides the model repository, the working directory and the launcher's run directory.
    #[arg(long, value_name = "PATH[:PATH],...", value_delimiter = ',')]
    pub container_mounts: Vec<String>,
    /// The server's name. It is a flag of ranks; here, it is no short form of `--idle-exit`.
    #[arg(long, hide = true, value_name = "NAME")]
    pub id: Option<String>,
    /// Bytes of rank 0's CUDA memory pool.
    #[arg(long, hide = true, value_name = "BYTES")]
    pub multimodal_gpu0_cuda_mem_pool_bytes: Option<u64>,
    /// Accepted for compatibility with Triton's script: one world serves many models anyway.
    #[arg(long, hide = true)]
    pub multi_model: bool,
    /// Accepted for compatibility with Triton's script, without effect.
    #[arg(long, hide = true)]
    pub disable_spawn_processes: bool,
    /// Accepted for compatibility with Triton's script, without effect.
    #[arg(long, hide = true)]
    pub trtllm_llmapi_launch: bool,
    /// Set by `--detach` for the background process.
    #[arg(long, hide = true)]
    pub detached: bool,
    /// What to print when the world serves for the first time; set by `trireme serve`.
    #[arg(long, hide = true, value_name = "TEXT")]
    pub ready_message: Option<String>,
    /// Flags for every rank, after a bare `--`.
    #[arg(last = true, value_name = "RANK FLAGS")]
    pub rank_flags: Vec<String>,
    /// The flags with keys, moved out of `rank_flags` for rank 0.
    #[arg(skip)]
    pub keys: Keys,
}

/// Seconds that a request waits for a rank 0 where `--keep-connections` has no value.
const USUAL_WAIT: u64 = 120;

impl WorldFlags {
    /// Seconds that a request waits for a rank 0 at the relay; `None` without a relay.
    pub(crate) fn relay_wait(&self) -> Option<u64> {
        self.keep_connections.or(self.idle_exit.map(|_| USUAL_WAIT))
    }

    /// The host of rank 0's HTTP port, as seen from this machine: `--http-address` among the ranks' flags, if any.
    pub(crate) fn http_host(&self) -> String {
        match self.rank_flag("--http-address") {
            Some(host) if host != "0.0.0.0" && host != "::" => host,
            _ => "127.0.0.1".to_owned(),
        }
    }

    /// Whether an empty model repository is of use: models are loaded later, or are in another repository.
    pub(crate) fn may_have_no_model(&self) -> bool {
        let loads_later = self.rank_flag("--model-control-mode").is_some_and(|mode| mode != "none");
        loads_later
            || ["--model-repository", "--model-store", "--model-repo"].iter().any(|name| self.rank_flag(name).is_some())
    }

    /// The last value of a flag among those for the ranks.
    pub(crate) fn rank_flag(&self, name: &str) -> Option<String> {
        let normal: Vec<String> = self.rank_flags.iter().map(|flag| text_with_dashes(flag)).collect();
        let value = |(index, flag): (usize, &String)| match flag.strip_prefix(name)? {
            "" => normal.get(index + 1).cloned(),
            rest => rest.strip_prefix('=').map(str::to_owned),
        };
        normal.iter().enumerate().filter_map(value).next_back()
    }
}

impl Flags {
    /// Parses a command line, program name first; `_` counts as `-` in the names of flags.
    pub fn parse_from_line(line: impl IntoIterator<Item = OsString>) -> Result<Self, clap::Error> {
        let mut before_dashes = true;
        let normal = line.into_iter().map(|word| {
            before_dashes &= word != "--";
            if before_dashes { with_dashes(word) } else { word }
        });
        Self::try_parse_from(normal)
    }
}

fn with_dashes(word: OsString) -> OsString {
    word.to_str().map(text_with_dashes).map_or(word, OsString::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> WorldFlags {
        let words = std::iter::once("launch").chain(line.split_whitespace());
        Flags::parse_from_line(words.map(OsString::from)).unwrap().world
    }

    #[test]
    fn underscores_dashes_equals_signs_spaces_and_prefixes_mean_the_same() {
        for line in ["--world_size=3 --model_repo=/a_b", "--world-size 3 --model-repo /a_b", "--world=3 --model-r=/a_b"]
        {
            let flags = parse(line);
            assert_eq!((flags.world_size, flags.model_repo), (3, PathBuf::from("/a_b")), "{line}");
        }
    }

    #[test]
    fn flags_after_a_bare_dash_dash_are_kept_as_they_are() {
        let flags = parse("--wait_ready --force -- --log_verbose=1 --world_size=9");
        assert_eq!((flags.wait_ready, flags.force, flags.world_size), (Some(600), true, 1));
        assert_eq!(flags.rank_flags, ["--log_verbose=1", "--world_size=9"]);
    }

    #[test]
    fn health_checks_use_the_http_address_of_the_ranks() {
        for (line, host) in [
            ("", "127.0.0.1"),
            ("-- --http_address=0.0.0.0", "127.0.0.1"),
            ("-- --http_address=10.0.0.1 --http-address 10.0.0.2 --id=me", "10.0.0.2"),
        ] {
            assert_eq!(parse(line).http_host(), host, "{line}");
        }
    }

    #[test]
    fn an_empty_repository_is_of_use_if_models_are_loaded_later_or_are_elsewhere() {
        for (line, is_of_use) in [
            ("", false),
            ("-- --model-control-mode=none", false),
            ("-- --model_control_mode explicit", true),
            ("-- --model-control-mode=poll", true),
            ("-- --model_store=/more", true),
        ] {
            assert_eq!(parse(line).may_have_no_model(), is_of_use, "{line}");
        }
    }

    #[test]
    fn tritonservers_name_of_the_exit_timeout_is_known() {
        for line in ["--exit_timeout=90", "--exit-timeout-secs=90", "--exit_timeout_secs 90", "--exit-t=90"] {
            assert_eq!(parse(line).exit_timeout, Some(90), "{line}");
        }
    }

    #[test]
    fn times_of_which_no_deadline_can_be_made_are_refused() {
        for flag in ["exit-timeout", "wait-ready", "liveness-timeout", "keep-connections", "idle-exit"] {
            let line = |seconds: u64| ["launch".into(), format!("--{flag}={seconds}").into()];
            assert!(Flags::parse_from_line(line(MAX_SECONDS)).is_ok(), "{flag}");
            let error = Flags::parse_from_line(line(MAX_SECONDS + 1)).unwrap_err().to_string();
            assert!(error.contains(flag) && error.contains("..=2147483647"), "{error}");
        }
    }

    #[test]
    fn wrong_flags_are_refused() {
        for line in [
            "--world_size=0",
            "--http_port=70000",
            "--no_such_flag",
            "--device=tpu",
            "stop --http_port=1 --all",
            "--wait_ready=0",
        ] {
            let words = std::iter::once("launch").chain(line.split_whitespace());
            assert!(Flags::parse_from_line(words.map(OsString::from)).is_err(), "{line}");
        }
    }
}
