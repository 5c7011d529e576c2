//! Sleep: the weights move to pinned host memory, and the memory of the GPU is released. Addresses stay reserved, so recorded
//! graphs and everything else that refers to buffers is valid after the wake.
//!
//! What stays on the GPU: its context, kernels and graphs, buffers smaller than its pages, NCCL's memory, and in a group of
//! workers the activations, which are mapped into each other.

use std::sync::Arc;
use std::thread;
use std::time::Instant;

use kernels::cuda::{CudaError, DeviceBuffer, Gpu, PinnedBuffer, Queue};
use ops::DeviceError;

use super::cache::Cache;
use super::expert_buffers::ExpertBuffers;
use super::memory::Workspace;
use super::{CudaDevice, device_error};

/// Number of threads that copy weights to the host: pinning memory takes longer than the copies.
const NUM_THREADS: usize = 8;
/// Time between the frees of two pieces of pinned memory, as a multiple of the time that the first one took.
const UNPIN_PAUSE: u32 = 3;

impl CudaDevice {
    /// Bytes of the weights that move to the host.
    pub(super) fn saved_bytes(&self) -> u64 {
        let releasable = self.weights.iter().filter(|buffer| buffer.is_releasable());
        releasable.map(|buffer| buffer.span().bytes() as u64).sum()
    }

    /// Copies the weights to the host, and releases the memory of the GPU.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] if the host's memory cannot be pinned; nothing has changed then.
    pub(super) fn release_memory(&mut self) -> Result<(), DeviceError> {
        self.queue.wait().map_err(device_error)?;
        let saved = save(&self.gpu, &self.weights).map_err(|error| DeviceError::OutOfMemory {
            device: "host".into(),
            what: format!("weights that the GPU gives up ({error})"),
            needed_bytes: self.saved_bytes(),
            free_bytes: crate::cpu::available_memory(),
        })?;
        self.saved = saved;
        self.each_released(DeviceBuffer::release)
    }

    /// Takes the memory of the GPU again, and copies the weights back.
    pub(super) fn restore_memory(&mut self) -> Result<(), DeviceError> {
        self.each_released(DeviceBuffer::restore)?;
        let saved = std::mem::take(&mut self.saved);
        for (index, bytes) in &saved {
            let to = self.weights[*index].span();
            // SAFETY: the memory is pinned, and is not freed before the wait below.
            unsafe { self.queue.upload(to, bytes.as_ptr(), bytes.len()) }.map_err(device_error)?;
        }
        self.clear_cache().map_err(device_error)?;
        self.queue.wait().map_err(device_error)?;
        // No step needs to wait for it. Without a thread, the memory is freed here.
        let _ = thread::Builder::new().name("unpin".into()).spawn(move || unpin(saved));
        Ok(())
    }

    /// Applies `change` to the weights, and to large buffers whose contents a sleep need not keep.
    fn each_released(&mut self, change: fn(&mut DeviceBuffer) -> Result<(), CudaError>) -> Result<(), DeviceError> {
        let blocks = self.cache.iter_mut().flat_map(Cache::contentless).chain(self.states.buffer());
        let workspace = self.workspace.iter_mut().flat_map(Workspace::contentless);
        let experts = self.expert_buffers.iter_mut().flat_map(ExpertBuffers::contentless);
        let mut all = blocks.chain(workspace).chain(experts).chain(&mut self.tensors).chain(&mut self.weights);
        all.try_for_each(change).map_err(device_error)
    }
}

/// Frees pinned memory. Each piece blocks other calls of the driver, so steps get time between two pieces.
fn unpin(saved: Vec<(usize, PinnedBuffer)>) {
    for (_, piece) in saved {
        let started = Instant::now();
        drop(piece);
        thread::sleep(UNPIN_PAUSE * started.elapsed());
    }
}

/// Copies of the weights that can be released, each with its index.
fn save(gpu: &Arc<Gpu>, weights: &[DeviceBuffer]) -> Result<Vec<(usize, PinnedBuffer)>, CudaError> {
    let copy_some = |first: usize| -> Result<Vec<(usize, PinnedBuffer)>, CudaError> {
        gpu.bind()?;
        let queue = Queue::new(gpu)?;
        let own = weights.iter().enumerate().filter(|(_, buffer)| buffer.is_releasable());
        let mut copies = Vec::new();
        let queued = own.skip(first).step_by(NUM_THREADS).try_for_each(|(index, buffer)| -> Result<(), CudaError> {
            let span = buffer.span();
            let mut copy = PinnedBuffer::new(gpu, span.bytes())?;
            // SAFETY: the target is pinned, as long as the source, and neither read nor freed before the wait below.
            unsafe { queue.download(copy.as_mut_ptr(), span, span.bytes()) }?;
            copies.push((index, copy));
            Ok(())
        });
        // Also after an error: copies may be queued.
        queue.wait().and(queued)?;
        Ok(copies)
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..NUM_THREADS).map(|first| scope.spawn(move || copy_some(first))).collect();
        let copies = threads.into_iter().map(|thread| thread.join().expect("a copying thread does not panic"));
        Ok(copies.collect::<Result<Vec<_>, CudaError>>()?.into_iter().flatten().collect())
    })
}
