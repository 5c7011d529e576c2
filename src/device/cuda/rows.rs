//! The state of each row that the device keeps between steps: sampling settings, tokens, counts.

use std::sync::Arc;

use engine::{MAX_BEAM_CANDIDATES, RevisedRow, SamplingParams, TokenId};
use kernels::cuda::sample::{DECAYS, GREEDY, LISTS, PENALTIES, RowParams, RowState};
use kernels::cuda::{CudaError, DeviceBuffer, Gpu, Queue, sample};
use ops::StepLimits;

/// Words of a row's lists (end ids, bias, bad words) that are allocated in advance; longer lists get their own buffer.
const LIST_WORDS: usize = 256;
/// Maximum number of likeliest tokens that can be reported for one sample.
pub(crate) const MAX_TOP: usize = MAX_BEAM_CANDIDATES;

/// The state of all rows on the device, and the part of it that the host needs.
pub(crate) struct Rows {
    params: DeviceBuffer,
    last_tokens: DeviceBuffer,
    history: DeviceBuffer,
    counts: DeviceBuffer,
    lists: DeviceBuffer,
    long_lists: Vec<Option<DeviceBuffer>>,
    limits: StepLimits,
    host: Vec<HostRow>,
    known: Vec<RowHistory>,
}

/// What the host needs to queue a row's step and to read its result.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct HostRow {
    /// Whether the row's next token is the plain argmax and nothing else is reported.
    pub(crate) is_plain_greedy: bool,
    pub(crate) reported: Reported,
}

/// What a sample reports besides its token.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Reported {
    /// Whether it reports the token's log-probability.
    pub(crate) has_logprob: bool,
    /// Number of likeliest tokens that it reports.
    pub(crate) num_top: usize,
}

/// What a row's state on the device was built from, which is needed to continue it in another row or from other tokens.
#[derive(Debug, Clone, Default)]
struct RowHistory {
    /// Without the tokens that were sampled since.
    tokens: Vec<TokenId>,
    num_prompt: u32,
    sampling: SamplingParams,
}

impl RowHistory {
    fn apply(&mut self, revision: &RevisedRow) {
        self.tokens.truncate(revision.num_kept as usize);
        self.tokens.extend_from_slice(&revision.tokens);
    }

    /// Whether the device's state does not depend on the tokens.
    fn is_independent_of_tokens(&self) -> bool {
        row_params(&self.sampling, self.num_prompt, &[]).flags & (PENALTIES | DECAYS) == 0
            && self.sampling.bad_words.is_empty()
    }
}

impl Rows {
    /// Bytes that [`Rows::new`] allocates.
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
            known: vec![RowHistory::default(); rows],
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

    /// The token of a row at a position, if the host knows it.
    pub(crate) fn known_token(&self, row: usize, position: usize) -> Option<u32> {
        self.known[row].tokens.get(position).map(|token| token.0)
    }

    pub(crate) fn host(&self, row: usize) -> HostRow {
        self.host[row]
    }

    /// A sequence takes the row. The upload is queued after the steps that use the row's last state.
    pub(crate) fn join(
        &mut self,
        q: &Queue,
        row: usize,
        tokens: &[TokenId],
        num_prompt: u32,
        sampling: &SamplingParams,
    ) -> Result<(), CudaError> {
        self.known[row] = RowHistory { tokens: tokens.to_vec(), num_prompt, sampling: sampling.clone() };
        self.host[row] = HostRow::new(sampling, self.limits.vocab_size);
        self.make_state(q, row)
    }

    /// Rows continue from chosen tokens. Each reads its parent as it was before any of them was revised.
    pub(crate) fn revise(&mut self, q: &Queue, revised: &[RevisedRow]) -> Result<(), CudaError> {
        let index = |row: engine::RowId| row.0 as usize;
        let is_moved = |revision: &&RevisedRow| revision.row != revision.parent;
        let moved: Vec<_> = revised.iter().filter(is_moved).map(|r| self.known[index(r.parent)].clone()).collect();
        let mut moved = moved.into_iter();
        for revision in revised {
            let row = index(revision.row);
            let parent = if is_moved(&revision) { moved.next() } else { None };
            let mut is_same = true;
            if let Some(parent) = parent {
                let own = &self.known[row];
                is_same = own.sampling == parent.sampling && own.num_prompt == parent.num_prompt;
                self.host[row] = HostRow::new(&parent.sampling, self.limits.vocab_size);
                self.known[row] = parent;
            }
            self.known[row].apply(revision);
            if !is_same || !self.known[row].is_independent_of_tokens() {
                self.make_state(q, row)?;
            }
        }
        Ok(())
    }

    /// Builds the row's state on the device again.
    fn make_state(&mut self, q: &Queue, row: usize) -> Result<(), CudaError> {
        let RowHistory { tokens, num_prompt, sampling } = std::mem::take(&mut self.known[row]);
        let made = self.upload_state(q, row, &tokens, num_prompt, &sampling);
        self.known[row] = RowHistory { tokens, num_prompt, sampling };
        made
    }

    fn upload_state(
        &mut self,
        q: &Queue,
        row: usize,
        tokens: &[TokenId],
        num_prompt: u32,
        sampling: &SamplingParams,
    ) -> Result<(), CudaError> {
        let mut params = row_params(sampling, num_prompt, tokens);
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
            // Steps that read the old list must complete before it is freed.
            q.wait()?;
            self.long_lists[row] = Some(DeviceBuffer::with_count::<u32>(q.gpu(), words.next_power_of_two())?);
        }
        Ok(self.long_lists[row].as_ref().expect("just set").span())
    }
}

impl HostRow {
    fn new(sampling: &SamplingParams, vocab_size: usize) -> Self {
        let is_beam = sampling.beam_candidates > 0;
        let has_logprob = sampling.num_logprobs.is_some() && !is_beam;
        let num_top = if is_beam { Some(sampling.beam_candidates) } else { sampling.num_logprobs };
        Self {
            is_plain_greedy: sampling.is_greedy() && sampling.uses_raw_logits() && !has_logprob && !is_beam,
            reported: Reported {
                has_logprob,
                num_top: num_top.map_or(0, |count| (count as usize).min(MAX_TOP).min(vocab_size)),
            },
        }
    }
}

/// The value of `top_p` after the tokens generated so far.
fn decayed_top_p(sampling: &SamplingParams, generated: &[TokenId]) -> f32 {
    let least = sampling.top_p_min.min(sampling.top_p);
    generated.iter().fold(sampling.top_p, |top_p, token| match sampling.top_p_reset {
        Some(reset) if reset == *token => sampling.top_p,
        _ => (top_p * sampling.top_p_decay).max(least),
    })
}

/// Settings of a row with these tokens; the first `num_prompt` are the prompt.
fn row_params(sampling: &SamplingParams, num_prompt: u32, tokens: &[TokenId]) -> RowParams {
    let penalties =
        sampling.repetition_penalty != 1.0 || sampling.presence_penalty != 0.0 || sampling.frequency_penalty != 0.0;
    let mut flags = 0;
    if sampling.is_greedy() {
        flags |= GREEDY;
    }
    if penalties {
        flags |= PENALTIES;
    }
    if sampling.top_p_decay != 1.0 {
        flags |= DECAYS;
    }
    RowParams {
        temperature: sampling.temperature,
        top_p: decayed_top_p(sampling, tokens.get(num_prompt as usize..).unwrap_or_default()),
        top_p_first: sampling.top_p,
        top_p_decay: sampling.top_p_decay,
        top_p_min: sampling.top_p_min,
        top_p_reset: sampling.top_p_reset.map_or(u32::MAX, |token| token.0),
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
        num_candidates: sampling.beam_candidates,
        ..RowParams::default()
    }
}

/// The lists in the layout of `sample_any.cu`; sets their lengths in `params`.
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
        let mut params = row_params(&sampling, 3, &[]);
        assert_eq!(lists(&sampling, &mut params), [2, 7, 1.5f32.to_bits(), 2, 8, 9]);
        assert_eq!((params.num_end, params.num_bias, params.num_bad), (1, 1, 1));
        assert_eq!(params.flags, GREEDY | LISTS);
    }

    #[test]
    fn end_ids_do_not_matter_without_min_tokens() {
        let sampling = SamplingParams { end_ids: vec![TokenId(2)], ..SamplingParams::default() };
        let mut params = row_params(&sampling, 3, &[]);
        assert!(lists(&sampling, &mut params).is_empty());
        assert_eq!(params.flags, GREEDY);
    }

    #[test]
    fn top_p_decays_with_what_was_generated_before_the_row_joined() {
        let sampling = SamplingParams {
            top_p: 0.8,
            top_p_decay: 0.5,
            top_p_min: 0.3,
            top_p_reset: Some(TokenId(9)),
            ..SamplingParams::default()
        };
        let of = |tokens: &[u32]| {
            let tokens: Vec<_> = tokens.iter().map(|&token| TokenId(token)).collect();
            row_params(&sampling, 2, &tokens).top_p
        };
        assert_eq!([of(&[1, 2]), of(&[9, 9, 5]), of(&[1, 2, 5, 5]), of(&[1, 2, 5, 5, 9])], [0.8, 0.4, 0.3, 0.8]);
    }

    #[test]
    fn a_beam_reports_candidates_and_is_never_a_bare_argmax() {
        let sampling = SamplingParams { beam_candidates: 300, num_logprobs: Some(2), ..SamplingParams::default() };
        let row = HostRow::new(&sampling, 50);
        assert!(!row.is_plain_greedy && !row.reported.has_logprob);
        assert_eq!(row.reported.num_top, 50);
        let plain = HostRow::new(&SamplingParams::default(), 50);
        assert!(plain.is_plain_greedy && plain.reported.num_top == 0);
    }
}
