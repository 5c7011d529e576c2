//! Decode steps recorded as CUDA graphs.

use std::collections::HashMap;

use kernels::cuda::Graph;

use super::step::StepShape;
use super::{CudaDevice, device_error};
use crate::{DeviceError, StepInputs};

/// Largest number of rows that is recorded.
const MAX_BUCKET: usize = 256;

/// Recordings by number of rows, and whether sampling is plain greedy.
pub(crate) struct Graphs {
    buckets: Vec<usize>,
    recorded: HashMap<(usize, bool), Graph>,
}

impl Graphs {
    pub(crate) fn new(enabled: bool, max_rows: usize) -> Self {
        let buckets = if enabled { buckets(max_rows) } else { Vec::new() };
        Self { buckets, recorded: HashMap::new() }
    }

    /// Rows of the largest bucket; 0 without any.
    pub(crate) fn largest_bucket(&self) -> usize {
        self.buckets.last().copied().unwrap_or(0)
    }

    /// The bucket of a step of decodes that all sample; other steps are not recorded.
    pub(crate) fn bucket(&self, inputs: &StepInputs) -> Option<usize> {
        let rows = inputs.num_rows();
        let in_order = |(index, sample): (usize, &crate::SampleInput)| sample.token_index as usize == index;
        if inputs.num_prefill_rows != 0
            || inputs.samples.len() != rows
            || !inputs.samples.iter().enumerate().all(in_order)
        {
            return None;
        }
        self.buckets.iter().copied().find(|&bucket| bucket >= rows)
    }
}

/// 1, 2, 4, then by 8, up to the least that holds `max_rows`.
fn buckets(max_rows: usize) -> Vec<usize> {
    let mut buckets = Vec::new();
    for bucket in [1, 2, 4].into_iter().chain((8..=MAX_BUCKET).step_by(8)) {
        buckets.push(bucket);
        if bucket >= max_rows {
            break;
        }
    }
    buckets
}

impl CudaDevice {
    /// Replays the bucket's recording; the first time, runs the step op by op and records it behind its back.
    pub(crate) fn run_recorded(
        &mut self,
        inputs: &StepInputs,
        bucket: usize,
        forward: &mut dyn FnMut(&mut Self) -> Result<(), DeviceError>,
    ) -> Result<usize, DeviceError> {
        let slot = self.begin_step(inputs, StepShape::decode(bucket))?;
        let key = (bucket, self.current().is_greedy);
        if let Some(graph) = self.graphs.recorded.get(&key) {
            self.queue.replay(graph).map_err(device_error)?;
            return Ok(slot);
        }
        forward(self)?;
        let queue = self.queue.clone();
        let graph = queue.capture(|| forward(self).map_err(Recorded::from));
        self.graphs.recorded.insert(key, graph.map_err(|Recorded(error)| error)?);
        Ok(slot)
    }
}

/// An error while recording, of the device or of the driver.
struct Recorded(DeviceError);

impl From<DeviceError> for Recorded {
    fn from(error: DeviceError) -> Self {
        Self(error)
    }
}

impl From<kernels::cuda::CudaError> for Recorded {
    fn from(error: kernels::cuda::CudaError) -> Self {
        Self(device_error(error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_cover_every_number_of_rows() {
        assert_eq!(buckets(1), [1]);
        assert_eq!(buckets(10), [1, 2, 4, 8, 16]);
        assert_eq!(buckets(1000).last(), Some(&256));
    }
}
