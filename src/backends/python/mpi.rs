//! Models with a process on every rank: one MPI program beside the world of the ranks themselves.
//!
//! A rank is an MPI process already and cannot join a second world. So `mpirun` (or `srun`, if that started the ranks) runs again
//! for each instance, on the same hosts. The `COMM_WORLD` of the model has one process for each rank, in the same order. The
//! first of them connects to the server; the others read from their environment what to load.

use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};

use ipc::lock;
use tokio::net::UnixListener;

/// Environment variables of a model's processes: the socket for the first one, and what the others load.
const SOCKET: &str = "TRIREME_PYTHON_SOCKET";
const LOAD: &str = "TRIREME_PYTHON_LOAD";

/// Prefix of the line in which a process on another rank reports its error.
const ERROR_PREFIX: &str = "trireme-python-failed ";

/// Largest load message. In hexadecimal it must fit one environment variable of Linux.
const MAX_LOAD_BYTES: usize = 60_000;

/// How to start a process on every rank.
#[derive(Debug, Clone)]
pub(super) struct Launch {
    /// The host of each rank.
    pub hosts: Vec<String>,
    /// A directory for the socket and the files of `mpirun`. It must not exist yet.
    pub scratch: PathBuf,
    /// The message that makes a process load the model.
    pub load: Vec<u8>,
}

impl Launch {
    /// The command that starts `program` on each rank, and the socket that the first process connects to. Processes on other
    /// hosts get the environment variables `passed`, too.
    ///
    /// # Errors
    /// When the socket cannot be made, or the configuration is too large for an environment variable.
    pub fn prepare(&self, program: &Command, passed: &[String]) -> io::Result<(Command, UnixListener)> {
        if self.load.len() > MAX_LOAD_BYTES {
            let found = self.load.len();
            return Err(io::Error::other(format!(
                "the model's configuration takes {found} bytes; at most {MAX_LOAD_BYTES} reach other ranks"
            )));
        }
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.scratch)?;
        let socket = self.scratch.join("socket");
        let listener = UnixListener::bind(&socket)?;
        let by_slurm =
            std::env::var_os("OMPI_COMM_WORLD_SIZE").is_none() && std::env::var_os("SLURM_STEP_ID").is_some();
        let mut command = if by_slurm { self.srun(program)? } else { self.mpirun(program, passed) };
        command.env(SOCKET, socket).env(LOAD, hex(&self.load)).stdin(Stdio::null()).stderr(Stdio::piped());
        Ok((command, listener))
    }

    fn mpirun(&self, program: &Command, passed: &[String]) -> Command {
        let mut command = Command::new("mpirun");
        leave_world(&mut command);
        // Processes wait for each other most of the time, and a model on a GPU needs no core of its own for that.
        command.args(["--bind-to", "none", "--oversubscribe", "--mca", "mpi_yield_when_idle", "1"]);
        command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
        // In an allocation `mpirun` uses `srun`, which would otherwise wait for the resources of the step of the ranks.
        command.env("SLURM_OVERLAP", "1");
        let groups: Vec<&[String]> = self.hosts.chunk_by(|one, next| one == next).collect();
        if groups.len() == 1 {
            command.env("OMPI_MCA_orte_tmpdir_base", &self.scratch).env("PRTE_MCA_prte_tmpdir_base", &self.scratch);
        }
        for (index, group) in groups.iter().enumerate() {
            let count = group.len().to_string();
            if index > 0 {
                command.arg(":");
            }
            if groups.len() > 1 {
                command.args(["--host", &format!("{}:{count}", group[0])]);
            }
            for name in [SOCKET, LOAD, "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED"] {
                command.args(["-x", name]);
            }
            // `mpirun` warns about a variable that is not set.
            for name in passed.iter().filter(|name| std::env::var_os(name).is_some()) {
                command.args(["-x", name]);
            }
            command.args(["-n", &count]).arg(program.get_program()).args(program.get_args());
        }
        copy_env(program, &mut command);
        command
    }

    fn srun(&self, program: &Command) -> io::Result<Command> {
        let hosts = self.scratch.join("hosts");
        std::fs::write(&hosts, self.hosts.join("\n") + "\n")?;
        let mut command = Command::new("srun");
        leave_world(&mut command);
        command.args(["--overlap", "--mpi=pmix", "--export=ALL", "--kill-on-bad-exit=1", "--distribution=arbitrary"]);
        command.arg(format!("--ntasks={}", self.hosts.len())).env("SLURM_HOSTFILE", hosts);
        command.arg(program.get_program()).args(program.get_args());
        copy_env(program, &mut command);
        Ok(command)
    }
}

fn copy_env(from: &Command, to: &mut Command) {
    for (name, value) in from.get_envs() {
        match value {
            Some(value) => to.env(name, value),
            None => to.env_remove(name),
        };
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> String {
    let (pairs, _) = text.as_bytes().as_chunks::<2>();
    let byte = |pair: &[u8; 2]| std::str::from_utf8(pair).ok().and_then(|pair| u8::from_str_radix(pair, 16).ok());
    String::from_utf8_lossy(&pairs.iter().filter_map(byte).collect::<Vec<_>>()).into_owned()
}

/// Removes the environment variables of the MPI world of the ranks. A child with them would try to join that world.
pub(super) fn leave_world(command: &mut Command) {
    let is_launchers = |name: &str| {
        let begins = |prefixes: &[&str]| prefixes.iter().any(|prefix| name.starts_with(prefix));
        let stays = ["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "OMPI_MCA_", "PMIX_MCA_", "OMPI_CC"];
        let of_ranks =
            ["OMPI_MCA_orte_", "OMPI_MCA_ess", "OMPI_MCA_pmix", "OMPI_MCA_shmem_RUNTIME", "OMPI_MCA_initial_wdir"];
        let of_step = ["SLURM_STEP", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_TASK_PID", "SLURM_PMIX", "SLURM_MPI_TYPE"];
        begins(&of_ranks)
            || begins(&of_step)
            || (begins(&["OMPI_", "PMIX_", "PMI_", "PRTE_"]) && !begins(&stays))
            || name == "OMPI_MCA_mpi_oversubscribe"
    };
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(is_launchers) {
            command.env_remove(name);
        }
    }
}

/// Errors of processes on other ranks, read from the standard error of the launcher.
#[derive(Debug, Clone, Default)]
pub(super) struct RankErrors(Arc<Mutex<Option<String>>>);

impl RankErrors {
    /// Logs and keeps the error in `line`. Returns false for a line without one.
    pub fn keep(&self, line: &str) -> bool {
        let Some((_, encoded)) = line.split_once(ERROR_PREFIX) else { return false };
        let error = unhex(encoded.trim_end());
        tracing::error!("{}", error.trim_end());
        lock(&self.0).get_or_insert(error);
        true
    }

    /// The first error.
    pub fn first(&self) -> Option<String> {
        lock(&self.0).clone()
    }
}

/// The children of a process.
pub(super) fn children(pid: u32) -> Vec<u32> {
    let tasks = std::fs::read_dir(Path::new("/proc").join(pid.to_string()).join("task"));
    let read = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("children")).unwrap_or_default();
    let numbers = tasks.into_iter().flatten().flatten().map(read).collect::<Vec<_>>().join(" ");
    numbers.split_ascii_whitespace().filter_map(|number| number.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_hosts_get_the_variables_that_are_passed() {
        let launch =
            Launch { hosts: vec!["a".to_owned(), "b".to_owned()], scratch: "/nowhere".into(), load: Vec::new() };
        let passed = ["CARGO_PKG_NAME".to_owned(), "NO_SUCH_VARIABLE".to_owned()];
        let command = launch.mpirun(&Command::new("python3"), &passed);
        let args: Vec<_> = command.get_args().map(|arg| arg.to_string_lossy()).collect();
        assert_eq!(args.iter().filter(|arg| *arg == "CARGO_PKG_NAME").count(), 2, "{args:?}");
        assert!(!args.iter().any(|arg| arg == "NO_SUCH_VARIABLE"), "{args:?}");
    }
}
