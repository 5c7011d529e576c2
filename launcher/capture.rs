//! The log of a world: everything that the launcher and its ranks write goes into one file, and from there to the
//! terminal when the launcher is in front. So `launch logs` shows all of it, and nobody waits for a slow terminal.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result};

/// How often the file is looked at for more.
const LOOK: Duration = Duration::from_millis(50);
/// A log longer than this is moved to `.old`, in place of the one before.
const MAX_BYTES: u64 = 64 << 20;

/// Standard output and error of this process, and of what it starts, go to the log while this lives.
pub(crate) struct Capture {
    log: PathBuf,
    /// None in the background.
    front: Option<Front>,
}

struct Front {
    terminal: File,
    stop: Arc<AtomicBool>,
    tail: Option<JoinHandle<()>>,
}

impl Capture {
    /// Captures into a new file at `log`; with `show`, what is written there also goes to standard error.
    pub(crate) fn start(log: &Path, show: bool) -> Result<Self> {
        let cannot = || format!("cannot write {}", log.display());
        let file = OpenOptions::new().create(true).append(true).open(log).with_context(cannot)?;
        if !show {
            // In the background, `--detach` has made the file.
            redirect(&file)?;
            return Ok(Self { log: log.to_owned(), front: None });
        }
        file.set_len(0).with_context(cannot)?;
        let terminal = File::from(duplicate(io::stderr())?);
        redirect(&file)?;
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, path, out) = (Arc::clone(&stop), log.to_owned(), terminal.try_clone()?);
        let tail = thread::spawn(move || follow(&path, out, &stopped));
        Ok(Self { log: log.to_owned(), front: Some(Front { terminal, stop, tail: Some(tail) }) })
    }

    /// Moves a log away that has grown too long; every writer appends, so the file can be cut under it.
    pub(crate) fn rotate(&self) {
        if std::fs::metadata(&self.log).is_ok_and(|meta| meta.len() > MAX_BYTES) {
            // What cannot be kept is cut all the same: the disk must not fill up.
            let _ = std::fs::copy(&self.log, self.log.with_extension("log.old"));
            let _ = OpenOptions::new().write(true).open(&self.log).and_then(|file| file.set_len(0));
        }
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        let Some(front) = &mut self.front else { return };
        // Later messages, of `main`, go to the terminal again.
        let _ = redirect(&front.terminal);
        front.stop.store(true, Ordering::Release);
        if let Some(tail) = front.tail.take() {
            let _ = tail.join();
        }
    }
}

fn duplicate(from: impl std::os::fd::AsFd) -> Result<OwnedFd> {
    from.as_fd().try_clone_to_owned().context("cannot duplicate standard error")
}

fn redirect(file: &File) -> Result<()> {
    nix::unistd::dup2_stdout(file).context("cannot redirect standard output")?;
    nix::unistd::dup2_stderr(file).context("cannot redirect standard error")
}

/// Copies what is in the log, and what comes, to `out`; until told to stop, and then the rest.
fn follow(log: &Path, mut out: File, stop: &AtomicBool) {
    let Ok(mut reader) = Follower::open(log) else { return };
    loop {
        let is_last = stop.load(Ordering::Acquire);
        let bytes = reader.more();
        // A terminal that is gone is no reason to end a world.
        let _ = out.write_all(&bytes);
        if bytes.is_empty() {
            if is_last {
                return;
            }
            thread::sleep(LOOK);
        }
    }
}

/// Reads a growing file from its start, over cuts.
pub(crate) struct Follower {
    file: File,
    at: u64,
}

impl Follower {
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        Ok(Self { file: File::open(path)?, at: 0 })
    }

    /// What is new, at most a piece of it.
    pub(crate) fn more(&mut self) -> Vec<u8> {
        const PIECE: u64 = 1 << 16;
        if self.file.metadata().is_ok_and(|meta| meta.len() < self.at) {
            self.at = 0;
        }
        let mut bytes = Vec::new();
        let read =
            self.file.seek(SeekFrom::Start(self.at)).and_then(|_| (&self.file).take(PIECE).read_to_end(&mut bytes));
        self.at += read.unwrap_or(0) as u64;
        bytes
    }
}
