//! The launcher: starts a world of ranks from one command line and keeps it running until it is stopped.
//!
//! [`plan::plan`] is pure: it turns [`flags::Flags`] into the command to run, which `--dry-run` prints. [`run`] executes the
//! plan: it starts the world through `mpirun` or `srun`, or starts a single rank directly, forwards signals to rank 0, restarts
//! a world that died, and cleans up its processes and shared memory. The ranks do the serving.
//!
//! ```
//! use launcher::flags::Flags;
//! use launcher::plan::{Site, plan};
//!
//! let flags = Flags::parse_from_line(["launch", "--model_repo=/models"].map(Into::into))?;
//! let site = Site { trireme: "/opt/trireme".into(), num_cores: 8, shm_prefix: "prefix".into(), ..Site::default() };
//! let command = plan(&flags.world, &site)?.command.to_string();
//! assert!(command.starts_with("/opt/trireme rank --model-repository=/models "));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

/// Like the standard macro, with two differences: it writes the line in one call, because ranks write to the same log, and it
/// does not panic when the log's disk is full.
macro_rules! eprintln {
    ($($format:tt)*) => { eprint!("{}\n", format_args!($($format)*)) };
}

/// Like `eprintln!` above, without the line break.
macro_rules! eprint {
    ($($format:tt)*) => {{
        use std::io::Write as _;
        let _ = std::io::stderr().write_all(format!($($format)*).as_bytes());
    }};
}

mod actions;
mod capture;
mod check;
mod choices;
pub mod command;
mod container;
mod control;
mod crash;
mod detach;
mod doctor;
mod elastic;
mod excerpt;
pub mod flags;
mod handover;
mod health;
pub mod hosts;
mod http;
pub mod keys;
mod local;
mod logs;
pub mod mpi;
mod mpirun;
pub mod plan;
mod port_holder;
mod probe;
mod processes;
mod rank_flags;
mod refusal;
mod relay;
mod sbatch;
pub mod scrape;
mod signals;
mod sleep;
pub mod srun;
mod state;
pub mod status;
mod supervise;
mod systemd;
mod world;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use ipc::ProcessId;

use capture::Capture;
use elastic::Shapes;
use flags::{Action, Flags, WorldFlags};
use mpi::Mpirun;
use plan::{Plan, Site};
use signals::Signals;
use srun::Allocation;
use state::{Phase, RunDir, WorldState};
use supervise::{Elastic, Supervisor};
use systemd::Systemd;

pub use detach::SUB_COMMAND;
pub use doctor::Earlier;

/// Runs a command line, program name first, and reports its error.
pub fn main(line: Vec<OsString>) -> ExitCode {
    let line = rank_flags::behind_dashes(line).unwrap_or_else(|error| error.exit());
    let flags = Flags::parse_from_line(line.iter().cloned()).unwrap_or_else(|error| error.exit());
    match run(&flags, &line[1..]) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("launch: error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs the action in `flags` and returns the exit code. `arguments` are those of this process, without its name.
pub fn run(flags: &Flags, arguments: &[OsString]) -> Result<u8> {
    let run_dir = RunDir::open()?;
    match &flags.action {
        Some(Action::Status { job: Some(job), http_port, .. }) => control::job_status(*job, http_port.unwrap_or(8000))?,
        Some(Action::Status { json, http_port, .. }) => status::print(&run_dir, *http_port, *json)?,
        Some(Action::Restart { http_port, rolling, after, wait_ready }) => {
            let how = control::Restart::of(*rolling, *after);
            control::restart(&run_dir, *http_port, how, Duration::from_secs(*wait_ready))?;
        }
        Some(Action::Sleep { model, level, world }) => sleep::sleep(&run_dir, world, model.as_deref(), *level)?,
        Some(Action::Wake { model, world }) => sleep::wake(&run_dir, world, model.as_deref())?,
        Some(Action::Swap { from, to, level, world }) => sleep::swap(&run_dir, world, from, to, *level)?,
        Some(Action::Logs { http_port, follow, rank, lines }) => {
            let wanted = logs::Wanted { follow: *follow, rank: *rank, last: *lines };
            logs::print(&control::choose(&run_dir, *http_port)?, &wanted)?;
        }
        Some(Action::Stop { job: Some(job), .. }) => control::stop_job(*job)?,
        Some(Action::Stop { http_port, all, .. }) => control::stop(&run_dir, *http_port, *all)?,
        Some(Action::Doctor(flags)) => return doctor::run(flags, &run_dir, &[]),
        Some(Action::Sbatch(batch)) => print!("{}", sbatch::file(batch, arguments)?),
        None => return start(&flags.world, arguments, run_dir),
    }
    Ok(0)
}

/// `launch doctor` with `arguments`, for a command that has checked something before.
///
/// # Errors
/// When the run directory cannot be used, or `arguments` are none of `launch doctor`.
pub fn doctor(arguments: &[String], earlier: &[Earlier]) -> Result<u8> {
    let line = ["launch", "doctor"].into_iter().chain(arguments.iter().map(String::as_str)).map(OsString::from);
    match Flags::parse_from_line(line)?.action {
        Some(Action::Doctor(flags)) => doctor::run(&flags, &RunDir::open()?, earlier),
        _ => bail!("no flags of `launch doctor`"),
    }
}

/// The worlds that this user runs on this machine.
///
/// # Errors
/// When the run directory cannot be used.
pub fn worlds() -> Result<Vec<status::WorldStatus>> {
    Ok(status::collect(&RunDir::open()?))
}

/// The directory of state files, sockets and logs of this user's worlds.
///
/// # Errors
/// When it cannot be used.
pub fn run_dir() -> Result<PathBuf> {
    Ok(RunDir::open()?.path().to_owned())
}

/// The model repositories that worlds of this user serve on this machine, each with the world's HTTP port.
///
/// # Errors
/// When the run directory cannot be used, or has the state of a world that another version started.
pub fn served_repositories() -> Result<Vec<(PathBuf, u16)>> {
    let found = RunDir::open()?.scan();
    if !found.unknown.is_empty() || found.worlds.iter().any(|world| world.phase == Phase::Other) {
        bail!("another version of the launcher runs a world; `launch status` shows it");
    }
    Ok(found.worlds.into_iter().map(|world| (world.model_repository, world.http_port)).collect())
}

fn start(flags: &WorldFlags, arguments: &[OsString], run_dir: RunDir) -> Result<u8> {
    let mut flags = flags.clone();
    flags.keys = keys::Keys::take(&mut flags.rank_flags, run_dir.path(), |name| std::env::var(name).ok())?;
    if flags.keys.has_literal && !flags.detached {
        eprintln!(
            "launch: a key is on this command line, which shells keep and other users may have read; put it into a file and give \
             @FILE in its place"
        );
    }
    hide_keys(arguments);
    let flags = &flags;
    let site = site(&run_dir, flags)?;
    let plan = plan::plan(flags, &site)?;
    let shapes = Shapes::new(flags, &plan)?;
    if flags.dry_run {
        plan.placement.iter().for_each(|placement| println!("# {placement}"));
        println!("{}", plan.command);
        return Ok(0);
    }
    if flags.plan {
        let command = plan::memory_command(flags, &site);
        let status = std::process::Command::new(&command.program).args(&command.args).status();
        let status = status.with_context(|| format!("cannot start {}", command.program.display()))?;
        return Ok(u8::try_from(status.code().unwrap_or(1)).unwrap_or(1));
    }
    check::all(flags, &site, &plan)?;
    // With `--detach` the process in the foreground has checked it.
    shapes.iter().filter(|_| !flags.detached).try_for_each(|shapes| shapes.check_memory(flags, &site))?;
    plan.placement.iter().for_each(|placement| eprintln!("launch: {placement}"));
    if !flags.detached {
        world::remove_leftovers()?;
        run_dir.remove_dead_sockets();
    }
    if !flags.force {
        control::check_ports(flags, &run_dir)?;
    }
    if flags.detach && !flags.detached {
        detach::detach(flags, arguments, &run_dir)?;
        return Ok(0);
    }
    if flags.detached {
        // Leaves the terminal's session, so that closing the terminal does not end the world.
        nix::unistd::setsid().context("cannot leave the session of the terminal")?;
    }
    supervise(flags, site, &plan, shapes, run_dir)
}

fn supervise(flags: &WorldFlags, site: Site, plan: &Plan, shapes: Option<Shapes>, run_dir: RunDir) -> Result<u8> {
    ipc::set_process_name("trireme-launch").context("cannot name this process")?;
    // Processes of the world that outlive their parent become children of this process, which reaps them.
    nix::sys::prctl::set_child_subreaper(true).context("cannot take over orphans")?;
    let _keys = flags.keys.write()?;
    let _lock = run_dir.lock();
    let log = run_dir.log_file(flags.http_port);
    // Must precede the first thread: threads started earlier would not have the signals blocked.
    let signals = Signals::catch()?;
    let capture = Capture::start(&log, !flags.detached)?;
    let me = ProcessId::current();
    let state = WorldState {
        version: state::VERSION,
        launcher_pid: me.pid,
        launcher_start_time: me.start_time,
        world_pid: None,
        rank_0_pid: None,
        world_size: flags.world_size,
        model_repository: flags.model_repo.clone(),
        grpc_port: flags.grpc_port,
        http_port: flags.http_port,
        http_host: site.allocation.as_ref().and_then(|job| job.node.clone()).unwrap_or_else(|| flags.http_host()),
        metrics_port: flags.metrics_port,
        control: None,
        rank_0_may_be_elsewhere: plan.rank_0_may_be_elsewhere,
        shm_prefix: site.shm_prefix.clone(),
        exit_timeout_secs: flags.exit_timeout.unwrap_or(WorldState::default().exit_timeout_secs),
        num_restarts: 0,
        num_failures: 0,
        times_served: 0,
        phase: Phase::Loading,
        last_failure: None,
        rolling_failure: None,
        hosts_lost: Vec::new(),
        log,
        crash_dir: run_dir.crash_dir()?,
    };
    let shapes = shapes.map(|shapes| shapes.with_replicas(&plan.starter, flags, &site));
    let elastic = shapes.map(|shapes| Elastic::new(shapes, plan.starter.clone(), flags, &site));
    let supervisor = Supervisor {
        flags: flags.clone(),
        site,
        state,
        run_dir,
        signals,
        capture,
        systemd: Systemd::new(),
        // With `--detach` the foreground process waits, not this one.
        serve_before: flags
            .wait_ready
            .filter(|_| !flags.detached)
            .map(|seconds| Instant::now() + Duration::from_secs(seconds)),
        max_restarts: if flags.exit_on_failure { Some(0) } else { flags.max_restarts },
        num_starts: 0,
        offered_ports: None,
        port_holder: None,
        relay: None,
        elastic,
    };
    supervisor.run()
}

/// Hides keys in the command line that `ps` shows for this process.
fn hide_keys(arguments: &[OsString]) {
    let words: Vec<String> = arguments.iter().map(|word| word.to_string_lossy().into_owned()).collect();
    if let Some(shown) = keys::without_literals(&words) {
        // On failure the keys stay visible; the warning above has mentioned that risk.
        let _ = ipc::set_process_title(&format!("launch {}", shown.join(" ")));
    }
}

/// The server program beside this one.
pub(crate) fn trireme() -> Result<PathBuf> {
    Ok(std::env::current_exe().context("cannot find this program")?.with_file_name("trireme"))
}

fn site(run_dir: &RunDir, flags: &WorldFlags) -> Result<Site> {
    let http_port = flags.http_port;
    let cores = sysinfo::System::physical_core_count().map_or(1, |cores| cores as u32);
    let allocation = srun::Allocation::from_env();
    // Worlds on one node need distinct names, and do not know of each other if their run directories differ.
    let shm_prefix = match &allocation {
        Some(Allocation { job, .. }) => format!("prefix{job}_{http_port}_"),
        None => format!("prefix{http_port}_"),
    };
    let trireme = trireme()?;
    let environment = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok()).collect();
    let hosts = hosts::of_flags(flags)?;
    let mpirun = Mpirun::named(flags.mpirun.as_deref(), flags.world_size > 1 || !hosts.is_empty());
    let work_dir = std::env::current_dir().context("cannot tell the working directory")?;
    let run_dir = run_dir.path().to_owned();
    Ok(Site {
        trireme,
        num_cores: cores,
        shm_prefix,
        mpirun,
        allocation,
        hosts,
        environment,
        work_dir,
        run_dir,
        keeps_world: false,
    })
}
