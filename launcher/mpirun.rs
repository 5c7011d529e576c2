//! Worlds that `mpirun` starts: Open MPI's, or Hydra, which is MPICH's.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::flags::Bind;
use crate::mpi::{MpiKind, Mpirun};
use crate::plan::CommandLine;
use crate::processes;

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

/// Removes what `mpirun`, or others that were killed, left on this node: session directories, and the shared-memory
/// segments of Open MPI that no process maps any more.
pub(crate) fn remove_leftovers(mpirun: u32) {
    let uid = nix::unistd::getuid().as_raw();
    let host = nix::unistd::gethostname().unwrap_or_default().to_string_lossy().into_owned();
    let sessions = std::env::temp_dir().join(format!("ompi.{host}.{uid}"));
    for session in fs::read_dir(sessions).into_iter().flatten().flatten() {
        let owner = || -> Option<u32> { session.file_name().to_str()?.strip_prefix("pid.")?.parse().ok() };
        if owner().is_some_and(|pid| pid == mpirun || ipc::ProcessId::of(pid).is_none()) {
            // Gone already, as when mpirun ended in good order, is as good.
            let _ = fs::remove_dir_all(session.path());
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
        let (uid, host) = (nix::unistd::getuid(), nix::unistd::gethostname().unwrap());
        let start = format!("{}.{uid}.test{}", host.to_string_lossy(), std::process::id());
        let (prefix, name) = ("vader_segment.".parse().unwrap(), format!("{start}.0"));
        let made = ipc::Region::create(&prefix, &name, 64).unwrap();
        // Its maker mapped it before it had a name, by which `/proc` goes.
        let _used = ipc::Region::open(&prefix, &name).unwrap();
        let unused = PathBuf::from(format!("/dev/shm/vader_segment.{start}.1"));
        fs::write(&unused, "").unwrap();

        remove_leftovers(0);
        assert!(made.path().exists() && !unused.exists());
    }
}
