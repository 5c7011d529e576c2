//! Objects of POSIX shared memory: the check that a client may use one, and its opening.

use std::fs::File;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::Path;

use rustix::fs::{Mode, OFlags};
use serving::{InferError, Limit, Limits};

/// The shared-memory objects that clients may register.
#[derive(Debug, Clone, Default)]
pub struct ClientObjects {
    /// Prefixes of names that are reserved for the server.
    pub reserved_prefixes: Vec<String>,
    /// The first bytes of each object of this server and of other Trireme servers; empty for no check.
    pub reserved_magic: Vec<u8>,
    /// If not empty, objects of clients must have one of these prefixes.
    pub allowed_prefixes: Vec<String>,
}

/// Prefixes of objects of other programs in `/dev/shm`: MPI and its transports, NCCL, semaphores. `psm_…` is not among them,
/// because Python's `shared_memory` uses it.
const FOREIGN_PREFIXES: [&str; 25] = [
    "vader_segment",
    "sm_segment",
    "smsc",
    "mca_",
    "osc_",
    "coll_",
    "ompi",
    "openmpi",
    "open_mpi",
    "opal",
    "orte",
    "prte",
    "pmix",
    "mpich",
    "MPICH",
    "hwloc",
    "nccl-",
    "ucx",
    "ucp_",
    "uct_",
    "psm_shm",
    "psm2",
    "psm3",
    "cma_",
    "sem.",
];

impl ClientObjects {
    /// Opens an object. Returns the file, its length, and its device and inode.
    ///
    /// # Errors
    /// When clients may not use the object, or it cannot be opened.
    pub(super) fn open(&self, key: &str, limits: &Limits) -> Result<(File, u64, (u64, u64)), InferError> {
        limits.check(Limit::NameBytes, key.len())?;
        let object = key.strip_prefix('/').unwrap_or(key);
        if object.is_empty() || object.contains('/') || object == "." || object == ".." {
            return Err(InferError::internal(format!(
                "Unable to open shared memory region: '{key}' is not the name of an object"
            )));
        }
        self.check_name(key, object)?;
        // Links are not followed, and opening a pipe does not block.
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let opened = rustix::fs::open(Path::new("/dev/shm").join(object), flags, Mode::empty());
        let file = File::from(opened.map_err(|error| cannot_open(key, &error.into()))?);
        let metadata = file.metadata().map_err(|error| cannot_open(key, &error))?;
        if !metadata.is_file() || metadata.nlink() > 1 {
            let words = "it is no object of shared memory, or has another name beside this one";
            return Err(cannot_open(key, &std::io::Error::other(words)));
        }
        self.check_content(key, &file)?;
        Ok((file, metadata.len(), (metadata.dev(), metadata.ino())))
    }

    fn check_name(&self, key: &str, object: &str) -> Result<(), InferError> {
        let begins = |prefixes: &[String]| prefixes.iter().any(|prefix| object.starts_with(prefix.as_str()));
        if begins(&self.reserved_prefixes) {
            return Err(reserved_by_server(key));
        }
        if let Some(prefix) = FOREIGN_PREFIXES.iter().find(|prefix| object.starts_with(**prefix)) {
            return Err(InferError::invalid(format!(
                "shared memory object '{key}' belongs to another program: names that begin with `{prefix}` are no client's"
            )));
        }
        if !self.allowed_prefixes.is_empty() && !begins(&self.allowed_prefixes) {
            let allowed = self.allowed_prefixes.join("`, `");
            return Err(InferError::invalid(format!(
                "shared memory object '{key}' is no client's: this server takes names that begin with `{allowed}`"
            )));
        }
        Ok(())
    }

    /// Refuses objects of Trireme servers, whatever their name.
    fn check_content(&self, key: &str, file: &File) -> Result<(), InferError> {
        let mut begin = vec![0; self.reserved_magic.len()];
        // A shorter object does not belong to a server.
        let is_reserved =
            !begin.is_empty() && file.read_exact_at(&mut begin, 0).is_ok() && begin == self.reserved_magic;
        if is_reserved { Err(reserved_by_server(key)) } else { Ok(()) }
    }
}

fn reserved_by_server(key: &str) -> InferError {
    InferError::invalid(format!("shared memory object '{key}' belongs to the server"))
}

fn cannot_open(key: &str, error: &std::io::Error) -> InferError {
    InferError::internal(format!("Unable to open shared memory region: '{key}': {error}"))
}
