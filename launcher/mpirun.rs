//! Starts worlds through `mpirun`: Open MPI's, or Hydra, the launcher of MPICH.

use std::fs;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use ipc::ProcessId;

use crate::command::CommandLine;
use crate::flags::Bind;
use crate::mpi::{MpiKind, Mpirun};
use crate::{hosts, processes};

/// The parameters of an `mpirun` command.
pub(crate) struct Step<'a> {
    pub(crate) mpirun: &'a Mpirun,
    pub(crate) oversubscribe: bool,
    /// Hosts and their numbers of ranks; empty for this host alone.
    pub(crate) hosts: &'a [(String, u32)],
    pub(crate) bind: Bind,
    /// Cores of a host divided by its ranks.
    pub(crate) cores_per_rank: u32,
    pub(crate) network: Option<&'a str>,
    /// Names of the environment variables of this process.
    pub(crate) environment: &'a [String],
    /// Environment variables that the world must not get.
    pub(crate) without: &'a [String],
    /// Whether the other ranks go on when one dies. Only Open MPI up to 4.
    pub(crate) keeps_world: bool,
}

/// Prefixes of the variables that go to every host. By itself, Open MPI's `mpirun` passes on only its own variables.
const PASSED_ON: [&str; 6] = ["CUDA_", "NCCL_", "UCX_", "TRIREME_", "RUST_LOG", "LD_LIBRARY_PATH"];

impl Step<'_> {
    /// Options of Hydra. It passes on the whole environment and allows oversubscription by default.
    fn options_of_hydra(&self) -> Vec<String> {
        let mut args = match self.bind {
            Bind::None => Vec::new(),
            Bind::Numa => vec!["-bind-to".to_owned(), "numa".to_owned()],
            Bind::Core => vec!["-bind-to".to_owned(), format!("core:{}", self.cores_per_rank)],
        };
        if let Some(network) = self.network {
            args.extend(["-iface".to_owned(), network.to_owned()]);
            args.extend(["-genv", "NCCL_SOCKET_IFNAME", network].map(str::to_owned));
        }
        if !self.hosts.is_empty() {
            let hosts: Vec<String> = self.hosts.iter().map(|(name, count)| format!("{name}:{count}")).collect();
            args.extend(["-hosts".to_owned(), hosts.join(",")]);
        }
        args
    }

    /// Options of Open MPI's `mpirun`.
    fn options(&self) -> Vec<String> {
        let mut args = vec!["--allow-run-as-root".to_owned()];
        args.extend(match self.bind {
            // By default each rank would be bound to one core, which its workers inherit.
            Bind::None => vec!["--bind-to".to_owned(), "none".to_owned()],
            Bind::Numa => ["--map-by", "numa", "--bind-to", "numa"].map(str::to_owned).to_vec(),
            Bind::Core => ["--map-by", &format!("slot:PE={}", self.cores_per_rank), "--bind-to", "core"]
                .map(str::to_owned)
                .to_vec(),
        });
        if self.oversubscribe {
            args.extend(["--oversubscribe", "--mca", "mpi_yield_when_idle", "1"].map(str::to_owned));
        }
        if self.keeps_world {
            args.push("--enable-recovery".to_owned());
        }
        if let Some(network) = self.network {
            let own = match self.mpirun.kind {
                MpiKind::OpenMpi5 => ["--prtemca", "prte_if_include"],
                _ => ["--mca", "oob_tcp_if_include"],
            };
            args.extend(["--mca", "btl_tcp_if_include", network, own[0], own[1], network].map(str::to_owned));
            args.extend(nccl_network(network).into_iter().flat_map(|setting| ["-x".to_owned(), setting]));
        }
        if self.hosts.len() > 1 {
            let is_needed =
                |name: &&String| PASSED_ON.iter().any(|start| name.starts_with(start)) && !self.without.contains(name);
            let is_set = |name: &&String| self.network.is_some() && *name == "NCCL_SOCKET_IFNAME";
            let names = self.environment.iter().filter(is_needed).filter(|name| !is_set(name));
            args.extend(names.flat_map(|name| ["-x".to_owned(), name.clone()]));
        }
        args
    }

    /// The value of `--host` for a rank.
    fn host_of(&self, rank: usize) -> Option<String> {
        let mut end = 0;
        self.hosts.iter().find_map(|(name, count)| {
            end += *count as usize;
            (rank < end).then(|| format!("{name}:{count}"))
        })
    }
}

/// NCCL's setting for a network interface. NCCL takes no subnets; it then chooses an interface itself.
pub(crate) fn nccl_network(network: &str) -> Option<String> {
    (!network.contains('/')).then(|| format!("NCCL_SOCKET_IFNAME={network}"))
}

/// The `mpirun` command, with one application context per rank.
pub(crate) fn command(ranks: &[CommandLine], step: &Step) -> CommandLine {
    let is_hydra = step.mpirun.kind == MpiKind::Mpich;
    let mut args = if is_hydra { step.options_of_hydra() } else { step.options() };
    for (rank, command) in ranks.iter().enumerate() {
        if rank > 0 {
            args.push(":".to_owned());
        }
        if let Some(host) = step.host_of(rank).filter(|_| !is_hydra) {
            args.extend(["--host".to_owned(), host]);
        }
        args.extend(["-n".to_owned(), "1".to_owned(), command.program.display().to_string()]);
        args.extend(command.args.iter().cloned());
    }
    CommandLine { program: step.mpirun.program.clone(), args }
}

/// The pid of rank 0 among the descendants of `mpirun`; None if it has not started or runs on another node.
pub(crate) fn find_rank_0(mpirun: u32) -> Option<u32> {
    // Nearest first: workers inherit the environment of their rank, which is their ancestor.
    processes::descendants(mpirun).into_iter().find(|pid| {
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        let names: [&[u8]; 3] = [b"OMPI_COMM_WORLD_RANK=0", b"PMIX_RANK=0", b"PMI_RANK=0"];
        environment.split(|byte| *byte == 0).any(|entry| names.contains(&entry))
    })
}

/// A directory for the session files and shared memory of Open MPI, for a world of one node. Its name identifies the launcher, so
/// that leftovers of a killed launcher can be distinguished from files that another PID namespace with the same `/dev/shm` uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SessionDir(PathBuf);

/// The parent of session directories.
const SESSION_PARENT: &str = "/dev/shm";
/// The start of their names. PID namespace, pid and start time of the launcher and the number of the start follow.
const SESSION_PREFIX: &str = "trireme-mpi.";

impl SessionDir {
    /// Creates the directory for start number `start` of this launcher.
    pub(crate) fn create(start: u32) -> std::io::Result<Self> {
        let ProcessId { pid, start_time } = ProcessId::current();
        let name = format!("{SESSION_PREFIX}{}.{pid}.{start_time}.{start}", ipc::pid_namespace());
        let session = Self(Path::new(SESSION_PARENT).join(name));
        fs::DirBuilder::new().mode(0o700).create(&session.0)?;
        Ok(session)
    }

    /// Environment variables that make Open MPI use the directory, and use shared memory only, so that ranks do not listen on
    /// networks. A variable for which `is_set` holds was set by the user and is left out.
    pub(crate) fn settings(&self, kind: MpiKind, is_set: impl Fn(&str) -> bool) -> Vec<(&'static str, String)> {
        let dir = self.0.display().to_string();
        let shared_memory = if kind == MpiKind::OpenMpi { "self,vader" } else { "self,sm" };
        let settings = [
            ("OMPI_MCA_orte_tmpdir_base", dir.clone()),
            ("PRTE_MCA_prte_tmpdir_base", dir.clone()),
            ("OMPI_MCA_btl_vader_backing_directory", dir.clone()),
            ("OMPI_MCA_btl_sm_backing_directory", dir),
            ("OMPI_MCA_pml", "ob1".to_owned()),
            ("OMPI_MCA_btl", shared_memory.to_owned()),
        ];
        settings.into_iter().filter(|(name, _)| !is_set(name)).collect()
    }

    /// Removes the directory with its contents, if it exists.
    pub(crate) fn remove(&self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Whether Open MPI starts all ranks on this node. Under a batch system that it supports it may use other nodes.
pub(crate) fn is_one_node(placed: &[(String, u32)], has_variable: impl Fn(&str) -> bool) -> bool {
    const BATCH_SYSTEMS: [&str; 4] = ["SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "PE_HOSTFILE"];
    match placed {
        [] => !BATCH_SYSTEMS.into_iter().any(has_variable),
        [(host, _)] => hosts::is_here(host),
        _ => false,
    }
}

/// Removes the session files of Open MPI for worlds whose launcher was killed.
pub(crate) fn remove_leftovers() {
    let uid = nix::unistd::getuid().as_raw();
    for entry in fs::read_dir(SESSION_PARENT).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_own = || entry.metadata().is_ok_and(|meta| meta.is_dir() && meta.uid() == uid);
        if owner(&name).is_some_and(|owner| !owner.is_alive()) && is_own() {
            SessionDir(entry.path()).remove();
        }
    }
    remove_leftovers_in_default_places(uid);
}

/// The launcher that owns the session directory `name`. None if it is in another PID namespace, or `name` is no such directory.
fn owner(name: &str) -> Option<ProcessId> {
    let mut numbers = name.strip_prefix(SESSION_PREFIX)?.split('.').map(|word| word.parse::<u64>().ok());
    let (namespace, pid, start_time) = (numbers.next()??, numbers.next()??, numbers.next()??);
    (namespace == ipc::pid_namespace()).then_some(ProcessId { pid: u32::try_from(pid).ok()?, start_time })
}

/// Removes leftovers in the default places of Open MPI, which worlds of several nodes use.
fn remove_leftovers_in_default_places(uid: u32) {
    if !ipc::sees_all_processes() {
        return; // Names there do not contain the PID namespace.
    }
    let host = nix::unistd::gethostname().unwrap_or_default().to_string_lossy().into_owned();
    let sessions: Vec<_> = fs::read_dir(std::env::temp_dir().join(format!("ompi.{host}.{uid}")))
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|session| Some((session.file_name().to_str()?.strip_prefix("pid.")?.parse().ok()?, session.path())))
        .collect();
    if !sessions.is_empty() {
        let used = processes::pids_of_all_namespaces();
        for (_, session) in sessions.iter().filter(|(pid, _)| !used.contains(pid)) {
            // It does not matter if it is gone already.
            let _ = fs::remove_dir_all(session);
        }
    }
    ipc::sweep_mpi_segments();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn session_directories_of_live_launchers_and_of_other_pid_namespaces_stay() {
        let used = SessionDir::create(4_000_000).unwrap();
        let (namespace, me) = (ipc::pid_namespace(), ProcessId::current());
        let make = |namespace: u64, start_time: u64| {
            let name = format!("{SESSION_PREFIX}{namespace}.{}.{start_time}.1", me.pid);
            let session = SessionDir(Path::new(SESSION_PARENT).join(name));
            fs::create_dir(&session.0).unwrap();
            fs::write(session.0.join("vader_segment"), "").unwrap();
            session
        };
        let dead = make(namespace, me.start_time + 1);
        let elsewhere = make(namespace + 1, me.start_time + 1);
        remove_leftovers();
        assert!(used.0.exists() && elsewhere.0.exists() && !dead.0.exists());
        elsewhere.remove();
        used.remove();
        assert!(!used.0.exists());
    }

    #[test]
    fn ranks_of_one_node_use_shared_memory_unless_the_user_chose_otherwise() {
        let session = SessionDir(PathBuf::from("/d"));
        let of = |kind, set_by_user: &str| {
            let settings = session.settings(kind, |name| name == set_by_user);
            settings.into_iter().find(|(name, _)| *name == "OMPI_MCA_btl").map(|(_, value)| value)
        };
        assert_eq!(of(MpiKind::OpenMpi, "").unwrap(), "self,vader");
        assert_eq!(of(MpiKind::OpenMpi5, "").unwrap(), "self,sm");
        assert_eq!(of(MpiKind::OpenMpi, "OMPI_MCA_btl"), None);
        let host = |name: &str| vec![(name.to_owned(), 2)];
        assert!(is_one_node(&[], |_| false) && is_one_node(&host("localhost"), |_| true));
        assert!(!is_one_node(&[], |name| name == "PBS_JOBID") && !is_one_node(&host("no-such-host"), |_| false));
        assert!(!is_one_node(&[host("localhost"), host("b")].concat(), |_| false));
    }
}
