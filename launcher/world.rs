//! One run of a world: starts its processes, stops them, and waits until the last one on this node has ended.

use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};
use ipc::{ProcessId, ProcessWatch};
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;

use crate::command::Starter;
use crate::mpi::MpiKind;
use crate::plan::Plan;
use crate::{crash, mpirun, processes, srun};

/// Time that the other processes have to end after the first process of the world has ended.
const ORPHAN_TIMEOUT: Duration = Duration::from_secs(3);

/// A killed process that has not ended after this time counts as stuck in the kernel, for example in a driver or file system.
pub(crate) const STUCK_AFTER: Duration = Duration::from_secs(30);

/// The variable that identifies the world of a process, set for every process of a world.
const WORLD_VARIABLE: &str = "TRIREME_WORLD";

/// Sockets and files through which a world and its launcher communicate.
#[derive(Debug, Clone)]
pub(crate) struct WorldPaths {
    /// Number of the start, counted by this launcher.
    pub(crate) start: u32,
    /// How often the world was started again.
    pub(crate) num_restarts: u32,
    /// Socket at which rank 0 hands over its ports.
    pub(crate) hand_over: PathBuf,
    /// Socket at which rank 0 reports its health.
    pub(crate) control: PathBuf,
    /// File to which ranks write why the world ends.
    pub(crate) cause: PathBuf,
    /// Directory of the sockets on which rank 0 accepts the connections of the relay; None without one.
    pub(crate) relay: Option<PathBuf>,
    /// Socket from which rank 0 takes its ports over; None: it binds them.
    pub(crate) take_over: Option<PathBuf>,
    /// Directory for crash reports.
    pub(crate) crash_dir: PathBuf,
}

/// How a world has ended.
pub(crate) struct Ended {
    pub(crate) status: ExitStatus,
    /// The cause, if a rank has written one.
    pub(crate) cause: Option<String>,
}

pub(crate) struct World {
    child: Child,
    watch: ProcessWatch,
    starter: Starter,
    /// Whether `mpirun` keeps the world when a rank dies.
    is_kept: bool,
    rank_0: Option<ProcessWatch>,
    id: String,
    paths: WorldPaths,
    /// The session directory of Open MPI, for a world of one node.
    mpi_session: Option<mpirun::SessionDir>,
}

impl World {
    /// Starts the command of `plan`. Call it on the main thread: the world is killed when the thread that started it ends.
    pub(crate) fn start(plan: &Plan, paths: WorldPaths) -> Result<Self> {
        let id = world_id(ProcessId::current(), paths.start);
        let mut command = Command::new(&plan.command.program);
        command.args(&plan.command.args).stdin(Stdio::null()).env(WORLD_VARIABLE, &id);
        command.env("TRIREME_HAND_OVER", &paths.hand_over).env("TRIREME_CRASH_DIR", &paths.crash_dir);
        command.env("TRIREME_CONTROL", &paths.control).env("TRIREME_CAUSE_FILE", &paths.cause);
        command.env("TRIREME_WORLD_RESTARTS", paths.num_restarts.to_string());
        make_private(&paths.cause).with_context(|| format!("cannot make {}", paths.cause.display()))?;
        // Only the launcher notifies systemd.
        command.env_remove("NOTIFY_SOCKET").env_remove("WATCHDOG_USEC");
        command.env_remove("TRIREME_TAKE_OVER").env_remove("TRIREME_RELAY");
        command.env_remove("TRIREME_KEEP_WORLD");
        if plan.keeps_world {
            command.env("TRIREME_KEEP_WORLD", "true");
        }
        for name in &plan.without {
            command.env_remove(name);
        }
        // After a rank has died, `mpirun` must kill the others at once. By default it waits a second before SIGTERM and another
        // one after it, but only rank 0 handles SIGTERM: it is the one that ends a world gracefully.
        command.env("OMPI_MCA_odls_base_sigkill_timeout", "0");
        if let Some(socket) = &paths.take_over {
            command.env("TRIREME_TAKE_OVER", socket);
        }
        if let Some(directory) = &paths.relay {
            make_private_directory(directory).with_context(|| format!("cannot make {}", directory.display()))?;
            command.env("TRIREME_RELAY", directory);
        }
        let mpi_session = match plan.starter {
            Starter::Mpirun(kind) if kind != MpiKind::Mpich && plan.is_one_node => {
                let session =
                    mpirun::SessionDir::create(paths.start).context("cannot make a directory for MPI in /dev/shm")?;
                command.envs(session.settings(kind, |name| std::env::var_os(name).is_some()));
                Some(session)
            }
            _ => None,
        };
        // A process group of its own: Ctrl-C reaches only the launcher, which then ends the world gracefully.
        command.process_group(0);
        let child = ipc::bind_to_parent(&mut command, Signal::SIGTERM as i32)
            .spawn()
            .with_context(|| format!("cannot start `{}`", plan.command.program.display()))?;
        processes::reset_oom_score(child.id());
        let watch = ProcessWatch::new(child.id())?;
        let (starter, is_kept) = (plan.starter.clone(), plan.keeps_world);
        Ok(Self { child, watch, starter, is_kept, rank_0: None, id, paths, mpi_session })
    }

    /// Becomes readable at the end of the first process.
    pub(crate) fn watch(&self) -> &ProcessWatch {
        &self.watch
    }

    /// The exit status of the world, once its first process has ended.
    pub(crate) fn status(&mut self) -> Option<ExitStatus> {
        let status = self.child.try_wait().ok().flatten()?;
        Some(self.normalized(status))
    }

    /// The exit status of the ranks, from that of the first process.
    fn normalized(&self, status: ExitStatus) -> ExitStatus {
        match self.starter {
            Starter::Mpirun(MpiKind::Mpich) => decode_hydra_status(status),
            _ if self.is_kept && status.success() && self.cause().is_some() => ExitStatus::from_raw(1 << 8),
            _ => status,
        }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The socket at which its rank 0 hands over its ports.
    pub(crate) fn hand_over(&self) -> &PathBuf {
        &self.paths.hand_over
    }

    /// The directory of the sockets on which its rank 0 accepts the connections of the relay.
    pub(crate) fn relay(&self) -> Option<&PathBuf> {
        self.paths.relay.as_ref()
    }

    /// The socket at which its rank 0 reports its health.
    pub(crate) fn control(&self) -> &PathBuf {
        &self.paths.control
    }

    /// Why it ended, if one of its ranks has written so.
    pub(crate) fn cause(&self) -> Option<String> {
        crash::cause(&self.paths.cause)
    }

    /// The pid of rank 0; None if it has not started or runs on another node.
    pub(crate) fn rank_0(&mut self) -> Option<u32> {
        match self.starter {
            Starter::Local => return Some(self.pid()),
            // Ranks are children of Slurm's daemon, not of this process.
            Starter::Srun { .. } => return None,
            Starter::Mpirun(_) => {}
        }
        if self.rank_0.is_none() {
            self.rank_0 = mpirun::find_rank_0(self.pid()).and_then(|pid| ProcessWatch::new(pid).ok());
        }
        self.rank_0.as_ref().map(ProcessWatch::pid)
    }

    /// Whether `mpirun` keeps the world when a rank dies. It then returns 0 whatever its ranks return.
    pub(crate) fn is_kept(&self) -> bool {
        self.is_kept
    }

    /// Whether rank 0 has ended in a world that `mpirun` keeps nevertheless.
    pub(crate) fn has_lost_rank_0(&mut self) -> bool {
        self.is_kept && self.rank_0().is_some() && self.rank_0.as_ref().is_some_and(|rank_0| !rank_0.is_alive())
    }

    /// Its processes on this node.
    pub(crate) fn processes(&self) -> Vec<u32> {
        processes::with_variable(WORLD_VARIABLE, |id| id == self.id)
    }

    /// Sends SIGTERM to rank 0, which ends the other ranks gracefully; `mpirun` would kill them.
    pub(crate) fn request_end(&mut self) {
        if let Starter::Srun { job, step } = &self.starter {
            match srun::signal(*job, step, "TERM") {
                Ok(()) => return,
                Err(error) => eprintln!("launch: {error:#}; ends the ranks through srun, which does not drain"),
            }
        }
        self.rank_0();
        let was_signalled = self.rank_0.as_ref().is_some_and(|rank_0| rank_0.signal(Signal::SIGTERM as i32).is_ok());
        if !was_signalled {
            // It may have ended meanwhile.
            let _ = self.watch.signal(Signal::SIGTERM as i32);
        }
    }

    /// Kills every process of the world on this node.
    pub(crate) fn kill(&self) {
        if let Starter::Srun { job, step } = &self.starter {
            // It does not matter if it is gone already.
            let _ = srun::signal(*job, step, "KILL");
        }
        let _ = self.watch.signal(Signal::SIGKILL as i32);
        processes::kill_all(|| self.processes());
    }

    /// Waits until all processes of the world have ended, then removes its shared memory, sockets and files. `beside` are the
    /// first process of another world of this launcher and its relay, whose processes are not touched; `meanwhile` is called
    /// repeatedly. A process that is stuck in the kernel is logged and left behind.
    pub(crate) fn finish(mut self, beside: &[u32], mut meanwhile: impl FnMut()) -> Result<Ended> {
        let mut status = None;
        let child = &mut self.child;
        let is_left = |_| {
            status = child.try_wait().ok().flatten();
            if status.is_some() { Vec::new() } else { vec![child.id()] }
        };
        let stuck = processes::wait_until_gone(STUCK_AFTER, is_left, &mut meanwhile);
        processes::log_stuck(&stuck);
        // A process without a status is stuck after SIGKILL.
        let status = status.unwrap_or_else(|| ExitStatus::from_raw(Signal::SIGKILL as i32));
        self.wait_for_orphans(beside, meanwhile);
        self.mpi_session.iter().for_each(mpirun::SessionDir::remove);
        let ended = Ended { status: self.normalized(status), cause: self.cause() };
        for file in [&self.paths.hand_over, &self.paths.control, &self.paths.cause] {
            // It does not matter if it is gone already.
            let _ = std::fs::remove_file(file);
        }
        if let Some(directory) = &self.paths.relay {
            let _ = std::fs::remove_dir_all(directory);
        }
        sweep_shared_memory()?;
        Ok(ended)
    }

    /// Waits for processes that outlive the first one. If their parent has ended, this process, their subreaper, adopts them.
    fn wait_for_orphans(&self, beside: &[u32], meanwhile: impl FnMut()) {
        let find = || {
            let mut left = self.processes();
            // A process that is exiting has no readable environment, but may still hold shared memory.
            left.extend(orphans(beside));
            left
        };
        let left = |waited| {
            for pid in processes::ended_children().into_iter().filter(|pid| !beside.contains(pid)) {
                let _ = waitpid(Pid::from_raw(pid as i32), Some(WaitPidFlag::WNOHANG));
            }
            if waited > ORPHAN_TIMEOUT {
                processes::kill_all(find);
            }
            find()
        };
        processes::log_stuck(&processes::wait_until_gone(ORPHAN_TIMEOUT + STUCK_AFTER, left, meanwhile));
    }
}

/// An empty directory that this user alone can enter.
fn make_private_directory(path: &Path) -> std::io::Result<()> {
    // A killed launcher with the same pid may have left one.
    let _ = std::fs::remove_dir_all(path);
    std::fs::DirBuilder::new().mode(0o700).create(path)
}

/// An empty file that this user alone can read and write.
fn make_private(path: &Path) -> std::io::Result<()> {
    // A killed launcher with the same pid may have left a file.
    let _ = std::fs::remove_file(path);
    std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).map(drop)
}

/// The descendants of this process, without the processes of `beside` and their own descendants.
fn orphans(beside: &[u32]) -> Vec<u32> {
    let others: Vec<u32> = beside.iter().flat_map(|&pid| processes::descendants(pid)).collect();
    let is_orphan = |pid: &u32| !beside.contains(pid) && !others.contains(pid);
    processes::descendants(std::process::id()).into_iter().filter(is_orphan).collect()
}

/// Hydra exits with the number of the signal that ended a rank, without adding 128. Ranks themselves exit with 1, 2 or 137 only,
/// so codes 3 to 31 are signals.
fn decode_hydra_status(status: ExitStatus) -> ExitStatus {
    match status.code() {
        Some(signal @ 3..=31) => ExitStatus::from_raw(signal),
        _ => status,
    }
}

/// The exit code, as a shell reports it: 128 plus the signal's number after a signal.
pub(crate) fn exit_code(status: ExitStatus) -> u8 {
    status.code().map_or_else(|| 128 + status.signal().unwrap_or(0) as u8, |code| code as u8)
}

/// Removes the leftovers of this user's killed launchers: first processes, then shared memory.
pub(crate) fn remove_leftovers() -> Result<()> {
    /// Time in which a world ends by itself after its launcher has died.
    const TIMEOUT: Duration = Duration::from_secs(2);
    let find = || processes::with_variable(WORLD_VARIABLE, is_left_over);
    let mut is_logged = false;
    let left = |waited| {
        let left = find();
        if waited > TIMEOUT && !left.is_empty() {
            if !std::mem::replace(&mut is_logged, true) {
                eprintln!("launch: kills {} processes that a killed launcher left: {left:?}", left.len());
            }
            processes::kill_all(find);
        }
        left
    };
    processes::log_stuck(&processes::wait_until_gone(TIMEOUT + STUCK_AFTER, left, || {}));
    mpirun::remove_leftovers();
    sweep_shared_memory()
}

fn sweep_shared_memory() -> Result<()> {
    for name in ipc::sweep_all_stale()? {
        eprintln!("launch: removed /dev/shm/{name}, left by a process that was killed");
    }
    Ok(())
}

fn world_id(launcher: ProcessId, start: u32) -> String {
    format!("{}/{}/{}/{start}", node(), launcher.pid, launcher.start_time)
}

/// Whether the launcher of the world `id` ran on this node and has ended.
fn is_left_over(id: &str) -> bool {
    let mut parts = id.split('/');
    let (is_here, mut number) = (parts.next() == Some(&node()), || parts.next()?.parse::<u64>().ok());
    match (is_here, number(), number()) {
        (true, Some(pid), Some(start_time)) => !ProcessId { pid: pid as u32, start_time }.is_alive(),
        _ => false,
    }
}

fn node() -> String {
    nix::unistd::gethostname().unwrap_or_default().to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_world_is_a_leftover_once_its_launcher_has_ended() {
        let me = ProcessId::current();
        assert!(!is_left_over(&world_id(me, 3)));
        assert!(is_left_over(&world_id(ProcessId { start_time: me.start_time + 1, ..me }, 3)));
        assert!(!is_left_over(&format!("elsewhere/{}/1/0", me.pid)), "launchers of other nodes cannot be checked");
        assert!(!is_left_over("nonsense"));
    }
}
