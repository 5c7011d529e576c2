//! Refuses a model whose weights are larger than the free memory, before they are read, and takes the host memory that the rank passes.

use std::hash::{DefaultHasher, Hash, Hasher};

use device::cpu::WeightPrecision;
use ipc::MappedMemory;
use models::{Config, WorkerShape};
use ops::{MemoryEstimate, Target, TensorParallel};
use supervision::{PassedMemory, WorkerSpec};

use crate::error::WorkerError;
use crate::estimate::estimate_memory;

/// Most workers of a group that are tried for a model that does not fit.
const MAX_WORKERS: u32 = 1024;

/// Compares the weights of this worker with the free memory of its device. Returns the estimate of its memory; nothing if there is none,
/// as loading then fails for the same reason.
///
/// # Errors
/// When they do not fit, with the number of ranks that would hold them; when the device cannot have the slots for adapters.
pub(crate) fn check(
    spec: &WorkerSpec,
    config: &Config,
    shape: &WorkerShape,
    free: u64,
) -> Result<Option<MemoryEstimate>, WorkerError> {
    let estimate = |tp: TensorParallel| estimate_memory(&spec.checkpoint, config, &WorkerShape { tp, ..*shape });
    // The system can drop pages of files.
    let needed = |estimate: &MemoryEstimate| estimate.weights_bytes - estimate.mapped_bytes;
    let needed_bytes = match estimate(shape.tp) {
        Ok(estimate) if needed(&estimate) <= free => return Ok(Some(estimate)),
        Ok(estimate) => needed(&estimate),
        // Slots for adapters are allocated after loading.
        Err(error) if shape.max_adapters > 0 => return Err(error.into()),
        Err(_) => return Ok(None),
    };
    let sizes = std::iter::successors(Some(shape.tp.size * 2), |size| Some(size * 2));
    let sizes = sizes.take_while(|&size| size <= MAX_WORKERS);
    // A size that does not divide the model is not advised.
    let mut possible = sizes.map_while(|size| Some((size, needed(&estimate(TensorParallel { rank: 0, size }).ok()?))));
    let fitting = possible.find(|(_, bytes)| *bytes <= free).map(|(size, _)| size * shape.stage.count);
    let ranks = fitting.map(|ranks| match shape.target {
        Target::Cuda => format!("start {ranks} ranks (`--world-size={ranks}`)"),
        // Workers on CPUs of one machine share its memory.
        Target::Cpu => format!("start {ranks} ranks on as many machines (`--hosts`)"),
    });
    let is_quantized = shape.precision != WeightPrecision::Checkpoint || config.stored_quantization().is_some();
    let quantize = (!is_quantized).then(|| "quantize them (`--weight-only-precision`)".to_owned());
    let cures: Vec<String> = ranks.into_iter().chain(quantize).collect();
    let cure = if cures.is_empty() { "use devices with more memory".to_owned() } else { cures.join(", or ") };
    Err(WorkerError::Memory { needed: gib(needed_bytes), free: gib(free), cure })
}

/// The host memory that the rank of this worker passes to it.
///
/// # Errors
/// When it is not what the spec says.
pub(crate) fn passed_host_memory(spec: &WorkerSpec) -> Result<Option<MappedMemory>, WorkerError> {
    let bytes = spec.settings.kv_host_memory_bytes;
    let memory = |passed: PassedMemory| match usize::try_from(bytes) {
        Ok(len) => Ok(MappedMemory::inherit(passed.descriptor, len)?),
        Err(_) => Err(WorkerError::HostMemory { bytes, workers: 1, free: usize::MAX as u64 }),
    };
    spec.host_memory.map(memory).transpose()
}

/// The number of a layout of host memory with slots of these sizes, for a block and for a state. Another build may arrange a block in
/// another way.
pub(crate) fn layout(sizes: [u64; 2]) -> u64 {
    let mut hasher = DefaultHasher::new();
    (env!("CARGO_PKG_VERSION"), sizes).hash(&mut hasher);
    hasher.finish().max(1) // 0 is that of new memory.
}

/// Compares the host memory for evicted KV blocks of all workers on this node with the free memory. They have allocated `allocated`
/// bytes each before this start, and the others when all have loaded their weights.
///
/// # Errors
/// When it does not fit, and is not the default. The default may be larger than what this node has free.
pub(crate) fn host_fits(spec: &WorkerSpec, allocated: u64) -> Result<bool, WorkerError> {
    let (bytes, workers) = (spec.settings.kv_host_memory_bytes, spec.num_local_workers);
    match device::cpu::available_memory() {
        // 0 is unknown.
        free @ 1.. if bytes.saturating_sub(allocated).saturating_mul(workers as u64) > free => {
            match spec.settings.kv_host_memory_is_share {
                true => Ok(false),
                false => Err(WorkerError::HostMemory { bytes, workers, free }),
            }
        }
        _ => Ok(true),
    }
}

/// The bytes of host memory that a worker uses whose device has `free` bytes before it loads: none if they are the default, and their
/// buffers would take much of the room for KV blocks. A worker that starts again has what the one before it had.
pub(crate) fn worthwhile_host_bytes(spec: &WorkerSpec, estimate: Option<&MemoryEstimate>, free: u64) -> u64 {
    let bytes = spec.settings.kv_host_memory_bytes;
    let is_sure = !spec.settings.kv_host_memory_is_share || spec.next_step > 0;
    if is_sure || estimate.is_none_or(|estimate| estimate.affords_host_buffers(free)) { bytes } else { 0 }
}

fn gib(bytes: u64) -> String {
    format!("{:.2} GiB", bytes as f64 / f64::from(1 << 30))
}
