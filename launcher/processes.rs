//! What `/proc` tells of processes and ports.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};

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

/// The pid of the process that listens on `port` of this machine; None when the port is free.
/// Some(None) when it is in use by a process that cannot be seen.
pub(crate) fn listener(port: u16) -> Option<Option<u32>> {
    if port == 0 || TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).is_ok() {
        return None;
    }
    let sockets: Vec<String> = ["tcp", "tcp6"].iter().flat_map(|table| listening_sockets(table, port)).collect();
    Some(all().find(|pid| holds_one_of(*pid, &sockets)))
}

/// What links in `/proc/<pid>/fd` to sockets listening on `port` look like.
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

/// The files below `dir` that some process has mapped.
pub(crate) fn mapped_files(dir: &Path) -> HashSet<PathBuf> {
    let maps = all().filter_map(|pid| fs::read_to_string(format!("/proc/{pid}/maps")).ok());
    let files = |maps: String| -> Vec<PathBuf> {
        let paths = maps.lines().filter_map(|line| line.find('/').map(|at| PathBuf::from(&line[at..])));
        paths.filter(|path| path.starts_with(dir)).collect()
    };
    maps.flat_map(files).collect()
}

fn all() -> impl Iterator<Item = u32> {
    fs::read_dir("/proc").into_iter().flatten().flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

fn parent(pid: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.get(stat.rfind(')')? + 1..)?.split_ascii_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listening_process_is_found_by_its_port() {
        let listener_socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener_socket.local_addr().unwrap().port();
        assert_eq!(listener(port), Some(Some(std::process::id())));
        drop(listener_socket);
        assert_eq!(listener(port), None);
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
