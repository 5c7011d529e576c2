//! From the last activations to tokens: logits, their exchange within the group, and the choice of a token.

use std::ops::Range;

use kernels::cuda::cap_logits::cap_logits;
use kernels::cuda::sample::{self, ARGMAX_CHUNKS, Logits, Masks, Outputs, Samples, Share};
use kernels::cuda::skinny_gemm::Epilogue;
use kernels::cuda::{Span, gather_rows};
use ops::DeviceError;

use super::memory::vocabulary_share;
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
        let (spans, count) = (self.current().spans, part.len());
        let some = |span: Span| span.elements::<u32>(part.start, count);
        let choice = Choice {
            samples: Samples { rows: some(spans.sample_rows), num_generated: some(spans.num_generated), count },
            masks: self.current().is_masked.then(|| self.masked.masks(part.clone())),
            outputs: self.workspace().outputs(spans.slot, part.start),
        };
        self.choose_from(all, head, choice)
    }

    /// Chooses tokens of the logits `all`.
    pub(super) fn choose_from(&mut self, all: Span, head: &CudaWeight, choice: Choice) -> Result<(), DeviceError> {
        match self.current().is_greedy {
            true => self.sample_greedy(all, head, choice),
            false => self.sample_any(all, head, choice),
        }
    }

    /// Logits `[group, count, share]` f32 of `count` rows at `x`; only this worker's part is written.
    pub(crate) fn all_logits(&mut self, x: Span, head: &CudaWeight, count: usize) -> Result<Span, DeviceError> {
        let share = self.layout_of(head).share;
        let all = self.workspace().logits.span().elements::<f32>(0, self.group.size() * count * share);
        let own = self.own_part(all);
        if let Some(columns) = head.token_columns {
            self.spread_logits(own, x, head, columns, count)?;
            return Ok(all);
        }
        self.product(own, x, head, count, share, Epilogue::StoreF32)?;
        self.flush()?;
        if let Some(cap) = self.logit_cap.filter(|_| !self.current().only_products) {
            cap_logits(&self.queue, own, cap).map_err(device_error)?;
        }
        Ok(all)
    }

    /// How the logits of a head lie. A draft model may have fewer tokens than the model.
    pub(super) fn layout_of(&self, head: &CudaWeight) -> LogitLayout {
        if self.group.size() == 1 && head.token_columns.is_none() {
            return LogitLayout { share: head.rows.next_multiple_of(8), vocab: head.rows, own: 0..head.rows };
        }
        let (share, vocab) = (vocabulary_share(head.vocab, self.group.size()), head.vocab);
        let first = self.group.rank() * share;
        LogitLayout { share, vocab, own: first.min(vocab)..(first + share).min(vocab) }
    }

    /// This worker's part of a gathered buffer.
    fn own_part(&self, all: Span) -> Span {
        let bytes = all.bytes() / self.group.size();
        all.part(self.group.rank() * bytes, bytes)
    }

    /// Chooses the likeliest token: each worker finds that of its share, and pairs of value and token are gathered.
    fn sample_greedy(&mut self, all: Span, head: &CudaWeight, choice: Choice) -> Result<(), DeviceError> {
        let Choice { samples, masks, outputs } = choice;
        let (workspace, group) = (self.workspace(), self.group.size());
        let pairs = workspace.pairs.span().elements::<u64>(0, group * samples.count * ARGMAX_CHUNKS);
        let (vocab, layout) = (self.config.limits.vocab_size, self.layout_of(head));
        let (len, first_token) = (layout.own.len(), layout.own.start as u32);
        let own = Share { logits: self.own_part(all), len, stride: layout.share, first_token };
        sample::argmax(&self.queue, self.own_part(pairs), own, samples.count, masks, vocab).map_err(device_error)?;
        self.group.gather_candidates(&self.queue, pairs, samples.count)?;
        sample::greedy(&self.queue, pairs, group, vocab, self.rows.state(), samples, outputs).map_err(device_error)
    }

    /// Samples with any settings: every worker gathers all logits and draws the same tokens.
    fn sample_any(&mut self, all: Span, head: &CudaWeight, choice: Choice) -> Result<(), DeviceError> {
        let Choice { samples, masks, outputs } = choice;
        self.group.all_gather(&self.queue, all)?;
        let LogitLayout { share, vocab, .. } = self.layout_of(head);
        let (logits, work) = (Logits { values: all, share, vocab }, self.workspace().sampling());
        sample::sample(&self.queue, logits, work, self.rows.state(), samples, masks, outputs).map_err(device_error)
    }
}

/// How the logits of an output head lie, in rows of `share` for each worker.
pub(super) struct LogitLayout {
    pub(super) share: usize,
    /// Number of tokens of the head.
    pub(super) vocab: usize,
    /// This worker's tokens.
    pub(super) own: Range<usize>,
}

/// What chooses tokens, and where they go.
pub(super) struct Choice {
    pub(super) samples: Samples,
    pub(super) masks: Option<Masks>,
    pub(super) outputs: Outputs,
}
