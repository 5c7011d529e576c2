//! Memory of a parent that its children use one after the other.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::ptr::NonNull;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::error::IpcError;

/// Bytes before the payload.
const HEAD_BYTES: usize = 4096;
/// Bytes of a block of [`MetadataExt::blocks`].
const STAT_BLOCK_BYTES: u64 = 512;

/// Memory without a name that outlives the process which uses it: the parent holds it, a child maps it, and after the end of the
/// child another one. It is zero at first, takes memory only where it is written, and is freed when no process holds it any more.
#[derive(Debug)]
pub struct SharedMemory {
    file: File,
    bytes: usize,
}

impl SharedMemory {
    /// Memory of `bytes`, which no process can resize. `name` appears in `/proc/PID/maps`.
    ///
    /// # Errors
    /// When the system has no file or address for it.
    pub fn new(name: &str, bytes: usize) -> Result<Self, IpcError> {
        let error =
            |action| move |errno: rustix::io::Errno| IpcError::Os { action, path: name.into(), source: errno.into() };
        let total = bytes.checked_add(HEAD_BYTES).ok_or_else(|| error("size")(rustix::io::Errno::FBIG))?;
        let file =
            memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).map_err(error("create memory for"))?;
        ftruncate(&file, total as u64).map_err(error("size"))?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        fcntl_add_seals(&file, seals).map_err(error("seal"))?;
        Ok(Self { file: file.into(), bytes })
    }

    /// Reads payload from the byte `start` on. What another process writes there meanwhile may be read in part.
    ///
    /// # Errors
    /// When the payload ends before.
    pub fn read(&self, start: usize, bytes: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(bytes, self.offset(start, bytes.len())?)
    }

    /// Writes payload from the byte `start` on.
    ///
    /// # Errors
    /// When the payload ends before, or the system has no memory for it.
    pub fn write(&self, start: usize, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all_at(bytes, self.offset(start, bytes.len())?)
    }

    /// Where payload of this start and length is in the file.
    fn offset(&self, start: usize, len: usize) -> io::Result<u64> {
        match start.checked_add(len) {
            Some(end) if end <= self.bytes => Ok((HEAD_BYTES + start) as u64),
            _ => Err(io::Error::new(io::ErrorKind::UnexpectedEof, format!("{len} bytes at {start} of {}", self.bytes))),
        }
    }

    /// Bytes of the payload.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether the payload is empty.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Maps the memory in this process, for users that are no children.
    ///
    /// # Errors
    /// When the system has no address for it.
    pub fn map(&self) -> Result<MappedMemory, IpcError> {
        let error = |source| IpcError::Os { action: "map", path: "shared memory".into(), source };
        MappedMemory::map(self.file.try_clone().map_err(error)?, self.bytes).map_err(error)
    }

    /// Lets the child of `command` inherit the memory, and returns the number of its descriptor there. It must be called after
    /// [`bind_to_parent`](crate::bind_to_parent), and `self` must live until the child is spawned.
    pub fn pass_to(&self, command: &mut Command) -> RawFd {
        let descriptor = self.file.as_raw_fd();
        // SAFETY: between fork and exec only async-signal-safe calls are allowed: the closure makes one system call, and its error
        // is a plain code that allocates nothing.
        unsafe {
            command.pre_exec(move || match libc::fcntl(descriptor, libc::F_SETFD, 0) {
                -1 => Err(io::Error::last_os_error()),
                _ => Ok(()),
            });
        }
        descriptor
    }
}

/// [`SharedMemory`] that this process uses.
#[derive(Debug)]
pub struct MappedMemory {
    file: File,
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping is plain memory without thread affinity, accessed through `&self` and `&mut self`.
unsafe impl Send for MappedMemory {}
// SAFETY: as above.
unsafe impl Sync for MappedMemory {}

impl MappedMemory {
    /// Maps memory of `bytes` that the parent has passed as `descriptor`, which this call takes: it may be called once.
    ///
    /// # Errors
    /// When the descriptor is not open, is no such memory, or has another size.
    pub fn inherit(descriptor: RawFd, bytes: usize) -> Result<Self, IpcError> {
        let path = || format!("/proc/self/fd/{descriptor}").into();
        // SAFETY: the call only reads a flag, and fails for a number that is not open.
        if descriptor < 0 || unsafe { libc::fcntl(descriptor, libc::F_GETFD) } == -1 {
            return Err(IpcError::Os {
                action: "inherit",
                path: path(),
                source: io::Error::from_raw_os_error(libc::EBADF),
            });
        }
        // SAFETY: it is open, and belongs to nothing else in this process: the parent passed it for this call.
        let file = unsafe { OwnedFd::from_raw_fd(descriptor) };
        Self::map(File::from(file), bytes).map_err(|source| IpcError::Os { action: "map", path: path(), source })
    }

    fn map(file: File, bytes: usize) -> io::Result<Self> {
        let total = bytes.checked_add(HEAD_BYTES).ok_or(io::ErrorKind::InvalidInput)?;
        let found = file.metadata()?.len();
        let seals = rustix::fs::fcntl_get_seals(&file)?;
        if found != total as u64 || !seals.contains(SealFlags::SHRINK) {
            let words = format!("it has {found} bytes, expected {total} of a fixed size");
            return Err(io::Error::new(io::ErrorKind::InvalidData, words));
        }
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses touches no existing memory.
        let base = unsafe { mmap(std::ptr::null_mut(), total, protection, MapFlags::SHARED, file.as_fd(), 0) }?;
        Ok(Self { file, base: NonNull::new(base.cast()).expect("mmap chooses no null address"), bytes })
    }

    /// Bytes of memory that the system has assigned to it, by this process or one before it.
    pub fn allocated_bytes(&self) -> u64 {
        self.file.metadata().map_or(0, |metadata| metadata.blocks() * STAT_BLOCK_BYTES)
    }

    /// The number that [`MappedMemory::set_layout`] has left, in this process or one before it; 0 at first.
    pub fn layout(&self) -> u64 {
        // SAFETY: the mapping is longer and aligned to a page, and only this process uses it.
        unsafe { self.base.cast::<u64>().read() }
    }

    /// Leaves a number for processes after this one, which says how the payload is laid out.
    pub fn set_layout(&mut self, layout: u64) {
        // SAFETY: as in `layout`.
        unsafe { self.base.cast::<u64>().write(layout) };
    }
}

impl AsMut<[u8]> for MappedMemory {
    fn as_mut(&mut self) -> &mut [u8] {
        // SAFETY: the mapping has these bytes after its head, as long as `self` lives. The parent passes the memory to another child
        // only after the end of this process. It does not map it, and writes no bytes that this process uses at that time: the
        // scheduler lets it fill only slots that no plan in flight refers to.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(HEAD_BYTES).as_ptr(), self.bytes) }
    }
}

impl Drop for MappedMemory {
    fn drop(&mut self) {
        // SAFETY: mapped with this base and length, and slices of it borrow `self`.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), HEAD_BYTES + self.bytes) };
        debug_assert!(unmapped.is_ok(), "munmap of shared memory failed: {unmapped:?}");
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::IntoRawFd;

    use super::*;

    fn inherited(memory: &SharedMemory) -> RawFd {
        let copy = memory.file.try_clone().unwrap();
        IntoRawFd::into_raw_fd(copy)
    }

    #[test]
    fn what_one_user_leaves_the_next_one_finds() {
        let memory = SharedMemory::new("test", 1 << 20).unwrap();
        let mut first = MappedMemory::inherit(inherited(&memory), memory.len()).unwrap();
        assert_eq!((first.allocated_bytes(), first.layout(), first.as_mut().len()), (0, 0, 1 << 20));
        first.as_mut()[1 << 19] = 7;
        first.set_layout(42);
        drop(first);
        let mut second = MappedMemory::inherit(inherited(&memory), memory.len()).unwrap();
        assert_eq!((second.layout(), second.as_mut()[1 << 19], second.as_mut()[0]), (42, 7, 0));
        // A page of the payload and one of the head.
        assert!((1..=4 << 20).contains(&second.allocated_bytes()), "{}", second.allocated_bytes());
    }

    #[test]
    fn a_child_inherits_the_memory_and_nothing_else() {
        let memory = SharedMemory::new("test", 4096).unwrap();
        let mut command = Command::new("sh");
        crate::bind_to_parent(&mut command, libc::SIGKILL);
        let descriptor = memory.pass_to(&mut command);
        let output = command.args(["-c", "ls /proc/self/fd -l"]).output().unwrap();
        let listed = String::from_utf8(output.stdout).unwrap();
        assert!(listed.contains(&format!(" {descriptor} -> /memfd:test")), "{listed}");
        // Standard streams, the memory, and the directory that `ls` reads.
        assert_eq!(listed.lines().filter(|line| line.contains(" -> ")).count(), 5, "{listed}");
    }

    #[test]
    fn other_descriptors_and_sizes_are_refused() {
        let memory = SharedMemory::new("test", 4096).unwrap();
        let error = MappedMemory::inherit(inherited(&memory), 8192).unwrap_err();
        assert!(error.to_string().contains("map"), "{error}");
        assert!(MappedMemory::inherit(-1, 4096).is_err() && MappedMemory::inherit(9999, 4096).is_err());
        let plain = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&plain, 8192).unwrap();
        assert!(MappedMemory::inherit(IntoRawFd::into_raw_fd(plain), 4096).is_err(), "it can shrink");
        assert!(SharedMemory::new("test", usize::MAX).is_err());
    }
}
