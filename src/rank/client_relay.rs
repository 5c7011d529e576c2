//! `trireme relay`: holds the ports and connections of clients for the launcher, and forwards requests to the rank 0 that serves.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

pub use front::relay::Options as RelayOptions;
use front::relay::{Event as RelayEvent, RankZero, RelayedPort};
use front::{Listeners, RelayListeners};
use ipc::{RelayCommand, RelayReport};
use tokio::runtime::Handle;
use tokio::sync::watch;

use crate::args::RankArgs;
use crate::configs::front_config;
use crate::error::RankError;
use crate::hardware::Hardware;
use crate::log::{Log, report_panics};
use crate::runtime::{num_front_threads, runtime_of};

/// Runs the relay until standard input ends. `args` are those of rank 0.
///
/// # Errors
/// When a port cannot be bound, or a flag is wrong.
pub fn relay(args: &RankArgs, options: RelayOptions, hardware: &Hardware) -> Result<ExitCode, RankError> {
    // Its launcher collects what it writes.
    let log = front::LogOptions { file: String::new(), ..args.log_options() };
    Log::start(&log, args.log_requests, args.log_file_max_bytes)
        .map_err(|source| RankError::Log { path: Default::default(), source })?;
    report_panics();
    // The title only serves `ps`, so an error is ignored.
    let _ = ipc::set_process_title("trireme: relay");
    let config = front_config(args, hardware, Vec::new()).map_err(RankError::Server)?;
    let (state, rank_zero) = watch::channel(RankZero::default());
    let runtime = runtime_of("relay", num_front_threads(args.front_threads.into()))?;
    let handle = runtime.handle().clone();
    std::thread::spawn(move || follow(BufReader::new(std::io::stdin()), &state, &handle));
    let run = front::relay::run(config, options, rank_zero, |event| {
        report(match event {
            RelayEvent::Listens => RelayReport::Listens,
            RelayEvent::Idle => RelayReport::Idle,
            RelayEvent::Wanted => RelayReport::Wanted,
        });
    });
    runtime.block_on(run).map_err(|error| RankError::Server(error.to_string()))?;
    // Connections that are left end with the process.
    runtime.shutdown_background();
    Ok(ExitCode::SUCCESS)
}

/// Writes a line for the launcher. It does not matter if that has ended: this process ends with it.
fn report(report: RelayReport) {
    let _ = writeln!(std::io::stdout(), "{}", report.line());
}

/// Follows the lines of the launcher until they end. The runtime of `handle` answers whether it is alive.
fn follow(commands: impl BufRead, state: &watch::Sender<RankZero>, handle: &Handle) {
    for line in commands.lines().map_while(Result::ok) {
        let Some(command) = RelayCommand::parse(&line) else {
            tracing::error!("`{line}` is no command of a launcher; are both programs of one version?");
            continue;
        };
        if command == RelayCommand::Ping {
            handle.spawn(async { report(RelayReport::Alive) });
            continue;
        }
        state.send_modify(|state| {
            state.is_asleep = command == RelayCommand::Sleep;
            match command {
                RelayCommand::Serve(directory) => state.sockets = Some(Arc::from(directory)),
                RelayCommand::Away(reason) => (state.sockets, state.reason) = (None, reason),
                RelayCommand::Sleep => {
                    (state.sockets, state.reason) = (None, "the server is asleep and is being started".to_owned());
                }
                RelayCommand::End => state.is_last = true,
                RelayCommand::Ping => {}
            }
        });
    }
}

/// The sockets in `directory` on which a rank 0 accepts the connections of the relay.
pub(crate) fn listeners(directory: &Path) -> Result<Listeners, RankError> {
    let bind = |port: RelayedPort| {
        let path = port.socket(directory);
        let failed = |error| RankError::Server(format!("cannot listen to the relay at {}: {error}", path.display()));
        ipc::bind_private(&path).map_err(failed)
    };
    let relay = RelayListeners {
        grpc: bind(RelayedPort::Grpc)?,
        http: bind(RelayedPort::Http)?,
        metrics: bind(RelayedPort::Metrics)?,
    };
    Ok(Listeners { relay: Some(relay), ..Listeners::default() })
}
