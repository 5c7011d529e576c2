//! The log of a world: all output of the launcher and its ranks goes to one file, and in the foreground a thread copies that file
//! to the terminal. So `launch logs` shows everything, and a slow terminal blocks no rank.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result};

/// How often the file is polled for new output.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// A log longer than this is moved to `.old`, which it replaces.
const MAX_BYTES: u64 = 64 << 20;

/// Redirects standard output and error of this process and its children to the log, until dropped.
pub(crate) struct Capture {
    log: PathBuf,
    /// None when the launcher runs in the background.
    terminal: Option<TerminalCopy>,
}

/// The thread that copies the log to the terminal.
struct TerminalCopy {
    terminal: File,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Capture {
    /// Captures into the file `log`. With `show` the file is emptied, and its contents are copied to standard error.
    pub(crate) fn start(log: &Path, show: bool) -> Result<Self> {
        let cannot = || format!("cannot write {}", log.display());
        let file = OpenOptions::new().create(true).append(true).open(log).with_context(cannot)?;
        if !show {
            // `--detach` has created the file.
            redirect(&file)?;
            return Ok(Self { log: log.to_owned(), terminal: None });
        }
        file.set_len(0).with_context(cannot)?;
        let terminal = File::from(duplicate(io::stderr())?);
        redirect(&file)?;
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, path, out) = (Arc::clone(&stop), log.to_owned(), terminal.try_clone()?);
        let thread = thread::spawn(move || follow(&path, out, &stopped));
        Ok(Self { log: log.to_owned(), terminal: Some(TerminalCopy { terminal, stop, thread: Some(thread) }) })
    }

    /// Moves an overlong log to `.old`. All writers append, so the file can be truncated while they write.
    pub(crate) fn rotate(&self) {
        if std::fs::metadata(&self.log).is_ok_and(|meta| meta.len() > MAX_BYTES) {
            // Truncates even if the copy failed: the disk must not fill up.
            let _ = std::fs::copy(&self.log, self.log.with_extension("log.old"));
            let _ = OpenOptions::new().write(true).open(&self.log).and_then(|file| file.set_len(0));
        }
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        let Some(copy) = &mut self.terminal else { return };
        // Later messages of `main` go to the terminal again.
        let _ = redirect(&copy.terminal);
        copy.stop.store(true, Ordering::Release);
        if let Some(thread) = copy.thread.take() {
            let _ = thread.join();
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

/// Copies the log to `out` as it grows, until `stop` is set and the log is copied to its end.
fn follow(log: &Path, mut out: File, stop: &AtomicBool) {
    let Ok(mut reader) = Follower::open(log) else { return };
    loop {
        let is_last = stop.load(Ordering::Acquire);
        let bytes = reader.read_new();
        // A closed terminal must not end the world.
        let _ = out.write_all(&bytes);
        if bytes.is_empty() {
            if is_last {
                return;
            }
            thread::sleep(POLL_INTERVAL);
        }
    }
}

/// Reads a growing file from its start. If the file was truncated, it starts over.
pub(crate) struct Follower {
    file: File,
    offset: u64,
}

impl Follower {
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        Ok(Self { file: File::open(path)?, offset: 0 })
    }

    /// The next bytes that were not read yet, at most 64 KiB; empty if there are none.
    pub(crate) fn read_new(&mut self) -> Vec<u8> {
        const MAX_BYTES: u64 = 1 << 16;
        if self.file.metadata().is_ok_and(|meta| meta.len() < self.offset) {
            self.offset = 0;
        }
        let mut bytes = Vec::new();
        let read = self
            .file
            .seek(SeekFrom::Start(self.offset))
            .and_then(|_| (&self.file).take(MAX_BYTES).read_to_end(&mut bytes));
        self.offset += read.unwrap_or(0) as u64;
        bytes
    }
}
