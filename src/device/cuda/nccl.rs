//! The NCCL functions that a group needs, loaded at run time.

use std::cell::{OnceCell, RefCell};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::PathBuf;
use std::sync::{Arc, Once};
use std::thread::JoinHandle;

use kernels::cuda::{Gpu, Queue, Span, library};
use ops::{DeviceError, TensorParallel};

use crate::Exchange;

type Communicator = *mut c_void;
type Code = c_int;

const SUM: c_int = 0;
/// `ncclDataType_t` of bytes and of bf16.
const UINT8: c_int = 1;
const BF16: c_int = 9;

/// Created by rank 0 and needed by all ranks.
#[derive(Clone, Copy)]
#[repr(C)]
struct UniqueId([c_char; 128]);

type AllReduce =
    unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Communicator, *mut c_void) -> Code;
type SendTo = unsafe extern "C" fn(*const c_void, usize, c_int, c_int, Communicator, *mut c_void) -> Code;
type ReceiveFrom = unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, Communicator, *mut c_void) -> Code;
type InitRank = unsafe extern "C" fn(*mut Communicator, c_int, UniqueId, c_int) -> Code;
type AllGather = unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, Communicator, *mut c_void) -> Code;

/// NCCL's environment variables are set once, before the first communicator.
static ENVIRONMENT: Once = Once::new();

/// The purpose of a communicator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CommunicatorKind {
    /// Large messages: NCCL chooses the number of channels.
    Bulk,
    /// The few messages that do not use peer memory: fewer channels, which are connected faster.
    Small,
}

/// Number of channels of [`CommunicatorKind::Small`] unless the environment sets it: connecting all channels of NCCL
/// takes half a second on 4 H200s.
const FEW_CHANNELS: &str = "4";

/// A communicator over the GPUs of a group, or of pipeline stages.
pub(crate) struct Nccl {
    communicator: Communicator,
    all_reduce: AllReduce,
    all_gather: AllGather,
    send: SendTo,
    receive: ReceiveFrom,
    abort: unsafe extern "C" fn(Communicator) -> Code,
    error: unsafe extern "C" fn(Code) -> *const c_char,
    rank: usize,
}

// SAFETY: a communicator may be used from any thread, one at a time; the device's `&mut self` guarantees this.
unsafe impl Send for Nccl {}

/// A communicator whose id all workers know, and that none of them has joined.
struct PendingCommunicator {
    nccl: Nccl,
    init: InitRank,
    id: UniqueId,
    size: u32,
}

impl PendingCommunicator {
    /// Returns after all workers have called it. The calling thread's context must be the GPU's.
    fn connect(mut self) -> Result<Nccl, DeviceError> {
        let rank = self.nccl.rank as c_int;
        // SAFETY: the communicator is writable; the id is that of the group's first worker.
        let code = unsafe { (self.init)(&mut self.nccl.communicator, self.size as c_int, self.id, rank) };
        self.nccl.check(code, "ncclCommInitRank")?;
        Ok(self.nccl)
    }
}

/// A communicator that is joined in the background, because joining takes a second or more.
pub(crate) struct Joining {
    thread: RefCell<Option<JoinHandle<Result<Nccl, DeviceError>>>>,
    joined: OnceCell<Nccl>,
}

impl Joining {
    /// Like [`Nccl::new`], but joins in a separate thread after the id was exchanged.
    pub(crate) fn start(
        gpu: &Arc<Gpu>,
        tp: TensorParallel,
        exchange: &dyn Exchange,
        folders: &[PathBuf],
        purpose: CommunicatorKind,
    ) -> Result<Self, DeviceError> {
        let meeting = Nccl::meet(tp.rank, tp.size, exchange, folders, purpose)?;
        let gpu = gpu.clone();
        let connect = move || gpu.bind().map_err(super::device_error).and_then(|()| meeting.connect());
        let thread =
            std::thread::Builder::new().name("nccl".into()).spawn(connect).map_err(|error| not_joined(&error))?;
        Ok(Self { thread: RefCell::new(Some(thread)), joined: OnceCell::new() })
    }

    /// Waits until all workers have joined, and returns the communicator.
    pub(crate) fn wait(&self) -> Result<&Nccl, DeviceError> {
        if let Some(thread) = self.thread.borrow_mut().take() {
            let nccl = thread.join().map_err(|_| not_joined(&"the thread panicked"))??;
            return Ok(self.joined.get_or_init(|| nccl));
        }
        self.joined.get().ok_or_else(|| not_joined(&"it failed before"))
    }
}

/// Unlinks NCCL's shared memory from `/dev/shm`, where its names would outlive a worker that is killed; existing
/// mappings stay valid. Called after all workers of the group have joined, when nobody opens it any more.
pub(crate) fn unlink_shared_memory() {
    let Ok(maps) = std::fs::read_to_string("/proc/self/maps") else { return };
    let paths = maps.lines().filter_map(|line| line.split_whitespace().nth(5));
    for path in paths.filter(|path| path.starts_with("/dev/shm/nccl-")) {
        // Another mapping of the same file, or another worker, may have removed it first.
        let _ = std::fs::remove_file(path);
    }
}

fn not_joined(reason: &dyn std::fmt::Display) -> DeviceError {
    DeviceError::Call { call: "ncclCommInitRank".into(), reason: reason.to_string() }
}

impl Nccl {
    /// Joins as rank `rank` of `size`; returns after all workers have joined. The calling thread's context must be the
    /// GPU's.
    pub(crate) fn new(rank: u32, size: u32, exchange: &dyn Exchange, folders: &[PathBuf]) -> Result<Self, DeviceError> {
        Self::meet(rank, size, exchange, folders, CommunicatorKind::Bulk)?.connect()
    }

    /// Loads NCCL, and exchanges the communicator's id with the other workers.
    fn meet(
        rank: u32,
        size: u32,
        exchange: &dyn Exchange,
        folders: &[PathBuf],
        purpose: CommunicatorKind,
    ) -> Result<PendingCommunicator, DeviceError> {
        ENVIRONMENT.call_once(|| {
            // NVLink multicast can make a host's GPUs unusable when a process dies while using it, so it stays off.
            // SAFETY: called while the worker starts, before it has threads that read the environment.
            unsafe { std::env::set_var("NCCL_NVLS_ENABLE", "0") };
            // Connect at initialization, so that recording a collective never waits.
            // SAFETY: as above.
            unsafe { std::env::set_var("NCCL_RUNTIME_CONNECT", "0") };
            const CHANNELS: &str = "NCCL_MAX_NCHANNELS";
            if purpose == CommunicatorKind::Small && std::env::var_os(CHANNELS).is_none() {
                // SAFETY: as above.
                unsafe { std::env::set_var(CHANNELS, FEW_CHANNELS) };
            }
        });
        let library = library::load("libnccl.so.2", folders).map_err(super::device_error)?;
        // SAFETY: the signatures are those of nccl.h 2.28; the library is never unloaded.
        unsafe {
            let missing = |error: &dyn std::fmt::Display| DeviceError::Call {
                call: "loading libnccl.so.2".into(),
                reason: error.to_string(),
            };
            macro_rules! symbol {
                ($name:literal, $kind:ty) => {
                    *library.get::<$kind>($name).map_err(|e| missing(&e))?
                };
            }
            let get_id = symbol!(b"ncclGetUniqueId", unsafe extern "C" fn(*mut UniqueId) -> Code);
            let init = symbol!(b"ncclCommInitRank", InitRank);
            let nccl = Self {
                communicator: std::ptr::null_mut(),
                all_reduce: symbol!(b"ncclAllReduce", AllReduce),
                all_gather: symbol!(b"ncclAllGather", AllGather),
                send: symbol!(b"ncclSend", SendTo),
                receive: symbol!(b"ncclRecv", ReceiveFrom),
                abort: symbol!(b"ncclCommAbort", unsafe extern "C" fn(Communicator) -> Code),
                error: symbol!(b"ncclGetErrorString", unsafe extern "C" fn(Code) -> *const c_char),
                rank: rank as usize,
            };
            std::mem::forget(library);
            let mut id = UniqueId([0; 128]);
            if rank == 0 {
                nccl.check(get_id(&mut id), "ncclGetUniqueId")?;
            }
            let bytes: Vec<u8> = id.0.iter().map(|&c| c as u8).collect();
            let ids = exchange.gather(&bytes)?;
            for (to, from) in id.0.iter_mut().zip(&ids[0]) {
                *to = *from as c_char;
            }
            Ok(PendingCommunicator { nccl, init, id, size })
        }
    }

    /// Sums bf16 `buffer` over the group, in place.
    pub(crate) fn all_reduce(&self, q: &Queue, buffer: Span) -> Result<(), DeviceError> {
        let pointer = buffer.address() as *mut c_void;
        let count = buffer.bytes() / 2;
        // SAFETY: the span is live device memory; the stream is the GPU's.
        let code = unsafe { (self.all_reduce)(pointer, pointer, count, BF16, SUM, self.communicator, q.raw().cast()) };
        self.check(code, "ncclAllReduce")
    }

    /// Gathers equal parts into `buffer`, in rank order; each worker's own part is already in place.
    pub(crate) fn all_gather(&self, q: &Queue, buffer: Span, group: usize) -> Result<(), DeviceError> {
        let part = buffer.bytes() / group;
        let own = buffer.part(self.rank * part, part);
        // SAFETY: as above; NCCL gathers in place if the source is the rank's own part.
        let code = unsafe {
            (self.all_gather)(
                own.address() as *const c_void,
                buffer.address() as *mut c_void,
                part,
                UINT8,
                self.communicator,
                q.raw().cast(),
            )
        };
        self.check(code, "ncclAllGather")
    }

    /// Sends bf16 `values` to worker `to`, which must receive the same number.
    pub(crate) fn send(&self, q: &Queue, values: Span, to: u32) -> Result<(), DeviceError> {
        let (pointer, count) = (values.address() as *const c_void, values.bytes() / 2);
        // SAFETY: the span is live device memory; the stream is the GPU's.
        let code = unsafe { (self.send)(pointer, count, BF16, to as c_int, self.communicator, q.raw().cast()) };
        self.check(code, "ncclSend")
    }

    /// Receives bf16 `values` from worker `from`, which must send the same number.
    pub(crate) fn receive(&self, q: &Queue, values: Span, from: u32) -> Result<(), DeviceError> {
        let (pointer, count) = (values.address() as *mut c_void, values.bytes() / 2);
        // SAFETY: as above.
        let code = unsafe { (self.receive)(pointer, count, BF16, from as c_int, self.communicator, q.raw().cast()) };
        self.check(code, "ncclRecv")
    }

    fn check(&self, code: Code, call: &str) -> Result<(), DeviceError> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: NCCL returns a static string for any code.
        let reason = unsafe { CStr::from_ptr((self.error)(code)) }.to_string_lossy().into_owned();
        Err(DeviceError::Call { call: call.to_owned(), reason })
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        if !self.communicator.is_null() {
            // SAFETY: created by `new` and ended once. Abort does not wait for workers that are gone.
            unsafe { (self.abort)(self.communicator) };
        }
    }
}
