//! What the workers of a tensor-parallel group do together.

use kernels::cuda::{Queue, Span};

use super::CudaConfig;
use super::nccl::Nccl;
use crate::DeviceError;

/// A worker's reach to its group; a group of one has nobody to reach.
pub(crate) struct Group {
    nccl: Option<Nccl>,
    size: usize,
    rank: usize,
}

impl Group {
    pub(crate) fn new(config: &CudaConfig) -> Result<Self, DeviceError> {
        let tp = config.tensor_parallel;
        let (size, rank) = (tp.size as usize, tp.rank as usize);
        if size == 1 {
            return Ok(Self { nccl: None, size, rank });
        }
        let exchange = config.exchange.as_ref().ok_or_else(|| DeviceError::Unavailable {
            device: "cuda".into(),
            reason: format!("a group of {size} workers needs a way to exchange NCCL's id"),
        })?;
        Ok(Self { nccl: Some(Nccl::new(tp, exchange.as_ref(), &config.library_dirs)?), size, rank })
    }

    pub(crate) fn size(&self) -> usize {
        self.size
    }

    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    /// Sums bf16 `buffer` over the group, in place.
    pub(crate) fn all_reduce(&self, q: &Queue, buffer: Span) -> Result<(), DeviceError> {
        self.nccl.as_ref().map_or(Ok(()), |nccl| nccl.all_reduce(q, buffer))
    }

    /// Fills `buffer`, one part of each worker in rank order, from each worker's own part.
    pub(crate) fn all_gather(&self, q: &Queue, buffer: Span) -> Result<(), DeviceError> {
        self.nccl.as_ref().map_or(Ok(()), |nccl| nccl.all_gather(q, buffer, self.size))
    }
}
