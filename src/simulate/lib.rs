//! `trireme bench simulate`: estimates how many ranks one rank 0 can serve, without the machines.
//!
//! The scheduler and the plans are the real ones; the time of devices, network and front comes from a [`Costs`] model that is fitted
//! to measured steps. A world has one group of ranks per node, and each group has its own engine on rank 0. The groups share only
//! rank 0: its cores and the one thread that calls MPI. The CPU time of the engine is measured during the simulation.
//!
//! ```
//! use simulate::{SimulateArgs, simulate};
//!
//! let args = SimulateArgs { steps: 20, ..SimulateArgs::default() };
//! let row = simulate(&args, 16)?;
//! assert_eq!((row.ranks, row.nodes), (16, 2));
//! assert!(row.tokens_per_s > 0.0);
//! # Ok::<(), simulate::SimulateError>(())
//! ```
#![forbid(unsafe_code)]

mod costs;
mod world;

use clap::Parser;

pub use costs::{Costs, CostsError};
pub use world::Row;
use world::World;

/// Why a simulation cannot run.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // Fields are named by their messages.
pub enum SimulateError {
    #[error(transparent)]
    Costs(#[from] CostsError),
    #[error("{ranks} ranks are not a whole number of nodes of {per_node}; change --ranks or --ranks-per-node")]
    Ranks { ranks: u32, per_node: u32 },
    #[error(transparent)]
    Config(#[from] engine::ConfigError),
    #[error("a request of {prompt} + {output} tokens does not fit: {reason}")]
    Request { prompt: u32, output: u32, reason: String },
}

/// Simulates worlds of many ranks: the real scheduler and plans, a model of devices, network and front
#[derive(Debug, Clone, Parser)]
pub struct SimulateArgs {
    /// Sizes of the worlds
    #[arg(long, value_delimiter = ',', default_values_t = [8, 16, 32, 64, 128, 256, 512, 1024])]
    pub ranks: Vec<u32>,
    /// Ranks of a node; they serve one copy of the model together
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..))]
    pub ranks_per_node: u32,
    /// Measured steps of such a group: rows and milliseconds. [default: four H200s, llama2-7b shape]
    #[arg(long, default_value = "1:2.26,8:2.39,32:2.55,128:4.11", value_name = "ROWS:MS,...")]
    pub step_ms: String,
    /// Prompt tokens that such a group computes per second
    #[arg(long, default_value_t = 121_287.0, value_name = "N")]
    pub prefill_per_s: f64,
    /// Cores of rank 0
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..))]
    pub cores: u32,
    /// CPU time of rank 0 for each token sent to a client, in microseconds
    #[arg(long, default_value_t = 16.0, value_name = "US")]
    pub token_us: f64,
    /// Time of rank 0's MPI thread for each message, in microseconds
    #[arg(long, default_value_t = 10.0, value_name = "US")]
    pub message_us: f64,
    /// Network latency of a message, in microseconds
    #[arg(long, default_value_t = 50.0, value_name = "US")]
    pub latency_us: f64,
    /// Bandwidth of rank 0's network
    #[arg(long, default_value_t = 100.0, value_name = "GBIT/S")]
    pub gbit: f64,
    /// Requests in flight in each group
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub concurrency: u32,
    /// Tokens of a prompt
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..))]
    pub prompt: u32,
    /// Tokens of an output
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..))]
    pub output: u32,
    /// Steps of each group
    #[arg(long, default_value_t = 600, value_parser = clap::value_parser!(u32).range(1..))]
    pub steps: u32,
}

impl Default for SimulateArgs {
    fn default() -> Self {
        Self::parse_from(["simulate"])
    }
}

/// Simulates every size and prints a line for each.
///
/// # Errors
/// When the flags contradict each other.
pub fn run(args: &SimulateArgs) -> Result<(), SimulateError> {
    println!("{}", Row::HEADING);
    for &ranks in &args.ranks {
        println!("{}", simulate(args, ranks)?);
    }
    Ok(())
}

/// Simulates a world of `ranks`.
///
/// # Errors
/// When the flags contradict each other.
pub fn simulate(args: &SimulateArgs, ranks: u32) -> Result<Row, SimulateError> {
    if ranks == 0 || !ranks.is_multiple_of(args.ranks_per_node) {
        return Err(SimulateError::Ranks { ranks, per_node: args.ranks_per_node });
    }
    World::new(args, ranks / args.ranks_per_node)?.run(ranks)
}
