//! What is recorded, how long and where.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;

use crate::Contents;

/// Settings of a recorder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Directory of the recordings, one file for each start of the server.
    pub dir: PathBuf,
    /// How much is kept.
    pub contents: Contents,
    /// Most bytes of all recordings in the directory.
    pub max_bytes: u64,
    /// Length of the window, from the first request on.
    pub window: Duration,
}

impl Options {
    /// The defaults of the flags.
    pub fn new(dir: &Path) -> Self {
        let window = Duration::from_secs(600);
        Self { dir: dir.to_owned(), contents: Contents::Bodies, max_bytes: 1 << 30, window }
    }
}

/// Flags of a recording.
#[derive(Debug, Clone, Args)]
pub struct RecordArgs {
    /// Keep requests for models with their replies and times, and the steps of language models, in a file in this directory, for
    /// `trireme replay`; only this user can read the file
    #[arg(long, value_name = "DIR")]
    pub record: Option<PathBuf>,
    /// How much of requests and replies is kept
    #[arg(long, value_enum, default_value = "bodies", value_name = "CONTENTS")]
    pub record_contents: Contents,
    /// The recording ends so long after its first request
    #[arg(long, default_value_t = 600, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    pub record_seconds: u64,
    /// The recording ends when all recordings in the directory have so many bytes
    #[arg(long, default_value_t = 1 << 30, value_name = "BYTES", value_parser = clap::value_parser!(u64).range(1 << 16..))]
    pub record_max_bytes: u64,
}

impl RecordArgs {
    /// The settings; `None` without `--record`.
    pub fn options(&self) -> Option<Options> {
        let dir = self.record.clone()?;
        let window = Duration::from_secs(self.record_seconds);
        Some(Options { dir, contents: self.record_contents, max_bytes: self.record_max_bytes, window })
    }
}
