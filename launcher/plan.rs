//! Turns flags into the command that starts all ranks. The module is pure, so `--dry-run` shows exactly what would run.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use settings::{DeviceKind, WeightPrecision};

use crate::command::{CommandLine, Starter, quoted};
use crate::container::Container;
use crate::flags::{Backend, Bind, WorldFlags};
use crate::hosts::{self, Host};
use crate::mpi::{MpiKind, Mpirun};
use crate::srun::{self, Allocation};
use crate::{local, mpirun, rank_flags};

/// The facts about this machine and environment that a plan depends on.
#[derive(Debug, Clone, Default)]
pub struct Site {
    /// The server program, unless the flags name one.
    pub trireme: PathBuf,
    /// Number of physical cores, which `mpirun` takes as its number of slots.
    pub num_cores: u32,
    /// Prefix of shared-memory names, before the rank. Differs from the default if another world runs here.
    pub shm_prefix: String,
    /// The `mpirun` that starts ranks without Slurm.
    pub mpirun: Mpirun,
    /// The Slurm allocation of this process, if any.
    pub allocation: Option<Allocation>,
    /// The hosts that the flags name; empty for this host alone.
    pub hosts: Vec<Host>,
    /// Names of this process' environment variables. Those that ranks need are passed on to other hosts.
    pub environment: Vec<String>,
    /// The working directory of this process, to which mounts of containers are relative.
    pub work_dir: PathBuf,
    /// The run directory, with the sockets between ranks and launcher.
    pub run_dir: PathBuf,
    /// Whether ranks can go on when others die, because each model has several replicas.
    pub keeps_world: bool,
}

/// The command that runs a world, and what the launcher must know about it.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The command.
    pub command: CommandLine,
    /// The program that the command starts ranks with.
    pub starter: Starter,
    /// The hosts that may run ranks, without a number for an equal share; empty for an unnamed single host or one that Slurm chooses.
    pub hosts: Vec<Host>,
    /// Hosts and their numbers of ranks, in the order of ranks; empty for an unnamed single host or one that Slurm chooses.
    pub placed: Vec<(String, u32)>,
    /// The placement in words; `None` for one host.
    pub placement: Option<String>,
    /// Whether all ranks run on this node.
    pub is_one_node: bool,
    /// Whether `mpirun` keeps the world when a rank dies. Rank 0 then decides, and the launcher ends the world after rank 0.
    pub keeps_world: bool,
    /// Environment variables to remove from the world's environment.
    pub without: Vec<String>,
    /// Whether rank 0 may run where it does not see the run directory of this node.
    pub rank_0_may_be_elsewhere: bool,
    /// The command that holds the connections of clients, with `--keep-connections` or `--idle-exit`.
    pub relay: Option<CommandLine>,
}

/// Makes the plan for a world. Errors name the flag that is wrong.
pub fn plan(flags: &WorldFlags, site: &Site) -> Result<Plan> {
    rank_flags::check(&flags.rank_flags)?;
    let ports = [flags.grpc_port, flags.http_port, flags.metrics_port];
    if let Some(port) = (0..2).find_map(|i| ports[i + 1..].contains(&ports[i]).then_some(ports[i])) {
        bail!("port {port} is given twice; gRPC, HTTP and metrics each need their own");
    }
    if flags.no_mpi && flags.world_size > 1 {
        bail!("--no-mpi starts one rank, but --world_size is {}; leave one of them out", flags.world_size);
    }
    if flags.tensorrt_llm_model_name.iter().any(String::is_empty) {
        bail!("--tensorrt_llm_model_name has an empty name: give names separated by single commas");
    }
    let starter = starter(flags, site)?;
    let hosts = hosts_of(flags, site, &starter);
    let placed = placed(flags, &hosts, &starter)?;
    let most = placed.iter().map(|&(_, count)| count).max().unwrap_or(flags.world_size);
    let oversubscribe = flags.oversubscribe || most > site.num_cores;
    if oversubscribe && flags.bind != Bind::None {
        bail!("{most} ranks on {} cores take turns, and cannot be bound to cores; leave --bind out", site.num_cores);
    }
    if flags.keys.has_files() {
        check_that_rank_0_is_here(&placed, &starter, site)?;
    }
    let container = Container::of(flags, &starter, &site.work_dir, &site.run_dir)?;
    let wrap = |command| container.iter().fold(command, |command, container| container.wrap(command));
    let ranks = || (0..flags.world_size).map(|rank| wrap(rank_command(rank, most, flags, site))).collect();
    let command = match (&starter, &site.allocation) {
        (Starter::Srun { step, .. }, Some(allocation)) => {
            let step = srun::Step {
                allocation,
                mpi: site.mpirun.kind,
                name: step.clone(),
                num_ranks: flags.world_size,
                oversubscribe,
                hosts: &placed,
                bind: flags.bind,
                network: flags.network.as_deref(),
                container: container.as_ref(),
            };
            let mut command = any_rank_command(most, flags, site);
            // These flags contain no keys but the paths of key files.
            command.args.extend(flags.keys.flags.iter().cloned());
            srun::command(&step, command, &srun_arguments(flags, site))?
        }
        (Starter::Local, _) => local::command(ranks()),
        _ => {
            let cores_per_rank = (site.num_cores / most).max(1);
            let step = mpirun_step(flags, site, &placed, oversubscribe, cores_per_rank)?;
            mpirun::command(&ranks(), &step)
        }
    };
    let placement = (placed.len() > 1).then(|| format!("placement: {}", hosts::describe(&placed)));
    let is_first_elsewhere = placed.first().is_some_and(|(host, _)| !hosts::is_here(host));
    let rank_0_may_be_elsewhere = matches!(starter, Starter::Srun { .. }) || is_first_elsewhere || container.is_some();
    if flags.relay_wait().is_some() && rank_0_may_be_elsewhere {
        let flag = if flags.idle_exit.is_some() { "--idle-exit" } else { "--keep-connections" };
        bail!(
            "{flag} needs rank 0 on this machine and outside of a container; leave it out, or name this machine first in \
             --hosts or --hostfile, and start without Slurm and --container-image"
        );
    }
    let relay = flags.relay_wait().map(|seconds| relay_command(seconds, most, flags, site));
    let has_variable = |name: &str| site.environment.iter().any(|its| its == name);
    let is_one_node = match starter {
        Starter::Local => true,
        Starter::Srun { .. } => false,
        Starter::Mpirun(_) => mpirun::is_one_node(&placed, has_variable),
    };
    let without = flags.keys.variables.clone();
    let keeps_world = keeps_world(&starter, site);
    Ok(Plan {
        command,
        starter,
        hosts,
        placed,
        placement,
        is_one_node,
        keeps_world,
        without,
        rank_0_may_be_elsewhere,
        relay,
    })
}

/// Returns an error if rank 0 runs on another host, where it cannot read the key files of this launcher.
fn check_that_rank_0_is_here(placed: &[(String, u32)], starter: &Starter, site: &Site) -> Result<()> {
    let first = placed.first().map(|(host, _)| host.as_str());
    let of_slurm = || site.allocation.as_ref().filter(|_| matches!(starter, Starter::Srun { .. }))?.node.as_deref();
    let Some(host) = first.or_else(of_slurm).filter(|host| !hosts::is_here(host)) else { return Ok(()) };
    bail!(
        "rank 0 runs on {host}, which does not get the keys of this command line and environment; write them into a \
         file there, and give @FILE as the key or --api-key-file=FILE"
    )
}

fn keeps_world(starter: &Starter, site: &Site) -> bool {
    site.keeps_world && *starter == Starter::Mpirun(MpiKind::OpenMpi)
}

fn mpirun_step<'a>(
    flags: &'a WorldFlags,
    site: &'a Site,
    hosts: &'a [(String, u32)],
    oversubscribe: bool,
    cores_per_rank: u32,
) -> Result<mpirun::Step<'a>> {
    let network = flags.network.as_deref();
    if site.mpirun.kind == MpiKind::Mpich && network.is_some_and(|name| name.contains('/')) {
        bail!("MPICH's launcher takes the name of an interface for --network, such as `eth0`, and no subnet");
    }
    let (mpirun, bind, environment) = (&site.mpirun, flags.bind, &site.environment[..]);
    let without = &flags.keys.variables[..];
    let keeps_world = keeps_world(&Starter::Mpirun(mpirun.kind), site);
    Ok(mpirun::Step { mpirun, oversubscribe, hosts, bind, cores_per_rank, network, environment, without, keeps_world })
}

/// The hosts that are named, or the nodes that Slurm has allocated if they are several; otherwise empty.
fn hosts_of(flags: &WorldFlags, site: &Site, starter: &Starter) -> Vec<Host> {
    let of_slurm = match (starter, &site.allocation) {
        (Starter::Srun { .. }, Some(allocation)) => allocation.nodes.iter().take(flags.world_size as usize),
        _ => [].iter().take(0),
    };
    let of_slurm = of_slurm.map(|name| Host { name: name.clone(), slots: None });
    if site.hosts.is_empty() { of_slurm.collect() } else { site.hosts.clone() }
}

/// The ranks of each host; empty without hosts.
fn placed(flags: &WorldFlags, hosts: &[Host], starter: &Starter) -> Result<Vec<(String, u32)>> {
    if hosts.is_empty() {
        return Ok(Vec::new());
    }
    if *starter == Starter::Local && hosts.len() > 1 {
        bail!("one rank runs on one host, and {} are named; raise --world_size", hosts.len());
    }
    hosts::place(hosts, flags.world_size, flags.ranks_per_node)
}

fn starter(flags: &WorldFlags, site: &Site) -> Result<Starter> {
    let is_one = flags.world_size == 1;
    let by_srun =
        |allocation: &Allocation| Starter::Srun { job: allocation.job, step: srun::step_name(flags.http_port) };
    Ok(match (flags.backend, &site.allocation) {
        _ if flags.no_mpi => Starter::Local,
        (Backend::Local, _) if !is_one => {
            bail!("--backend=local starts one rank, but --world_size is {}; leave one of them out", flags.world_size)
        }
        (Backend::Srun, None) => {
            bail!(
                "--backend=srun needs a Slurm allocation; start it in a batch job (`launch sbatch`) or below `salloc`"
            )
        }
        (Backend::Srun, Some(allocation)) => by_srun(allocation),
        (Backend::Local, _) => Starter::Local,
        (Backend::Auto, _) if is_one && site.hosts.is_empty() => Starter::Local,
        (Backend::Auto, Some(allocation)) if allocation.mpi_type(site.mpirun.kind).is_ok() => by_srun(allocation),
        (Backend::Auto | Backend::Mpirun, _) => Starter::Mpirun(site.mpirun.kind),
    })
}

fn rank_command(rank: u32, ranks_per_node: u32, flags: &WorldFlags, site: &Site) -> CommandLine {
    let mut command = any_rank_command(ranks_per_node, flags, site);
    let args = &mut command.args;
    let own = args.len() - flags.rank_flags.len();
    let mut rest = args.split_off(own);
    if let Some(file) = log_file(rank, flags) {
        args.push(format!("--log-file={}", file.display()));
    }
    if let (0, Some(bytes)) = (rank, flags.multimodal_gpu0_cuda_mem_pool_bytes) {
        args.push(format!("--cuda-memory-pool-byte-size=0:{bytes}"));
    }
    if rank == 0 && flags.world_size > 1 && flags.tensorrt_llm_model_name != ["tensorrt_llm"] {
        args.push(format!("--backend-config=python,mpi-models={}", flags.tensorrt_llm_model_name.join(",")));
    }
    if rank > 0 {
        args.push("--model-control-mode=explicit".to_owned());
        args.extend(flags.tensorrt_llm_model_name.iter().map(|name| format!("--load-model={name}")));
    }
    args.append(&mut rest);
    if rank == 0 {
        args.extend(flags.keys.flags.iter().cloned());
    }
    args.insert(NUM_FIRST_ARGS, format!("--backend-config=python,shm-region-prefix-name={}{rank}_", site.shm_prefix));
    command
}

/// The relay has the flags of rank 0, for its ports.
fn relay_command(seconds: u64, ranks_per_node: u32, flags: &WorldFlags, site: &Site) -> CommandLine {
    let mut command = rank_command(0, ranks_per_node, flags, site);
    command.args[0] = ipc::RELAY.to_owned();
    command.args.insert(1, format!("--relay-wait={seconds}"));
    if let Some(seconds) = flags.idle_exit {
        command.args.insert(1, format!("--relay-idle={seconds}"));
    }
    command
}

/// Number of arguments of [`any_rank_command`] after which the prefix of shared memory is inserted.
const NUM_FIRST_ARGS: usize = 6;

/// The part of the command that is the same for every rank. The user's flags for ranks come last.
fn any_rank_command(ranks_per_node: u32, flags: &WorldFlags, site: &Site) -> CommandLine {
    let mut args = vec![
        "rank".to_owned(),
        format!("--model-repository={}", flags.model_repo.display()),
        format!("--grpc-port={}", flags.grpc_port),
        format!("--http-port={}", flags.http_port),
        format!("--metrics-port={}", flags.metrics_port),
        format!("--device={}", flags.device),
    ];
    assert_eq!(args.len(), NUM_FIRST_ARGS, "the prefix of shared memory follows these");
    if let Some(seconds) = flags.exit_timeout {
        args.push(format!("--exit-timeout-secs={seconds}"));
    }
    args.extend(flags.id.as_ref().map(|id| format!("--id={id}")));
    if flags.log {
        args.push("--log-verbose=3".to_owned());
    }
    let usual = flags.use_weight_only.then_some(WeightPrecision::Int8);
    if let Some(precision) = flags.weight_only_precision.or(usual) {
        args.push(format!("--weight-only-precision={precision}"));
    }
    args.extend(flags.kv_cache_dtype.map(|kind| format!("--kv-cache-dtype={kind}")));
    args.extend(flags.kv_cache_host_memory.map(|size| format!("--kv-cache-host-memory={size}")));
    args.extend(flags.kv_cache_disk.map(|size| format!("--kv-cache-disk={size}")));
    args.extend(flags.kv_cache_disk_dir.as_ref().map(|dir| format!("--kv-cache-disk-dir={}", dir.display())));
    if let Some(network) = &flags.network {
        args.push(format!("--network={network}"));
    }
    if flags.bind != Bind::None && flags.device != DeviceKind::Cuda {
        // Otherwise ranks would divide the cores that one of them is bound to.
        args.push(format!("--threads={}", (site.num_cores / ranks_per_node).max(1)));
    }
    args.extend(flags.rank_flags.iter().cloned());
    let in_image = flags.container_image.as_ref().map(|_| PathBuf::from("trireme"));
    let program = flags.trireme.clone().or(in_image).unwrap_or_else(|| site.trireme.clone());
    CommandLine { program, args }
}

/// The command that prints the memory that the world would take, with the flags of its ranks.
pub fn memory_command(flags: &WorldFlags, site: &Site) -> CommandLine {
    let placed = plan(flags, site).map_or(Vec::new(), |plan| plan.placed);
    let ranks_per_node = placed.iter().map(|&(_, count)| count).max().unwrap_or(flags.world_size);
    let mut command = any_rank_command(ranks_per_node, flags, site);
    if flags.container_image.is_some() {
        command.program = site.trireme.clone();
    }
    command.args[0] = "plan".to_owned();
    command.args.insert(1, format!("--world-size={}", flags.world_size));
    if ranks_per_node < flags.world_size {
        command.args.insert(2, format!("--ranks-per-node={ranks_per_node}"));
    }
    command
}

/// What differs between the ranks of a step, for a shell that knows its rank as `$SLURM_PROCID`.
///
/// Ranks other than 0 get no models to load: they take orders from rank 0 alone.
fn srun_arguments(flags: &WorldFlags, site: &Site) -> Vec<String> {
    let prefix = quoted(&format!("--backend-config=python,shm-region-prefix-name={}", site.shm_prefix));
    let mut args = vec![format!("{prefix}${{SLURM_PROCID}}_")];
    if let (Some(first), Some(second)) = (log_file(0, flags), log_file(1, flags)) {
        let (first, second) = (first.display().to_string(), second.display().to_string());
        // Other ranks insert `.rank<i>` into rank 0's file name.
        let start = second.rfind(".rank1").unwrap_or(second.len());
        let name = quoted(&format!("--log-file={}", &first[..start]));
        let extension = &first[start..];
        let extension = if extension.is_empty() { String::new() } else { quoted(extension) };
        args.push(format!("{name}${{rank:+.rank$rank}}{extension}"));
    }
    args
}

/// `log.txt` for rank 0, `log.rank1.txt` for rank 1. None if ranks do not log to files.
fn log_file(rank: u32, flags: &WorldFlags) -> Option<PathBuf> {
    let default = flags.log.then(|| PathBuf::from("triton_log.txt"));
    let file = flags.log_file.clone().or(default)?;
    if rank == 0 {
        return Some(file);
    }
    let stem = file.file_stem().unwrap_or_default().to_string_lossy();
    let extension = file.extension().map(|extension| format!(".{}", extension.to_string_lossy()));
    let name = format!("{stem}.rank{rank}{}", extension.unwrap_or_default());
    Some(file.parent().unwrap_or(Path::new("")).join(name))
}

#[cfg(test)]
mod tests;
