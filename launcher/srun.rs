//! Worlds that Slurm's `srun` starts, inside an allocation.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, anyhow, bail};

use crate::command::{CommandLine, quoted};
use crate::container::Container;
use crate::flags::Bind;
use crate::mpi::MpiKind;
use crate::mpirun::nccl_network;

/// The Slurm allocation that this process runs in, read from Slurm's environment variables.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Allocation {
    /// Number of the job.
    pub job: u32,
    /// Nodes of the job, in Slurm's order, when it has more than one.
    pub nodes: Vec<String>,
    /// The plugins by which this Slurm starts MPI programs, from `srun --mpi=list`.
    pub mpi_types: BTreeSet<String>,
    /// The job's node, if it has only one and this process runs elsewhere.
    pub node: Option<String>,
}

impl Allocation {
    /// None outside an allocation. None also inside a step, where `srun` would wait for the step's own cores.
    pub fn from_env() -> Option<Self> {
        /// Larger ids are steps that Slurm creates itself, for batch scripts and interactive shells.
        const LAST_STEP: u32 = 0xffff_0000;
        let number = |name: &str| std::env::var(name).ok()?.parse::<u32>().ok();
        let job = number("SLURM_JOB_ID")?;
        if number("SLURM_STEP_ID").is_some_and(|step| step < LAST_STEP) {
            return None;
        }
        // If `srun` is missing, as in a container, the list is empty.
        let list = Command::new("srun").arg("--mpi=list").output();
        let text = list.map_or(Vec::new(), |list| [list.stdout, list.stderr].concat());
        let num_nodes = number("SLURM_JOB_NUM_NODES").unwrap_or(1);
        let is_remote = num_nodes == 1 && std::env::var_os("SLURMD_NODENAME").is_none();
        let list = std::env::var("SLURM_JOB_NODELIST").ok();
        let nodes = list.as_deref().filter(|_| num_nodes > 1).map_or(Vec::new(), host_names);
        let node = list.filter(|_| is_remote);
        Some(Self { job, nodes, mpi_types: mpi_types(&String::from_utf8_lossy(&text)), node })
    }

    /// The `--mpi` plugin that suits the MPI implementation: PMIx for Open MPI, PMI-2 for MPICH.
    pub(crate) fn mpi_type(&self, mpi: MpiKind) -> Result<&str> {
        let (name, wanted) = match mpi {
            MpiKind::OpenMpi | MpiKind::OpenMpi5 => ("Open MPI", "pmix"),
            MpiKind::Mpich => ("MPICH", "pmi2"),
        };
        // Plain `pmix` is the site's default version. A name with a version number is used only if it is missing.
        let newest = self.mpi_types.iter().rev().find(|name| name.starts_with(wanted));
        let found = self.mpi_types.get(wanted).or(newest);
        found.map(String::as_str).with_context(|| {
            let there: Vec<_> = self.mpi_types.iter().map(String::as_str).collect();
            format!(
                "this Slurm starts MPI programs by {}, and {name} needs {wanted}; use --backend=mpirun",
                if there.is_empty() { "no means".to_owned() } else { there.join(", ") }
            )
        })
    }
}

/// Expands a host list such as `n[1-2]`, by `scontrol`.
fn host_names(list: &str) -> Vec<String> {
    let text = output(Command::new("scontrol").args(["show", "hostnames", list]));
    text.map_or(Vec::new(), |text| text.lines().map(str::to_owned).collect())
}

/// Parses `srun --mpi=list`: one name per line, indented or after `srun: `.
fn mpi_types(text: &str) -> BTreeSet<String> {
    let versions = |line: &str| line.split_once("versions available:").map(|(_, rest)| rest.to_owned());
    let names = text.lines().flat_map(|line| {
        let line = line.strip_prefix("srun: ").unwrap_or(line);
        let words = versions(line).unwrap_or_else(|| line.to_owned());
        // Headings have several words.
        let words: Vec<String> =
            words.split([',', ' ', '\t']).filter(|word| !word.is_empty()).map(str::to_owned).collect();
        if words.len() == 1 || versions(line).is_some() { words } else { Vec::new() }
    });
    names.collect()
}

/// The parameters of the job step that runs one world.
pub(crate) struct Step<'a> {
    pub(crate) allocation: &'a Allocation,
    pub(crate) mpi: MpiKind,
    pub(crate) name: String,
    pub(crate) num_ranks: u32,
    pub(crate) oversubscribe: bool,
    /// Nodes and their numbers of ranks; empty for a job of one node.
    pub(crate) hosts: &'a [(String, u32)],
    pub(crate) bind: Bind,
    pub(crate) network: Option<&'a str>,
    pub(crate) container: Option<&'a Container>,
}

/// The name of the step that serves on `http_port`, by which [`signal`] finds it.
pub(crate) fn step_name(http_port: u16) -> String {
    format!("trireme-{http_port}")
}

/// The `srun` command of one step with one task per rank. A task learns its rank from `$SLURM_PROCID`, which a shell expands:
/// `per_rank` are arguments that contain it, quoted already.
pub(crate) fn command(step: &Step, common: CommandLine, per_rank: &[String]) -> Result<CommandLine> {
    let mut args = vec![
        format!("--mpi={}", step.allocation.mpi_type(step.mpi)?),
        format!("--job-name={}", step.name),
        format!("--nodes={}", step.hosts.len().max(1)),
        format!("--ntasks={}", step.num_ranks),
    ];
    if let Some(most) = step.hosts.iter().map(|&(_, count)| count).max() {
        args.extend([format!("--ntasks-per-node={most}"), "--distribution=block".to_owned()]);
    }
    // The user chose some of the job's nodes.
    if step.hosts.iter().map(|(name, _)| name).ne(&step.allocation.nodes) && !step.hosts.is_empty() {
        let names: Vec<_> = step.hosts.iter().map(|(name, _)| name.as_str()).collect();
        args.push(format!("--nodelist={}", names.join(",")));
    }
    let bind = match step.bind {
        Bind::None => "none",
        Bind::Numa => "ldoms",
        Bind::Core => "cores",
    };
    args.extend(["--kill-on-bad-exit=1".to_owned(), format!("--cpu-bind={bind}"), "--unbuffered".to_owned()]);
    if step.oversubscribe {
        args.push("--overcommit".to_owned());
    }
    if let Some(set) = environment(step) {
        args.push(format!("--export=ALL,{set}"));
    }
    args.extend(step.container.map(Container::srun_options).unwrap_or_default());
    let mut common_args = common.args.into_iter();
    let sub_command = common_args.next().unwrap_or_default();
    // The container runtime, if any, comes in front of the program.
    let program = CommandLine { program: "$0".into(), args: Vec::new() };
    let program = step.container.map_or(program.clone(), |container| container.wrap(program));
    let words = std::iter::once(program.program.display().to_string()).chain(program.args);
    let words: Vec<String> = words.map(|word| if word == "$0" { "\"$0\"".to_owned() } else { quoted(&word) }).collect();
    // `rank` is empty for rank 0, whose log file has no number in its name.
    let script = format!("exec {} {} {} \"$@\"", words.join(" "), quoted(&sub_command), per_rank.join(" "));
    let names_rank = per_rank.iter().any(|argument| argument.contains("$rank"));
    let script = if names_rank { format!("rank=${{SLURM_PROCID#0}}; {script}") } else { script };
    args.extend(["sh".to_owned(), "-c".to_owned(), script, common.program.display().to_string()]);
    args.extend(common_args);
    Ok(CommandLine { program: PathBuf::from("srun"), args })
}

/// Variables that ranks need in addition to the environment of this process.
fn environment(step: &Step) -> Option<String> {
    let mut set = Vec::new();
    if step.oversubscribe {
        set.push("OMPI_MCA_mpi_yield_when_idle=1".to_owned());
    }
    if let Some(network) = step.network {
        set.push(format!("OMPI_MCA_btl_tcp_if_include={network}"));
        set.extend(nccl_network(network));
    }
    (!set.is_empty()).then(|| set.join(","))
}

/// Sends `signal` to every rank of the step `name` of `job`. A SIGTERM to `srun` itself would kill the ranks.
pub(crate) fn signal(job: u32, name: &str, signal: &str) -> Result<()> {
    let steps = steps(job)?;
    let found: Vec<_> = steps.iter().filter(|(_, candidate)| candidate == name).map(|(step, _)| step).collect();
    if found.is_empty() {
        bail!("job {job} has no step `{name}`");
    }
    output(Command::new("scancel").arg(format!("--signal={signal}")).args(found)).map(drop)
}

/// Id and name of each step that the job has started, except Slurm's own.
pub(crate) fn steps(job: u32) -> Result<Vec<(String, String)>> {
    let text =
        output(Command::new("squeue").args(["--steps", "--noheader", "--format=%i %j"]).arg(format!("--jobs={job}")))?;
    let step = |line: &str| line.trim().split_once(' ').map(|(id, name)| (id.to_owned(), name.trim().to_owned()));
    let is_own = |id: &str| id.rsplit('.').next().is_some_and(|step| step.bytes().all(|byte| byte.is_ascii_digit()));
    Ok(text.lines().filter_map(step).filter(|(id, _)| is_own(id)).collect())
}

/// Runs a Slurm command and returns its standard output.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.output().map_err(|error| match error.kind() {
        ErrorKind::NotFound => anyhow!("there is no Slurm on this machine: `{name}` is not in PATH"),
        _ => anyhow::Error::new(error).context(format!("cannot run `{name}`")),
    })?;
    if !output.status.success() {
        bail!("`{name}` failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allocation(list: &str) -> Allocation {
        Allocation { job: 1, nodes: Vec::new(), mpi_types: mpi_types(list), node: None }
    }

    #[test]
    fn the_mpi_plugin_is_chosen_from_the_list_of_srun() {
        let new = "MPI plugin types are...\n\tpmix\n\tnone\n\tcray_shasta\n\tpmi2\nspecific pmix plugin versions available: pmix_v4\n";
        assert_eq!(allocation(new).mpi_type(MpiKind::OpenMpi).unwrap(), "pmix");
        let old = "srun: MPI types are...\nsrun: none\nsrun: pmi2\nsrun: pmix_v2\nsrun: pmix_v3\n";
        assert_eq!(allocation(old).mpi_type(MpiKind::OpenMpi5).unwrap(), "pmix_v3");
        assert_eq!(allocation(new).mpi_type(MpiKind::Mpich).unwrap(), "pmi2");
        let error = allocation("MPI plugin types are...\n\tnone\n\tpmi2\n").mpi_type(MpiKind::OpenMpi).unwrap_err();
        assert!(error.to_string().contains("none, pmi2, and Open MPI needs pmix; use --backend=mpirun"), "{error}");
    }
}
