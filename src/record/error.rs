//! Why a recording cannot be written or read.

use std::path::PathBuf;

/// An error of this room.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // Fields are named in the messages.
pub enum RecordError {
    /// A file or directory could not be used.
    #[error("cannot {what} {}: {source}; name another directory with --record", .path.display())]
    Io { what: &'static str, path: PathBuf, source: std::io::Error },
    /// The recordings in the directory have the most bytes already.
    #[error(
        "the recordings in {} have {bytes} bytes, and --record-max-bytes allows {max_bytes}; remove some of them, or name another directory",
        .dir.display()
    )]
    Full { dir: PathBuf, bytes: u64, max_bytes: u64 },
    /// There is no recording.
    #[error("no recording is in {}: no file recording-….jsonl; `launch --record=DIR` makes one", .dir.display())]
    None { dir: PathBuf },
    /// The directory has several.
    #[error("{} has several recordings; name the file of one: {names}", .dir.display())]
    Several { dir: PathBuf, names: String },
    /// The file is none, or not whole.
    #[error("{}:{line}: {reason}", .path.display())]
    Format { path: PathBuf, line: usize, reason: String },
    /// Another program's version.
    #[error("{} has version {found} of the format, and this program reads {expected}; replay it with the program that made it", .path.display())]
    Version { path: PathBuf, found: u32, expected: u32 },
}
