//! Models with a process on every rank: one MPI program beside the world of the ranks themselves.
//!
//! An MPI process may be joined to its launcher once, and a rank already is. So `mpirun` (or `srun`, where that started
//! the ranks) is run again for each instance, on the same hosts, and the model's `COMM_WORLD` has as many processes as
//! there are ranks, in the same order. The first talks to the server; the others have what to load in their environment.

use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};

use ipc::lock;
use tokio::net::UnixListener;

/// The environment of a model's processes on all ranks: the first one's socket, and what the others load.
const SOCKET: &str = "TRIREME_PYTHON_SOCKET";
const LOAD: &str = "TRIREME_PYTHON_LOAD";

/// Begins the line in which a process on another rank says why it failed.
const LAST_WORDS: &str = "trireme-python-failed ";

/// What Linux takes as one environment variable.
const MAX_LOAD_BYTES: usize = 60_000;

/// Processes on all ranks that are to be started.
#[derive(Debug, Clone)]
pub(super) struct Launch {
    /// The host of each rank.
    pub hosts: Vec<String>,
    /// An empty directory of its own, for the socket and what `mpirun` writes.
    pub scratch: PathBuf,
    /// The message that has a process load the model.
    pub load: Vec<u8>,
}

impl Launch {
    /// The command that starts `program` on each rank, and where the first one connects to. Other hosts get the variables of
    /// `passed`, too.
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

    pub(super) fn mpirun(&self, program: &Command, passed: &[String]) -> Command {
        let mut command = Command::new("mpirun");
        leave_world(&mut command);
        // Ranks wait for each other most of the time; a model process on a GPU needs no core of its own for that.
        command.args(["--bind-to", "none", "--oversubscribe", "--mca", "mpi_yield_when_idle", "1"]);
        command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
        // Inside an allocation `mpirun` uses `srun`, which otherwise waits for what the ranks' step holds.
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
            // `mpirun` warns of one that is not set.
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

/// Takes away what makes MPI join the world of the ranks: a child that tried would fail or disturb it.
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

/// What processes of other ranks said when they failed, read from the launcher's standard error.
#[derive(Debug, Clone, Default)]
pub(super) struct LastWords(Arc<Mutex<Option<String>>>);

impl LastWords {
    /// Keeps the words of `line` if they are such; false for any other line.
    pub fn keep(&self, line: &str) -> bool {
        let Some((_, said)) = line.split_once(LAST_WORDS) else { return false };
        let words = unhex(said.trim_end());
        tracing::error!("{}", words.trim_end());
        lock(&self.0).get_or_insert(words);
        true
    }

    /// The first of them.
    pub fn get(&self) -> Option<String> {
        lock(&self.0).clone()
    }
}

/// The children of a process now.
pub(super) fn children(pid: u32) -> Vec<u32> {
    let tasks = std::fs::read_dir(Path::new("/proc").join(pid.to_string()).join("task"));
    let read = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("children")).unwrap_or_default();
    let numbers = tasks.into_iter().flatten().flatten().map(read).collect::<Vec<_>>().join(" ");
    numbers.split_ascii_whitespace().filter_map(|number| number.parse().ok()).collect()
}
