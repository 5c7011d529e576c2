//! `launch logs`: what a world has logged, all of it or that of one rank.

use std::collections::{HashMap, VecDeque};
use std::io::Write;
use std::path::Path;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::capture::Follower;
use crate::state::WorldState;

/// How often the log is looked at for more.
const LOOK: Duration = Duration::from_millis(100);

/// The longest line that is kept in one piece.
const MAX_LINE_BYTES: usize = 1 << 20;

/// Which lines to print.
pub(crate) struct Wanted {
    /// Go on until the launcher has ended.
    pub(crate) follow: bool,
    pub(crate) rank: Option<u32>,
    /// The last so many of what is there.
    pub(crate) last: Option<usize>,
}

/// Prints the log of `world`.
pub(crate) fn print(world: &WorldState, wanted: &Wanted) -> Result<()> {
    let cannot = || format!("cannot read the log {}", world.log.display());
    let mut reader = Lines::open(&world.log).with_context(cannot)?;
    let mut filter = Filter { rank: wanted.rank, ranks: HashMap::new(), last: None };
    let mut out = std::io::stdout().lock();
    let mut write = |lines: &[String]| -> bool {
        // A reader that has left, as `head` does, has seen enough.
        lines.iter().try_for_each(|line| writeln!(out, "{line}")).and_then(|()| out.flush()).is_ok()
    };
    // Of what is there no more is kept than is wanted.
    let mut there: VecDeque<String> = VecDeque::new();
    while let Some(lines) = reader.more() {
        let kept = lines.into_iter().filter(|line| filter.keeps(line));
        match wanted.last {
            Some(last) => {
                there.extend(kept);
                there.drain(..there.len().saturating_sub(last));
            }
            None if write(&kept.collect::<Vec<_>>()) => {}
            None => return Ok(()),
        }
    }
    if !write(there.make_contiguous()) {
        return Ok(());
    }
    let mut is_last = !wanted.follow;
    while !is_last {
        is_last = !world.launcher().is_alive();
        while let Some(lines) = reader.more() {
            let kept: Vec<_> = lines.into_iter().filter(|line| filter.keeps(line)).collect();
            if !write(&kept) {
                return Ok(());
            }
        }
        thread::sleep(LOOK);
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

    /// Lines that are whole now; None when nothing is new.
    fn more(&mut self) -> Option<Vec<String>> {
        let bytes = self.follower.more();
        if bytes.is_empty() {
            return None;
        }
        self.unfinished.extend(bytes);
        let end = self.unfinished.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        // A line without an end is cut.
        let end = if self.unfinished.len() - end > MAX_LINE_BYTES { self.unfinished.len() } else { end };
        let whole: Vec<u8> = self.unfinished.drain(..end).collect();
        Some(String::from_utf8_lossy(&whole).lines().map(str::to_owned).collect())
    }
}

/// Lines of one rank: log lines carry a pid, and each rank's first line says which rank has it.
struct Filter {
    rank: Option<u32>,
    ranks: HashMap<u32, u32>,
    /// Whose the last line with a pid was; a line without belongs to the same.
    last: Option<u32>,
}

impl Filter {
    fn keeps(&mut self, line: &str) -> bool {
        let Some(wanted) = self.rank else { return true };
        if line.starts_with("launch: ") {
            self.last = None;
        } else if let Some(pid) = pid_of(line) {
            if let Some(rank) = rank_of(line) {
                self.ranks.insert(pid, rank);
            }
            self.last = self.ranks.get(&pid).copied();
        }
        self.last == Some(wanted)
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
        while let Some(more) = lines.more() {
            assert!(lines.unfinished.len() <= MAX_LINE_BYTES);
            pieces.extend(more);
        }
        assert!(pieces.len() >= 4 && pieces.concat().bytes().all(|byte| byte == b'x'), "{} pieces", pieces.len());
    }

    #[test]
    fn lines_belong_to_the_rank_whose_pid_they_carry() {
        let mut filter = Filter { rank: Some(1), ranks: HashMap::new(), last: None };
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
