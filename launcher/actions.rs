//! Actions on worlds that run, and other commands of `launch`.

use clap::{Args, Subcommand, ValueEnum};

use crate::flags::WorldFlags;

/// Actions on running worlds, and other commands.
#[derive(Debug, Subcommand)]
pub enum Action {
    /// Stop a world; requests in flight may finish first.
    #[command(infer_long_args = true)]
    Stop {
        /// HTTP port of the world; may be omitted if only one world runs.
        #[arg(long, conflicts_with = "all")]
        http_port: Option<u16>,
        /// Every world of this user on this machine.
        #[arg(long)]
        all: bool,
        /// The worlds of this Slurm job, on any node.
        #[arg(long, conflicts_with_all = ["http_port", "all"], value_name = "ID")]
        job: Option<u32>,
    },
    /// Stop a world and start it again with the same flags and the same launcher.
    #[command(infer_long_args = true)]
    Restart {
        /// HTTP port of the world; may be omitted if only one world runs.
        #[arg(long)]
        http_port: Option<u16>,
        /// Load a second world beside the first, which serves until the second takes over its ports.
        #[arg(long)]
        rolling: bool,
        /// With --rolling, if memory does not suffice for two worlds: stop the first before the second loads; connections
        /// wait meanwhile, and none is refused.
        #[arg(long, requires = "rolling")]
        after: bool,
        /// Time in which the world must serve again.
        #[arg(long, default_value_t = 600, value_name = "SECONDS")]
        wait_ready: u64,
    },
    /// Free the memory of the devices for a time; requests wait. The world needs --enable-sleep-mode.
    #[command(infer_long_args = true)]
    Sleep {
        /// The model; all language models if omitted.
        model: Option<String>,
        /// Where the weights are meanwhile.
        #[arg(long, value_enum, default_value_t = SleepLevel::Keep)]
        level: SleepLevel,
        /// The world.
        #[command(flatten)]
        world: LiveWorld,
    },
    /// Wake what sleeps.
    #[command(infer_long_args = true)]
    Wake {
        /// The model; all language models if omitted.
        model: Option<String>,
        /// The world.
        #[command(flatten)]
        world: LiveWorld,
    },
    /// Let one model sleep and another wake in its place. If that one cannot wake, the first wakes again.
    #[command(infer_long_args = true)]
    Swap {
        /// The model that is awake.
        from: String,
        /// The model that sleeps.
        to: String,
        /// Where the weights of the first are meanwhile.
        #[arg(long, value_enum, default_value_t = SleepLevel::Keep)]
        level: SleepLevel,
        /// The world.
        #[command(flatten)]
        world: LiveWorld,
    },
    /// Print the log of a world.
    #[command(infer_long_args = true)]
    Logs {
        /// HTTP port of the world; may be omitted if only one world runs.
        #[arg(long)]
        http_port: Option<u16>,
        /// Continue printing new lines.
        #[arg(long, short)]
        follow: bool,
        /// Only lines of this rank and its workers.
        #[arg(long, value_name = "N")]
        rank: Option<u32>,
        /// Of the existing lines, print only this number from the end.
        #[arg(long, short = 'n', value_name = "NUMBER")]
        lines: Option<usize>,
    },
    /// List the worlds of this user on this machine, with their ranks and workers.
    #[command(infer_long_args = true)]
    Status {
        /// Print JSON.
        #[arg(long, conflicts_with = "job")]
        json: bool,
        /// The world of this Slurm job, on any node.
        #[arg(long, value_name = "ID")]
        job: Option<u32>,
        /// Only the world on this HTTP port; with --job, the HTTP port of the job. [default: all worlds; with --job 8000]
        #[arg(long)]
        http_port: Option<u16>,
    },
    /// Check whether a world with these flags could start here, and print problems with advice; exit code 1 if it could not.
    #[command(infer_long_args = true)]
    Doctor(Box<DoctorFlags>),
    /// Print a Slurm batch file that starts a world: `launch sbatch --world_size=8 > serve.sbatch`.
    #[command(infer_long_args = true)]
    Sbatch(Box<BatchFlags>),
}

/// A world that runs, and how to be let in.
#[derive(Debug, Clone, Args)]
pub struct LiveWorld {
    /// HTTP port of the world; may be omitted if only one world runs.
    #[arg(long)]
    pub http_port: Option<u16>,
    /// The key of the API `model-repository`, if it has one: the header of its rule, and `@FILE`, `env:NAME` or the key itself.
    #[arg(long, value_name = "HEADER=VALUE")]
    pub key: Option<String>,
}

/// What happens to the weights of a model that sleeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum SleepLevel {
    /// They go to host memory.
    #[value(name = "1")]
    Keep,
    /// They are dropped, and read from the checkpoint again.
    #[value(name = "2")]
    Drop,
}

/// Flags of `launch doctor`, and the world that is to be started.
#[derive(Debug, Clone, Args)]
pub struct DoctorFlags {
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
    /// The world to start.
    #[command(flatten)]
    pub world: WorldFlags,
}

/// A batch job, and the world it starts.
#[derive(Debug, Clone, Args)]
pub struct BatchFlags {
    /// The Slurm partition.
    #[arg(long)]
    pub partition: Option<String>,
    /// The Slurm account.
    #[arg(long)]
    pub account: Option<String>,
    /// Time limit, in Slurm's format.
    #[arg(long, default_value = "24:00:00")]
    pub time: String,
    /// Number of nodes; the ranks are distributed evenly.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub nodes: u32,
    /// GPUs per node. [default: one per rank, none with --device=cpu]
    #[arg(long)]
    pub gpus_per_node: Option<u32>,
    /// Seconds before the time limit at which the job drains and is requeued.
    #[arg(long, default_value_t = 120, value_name = "SECONDS")]
    pub drain_before: u32,
    /// The world to start.
    #[command(flatten)]
    pub world: WorldFlags,
}
