//! MPI behind a table of functions, so that the program that loads this library also runs where no MPI is installed.
//!
//! All calls come from the one thread that called `trireme_mpi_start`.

#[allow(dead_code, missing_docs)] // The loader uses the constants.
#[path = "../abi.rs"]
mod abi;

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;

use abi::{Request, Table};
use mpi::Threading;
use mpi::ffi::{self, MPI_Message, MPI_Request};
use mpi::traits::{AsRaw, Communicator};

const TAG: c_int = 7;

/// `MPI_SUCCESS`, which is 0 by the standard (MPI 4.1, section 9.4).
const SUCCESS: c_int = 0;

thread_local! {
    /// The message that `probe` found, for the next `receive`.
    static PROBED: Cell<Option<MPI_Message>> = const { Cell::new(None) };
}

/// See `abi::Start`. Returns 1 when MPI was started before, 2 when it supports no other threads in the process.
///
/// # Safety
/// `table` points to room for a [`Table`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn trireme_mpi_start(table: *mut Table) -> c_int {
    let Some((universe, threading)) = mpi::initialize_with_threading(Threading::Funneled) else { return 1 };
    if threading < Threading::Funneled {
        return 2;
    }
    let world = universe.world();
    let started = Table {
        version: abi::VERSION,
        rank: world.rank(),
        size: world.size(),
        allgather,
        send,
        probe,
        receive,
        barrier,
        test,
        abort,
        finalize,
    };
    // Dropping it would finalize MPI; `finalize` does that.
    std::mem::forget(universe);
    // SAFETY: guaranteed by the caller.
    unsafe { table.write(started) };
    0
}

fn world() -> ffi::MPI_Comm {
    mpi::topology::SimpleCommunicator::world().as_raw()
}

fn byte() -> ffi::MPI_Datatype {
    // SAFETY: a constant that MPI sets at load time.
    unsafe { ffi::RSMPI_UINT8_T }
}

/// Aborts the world unless `code` is success. By default MPI does not return errors, but the environment or a library may have set
/// another error handler, and the outputs of a failed call must not be used.
fn check(code: c_int, call: &str) {
    if code != SUCCESS {
        eprintln!("ends the world: {call} failed with MPI's error {code}");
        // SAFETY: no argument comes from the caller.
        unsafe { ffi::MPI_Abort(world(), 1) };
        std::process::abort();
    }
}

/// Runs `start`, which sets a request, and returns the request.
fn request(call: &str, start: impl FnOnce(*mut MPI_Request) -> c_int) -> Request {
    let mut request = MaybeUninit::<MPI_Request>::uninit();
    check(start(request.as_mut_ptr()), call);
    // SAFETY: MPI has set it, because the call succeeded.
    Box::into_raw(Box::new(unsafe { request.assume_init() })).cast::<c_void>()
}

unsafe extern "C" fn allgather(mine: *const u8, len: c_int, all: *mut u8) {
    // SAFETY: the caller gives `len` bytes and room for `size * len`.
    let code = unsafe { ffi::MPI_Allgather(mine.cast(), len, byte(), all.cast(), len, byte(), world()) };
    check(code, "MPI_Allgather");
}

unsafe extern "C" fn send(bytes: *const u8, len: c_int, to: c_int) -> Request {
    // Synchronous mode: when all sends are done, no message is in transit when MPI ends.
    // SAFETY: the caller keeps `len` bytes in place until the request is done.
    request("MPI_Issend", |request| unsafe { ffi::MPI_Issend(bytes.cast(), len, byte(), to, TAG, world(), request) })
}

unsafe extern "C" fn probe(from: *mut c_int, len: *mut c_int) -> c_int {
    let mut found = 0;
    let mut message = MaybeUninit::<MPI_Message>::uninit();
    let mut status = MaybeUninit::<ffi::MPI_Status>::uninit();
    // SAFETY: all four pointers are to local variables, and the constants are set at load time.
    let code = unsafe {
        let (any, message, status) = (ffi::RSMPI_ANY_SOURCE, message.as_mut_ptr(), status.as_mut_ptr());
        ffi::MPI_Improbe(any, TAG, world(), &mut found, message, status)
    };
    check(code, "MPI_Improbe");
    if found == 0 {
        return 0;
    }
    // SAFETY: MPI has set message and status, because it found a message; the caller gives two pointers that are valid for writes.
    unsafe {
        PROBED.set(Some(message.assume_init()));
        from.write(status.assume_init_ref().MPI_SOURCE);
        check(ffi::MPI_Get_count(status.as_ptr(), byte(), len), "MPI_Get_count");
    }
    1
}

unsafe extern "C" fn receive(bytes: *mut u8, len: c_int) -> Request {
    let mut message = PROBED.take().expect("`receive` follows a `probe` that found a message");
    // SAFETY: the caller keeps `len` bytes of room in place until the request is done.
    request("MPI_Imrecv", |request| unsafe { ffi::MPI_Imrecv(bytes.cast(), len, byte(), &mut message, request) })
}

unsafe extern "C" fn barrier() -> Request {
    // SAFETY: no argument comes from the caller.
    request("MPI_Ibarrier", |request| unsafe { ffi::MPI_Ibarrier(world(), request) })
}

unsafe extern "C" fn test(request: Request) -> c_int {
    let request = request.cast::<MPI_Request>();
    let mut done = 0;
    // SAFETY: `request` created the request, which is in progress; its box is freed once, when it is done.
    unsafe {
        check(ffi::MPI_Test(request, &mut done, ffi::RSMPI_STATUS_IGNORE), "MPI_Test");
        if done != 0 {
            drop(Box::from_raw(request));
        }
    }
    done
}

unsafe extern "C" fn abort(code: c_int) {
    // SAFETY: the only argument of the caller is a number.
    unsafe { ffi::MPI_Abort(world(), code) };
}

unsafe extern "C" fn finalize() {
    // SAFETY: guaranteed by the caller: this is the last call, and no request is in progress.
    check(unsafe { ffi::MPI_Finalize() }, "MPI_Finalize");
}
