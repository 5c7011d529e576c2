//! Crash reports: one file for each world that died, with its exit status and the end of its log.

use std::fs;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};

use crate::state::WorldState;

/// Bytes of the log's end that a report contains.
const MAX_LOG_BYTES: u64 = 64 << 10;
/// Bytes that are read from a cause file at most.
const MAX_CAUSE_BYTES: u64 = 4096;
/// Characters of the cause that clients are shown at most.
const MAX_CAUSE_CHARS: usize = 300;
/// Reports that are kept for one port.
const MAX_REPORTS: usize = 16;

/// Writes the report of a world that died without being stopped; returns its path.
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
    // File names contain the time, so the order of names is that of time.
    reports.sort();
    for old in reports.iter().rev().skip(MAX_REPORTS - 1) {
        let _ = fs::remove_file(old);
    }
}

/// The end of a log, at most [`MAX_LOG_BYTES`].
pub(crate) fn end_of(log: &Path) -> String {
    let read = || -> std::io::Result<Vec<u8>> {
        let mut file = fs::File::open(log)?;
        let len = file.metadata()?.len();
        file.seek(SeekFrom::Start(len.saturating_sub(MAX_LOG_BYTES)))?;
        let mut bytes = Vec::new();
        file.take(MAX_LOG_BYTES).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    read()
        .map_or_else(|error| format!("(cannot be read: {error})"), |bytes| String::from_utf8_lossy(&bytes).into_owned())
}

/// Why a world ended: the first line that a rank wrote to `file`. The log is no source for this, since it contains client text.
pub(crate) fn cause(file: &Path) -> Option<String> {
    let mut text = Vec::new();
    fs::File::open(file).ok()?.take(MAX_CAUSE_BYTES).read_to_end(&mut text).ok()?;
    let text = String::from_utf8_lossy(&text);
    // Later lines may describe consequences.
    let first = text.lines().find(|line| !line.trim().is_empty())?;
    let plain = first.chars().map(|char| if char.is_control() { ' ' } else { char });
    let short: String = plain.take(MAX_CAUSE_CHARS).collect();
    Some(short.trim().trim_end_matches('.').to_owned())
}

/// A description of an exit status, for error messages to clients.
pub(crate) fn how(status: ExitStatus) -> String {
    match status.code() {
        // `mpirun` and `srun` report the signal that ended a rank as 128 plus its number.
        Some(code @ 129..=159) => format!("a rank ended by {}", ipc::describe_exit(ExitStatus::from_raw(code - 128))),
        _ => ipc::describe_exit(status),
    }
}

/// Kernel state and wait channel of each thread of these processes.
pub(crate) fn stacks(pids: &[u32]) -> String {
    pids.iter().map(|pid| ipc::thread_states(*pid)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cause_is_the_first_line_that_a_rank_wrote_without_control_characters() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("cause");
        assert_eq!(cause(&file), None);
        fs::write(&file, "").unwrap();
        assert_eq!(cause(&file), None);
        fs::write(&file, "rank 1 on node n2\u{1b}[2J\r has not answered.\nrank 0 was not heard\n").unwrap();
        assert_eq!(cause(&file).unwrap(), "rank 1 on node n2 [2J  has not answered");
        fs::write(&file, "x".repeat(100_000)).unwrap();
        assert_eq!(cause(&file).unwrap().len(), MAX_CAUSE_CHARS);
    }

    #[test]
    fn a_signal_is_named_whether_it_ended_the_process_or_is_in_its_exit_code() {
        assert!(how(ExitStatus::from_raw(9)).starts_with("signal 9 (SIGKILL"));
        assert!(how(ExitStatus::from_raw(137 << 8)).starts_with("a rank ended by signal 9 (SIGKILL"));
        assert_eq!(how(ExitStatus::from_raw(1 << 8)), "exit code 1");
    }
}
