//! Settings of the CUDA device.

use std::path::PathBuf;
use std::sync::Arc;

use kernels::cuda::Residence;
use ops::{PipelineStage, StepLimits, TensorParallel};

use crate::Exchange;

/// Minimum number of steps that may be queued and not yet collected.
const LEAST_IN_FLIGHT: usize = 4;

/// Settings of a [`super::CudaDevice`].
#[derive(Clone)]
pub struct CudaConfig {
    /// Index of the GPU among those that the driver shows to this process.
    pub ordinal: usize,
    /// This worker's rank in its group.
    pub tensor_parallel: TensorParallel,
    /// Exchange among the group's workers at start; required if there is more than one.
    pub exchange: Option<Arc<dyn Exchange>>,
    /// The pipeline stage of this worker.
    pub stage: PipelineStage,
    /// Exchange at start among the workers of all stages that have this rank in their groups, in order of stages;
    /// required if there is more than one stage.
    pub stage_exchange: Option<Arc<dyn Exchange>>,
    /// Limits of every step.
    pub limits: StepLimits,
    /// Maximum number of draft tokens that a row verifies in a step.
    pub max_drafts: usize,
    /// Fraction of the device memory left after weights and workspace that KV blocks may use, in (0, 1].
    pub kv_memory_fraction: f64,
    /// Directories of NVIDIA's libraries, or roots of Python environments that contain them. They are searched before
    /// the usual places.
    pub library_dirs: Vec<PathBuf>,
    /// Directory where measurements are stored between starts; `None` measures at every start.
    pub cache_dir: Option<PathBuf>,
    /// Bytes of host memory for KV blocks and recurrent states that are evicted from the device; 0 for none.
    pub host_memory_bytes: u64,
    /// Whether decode steps are recorded as CUDA graphs.
    pub use_graphs: bool,
    /// Whether the optimized kernels of this project are used where they are faster than library functions and simple
    /// kernels.
    pub use_fast_kernels: bool,
    /// Whether the result of a row must have the same bits whatever the other rows of its step are. Slower; see
    /// [`super::invariant`].
    pub batch_invariant: bool,
    /// Whether [`ops::Device::sleep`] can free the GPU's memory.
    pub sleep_mode: bool,
}

impl CudaConfig {
    /// Maximum number of steps queued and not yet collected. With stages, one step more than there are stages is
    /// planned ahead.
    pub(crate) fn max_in_flight(&self) -> usize {
        LEAST_IN_FLIGHT.max(self.stage.count as usize + 1)
    }

    /// Residence of weights, KV blocks and recurrent states.
    pub(crate) fn residence(&self) -> Residence {
        if self.sleep_mode { Residence::Releasable } else { Residence::Fixed }
    }

    /// Residence of activations. Those of several workers are mapped into each other.
    pub(crate) fn activation_residence(&self) -> Residence {
        match self.tensor_parallel.size == 1 && self.stage.count == 1 {
            true => self.residence(),
            false => Residence::Fixed,
        }
    }

    /// Maximum number of tokens that a step chooses: one for each row and each of its drafts.
    pub(crate) fn max_samples(&self) -> usize {
        let StepLimits { max_rows, max_tokens, .. } = self.limits;
        (max_rows * (1 + self.max_drafts)).min(max_tokens).max(max_rows)
    }

    /// Settings for GPU `ordinal` and a group of one, with all optimizations on.
    pub fn new(ordinal: usize, limits: StepLimits) -> Self {
        Self {
            ordinal,
            tensor_parallel: TensorParallel { rank: 0, size: 1 },
            exchange: None,
            stage: PipelineStage::WHOLE,
            stage_exchange: None,
            limits,
            max_drafts: 0,
            kv_memory_fraction: 0.9,
            library_dirs: Vec::new(),
            cache_dir: None,
            host_memory_bytes: 0,
            use_graphs: true,
            use_fast_kernels: true,
            batch_invariant: false,
            sleep_mode: false,
        }
    }
}
