//! What the device keeps of each row between steps: sampling settings, tokens, counts.

use std::sync::Arc;

use engine::{SamplingParams, TokenId};
use kernels::cuda::sample::{GREEDY, LISTS, PENALTIES, RowParams, RowState};
use kernels::cuda::{CudaError, DeviceBuffer, Gpu, Queue, sample};

use crate::StepLimits;

/// Words of a row's lists (end ids, bias, bad words) that are taken in advance; longer ones get a buffer of their own.
const LIST_WORDS: usize = 256;
/// Likeliest tokens that can be reported for one sample.
pub(crate) const MAX_TOP: usize = 32;

/// State of all rows, on the device, and what the host must know of it.
pub(crate) struct Rows {
    params: DeviceBuffer,
    last_tokens: DeviceBuffer,
    history: DeviceBuffer,
    counts: DeviceBuffer,
    lists: DeviceBuffer,
    long_lists: Vec<Option<DeviceBuffer>>,
    limits: StepLimits,
    host: Vec<HostRow>,
}

/// What decides on the host how a row's step is queued and read.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct HostRow {
    /// Whether the row's next token is the plain argmax and nothing else is reported.
    pub(crate) is_plain_greedy: bool,
    /// As in [`SamplingParams::num_logprobs`].
    pub(crate) num_logprobs: Option<u32>,
}

impl Rows {
    /// Bytes that [`Rows::new`] takes.
    pub(crate) fn bytes(limits: &StepLimits) -> usize {
        let words = 1 + limits.max_sequence_len + limits.vocab_size + LIST_WORDS;
        (limits.max_rows + 1) * (size_of::<RowParams>() + 4 * words)
    }

    /// Rows `0..max_rows`, and one more that padding writes to.
    pub(crate) fn new(gpu: &Arc<Gpu>, limits: StepLimits) -> Result<Self, CudaError> {
        let rows = limits.max_rows + 1;
        let buffer = |words: usize| DeviceBuffer::with_count::<u32>(gpu, rows * words);
        let state = Self {
            params: DeviceBuffer::with_count::<RowParams>(gpu, rows)?,
            last_tokens: buffer(1)?,
            history: buffer(limits.max_sequence_len)?,
            counts: buffer(limits.vocab_size)?,
            lists: buffer(LIST_WORDS)?,
            long_lists: (0..rows).map(|_| None).collect(),
            limits,
            host: vec![HostRow::default(); rows],
        };
        let unset = RowParams { flags: GREEDY, ..RowParams::default() };
        state.params.span().write(&vec![unset; rows])?;
        state.last_tokens.span().write(&vec![0u32; rows])?;
        Ok(state)
    }

    pub(crate) fn state(&self) -> RowState {
        RowState {
            params: self.params.span(),
            last_tokens: self.last_tokens.span(),
            history: self.history.span(),
            counts: self.counts.span(),
            max_len: self.limits.max_sequence_len,
        }
    }

    pub(crate) fn host(&self, row: usize) -> HostRow {
        self.host[row]
    }

    /// A sequence takes the row: queued behind the steps that still use its last state.
    pub(crate) fn join(
        &mut self,
        q: &Queue,
        row: usize,
        tokens: &[TokenId],
        num_prompt: u32,
        sampling: &SamplingParams,
    ) -> Result<(), CudaError> {
        let mut params = row_params(sampling, num_prompt);
        self.host[row] = HostRow {
            is_plain_greedy: sampling.is_greedy() && sampling.leaves_logits_alone() && sampling.num_logprobs.is_none(),
            num_logprobs: sampling.num_logprobs,
        };
        let lists = lists(sampling, &mut params);
        if !lists.is_empty() {
            let span = self.list_span(q, row, lists.len())?;
            q.upload_copied(span, bytemuck::cast_slice(&lists))?;
            params.lists = span.address();
        }
        if params.flags & (LISTS | PENALTIES) != 0 {
            let max_len = self.limits.max_sequence_len;
            let known = tokens.len().min(max_len);
            let history = self.history.span().elements::<u32>(row * max_len, max_len);
            q.upload_copied(history, bytemuck::cast_slice(&tokens[..known]))?;
            if params.flags & PENALTIES != 0 {
                let vocab = self.limits.vocab_size;
                let counts = self.counts.span().elements::<u32>(row * vocab, vocab);
                sample::join(q, counts, history, num_prompt as usize, known)?;
            }
        }
        let span = self.params.span().elements::<RowParams>(row, 1);
        q.upload_copied(span, bytemuck::bytes_of(&params))
    }

    fn list_span(&mut self, q: &Queue, row: usize, words: usize) -> Result<kernels::cuda::Span, CudaError> {
        if words <= LIST_WORDS {
            return Ok(self.lists.span().elements::<u32>(row * LIST_WORDS, LIST_WORDS));
        }
        let large_enough = |buffer: &DeviceBuffer| buffer.span().count::<u32>() >= words;
        if !self.long_lists[row].as_ref().is_some_and(large_enough) {
            // The steps that read the old list end before it is freed.
            q.wait()?;
            self.long_lists[row] = Some(DeviceBuffer::with_count::<u32>(q.gpu(), words.next_power_of_two())?);
        }
        Ok(self.long_lists[row].as_ref().expect("just set").span())
    }
}

fn row_params(sampling: &SamplingParams, num_prompt: u32) -> RowParams {
    let penalties =
        sampling.repetition_penalty != 1.0 || sampling.presence_penalty != 0.0 || sampling.frequency_penalty != 0.0;
    let mut flags = 0;
    if sampling.is_greedy() {
        flags |= GREEDY;
    }
    if penalties {
        flags |= PENALTIES;
    }
    RowParams {
        temperature: sampling.temperature,
        top_p: sampling.top_p,
        min_p: sampling.min_p,
        repetition: sampling.repetition_penalty,
        presence: sampling.presence_penalty,
        frequency: sampling.frequency_penalty,
        top_k: sampling.top_k,
        flags,
        seed: sampling.seed,
        min_tokens: sampling.min_tokens,
        num_prompt,
        num_logprobs: sampling.num_logprobs.map_or(0, |n| n.min(MAX_TOP as u32) + 1),
        ..RowParams::default()
    }
}

/// The lists as `sample.cu` reads them; sets their counts in `params`.
fn lists(sampling: &SamplingParams, params: &mut RowParams) -> Vec<u32> {
    let bad_words = || sampling.bad_words.iter().filter(|word| !word.is_empty());
    let end_ids = if sampling.min_tokens > 0 { sampling.end_ids.as_slice() } else { &[] };
    params.num_end = end_ids.len() as u32;
    params.num_bias = sampling.logit_bias.len() as u32;
    params.num_bad = bad_words().count() as u32;
    let mut words: Vec<u32> = end_ids.iter().map(|id| id.0).collect();
    words.extend(sampling.logit_bias.iter().map(|(id, _)| id.0));
    words.extend(sampling.logit_bias.iter().map(|(_, bias)| bias.to_bits()));
    for word in bad_words() {
        words.push(word.len() as u32);
        words.extend(word.iter().map(|id| id.0));
    }
    if !words.is_empty() {
        params.flags |= LISTS;
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_laid_out_as_the_kernel_reads_them() {
        let sampling = SamplingParams {
            min_tokens: 1,
            end_ids: vec![TokenId(2)],
            logit_bias: vec![(TokenId(7), 1.5)],
            bad_words: vec![vec![], vec![TokenId(8), TokenId(9)]],
            ..SamplingParams::default()
        };
        let mut params = row_params(&sampling, 3);
        assert_eq!(lists(&sampling, &mut params), [2, 7, 1.5f32.to_bits(), 2, 8, 9]);
        assert_eq!((params.num_end, params.num_bias, params.num_bad), (1, 1, 1));
        assert_eq!(params.flags, GREEDY | LISTS);
    }

    #[test]
    fn end_ids_do_not_matter_without_min_tokens() {
        let sampling = SamplingParams { end_ids: vec![TokenId(2)], ..SamplingParams::default() };
        let mut params = row_params(&sampling, 3);
        assert!(lists(&sampling, &mut params).is_empty());
        assert_eq!(params.flags, GREEDY);
    }
}
