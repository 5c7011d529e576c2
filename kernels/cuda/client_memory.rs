//! Device memory of another program, identified by a CUDA IPC handle. Bytes are copied from and to it; no kernel runs.
//!
//! It needs a driver, but none of this build's kernels. The device's primary context, which takes a few hundred MB of
//! its memory, is retained while a region exists.

use std::ffi::c_void;

use cudarc::driver::sys;

use super::error::check;
use super::{CudaError, driver_is_present};

const OP: &str = "client memory";

/// Identifies the memory: a `cudaIpcMemHandle_t`.
pub type IpcHandle = [u8; 64];

/// Memory of another process, mapped into this one. Closed when dropped.
#[derive(Debug)]
pub struct ClientMemory {
    context: Context,
    address: u64,
    bytes: usize,
}

impl ClientMemory {
    /// Maps the first `bytes` of the allocation of `handle`, on GPU `ordinal`.
    ///
    /// # Errors
    /// Returns an error without a driver or that GPU, if the handle is not that of memory of another living process, or
    /// if the allocation is smaller than `bytes`.
    pub fn open(handle: &IpcHandle, ordinal: usize, bytes: usize) -> Result<Self, CudaError> {
        if !driver_is_present() {
            return Err(CudaError::NoGpu { reason: "libcuda.so.1 cannot be loaded".into() });
        }
        let context = Context::retain(ordinal)?;
        let current = context.enter()?;
        let handle = sys::CUipcMemHandle { reserved: handle.map(|byte| byte as _) };
        let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let mut address = 0;
        // SAFETY: `address` is writable; the driver itself checks the handle, whatever bytes it contains.
        check(unsafe { sys::cuIpcOpenMemHandle_v2(&mut address, handle, flags) }, "cuIpcOpenMemHandle")?;
        drop(current);
        let memory = Self { context, address, bytes };
        let found = memory.allocation()?;
        if bytes == 0 || found < bytes {
            return Err(CudaError::argument(OP, format!("{bytes} bytes of an allocation of {found}")));
        }
        Ok(memory)
    }

    /// Bytes from the start of the mapping to the end of the allocation.
    fn allocation(&self) -> Result<usize, CudaError> {
        let _current = self.context.enter()?;
        let (mut base, mut size) = (0, 0);
        // SAFETY: both are writable, and the address is mapped.
        let code = unsafe { sys::cuMemGetAddressRange_v2(&mut base, &mut size, self.address) };
        check(code, "cuMemGetAddressRange")?;
        Ok(size.saturating_sub(self.address.saturating_sub(base) as usize))
    }

    /// Copies bytes starting at `offset` to `into`; returns when the copy is complete.
    ///
    /// # Errors
    /// Returns an error if they are outside the mapping, or if the driver refuses the copy.
    pub fn read(&self, offset: usize, into: &mut [u8]) -> Result<(), CudaError> {
        let address = self.place(offset, into.len())?;
        let _current = self.context.enter()?;
        // SAFETY: `into` is writable for its length, and the bytes at `address` are inside the mapping.
        let code = unsafe { sys::cuMemcpyDtoH_v2(into.as_mut_ptr().cast::<c_void>(), address, into.len()) };
        check(code, "cuMemcpyDtoH")
    }

    /// Copies `data` to the bytes starting at `offset`; returns when other processes see them.
    ///
    /// # Errors
    /// The same as of [`ClientMemory::read`].
    pub fn write(&self, offset: usize, data: &[u8]) -> Result<(), CudaError> {
        let address = self.place(offset, data.len())?;
        let _current = self.context.enter()?;
        // SAFETY: `data` is readable for its length, and the bytes at `address` are inside the mapping.
        let code = unsafe { sys::cuMemcpyHtoD_v2(address, data.as_ptr().cast::<c_void>(), data.len()) };
        check(code, "cuMemcpyHtoD")?;
        // A copy from memory that is not pinned may return before it is complete.
        // SAFETY: a context is current.
        check(unsafe { sys::cuCtxSynchronize() }, "cuCtxSynchronize")
    }

    fn place(&self, offset: usize, len: usize) -> Result<u64, CudaError> {
        if offset.checked_add(len).is_none_or(|end| end > self.bytes) {
            return Err(CudaError::argument(OP, format!("{len} bytes at {offset} of a region of {}", self.bytes)));
        }
        Ok(self.address + offset as u64)
    }
}

impl Drop for ClientMemory {
    fn drop(&mut self) {
        if let Ok(_current) = self.context.enter() {
            // SAFETY: opened by `open`, closed once; after a failure (the client died) nothing remains to be done.
            let _ = unsafe { sys::cuIpcCloseMemHandle(self.address) };
        }
    }
}

/// A retained primary context of a device.
#[derive(Debug)]
struct Context {
    device: sys::CUdevice,
    context: sys::CUcontext,
}

// SAFETY: a driver handle may be used from any thread that makes it current, which `enter` does.
unsafe impl Send for Context {}
// SAFETY: as above; it is never changed.
unsafe impl Sync for Context {}

impl Context {
    fn retain(ordinal: usize) -> Result<Self, CudaError> {
        let (mut device, mut context) = (0, std::ptr::null_mut());
        let number = i32::try_from(ordinal).map_err(|_| CudaError::argument(OP, format!("device {ordinal}")))?;
        // SAFETY: out pointers are writable; the retained context is released by `drop`.
        unsafe {
            check(sys::cuInit(0), "cuInit")?;
            check(sys::cuDeviceGet(&mut device, number), &format!("cuDeviceGet({ordinal})"))?;
            check(sys::cuDevicePrimaryCtxRetain(&mut context, device), "cuDevicePrimaryCtxRetain")?;
        }
        Ok(Self { device, context })
    }

    /// Makes it the calling thread's context until the guard is dropped.
    fn enter(&self) -> Result<Entered, CudaError> {
        // SAFETY: the context is retained as long as `self`.
        check(unsafe { sys::cuCtxPushCurrent_v2(self.context) }, "cuCtxPushCurrent")?;
        Ok(Entered)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once by `retain`. A driver that is shutting down may refuse; nothing remains to be done
        // then.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

/// A guard: while it exists, the thread's context is that of a [`Context`].
struct Entered;

impl Drop for Entered {
    fn drop(&mut self) {
        let mut context = std::ptr::null_mut();
        // SAFETY: pops what `enter` pushed on this thread.
        let _ = unsafe { sys::cuCtxPopCurrent_v2(&mut context) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_that_names_nothing_is_refused() {
        // Without a driver the call fails because there is none, with one because the driver refuses the handle.
        let error = ClientMemory::open(&[b'x'; 64], 0, 16).unwrap_err();
        let expected = if driver_is_present() { "failed" } else { "no usable GPU" };
        assert!(error.to_string().contains(expected), "{error}");
    }
}
