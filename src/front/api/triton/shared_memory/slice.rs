//! Parts of regions that requests read and write.

use std::sync::Arc;

use bytes::Bytes;
use serving::{ClientSlice, CopyBudget, InferError, copy_within};

use super::devices::DeviceMemory;
use crate::transport::large_work::block_in_place_if_large;

/// A part of a region. It keeps the memory open.
pub(super) enum Slice {
    System(ClientSlice),
    Cuda {
        memory: Arc<dyn DeviceMemory>,
        offset: u64,
        byte_size: u64,
        region: String,
        budget: Option<Arc<dyn CopyBudget>>,
    },
}

impl Slice {
    pub(super) fn read(&self) -> Result<Bytes, InferError> {
        match self {
            Slice::System(slice) => block_in_place_if_large(slice.byte_size as usize, || slice.read()),
            Slice::Cuda { memory, offset, byte_size, region, budget } => {
                block_in_place_if_large(*byte_size as usize, || {
                    copy_within(budget.as_deref(), *byte_size, |data| {
                        memory.read(*offset, data).map_err(|why| unusable(region, &why))
                    })
                })
            }
        }
    }
}

pub(super) fn unusable(region: &str, why: &str) -> InferError {
    InferError::internal(format!("shared memory region '{region}' cannot be used any more: {why}"))
}
