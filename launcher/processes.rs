//! Finds, waits for and kills processes; reads `/proc` for processes and ports.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::net::{Ipv4Addr, TcpListener};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use ipc::ProcessWatch;
use nix::sys::signal::Signal;

/// All processes below `pid`, nearest first.
pub(crate) fn descendants(pid: u32) -> Vec<u32> {
    let mut children: HashMap<u32, Vec<u32>> = HashMap::new();
    for process in all() {
        if let Some(parent) = parent(process) {
            children.entry(parent).or_default().push(process);
        }
    }
    let mut found = children.remove(&pid).unwrap_or_default();
    let mut next = 0;
    while let Some(process) = found.get(next) {
        found.extend(children.remove(process).unwrap_or_default());
        next += 1;
    }
    found
}

/// The process title of a rank, a worker or the relay.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Title {
    Rank(u32),
    /// Its tensor-parallel rank, and its model.
    Worker(u32, String),
    /// The relay of `--keep-connections`.
    Relay,
}

/// The title of `pid`; None if it has none of these.
pub(crate) fn title(pid: u32) -> Option<Title> {
    let line = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let line = String::from_utf8_lossy(&line).into_owned();
    let words = line.trim_end_matches('\0').strip_prefix("trireme: ")?;
    if words == ipc::RELAY {
        return Some(Title::Relay);
    }
    let (role, rest) = words.split_once(' ')?;
    let (number, rest) = rest.split_once(' ').unwrap_or((rest, ""));
    match role {
        "rank" => Some(Title::Rank(number.parse().ok()?)),
        "worker" => Some(Title::Worker(number.parse().ok()?, rest.to_owned())),
        _ => None,
    }
}

/// The scheduling state of `pid` in words; None if it has ended.
pub(crate) fn state(pid: u32) -> Option<&'static str> {
    Some(match stat(pid)?.first()?.as_str() {
        "T" | "t" => "stopped",
        "D" => "stuck in the kernel",
        "Z" | "X" => return None,
        _ => "running",
    })
}

/// Polls, with growing pauses, until `left` finds no more processes or `timeout` is over. Returns what it found last. `left`
/// receives the time since the start; `meanwhile` is called between two polls.
pub(crate) fn wait_until_gone(
    timeout: Duration,
    mut left: impl FnMut(Duration) -> Vec<u32>,
    mut meanwhile: impl FnMut(),
) -> Vec<u32> {
    let (start, mut pause) = (Instant::now(), Duration::from_millis(10));
    loop {
        let pids = left(start.elapsed());
        if pids.is_empty() || start.elapsed() >= timeout {
            return pids;
        }
        meanwhile();
        thread::sleep(pause.min(timeout.saturating_sub(start.elapsed())));
        pause = (pause * 3 / 2).min(Duration::from_secs(1));
    }
}

/// Logs which processes were killed but did not end, and where in the kernel each one waits.
pub(crate) fn log_stuck(pids: &[u32]) {
    for pid in pids {
        let read = |name: &str| fs::read_to_string(format!("/proc/{pid}/{name}")).unwrap_or_default();
        let (name, place) = (read("comm"), read("wchan"));
        let state = stat(*pid).and_then(|fields| fields.into_iter().next()).unwrap_or_default();
        let place = if matches!(place.as_str(), "" | "0") { "an unknown place" } else { place.as_str() };
        eprintln!(
            "launch: process {pid} ({}) was killed and does not end: state {state}, in {place} of the kernel; goes on without it",
            name.trim()
        );
    }
}

/// Kills the processes that `find` returns. It is called twice, before and after the pids are pinned, so that a process that
/// reuses the pid of another is not killed.
pub(crate) fn kill_all(find: impl Fn() -> Vec<u32>) {
    let watches: Vec<_> = find().into_iter().filter_map(|pid| ProcessWatch::new(pid).ok()).collect();
    let found_again = find();
    for watch in watches.iter().filter(|watch| found_again.contains(&watch.pid())) {
        // It may have ended since it was found.
        let _ = watch.signal(Signal::SIGKILL as i32);
    }
}

/// Resets `oom_score_adj` of `pid` to the default if this process has a negative one, which `pid` would inherit.
pub(crate) fn reset_oom_score(pid: u32) {
    let own = fs::read_to_string("/proc/self/oom_score_adj").ok().and_then(|text| text.trim().parse::<i32>().ok());
    if own.is_some_and(|score| score < 0) {
        // On failure `pid` keeps the score of this process.
        let _ = fs::write(format!("/proc/{pid}/oom_score_adj"), "0");
    }
}

/// Resident memory of `pid`, in bytes.
pub(crate) fn memory_bytes(pid: u32) -> Option<u64> {
    let statm = fs::read_to_string(format!("/proc/{pid}/statm")).ok()?;
    let pages: u64 = statm.split_ascii_whitespace().nth(1)?.parse().ok()?;
    let page = nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE).ok()??;
    Some(pages * page as u64)
}

/// Time since `pid` started.
pub(crate) fn uptime(pid: u32) -> Option<Duration> {
    let started: u64 = stat(pid)?.get(19)?.parse().ok()?;
    let per_second = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK).ok()??;
    let uptime = fs::read_to_string("/proc/uptime").ok()?;
    let now: f64 = uptime.split_ascii_whitespace().next()?.parse().ok()?;
    Some(Duration::from_secs_f64((now - started as f64 / per_second as f64).max(0.0)))
}

/// Processes of this user whose environment holds `name=value`, for which `is_wanted(value)`.
pub(crate) fn with_variable(name: &str, is_wanted: impl Fn(&str) -> bool) -> Vec<u32> {
    let start = format!("{name}=");
    all()
        .filter(|pid| {
            // The environment of another user's process cannot be read, and counts as empty.
            let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            let mut entries = environment.split(|byte| *byte == 0).filter_map(|entry| std::str::from_utf8(entry).ok());
            entries.any(|entry| entry.strip_prefix(&start).is_some_and(&is_wanted))
        })
        .collect()
}

/// Zombies: children of this process that have ended and were not reaped.
pub(crate) fn ended_children() -> Vec<u32> {
    let me = std::process::id();
    let is_zombie = |pid: &u32| stat(*pid).is_some_and(|fields| fields.first().is_some_and(|state| state == "Z"));
    all().filter(|pid| parent(*pid) == Some(me)).filter(is_zombie).collect()
}

/// The fields of `/proc/<pid>/stat` after the process name; the first is the state.
fn stat(pid: u32) -> Option<Vec<String>> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    Some(stat.get(stat.rfind(')')? + 1..)?.split_ascii_whitespace().map(str::to_owned).collect())
}

/// The pid of the process that listens on `port` of this machine. None if the port is free; Some(None) if the process is not
/// visible to this user.
pub(crate) fn listener(port: u16) -> Option<Option<u32>> {
    if port == 0 || TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).is_ok() {
        return None;
    }
    let sockets: Vec<String> = ["tcp", "tcp6"].iter().flat_map(|table| listening_sockets(table, port)).collect();
    Some(all().find(|pid| holds_one_of(*pid, &sockets)))
}

/// The sockets that listen on `port`, as `/proc/<pid>/fd` links to them: `socket:[inode]`.
fn listening_sockets(table: &str, port: u16) -> Vec<String> {
    const LISTEN: &str = "0A";
    let text = fs::read_to_string(format!("/proc/net/{table}")).unwrap_or_default();
    let socket = |line: &str| {
        let fields: Vec<&str> = line.split_ascii_whitespace().collect();
        let (local, state, inode) = (fields.get(1)?, fields.get(3)?, fields.get(9)?);
        let local_port = u16::from_str_radix(local.rsplit(':').next()?, 16).ok()?;
        (local_port == port && *state == LISTEN).then(|| format!("socket:[{inode}]"))
    };
    text.lines().skip(1).filter_map(socket).collect()
}

fn holds_one_of(pid: u32, sockets: &[String]) -> bool {
    let Ok(entries) = fs::read_dir(format!("/proc/{pid}/fd")) else { return false };
    entries
        .flatten()
        .filter_map(|entry| fs::read_link(entry.path()).ok())
        .any(|target| sockets.iter().any(|socket| target == Path::new(socket)))
}

/// The pids of all visible processes, in each PID namespace they belong to.
pub(crate) fn pids_of_all_namespaces() -> HashSet<u32> {
    let numbers = |pid: u32| -> Vec<u32> {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("NSpid:")).unwrap_or_default();
        line.split_ascii_whitespace().filter_map(|word| word.parse().ok()).collect()
    };
    all().flat_map(numbers).collect()
}

fn all() -> impl Iterator<Item = u32> {
    fs::read_dir("/proc").into_iter().flatten().flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

fn parent(pid: u32) -> Option<u32> {
    stat(pid)?.get(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listening_process_is_found_by_its_port() {
        let is_found_while_open = || {
            let socket = TcpListener::bind("127.0.0.1:0").unwrap();
            let port = socket.local_addr().unwrap().port();
            assert_eq!(listener(port), Some(Some(std::process::id())));
            drop(socket);
            listener(port).is_none()
        };
        // Another program may take a port that has just become free.
        assert!((0..10).any(|_| is_found_while_open()));
    }

    #[test]
    fn a_wait_ends_when_all_processes_are_gone_or_at_its_timeout() {
        let mut looks = vec![vec![7], vec![7], vec![]].into_iter();
        let mut num_pauses = 0;
        let left = wait_until_gone(Duration::from_secs(60), |_| looks.next().unwrap(), || num_pauses += 1);
        assert_eq!((left, num_pauses), (vec![], 2));
        let me = std::process::id();
        assert_eq!(wait_until_gone(Duration::from_millis(50), |_| vec![me], || {}), [me]);
    }

    #[test]
    fn only_what_is_found_twice_is_killed() {
        let child = || std::process::Command::new("sleep").arg("30").spawn().unwrap();
        let (mut first, mut second) = (child(), child());
        let num_looks = std::cell::Cell::new(0);
        kill_all(|| {
            num_looks.set(num_looks.get() + 1);
            if num_looks.get() == 1 { vec![first.id(), second.id()] } else { vec![first.id()] }
        });
        assert!(!first.wait().unwrap().success());
        assert!(second.try_wait().unwrap().is_none());
        second.kill().unwrap();
        second.wait().unwrap();
    }

    #[test]
    fn children_of_children_are_descendants() {
        let mut child = std::process::Command::new("sh").args(["-c", "sleep 30 & wait"]).spawn().unwrap();
        let start = std::time::Instant::now();
        let found = loop {
            let found = descendants(child.id());
            if !found.is_empty() || start.elapsed().as_secs() > 10 {
                break found;
            }
        };
        assert_eq!(found.len(), 1);
        assert!(descendants(std::process::id()).contains(&found[0]));
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(found[0] as i32), nix::sys::signal::SIGKILL).unwrap();
        child.wait().unwrap();
    }
}
