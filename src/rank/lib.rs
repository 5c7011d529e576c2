//! A rank process: a member of the MPI world with a supervisor of workers, and on rank 0 the server and its front.
//!
//! A rank uses MPI and shared memory but no device, so that it outlives its workers. The program passes in the queries
//! of devices that a rank needs: [`Hardware`].
#![forbid(unsafe_code)]

mod args;
mod boolean;
mod client_relay;
mod configs;
mod connect;
mod control;
mod devices;
mod error;
mod front_args;
mod gpus;
mod hand_over;
mod hardware;
mod heartbeat;
mod host_metrics;
mod keys;
mod ledger;
mod log;
mod losses;
mod metrics;
mod metrics_args;
mod open_files;
mod panics;
mod plan;
mod relay;
mod runtime;
mod server;
mod signals;
mod startup;
mod tables;
mod usage;

use std::process::ExitCode;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use comm::World;
use ipc::{Prefix, set_process_title, sweep_all_stale, sweep_mpi_segments, sweep_stale};
use supervision::WorkerSupervisor;

pub use args::{RankArgs, command, flag_names, parse, with_dashes};
pub use client_relay::{RelayOptions, relay};
pub use error::RankError;
pub use hardware::Hardware;
pub use plan::{WorldPlan, print_plan, print_plan_as_json};
pub use usage::usage_error;

/// Timeout for the other ranks at the end of the world.
const FINALIZE_TIMEOUT: Duration = Duration::from_secs(10);

/// Runs a rank process to its end. `ignored` are the names of given options that have no effect.
///
/// # Errors
/// When the rank fails before it serves. A rank that has served returns an exit code.
pub fn main(args: RankArgs, ignored: &[&str], hardware: Hardware) -> Result<ExitCode, RankError> {
    log::Log::start(&args.log_options(), args.log_requests, args.log_file_max_bytes)
        .map_err(|source| RankError::Log { path: args.log_file.clone().unwrap_or_default(), source })?;
    log::report_panics();
    ipc::withhold_also(keys::variables(args.front.key_rules()));
    let startup = startup::Startup::begin();
    let world = Arc::new(World::start(comm::Config { is_kept: args.keep_world, ..comm::Config::from_env() })?);
    panics::end_world(Arc::downgrade(&world));
    startup.reached("world");
    // The title only serves `ps`, so an error is ignored.
    let _ = set_process_title(&format!("trireme: rank {}", world.rank()));
    let prefix = shm_prefix(&args, &world)?;
    let mut swept = sweep_stale(&prefix)?;
    if world.node_ranks(0)[0] != world.node_ranks(world.rank())[0] {
        // A lost world leaves regions with other prefixes and segments of MPI on this node, and its launcher sweeps only rank 0's node.
        swept.extend(sweep_all_stale()?);
        sweep_mpi_segments();
    }
    if !swept.is_empty() {
        tracing::info!(?swept, "removed shared memory of processes that have ended");
    }
    let program = std::env::current_exe().map_err(RankError::Program)?;
    let (events, received) = mpsc::channel();
    let supervisor = Arc::new(WorkerSupervisor::new(prefix.clone(), program, events));
    let served = if world.rank() == 0 {
        for option in ignored {
            tracing::warn!("option --{option} is accepted and has no effect");
        }
        server::run(args, &world, &supervisor, received, prefix, startup, hardware)
    } else {
        relay::run(&world, &supervisor, received, Duration::from_secs(args.heartbeat_timeout))
            .map(|()| ExitCode::SUCCESS)
    };
    if let Err(error) = &served {
        world.note_failure(&error.to_string());
    }
    supervisor.end_all();
    // After an error too: queued messages must still reach the other ranks.
    let left = world.finalize(FINALIZE_TIMEOUT);
    let code = served?;
    left?;
    Ok(code)
}

/// The given prefix, or else `prefix<rank>_` as in Triton's launch script.
fn shm_prefix(args: &RankArgs, world: &World) -> Result<Prefix, ipc::IpcError> {
    let default = || format!("prefix{}_", world.rank());
    args.shm_prefix().map_or_else(default, str::to_owned).parse()
}
