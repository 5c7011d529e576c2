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

mod args;
mod costs;
mod error;
mod gaps;
mod load;
mod world;

pub use args::SimulateArgs;
pub use costs::{Costs, CostsError};
pub use error::SimulateError;
pub use gaps::{GapRow, gaps};
pub use load::{LoadRow, load};
pub use world::Row;
use world::World;

/// Simulates every size and prints a line for each.
///
/// # Errors
/// When the flags contradict each other.
pub fn run(args: &SimulateArgs) -> Result<(), SimulateError> {
    if !args.prompt_tokens_per_s.is_empty() {
        return run_gaps(args);
    }
    if args.requests > 0 {
        return run_loads(args);
    }
    println!("{}", Row::HEADING);
    for &ranks in &args.ranks {
        println!("{}", simulate(args, ranks)?);
    }
    Ok(())
}

/// Simulates every bound and rate of prompts and prints a line for each.
fn run_gaps(args: &SimulateArgs) -> Result<(), SimulateError> {
    println!("{}", GapRow::HEADING);
    for &ms in &args.max_inter_token_ms {
        for &per_s in &args.prompt_tokens_per_s {
            println!("{}", gaps(args, (ms > 0.0).then_some(ms), per_s)?);
        }
    }
    Ok(())
}

/// Simulates every bound and rate of requests and prints a line for each.
fn run_loads(args: &SimulateArgs) -> Result<(), SimulateError> {
    println!("{}", LoadRow::HEADING);
    for &ms in &args.max_inter_token_ms {
        for &per_s in &args.request_rate {
            println!("{}", load(args, (ms > 0.0).then_some(ms), per_s)?);
        }
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
