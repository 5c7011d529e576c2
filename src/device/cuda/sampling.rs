//! From the last activations to tokens: logits, their exchange within the group, and the choice of a token.

use std::ops::Range;

use kernels::cuda::cap_logits::cap_logits;
use kernels::cuda::sample::{self, ARGMAX_CHUNKS, Logits, Masks, Samples, Share};
use kernels::cuda::skinny_gemm::Epilogue;
use kernels::cuda::{Span, gather_rows};
use ops::DeviceError;

use super::{CudaDevice, CudaTensor, CudaWeight, device_error};

impl CudaDevice {
    pub(crate) fn op_sample(&mut self, x: CudaTensor, head: &CudaWeight) -> Result<(), DeviceError> {
        self.report_logits(x, head)?;
        if self.current().is_masked {
            self.masked.unsampled = Some((x, *head));
            return Ok(());
        }
        self.sample_all(x, head)
    }

    /// Chooses the tokens of all samples.
    pub(super) fn sample_all(&mut self, x: CudaTensor, head: &CudaWeight) -> Result<(), DeviceError> {
        let (count, most) = (self.current().shape.samples, self.workspace().max_rows);
        for first in (0..count).step_by(most) {
            self.sample_part(x, head, first..count.min(first + most))?;
        }
        Ok(())
    }

    /// Processes some of the step's samples, at most as many as there are rows.
    fn sample_part(&mut self, x: CudaTensor, head: &CudaWeight, part: Range<usize>) -> Result<(), DeviceError> {
        let (shape, count) = (self.current().shape, part.len());
        let mut chosen = x.values;
        if count != shape.tokens && !self.current().only_products {
            chosen = self.workspace().gathered.span();
            let index = self.current().spans.sample_tokens.elements::<u32>(part.start, count);
            gather_rows::gather_rows(&self.queue, chosen, x.values, index, count, x.cols).map_err(device_error)?;
        }
        let all = self.all_logits(chosen, head, count)?;
        if self.current().only_products {
            return Ok(());
        }
        if self.current().is_greedy { self.sample_greedy(all, head, part) } else { self.sample_any(all, part) }
    }

    /// Logits `[group, count, share]` f32 of `count` rows at `x`; only this worker's part is written.
    pub(crate) fn all_logits(&mut self, x: Span, head: &CudaWeight, count: usize) -> Result<Span, DeviceError> {
        let share = self.workspace().share;
        let all = self.workspace().logits.span().elements::<f32>(0, self.group.size() * count * share);
        let own = self.own_part(all);
        self.product(own, x, head, count, share, Epilogue::StoreF32)?;
        self.flush()?;
        if let Some(cap) = self.logit_cap.filter(|_| !self.current().only_products) {
            cap_logits(&self.queue, own, cap).map_err(device_error)?;
        }
        Ok(all)
    }

    /// This worker's part of a gathered buffer.
    fn own_part(&self, all: Span) -> Span {
        let bytes = all.bytes() / self.group.size();
        all.part(self.group.rank() * bytes, bytes)
    }

    /// Chooses the likeliest token: each worker finds that of its share, and pairs of value and token are gathered.
    fn sample_greedy(&mut self, all: Span, head: &CudaWeight, part: Range<usize>) -> Result<(), DeviceError> {
        let (workspace, group, count) = (self.workspace(), self.group.size(), part.len());
        let pairs = workspace.pairs.span().elements::<u64>(0, group * count * ARGMAX_CHUNKS);
        let vocab = self.config.limits.vocab_size;
        let first_token = (self.group.rank() * workspace.share) as u32;
        let own = Share { logits: self.own_part(all), len: head.rows, stride: workspace.share, first_token };
        let masks = self.masks(part.clone());
        sample::argmax(&self.queue, self.own_part(pairs), own, count, masks, vocab).map_err(device_error)?;
        self.group.gather_candidates(&self.queue, pairs, count)?;
        let outputs = workspace.outputs(self.current().spans.slot, part.start);
        sample::greedy(&self.queue, pairs, group, vocab, self.rows.state(), self.samples(part), outputs)
            .map_err(device_error)
    }

    /// Samples with any settings: every worker gathers all logits and draws the same tokens.
    fn sample_any(&mut self, all: Span, part: Range<usize>) -> Result<(), DeviceError> {
        self.group.all_gather(&self.queue, all)?;
        let workspace = self.workspace();
        let logits = Logits { values: all, share: workspace.share, vocab: self.config.limits.vocab_size };
        let outputs = workspace.outputs(self.current().spans.slot, part.start);
        let scratch = workspace.scratch.span();
        let masks = self.masks(part.clone());
        sample::sample(&self.queue, logits, scratch, self.rows.state(), self.samples(part), masks, outputs)
            .map_err(device_error)
    }

    /// The masks of some of the step's samples, if the step has masks.
    fn masks(&self, part: Range<usize>) -> Option<Masks> {
        self.current().is_masked.then(|| self.masked.masks(part))
    }

    fn samples(&self, part: Range<usize>) -> Samples {
        let (spans, count) = (self.current().spans, part.len());
        let some = |span: Span| span.elements::<u32>(part.start, count);
        Samples { rows: some(spans.sample_rows), num_generated: some(spans.num_generated), count }
    }
}
