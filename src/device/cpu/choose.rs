//! From the last activations to tokens: computes logits, chooses a token for each row, and applies rank 0's revisions
//! to rows.

use engine::{CopiedBlock, RevisedRow, SampleMask, SampledToken};
use kernels::cpu::{self as k, Buffer};
use ops::{DeviceError, SampleInput};

use super::weights::num_outputs;
use super::{CpuDevice, CpuTensor, CpuWeight, out_of_range, sampler};

impl CpuDevice {
    /// Chooses the token of each sampling position.
    pub(super) fn choose_tokens(&mut self, x: &CpuTensor, head: &CpuWeight) -> Result<Vec<SampledToken>, DeviceError> {
        let samples = std::mem::take(&mut self.inputs.samples);
        let vocab = self.config.limits.vocab_size;
        let mut tokens = Vec::with_capacity(samples.len());
        for chunk in samples.chunks(self.config.limits.max_rows) {
            self.compute_logits(x, head, chunk.iter().map(|sample| sample.token_index))?;
            let rows = &self.rows;
            tokens.extend(k::map_rows(
                &mut self.pool,
                &mut self.logits[..chunk.len() * vocab],
                vocab,
                |index, logits| {
                    let SampleInput { row, num_generated, .. } = chunk[index];
                    sampler::choose(row, &rows[row.0 as usize], num_generated, logits, None)
                },
            ));
        }
        self.inputs.samples = samples;
        Ok(tokens)
    }

    /// Computes the logits of all samples and keeps them until the masks arrive.
    pub(super) fn keep_logits(&mut self, x: &CpuTensor, head: &CpuWeight) -> Result<(), DeviceError> {
        let samples = std::mem::take(&mut self.inputs.samples);
        let vocab = self.config.limits.vocab_size;
        self.unchosen.clear();
        for chunk in samples.chunks(self.config.limits.max_rows) {
            self.compute_logits(x, head, chunk.iter().map(|sample| sample.token_index))?;
            self.unchosen.extend_from_slice(&self.logits[..chunk.len() * vocab]);
        }
        self.inputs.samples = samples;
        Ok(())
    }

    /// Chooses the tokens of the step whose logits were kept.
    pub(super) fn choose_among(&mut self, masks: &[SampleMask]) -> Result<Vec<SampledToken>, DeviceError> {
        let inputs = &self.inputs;
        inputs.check_masks(masks)?;
        let mut mask_of: Vec<Option<&[u32]>> = vec![None; inputs.samples.len()];
        for (&sample, mask) in inputs.masked.iter().zip(masks) {
            mask_of[sample as usize] = Some(&mask.words);
        }
        let (rows, vocab) = (&self.rows, self.config.limits.vocab_size);
        Ok(k::map_rows(&mut self.pool, &mut self.unchosen, vocab, |index, logits| {
            let SampleInput { row, num_generated, .. } = inputs.samples[index];
            sampler::choose(row, &rows[row.0 as usize], num_generated, logits, mask_of[index])
        }))
    }

    /// Appends tokens to their rows. Rows whose tokens rank 0 chooses are skipped: beams, and rows that verify drafts.
    pub(super) fn append(&mut self, tokens: &[SampledToken]) {
        for (index, token) in tokens.iter().enumerate() {
            let is_of_same_row = |other: Option<&SampledToken>| other.is_some_and(|other| other.row == token.row);
            let verifies = is_of_same_row(index.checked_sub(1).and_then(|before| tokens.get(before)))
                || is_of_same_row(tokens.get(index + 1));
            let row = &mut self.rows[token.row.0 as usize];
            if !verifies && row.sampling.beam_candidates == 0 {
                row.generate(token.token.0);
            }
        }
    }

    /// Ends the step, whose tokens are chosen.
    pub(super) fn end_step(&mut self, tokens: Vec<SampledToken>) {
        let logits = std::mem::take(&mut self.reported);
        self.results.push_back((tokens, logits));
    }

    /// Stores the raw logits that this step reports.
    pub(super) fn report_logits(&mut self, x: &CpuTensor, head: &CpuWeight) -> Result<(), DeviceError> {
        let positions = std::mem::take(&mut self.inputs.logits);
        let vocab = self.config.limits.vocab_size;
        for chunk in positions.chunks(self.config.limits.max_rows) {
            self.compute_logits(x, head, chunk.iter().copied())?;
            self.reported.extend(self.logits.chunks_exact(vocab).take(chunk.len()).map(<[f32]>::to_vec));
        }
        self.inputs.logits = positions;
        Ok(())
    }

    /// Logits `[len, V]` of some tokens of `x`, at most as many as there are rows. `V` is the vocabulary of the head, which may be smaller
    /// than that of the model if it is a draft model's.
    pub(super) fn compute_logits(
        &mut self,
        x: &CpuTensor,
        head: &CpuWeight,
        tokens: impl ExactSizeIterator<Item = u32>,
    ) -> Result<(), DeviceError> {
        let len = tokens.len();
        self.gather_rows(x, tokens);
        if self.group.is_some() && self.local_logits.is_empty() {
            self.local_logits = Buffer::new(self.logits.len());
        }
        let (head, offsets) = head.head();
        let (vocab, local) = (num_outputs(offsets), head.rows());
        let Some(group) = &mut self.group else {
            self.projection.project(&mut self.pool, self.isa, &mut self.logits, &self.sampled, len, head);
            self.cap_logits(len * vocab);
            return Ok(());
        };
        self.projection.project(&mut self.pool, self.isa, &mut self.local_logits, &self.sampled, len, head);
        for index in 0..len {
            let mine = &self.local_logits[index * local..][..local];
            let out = &mut self.logits[index * vocab..][..vocab];
            group.gather("gathering logits", mine, offsets, out)?;
        }
        self.cap_logits(len * vocab);
        Ok(())
    }

    /// Copies some rows of `x`, at most as many as there are rows of the device, one after the other.
    pub(super) fn gather_rows(&mut self, x: &CpuTensor, tokens: impl ExactSizeIterator<Item = u32>) {
        let width = x.cols;
        if self.sampled.len() < tokens.len() * width {
            self.sampled = Buffer::new(self.config.limits.max_rows * width);
        }
        for (out, token) in self.sampled.chunks_exact_mut(width).zip(tokens) {
            out.copy_from_slice(&x.data[token as usize * width..][..width]);
        }
    }

    /// Caps the first `len` logits, if the model caps logits.
    fn cap_logits(&mut self, len: usize) {
        if let Some(cap) = self.logit_cap {
            let logits = &mut self.logits[..len];
            logits.iter_mut().for_each(|logit| *logit = cap * (*logit / cap).tanh());
        }
    }

    pub(super) fn revise_rows(&mut self, revised: &[RevisedRow]) -> Result<(), DeviceError> {
        let max_rows = self.rows.len();
        let row_of = |row: engine::RowId| match (row.0 as usize) < max_rows {
            true => Ok(row.0 as usize),
            false => Err(out_of_range("row", row.0, max_rows)),
        };
        let mut rows = Vec::with_capacity(revised.len());
        for revision in revised {
            let mut row = self.rows[row_of(revision.parent)?].clone();
            row.revise(revision.num_kept as usize, &revision.tokens);
            rows.push((row_of(revision.row)?, row));
        }
        rows.into_iter().for_each(|(index, row)| self.rows[index] = row);
        Ok(())
    }

    pub(super) fn copy_blocks(&mut self, copied: &[CopiedBlock]) -> Result<(), DeviceError> {
        if copied.is_empty() {
            return Ok(());
        }
        let cache = self.cache.as_mut().expect("`allocate_cache` is called before the first step");
        for block in copied.iter().flat_map(|copied| [copied.from, copied.to]) {
            if block.0 as usize >= cache.num_blocks {
                return Err(out_of_range("block", block.0, cache.num_blocks));
            }
        }
        for buffer in &mut cache.buffers {
            copied.iter().for_each(|copied| buffer.copy_block(copied.from.0 as usize, copied.to.0 as usize));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use engine::{RowId, SamplingParams, TokenId};
    use ops::{AttentionSpec, DType, Device, KvElements, LogitSpec, StepInputs, StepLimits, WeightData, WeightSlice};

    use super::*;
    use crate::cpu::{Cache, CpuConfig};

    const WIDTH: usize = 16;
    const VOCAB: usize = 8;

    /// Without layers: a step is the output head alone.
    fn device() -> CpuDevice {
        let limits = StepLimits { max_tokens: 4, max_rows: 2, max_sequence_len: 16, vocab_size: VOCAB };
        let config = CpuConfig { threads: 1, limits, kv_memory_bytes: Some(1 << 20), group: None };
        let mut device = CpuDevice::new(config).unwrap();
        let spec = AttentionSpec {
            block_size: 16,
            max_positions: 16,
            ropes: Vec::new(),
            layers: Vec::new(),
            kv_windows: vec![None],
            kv_elements: KvElements::Plain,
            states: Vec::new(),
        };
        device.cache = Some(Cache { buffers: Vec::new(), spec, num_blocks: 1 });
        device
    }

    #[test]
    fn each_of_two_queued_steps_reports_its_own_logits() {
        let mut device = device();
        let rows: Vec<f32> = (0..VOCAB * WIDTH).map(|index| (index / WIDTH) as f32 / WIDTH as f32).collect();
        let bytes: Vec<u8> = rows.iter().flat_map(|value| value.to_le_bytes()).collect();
        let table = WeightSlice {
            name: "head",
            data: WeightData::Stored(bytes.into()),
            dtype: DType::F32,
            matrix_cols: WIDTH,
            rows: 0..VOCAB,
            cols: 0..WIDTH,
            head_order: None,
        };
        let embedding = device.load_embedding(table, 0).unwrap();
        let head = device.tie_head(&embedding).unwrap();
        let mut x = device.tensor(WIDTH).unwrap();
        device.join_row(RowId(0), &[TokenId(3)], 1, &SamplingParams::default()).unwrap();
        for step in 1..=2 {
            let inputs = StepInputs {
                step,
                rows: vec![RowId(0)],
                row_starts: vec![0, 1],
                token_ids: vec![3],
                positions: vec![0],
                slots: vec![0],
                context_lens: vec![1],
                block_tables: vec![0],
                max_blocks: 1,
                samples: vec![SampleInput { row: RowId(0), token_index: 0, num_generated: 0 }],
                logits: vec![0],
                ..StepInputs::default()
            };
            x.data.fill(step as f32);
            device.run_step(&inputs, &mut |device| device.sample(&x, &head, LogitSpec { cap: None })).unwrap();
        }
        for step in 1..=2 {
            assert_eq!(device.collect(false).unwrap().map(|tokens| tokens.len()), Some(1));
            let expected: Vec<f32> = (0..VOCAB).map(|row| (step * row) as f32).collect();
            assert_eq!(device.take_logits(), [expected], "step {step}");
        }
        assert!(device.collect(false).unwrap().is_none());
    }
}
