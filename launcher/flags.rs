//! The command line: Triton's launch script's flags under their names, and our own.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use settings::{DeviceKind, WeightPrecision};

use crate::command::text_with_dashes;
use crate::keys::Keys;

const AFTER_HELP: &str = "\
Flags may be written with `_` or `-`, as `--flag=value` or `--flag value`, or shortened while unambiguous.
Flags after a bare `--` are handed to every rank as they are.

Examples:
  launch --world_size=2 --model_repo=model_repository
  launch --world_size=8 --model_repo=/models --detach && curl localhost:8000/v2/health/ready
  launch stop --all";

/// Starts a world of ranks that serves a model repository, and keeps it running.
#[derive(Debug, Parser)]
#[command(name = "launch", version, infer_long_args = true, args_conflicts_with_subcommands = true)]
#[command(after_help = AFTER_HELP)]
pub struct Flags {
    /// What to do instead of starting a world.
    #[command(subcommand)]
    pub action: Option<Action>,
    /// The world to start.
    #[command(flatten)]
    pub world: WorldFlags,
}

/// What can be done with worlds that run.
#[derive(Debug, Subcommand)]
pub enum Action {
    /// End a world: requests in flight may finish first.
    #[command(infer_long_args = true)]
    Stop {
        /// The world that serves HTTP on this port; may be left out when there is only one.
        #[arg(long, conflicts_with = "all")]
        http_port: Option<u16>,
        /// Every world of this user on this machine.
        #[arg(long)]
        all: bool,
        /// The worlds of this Slurm job, wherever they run.
        #[arg(long, conflicts_with_all = ["http_port", "all"], value_name = "ID")]
        job: Option<u32>,
    },
    /// End a world and start it again with the same flags; its launcher stays.
    #[command(infer_long_args = true)]
    Restart {
        /// The world that serves HTTP on this port; may be left out when there is only one.
        #[arg(long)]
        http_port: Option<u16>,
        /// Load a second world beside the first, which serves until the second takes its ports over.
        #[arg(long)]
        rolling: bool,
        /// With --rolling, where memory does not allow two worlds: end the first before the second loads; connections
        /// wait meanwhile, and none is refused.
        #[arg(long, requires = "rolling")]
        after: bool,
        /// How long the world may take to serve again.
        #[arg(long, default_value_t = 600, value_name = "SECONDS")]
        wait_ready: u64,
    },
    /// Print what a world has logged.
    #[command(infer_long_args = true)]
    Logs {
        /// The world that serves HTTP on this port; may be left out when there is only one.
        #[arg(long)]
        http_port: Option<u16>,
        /// Go on as more is logged.
        #[arg(long, short)]
        follow: bool,
        /// Lines of this rank and its workers alone.
        #[arg(long, value_name = "N")]
        rank: Option<u32>,
        /// Only the last lines that are there already.
        #[arg(long, short = 'n', value_name = "NUMBER")]
        lines: Option<usize>,
    },
    /// List the worlds of this user on this machine, with their ranks and workers.
    #[command(infer_long_args = true)]
    Status {
        /// As JSON.
        #[arg(long, conflicts_with = "job")]
        json: bool,
        /// The world of this Slurm job instead, wherever it runs.
        #[arg(long, value_name = "ID")]
        job: Option<u32>,
        /// The world that serves HTTP on this port alone; with --job, where the job does. [default: all; of a job, 8000]
        #[arg(long)]
        http_port: Option<u16>,
    },
    /// Look whether a world would run here, say what is wrong and what to do; 1 when something must be mended first.
    #[command(infer_long_args = true)]
    Doctor(DoctorFlags),
    /// Print a batch file for Slurm that starts a world: `launch sbatch --world_size=8 > serve.sbatch`.
    #[command(infer_long_args = true)]
    Sbatch(Box<BatchFlags>),
}

/// The world that is to be started.
#[derive(Debug, Clone, Args)]
pub struct DoctorFlags {
    /// Number of ranks.
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub world_size: u32,
    /// The model repository to serve.
    #[arg(long, alias = "model-repository", default_value = "model_repository", value_name = "DIR")]
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
    /// What computes.
    #[arg(long, value_enum, default_value_t = DeviceKind::Auto)]
    pub device: DeviceKind,
    /// The `mpirun` that starts ranks. [default: that in PATH]
    #[arg(long, value_name = "PROGRAM")]
    pub mpirun: Option<PathBuf>,
    /// The server program. [default: `trireme` beside this program]
    #[arg(long, value_name = "PROGRAM")]
    pub trireme: Option<PathBuf>,
    /// As JSON.
    #[arg(long)]
    pub json: bool,
}

/// A batch job, and the world it starts.
#[derive(Debug, Clone, Args)]
pub struct BatchFlags {
    /// The partition of the site to run in.
    #[arg(long)]
    pub partition: Option<String>,
    /// The account of the site to charge.
    #[arg(long)]
    pub account: Option<String>,
    /// Time limit, as Slurm writes it.
    #[arg(long, default_value = "24:00:00")]
    pub time: String,
    /// Nodes of the job; the ranks are shared out among them.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub nodes: u32,
    /// GPUs of each node. [default: one per rank, none with --device=cpu]
    #[arg(long)]
    pub gpus_per_node: Option<u32>,
    /// Seconds before the time limit at which the job drains and goes back to the queue.
    #[arg(long, default_value_t = 120, value_name = "SECONDS")]
    pub drain_before: u32,
    /// The world to start.
    #[command(flatten)]
    pub world: WorldFlags,
}

/// What starts the processes of a world.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Backend {
    /// One rank by itself; more by `srun` in a Slurm allocation whose Slurm speaks to the MPI (PMIx, or PMI for MPICH), else by `mpirun`.
    Auto,
    /// `mpirun`: Open MPI's or MPICH's.
    Mpirun,
    /// Slurm's `srun`, in an allocation.
    Srun,
    /// Nothing: the one rank itself.
    Local,
}

/// What starts container images.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ContainerRuntime {
    /// NVIDIA's plugin of Slurm, in `srun`.
    Pyxis,
    /// Apptainer, once Singularity, as a program in front of each rank.
    Apptainer,
}

/// What each rank may run on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Bind {
    /// Every core of its node.
    None,
    /// The cores of one NUMA domain, and so its memory.
    Numa,
    /// An equal share of its node's cores, alone.
    Core,
}

/// The world to start.
#[derive(Debug, Clone, Args)]
pub struct WorldFlags {
    /// Number of ranks: one per GPU.
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub world_size: u32,
    /// The model repository to serve.
    #[arg(long, alias = "model-repository", default_value = "model_repository", value_name = "DIR")]
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
    /// What computes.
    #[arg(long, value_enum, default_value_t = DeviceKind::Auto)]
    pub device: DeviceKind,
    /// How CPUs hold the weights of linear layers; a model's parameter `weight_only_precision` comes first. [default: auto]
    #[arg(long, value_enum, value_name = "PRECISION")]
    pub weight_only_precision: Option<WeightPrecision>,
    /// The hosts to run on, and the ranks of each: `a:4,b:4`; without numbers an equal share. [default: this one]
    #[arg(long, value_name = "HOST[:RANKS],...", conflicts_with = "hostfile")]
    pub hosts: Option<String>,
    /// The hosts to run on, one a line: `a slots=4`.
    #[arg(long, value_name = "FILE")]
    pub hostfile: Option<PathBuf>,
    /// Ranks of a host for which no number is given: its GPUs.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub ranks_per_node: Option<u32>,
    /// The network that joins the hosts: an interface (`eth0`) or a subnet (`10.0.0.0/16`). [default: any]
    #[arg(long, value_name = "NETWORK")]
    pub network: Option<String>,
    /// What each rank may run on.
    #[arg(long, value_enum, default_value_t = Bind::None)]
    pub bind: Bind,
    /// The models that ranks other than the first load, separated by commas.
    #[arg(long, default_value = "tensorrt_llm", value_name = "NAMES", value_delimiter = ',')]
    pub tensorrt_llm_model_name: Vec<String>,
    /// Log verbosely, to files.
    #[arg(long)]
    pub log: bool,
    /// Rank 0's log file; rank i logs to the same name with `.rank<i>` before the extension.
    /// [default with --log: triton_log.txt]
    #[arg(long, value_name = "FILE")]
    pub log_file: Option<PathBuf>,
    /// Seconds that requests in flight may take to finish at the end.
    #[arg(long, value_name = "SECONDS")]
    pub exit_timeout: Option<u64>,
    /// Start although the ports are in use.
    #[arg(long, short)]
    pub force: bool,
    /// Allow more ranks than cores. [default: when there are more]
    #[arg(long)]
    pub oversubscribe: bool,
    /// What starts the ranks.
    #[arg(long, value_enum, default_value_t = Backend::Auto)]
    pub backend: Backend,
    /// The `mpirun` of Open MPI or MPICH that starts ranks. [default: that in PATH]
    #[arg(long, value_name = "PROGRAM")]
    pub mpirun: Option<PathBuf>,
    /// As --backend=local: start without mpirun; only for one rank.
    #[arg(long)]
    pub no_mpi: bool,
    /// Print the command that would be run, and nothing else.
    #[arg(long)]
    pub dry_run: bool,
    /// Print the memory that each language model would take of each device, and how many sequences that allows; start nothing.
    #[arg(long)]
    pub plan: bool,
    /// Give up, and end the world, when it does not serve within this time. [without a value: 600]
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "600", value_name = "SECONDS")]
    pub wait_ready: Option<u64>,
    /// Leave the world running in the background: return 0 once it serves, otherwise say why not.
    #[arg(long)]
    pub detach: bool,
    /// Do not start a world again that died by itself.
    #[arg(long)]
    pub exit_on_failure: bool,
    /// Start the world again when rank 0 has not answered for this long; 0: never.
    #[arg(long, default_value_t = 15, value_name = "SECONDS")]
    pub liveness_timeout: u64,
    /// Give up when a world has died by itself more often in a row than this. [default: it is always started again]
    #[arg(long, value_name = "N")]
    pub max_restarts: Option<u32>,
    /// The server program. [default: `trireme` beside this program]
    #[arg(long, alias = "tritonserver", value_name = "PROGRAM")]
    pub trireme: Option<PathBuf>,
    /// Run ranks in this image: as pyxis takes it (`registry#name:tag`, a `.sqsh` file), or Apptainer (a `.sif` file, a
    /// folder). `--trireme` is then the program's path inside. [default there: `trireme` in PATH]
    #[arg(long, value_name = "IMAGE")]
    pub container_image: Option<String>,
    /// What starts the image.
    #[arg(long, value_enum, default_value_t = ContainerRuntime::Pyxis)]
    pub container_runtime: ContainerRuntime,
    /// What else ranks see inside, beside the model repository, the working directory and the launcher's run directory.
    #[arg(long, value_name = "PATH[:PATH],...", value_delimiter = ',')]
    pub container_mounts: Vec<String>,
    /// Bytes of rank 0's CUDA memory pool.
    #[arg(long, hide = true, value_name = "BYTES")]
    pub multimodal_gpu0_cuda_mem_pool_bytes: Option<u64>,
    /// Accepted as Triton's script does: one world serves many models anyway.
    #[arg(long, hide = true)]
    pub multi_model: bool,
    /// Accepted as Triton's script does, without effect.
    #[arg(long, hide = true)]
    pub disable_spawn_processes: bool,
    /// Accepted as Triton's script does, without effect.
    #[arg(long, hide = true)]
    pub trtllm_llmapi_launch: bool,
    /// Set by `--detach` for the process it leaves behind.
    #[arg(long, hide = true)]
    pub detached: bool,
    /// Flags for every rank, after a bare `--`.
    #[arg(last = true, value_name = "RANK FLAGS")]
    pub rank_flags: Vec<String>,
    /// What was taken out of them for rank 0 alone.
    #[arg(skip)]
    pub keys: Keys,
}

impl WorldFlags {
    /// Where rank 0 answers HTTP, as seen from this machine: `--http-address` among the ranks' flags, if any.
    pub(crate) fn http_host(&self) -> String {
        let normal: Vec<String> = self.rank_flags.iter().map(|flag| text_with_dashes(flag)).collect();
        let value = |(index, flag): (usize, &String)| match flag.strip_prefix("--http-address")? {
            "" => normal.get(index + 1).cloned(),
            rest => rest.strip_prefix('=').map(str::to_owned),
        };
        match normal.iter().enumerate().filter_map(value).next_back() {
            Some(host) if host != "0.0.0.0" && host != "::" => host,
            _ => "127.0.0.1".to_owned(),
        }
    }
}

impl Flags {
    /// Parses a command line, program name first; `_` counts as `-` in the names of flags.
    pub fn parse_from_line(line: impl IntoIterator<Item = OsString>) -> Result<Self, clap::Error> {
        let mut ours = true;
        let normal = line.into_iter().map(|word| {
            ours &= word != "--";
            if ours { with_dashes(word) } else { word }
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
    fn the_address_given_to_the_ranks_is_where_health_is_asked() {
        for (line, host) in [
            ("", "127.0.0.1"),
            ("-- --http_address=0.0.0.0", "127.0.0.1"),
            ("-- --http_address=10.0.0.1 --http-address 10.0.0.2 --id=me", "10.0.0.2"),
        ] {
            assert_eq!(parse(line).http_host(), host, "{line}");
        }
    }

    #[test]
    fn wrong_flags_are_refused() {
        for line in
            ["--world_size=0", "--http_port=70000", "--no_such_flag", "--device=tpu", "stop --http_port=1 --all"]
        {
            let words = std::iter::once("launch").chain(line.split_whitespace());
            assert!(Flags::parse_from_line(words.map(OsString::from)).is_err(), "{line}");
        }
    }
}
