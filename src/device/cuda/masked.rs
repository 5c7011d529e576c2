//! Steps whose tokens are chosen among those of masks.
//!
//! The forward pass is queued when the plan arrives. The output head and the sampler are queued when the masks arrive,
//! because the masks depend on the tokens of the step before, which the GPU may still be computing then.

use std::ops::Range;
use std::sync::Arc;

use engine::SampleMask;
use kernels::cuda::sample::{Masks, NO_MASK};
use kernels::cuda::{CudaError, DeviceBuffer, Gpu, PinnedBuffer, Span};
use ops::{DeviceError, StepInputs};

use super::{CudaDevice, CudaTensor, CudaWeight, device_error, queued};

/// The step that waits for masks, and the buffer of the masks.
#[derive(Default)]
pub(crate) struct MaskedStep {
    /// The last activations and the output head. They are the same in every step.
    pub(crate) unsampled: Option<(CudaTensor, CudaWeight)>,
    /// The step that waits, and its slot.
    waiting: Option<(usize, StepInputs)>,
    /// Allocated when the first masks arrive.
    buffers: Option<Buffers>,
    /// `[S]` and `[masks, ceil(V / 32)]` of the current step.
    spans: Option<(Span, Span)>,
}

/// `[S]` u32, the mask of each sample, then `[masks, ceil(V / 32)]` u32.
struct Buffers {
    pinned: PinnedBuffer,
    on_gpu: DeviceBuffer,
}

impl Buffers {
    fn new(gpu: &Arc<Gpu>, words: usize) -> Result<Self, CudaError> {
        Ok(Self { pinned: PinnedBuffer::new(gpu, words * 4)?, on_gpu: DeviceBuffer::with_count::<u32>(gpu, words)? })
    }
}

impl MaskedStep {
    /// The forward pass of a step is queued in `slot`; its tokens wait for masks.
    pub(crate) fn wait(&mut self, slot: usize, inputs: &StepInputs) {
        let (step, samples, masked) = (inputs.step, inputs.samples.clone(), inputs.masked.clone());
        self.waiting = Some((slot, StepInputs { step, samples, masked, ..StepInputs::default() }));
    }

    /// The masks of some of the step's samples.
    pub(crate) fn masks(&self, part: Range<usize>) -> Masks {
        let (rows, words) = self.spans.expect("masks are uploaded before tokens are chosen");
        Masks { rows: rows.elements::<u32>(part.start, part.len()), words }
    }
}

impl CudaDevice {
    pub(crate) fn choose_among(&mut self, masks: &[SampleMask]) -> Result<(), DeviceError> {
        let call = |reason: &str| DeviceError::Call { call: "choose".into(), reason: reason.into() };
        let (slot, inputs) = self.masked.waiting.take().ok_or_else(|| call("no step waits for masks"))?;
        inputs.check_masks(masks)?;
        self.upload_masks(masks)?;
        let (x, head) = self.masked.unsampled.ok_or_else(|| call("no forward pass was run"))?;
        self.sample_all(x, &head)?;
        self.end_step(slot, queued::indexed(&inputs, &inputs))
    }

    /// Copies the masks to the GPU. Samples without a mask, and those that pad the step, are not restricted.
    fn upload_masks(&mut self, masks: &[SampleMask]) -> Result<(), DeviceError> {
        let row_words = self.config.limits.vocab_size.div_ceil(32);
        let num_samples = self.current().shape.samples;
        let num_words = num_samples + masks.len() * row_words;
        if self.masked.buffers.as_ref().is_none_or(|buffers| buffers.on_gpu.span().count::<u32>() < num_words) {
            // Steps that read the old buffers must complete before they are freed.
            self.queue.wait().map_err(device_error)?;
            self.masked.buffers = Some(Buffers::new(&self.gpu, num_words.next_power_of_two()).map_err(device_error)?);
        }
        let buffers = self.masked.buffers.as_mut().expect("just allocated");
        let words: &mut [u32] = bytemuck::cast_slice_mut(&mut buffers.pinned[..num_words * 4]);
        let (rows, words) = words.split_at_mut(num_samples);
        rows.fill(NO_MASK);
        for ((row, mask), words) in (0..).zip(masks).zip(words.chunks_exact_mut(row_words)) {
            let known = mask.words.len().min(row_words);
            words[..known].copy_from_slice(&mask.words[..known]);
            words[known..].fill(0);
            rows[mask.sample as usize] = row;
        }
        let span = buffers.on_gpu.span().elements::<u32>(0, num_words);
        // SAFETY: the pinned buffer has `num_words` words. The last step that used it was collected, so its copy is
        // complete: masks of a step arrive after the tokens of the step before it.
        let copied = unsafe { self.queue.upload(span, buffers.pinned.as_ptr(), num_words * 4) };
        copied.map_err(device_error)?;
        let words = span.elements::<u32>(num_samples, masks.len() * row_words);
        self.masked.spans = Some((span.elements::<u32>(0, num_samples), words));
        Ok(())
    }
}
