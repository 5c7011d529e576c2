//! Queries of this node's devices.

use std::fmt;
use std::sync::Arc;

use front::ClientDevices;
use models::EstimateMemory;

/// Queries of the devices of this node. The program implements them, because this crate does not depend on `device`.
#[derive(Clone)]
pub struct Hardware {
    /// Number of GPUs that this process can use, 0 without a driver; or why a driver that is there cannot be used, and what
    /// to do.
    pub num_gpus: fn() -> Result<usize, String>,
    /// Name and free bytes of the GPU with this ordinal, or why it cannot be used.
    pub free_gpu_memory: fn(usize) -> Result<(String, u64), String>,
    /// Bytes of the CPU's memory that processes can get without swapping; 0 if unknown.
    pub free_cpu_memory: fn() -> u64,
    /// Number of cores in the affinity mask of this process; quotas may allow less.
    pub num_allowed_cores: fn() -> usize,
    /// The version of NVRTC that compiled the GPU kernels of this build; `None` if it has none.
    pub nvrtc_version: Option<&'static str>,
    /// Opens GPU memory that clients register.
    pub client_devices: Arc<dyn ClientDevices>,
    /// Estimates the memory of a worker.
    pub estimate_memory: EstimateMemory,
}

impl fmt::Debug for Hardware {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Hardware")
    }
}
