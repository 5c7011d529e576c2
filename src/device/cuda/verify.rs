//! Turns rows that verify drafts into decodes: each position becomes a separate row, which attends to the positions
//! before it.
//!
//! Keys and values of all positions are written before any is read, so later positions see earlier ones. The step can
//! then be recorded, and uses the attention kernel that splits long contexts over the GPU.
//!
//! A row with a recurrent state may also compute tokens again that it knows, before the new ones. Each of its positions gets a
//! sample, so that steps with the same number of positions have the same shape. Samples that the plan does not have are not read.

use ops::{SampleInput, StepInputs};

/// The index of the sample that the token `token_index` has.
pub(crate) fn sample_at(inputs: &StepInputs, token_index: u32) -> Option<usize> {
    inputs.samples.binary_search_by_key(&token_index, |sample| sample.token_index).ok()
}

/// `inputs` with a row for each position of the rows from `first` on, which are those of [`first_short`]; `None` if there are more
/// positions than `max_rows`.
pub(crate) fn split_into_decodes(inputs: &StepInputs, first: usize, max_rows: usize) -> Option<StepInputs> {
    let first_token = inputs.row_starts[first] as usize;
    let num_rows = first + inputs.num_tokens() - first_token;
    if num_rows > max_rows {
        return None;
    }
    let mut split = StepInputs { num_prefill_rows: first, ..inputs.clone() };
    split.rows.truncate(first);
    split.row_starts.truncate(first + 1);
    split.context_lens.truncate(first);
    split.adapters.truncate(first);
    for row in first..inputs.num_rows() {
        for token in inputs.row_starts[row]..inputs.row_starts[row + 1] {
            split.rows.push(inputs.rows[row]);
            split.row_starts.push(token + 1);
            split.context_lens.push(inputs.positions[token as usize] + 1);
            split.adapters.extend(inputs.adapters.get(row));
        }
    }
    split.block_tables = split_tables(inputs, first);
    if inputs.masked.is_empty() {
        split.samples.retain(|sample| (sample.token_index as usize) < first_token);
        split.samples.extend((first..).zip(&split.rows[first..]).map(|(index, &row)| {
            let token_index = (first_token + index - first) as u32;
            let own = sample_at(inputs, token_index).map(|index| inputs.samples[index]);
            own.unwrap_or(SampleInput { row, token_index, num_generated: 0 })
        }));
    }
    Some(split)
}

/// The block tables of each position of the rows from `first` on, after those of the rows before.
fn split_tables(inputs: &StepInputs, first: usize) -> Vec<u32> {
    let num_groups = inputs.slots.len() / inputs.num_tokens();
    let count = |row: usize| if row < first { 1 } else { inputs.row_starts[row + 1] - inputs.row_starts[row] };
    let tables = (0..num_groups).flat_map(|group| (0..inputs.num_rows()).map(move |row| (group, row)));
    let copies = tables.flat_map(|(group, row)| (0..count(row)).map(move |_| inputs.block_table(group, row)));
    copies.flatten().copied().collect()
}

/// The first row that chooses a token at each of several positions, or chooses tokens and has at most `most_tokens`; all rows after it
/// do so as well, or decode one token. Where prompts are kept apart, the first row of several tokens behind them.
pub(crate) fn first_short(inputs: &StepInputs, most_tokens: usize) -> Option<usize> {
    if let Some(first) = inputs.num_prompt_rows {
        return Some(first).filter(|&first| first < inputs.num_prefill_rows);
    }
    let last = inputs.num_prefill_rows.checked_sub(1)?;
    let is_short = |row: usize| {
        let [start, end] = [inputs.row_starts[row], inputs.row_starts[row + 1]];
        // Samples are in the order of tokens.
        let before = |token: u32| inputs.samples.partition_point(|sample| sample.token_index < token);
        let (tokens, samples) = ((end - start) as usize, before(end) - before(start));
        tokens > 1 && (samples == tokens || samples > 0 && tokens <= most_tokens)
    };
    // Searches backwards, because prefill chunks come first.
    (0..=last).rev().take_while(|&row| is_short(row)).last()
}

#[cfg(test)]
mod tests {
    use engine::RowId;
    use ops::{SampleInput, TOKEN_ON_DEVICE};

    use super::*;

    /// A chunk of three positions, a row that verifies two drafts, and a row that decodes.
    fn inputs() -> StepInputs {
        let sample = |row, token_index| SampleInput { row: RowId(row), token_index, num_generated: 4 };
        StepInputs {
            step: 1,
            rows: vec![RowId(2), RowId(0), RowId(3)],
            num_prefill_rows: 2,
            row_starts: vec![0, 3, 6, 7],
            token_ids: vec![5, 6, 7, TOKEN_ON_DEVICE, 8, 9, TOKEN_ON_DEVICE],
            positions: vec![0, 1, 2, 14, 15, 16, 3],
            slots: vec![36, 37, 38, 14, 15, 48, 83],
            context_lens: vec![3, 17, 4],
            block_tables: vec![2, 0, 0, 3, 5, 0],
            max_blocks: 2,
            samples: vec![sample(2, 2), sample(0, 3), sample(0, 4), sample(0, 5), sample(3, 6)],
            masked: Vec::new(),
            logits: vec![4],
            adapters: vec![1, ops::NO_ADAPTER, 0],
            ..StepInputs::default()
        }
    }

    #[test]
    fn each_position_that_is_verified_becomes_a_decode() {
        assert_eq!(first_short(&inputs(), 0), Some(1));
        let split = split_into_decodes(&inputs(), 1, 5).unwrap();
        assert_eq!(split.rows, [2, 0, 0, 0, 3].map(RowId));
        assert_eq!(split.num_prefill_rows, 1);
        assert_eq!(split.row_starts, [0, 3, 4, 5, 6, 7]);
        assert_eq!(split.context_lens, [3, 15, 16, 17, 4]);
        assert_eq!(split.adapters, [1, ops::NO_ADAPTER, ops::NO_ADAPTER, ops::NO_ADAPTER, 0]);
        assert_eq!(split.block_tables, [2, 0, 0, 3, 0, 3, 0, 3, 5, 0]);
        let mut two_groups = inputs();
        two_groups.slots.extend_from_within(..);
        two_groups.block_tables.extend([4, 0, 1, 6, 7, 0]);
        let split_groups = split_into_decodes(&two_groups, 1, 5).unwrap();
        assert_eq!(split_groups.block_tables[..10], split.block_tables);
        assert_eq!(split_groups.block_tables[10..], [4, 0, 1, 6, 1, 6, 1, 6, 7, 0]);
        let whole = inputs();
        assert_eq!((&split.token_ids, &split.samples), (&whole.token_ids, &whole.samples));
        assert_eq!((&split.slots, &split.logits), (&whole.slots, &whole.logits));
    }

    #[test]
    fn steps_without_drafts_and_too_many_positions_stay_as_they_are() {
        assert_eq!(split_into_decodes(&inputs(), 1, 4), None);
        let mut chunk = inputs();
        chunk.samples.truncate(1);
        assert_eq!(first_short(&chunk, 0), None);
        let decode = StepInputs { num_prefill_rows: 0, ..inputs() };
        assert_eq!(first_short(&decode, 0), None);
    }

    #[test]
    fn where_prompts_are_kept_apart_only_rows_behind_them_are_decodes() {
        // A short prompt that chooses a token, and generated tokens of which none does.
        let mut whole = StepInputs { num_prompt_rows: Some(1), ..inputs() };
        whole.samples = [2, 6].map(|token_index| SampleInput { row: RowId(2), token_index, num_generated: 0 }).to_vec();
        assert_eq!(first_short(&whole, 3), Some(1));
        assert_eq!(split_into_decodes(&whole, 1, 5).unwrap().row_starts, [0, 3, 4, 5, 6, 7]);
        let all = StepInputs { num_prompt_rows: Some(2), ..whole };
        assert_eq!(first_short(&all, 3), None);
    }

    #[test]
    fn a_row_that_computes_known_tokens_again_has_samples_that_the_plan_lacks() {
        let mut restored = inputs();
        restored.samples.remove(1);
        assert_eq!([2, 3].map(|most| first_short(&restored, most)), [None, Some(0)]);
        let split = split_into_decodes(&restored, 1, 5).unwrap();
        let samples: Vec<_> = split.samples.iter().map(|s| (s.row.0, s.token_index, s.num_generated)).collect();
        assert_eq!(samples, [(2, 2, 4), (0, 3, 0), (0, 4, 4), (0, 5, 4), (3, 6, 4)]);
        assert_eq!([2, 3, 4, 6].map(|token| sample_at(&restored, token)), [Some(0), None, Some(1), Some(3)]);
        restored.masked.push(0);
        assert_eq!(split_into_decodes(&restored, 1, 5).unwrap().samples, restored.samples);
    }
}
