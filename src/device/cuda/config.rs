//! What a CUDA device needs to know.

use std::path::PathBuf;
use std::sync::Arc;

use super::exchange::Exchange;
use crate::{PipelineStage, StepLimits, TensorParallel};

/// Steps that may be queued and not yet collected by any device.
const LEAST_IN_FLIGHT: usize = 4;

/// Settings of a [`super::CudaDevice`].
#[derive(Clone)]
pub struct CudaConfig {
    /// Which GPU of those the driver shows to this process.
    pub ordinal: usize,
    /// This worker's place in its group.
    pub tensor_parallel: TensorParallel,
    /// How the group's workers reach each other at start; needed where the group has more than one.
    pub exchange: Option<Arc<dyn Exchange>>,
    /// Which share of the layers this worker holds.
    pub stage: PipelineStage,
    /// How the workers of all stages at this place of their groups reach each other at start, in order of stages; needed where
    /// there is more than one stage.
    pub stage_exchange: Option<Arc<dyn Exchange>>,
    /// Bounds of every step.
    pub limits: StepLimits,
    /// Most drafts that a row verifies in a step.
    pub max_drafts: usize,
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
    /// Steps that may be queued and not yet collected: with stages, one more than there are of them is planned ahead.
    pub(crate) fn max_in_flight(&self) -> usize {
        LEAST_IN_FLIGHT.max(self.stage.count as usize + 1)
    }

    /// Most tokens that a step chooses: one of each row and of each of its drafts.
    pub(crate) fn max_samples(&self) -> usize {
        let StepLimits { max_rows, max_tokens, .. } = self.limits;
        (max_rows * (1 + self.max_drafts)).min(max_tokens).max(max_rows)
    }

    /// GPU `ordinal` for a group of one, with everything on.
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
            use_graphs: true,
            use_fast_kernels: true,
        }
    }
}
