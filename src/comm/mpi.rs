//! The plugin, loaded: one owner, one thread.

use std::ffi::c_int;
use std::io::Write;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use rustix::fs::{MemfdFlags, memfd_create};

use crate::CommError;
use crate::abi::{self, Table};

static PLUGIN: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/plugin.so"));

/// MPI, started on the thread that made this value and kept there.
pub(crate) struct Mpi {
    table: Table,
    /// MPI was started for one thread.
    _not_send: PhantomData<*const ()>,
}

/// An operation under way, together with the bytes MPI reads or writes meanwhile.
pub(crate) struct Pending<B> {
    request: abi::Request,
    /// In place until the operation is done; leaked rather than freed before.
    bytes: ManuallyDrop<B>,
}

/// Whether this build carries the plugin.
pub(crate) fn is_built_in() -> bool {
    !PLUGIN.is_empty()
}

impl Mpi {
    /// Loads the plugin and starts MPI. Once in a process.
    pub(crate) fn start() -> Result<Self, CommError> {
        if !is_built_in() {
            return Err(CommError::NotBuilt);
        }
        let load = |source: Box<dyn std::error::Error + Send + Sync>| CommError::Load { source };
        let library = open_plugin().map_err(load)?;
        let mut table = std::mem::MaybeUninit::<Table>::uninit();
        // SAFETY: the symbol has this type in the plugin, which was built from the same `abi.rs`; it gets room for
        // a table and sets it when it returns 0.
        let code = unsafe {
            let start = library.get::<abi::Start>(abi::START_SYMBOL).map_err(|error| load(error.into()))?;
            start(table.as_mut_ptr())
        };
        // Its code must stay as long as the process: MPI registers handlers that run at exit.
        std::mem::forget(library);
        match code {
            0 => {}
            1 => return Err(load("MPI was started in this process before".into())),
            _ => return Err(load("this MPI was built without support for threads".into())),
        }
        // SAFETY: set, as the code is 0.
        let table = unsafe { table.assume_init() };
        assert_eq!(table.version, abi::VERSION, "the embedded plugin is of another build");
        Ok(Self { table, _not_send: PhantomData })
    }

    pub(crate) fn rank(&self) -> u32 {
        self.table.rank as u32
    }

    /// What every rank gave, in rank order; `mine` has the same length everywhere. Blocks.
    pub(crate) fn allgather(&self, mine: &[u8]) -> Vec<Vec<u8>> {
        let mut all = vec![0; mine.len() * self.table.size as usize];
        // SAFETY: `all` has room for `size` times the length of `mine`.
        unsafe { (self.table.allgather)(mine.as_ptr(), length(mine), all.as_mut_ptr()) };
        all.chunks(mine.len()).map(<[u8]>::to_vec).collect()
    }

    /// Starts sending. `finish` must be asked until it is done.
    pub(crate) fn send(&self, to: u32, bytes: Arc<[u8]>) -> Pending<Arc<[u8]>> {
        // SAFETY: the bytes stay in `Pending`, which gives them back only when done.
        let request = unsafe { (self.table.send)(bytes.as_ptr(), length(&bytes), to as c_int) };
        Pending { request, bytes: ManuallyDrop::new(bytes) }
    }

    /// Starts receiving the next message, if one has come; also says from whom.
    pub(crate) fn receive(&self) -> Option<(u32, Pending<Vec<u8>>)> {
        let (mut from, mut len) = (0, 0);
        // SAFETY: two places to write to.
        if unsafe { (self.table.probe)(&mut from, &mut len) } == 0 {
            return None;
        }
        let mut bytes = vec![0; len as usize];
        // SAFETY: as long as the probed message; they stay in `Pending`, which gives them back only when done.
        let request = unsafe { (self.table.receive)(bytes.as_mut_ptr(), len) };
        Some((from as u32, Pending { request, bytes: ManuallyDrop::new(bytes) }))
    }

    /// Starts a barrier of all ranks.
    pub(crate) fn barrier(&self) -> Pending<()> {
        // SAFETY: takes nothing.
        Pending { request: unsafe { (self.table.barrier)() }, bytes: ManuallyDrop::new(()) }
    }

    /// The bytes, when the operation is done; else the operation again.
    pub(crate) fn finish<B>(&self, pending: Pending<B>) -> Result<B, Pending<B>> {
        // SAFETY: the request is not done: it is dropped, with `pending`, when it is.
        match unsafe { (self.table.test)(pending.request) } {
            0 => Err(pending),
            _ => Ok(ManuallyDrop::into_inner(pending.bytes)),
        }
    }

    /// Ends the whole world.
    pub(crate) fn abort(&self, code: i32) {
        // SAFETY: takes a number.
        unsafe { (self.table.abort)(code) };
    }

    /// Leaves MPI; every operation is done.
    pub(crate) fn finalize(self) {
        // SAFETY: consumes `self`, so nothing follows.
        unsafe { (self.table.finalize)() };
    }
}

fn length(bytes: &[u8]) -> c_int {
    c_int::try_from(bytes.len()).expect("the length was checked at the door")
}

/// Loads the embedded plugin from memory: it needs no file, and no place where files may be executed.
fn open_plugin() -> Result<Library, Box<dyn std::error::Error + Send + Sync>> {
    let fd = memfd_create("trireme-mpi", MemfdFlags::CLOEXEC)?;
    let mut file = std::fs::File::from(fd);
    file.write_all(PLUGIN)?;
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    // Global, so that what MPI itself loads finds MPI's symbols.
    // SAFETY: the plugin runs no code of ours when loaded; libmpi's is as trusted as any library of the machine.
    Ok(unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) }?)
}
