//! One run of a world: its processes on this node, from start to the last one's end.

use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use ipc::ProcessWatch;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;

use crate::plan::{Plan, Starter};
use crate::{mpirun, processes, srun};

/// How long what is left of a world may take to end by itself after its first process has.
const ORPHAN_PATIENCE: Duration = Duration::from_secs(3);

pub(crate) struct World {
    child: Child,
    watch: ProcessWatch,
    starter: Starter,
    rank_0: Option<ProcessWatch>,
}

impl World {
    /// Starts the command of `plan`. Call it on the main thread: the world ends with the thread that started it.
    pub(crate) fn start(plan: &Plan) -> Result<Self> {
        let mut command = Command::new(&plan.command.program);
        command.args(&plan.command.args).stdin(Stdio::null());
        // A process group of its own: Ctrl-C reaches the launcher alone, which then ends the world gracefully.
        command.process_group(0);
        let child = ipc::bind_to_parent(&mut command, Signal::SIGTERM as i32)
            .spawn()
            .with_context(|| format!("cannot start `{}`", plan.command.program.display()))?;
        let watch = ProcessWatch::new(child.id())?;
        Ok(Self { child, watch, starter: plan.starter.clone(), rank_0: None })
    }

    /// Readable at the end of the world.
    pub(crate) fn watch(&self) -> &ProcessWatch {
        &self.watch
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The pid of rank 0; None when it is not there (yet), or on another node.
    pub(crate) fn rank_0(&mut self) -> Option<u32> {
        match self.starter {
            Starter::Local => return Some(self.pid()),
            // Slurm's daemon is the parent of ranks.
            Starter::Srun { .. } => return None,
            Starter::Mpirun => {}
        }
        if self.rank_0.is_none() {
            self.rank_0 = mpirun::find_rank_0(self.pid()).and_then(|pid| ProcessWatch::new(pid).ok());
        }
        self.rank_0.as_ref().map(ProcessWatch::pid)
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
        kill_all(&processes::descendants(std::process::id()));
    }

    /// What the first process returned; waits until all processes of the world have ended, and removes what they
    /// left in shared memory.
    pub(crate) fn finish(mut self) -> Result<ExitStatus> {
        let status = self.child.wait().context("cannot wait for the world")?;
        reap_orphans();
        if self.starter == Starter::Mpirun {
            mpirun::remove_leftovers(self.child.id());
        }
        for name in ipc::sweep_all_stale()? {
            eprintln!("launch: removed /dev/shm/{name}, left by a process that was killed");
        }
        Ok(status)
    }
}

/// The exit code a shell would give.
pub(crate) fn exit_code(status: ExitStatus) -> u8 {
    status.code().map_or_else(|| 128 + status.signal().unwrap_or(0) as u8, |code| code as u8)
}

/// Waits for processes whose parent has ended before them; they come to this process, their subreaper.
fn reap_orphans() {
    let start = Instant::now();
    while waitpid(None::<Pid>, Some(WaitPidFlag::WNOHANG)).is_ok() {
        if start.elapsed() > ORPHAN_PATIENCE {
            kill_all(&processes::descendants(std::process::id()));
        }
        thread::sleep(Duration::from_millis(10));
    }
}

fn kill_all(pids: &[u32]) {
    for &pid in pids {
        // It may have ended since it was seen.
        let _ = kill(Pid::from_raw(pid as i32), Signal::SIGKILL);
    }
}
