//! Streams, launches, events and graphs.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys;

use super::error::check;
use super::launch::{Arg, Launch, Rows};
use super::{CudaError, Gpu, Span};

/// A stream: work runs in the order in which it was queued.
#[derive(Debug)]
pub struct Queue {
    gpu: Arc<Gpu>,
    stream: sys::CUstream,
}

// SAFETY: stream handles may be used from any thread.
unsafe impl Send for Queue {}
// SAFETY: as above; the driver locks what is necessary.
unsafe impl Sync for Queue {}

impl Queue {
    /// A stream that does not wait for the null stream.
    pub fn new(gpu: &Arc<Gpu>) -> Result<Self, CudaError> {
        let mut stream = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: `stream` is writable and the context is current.
        check(unsafe { sys::cuStreamCreate(&mut stream, flags) }, "cuStreamCreate")?;
        Ok(Self { gpu: gpu.clone(), stream })
    }

    /// The GPU of this stream.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// The driver's handle, for libraries.
    pub fn raw(&self) -> sys::CUstream {
        self.stream
    }

    /// Queues kernel `name` with `args` in the order of its parameters.
    ///
    /// Wrappers of ops call this after they have checked the kernel's requirements; the driver checks only counts and
    /// geometry.
    pub fn launch(&self, name: &str, launch: Launch, args: &[Arg<'_>]) -> Result<(), CudaError> {
        let kernel = self.gpu.kernel(name)?;
        let mut pointers: [*mut c_void; 32] = [std::ptr::null_mut(); 32];
        assert!(args.len() <= pointers.len(), "`{name}` has {} arguments; at most 32 are passed", args.len());
        for (slot, arg) in pointers.iter_mut().zip(args) {
            *slot = arg.pointer();
        }
        // SAFETY: an attribute is plain data for which zero is valid.
        let mut attributes: [sys::CUlaunchAttribute; 2] = unsafe { std::mem::zeroed() };
        let mut num_attributes = 0;
        if launch.early && self.gpu.capability().0 >= 9 {
            attributes[num_attributes].id =
                sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
            attributes[num_attributes].value.programmaticStreamSerializationAllowed = 1;
            num_attributes += 1;
        }
        if launch.cluster > 1 {
            attributes[num_attributes].id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
            attributes[num_attributes].value.clusterDim =
                sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: launch.cluster, y: 1, z: 1 };
            num_attributes += 1;
        }
        let config = sys::CUlaunchConfig {
            gridDimX: launch.grid[0],
            gridDimY: launch.grid[1],
            gridDimZ: launch.grid[2],
            blockDimX: launch.block[0],
            blockDimY: launch.block[1],
            blockDimZ: launch.block[2],
            sharedMemBytes: launch.shared_bytes,
            hStream: self.stream,
            attrs: attributes.as_mut_ptr(),
            numAttrs: num_attributes as u32,
        };
        // SAFETY: attributes and arguments outlive the call, which copies them; wrappers guarantee the kernel's
        // contract.
        let code = unsafe { sys::cuLaunchKernelEx(&config, kernel.0, pointers.as_mut_ptr(), std::ptr::null_mut()) };
        check(code, &format!("launch of `{name}`"))
    }

    /// Queues a copy of `bytes` from pinned host memory.
    ///
    /// # Safety
    /// The source must be pinned, have `bytes`, and not be written before the copy is complete.
    pub unsafe fn upload(&self, to: Span, from: *const u8, bytes: usize) -> Result<(), CudaError> {
        assert!(bytes <= to.bytes(), "{bytes} bytes into a span of {}", to.bytes());
        // SAFETY: by the contract.
        let code = unsafe { sys::cuMemcpyHtoDAsync_v2(to.address(), from.cast(), bytes, self.stream) };
        check(code, "cuMemcpyHtoDAsync")
    }

    /// Queues a copy of ordinary host memory, which may change after this returns. For small, rare copies.
    pub fn upload_copied(&self, to: Span, from: &[u8]) -> Result<(), CudaError> {
        // SAFETY: the driver stages memory that is not pinned before the call returns.
        unsafe { self.upload(to, from.as_ptr(), from.len()) }
    }

    /// Queues a copy of `bytes` to pinned host memory.
    ///
    /// # Safety
    /// The target must be pinned, have room for `bytes`, and not be read before the copy is complete.
    pub unsafe fn download(&self, to: *mut u8, from: Span, bytes: usize) -> Result<(), CudaError> {
        assert!(bytes <= from.bytes(), "{bytes} bytes from a span of {}", from.bytes());
        // SAFETY: by the contract.
        let code = unsafe { sys::cuMemcpyDtoHAsync_v2(to.cast(), from.address(), bytes, self.stream) };
        check(code, "cuMemcpyDtoHAsync")
    }

    /// Queues a copy inside device memory.
    pub fn copy(&self, to: Span, from: Span) -> Result<(), CudaError> {
        assert_eq!(to.bytes(), from.bytes(), "a copy has two spans of one length");
        // SAFETY: both spans are live device memory by their own contract.
        let code = unsafe { sys::cuMemcpyDtoDAsync_v2(to.address(), from.address(), to.bytes(), self.stream) };
        check(code, "cuMemcpyDtoDAsync")
    }

    /// Queues a copy of rows inside device memory.
    ///
    /// # Panics
    /// Panics if the rows differ in number or size, or do not lie in their span.
    pub fn copy_rows(&self, to: Rows, from: Rows) -> Result<(), CudaError> {
        assert_eq!((to.bytes, to.count), (from.bytes, from.count), "a copy has as many rows of the same size");
        to.check();
        from.check();
        // The driver's limit of a pitch is that of an `i32`.
        if to.count <= 1 || to.pitch.max(from.pitch) > i32::MAX as usize {
            return (0..to.count).try_for_each(|row| self.copy(to.row(row), from.row(row)));
        }
        let device = sys::CUmemorytype_enum::CU_MEMORYTYPE_DEVICE;
        let copy = sys::CUDA_MEMCPY2D_st {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: device,
            srcHost: std::ptr::null(),
            srcDevice: from.memory.address(),
            srcArray: std::ptr::null_mut(),
            srcPitch: from.pitch,
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: device,
            dstHost: std::ptr::null_mut(),
            dstDevice: to.memory.address(),
            dstArray: std::ptr::null_mut(),
            dstPitch: to.pitch,
            WidthInBytes: to.bytes,
            Height: to.count,
        };
        // SAFETY: both spans are live device memory by their own contract and hold the rows, as checked above.
        check(unsafe { sys::cuMemcpy2DAsync_v2(&copy, self.stream) }, "cuMemcpy2DAsync")
    }

    /// Queues filling the span with one byte value.
    pub fn fill(&self, span: Span, value: u8) -> Result<(), CudaError> {
        // SAFETY: the span is live device memory by its own contract.
        check(unsafe { sys::cuMemsetD8Async(span.address(), value, span.bytes(), self.stream) }, "cuMemsetD8Async")
    }

    /// Waits until all queued work is complete, and returns its errors.
    pub fn wait(&self) -> Result<(), CudaError> {
        // SAFETY: a live stream.
        check(unsafe { sys::cuStreamSynchronize(self.stream) }, "cuStreamSynchronize")
    }

    /// Makes work queued from now on wait for the event.
    pub fn wait_for(&self, event: &Event) -> Result<(), CudaError> {
        // SAFETY: live handles.
        check(unsafe { sys::cuStreamWaitEvent(self.stream, event.event, 0) }, "cuStreamWaitEvent")
    }

    /// Records the work that `queue` queues on this stream into a graph, instead of running it.
    pub fn capture<E: From<CudaError>>(&self, queue: impl FnOnce() -> Result<(), E>) -> Result<Graph, E> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: a live stream.
        check(unsafe { sys::cuStreamBeginCapture_v2(self.stream, mode) }, "cuStreamBeginCapture").map_err(E::from)?;
        let queued = queue();
        let mut graph = std::ptr::null_mut();
        // SAFETY: ends the capture begun above, also if queueing failed.
        let ended = unsafe { sys::cuStreamEndCapture(self.stream, &mut graph) };
        let captured = Captured(graph);
        queued?;
        check(ended, "cuStreamEndCapture").map_err(E::from)?;
        let mut executable = std::ptr::null_mut();
        // SAFETY: a complete graph, destroyed by its guard after this.
        let code = unsafe { sys::cuGraphInstantiateWithFlags(&mut executable, captured.0, 0) };
        check(code, "cuGraphInstantiate").map_err(E::from)?;
        Ok(Graph { executable })
    }

    /// Queues a recorded graph.
    pub fn replay(&self, graph: &Graph) -> Result<(), CudaError> {
        // SAFETY: live handles; the `device` crate drops graphs before the buffers in them.
        check(unsafe { sys::cuGraphLaunch(graph.executable, self.stream) }, "cuGraphLaunch")
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        if self.gpu.bind().is_ok() {
            // SAFETY: created by `new`, destroyed once; queued work still completes.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.stream) };
        }
    }
}

struct Captured(sys::CUgraph);

impl Drop for Captured {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: a graph returned by the capture, destroyed once.
            let _ = unsafe { sys::cuGraphDestroy(self.0) };
        }
    }
}

/// Recorded work that is replayed with one call.
#[derive(Debug)]
pub struct Graph {
    executable: sys::CUgraphExec,
}

// SAFETY: graph handles may be used from any thread, one at a time, which `&mut` owners guarantee.
unsafe impl Send for Graph {}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: instantiated in `capture`, destroyed once.
        let _ = unsafe { sys::cuGraphExecDestroy(self.executable) };
    }
}

/// A point in a stream.
#[derive(Debug)]
pub struct Event {
    event: sys::CUevent,
}

// SAFETY: event handles may be used from any thread.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// Creates an event; [`Event::ms_since`] can compare `timed` ones.
    pub fn new(timed: bool) -> Result<Self, CudaError> {
        let mut event = std::ptr::null_mut();
        let kind =
            if timed { sys::CUevent_flags::CU_EVENT_DEFAULT } else { sys::CUevent_flags::CU_EVENT_DISABLE_TIMING };
        // SAFETY: `event` is writable and the context is current.
        check(unsafe { sys::cuEventCreate(&mut event, kind as u32) }, "cuEventCreate")?;
        Ok(Self { event })
    }

    /// Records the point after all work queued so far.
    pub fn record(&self, queue: &Queue) -> Result<(), CudaError> {
        // SAFETY: live handles.
        check(unsafe { sys::cuEventRecord(self.event, queue.stream) }, "cuEventRecord")
    }

    /// Whether the work before the event is complete; returns its errors.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        // SAFETY: a live event.
        match unsafe { sys::cuEventQuery(self.event) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            code => check(code, "cuEventQuery").map(|()| true),
        }
    }

    /// Blocks until the work before the event is complete.
    pub fn wait(&self) -> Result<(), CudaError> {
        // SAFETY: a live event.
        check(unsafe { sys::cuEventSynchronize(self.event) }, "cuEventSynchronize")
    }

    /// Milliseconds from `earlier` to this event; both must have completed.
    pub fn ms_since(&self, earlier: &Event) -> Result<f32, CudaError> {
        let mut ms = 0.0;
        // SAFETY: live events and a writable float.
        check(unsafe { sys::cuEventElapsedTime_v2(&mut ms, earlier.event, self.event) }, "cuEventElapsedTime")?;
        Ok(ms)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: created by `new`, destroyed once.
        let _ = unsafe { sys::cuEventDestroy_v2(self.event) };
    }
}
