//! Worlds that `mpirun` starts: Open MPI's, or Hydra, which is MPICH's.

use std::fs;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use ipc::ProcessId;

use crate::command::CommandLine;
use crate::flags::Bind;
use crate::mpi::{MpiKind, Mpirun};
use crate::{hosts, processes};

/// What `mpirun` is told about one world.
pub(crate) struct Step<'a> {
    pub(crate) mpirun: &'a Mpirun,
    pub(crate) oversubscribe: bool,
    /// Hosts and their numbers of ranks; empty for this one alone.
    pub(crate) hosts: &'a [(String, u32)],
    pub(crate) bind: Bind,
    /// A rank's share of its host's cores.
    pub(crate) cores_per_rank: u32,
    pub(crate) network: Option<&'a str>,
    /// Names of the variables of this environment.
    pub(crate) environment: &'a [String],
    /// Those of them that the world does not get.
    pub(crate) without: &'a [String],
}

/// Variables with these beginnings go to every host; `mpirun` by itself hands on only its own.
const HANDED_ON: [&str; 6] = ["CUDA_", "NCCL_", "UCX_", "TRIREME_", "RUST_LOG", "LD_LIBRARY_PATH"];

impl Step<'_> {
    /// Hydra hands on the whole environment, and lets ranks take turns without being told.
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

    fn options(&self) -> Vec<String> {
        let mut args = vec!["--allow-run-as-root".to_owned()];
        args.extend(match self.bind {
            // A rank's workers inherit its cores, and by default each rank would get one.
            Bind::None => vec!["--bind-to".to_owned(), "none".to_owned()],
            Bind::Numa => ["--map-by", "numa", "--bind-to", "numa"].map(str::to_owned).to_vec(),
            Bind::Core => ["--map-by", &format!("slot:PE={}", self.cores_per_rank), "--bind-to", "core"]
                .map(str::to_owned)
                .to_vec(),
        });
        if self.oversubscribe {
            args.extend(["--oversubscribe", "--mca", "mpi_yield_when_idle", "1"].map(str::to_owned));
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
                |name: &&String| HANDED_ON.iter().any(|start| name.starts_with(start)) && !self.without.contains(name);
            let is_set = |name: &&String| self.network.is_some() && *name == "NCCL_SOCKET_IFNAME";
            let names = self.environment.iter().filter(is_needed).filter(|name| !is_set(name));
            args.extend(names.flat_map(|name| ["-x".to_owned(), name.clone()]));
        }
        args
    }

    /// The host of a rank, as an option of its application.
    fn host_of(&self, rank: usize) -> Option<String> {
        let mut end = 0;
        self.hosts.iter().find_map(|(name, count)| {
            end += *count as usize;
            (rank < end).then(|| format!("{name}:{count}"))
        })
    }
}

/// NCCL takes interfaces, and no subnets: it then finds the network by itself.
pub(crate) fn nccl_network(network: &str) -> Option<String> {
    (!network.contains('/')).then(|| format!("NCCL_SOCKET_IFNAME={network}"))
}

/// One application context per rank.
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

/// The pid of rank 0 below `mpirun`; None when it is not there (yet), or on another node.
pub(crate) fn find_rank_0(mpirun: u32) -> Option<u32> {
    // Nearest first: a worker inherits its rank's environment, and stands below it.
    processes::descendants(mpirun).into_iter().find(|pid| {
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        let names: [&[u8]; 3] = [b"OMPI_COMM_WORLD_RANK=0", b"PMIX_RANK=0", b"PMI_RANK=0"];
        environment.split(|byte| *byte == 0).any(|entry| names.contains(&entry))
    })
}

/// A directory for what Open MPI keeps on this node while a world runs there: sessions and shared memory. Its name tells whose
/// it is, so that what a launcher left which was killed is known from what another PID namespace with the same `/dev/shm` uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Files(PathBuf);

/// Where those directories are.
const FILES_DIR: &str = "/dev/shm";
/// How their names begin: the namespace, pid and start time of the launcher follow, and the number of its start.
const FILES_NAME: &str = "trireme-mpi.";

impl Files {
    /// Makes that of start number `start` of this launcher.
    pub(crate) fn create(start: u32) -> std::io::Result<Self> {
        let ProcessId { pid, start_time } = ProcessId::current();
        let name = format!("{FILES_NAME}{}.{pid}.{start_time}.{start}", ipc::pid_namespace());
        let files = Self(Path::new(FILES_DIR).join(name));
        fs::DirBuilder::new().mode(0o700).create(&files.0)?;
        Ok(files)
    }

    /// Variables by which Open MPI uses it. They also keep its ranks from listening on networks: on one node messages go by
    /// shared memory, and `given` are settings of the user, who may know better.
    pub(crate) fn settings(&self, kind: MpiKind, given: impl Fn(&str) -> bool) -> Vec<(&'static str, String)> {
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
        settings.into_iter().filter(|(name, _)| !given(name)).collect()
    }

    /// Removes the directory with what is in it; gone already is as good.
    pub(crate) fn remove(&self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Whether Open MPI starts ranks on this node alone: batch systems whose variables it knows may have given it others.
pub(crate) fn is_one_node(placed: &[(String, u32)], has_variable: impl Fn(&str) -> bool) -> bool {
    const BATCH_SYSTEMS: [&str; 4] = ["SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "PE_HOSTFILE"];
    match placed {
        [] => !BATCH_SYSTEMS.into_iter().any(has_variable),
        [(host, _)] => hosts::is_here(host),
        _ => false,
    }
}

/// Removes what Open MPI keeps for worlds whose launcher was killed.
pub(crate) fn remove_leftovers() {
    let uid = nix::unistd::getuid().as_raw();
    for entry in fs::read_dir(FILES_DIR).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_own = || entry.metadata().is_ok_and(|meta| meta.is_dir() && meta.uid() == uid);
        if owner(&name).is_some_and(|owner| !owner.is_alive()) && is_own() {
            Files(entry.path()).remove();
        }
    }
    remove_leftovers_in_usual_places(uid);
}

/// Whose directory has this name; None when that is not of this PID namespace, or no such directory.
fn owner(name: &str) -> Option<ProcessId> {
    let mut numbers = name.strip_prefix(FILES_NAME)?.split('.').map(|word| word.parse::<u64>().ok());
    let (namespace, pid, start_time) = (numbers.next()??, numbers.next()??, numbers.next()??);
    (namespace == ipc::pid_namespace()).then_some(ProcessId { pid: u32::try_from(pid).ok()?, start_time })
}

/// Worlds of several nodes use the places of Open MPI's choice, whose names do not tell the PID namespace. Only who sees the
/// processes of all namespaces can tell what nobody uses; in a container these stay.
fn remove_leftovers_in_usual_places(uid: u32) {
    /// The first one of a machine (`PROC_PID_INIT_INO` of Linux).
    const FIRST_PID_NAMESPACE: u64 = 0xEFFF_FFFC;
    if ipc::pid_namespace() != FIRST_PID_NAMESPACE {
        return;
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
            // Gone already is as good.
            let _ = fs::remove_dir_all(session);
        }
    }
    let names = ["vader", "sm"].map(|transport| format!("{transport}_segment.{host}.{uid}."));
    let is_segment = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        names.iter().any(|start| name.starts_with(start)) && fs::metadata(path).is_ok_and(|meta| meta.uid() == uid)
    };
    let entries = fs::read_dir("/dev/shm").into_iter().flatten().flatten();
    let segments: Vec<_> = entries.map(|entry| entry.path()).filter(is_segment).collect();
    if segments.is_empty() {
        return;
    }
    let mapped = processes::mapped_files(Path::new("/dev/shm"));
    for segment in segments.iter().filter(|segment| !mapped.contains(*segment)) {
        let _ = fs::remove_file(segment);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_that_a_process_maps_stay_and_others_go() {
        let (uid, host) = (nix::unistd::getuid().as_raw(), nix::unistd::gethostname().unwrap());
        let start = format!("{}.{uid}.test{}", host.to_string_lossy(), std::process::id());
        let (prefix, name) = ("vader_segment.".parse().unwrap(), format!("{start}.0"));
        let made = ipc::Region::create(&prefix, &name, 64).unwrap();
        // Its maker mapped it before it had a name, by which `/proc` goes.
        let _used = ipc::Region::open(&prefix, &name).unwrap();
        let unused = PathBuf::from(format!("/dev/shm/vader_segment.{start}.1"));
        fs::write(&unused, "").unwrap();

        remove_leftovers_in_usual_places(uid);
        let sees_all = ipc::pid_namespace() == 0xEFFF_FFFC;
        assert!(made.path().exists() && unused.exists() != sees_all);
        let _ = fs::remove_file(unused);
    }

    #[test]
    fn directories_of_launchers_that_live_and_of_other_pid_namespaces_stay() {
        let used = Files::create(4_000_000).unwrap();
        let (namespace, me) = (ipc::pid_namespace(), ProcessId::current());
        let make = |namespace: u64, start_time: u64| {
            let name = format!("{FILES_NAME}{namespace}.{}.{start_time}.1", me.pid);
            let files = Files(Path::new(FILES_DIR).join(name));
            fs::create_dir(&files.0).unwrap();
            fs::write(files.0.join("vader_segment"), "").unwrap();
            files
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
    fn ranks_of_one_node_speak_by_shared_memory_unless_the_user_says_otherwise() {
        let files = Files(PathBuf::from("/d"));
        let of = |kind, given: &str| {
            let settings = files.settings(kind, |name| name == given);
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
