// The interface of the MPI plugin. Compiled into the plugin and this crate; any change here needs a new `VERSION`.

use std::ffi::{c_int, c_void};

/// Checked when the plugin is loaded. Both sides come from one build, so a difference is an error of the build.
pub const VERSION: u32 = 1;

/// The symbol the plugin exports, of type [`Start`].
pub const START_SYMBOL: &[u8] = b"trireme_mpi_start\0";

/// Starts MPI on the calling thread, the only one that may use the table; returns 0 on success.
pub type Start = unsafe extern "C" fn(table: *mut Table) -> c_int;

/// An operation in progress. It ends when `test` returns 1.
pub type Request = *mut c_void;

/// MPI on `MPI_COMM_WORLD`. Errors are not returned: MPI's handler or the plugin prints them and aborts the world.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Table {
    pub version: u32,
    pub rank: c_int,
    pub size: c_int,
    /// Gathers `len` bytes of every rank into `all`, `size * len` long, in rank order. Blocks.
    pub allgather: unsafe extern "C" fn(mine: *const u8, len: c_int, all: *mut u8),
    /// Starts a send, which is done when the receiver has begun to receive. `bytes` must stay valid until then.
    pub send: unsafe extern "C" fn(bytes: *const u8, len: c_int, to: c_int) -> Request,
    /// Checks for a message; returns 1 if there is one, which the next `receive` must receive.
    pub probe: unsafe extern "C" fn(from: *mut c_int, len: *mut c_int) -> c_int,
    /// Starts to receive the probed message. `bytes` have its length and must stay valid until it is done.
    pub receive: unsafe extern "C" fn(bytes: *mut u8, len: c_int) -> Request,
    /// Starts a barrier of all ranks.
    pub barrier: unsafe extern "C" fn() -> Request,
    /// Returns 1 when the operation is done, which frees the request, and 0 while it is in progress.
    pub test: unsafe extern "C" fn(request: Request) -> c_int,
    /// Ends the whole world with this exit code.
    pub abort: unsafe extern "C" fn(code: c_int),
    /// Finalizes MPI. Blocks until every rank does.
    pub finalize: unsafe extern "C" fn(),
}
