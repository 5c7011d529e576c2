// What the MPI plugin offers to this crate. Compiled into both; `VERSION` changes with any change here.

use std::ffi::{c_int, c_void};

/// Checked when the plugin is loaded: both sides come from one build, so a difference is a broken build.
pub const VERSION: u32 = 1;

/// The symbol the plugin exports, of type [`Start`].
pub const START_SYMBOL: &[u8] = b"trireme_mpi_start\0";

/// Starts MPI on the calling thread, which alone may use the table then; 0 on success.
pub type Start = unsafe extern "C" fn(table: *mut Table) -> c_int;

/// An operation under way, ended by a `test` that returns 1.
pub type Request = *mut c_void;

/// MPI on `MPI_COMM_WORLD`. Errors do not return: MPI's own handler or the plugin prints them and aborts the world.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Table {
    pub version: u32,
    pub rank: c_int,
    pub size: c_int,
    /// Gathers `len` bytes of every rank into `all`, `size * len` long, in rank order. Blocks.
    pub allgather: unsafe extern "C" fn(mine: *const u8, len: c_int, all: *mut u8),
    /// Starts sending; done when the receiver has begun to take it. `bytes` stay in place until then.
    pub send: unsafe extern "C" fn(bytes: *const u8, len: c_int, to: c_int) -> Request,
    /// Looks for a message; 1 when there is one, which the next `receive` must take.
    pub probe: unsafe extern "C" fn(from: *mut c_int, len: *mut c_int) -> c_int,
    /// Starts receiving the probed message. `bytes` have its length and stay in place until done.
    pub receive: unsafe extern "C" fn(bytes: *mut u8, len: c_int) -> Request,
    /// Starts a barrier of all ranks.
    pub barrier: unsafe extern "C" fn() -> Request,
    /// 1 when the operation is done, and its request gone; 0 when it goes on.
    pub test: unsafe extern "C" fn(request: Request) -> c_int,
    /// Ends the whole world with this exit code.
    pub abort: unsafe extern "C" fn(code: c_int),
    /// Leaves MPI. Blocks until every rank does.
    pub finalize: unsafe extern "C" fn(),
}
