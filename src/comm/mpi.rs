//! The loaded plugin: MPI for the one thread that started it.

use std::ffi::c_int;
use std::io::Write;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use rustix::fs::{MemfdFlags, memfd_create};

use crate::abi::{self, Table};
use crate::error::CommError;

/// The plugin for each MPI, in the order of [`MpiKind`]; empty where the build had none.
static PLUGINS: [&[u8]; 2] = [
    include_bytes!(concat!(env!("OUT_DIR"), "/plugin_openmpi.so")),
    include_bytes!(concat!(env!("OUT_DIR"), "/plugin_mpich.so")),
];

/// Names of MPICH's library: Debian's, and that of all other MPIs with MPICH's binary interface.
const MPICH_NAMES: [&[u8]; 2] = [b"libmpich.so.12\0", b"libmpi.so.12\0\0\0"];

/// A binary interface of MPI.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MpiKind {
    /// Open MPI 4 and 5.
    OpenMpi,
    /// MPICH and MPIs with its binary interface: Intel MPI, MVAPICH.
    Mpich,
}

impl MpiKind {
    /// The MPI whose launcher started this process, detected from the environment; `None` without a launcher.
    ///
    /// `SLURM_PROCID` is no evidence: it is also set in a plain batch script.
    pub fn from_env() -> Option<Self> {
        let is_set = |names: &[&str]| names.iter().any(|name| std::env::var_os(name).is_some());
        match (is_set(&["OMPI_COMM_WORLD_SIZE", "PMIX_RANK"]), is_set(&["PMI_RANK"])) {
            (true, _) => Some(Self::OpenMpi),
            (false, true) => Some(Self::Mpich),
            (false, false) => None,
        }
    }

    /// The name for messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::OpenMpi => "Open MPI",
            Self::Mpich => "MPICH",
        }
    }

    /// Whether this build contains the plugin for it.
    pub fn is_built_in(self) -> bool {
        !PLUGINS[self as usize].is_empty()
    }
}

/// MPI, started on the thread that created this value. It cannot leave the thread.
pub(crate) struct Mpi {
    table: Table,
    /// MPI was started for calls from one thread.
    _not_send: PhantomData<*const ()>,
}

/// An operation in progress, with the bytes that MPI reads or writes.
pub(crate) struct Pending<B> {
    request: abi::Request,
    /// Valid until the operation is done. They are leaked if this is dropped before.
    bytes: ManuallyDrop<B>,
}

impl Mpi {
    /// Loads the plugin and starts MPI. May be called once in a process.
    pub(crate) fn start(kind: MpiKind) -> Result<Self, CommError> {
        if !kind.is_built_in() {
            return Err(CommError::NotBuilt { kind: kind.name() });
        }
        let load = |source: Box<dyn std::error::Error + Send + Sync>| CommError::Load { kind: kind.name(), source };
        let library = open_plugin(kind).map_err(load)?;
        let mut table = std::mem::MaybeUninit::<Table>::uninit();
        // SAFETY: the symbol has this type in the plugin, which was built from the same `abi.rs`; it gets room for
        // a table and sets it when it returns 0.
        let code = unsafe {
            let start = library.get::<abi::Start>(abi::START_SYMBOL).map_err(|error| load(error.into()))?;
            start(table.as_mut_ptr())
        };
        // Never unloaded: MPI registers handlers that run at exit.
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

    /// Number of ranks.
    pub(crate) fn size(&self) -> usize {
        self.table.size as usize
    }

    /// The bytes of every rank, in rank order. `mine` has the same length on every rank. Blocks.
    pub(crate) fn allgather(&self, mine: &[u8]) -> Vec<Vec<u8>> {
        let mut all = vec![0; mine.len() * self.table.size as usize];
        // SAFETY: `all` has room for `size` times the length of `mine`.
        unsafe { (self.table.allgather)(mine.as_ptr(), length(mine), all.as_mut_ptr()) };
        all.chunks(mine.len()).map(<[u8]>::to_vec).collect()
    }

    /// Starts a send. `finish` must be called until it is done.
    pub(crate) fn send(&self, to: u32, bytes: Arc<[u8]>) -> Pending<Arc<[u8]>> {
        // SAFETY: the bytes stay in `Pending`, which returns them only when the operation is done.
        let request = unsafe { (self.table.send)(bytes.as_ptr(), length(&bytes), to as c_int) };
        Pending { request, bytes: ManuallyDrop::new(bytes) }
    }

    /// Starts to receive the next message, if one has arrived; also returns its sender.
    pub(crate) fn receive(&self) -> Option<(u32, Pending<Vec<u8>>)> {
        let (mut from, mut len) = (0, 0);
        // SAFETY: both pointers are valid for writes.
        if unsafe { (self.table.probe)(&mut from, &mut len) } == 0 {
            return None;
        }
        let mut bytes = vec![0; usize::try_from(len).expect("MPI returns no negative length")];
        // SAFETY: `bytes` has the length of the probed message and stays in `Pending`, which returns it only when the operation is
        // done.
        let request = unsafe { (self.table.receive)(bytes.as_mut_ptr(), len) };
        Some((from as u32, Pending { request, bytes: ManuallyDrop::new(bytes) }))
    }

    /// Starts a barrier of all ranks.
    pub(crate) fn barrier(&self) -> Pending<()> {
        // SAFETY: the function has no arguments.
        Pending { request: unsafe { (self.table.barrier)() }, bytes: ManuallyDrop::new(()) }
    }

    /// Returns the bytes when the operation is done, or else the operation.
    pub(crate) fn finish<B>(&self, pending: Pending<B>) -> Result<B, Pending<B>> {
        // SAFETY: the request is in progress, because `pending` is consumed once it is done.
        match unsafe { (self.table.test)(pending.request) } {
            0 => Err(pending),
            _ => Ok(ManuallyDrop::into_inner(pending.bytes)),
        }
    }

    /// Ends the whole world.
    pub(crate) fn abort(&self, code: i32) {
        // SAFETY: the argument is a number.
        unsafe { (self.table.abort)(code) };
    }

    /// Finalizes MPI. Every operation must be done.
    pub(crate) fn finalize(self) {
        // SAFETY: this consumes `self`, so no call follows.
        unsafe { (self.table.finalize)() };
    }
}

fn length(bytes: &[u8]) -> c_int {
    c_int::try_from(bytes.len()).expect("`World::send` checks the length")
}

fn open_plugin(kind: MpiKind) -> Result<Library, Box<dyn std::error::Error + Send + Sync>> {
    let plugin = PLUGINS[kind as usize];
    open(plugin).or_else(|error| match kind {
        MpiKind::OpenMpi => Err(error),
        // The library may have the other name.
        MpiKind::Mpich => MPICH_NAMES.iter().find_map(|name| open(&with_library_name(plugin, name)?).ok()).ok_or(error),
    })
}

/// The plugin of MPICH, changed to load the library `name`; `None` when it contains none of [`MPICH_NAMES`].
fn with_library_name(plugin: &[u8], name: &[u8]) -> Option<Vec<u8>> {
    let mut plugin = plugin.to_vec();
    for known in MPICH_NAMES {
        // Only the name and its zero byte are compared: other text may follow a shorter name.
        let known = &known[..known.iter().position(|byte| *byte == 0).expect("a name ends") + 1];
        if let Some(at) = plugin.windows(known.len()).position(|window| window == known) {
            let room = known.len();
            let len = name.iter().position(|byte| *byte == 0).expect("a name ends") + 1;
            plugin.get_mut(at..at + len).filter(|_| len <= room)?.copy_from_slice(&name[..len]);
            return Some(plugin);
        }
    }
    None
}

/// Loads a plugin from memory, so that no file and no executable file system is needed.
fn open(plugin: &[u8]) -> Result<Library, Box<dyn std::error::Error + Send + Sync>> {
    let fd = memfd_create("trireme-mpi", MemfdFlags::CLOEXEC)?;
    let mut file = std::fs::File::from(fd);
    file.write_all(plugin)?;
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    // RTLD_GLOBAL, so that MPI's own plugins find its symbols.
    // SAFETY: the plugin runs no initializers; libmpi is trusted as any library of the machine.
    Ok(unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) }?)
}
