//! The hosts of a world: parses them, distributes ranks over them, and checks that ranks can run there.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};

use crate::command::quoted;
use crate::flags::WorldFlags;

/// Timeout of the check of one host.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);

/// What a host writes first when it is reached.
pub(crate) const REACHED: &str = "reached";

/// A host and its share of the ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Host {
    /// Its name, as `mpirun` and the remote shell take it.
    pub name: String,
    /// Number of ranks it takes at most; an equal share if not given.
    pub slots: Option<u32>,
}

/// The hosts that the flags name; an empty list stands for this host alone.
///
/// # Errors
/// If the host file cannot be read, or a host is malformed or named twice.
pub(crate) fn of_flags(flags: &WorldFlags) -> Result<Vec<Host>> {
    let hosts = match (&flags.hosts, &flags.hostfile) {
        (Some(list), _) => list.split(',').map(|word| host(word).with_context(|| format!("--hosts={list}"))).collect(),
        (None, Some(file)) => {
            let text = std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
            read_file(&text, file)
        }
        (None, None) => return Ok(Vec::new()),
    };
    let hosts: Vec<Host> = hosts?;
    if hosts.is_empty() {
        bail!("no host is named; write `--hosts=a:4,b:4`, or lines like `a slots=4` into the host file");
    }
    if let Some(twice) = (1..hosts.len()).find(|&i| hosts[..i].iter().any(|host| host.name == hosts[i].name)) {
        bail!("host `{}` is named twice; give it all of its ranks at once", hosts[twice].name);
    }
    Ok(hosts)
}

/// Parses a host file of Open MPI or MPICH: lines `a slots=4`, `a:4` or `a`, with comments after `#`.
fn read_file(text: &str, file: &Path) -> Result<Vec<Host>> {
    let mut hosts = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let line = line.split('#').next().unwrap_or_default().trim();
        if line.is_empty() {
            continue;
        }
        let place = || format!("{}:{}: `{line}`", file.display(), index + 1);
        let mut words = line.split_whitespace();
        let mut one = host(words.next().unwrap_or_default()).with_context(place)?;
        for word in words {
            match word.split_once('=') {
                Some(("slots", count)) => one.slots = Some(slots(count).with_context(place)?),
                Some(("max_slots" | "max-slots", _)) => {}
                _ => return Err(anyhow!("`{word}` is not understood, expected `slots=N`").context(place())),
            }
        }
        hosts.push(one);
    }
    Ok(hosts)
}

fn host(word: &str) -> Result<Host> {
    let word = word.trim();
    let (name, count) = match word.rsplit_once(':') {
        // More than one colon: an IPv6 address without a count.
        Some((name, count)) if !name.contains(':') => (name, Some(slots(count)?)),
        _ => (word, None),
    };
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:@%".contains(&byte);
    if name.is_empty() || name.starts_with('-') || !name.bytes().all(is_plain) {
        bail!("`{name}` is no host name");
    }
    Ok(Host { name: name.to_owned(), slots: count })
}

fn slots(text: &str) -> Result<u32> {
    match text.parse() {
        Ok(count @ 1..) => Ok(count),
        _ => bail!("`{text}` is no number of ranks, expected 1 or more"),
    }
}

/// Distributes the ranks over the hosts in order: each host is filled before the next one.
///
/// # Errors
/// If the hosts have room for fewer ranks, or a host would get no rank.
pub(crate) fn place(hosts: &[Host], world_size: u32, ranks_per_node: Option<u32>) -> Result<Vec<(String, u32)>> {
    let mut left = world_size;
    let mut placed = Vec::new();
    for (host, room) in hosts.iter().zip(rooms(hosts, world_size, ranks_per_node)) {
        let count = room.min(left);
        left -= count;
        if count == 0 {
            bail!(
                "host `{}` gets no rank: world_size is {world_size}, and the hosts before it have room for all; leave it out",
                host.name
            );
        }
        placed.push((host.name.clone(), count));
    }
    match left {
        0 => Ok(placed),
        _ => bail!(
            "world_size is {world_size}, but the hosts have room for {}; name more hosts, or start with --world_size={0}",
            world_size - left
        ),
    }
}

/// The number of ranks that each host takes at most.
pub(crate) fn rooms(hosts: &[Host], world_size: u32, ranks_per_node: Option<u32>) -> Vec<u32> {
    let even = world_size.div_ceil(hosts.len().max(1) as u32);
    hosts.iter().map(|host| host.slots.or(ranks_per_node).unwrap_or(even)).collect()
}

/// The placement in words: `a: ranks 0-3; b: ranks 4-7`.
pub(crate) fn describe(placed: &[(String, u32)]) -> String {
    let (mut text, mut first) = (String::new(), 0);
    for (name, count) in placed {
        let comma = if text.is_empty() { "" } else { "; " };
        let ranks = if *count == 1 { format!("rank {first}") } else { format!("ranks {first}-{}", first + count - 1) };
        write!(text, "{comma}{name}: {ranks}").expect("text takes more text");
        first += count;
    }
    text
}

/// The command that runs a program on another host: as configured for Open MPI or Hydra, else `ssh`.
pub(crate) fn remote_shell() -> Vec<String> {
    let names = ["OMPI_MCA_plm_rsh_agent", "PRTE_MCA_plm_ssh_agent", "HYDRA_LAUNCHER_EXEC"];
    let agent = names.iter().find_map(|name| std::env::var(name).ok()).filter(|agent| !agent.trim().is_empty());
    match agent {
        Some(agent) => agent.split_whitespace().map(str::to_owned).collect(),
        None => ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"].map(str::to_owned).to_vec(),
    }
}

/// Whether `name` is a name of this machine.
pub(crate) fn is_here(name: &str) -> bool {
    let here = nix::unistd::gethostname().unwrap_or_default().to_string_lossy().into_owned();
    name == "localhost" || name == here || here.split('.').next() == Some(name)
}

/// Checks that every host can be reached, has the same build of `trireme` and sees the model repository. With `may_be_lost`, a host that
/// cannot be reached is no error.
pub(crate) fn check(placed: &[(String, u32)], trireme: &Path, repository: &Path, may_be_lost: bool) -> Result<()> {
    let others: Vec<String> = placed.iter().map(|(name, _)| name.clone()).filter(|name| !is_here(name)).collect();
    if others.is_empty() {
        return Ok(());
    }
    let shell = remote_shell();
    check_shell(&shell, &others[0])?;
    let folder = std::env::current_dir().context("cannot tell the working directory")?;
    let program = quoted(&trireme.to_string_lossy());
    // Each line of the output is a step that succeeded.
    let script = format!(
        "echo {REACHED}; cd {} && sha256sum {program} && test -d {} && echo repository",
        quoted(&folder.to_string_lossy()),
        quoted(&repository.to_string_lossy())
    );
    let mine = output_of(Command::new("sh").arg("-c").arg(&script)).context("cannot check this host")?;
    let start_check = |host: String| {
        let (shell, script) = (shell.clone(), script.clone());
        thread::spawn(move || {
            let output = output_of(Command::new(&shell[0]).args(&shell[1..]).arg(&host).arg(script));
            (host, output)
        })
    };
    let threads: Vec<_> = others.into_iter().map(start_check).collect();
    let mut faults = BTreeMap::new();
    for thread in threads {
        let (host, theirs) = thread.join().map_err(|_| anyhow!("the check of a host failed"))?;
        let is_reached = theirs.as_ref().is_ok_and(|theirs| theirs.stdout.starts_with(REACHED.as_bytes()));
        if may_be_lost && !is_reached {
            continue;
        }
        let fault = match theirs {
            Ok(theirs) => fault(&host, &shell[0], &mine, &theirs, trireme, repository),
            Err(error) => Some(format!("host `{host}` cannot be checked by `{}`: {error:#}", shell[0])),
        };
        fault.map(|fault| faults.insert(host, fault));
    }
    match faults.is_empty() {
        true => Ok(()),
        false => bail!("{}", faults.into_values().collect::<Vec<_>>().join("\n")),
    }
}

fn check_shell(shell: &[String], host: &str) -> Result<()> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let is_there = shell[0].contains('/') && Path::new(&shell[0]).is_file()
        || std::env::split_paths(&path).any(|dir| dir.join(&shell[0]).is_file());
    if !is_there {
        bail!(
            "`{}` is not on this machine, and host `{host}` is reached by it; install it \
             (Debian, Ubuntu: `apt-get install openssh-client`), or name another in OMPI_MCA_plm_rsh_agent",
            shell[0]
        );
    }
    Ok(())
}

/// The fault that a host's output shows, if any.
fn fault(host: &str, shell: &str, mine: &Output, theirs: &Output, trireme: &Path, repository: &Path) -> Option<String> {
    let (stdout, mine) = (String::from_utf8_lossy(&theirs.stdout), String::from_utf8_lossy(&mine.stdout));
    let errors = String::from_utf8_lossy(&theirs.stderr);
    let why = errors.lines().last().unwrap_or("no error message").trim();
    let hash = |text: &str| text.lines().nth(1).and_then(|line| line.split_whitespace().next()).map(str::to_owned);
    if !stdout.starts_with(REACHED) {
        let try_it = format!("check its name, and that `{shell} {host} true` works without a password");
        return Some(format!("host `{host}` cannot be reached: {why}; {try_it}"));
    }
    match (hash(&stdout), hash(&mine)) {
        (None, _) => Some(format!(
            "host `{host}` has no {}: {why}; every host needs the same build at the same path",
            trireme.display()
        )),
        (Some(theirs), Some(mine)) if theirs != mine => Some(format!(
            "host `{host}` has another build of {}: sha256 {:.12}, here {mine:.12}; copy this one to it",
            trireme.display(),
            theirs
        )),
        _ if !stdout.contains("\nrepository") => Some(format!(
            "host `{host}` has no model repository at {}; every host needs it at the same path",
            repository.display()
        )),
        _ => None,
    }
}

/// Runs a command with a deadline, after which the command is killed.
fn output_of(command: &mut Command) -> Result<Output> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().context("cannot start it")?;
    let deadline = Instant::now() + ANSWER_TIMEOUT;
    while child.try_wait()?.is_none() {
        if Instant::now() >= deadline {
            let _ = child.kill();
            let _ = child.wait();
            bail!("no answer within {ANSWER_TIMEOUT:?}");
        }
        thread::sleep(Duration::from_millis(10));
    }
    Ok(child.wait_with_output()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(text: &str) -> Result<Vec<Host>> {
        text.split(',').map(host).collect()
    }

    fn placed(text: &str, world_size: u32) -> Result<String> {
        place(&list(text)?, world_size, None).map(|placed| describe(&placed))
    }

    #[test]
    fn ranks_fill_one_host_after_the_other() {
        assert_eq!(placed("a:4,b:4", 8).unwrap(), "a: ranks 0-3; b: ranks 4-7");
        assert_eq!(placed("a:4,b:4", 5).unwrap(), "a: ranks 0-3; b: rank 4");
        assert_eq!(placed("a,b", 6).unwrap(), "a: ranks 0-2; b: ranks 3-5");
        let two_each = place(&list("a,b,c:1").unwrap(), 5, Some(2)).unwrap();
        assert_eq!(describe(&two_each), "a: ranks 0-1; b: ranks 2-3; c: rank 4");
    }

    #[test]
    fn too_few_slots_and_hosts_without_a_rank_are_refused() {
        let refusal = |text, world_size| placed(text, world_size).unwrap_err().to_string();
        assert!(refusal("a:2,b:2", 8).contains("world_size is 8, but the hosts have room for 4"));
        assert!(refusal("a:4,b:4", 4).contains("host `b` gets no rank"));
    }

    #[test]
    fn host_files_of_open_mpi_and_of_mpich_are_read() {
        let text = "# the rack\na slots=4 max_slots=8\n\nb:4  # new\nc\n";
        let names = |hosts: Vec<Host>| hosts.into_iter().map(|host| (host.name, host.slots)).collect::<Vec<_>>();
        let read = names(read_file(text, Path::new("hosts")).unwrap());
        assert_eq!(read, [("a".into(), Some(4)), ("b".into(), Some(4)), ("c".into(), None)]);
    }

    #[test]
    fn an_error_in_a_host_file_names_its_line() {
        let refusal = |text| format!("{:#}", read_file(text, Path::new("hosts")).unwrap_err());
        assert_eq!(refusal("a\nb slots=0"), "hosts:2: `b slots=0`: `0` is no number of ranks, expected 1 or more");
        assert_eq!(refusal("a cpus=4"), "hosts:1: `a cpus=4`: `cpus=4` is not understood, expected `slots=N`");
        assert_eq!(refusal("-x"), "hosts:1: `-x`: `-x` is no host name");
    }
}
