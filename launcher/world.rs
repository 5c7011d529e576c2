//! One run of a world: its processes on this node, from start to the last one's end.

use std::os::unix::fs::OpenOptionsExt;
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

/// How long what is left of a world may take to end by itself after its first process has.
const ORPHAN_PATIENCE: Duration = Duration::from_secs(3);

/// A process that was killed and has not ended after this long is stuck in the kernel: a driver's or a file system's.
pub(crate) const STUCK_AFTER: Duration = Duration::from_secs(30);

/// In the environment of every process of a world: which world it is of.
const WORLD_VARIABLE: &str = "TRIREME_WORLD";

/// Where a world finds what its launcher arranged for it.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    /// Counts the starts of this launcher.
    pub(crate) start: u32,
    /// Where rank 0 gives its ports away when asked.
    pub(crate) hand_over: PathBuf,
    /// Where rank 0 tells how it is.
    pub(crate) control: PathBuf,
    /// Where ranks say why the world ends.
    pub(crate) cause: PathBuf,
    /// Where it gets them from; None: it binds them.
    pub(crate) take_over: Option<PathBuf>,
    /// Where reports of crashes go.
    pub(crate) crash_dir: PathBuf,
}

/// How a world has ended.
pub(crate) struct Ended {
    pub(crate) status: ExitStatus,
    /// Why, where a rank has said so.
    pub(crate) cause: Option<String>,
}

pub(crate) struct World {
    child: Child,
    watch: ProcessWatch,
    starter: Starter,
    rank_0: Option<ProcessWatch>,
    id: String,
    place: Place,
    /// What Open MPI keeps for it, where that is known.
    mpi_files: Option<mpirun::Files>,
}

impl World {
    /// Starts the command of `plan`. Call it on the main thread: the world ends with the thread that started it.
    pub(crate) fn start(plan: &Plan, place: Place) -> Result<Self> {
        let id = world_id(ProcessId::current(), place.start);
        let mut command = Command::new(&plan.command.program);
        command.args(&plan.command.args).stdin(Stdio::null()).env(WORLD_VARIABLE, &id);
        command.env("TRIREME_HAND_OVER", &place.hand_over).env("TRIREME_CRASH_DIR", &place.crash_dir);
        command.env("TRIREME_CONTROL", &place.control).env("TRIREME_CAUSE_FILE", &place.cause);
        make_private(&place.cause).with_context(|| format!("cannot make {}", place.cause.display()))?;
        // The launcher alone speaks to systemd.
        command.env_remove("NOTIFY_SOCKET").env_remove("WATCHDOG_USEC").env_remove("TRIREME_TAKE_OVER");
        for name in &plan.without {
            command.env_remove(name);
        }
        // When a rank has died, `mpirun` is to end the others at once: it would wait a second before SIGTERM, which
        // they leave to rank 0, and another after it. Worlds end in good order by rank 0.
        command.env("OMPI_MCA_odls_base_sigkill_timeout", "0");
        if let Some(socket) = &place.take_over {
            command.env("TRIREME_TAKE_OVER", socket);
        }
        let mpi_files = match plan.starter {
            Starter::Mpirun(kind) if kind != MpiKind::Mpich && plan.is_one_node => {
                let files =
                    mpirun::Files::create(place.start).context("cannot make a directory for MPI in /dev/shm")?;
                command.envs(files.settings(kind, |name| std::env::var_os(name).is_some()));
                Some(files)
            }
            _ => None,
        };
        // A process group of its own: Ctrl-C reaches the launcher alone, which then ends the world gracefully.
        command.process_group(0);
        let child = ipc::bind_to_parent(&mut command, Signal::SIGTERM as i32)
            .spawn()
            .with_context(|| format!("cannot start `{}`", plan.command.program.display()))?;
        processes::do_not_spare(child.id());
        let watch = ProcessWatch::new(child.id())?;
        Ok(Self { child, watch, starter: plan.starter.clone(), rank_0: None, id, place, mpi_files })
    }

    /// Readable at the end of the world.
    pub(crate) fn watch(&self) -> &ProcessWatch {
        &self.watch
    }

    /// How its first process has ended, if it has.
    pub(crate) fn status(&mut self) -> Option<ExitStatus> {
        let status = self.child.try_wait().ok().flatten()?;
        Some(self.meant(status))
    }

    /// How its ranks ended, as its first process tells it.
    fn meant(&self, status: ExitStatus) -> ExitStatus {
        match self.starter {
            Starter::Mpirun(MpiKind::Mpich) => of_hydra(status),
            _ => status,
        }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Where its rank 0 gives its ports away.
    pub(crate) fn hand_over(&self) -> &PathBuf {
        &self.place.hand_over
    }

    /// Where its rank 0 tells how it is.
    pub(crate) fn control(&self) -> &PathBuf {
        &self.place.control
    }

    /// Why it ended, as one of its ranks has said.
    pub(crate) fn cause(&self) -> Option<String> {
        crash::cause(&self.place.cause)
    }

    /// The pid of rank 0; None when it is not there (yet), or on another node.
    pub(crate) fn rank_0(&mut self) -> Option<u32> {
        match self.starter {
            Starter::Local => return Some(self.pid()),
            // Slurm's daemon is the parent of ranks.
            Starter::Srun { .. } => return None,
            Starter::Mpirun(_) => {}
        }
        if self.rank_0.is_none() {
            self.rank_0 = mpirun::find_rank_0(self.pid()).and_then(|pid| ProcessWatch::new(pid).ok());
        }
        self.rank_0.as_ref().map(ProcessWatch::pid)
    }

    /// Its processes on this node.
    pub(crate) fn processes(&self) -> Vec<u32> {
        processes::with_variable(WORLD_VARIABLE, |id| id == self.id)
    }

    /// Asks the world to end. Rank 0 is asked: it ends the others in good order, while mpirun would kill them.
    pub(crate) fn ask_to_end(&mut self) {
        if let Starter::Srun { job, step } = &self.starter {
            match srun::signal(*job, step, "TERM") {
                Ok(()) => return,
                Err(error) => eprintln!("launch: {error:#}; ends the ranks through srun, which does not drain"),
            }
        }
        self.rank_0();
        let asked = self.rank_0.as_ref().is_some_and(|rank_0| rank_0.signal(Signal::SIGTERM as i32).is_ok());
        if !asked {
            // It may have ended this moment, which is what was wanted.
            let _ = self.watch.signal(Signal::SIGTERM as i32);
        }
    }

    /// Kills every process of the world on this node.
    pub(crate) fn kill(&self) {
        if let Starter::Srun { job, step } = &self.starter {
            // Gone already is as good.
            let _ = srun::signal(*job, step, "KILL");
        }
        let _ = self.watch.signal(Signal::SIGKILL as i32);
        processes::kill_all(|| self.processes());
    }

    /// What the first process returned; waits until all processes of the world have ended, and removes what they
    /// left in shared memory and sockets. `beside` is the first process of another world, to be left alone; `meanwhile` is
    /// called again and again. A process that is stuck in the kernel is named and left behind.
    pub(crate) fn finish(mut self, beside: Option<u32>, mut meanwhile: impl FnMut()) -> Result<Ended> {
        let mut status = None;
        let child = &mut self.child;
        let is_left = |_| {
            status = child.try_wait().ok().flatten();
            if status.is_some() { Vec::new() } else { vec![child.id()] }
        };
        let stuck = processes::wait_until_gone(STUCK_AFTER, is_left, &mut meanwhile);
        processes::name_stuck(&stuck);
        // One that does not end was killed.
        let status = status.unwrap_or_else(|| ExitStatus::from_raw(Signal::SIGKILL as i32));
        self.wait_for_orphans(beside, meanwhile);
        self.mpi_files.iter().for_each(mpirun::Files::remove);
        let ended = Ended { status: self.meant(status), cause: self.cause() };
        for file in [&self.place.hand_over, &self.place.control, &self.place.cause] {
            // Gone already is as good.
            let _ = std::fs::remove_file(file);
        }
        sweep_shared_memory()?;
        Ok(ended)
    }

    /// Waits for processes that outlive the first; those whose parent has ended come to this process, their subreaper.
    fn wait_for_orphans(&self, beside: Option<u32>, meanwhile: impl FnMut()) {
        let find = || {
            let mut left = self.processes();
            // One that is ending shows no environment any more, and still holds its shared memory.
            left.extend(orphans(beside));
            left
        };
        let left = |waited| {
            for pid in processes::ended_children().into_iter().filter(|pid| Some(*pid) != beside) {
                let _ = waitpid(Pid::from_raw(pid as i32), Some(WaitPidFlag::WNOHANG));
            }
            if waited > ORPHAN_PATIENCE {
                processes::kill_all(find);
            }
            find()
        };
        processes::name_stuck(&processes::wait_until_gone(ORPHAN_PATIENCE + STUCK_AFTER, left, meanwhile));
    }
}

/// An empty file that this user alone can read and write.
fn make_private(path: &Path) -> std::io::Result<()> {
    // Left by a launcher that was killed and had this pid.
    let _ = std::fs::remove_file(path);
    std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).map(drop)
}

/// What is below this process and is not of the world whose first process is `beside`.
fn orphans(beside: Option<u32>) -> Vec<u32> {
    let others = beside.map(processes::descendants).unwrap_or_default();
    let is_orphan = |pid: &u32| Some(*pid) != beside && !others.contains(pid);
    processes::descendants(std::process::id()).into_iter().filter(is_orphan).collect()
}

/// Hydra gives the number of the signal that ended a rank as its exit code, where others add 128. No rank ends with such a
/// code by itself: its own are 1, 2 and 137.
fn of_hydra(status: ExitStatus) -> ExitStatus {
    match status.code() {
        Some(signal @ 3..=31) => ExitStatus::from_raw(signal),
        _ => status,
    }
}

/// The exit code a shell would give.
pub(crate) fn exit_code(status: ExitStatus) -> u8 {
    status.code().map_or_else(|| 128 + status.signal().unwrap_or(0) as u8, |code| code as u8)
}

/// Ends what launchers of this user have left that were killed: processes first, then shared memory.
pub(crate) fn remove_leftovers() -> Result<()> {
    /// A world ends by itself when its launcher dies, but not at once.
    const PATIENCE: Duration = Duration::from_secs(2);
    let find = || processes::with_variable(WORLD_VARIABLE, is_left_over);
    let mut is_told = false;
    let left = |waited| {
        let left = find();
        if waited > PATIENCE && !left.is_empty() {
            if !std::mem::replace(&mut is_told, true) {
                eprintln!("launch: kills {} processes that a launcher left which was killed: {left:?}", left.len());
            }
            processes::kill_all(find);
        }
        left
    };
    processes::name_stuck(&processes::wait_until_gone(PATIENCE + STUCK_AFTER, left, || {}));
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

/// Whether the launcher of that world ran on this node, and does no longer.
fn is_left_over(id: &str) -> bool {
    let mut parts = id.split('/');
    let (here, mut number) = (parts.next() == Some(&node()), || parts.next()?.parse::<u64>().ok());
    match (here, number(), number()) {
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
    fn a_world_is_left_over_once_its_launcher_is_gone() {
        let me = ProcessId::current();
        assert!(!is_left_over(&world_id(me, 3)));
        assert!(is_left_over(&world_id(ProcessId { start_time: me.start_time + 1, ..me }, 3)));
        assert!(!is_left_over(&format!("elsewhere/{}/1/0", me.pid)), "of another node nothing is known");
        assert!(!is_left_over("nonsense"));
    }
}
