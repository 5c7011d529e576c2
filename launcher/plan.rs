//! Turns flags into the command that starts all ranks. The module is pure, so `--dry-run` shows exactly what would run.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use settings::DeviceKind;

use crate::command::{CommandLine, Starter, quoted};
use crate::container::Container;
use crate::flags::{Backend, Bind, WorldFlags};
use crate::hosts::{self, Host};
use crate::mpi::{MpiKind, Mpirun};
use crate::srun::{self, Allocation};
use crate::{local, mpirun};

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
}

/// The command that runs a world, and what the launcher must know about it.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The command.
    pub command: CommandLine,
    /// The program that the command starts ranks with.
    pub starter: Starter,
    /// Hosts and their numbers of ranks, in the order of ranks; empty for an unnamed single host or one that Slurm chooses.
    pub placed: Vec<(String, u32)>,
    /// The placement in words; `None` for one host.
    pub placement: Option<String>,
    /// Whether all ranks run on this node.
    pub is_one_node: bool,
    /// Environment variables to remove from the world's environment.
    pub without: Vec<String>,
    /// Whether rank 0 may run where it does not see the run directory of this node.
    pub rank_0_may_be_elsewhere: bool,
}

/// Makes the plan for a world. Errors name the flag that is wrong.
pub fn plan(flags: &WorldFlags, site: &Site) -> Result<Plan> {
    let ports = [flags.grpc_port, flags.http_port, flags.metrics_port];
    if let Some(port) = (0..2).find_map(|i| ports[i + 1..].contains(&ports[i]).then_some(ports[i])) {
        bail!("port {port} is given twice: gRPC, HTTP and metrics each need their own");
    }
    if flags.no_mpi && flags.world_size > 1 {
        bail!("--no-mpi starts one rank, but --world_size is {}; leave one of them out", flags.world_size);
    }
    if flags.tensorrt_llm_model_name.iter().any(String::is_empty) {
        bail!("--tensorrt_llm_model_name has an empty name: give names separated by single commas");
    }
    let starter = starter(flags, site)?;
    let placed = placed(flags, site, &starter)?;
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
    let rank_0_may_be_elsewhere = matches!(starter, Starter::Srun { .. }) || !placed.is_empty() || container.is_some();
    let has_variable = |name: &str| site.environment.iter().any(|its| its == name);
    let is_one_node = match starter {
        Starter::Local => true,
        Starter::Srun { .. } => false,
        Starter::Mpirun(_) => mpirun::is_one_node(&placed, has_variable),
    };
    let without = flags.keys.variables.clone();
    Ok(Plan { command, starter, placed, placement, is_one_node, without, rank_0_may_be_elsewhere })
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
    Ok(mpirun::Step { mpirun, oversubscribe, hosts, bind, cores_per_rank, network, environment, without })
}

/// The ranks of each host, if hosts are named or Slurm has allocated several nodes; otherwise empty.
fn placed(flags: &WorldFlags, site: &Site, starter: &Starter) -> Result<Vec<(String, u32)>> {
    let of_slurm = match (starter, &site.allocation) {
        (Starter::Srun { .. }, Some(allocation)) => allocation.nodes.iter().take(flags.world_size as usize),
        _ => [].iter().take(0),
    };
    let of_slurm: Vec<Host> = of_slurm.map(|name| Host { name: name.clone(), slots: None }).collect();
    let hosts = if site.hosts.is_empty() { &of_slurm } else { &site.hosts };
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
    if flags.log {
        args.push("--log-verbose=3".to_owned());
    }
    if let Some(precision) = flags.weight_only_precision {
        args.push(format!("--weight-only-precision={precision}"));
    }
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
    let mut command = any_rank_command(flags.world_size, flags, site);
    if flags.container_image.is_some() {
        command.program = site.trireme.clone();
    }
    command.args[0] = "plan".to_owned();
    command.args.insert(1, format!("--world-size={}", flags.world_size));
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
mod tests {
    use std::ffi::OsString;

    use super::*;
    use crate::flags::Flags;

    fn plan_of(line: &str) -> Result<String> {
        plan_in(None, line)
    }

    /// A job of one node, at a site with PMIx.
    fn job_7(mpi: &str) -> Option<Allocation> {
        Some(Allocation { job: 7, nodes: Vec::new(), mpi_types: [mpi.to_owned()].into(), node: None })
    }

    fn plan_in(allocation: Option<Allocation>, line: &str) -> Result<String> {
        Ok(whole_plan_in(allocation, line)?.command.to_string())
    }

    fn whole_plan_in(allocation: Option<Allocation>, line: &str) -> Result<Plan> {
        let words = std::iter::once("launch").chain(line.split_whitespace());
        let flags = Flags::parse_from_line(words.map(OsString::from))?.world;
        let hosts = hosts::of_flags(&flags)?;
        let environment = ["NCCL_DEBUG", "HOME"].map(str::to_owned).to_vec();
        let shm_prefix = "prefix".to_owned();
        let mpirun = match &flags.mpirun {
            // The kind follows from the name, because the program does not exist.
            Some(name) if name.ends_with("mpirun.mpich") => Mpirun { program: name.clone(), kind: MpiKind::Mpich },
            Some(name) => Mpirun { program: name.clone(), kind: MpiKind::OpenMpi5 },
            None => Mpirun::default(),
        };
        let trireme = "/opt/trireme".into();
        let site =
            Site { trireme, num_cores: 4, shm_prefix, mpirun, allocation, hosts, environment, ..Site::default() };
        plan(&flags, &Site { work_dir: "/work".into(), run_dir: "/run/me".into(), ..site })
    }

    #[test]
    fn ranks_run_on_the_named_hosts_with_the_environment_they_need() {
        let plan = whole_plan_in(None, "--world_size=3 --hosts=a:2,b:1 --network=eth1 --device=cuda").unwrap();
        assert_eq!(plan.placement.unwrap(), "placement: a: ranks 0-1; b: rank 2");
        let command = plan.command.to_string();
        let start = "mpirun --allow-run-as-root --bind-to none --mca btl_tcp_if_include eth1 --mca oob_tcp_if_include eth1 \
             -x NCCL_SOCKET_IFNAME=eth1 -x NCCL_DEBUG --host a:2 -n 1 /opt/trireme rank ";
        assert!(command.starts_with(start), "{command}");
        assert!(command.contains(" : --host b:1 -n 1 /opt/trireme rank "), "{command}");
        assert_eq!(command.matches("--network=eth1").count(), 3, "{command}");
    }

    #[test]
    fn ranks_run_in_a_container_with_the_mounts_they_need() {
        let line = "--world_size=2 --model_repo=models --container-image=site#trireme:1 --container-mounts=/data,/a:/b";
        let pyxis = plan_in(job_7("pmix"), line).unwrap();
        let step = "srun --mpi=pmix --job-name=trireme-8000 --nodes=1 --ntasks=2 --kill-on-bad-exit=1 --cpu-bind=none \
             --unbuffered '--container-image=site#trireme:1' \
             --container-mounts=/work/models:/work/models,/work:/work,/run/me:/run/me,/data:/data,/a:/b \
             --container-workdir=/work sh -c 'exec \"$0\" rank \
             --backend-config=python,shm-region-prefix-name=prefix${SLURM_PROCID}_ \"$@\"' trireme --model-repository=models ";
        assert!(pyxis.starts_with(step), "{pyxis}");
        let refusal = plan_of(line).unwrap_err().to_string();
        assert!(refusal.contains("pyxis is a part of Slurm's srun"), "{refusal}");
        assert!(plan_of("--container-mounts=/data").unwrap_err().to_string().contains("needs --container-image"));

        let line = "--world_size=2 --model_repo=/m --device=cuda --container-image=t.sif --container-runtime=apptainer";
        let inside = "apptainer exec --nv --bind=/m,/work,/run/me --pwd=/work t.sif trireme";
        let local = plan_of(line).unwrap();
        let start = format!("mpirun --allow-run-as-root --bind-to none -n 1 {inside} rank --model-repository=/m ");
        assert!(local.starts_with(&start) && local.contains(&format!(" : -n 1 {inside} rank ")), "{local}");
        let step = plan_in(job_7("pmix"), line).unwrap();
        let script = "sh -c 'exec apptainer exec --nv --bind=/m,/work,/run/me --pwd=/work t.sif \"$0\" rank ";
        assert!(step.contains(script) && step.contains("' trireme --model-repository=/m "), "{step}");
        let one =
            plan_of("--container-image=t.sif --container-runtime=apptainer --device=cpu --trireme=/opt/t").unwrap();
        assert!(
            one.starts_with(
                "apptainer exec --bind=/work/model_repository,/work,/run/me --pwd=/work t.sif /opt/t rank "
            ),
            "{one}"
        );
    }

    #[test]
    fn launchers_of_other_mpis_get_their_own_options() {
        let hydra = plan_of("--mpirun=mpirun.mpich --world_size=3 --hosts=a:2,b:1 --network=eth1 --bind=core").unwrap();
        let start = "mpirun.mpich -bind-to core:2 -iface eth1 -genv NCCL_SOCKET_IFNAME eth1 -hosts a:2,b:1 -n 1 /opt/trireme rank ";
        assert!(hydra.starts_with(start), "{hydra}");
        assert!(hydra.contains(" : -n 1 /opt/trireme rank ") && !hydra.contains("--host"), "{hydra}");
        assert!(plan_of("--mpirun=mpirun.mpich --world_size=9").unwrap().starts_with("mpirun.mpich -n 1 "));
        let error = plan_of("--mpirun=mpirun.mpich --world_size=2 --hosts=a,b --network=10.0.0.0/8").unwrap_err();
        assert!(error.to_string().contains("takes the name of an interface"), "{error}");
        let open_mpi_5 = plan_of("--mpirun=/opt/mpirun --world_size=2 --hosts=a,b --network=eth1").unwrap();
        let start = "/opt/mpirun --allow-run-as-root --bind-to none --mca btl_tcp_if_include eth1 --prtemca prte_if_include eth1 ";
        assert!(open_mpi_5.starts_with(start), "{open_mpi_5}");
        let by_pmi = plan_in(job_7("pmi2"), "--mpirun=mpirun.mpich --world_size=2").unwrap();
        assert!(by_pmi.starts_with("srun --mpi=pmi2 "), "{by_pmi}");
    }

    #[test]
    fn bound_ranks_get_their_share_of_cores() {
        let numa = plan_of("--world_size=2 --bind=numa").unwrap();
        assert!(numa.starts_with("mpirun --allow-run-as-root --map-by numa --bind-to numa -n 1 "), "{numa}");
        assert_eq!(numa.matches("--threads=2").count(), 2, "{numa}");
        let core = plan_of("--world_size=2 --bind=core").unwrap();
        assert!(core.starts_with("mpirun --allow-run-as-root --map-by slot:PE=2 --bind-to core -n 1 "), "{core}");
        let error = plan_of("--world_size=5 --bind=core").unwrap_err().to_string();
        assert!(error.contains("5 ranks on 4 cores take turns"), "{error}");
        let step = plan_in(job_7("pmix"), "--world_size=2 --bind=numa").unwrap();
        assert!(step.contains(" --cpu-bind=ldoms "), "{step}");
    }

    #[test]
    fn one_rank_runs_without_mpirun() {
        let expected = "/opt/trireme rank --model-repository=/models --grpc-port=8001 --http-port=8000 \
             --metrics-port=8002 --device=auto --backend-config=python,shm-region-prefix-name=prefix0_";
        assert_eq!(plan_of("--model_repo=/models").unwrap(), expected);
        assert_eq!(plan_of("--model_repo=/models --no_mpi --tritonserver /opt/trireme").unwrap(), expected);
    }

    #[test]
    fn each_rank_is_an_application_of_its_own_with_its_own_prefix_and_log_file() {
        let command = plan_of(
            "--world_size=3 --model_repo /models --http_port=9000 --grpc_port=9001 --metrics_port=9002 --log \
             --log-file=logs/world.txt --exit_timeout=7 --tensorrt_llm_model_name=llama,qwen --device=cpu -- --id=me",
        );
        let common = "/opt/trireme rank --model-repository=/models --grpc-port=9001 --http-port=9000 \
             --metrics-port=9002 --device=cpu";
        let rest = "--exit-timeout-secs=7 --log-verbose=3";
        let others = "--model-control-mode=explicit --load-model=llama --load-model=qwen --id=me";
        let expected = format!(
            "mpirun --allow-run-as-root --bind-to none \
             -n 1 {common} --backend-config=python,shm-region-prefix-name=prefix0_ {rest} --log-file=logs/world.txt \
             --backend-config=python,mpi-models=llama,qwen --id=me : \
             -n 1 {common} --backend-config=python,shm-region-prefix-name=prefix1_ {rest} --log-file=logs/world.rank1.txt {others} : \
             -n 1 {common} --backend-config=python,shm-region-prefix-name=prefix2_ {rest} --log-file=logs/world.rank2.txt {others}"
        );
        assert_eq!(command.unwrap(), expected);
    }

    #[test]
    fn the_precision_of_weights_is_passed_to_every_rank_and_to_the_memory_plan() {
        let command = plan_of("--world_size=2 --weight_only_precision=int8").unwrap();
        assert_eq!(command.matches("--weight-only-precision=int8").count(), 2, "{command}");
        assert!(!plan_of("--world_size=2").unwrap().contains("precision"));
        let words = ["launch", "--weight-only-precision=int4"].map(OsString::from);
        let flags = Flags::parse_from_line(words).unwrap().world;
        let command = memory_command(&flags, &Site::default()).to_string();
        assert!(command.contains("--weight-only-precision=int4"), "{command}");
        assert!(plan_of("--weight_only_precision=int2").is_err());
    }

    #[test]
    fn more_ranks_than_cores_oversubscribe() {
        let turns = "mpirun --allow-run-as-root --bind-to none --oversubscribe --mca mpi_yield_when_idle 1 -n 1 ";
        assert!(plan_of("--world_size=5").unwrap().starts_with(turns));
        assert!(plan_of("--world_size=2 --oversubscribe").unwrap().starts_with(turns));
        assert!(!plan_of("--world_size=4").unwrap().contains("oversubscribe"));
    }

    #[test]
    fn in_a_slurm_allocation_srun_starts_one_step_whose_tasks_get_their_ranks() {
        let step = "srun --mpi=pmix --job-name=trireme-8000 --nodes=1 --ntasks=3 --kill-on-bad-exit=1 --cpu-bind=none \
             --unbuffered sh -c 'rank=${SLURM_PROCID#0}; exec \"$0\" rank \
             --backend-config=python,shm-region-prefix-name=prefix${SLURM_PROCID}_ \
             --log-file=logs/world${rank:+.rank$rank}.txt \"$@\"' /opt/trireme --model-repository=/models \
             --grpc-port=8001 --http-port=8000 --metrics-port=8002 --device=auto --id=me";
        let line = "--world_size=3 --model_repo=/models --log-file=logs/world.txt";
        for backend in ["", "--backend=srun"] {
            assert_eq!(plan_in(job_7("pmix"), &format!("{line} {backend} -- --id=me")).unwrap(), step);
        }
        let turns = plan_in(job_7("pmix"), "--world_size=5").unwrap();
        assert!(turns.contains("--overcommit --export=ALL,OMPI_MCA_mpi_yield_when_idle=1 sh"), "{turns}");
    }

    #[test]
    fn the_backend_is_detected_and_one_that_cannot_work_is_refused() {
        let starts_with = |allocation, line, start: &str| {
            let command = plan_in(allocation, line).unwrap();
            assert!(command.starts_with(start), "{line}: {command}");
        };
        starts_with(None, "--world_size=2", "mpirun ");
        starts_with(job_7("pmi2"), "--world_size=2", "mpirun ");
        starts_with(job_7("pmix"), "--world_size=2 --backend=mpirun", "mpirun ");
        starts_with(job_7("pmix"), "", "/opt/trireme ");
        starts_with(None, "--backend=mpirun", "mpirun ");

        let refusal = |allocation, line| plan_in(allocation, line).unwrap_err().to_string();
        assert!(refusal(None, "--backend=srun").contains("needs a Slurm allocation"));
        assert!(refusal(job_7("pmi2"), "--backend=srun").contains("by pmi2, and Open MPI needs pmix"));
        assert!(refusal(None, "--backend=local --world_size=2").contains("--backend=local starts one rank"));
        let two_nodes = || job_7("pmix").map(|job| Allocation { nodes: vec!["n1".into(), "n2".into()], ..job });
        let spans =
            "srun --mpi=pmix --job-name=trireme-8000 --nodes=2 --ntasks=4 --ntasks-per-node=2 --distribution=block ";
        starts_with(two_nodes(), "--world_size=4", spans);
        let placement = whole_plan_in(two_nodes(), "--world_size=4").unwrap().placement.unwrap();
        assert_eq!(placement, "placement: n1: ranks 0-1; n2: ranks 2-3");
        let named = "srun --mpi=pmix --job-name=trireme-8000 --nodes=1 --ntasks=2 --ntasks-per-node=2 \
             --distribution=block --nodelist=n2 ";
        starts_with(two_nodes(), "--world_size=2 --hosts=n2", named);
    }

    #[test]
    fn flags_that_contradict_each_other_are_refused_with_the_reason() {
        assert!(plan_of("--http_port=8001").unwrap_err().to_string().contains("port 8001 is given twice"));
        assert!(plan_of("--no_mpi --world_size=2").unwrap_err().to_string().contains("--no-mpi starts one rank"));
        assert!(
            plan_of("--world_size=2 --tensorrt_llm_model_name=a,,b").unwrap_err().to_string().contains("empty name")
        );
    }
}
