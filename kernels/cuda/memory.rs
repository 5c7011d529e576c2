//! Device memory, pinned host memory, and spans of them.

use std::ffi::c_void;
use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::thread;

use bytemuck::Pod;
use cudarc::driver::sys;

use super::error::check;
use super::mapping::Mapping;
use super::{CudaError, Gpu};
use crate::cpu::Buffer;

/// A range of live device memory, passed to kernels by value.
///
/// Whoever creates a span guarantees that the memory outlives the work queued on it; the `device` crate keeps all
/// buffers until its queues are idle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    address: u64,
    bytes: usize,
}

impl Span {
    /// A null pointer, for absent optional arguments.
    pub const NULL: Span = Span { address: 0, bytes: 0 };

    /// Memory that was not allocated here: mapped from another process, or owned by a library.
    ///
    /// # Safety
    /// `bytes` at `address` must be device memory of the current GPU, or mapped into it, and stay so while work uses
    /// the span.
    pub unsafe fn from_raw(address: u64, bytes: usize) -> Self {
        Self { address, bytes }
    }

    /// Device address.
    pub fn address(self) -> u64 {
        self.address
    }

    /// Length in bytes.
    pub fn bytes(self) -> usize {
        self.bytes
    }

    /// Whether this is [`Span::NULL`].
    pub fn is_null(self) -> bool {
        self.address == 0
    }

    /// Number of `T` that fit.
    pub fn count<T>(self) -> usize {
        self.bytes / size_of::<T>()
    }

    /// Whether the address is a multiple of `alignment`.
    pub fn is_aligned(self, alignment: u64) -> bool {
        self.address.is_multiple_of(alignment)
    }

    /// Bytes `start..start + bytes`.
    ///
    /// # Panics
    /// Panics if they are outside: the caller computed a wrong layout.
    pub fn part(self, start: usize, bytes: usize) -> Self {
        let end = start.checked_add(bytes).expect("a part's end fits a usize");
        assert!(end <= self.bytes, "part {start}..{end} of a span of {} bytes", self.bytes);
        Self { address: self.address + start as u64, bytes }
    }

    /// Elements `start..start + count` of a span of `T`.
    ///
    /// # Panics
    /// Panics if they are outside.
    pub fn elements<T>(self, start: usize, count: usize) -> Self {
        self.part(start * size_of::<T>(), count * size_of::<T>())
    }
}

/// How long a buffer has its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Residence {
    /// Until it is dropped.
    Fixed,
    /// Except from [`DeviceBuffer::release`] to [`DeviceBuffer::restore`]. Other processes cannot map it.
    Releasable,
}

/// Device memory, freed when dropped.
#[derive(Debug)]
pub struct DeviceBuffer {
    span: Span,
    /// The memory of a buffer that can be released.
    mapping: Option<Mapping>,
    gpu: Arc<Gpu>,
}

impl DeviceBuffer {
    /// Allocates `bytes` of device memory with undefined contents; 0 bytes allocate nothing.
    pub fn new(gpu: &Arc<Gpu>, bytes: usize) -> Result<Self, CudaError> {
        let mut address = 0;
        if bytes > 0 {
            // SAFETY: `address` is writable and the context is current.
            let code = unsafe { sys::cuMemAlloc_v2(&mut address, bytes) };
            if code == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
                let (free, total) = gpu.memory()?;
                return Err(CudaError::OutOfMemory { bytes, free, total });
            }
            check(code, "cuMemAlloc")?;
        }
        Ok(Self { span: Span { address, bytes }, mapping: None, gpu: gpu.clone() })
    }

    /// The same with a choice of its residence. Buffers that are smaller than the pages of the GPU (2 MiB) are never
    /// released: many of them share a page.
    pub fn with_residence(gpu: &Arc<Gpu>, bytes: usize, residence: Residence) -> Result<Self, CudaError> {
        if residence == Residence::Fixed || bytes < Mapping::granularity(gpu)? {
            return Self::new(gpu, bytes);
        }
        let mapping = Mapping::new(gpu, bytes)?;
        Ok(Self { span: Span { address: mapping.address(), bytes }, mapping: Some(mapping), gpu: gpu.clone() })
    }

    /// Whether [`DeviceBuffer::release`] gives memory back.
    pub fn is_releasable(&self) -> bool {
        self.mapping.is_some()
    }

    /// Gives the memory back, if it can be released. Its contents are lost, and no queued work may use it. Addresses, and what
    /// was made from them, stay valid.
    pub fn release(&mut self) -> Result<(), CudaError> {
        self.mapping.as_mut().map_or(Ok(()), Mapping::release)
    }

    /// Takes the memory again, if it was released, with undefined contents.
    pub fn restore(&mut self) -> Result<(), CudaError> {
        self.mapping.as_mut().map_or(Ok(()), |mapping| mapping.restore(&self.gpu))
    }

    /// A buffer for `count` values of `T`.
    pub fn with_count<T>(gpu: &Arc<Gpu>, count: usize) -> Result<Self, CudaError> {
        Self::new(gpu, count * size_of::<T>())
    }

    /// A buffer that contains `values`; returns when the copy is complete. For start-up and tests.
    pub fn from_slice<T: Pod>(gpu: &Arc<Gpu>, values: &[T]) -> Result<Self, CudaError> {
        let buffer = Self::with_count::<T>(gpu, values.len())?;
        buffer.span.write(values)?;
        Ok(buffer)
    }

    /// The whole buffer.
    pub fn span(&self) -> Span {
        self.span
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        // A mapping frees its memory itself, in the context that is bound here.
        if !self.span.is_null() && self.gpu.bind().is_ok() && self.mapping.is_none() {
            // SAFETY: allocated by `new`, freed once; after a failure (a faulted context) nothing remains to be done.
            let _ = unsafe { sys::cuMemFree_v2(self.span.address) };
        }
    }
}

impl Span {
    /// Copies `values` to the start of the span and waits.
    ///
    /// # Panics
    /// Panics if they do not fit.
    pub fn write<T: Pod>(self, values: &[T]) -> Result<(), CudaError> {
        let bytes = size_of_val(values);
        assert!(bytes <= self.bytes, "{bytes} bytes into a span of {}", self.bytes);
        // SAFETY: source and destination have `bytes`. The call returns when the source has been read, which may be
        // before the copy is complete, so the null stream is waited for.
        unsafe {
            check(sys::cuMemcpyHtoD_v2(self.address, values.as_ptr().cast(), bytes), "cuMemcpyHtoD")?;
            check(sys::cuStreamSynchronize(std::ptr::null_mut()), "cuStreamSynchronize")
        }
    }

    /// Copies `count` values from the start of the span. It is ordered only after work on the null stream, so callers
    /// wait for their queue first.
    ///
    /// # Panics
    /// Panics if the span is shorter.
    pub fn read<T: Pod>(self, count: usize) -> Result<Vec<T>, CudaError> {
        let mut values = vec![T::zeroed(); count];
        let bytes = size_of_val(values.as_slice());
        assert!(bytes <= self.bytes, "{bytes} bytes from a span of {}", self.bytes);
        // SAFETY: source and destination have `bytes`; the call returns when they are copied.
        check(unsafe { sys::cuMemcpyDtoH_v2(values.as_mut_ptr().cast(), self.address, bytes) }, "cuMemcpyDtoH")?;
        Ok(values)
    }
}

/// Host memory that the GPU reads and writes directly: copies are faster and asynchronous, and kernels can access it.
///
/// The driver pins its own memory at 2.5 GB/s. So a large buffer is memory of the system, in huge pages that several threads
/// touch, and the driver only registers it: 20 GB/s with 16 threads (8 GiB on the host of an H200).
pub struct PinnedBuffer {
    pointer: *mut u8,
    bytes: usize,
    device_address: u64,
    gpu: Arc<Gpu>,
    /// The memory, unless the driver allocated it.
    registered: ManuallyDrop<Option<Buffer<u8>>>,
}

// SAFETY: plain memory, accessed only through `&self` and `&mut self`.
unsafe impl Send for PinnedBuffer {}
// SAFETY: as above.
unsafe impl Sync for PinnedBuffer {}

/// Buffers of this size or more are registered. [`Buffer`]s of huge pages share no page with other memory.
const MIN_REGISTERED_BYTES: usize = 4 << 20;
/// Bytes that one thread touches, at least, and the most threads.
const TOUCHED_BYTES: usize = 64 << 20;
const MAX_TOUCHING_THREADS: usize = 16;

impl PinnedBuffer {
    /// Allocates `bytes` of pinned memory, zeroed and mapped for the GPU.
    pub fn new(gpu: &Arc<Gpu>, bytes: usize) -> Result<Self, CudaError> {
        let mut registered = (bytes >= MIN_REGISTERED_BYTES).then(|| touched(bytes));
        let pointer = match &mut registered {
            Some(buffer) => register(buffer)?,
            None => allocate(bytes)?,
        };
        let mut pinned =
            Self { pointer, bytes, device_address: 0, gpu: gpu.clone(), registered: ManuallyDrop::new(registered) };
        let address = &mut pinned.device_address;
        // SAFETY: the out pointer is writable; the memory is pinned and mapped.
        check(unsafe { sys::cuMemHostGetDevicePointer_v2(address, pointer.cast(), 0) }, "cuMemHostGetDevicePointer")?;
        Ok(pinned)
    }

    /// The same memory as kernels see it.
    pub fn span(&self) -> Span {
        Span { address: self.device_address, bytes: self.bytes }
    }
}

const PINNED_FLAGS: u32 = sys::CU_MEMHOSTALLOC_DEVICEMAP | sys::CU_MEMHOSTALLOC_PORTABLE;

/// Zeroed memory whose pages are all assigned.
fn touched(bytes: usize) -> Buffer<u8> {
    let mut buffer = Buffer::new(bytes);
    let cores = thread::available_parallelism().map_or(1, usize::from).min(MAX_TOUCHING_THREADS);
    let part = bytes.div_ceil(cores).max(TOUCHED_BYTES);
    thread::scope(|scope| {
        for part in buffer.chunks_mut(part) {
            // Without a thread, the driver assigns the pages when it registers them.
            let _ = thread::Builder::new().spawn_scoped(scope, || part.fill(0));
        }
    });
    buffer
}

fn register(buffer: &mut Buffer<u8>) -> Result<*mut u8, CudaError> {
    let pointer = buffer.as_mut_ptr();
    // SAFETY: the buffer has these bytes, in pages of its own, and is unregistered before it is freed.
    check(unsafe { sys::cuMemHostRegister_v2(pointer.cast(), buffer.len(), PINNED_FLAGS) }, "cuMemHostRegister")?;
    Ok(pointer)
}

/// Small memory of the driver, zeroed.
fn allocate(bytes: usize) -> Result<*mut u8, CudaError> {
    let mut pointer: *mut c_void = std::ptr::null_mut();
    // SAFETY: the out pointer is writable; the memory has `bytes` (at least 1) and is then zeroed.
    unsafe {
        check(sys::cuMemHostAlloc(&mut pointer, bytes.max(1), PINNED_FLAGS), "cuMemHostAlloc")?;
        std::ptr::write_bytes(pointer.cast::<u8>(), 0, bytes);
    }
    Ok(pointer.cast())
}

impl Deref for PinnedBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `bytes` were allocated and zeroed in `new`.
        unsafe { std::slice::from_raw_parts(self.pointer, self.bytes) }
    }
}

impl DerefMut for PinnedBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` is borrowed for writing.
        unsafe { std::slice::from_raw_parts_mut(self.pointer, self.bytes) }
    }
}

impl fmt::Debug for PinnedBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedBuffer").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        if self.gpu.bind().is_err() {
            return; // What is still pinned cannot be used for anything else.
        }
        let pointer = self.pointer.cast();
        match &*self.registered {
            // SAFETY: registered by `new`. The buffer is dropped once, and not used afterwards.
            Some(_) => unsafe {
                if check(sys::cuMemHostUnregister(pointer), "cuMemHostUnregister").is_ok() {
                    ManuallyDrop::drop(&mut self.registered);
                }
            },
            // SAFETY: allocated by `new`, freed once.
            None => drop(unsafe { sys::cuMemFreeHost(pointer) }),
        }
    }
}
