//! What is written down when a world dies: one file that tells how, and what was logged before.

use std::fs;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};

use crate::state::WorldState;

/// Of the log, the last so many bytes.
const LOG_BYTES: u64 = 64 << 10;
/// Reports of one port that are kept.
const NUM_KEPT: usize = 16;

/// Writes the report of a world that died by itself; where it is.
pub(crate) fn report(world: &WorldState, how: &str) -> Result<PathBuf> {
    let start = format!("crash-{}-", world.http_port);
    remove_old(&world.crash_dir, &start);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let path = world.crash_dir.join(format!("{start}{}-world.txt", now.as_millis()));
    let text = format!(
        "world on http port {} of {} rank(s), {}\nended: {how}\nrestarts before: {}\n\nlogged before (the end of {}):\n{}",
        world.http_port,
        world.world_size,
        world.model_repository.display(),
        world.num_restarts,
        world.log.display(),
        end_of(&world.log)
    );
    fs::write(&path, text).with_context(|| format!("cannot write the crash report {}", path.display()))?;
    Ok(path)
}

fn remove_old(dir: &Path, start: &str) {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let is_ours = |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(start));
    let mut reports: Vec<_> = entries.map(|entry| entry.path()).filter(is_ours).collect();
    // Names hold the time.
    reports.sort();
    for old in reports.iter().rev().skip(NUM_KEPT - 1) {
        let _ = fs::remove_file(old);
    }
}

fn end_of(log: &Path) -> String {
    let read = || -> std::io::Result<Vec<u8>> {
        let mut file = fs::File::open(log)?;
        let len = file.metadata()?.len();
        file.seek(SeekFrom::Start(len.saturating_sub(LOG_BYTES)))?;
        let mut bytes = Vec::new();
        file.take(LOG_BYTES).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    read()
        .map_or_else(|error| format!("(cannot be read: {error})"), |bytes| String::from_utf8_lossy(&bytes).into_owned())
}

/// Why the last world ended, where a rank or `mpirun` has said so in the log.
pub(crate) fn cause(log: &Path) -> Option<String> {
    cause_in(&end_of(log))
}

fn cause_in(text: &str) -> Option<String> {
    let words = ["ends the world: ", "mpirun noticed that "];
    let told = |line: &str| words.iter().find_map(|word| line.split_once(word)).map(|(_, cause)| cause.to_owned());
    let cause = |line: &str| told(line).or_else(|| told_by_hydra(line));
    // What was said before it served is of worlds before.
    let (_, since) = text.rsplit_once("launch: serving after ").unwrap_or(("", text));
    let cause = since.lines().rev().find_map(cause)?;
    Some(cause.trim_end_matches(['.', '"', '}']).to_owned())
}

/// MPICH's launcher frames what it says: `=   PID 7 RUNNING AT a`.
fn told_by_hydra(line: &str) -> Option<String> {
    let (pid, node) = line.split_once("=   PID ")?.1.split_once(" RUNNING AT ")?;
    Some(format!("process with PID {pid} on node {node} died"))
}

/// Where each thread of these processes waits, as the kernel tells it.
pub(crate) fn stacks(pids: &[u32]) -> String {
    pids.iter().map(|pid| ipc::thread_states(*pid)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cause_is_what_a_rank_or_mpirun_said_last() {
        let text =
            "serving\nE1121 17:03 7 comm: ends the world: rank 1 on node n2 has not answered for 15s rank=0 code=1\n";
        assert_eq!(cause_in(text).unwrap(), "rank 1 on node n2 has not answered for 15s rank=0 code=1");
        let text = format!(
            "{text}mpirun noticed that process rank 0 with PID 7 on node a exited on signal 9 (Killed).\n---\n"
        );
        assert_eq!(cause_in(&text).unwrap(), "process rank 0 with PID 7 on node a exited on signal 9 (Killed)");
        let hydra =
            "=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n=   PID 8 RUNNING AT b\n=   EXIT CODE: 9\n";
        assert_eq!(cause_in(&format!("{text}{hydra}")).unwrap(), "process with PID 8 on node b died");
        assert_eq!(cause_in(&(text + "launch: serving after 1.0 s: http 1\n")), None);
    }
}
