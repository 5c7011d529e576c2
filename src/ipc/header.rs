//! The header of a region's file, and who owns the file.

use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;

use rustix::io::Errno;

use crate::error::IpcError;
use crate::process::ProcessId;

/// The first bytes of the file of every region, in all versions.
pub const REGION_MAGIC: [u8; 8] = *b"trireme\x01";
pub(crate) const MAGIC: u64 = u64::from_le_bytes(REGION_MAGIC);
pub(crate) const VERSION: u32 = 1;
/// Space for the header; the payload after it is aligned to two cache lines.
pub(crate) const HEADER_BYTES: usize = 128;

/// The header of every region file. It is written before the file has a name, so no process reads an incomplete one.
/// Fields keep their offsets in all versions, so that any build can remove stale regions of another.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Header {
    pub(crate) magic: u64,
    pub(crate) version: u32,
    owner_pid: u32,
    owner_start_time: u64,
    /// PID namespace of the owner, the only one in which its pid is valid.
    pid_namespace: u64,
    pub(crate) payload_bytes: u64,
}

/// The state of the owner of a region file.
pub(crate) enum Ownership {
    NotOurs,
    ForeignNamespace,
    Alive(ProcessId),
    Dead,
}

impl Header {
    pub(crate) fn of_current_process(payload_bytes: u64) -> Self {
        let owner = ProcessId::current();
        Self {
            magic: MAGIC,
            version: VERSION,
            owner_pid: owner.pid,
            owner_start_time: owner.start_time,
            pid_namespace: pid_namespace(),
            payload_bytes,
        }
    }

    /// Reads the header of an open file; `None` when the file is too short.
    pub(crate) fn read(file: &fs::File) -> io::Result<Option<Self>> {
        let mut bytes = [0; size_of::<Self>()];
        match std::os::unix::fs::FileExt::read_exact_at(file, &mut bytes, 0) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            Err(error) => return Err(error),
        }
        let u64_at = |at: usize| u64::from_ne_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        let u32_at = |at: usize| u32::from_ne_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        Ok(Some(Self {
            magic: u64_at(0),
            version: u32_at(8),
            owner_pid: u32_at(12),
            owner_start_time: u64_at(16),
            pid_namespace: u64_at(24),
            payload_bytes: u64_at(32),
        }))
    }

    pub(crate) fn ownership(&self) -> Ownership {
        let owner = ProcessId { pid: self.owner_pid, start_time: self.owner_start_time };
        match self {
            Self { magic, .. } if *magic != MAGIC => Ownership::NotOurs,
            Self { pid_namespace: made_in, .. } if *made_in != pid_namespace() => Ownership::ForeignNamespace,
            _ if owner.is_alive() => Ownership::Alive(owner),
            _ => Ownership::Dead,
        }
    }
}

/// The PID namespace of this process, the only one in which its pids are valid. 0 where `/proc` is missing.
pub fn pid_namespace() -> u64 {
    fs::metadata("/proc/self/ns/pid").map_or(0, |meta| std::os::unix::fs::MetadataExt::ino(&meta))
}

/// Whether this process sees those of all PID namespaces of the machine.
pub fn sees_all_processes() -> bool {
    /// The initial PID namespace of a machine (`PROC_PID_INIT_INO` of Linux).
    const INITIAL_PID_NAMESPACE: u64 = 0xEFFF_FFFC;
    pid_namespace() == INITIAL_PID_NAMESPACE
}

/// Opens a file in a directory that is writable by every user. Only a regular file that belongs to this process's user is accepted:
/// other users could change theirs at any time, and opening a pipe or a link could block or open another file.
pub(crate) fn open_own_file(path: &Path, writable: bool) -> Result<fs::File, IpcError> {
    let os = |action| move |source| IpcError::Os { action, path: path.to_owned(), source };
    let mut options = fs::OpenOptions::new();
    let flags = libc::O_NONBLOCK | libc::O_NOFOLLOW | libc::O_CLOEXEC | libc::O_NOCTTY;
    let file = match options.read(true).write(writable).custom_flags(flags).open(path) {
        Ok(file) => file,
        Err(error) => match Errno::from_io_error(&error) {
            Some(Errno::NOENT) => return Err(IpcError::Missing { path: path.to_owned() }),
            // A link, a socket, a directory.
            Some(Errno::LOOP | Errno::NXIO | Errno::ISDIR) => return Err(IpcError::NotOurs { path: path.to_owned() }),
            _ => return Err(os("open")(error)),
        },
    };
    let found = file.metadata().map_err(os("read"))?;
    match found.is_file() && found.uid() == rustix::process::geteuid().as_raw() {
        true => Ok(file),
        false => Err(IpcError::NotOurs { path: path.to_owned() }),
    }
}
