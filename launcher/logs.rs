//! `launch logs`: prints the log of a world, all of it or the lines of one rank.

use std::collections::{HashMap, VecDeque};
use std::io::Write;
use std::path::Path;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::capture::Follower;
use crate::state::WorldState;

/// How often the log is polled for new lines.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// A longer line is printed in pieces.
const MAX_LINE_BYTES: usize = 1 << 20;

/// Which lines to print.
pub(crate) struct Wanted {
    /// Continue until the launcher has ended.
    pub(crate) follow: bool,
    pub(crate) rank: Option<u32>,
    /// Of the lines logged so far, print only this many from the end.
    pub(crate) last: Option<usize>,
}

/// Prints the log of `world`.
pub(crate) fn print(world: &WorldState, wanted: &Wanted) -> Result<()> {
    if let Some(rank) = wanted.rank.filter(|rank| *rank >= world.world_size) {
        bail!("the world on port {} has no rank {rank}: its last is {}", world.http_port, world.world_size - 1);
    }
    let cannot = || format!("cannot read the log {}", world.log.display());
    let mut reader = Lines::open(&world.log).with_context(cannot)?;
    let mut filter = RankFilter { rank: wanted.rank, ranks: HashMap::new(), last_rank: None };
    let mut out = std::io::stdout().lock();
    let mut write = |lines: &[String]| -> bool {
        // If the reader of the pipe has left, as `head` does, printing ends.
        lines.iter().try_for_each(|line| writeln!(out, "{line}")).and_then(|()| out.flush()).is_ok()
    };
    // No more existing lines are held in memory than are to be printed.
    let mut existing: VecDeque<String> = VecDeque::new();
    while let Some(lines) = reader.read_new() {
        let kept = lines.into_iter().filter(|line| filter.keeps(line));
        match wanted.last {
            Some(last) => {
                existing.extend(kept);
                existing.drain(..existing.len().saturating_sub(last));
            }
            None if write(&kept.collect::<Vec<_>>()) => {}
            None => return Ok(()),
        }
    }
    if !write(existing.make_contiguous()) {
        return Ok(());
    }
    let mut is_last = !wanted.follow;
    while !is_last {
        is_last = !world.launcher().is_alive();
        while let Some(lines) = reader.read_new() {
            let kept: Vec<_> = lines.into_iter().filter(|line| filter.keeps(line)).collect();
            if !write(&kept) {
                return Ok(());
            }
        }
        thread::sleep(POLL_INTERVAL);
    }
    Ok(())
}

struct Lines {
    follower: Follower,
    unfinished: Vec<u8>,
}

impl Lines {
    fn open(path: &Path) -> std::io::Result<Self> {
        Ok(Self { follower: Follower::open(path)?, unfinished: Vec::new() })
    }

    /// The lines that are complete now; None if the log has not grown.
    fn read_new(&mut self) -> Option<Vec<String>> {
        let bytes = self.follower.read_new();
        if bytes.is_empty() {
            return None;
        }
        self.unfinished.extend(bytes);
        let end = self.unfinished.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        // An overlong line is split.
        let end = if self.unfinished.len() - end > MAX_LINE_BYTES { self.unfinished.len() } else { end };
        let whole: Vec<u8> = self.unfinished.drain(..end).collect();
        Some(String::from_utf8_lossy(&whole).lines().map(str::to_owned).collect())
    }
}

/// Selects the lines of one rank. Log lines contain a pid, and the first line of each rank maps its pid to its rank.
struct RankFilter {
    rank: Option<u32>,
    ranks: HashMap<u32, u32>,
    /// The rank of the last line that had a pid. A line without a pid belongs to the same rank.
    last_rank: Option<u32>,
}

impl RankFilter {
    fn keeps(&mut self, line: &str) -> bool {
        let Some(wanted) = self.rank else { return true };
        if line.starts_with("launch: ") {
            self.last_rank = None;
        } else if let Some(pid) = pid_of(line) {
            if let Some(rank) = rank_of(line) {
                self.ranks.insert(pid, rank);
            }
            self.last_rank = self.ranks.get(&pid).copied();
        }
        self.last_rank == Some(wanted)
    }
}

/// `I1121 06:57:12.185303 4711 server.rs:42] "text"` → 4711.
fn pid_of(line: &str) -> Option<u32> {
    let mut words = line.split_ascii_whitespace();
    let (first, time, pid) = (words.next()?, words.next()?, words.next()?);
    let is_log_line = first.len() == 5 && first.starts_with(['I', 'W', 'E']) && time.len() == 15;
    is_log_line.then(|| pid.parse().ok())?
}

/// The rank in `… "rank 1 of 2 runs on node n"`.
fn rank_of(line: &str) -> Option<u32> {
    let (_, rest) = line.split_once("] \"rank ")?;
    let (rank, rest) = rest.split_once(' ')?;
    rest.starts_with("of ").then(|| rank.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_without_an_end_is_shown_in_pieces() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        std::fs::write(&path, vec![b'x'; 5 << 20]).unwrap();
        let mut lines = Lines::open(&path).unwrap();
        let mut pieces = Vec::new();
        while let Some(more) = lines.read_new() {
            assert!(lines.unfinished.len() <= MAX_LINE_BYTES);
            pieces.extend(more);
        }
        assert!(pieces.len() >= 4 && pieces.concat().bytes().all(|byte| byte == b'x'), "{} pieces", pieces.len());
    }

    #[test]
    fn lines_belong_to_the_rank_whose_pid_they_carry() {
        let mut filter = RankFilter { rank: Some(1), ranks: HashMap::new(), last_rank: None };
        let kept: Vec<bool> = [
            "launch: starts",
            "I1121 06:57:12.185303 4711 lib.rs:42] \"rank 0 of 2 runs on node a\"",
            "I1121 06:57:12.185303 4712 lib.rs:42] \"rank 1 of 2 runs on node a\"",
            "   more of it",
            "I1121 06:57:12.185303 4711 lib.rs:42] \"rank 1 is slow\"",
            "W1121 06:57:12.185303 4712 agent.rs:42] \"worker 1 says: x\"",
            "launch: ends",
            "a line of nobody",
        ]
        .map(|line| filter.keeps(line))
        .to_vec();
        assert_eq!(kept, [false, false, true, true, false, true, false, false]);
    }
}
