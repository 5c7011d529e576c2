//! Actions on worlds that run: check their ports, restart and stop them, query and stop Slurm jobs.

use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use ipc::ProcessWatch;
use nix::sys::signal::Signal;

use crate::excerpt;
use crate::flags::WorldFlags;
use crate::signals::{RESTART, RESTART_AFTER, RESTART_ROLLING};
use crate::state::{Phase, RunDir, WorldState};
use crate::{health, processes, srun, world};

/// Time after a world's exit timeout before `stop` kills it. Longer than the grace periods of its launcher.
const STOP_GRACE: Duration = Duration::from_secs(20);

/// Returns an error with the pid of the process that uses one of the ports, if any.
pub(crate) fn check_ports(flags: &WorldFlags, run_dir: &RunDir) -> Result<()> {
    for (flag, port) in [("http", flags.http_port), ("grpc", flags.grpc_port), ("metrics", flags.metrics_port)] {
        if let Some(message) = port_in_use(flag, port, run_dir) {
            bail!(message);
        }
    }
    Ok(())
}

/// An error message that names the user of a port; None if the port is free.
pub(crate) fn port_in_use(flag: &str, port: u16, run_dir: &RunDir) -> Option<String> {
    let uses_port = |world: &&WorldState| [world.http_port, world.grpc_port, world.metrics_port].contains(&port);
    if let Some(world) = run_dir.worlds().iter().find(uses_port) {
        let WorldState { launcher_pid, http_port, .. } = world;
        return Some(format!(
            "a world already serves on port {port}: its launcher is process {launcher_pid}; \
             end it with `launch stop --http_port={http_port}`, or give another --{flag}_port"
        ));
    }
    let pid = processes::listener(port)?;
    let user = pid.map_or("a process of another user".to_owned(), |pid| format!("process {pid}"));
    Some(format!("port {port} is in use by {user}; end it, give another --{flag}_port, or start anyway with --force"))
}

/// The one world on `http_port`; without a port, the only one.
pub(crate) fn choose(run_dir: &RunDir, http_port: Option<u16>) -> Result<WorldState> {
    let mut worlds = run_dir.worlds();
    match http_port {
        Some(port) => worlds.into_iter().find(|world| world.http_port == port).ok_or_else(|| no_world(port)),
        None if worlds.len() > 1 => {
            let ports: Vec<_> = worlds.iter().map(|world| world.http_port.to_string()).collect();
            bail!("worlds run on ports {}; say which with --http_port", ports.join(", "));
        }
        None => worlds.pop().context("no world runs"),
    }
}

fn no_world(port: u16) -> anyhow::Error {
    anyhow!("no world serves HTTP on port {port}")
}

/// How a restart replaces the old world by the new one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Restart {
    /// The old world ends first; clients get errors in between.
    Plain,
    /// The new world loads beside the old one and takes its ports over.
    Rolling,
    /// The old world ends first; connections wait in between.
    RollingAfter,
}

impl Restart {
    pub(crate) fn of(rolling: bool, after: bool) -> Self {
        match (rolling, after) {
            (false, _) => Self::Plain,
            (true, false) => Self::Rolling,
            (true, true) => Self::RollingAfter,
        }
    }
}

/// `launch restart`: returns once the world serves again.
pub(crate) fn restart(run_dir: &RunDir, http_port: Option<u16>, how: Restart, timeout: Duration) -> Result<()> {
    let start = Instant::now();
    let mut old = choose(run_dir, http_port)?;
    let rolling = how != Restart::Plain;
    // Ports can be taken over only from a world that serves; waits for one that loads.
    while rolling && old.phase != Phase::Serving {
        if start.elapsed() > timeout {
            bail!("the world on http port {} does not serve, so there is nothing to take over", old.http_port);
        }
        thread::sleep(Duration::from_millis(50));
        old = choose(run_dir, Some(old.http_port))?;
    }
    let launcher = ProcessWatch::new(old.launcher_pid)?;
    let signal = match how {
        Restart::Plain => RESTART,
        Restart::Rolling => RESTART_ROLLING,
        Restart::RollingAfter => RESTART_AFTER,
    };
    // The pid may have been reused before the watch was made, so check that it is still the launcher.
    if !old.launcher().is_alive() {
        return Err(no_world(old.http_port));
    }
    launcher.signal(signal as i32)?;
    let mut was_noticed = false;
    loop {
        thread::sleep(Duration::from_millis(50));
        let Ok(now) = choose(run_dir, Some(old.http_port)) else {
            bail!("the launcher has ended; from its log:\n{}", excerpt::of(&old.log));
        };
        // An earlier failure stays in the state until the launcher has noticed this restart.
        was_noticed |= now.rolling_failure.is_none() && now != old;
        match now.rolling_failure {
            Some(failure) if rolling && (was_noticed || old.rolling_failure.is_none()) => bail!("{failure}"),
            _ => {}
        }
        if now.phase == Phase::Serving && now.times_served > old.times_served {
            println!("serves again after {:.1} s: http {}", start.elapsed().as_secs_f64(), now.http_port);
            return Ok(());
        }
        if start.elapsed() > timeout {
            bail!("the world does not serve again after {timeout:?}; from its log:\n{}", excerpt::of(&old.log));
        }
    }
}

/// `launch stop`: ends one world, or all.
pub(crate) fn stop(run_dir: &RunDir, http_port: Option<u16>, all: bool) -> Result<()> {
    let worlds = run_dir.worlds();
    let chosen: Vec<_> = worlds.iter().filter(|world| http_port.is_none_or(|port| world.http_port == port)).collect();
    match (http_port, chosen.len()) {
        _ if all => {}
        (Some(port), 0) => return Err(no_world(port)),
        (None, 0) => bail!("no world runs"),
        (None, 2..) => {
            let ports: Vec<_> = worlds.iter().map(|world| world.http_port.to_string()).collect();
            bail!("worlds run on ports {}; say which with --http_port, or --all", ports.join(", "));
        }
        _ => {}
    }
    // Signals all worlds before waiting for the first.
    let watched: Vec<_> = chosen.iter().filter_map(|world| Some((*world, request_end(world)?))).collect();
    for (world, launcher) in watched {
        finish(world, &launcher)?;
        println!("ended the world on http port {}", world.http_port);
    }
    Ok(())
}

/// Sends SIGTERM to the launcher of `world`; None if it has ended meanwhile.
fn request_end(world: &WorldState) -> Option<ProcessWatch> {
    let launcher = ProcessWatch::new(world.launcher_pid).ok()?;
    // The pid may have been reused before the watch was made, so check that it is still the launcher.
    let is_launcher = world.launcher().is_alive();
    (is_launcher && launcher.signal(Signal::SIGTERM as i32).is_ok()).then_some(launcher)
}

/// Waits for the end of a world, and kills it after its exit timeout and grace period.
fn finish(world: &WorldState, launcher: &ProcessWatch) -> Result<()> {
    if launcher.wait(Duration::from_secs(world.exit_timeout_secs) + STOP_GRACE) {
        return Ok(());
    }
    // The launcher itself hangs, so its processes are killed too.
    let processes = processes::descendants(world.launcher_pid);
    let watches: Vec<_> = processes.into_iter().filter_map(|pid| ProcessWatch::new(pid).ok()).collect();
    launcher.signal(Signal::SIGKILL as i32)?;
    for watch in &watches {
        // It may have ended with the launcher.
        let _ = watch.signal(Signal::SIGKILL as i32);
        watch.wait(Duration::from_secs(5));
    }
    launcher.wait(Duration::from_secs(5));
    world::remove_leftovers()?;
    println!("the world on http port {} did not end within its time, and was killed", world.http_port);
    Ok(())
}

/// How long the ranks of a job may drain before `stop` cancels it. Their own exit timeout is not known here.
const JOB_TIMEOUT: Duration = Duration::from_secs(60);

/// `launch status --job`: prints state, node, time left, and whether the world is ready.
pub(crate) fn job_status(job: u32, http_port: u16) -> Result<()> {
    let line = srun::output(squeue(job).arg("--format=%T %B %L"))?;
    let Some((state, rest)) = line.trim().split_once(' ') else { bail!("job {job} is not in the queue") };
    let (node, left) = rest.split_once(' ').unwrap_or((rest, "?"));
    if state != "RUNNING" {
        println!("job {job}: {state}");
        return Ok(());
    }
    let is_ready = health::over_http(node, http_port).is_some_and(|health| health.is_ready);
    let health = if is_ready { "ready" } else { "not ready" };
    println!("job {job}: {state} on {node}, {left} left, {health} on http {http_port}");
    Ok(())
}

/// `launch stop --job`: sends SIGTERM to every rank, so that requests in flight may finish, and waits for the job's end.
pub(crate) fn stop_job(job: u32) -> Result<()> {
    let is_over = || -> Result<bool> { Ok(srun::output(squeue(job).arg("--format=%i"))?.trim().is_empty()) };
    if is_over()? {
        bail!("job {job} is not in the queue");
    }
    let mut ask = Command::new("scancel");
    ask.arg("--signal=TERM").arg(job.to_string());
    // Without a step the ranks are children of the batch script, which passes the signal on.
    if srun::steps(job)?.is_empty() {
        ask.arg("--batch");
    }
    srun::output(&mut ask)?;
    let start = Instant::now();
    while !is_over()? {
        if start.elapsed() > JOB_TIMEOUT {
            srun::output(Command::new("scancel").arg(job.to_string()))?;
            println!("job {job} did not end within its time, and was cancelled");
            return Ok(());
        }
        thread::sleep(Duration::from_millis(500));
    }
    println!("ended job {job}");
    Ok(())
}

fn squeue(job: u32) -> Command {
    let mut command = Command::new("squeue");
    command.args(["--noheader", &format!("--jobs={job}")]);
    command
}
