//! Raw logits of the positions that a step reports. They are rare and large, so the step waits for them.

use kernels::cuda::{DeviceBuffer, PinnedBuffer, gather_rows};
use ops::DeviceError;

use super::{CudaDevice, CudaTensor, CudaWeight, device_error};

/// Number of positions that are computed and copied at a time.
const MAX_ROWS: usize = 16;

/// The positions of the current step, and the staging buffers.
#[derive(Default)]
pub(crate) struct Reports {
    /// As [`ops::StepInputs::logits`].
    pub(crate) positions: Vec<u32>,
    /// `[positions][V]` of the current step.
    pub(crate) rows: Vec<Vec<f32>>,
    /// Allocated when the first step reports logits.
    staging: Option<Staging>,
}

struct Staging {
    /// `[MAX_ROWS]` u32.
    index: DeviceBuffer,
    /// `[group, MAX_ROWS, share]` f32.
    logits: PinnedBuffer,
}

impl CudaDevice {
    /// Computes the logits that the step reports and waits until they are on the host. Every worker of a group gets all
    /// of them.
    pub(crate) fn report_logits(&mut self, x: CudaTensor, head: &CudaWeight) -> Result<(), DeviceError> {
        if self.reports.positions.is_empty() {
            return Ok(());
        }
        let (share, workers) = (self.workspace().share, self.group.size());
        if self.reports.staging.is_none() {
            let index = DeviceBuffer::with_count::<u32>(&self.gpu, MAX_ROWS).map_err(device_error)?;
            let logits = PinnedBuffer::new(&self.gpu, workers * MAX_ROWS * share * 4).map_err(device_error)?;
            self.reports.staging = Some(Staging { index, logits });
        }
        let most = MAX_ROWS.min(self.workspace().max_rows);
        for positions in std::mem::take(&mut self.reports.positions).chunks(most) {
            self.report_some(x, head, positions)?;
        }
        Ok(())
    }

    fn report_some(&mut self, x: CudaTensor, head: &CudaWeight, positions: &[u32]) -> Result<(), DeviceError> {
        let (share, workers, vocab) = (self.workspace().share, self.group.size(), self.config.limits.vocab_size);
        let (count, gathered) = (positions.len(), self.workspace().gathered.span());
        let index = self.reports.staging.as_ref().expect("taken before the first position").index.span();
        self.queue.upload_copied(index, bytemuck::cast_slice(positions)).map_err(device_error)?;
        gather_rows::gather_rows(&self.queue, gathered, x.values, index, count, x.cols).map_err(device_error)?;
        let all = self.all_logits(gathered, head, count)?;
        self.group.all_gather(&self.queue, all)?;
        let staging = &mut self.reports.staging.as_mut().expect("as above").logits;
        // SAFETY: pinned, sized for `MAX_ROWS` rows of every worker, and read only after the queue was waited for.
        let copied = unsafe { self.queue.download(staging.as_mut_ptr(), all, all.bytes()) };
        copied.and_then(|()| self.queue.wait()).map_err(device_error)?;
        let values: &[f32] = bytemuck::cast_slice(&staging[..all.bytes()]);
        for row in 0..count {
            let parts = (0..workers).flat_map(|worker| &values[(worker * count + row) * share..][..share]);
            self.reports.rows.push(parts.take(vocab).copied().collect());
        }
        Ok(())
    }
}
