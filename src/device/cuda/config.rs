//! What a CUDA device needs to know.

use std::path::PathBuf;
use std::sync::Arc;

use super::exchange::Exchange;
use crate::{StepLimits, TensorParallel};

/// Settings of a [`super::CudaDevice`].
#[derive(Clone)]
pub struct CudaConfig {
    /// Which GPU of those the driver shows to this process.
    pub ordinal: usize,
    /// This worker's place in its group.
    pub tensor_parallel: TensorParallel,
    /// How the group's workers reach each other at start; needed where the group has more than one.
    pub exchange: Option<Arc<dyn Exchange>>,
    /// Bounds of every step.
    pub limits: StepLimits,
    /// Share of the device memory left after weights and workspace that KV blocks may take, in (0, 1].
    pub kv_memory_fraction: f64,
    /// Folders of NVIDIA's libraries, or roots of Python environments that hold them, searched before the usual places.
    pub library_dirs: Vec<PathBuf>,
    /// Where measurements are kept between starts; `None` measures at every start.
    pub cache_dir: Option<PathBuf>,
    /// Whether decode steps are recorded as CUDA graphs.
    pub use_graphs: bool,
    /// Whether own kernels replace library ones and simple ones where they are faster.
    pub use_fast_kernels: bool,
}

impl CudaConfig {
    /// GPU `ordinal` for a group of one, with everything on.
    pub fn new(ordinal: usize, limits: StepLimits) -> Self {
        Self {
            ordinal,
            tensor_parallel: TensorParallel { rank: 0, size: 1 },
            exchange: None,
            limits,
            kv_memory_fraction: 0.9,
            library_dirs: Vec::new(),
            cache_dir: None,
            use_graphs: true,
            use_fast_kernels: true,
        }
    }
}
