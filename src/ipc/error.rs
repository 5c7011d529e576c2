use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// Why a region, ring or process watch could not be created or opened.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // Fields are named by their messages.
pub enum IpcError {
    #[error("`{text}` cannot be part of a shared-memory name: use 1 to {max} letters, digits, `_`, `-` or `.`")]
    BadName { text: String, max: usize },
    #[error(
        "{} belongs to the running process {pid}; stop it, or use another shared-memory prefix",
        .path.display()
    )]
    Owned { path: PathBuf, pid: u32 },
    #[error(
        "{} was made in another PID namespace, so its owner cannot be seen; remove the file once no container uses it",
        .path.display()
    )]
    ForeignNamespace { path: PathBuf },
    #[error("{} is not a region of this program; remove the file, or use another shared-memory prefix", .path.display())]
    NotOurs { path: PathBuf },
    #[error("{} has region version {found} but this program reads {expected}; use one build on all processes", .path.display())]
    Version { path: PathBuf, found: u32, expected: u32 },
    #[error("{} does not exist: its owner has not made it yet, or has ended", .path.display())]
    Missing { path: PathBuf },
    #[error(
        "no room for {bytes} bytes of shared memory at {}; enlarge it (`mount -o remount,size=…`, \
         or `--shm-size` in a container) or remove files from it",
        .path.display()
    )]
    Full { path: PathBuf, bytes: u64 },
    #[error("cannot {action} {}", .path.display())]
    Os { action: &'static str, path: PathBuf, source: io::Error },
    #[error(
        "bytes {offset}..+{len} of {} lie outside its {size} bytes or are not aligned to {align}",
        .path.display()
    )]
    Range { path: PathBuf, offset: usize, len: usize, size: usize, align: usize },
    #[error("{} has its {role} already: process {pid}", .path.display())]
    Taken { path: PathBuf, role: &'static str, pid: u32 },
    #[error("{} holds no ring", .path.display())]
    NotRing { path: PathBuf },
    #[error("cannot watch process {pid}")]
    Watch { pid: u32, source: io::Error },
}

/// Why a message was not sent. The receiver sees no part of it.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // Fields are named by their messages.
pub enum SendError {
    #[error("ring `{ring}` stayed full for {waited:?}: its receiver does not keep up or hangs")]
    Full { ring: String, waited: Duration },
    #[error("a message of {len} bytes does not fit ring `{ring}`, which takes at most {max}")]
    TooLarge { ring: String, len: usize, max: usize },
    #[error("the receiver of ring `{ring}` is gone (it was process {pid})")]
    PeerGone { ring: String, pid: u32 },
    #[error("ring `{ring}` is corrupt: its receiver claims position {head}, the sender is at {tail}")]
    Corrupt { ring: String, head: u64, tail: u64 },
}

/// Why no further message can be received.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // Fields are named by their messages.
pub enum RecvError {
    #[error("the sender of ring `{ring}` is gone (it was process {pid}) and all its messages were read")]
    PeerGone { ring: String, pid: u32 },
    #[error("ring `{ring}` is corrupt at position {head}: message length {len}, {available} bytes available")]
    Corrupt { ring: String, head: u64, len: u64, available: u64 },
}
