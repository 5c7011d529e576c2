//! The step whose ops are being queued, and the steps that wait to be collected.

use engine::{RowId, SampledToken, TokenId};
use kernels::cuda::Event;
use ops::{DeviceError, SampleInput, StepInputs};

use super::rows::Reported;
use super::step::{self, Layout, StepBounds, StepShape, StepSpans, TableShape};
use super::{CudaDevice, device_error, verify};

/// The step whose ops are being queued.
#[derive(Debug, Clone, Copy)]
pub(super) struct Current {
    pub(super) shape: StepShape,
    pub(super) spans: StepSpans,
    /// Whether every sample is the plain argmax and reports nothing else.
    pub(super) is_greedy: bool,
    /// Whether tokens are chosen after masks have arrived, and not by [`ops::Device::sample`].
    pub(super) is_masked: bool,
    /// If rows of several tokens compute their recurrent states in order: the first of them, and its first token. Chunks come before.
    pub(super) in_order: Option<[usize; 2]>,
    /// Whether what guesses drafts runs behind it. Not set in the passes of guesses themselves.
    pub(super) runs_drafter: bool,
    /// Whether only the library's products are queued, to choose their algorithms.
    pub(super) only_products: bool,
}

/// A step that was queued and not yet collected.
pub(super) struct InFlight {
    pub(super) slot: usize,
    pub(super) done: Event,
    /// The row of each sample, its index in the outputs, and what it reports.
    pub(super) samples: Vec<(usize, RowId, Reported)>,
    /// The rows for which tokens behind these are guessed.
    pub(super) guesses: Vec<RowId>,
    /// These guesses, if a later step has read them.
    pub(super) guessed: Option<Vec<(RowId, Vec<TokenId>)>>,
    /// Logits that it reports.
    pub(super) logits: Vec<Vec<f32>>,
}

/// The samples of a plan, and their indices in the outputs of `inputs`.
pub(super) fn indexed(inputs: &StepInputs, whole: &StepInputs) -> Vec<(usize, SampleInput)> {
    let index = |sample: &SampleInput| verify::sample_at(inputs, sample.token_index).expect("a step has all samples");
    whole.samples.iter().map(|sample| (index(sample), *sample)).collect()
}

impl CudaDevice {
    /// Refuses a decode whose token is not the last of its context: attention derives the rotation's position from the
    /// context's length.
    pub(super) fn check_newest(&self, inputs: &StepInputs) -> Result<(), DeviceError> {
        let bounds = self.bounds()?;
        let block_size = bounds.block_size as u32;
        for row in inputs.num_prefill_rows..inputs.num_rows() {
            let token = inputs.row_starts[row] as usize;
            let position = inputs.positions[token];
            for group in 0..bounds.tables.num_groups {
                let slot = inputs.slots_of(group)[token];
                let block = inputs.block_table(group, row).get((position / block_size) as usize).copied();
                let expected =
                    block.and_then(|block| block.checked_mul(block_size)).map(|first| first + position % block_size);
                if position + 1 == inputs.context_lens[row] && expected == Some(slot) {
                    continue;
                }
                return Err(DeviceError::Call {
                    call: format!("step {}", inputs.step),
                    reason: format!(
                        "row {} decodes position {position} into slot {slot}, with a context of {} and block {block:?}",
                        inputs.rows[row].0, inputs.context_lens[row]
                    ),
                });
            }
        }
        Ok(())
    }

    pub(super) fn bounds(&self) -> Result<StepBounds, DeviceError> {
        let cache = self.cache.as_ref().ok_or_else(|| DeviceError::Call {
            call: "run_step".into(),
            reason: "the cache is allocated before the first step".into(),
        })?;
        let bounds = cache.bounds(&self.config.limits);
        Ok(StepBounds {
            max_positions: bounds.max_positions.min(self.num_positions),
            max_samples: self.config.max_samples(),
            adapters: self.adapters.bounds(),
            ..bounds
        })
    }

    /// Packs and uploads the step, and makes it the current one. `whole` are the inputs as they are in the plan.
    pub(super) fn begin_step(
        &mut self,
        [inputs, whole]: [&StepInputs; 2],
        shape: StepShape,
    ) -> Result<usize, DeviceError> {
        let bounds = self.bounds()?;
        let slot = self.next_slot;
        self.next_slot = (slot + 1) % self.pinned_inputs.len();
        let words: &mut [u32] = bytemuck::cast_slice_mut(&mut self.pinned_inputs[slot]);
        let layout = step::pack([inputs, whole], &bounds, shape, slot as u32, words);
        // SAFETY: the slot's last step was collected, so its copy is complete; the buffer is not written again before
        // this copy is complete.
        let copied = unsafe { self.queue.upload(self.step_block.span(), words.as_ptr().cast(), layout.words * 4) };
        copied.map_err(device_error)?;
        let host_rows = || inputs.samples.iter().map(|sample| self.rows.host(sample.row.0 as usize));
        // Tokens are chosen in the last stage.
        let is_masked = !inputs.masked.is_empty() && self.pipeline.stage.is_last();
        let is_greedy = host_rows().all(|row| row.is_plain_greedy);
        let first = self.first_short.filter(|_| !whole.states.is_empty());
        let in_order = first.map(|first| [first, whole.row_starts[first] as usize]);
        let runs_drafter = whole.runs_drafter && self.guesses.is_some();
        self.current = Some(Current { is_masked, in_order, runs_drafter, ..self.step_at(shape, is_greedy) });
        Ok(slot)
    }

    /// Marks the end of a step's work. The step can be collected once the GPU has reached it.
    pub(super) fn finish_step(
        &mut self,
        slot: usize,
        samples: &[(usize, SampleInput)],
        guesses: Vec<RowId>,
    ) -> Result<(), DeviceError> {
        let done = match self.spare_events.pop() {
            Some(event) => event,
            None => Event::new(false).map_err(device_error)?,
        };
        done.record(&self.queue).map_err(device_error)?;
        // Tokens are chosen in the last stage.
        let samples = samples.iter().filter(|_| self.pipeline.stage.is_last());
        let samples = samples.map(|(index, s)| (*index, s.row, self.rows.host(s.row.0 as usize).reported)).collect();
        let logits = std::mem::take(&mut self.reports.rows);
        self.in_flight.push_back(InFlight { slot, done, samples, guesses, guessed: None, logits });
        Ok(())
    }

    pub(super) fn step_at(&self, shape: StepShape, is_greedy: bool) -> Current {
        let tables = self.cache.as_ref().map_or(TableShape::NONE, |cache| cache.tables(&self.config.limits));
        let layout = Layout::new(shape, tables);
        let spans = StepSpans::new(self.step_block.span(), &layout, shape, tables);
        Current { shape, spans, is_greedy, is_masked: false, in_order: None, runs_drafter: false, only_products: false }
    }

    pub(super) fn read_outputs(&self, step: &InFlight) -> Vec<SampledToken> {
        let workspace = self.workspace.as_ref().expect("a step ran");
        let output = |index: usize| workspace.output(step.slot, index);
        step.samples.iter().map(|&(index, row, reported)| output(index).token(row, reported)).collect()
    }
}
