//! Device memory whose physical part can be given back while its addresses stay reserved (CUDA driver API, 6.14 Virtual
//! Memory Management).

use std::mem;

use cudarc::driver::sys;

use super::error::check;
use super::{CudaError, Gpu};

/// A range of addresses, with or without memory behind it.
#[derive(Debug)]
pub(super) struct Mapping {
    address: u64,
    /// A multiple of the granularity.
    bytes: usize,
    /// `None` while the memory is released.
    memory: Option<sys::CUmemGenericAllocationHandle>,
}

impl Mapping {
    /// Reserves addresses for at least `bytes`, with memory of `gpu`, whose context is current.
    pub(super) fn new(gpu: &Gpu, bytes: usize) -> Result<Self, CudaError> {
        let bytes = bytes.next_multiple_of(Self::granularity(gpu)?);
        let mut address = 0;
        // SAFETY: `address` is writable.
        check(unsafe { sys::cuMemAddressReserve(&mut address, bytes, 0, 0, 0) }, "cuMemAddressReserve")?;
        let mut mapping = Self { address, bytes, memory: None };
        mapping.restore(gpu)?;
        Ok(mapping)
    }

    /// Memory is taken in multiples of this number of bytes.
    pub(super) fn granularity(gpu: &Gpu) -> Result<usize, CudaError> {
        let (mut bytes, properties) = (0, properties(gpu));
        let least = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        // SAFETY: `bytes` is writable, and the properties are complete.
        let code = unsafe { sys::cuMemGetAllocationGranularity(&mut bytes, &properties, least) };
        check(code, "cuMemGetAllocationGranularity")?;
        Ok(bytes.max(1))
    }

    pub(super) fn address(&self) -> u64 {
        self.address
    }

    /// Gives the memory back. No work that uses it may be queued.
    pub(super) fn release(&mut self) -> Result<(), CudaError> {
        let Some(memory) = self.memory.take() else { return Ok(()) };
        // SAFETY: the whole range was mapped to this handle; both are released once, and by the contract nothing uses the range.
        unsafe {
            check(sys::cuMemUnmap(self.address, self.bytes), "cuMemUnmap")?;
            check(sys::cuMemRelease(memory), "cuMemRelease")
        }
    }

    /// Takes memory again, with undefined contents, at the same addresses.
    pub(super) fn restore(&mut self, gpu: &Gpu) -> Result<(), CudaError> {
        if self.memory.is_some() {
            return Ok(());
        }
        let (mut memory, properties) = (0, properties(gpu));
        // SAFETY: `memory` is writable, and the properties are complete.
        let code = unsafe { sys::cuMemCreate(&mut memory, self.bytes, &properties, 0) };
        if code == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            let (free, total) = gpu.memory()?;
            return Err(CudaError::OutOfMemory { bytes: self.bytes, free, total });
        }
        check(code, "cuMemCreate")?;
        // SAFETY: the range is reserved and not mapped, and the handle has its length.
        let mapped = check(unsafe { sys::cuMemMap(self.address, self.bytes, 0, memory, 0) }, "cuMemMap");
        if mapped.is_err() {
            // SAFETY: the handle was created above and is not mapped.
            let _ = unsafe { sys::cuMemRelease(memory) };
            return mapped;
        }
        self.memory = Some(memory);
        let access = sys::CUmemAccessDesc {
            location: properties.location,
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: the range is mapped, and there is one description.
        check(unsafe { sys::cuMemSetAccess(self.address, self.bytes, &access, 1) }, "cuMemSetAccess")
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // After a failure (a faulted context) nothing remains to be done.
        let _ = self.release();
        // SAFETY: reserved by `new`, freed once.
        let _ = unsafe { sys::cuMemAddressFree(self.address, self.bytes) };
    }
}

/// Memory of a GPU.
fn properties(gpu: &Gpu) -> sys::CUmemAllocationProp {
    // SAFETY: a plain structure of the driver, in which zero stands for no handle type and no flag.
    let mut properties: sys::CUmemAllocationProp = unsafe { mem::zeroed() };
    properties.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = gpu.device();
    properties
}
