use std::fmt;
use std::fs;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use rustix::fs::{AtFlags, CWD, FallocateFlags, Mode, OFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::error::IpcError;
use crate::header::{HEADER_BYTES, Header, MAGIC, VERSION, open_own_file};
use crate::prefix::{Prefix, SHM_DIR};
use crate::sweep;

/// Number types for which all bit patterns are valid, so that shared memory may be viewed as them.
pub trait Plain: Copy + Send + Sync + 'static + sealed::Sealed {}
mod sealed {
    pub trait Sealed {}
}
macro_rules! plain {
    ($($number:ty)*) => { $(impl sealed::Sealed for $number {} impl Plain for $number {})* };
}
plain!(u8 u16 u32 u64 i8 i16 i32 i64 f32 f64);

/// A named piece of shared memory, zeroed at creation, mapped as long as this value lives.
///
/// The creator's value removes the name when dropped; mappings of other processes stay valid until they drop theirs.
/// The memory is allocated at creation, so that a full `/dev/shm` is an error then and never a SIGBUS later.
pub struct Region {
    path: PathBuf,
    /// The payload, after the header; aligned to 128 bytes.
    payload: NonNull<u8>,
    payload_bytes: usize,
    /// Whether this value still has to remove the name.
    owned: AtomicBool,
}

// SAFETY: the mapping is plain memory without thread affinity; shared access goes through atomics or through raw
// pointers, whose users promise not to race.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// Creates the region `<prefix><name>` of `bytes` zero bytes. A region of an owner that has ended is replaced.
    ///
    /// # Errors
    /// When a running process owns the name, another program's file has it, or memory is full.
    pub fn create(prefix: &Prefix, name: &str, bytes: usize) -> Result<Self, IpcError> {
        let path = prefix.path(name)?;
        let file = anonymous_file(&path, bytes)?;
        let base = map(&file, &path, HEADER_BYTES + bytes)?;
        let mut region = Self::from_mapping(path, base, bytes);
        // SAFETY: the mapping is page aligned, holds HEADER_BYTES, and no other process can see it yet.
        unsafe { base.cast::<Header>().write(Header::of_current_process(bytes as u64)) };
        publish(&file, &region.path)?;
        *region.owned.get_mut() = true;
        Ok(region)
    }

    /// Maps the region `<prefix><name>` that any process of this user has created.
    ///
    /// # Errors
    /// When there is none, or the file is no region of this version.
    pub fn open(prefix: &Prefix, name: &str) -> Result<Self, IpcError> {
        let path = prefix.path(name)?;
        let file = open_own_file(&path, true)?;
        let read = Header::read(&file).map_err(|source| IpcError::Os { action: "read", path: path.clone(), source })?;
        let Some(header) = read.filter(|header| header.magic == MAGIC) else {
            return Err(IpcError::NotOurs { path });
        };
        if header.version != VERSION {
            return Err(IpcError::Version { path, found: header.version, expected: VERSION });
        }
        let file_bytes = file.metadata().map_or(0, |meta| meta.len());
        if header.payload_bytes.checked_add(HEADER_BYTES as u64) != Some(file_bytes) {
            return Err(IpcError::NotOurs { path });
        }
        let bytes = header.payload_bytes as usize;
        let base = map(&file.into(), &path, HEADER_BYTES + bytes)?;
        Ok(Self::from_mapping(path, base, bytes))
    }

    fn from_mapping(path: PathBuf, base: NonNull<u8>, payload_bytes: usize) -> Self {
        // SAFETY: every mapping is at least HEADER_BYTES long.
        let payload = unsafe { base.add(HEADER_BYTES) };
        Self { path, payload, payload_bytes, owned: AtomicBool::new(false) }
    }

    /// The file behind the region.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Size of the payload in bytes, as given to `create`.
    pub fn len(&self) -> usize {
        self.payload_bytes
    }

    /// Whether the payload is empty.
    pub fn is_empty(&self) -> bool {
        self.payload_bytes == 0
    }

    /// `count` atomics from byte `offset`. Errs when they are not inside the payload or `offset` is not aligned.
    pub fn atomics_u32(&self, offset: usize, count: usize) -> Result<&[AtomicU32], IpcError> {
        let start = self.check::<AtomicU32>(offset, count)?;
        // SAFETY: checked to be inside and aligned, mapped while `self` lives, and any bytes are a value.
        Ok(unsafe { std::slice::from_raw_parts(start.as_ptr().cast(), count) })
    }

    /// `count` atomics from byte `offset`. Errs when they are not inside the payload or `offset` is not aligned.
    pub fn atomics_u64(&self, offset: usize, count: usize) -> Result<&[AtomicU64], IpcError> {
        let start = self.check::<AtomicU64>(offset, count)?;
        // SAFETY: as in `atomics_u32`.
        Ok(unsafe { std::slice::from_raw_parts(start.as_ptr().cast(), count) })
    }

    /// `count` numbers from byte `offset`, as a pointer. Other processes may write at any time, so *using* the pointer is unsafe:
    /// the user must order accesses through atomics. It is valid while the region lives; the payload starts at a multiple of
    /// 128 bytes. Errs when the numbers are not inside the payload or `offset` is not aligned.
    pub fn raw<T: Plain>(&self, offset: usize, count: usize) -> Result<NonNull<[T]>, IpcError> {
        let start = self.check::<T>(offset, count)?;
        Ok(NonNull::slice_from_raw_parts(start.cast(), count))
    }

    /// Removes the name now, if this value created it. Open mappings stay valid, no further process can open the region, and a
    /// killed owner leaves nothing behind. Call it once all processes that need the region have opened it.
    pub fn unlink(&self) {
        if self.owned.swap(false, Ordering::AcqRel) {
            // The name may have been removed by hand.
            let _ = fs::remove_file(&self.path);
        }
    }

    fn check<T>(&self, offset: usize, count: usize) -> Result<NonNull<u8>, IpcError> {
        let len = count.saturating_mul(size_of::<T>());
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.payload_bytes);
        if !inside || !offset.is_multiple_of(align_of::<T>()) {
            let (path, size) = (self.path.clone(), self.payload_bytes);
            return Err(IpcError::Range { path, offset, len, size, align: align_of::<T>() });
        }
        // SAFETY: `offset` is inside the mapping, or one past its end when `count` is 0.
        Ok(unsafe { self.payload.add(offset) })
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        self.unlink();
        // SAFETY: the mapping was made with this base and length, and every view borrows `self`. Users of `raw`
        // promised not to use their pointers later.
        let unmapped = unsafe { munmap(self.payload.sub(HEADER_BYTES).as_ptr().cast(), HEADER_BYTES + self.len()) };
        debug_assert!(unmapped.is_ok(), "munmap of a region failed: {unmapped:?}");
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, payload_bytes, owned, .. } = self;
        f.debug_struct("Region")
            .field("path", path)
            .field("bytes", payload_bytes)
            .field("owned", owned)
            .finish_non_exhaustive()
    }
}

/// A file of the right size that has no name yet.
fn anonymous_file(path: &Path, bytes: usize) -> Result<OwnedFd, IpcError> {
    let os = |action, errno: Errno| IpcError::Os { action, path: path.to_owned(), source: errno.into() };
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let file = rustix::fs::open(SHM_DIR, flags, Mode::RUSR | Mode::WUSR).map_err(|errno| os("create", errno))?;
    let total = (HEADER_BYTES + bytes) as u64;
    match rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, total) {
        Ok(()) => Ok(file),
        Err(Errno::NOSPC) => Err(IpcError::Full { path: path.to_owned(), bytes: total }),
        Err(errno) => Err(os("allocate", errno)),
    }
}

/// Gives the file its name, unless the owner of an existing file of this name runs.
fn publish(file: &OwnedFd, path: &Path) -> Result<(), IpcError> {
    let unnamed = format!("/proc/self/fd/{}", file.as_raw_fd());
    // Every iteration but the last found the file of an owner that had ended. The bound covers owners that keep ending.
    for _ in 0..16 {
        match rustix::fs::linkat(CWD, &unnamed, CWD, path, AtFlags::SYMLINK_FOLLOW) {
            Ok(()) => return Ok(()),
            Err(Errno::EXIST) => {
                if !sweep::remove_if_stale(path)? {
                    // Another process is removing it.
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
            Err(errno) => return Err(IpcError::Os { action: "name", path: path.to_owned(), source: errno.into() }),
        }
    }
    Err(IpcError::Os { action: "name", path: path.to_owned(), source: Errno::EXIST.into() })
}

fn map(file: &OwnedFd, path: &Path, bytes: usize) -> Result<NonNull<u8>, IpcError> {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address the kernel chooses touches no existing memory.
    let mapped = unsafe { mmap(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED, file, 0) };
    match mapped {
        Ok(base) => Ok(NonNull::new(base.cast()).expect("mmap chooses no null address")),
        Err(errno) => Err(IpcError::Os { action: "map", path: path.to_owned(), source: errno.into() }),
    }
}
