//! What drafters with a checkpoint of their own need besides other models: EAGLE-3 heads and draft models.
//!
//! A draft model must compute all tokens that are known. It has computed the new token of a row if it guessed behind it, and its guesses
//! but the last. So if all rows of a step decode and guess, and their drafts are its own guesses, the first pass has two tokens of each: the last one of the step that is right,
//! and the new one, which gives the first guess. In other steps the first pass has the
//! tokens of the step as the model had them, rejected drafts included, and guesses nothing; the next has the new tokens.
//!
//! The tokens of the step are kept before the step chooses others, because the inputs name some of them only as the last of their row.

use engine::RowId;
use kernels::cuda::embed::TokenSource;
use kernels::cuda::guess::{self, NO_OUTPUT, Newest, PairPass};
use kernels::cuda::scale::{Columns, put_columns};
use kernels::cuda::skinny_gemm::Epilogue;
use kernels::cuda::{DeviceBuffer, Span};
use ops::{DeviceError, DrafterKind, StepInputs, WeightSlice};

use super::guess_buffers::Passes;
use super::load::RowOrder;
use super::step::StepShape;
use super::{CudaDevice, CudaTensor, CudaWeight, device_error};

/// For each token of a vocabulary the index of the output that is its logit, or [`NO_OUTPUT`].
fn token_columns(token_ids: &[u32], vocab: usize) -> Vec<u32> {
    let mut columns = vec![NO_OUTPUT; vocab];
    for (column, &token) in (0..).zip(token_ids) {
        columns[token as usize] = column;
    }
    columns
}

impl CudaDevice {
    /// The width of the hidden state, with a drafter that of the widest one.
    pub(super) fn fit_hidden(&mut self, width: usize) {
        if self.drafter.is_none() {
            self.widths.clear();
        }
        if !self.widths.contains(&width) {
            self.widths.push(width);
        }
        self.hidden = self.widths.iter().copied().max().unwrap_or(0);
    }

    /// Loads a head whose outputs are the logits of these tokens.
    pub(super) fn load_head_of_some(
        &mut self,
        head: WeightSlice<'_>,
        token_ids: &[u32],
    ) -> Result<CudaWeight, DeviceError> {
        let weight = self.load_product(&[head], RowOrder::Stacked)?;
        let columns = token_columns(token_ids, self.config.limits.vocab_size);
        let buffer = DeviceBuffer::from_slice(&self.gpu, &columns).map_err(device_error)?;
        let token_columns = Some(buffer.span());
        self.weights.push(buffer);
        Ok(CudaWeight { token_columns, vocab: self.loaded_vocab, ..weight })
    }

    /// `own` = this worker's part of the logits `[count, share]` f32 of a head that lacks tokens.
    pub(super) fn spread_logits(
        &mut self,
        own: Span,
        x: Span,
        head: &CudaWeight,
        columns: Span,
        count: usize,
    ) -> Result<(), DeviceError> {
        let layout = self.layout_of(head);
        let outputs = self.workspace().scratch.span().elements::<f32>(0, count * head.rows);
        self.product(outputs, x, head, count, head.rows, Epilogue::StoreF32)?;
        self.flush()?;
        let columns = columns.elements::<u32>(layout.own.start, layout.own.len());
        guess::spread(&self.queue, [own, outputs, columns], [count, layout.share, head.rows]).map_err(device_error)
    }

    /// `out[t, first + i] = x[t, i]`.
    pub(super) fn op_put_columns(&mut self, out: CudaTensor, x: CudaTensor, first: usize) -> Result<(), DeviceError> {
        self.run_deferred()?;
        self.flush()?;
        let columns = Columns { matrix: out.values, width: out.cols, first };
        put_columns(&self.queue, columns, x.values, self.num_tokens(), x.cols).map_err(device_error)
    }

    /// Keeps the tokens of a step that a draft model will compute, too.
    pub(super) fn keep_tokens(&self, tokens: TokenSource, count: usize) -> Result<(), DeviceError> {
        let Some(guesses) = self.guesses.as_ref().filter(|guesses| guesses.kind == DrafterKind::Model) else {
            return Ok(());
        };
        if guesses.passes.is_some() || !self.current().runs_drafter {
            return Ok(()); // The draft model embeds them, or does not run behind the step.
        }
        let kept = guesses.kept.span().elements::<u32>(0, count);
        guess::keep(&self.queue, kept, tokens, count).map_err(device_error)
    }

    /// The pass has the tokens of the step, or two tokens of each row.
    pub(super) fn op_extend(&mut self) -> Result<(), DeviceError> {
        let Passes { step, pair, index, .. } = *self.passes();
        let guesses = self.guesses.as_ref().expect("the model has a drafter");
        let kept = guesses.kept.span().elements::<u32>(0, step.shape.tokens);
        self.current = Some(step);
        let Some(pair) = pair else {
            self.current.as_mut().expect("as above").spans.token_ids = kept;
            return Ok(());
        };
        self.begin_newest()?;
        let spans = pair.spans;
        let to = PairPass {
            token_ids: spans.token_ids,
            positions: spans.positions,
            context_lens: spans.context_lens,
            slots: spans.slots.all,
            slot_stride: spans.slots.stride,
        };
        let of_step = [kept, step.spans.positions, index];
        guess::pair(&self.queue, of_step, &self.guess_rows(), &self.next_pass()?, &to).map_err(device_error)?;
        self.wait_for_inputs()?;
        (self.current, self.is_split) = (Some(pair), true);
        Ok(())
    }

    /// Whether a step has chunks of prompts.
    pub(super) fn has_chunks(&self, whole: &StepInputs) -> bool {
        whole.num_prefill_rows > 0 && self.first_short != Some(0)
    }

    /// The inputs of a draft model's pass with two tokens of each row of `next`, if there is room for it; tokens and their places are
    /// made on the GPU.
    pub(super) fn pair_inputs(&self, next: &StepInputs, count: usize) -> Option<StepInputs> {
        let most = self.workspace().max_rows.min(self.tensor_rows());
        if self.drafter != Some(DrafterKind::Model) || count == 0 || 2 * count > most {
            return None;
        }
        Some(pairs(next, count, RowId(self.config.limits.max_rows as u32)))
    }

    /// Makes the inputs of a draft model's second pass: the new token of each row that guesses.
    pub(super) fn begin_newest(&mut self) -> Result<(), DeviceError> {
        let followed = self.follow_tokens()?;
        let index = self.passes().index;
        self.advance_guesses(Newest::Chosen { followed, index })
    }
}

/// The shape of a pass with two tokens of each of `count` rows. The second ones guess.
pub(super) fn pair_shape(count: usize) -> StepShape {
    StepShape { samples: count, ..StepShape::decode(2 * count, false) }
}

/// The rows of `next` twice, each time with padding up to `count`, which writes to the row `spare`.
fn pairs(next: &StepInputs, count: usize, spare: RowId) -> StepInputs {
    let num_rows = next.rows.len();
    let num_groups = next.slots.len() / num_rows;
    let one = |_: usize| next.rows.iter().copied().chain(std::iter::repeat_n(spare, count - num_rows));
    let table = |group: usize| {
        let used = &next.block_tables[group * num_rows * next.max_blocks..][..num_rows * next.max_blocks];
        used.iter().copied().chain(std::iter::repeat_n(0, (count - num_rows) * next.max_blocks))
    };
    StepInputs {
        step: next.step,
        max_blocks: next.max_blocks,
        rows: (0..2).flat_map(one).collect(),
        row_starts: (0..=2 * count as u32).collect(),
        token_ids: vec![0; 2 * count],
        positions: vec![0; 2 * count],
        context_lens: vec![0; 2 * count],
        slots: vec![0; 2 * count * num_groups],
        block_tables: (0..num_groups).flat_map(|group| table(group).chain(table(group))).collect(),
        ..StepInputs::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pass_of_pairs_has_each_row_and_its_table_twice() {
        let next = StepInputs {
            max_blocks: 2,
            rows: vec![RowId(4), RowId(1)],
            slots: vec![0; 4],
            block_tables: vec![1, 2, 3, 4, 5, 6, 7, 8],
            ..StepInputs::default()
        };
        let found = pairs(&next, 3, RowId(9));
        assert_eq!(found.rows, [4, 1, 9, 4, 1, 9].map(RowId));
        assert_eq!(found.block_tables[..12], [1, 2, 3, 4, 0, 0, 1, 2, 3, 4, 0, 0]);
        assert_eq!(found.block_tables[12..], [5, 6, 7, 8, 0, 0, 5, 6, 7, 8, 0, 0]);
        assert_eq!((found.row_starts.len(), found.slots.len(), found.num_tokens()), (7, 12, 6));
    }

    #[test]
    fn tokens_that_a_head_lacks_have_no_column() {
        assert_eq!(token_columns(&[4, 0, 2], 6), [1, NO_OUTPUT, 2, NO_OUTPUT, 0, NO_OUTPUT]);
    }
}
