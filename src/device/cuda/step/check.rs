//! Checks the inputs of a step.

use ops::{DeviceError, NO_ADAPTER, StepInputs};

use super::StepBounds;

/// Refuses a step whose arrays are inconsistent or contain indices outside the device's buffers, because kernels do not
/// check them.
pub(crate) fn check(inputs: &StepInputs, bounds: &StepBounds) -> Result<(), DeviceError> {
    let (tokens, rows) = (inputs.num_tokens(), inputs.num_rows());
    let refuse = |reason: String| {
        Err(DeviceError::Call {
            call: format!("step {}", inputs.step),
            reason: format!("inputs are inconsistent: {reason}"),
        })
    };
    let samples = inputs.samples.len();
    if tokens == 0 || tokens > bounds.max_tokens || rows > bounds.max_rows || samples > bounds.max_samples {
        return refuse(format!(
            "{tokens} tokens of {}, {rows} rows of {}, {samples} samples of {}",
            bounds.max_tokens, bounds.max_rows, bounds.max_samples
        ));
    }
    let num_groups = bounds.tables.num_groups;
    let lengths = [inputs.positions.len(), inputs.slots.len()];
    if lengths != [tokens, num_groups * tokens]
        || inputs.row_starts.len() != rows + 1
        || inputs.context_lens.len() != rows
    {
        return refuse(format!(
            "positions, slots {lengths:?} for {tokens} tokens, or arrays of rows differ from {rows}"
        ));
    }
    if inputs.block_tables.len() != num_groups * rows * inputs.max_blocks || inputs.num_prefill_rows > rows {
        return refuse(format!(
            "block tables of {} for {num_groups} x {rows} x {}",
            inputs.block_tables.len(),
            inputs.max_blocks
        ));
    }
    let num_adapters = bounds.adapters.num_slots;
    if !matches!(inputs.adapters.len(), len if len == 0 || len == rows) {
        return refuse(format!("adapters of {} rows of {rows}", inputs.adapters.len()));
    }
    if let Some(slot) = inputs.adapters.iter().find(|&&slot| slot != NO_ADAPTER && slot as usize >= num_adapters) {
        return refuse(format!("adapter slot {slot} of {num_adapters}"));
    }
    let starts = &inputs.row_starts;
    if starts[0] != 0 || starts[rows] as usize != tokens || starts.windows(2).any(|pair| pair[0] >= pair[1]) {
        return refuse(format!("row starts {starts:?} for {tokens} tokens"));
    }
    if (inputs.num_prefill_rows..rows).any(|r| starts[r + 1] - starts[r] != 1) {
        return refuse("a decode row has more than one token".into());
    }
    let num_tokens = |row: u32| starts.get(row as usize + 1).map_or(0, |end| end - starts[row as usize]);
    if let Some([row, count, _]) =
        inputs.saved_states.iter().find(|[row, count, _]| !(1..=num_tokens(*row)).contains(count))
    {
        return refuse(format!("a state behind {count} tokens of row {row} of {rows}"));
    }
    if let Some(row) =
        inputs.rows.iter().chain(inputs.samples.iter().map(|s| &s.row)).find(|r| r.0 as usize >= bounds.max_rows)
    {
        return refuse(format!("row {} of {}", row.0, bounds.max_rows));
    }
    let positions = inputs.samples.iter().map(|s| s.token_index).chain(inputs.logits.iter().copied());
    if let Some(token) = positions.into_iter().find(|&token| token as usize >= tokens) {
        return refuse(format!("sample of token {token} of {tokens}"));
    }
    if let Some(token) =
        inputs.token_ids.iter().find(|&&t| t as usize >= bounds.vocab_size && t != ops::TOKEN_ON_DEVICE)
    {
        return refuse(format!("token {token} of a vocabulary of {}", bounds.vocab_size));
    }
    if let Some(position) = inputs.positions.iter().find(|&&p| p as usize >= bounds.max_positions) {
        return refuse(format!("position {position} of {}", bounds.max_positions));
    }
    if let Some(slot) = inputs.slots.iter().find(|&&s| s as usize >= bounds.num_blocks * bounds.block_size) {
        return refuse(format!("slot {slot} of {} blocks of {}", bounds.num_blocks, bounds.block_size));
    }
    let guesses = [inputs.guesses.len(), inputs.reach.len()];
    if guesses != [0, 0] && guesses != [rows, rows] {
        return refuse(format!("guesses and their blocks {guesses:?} of {rows} rows"));
    }
    for (row, &context) in inputs.context_lens.iter().enumerate() {
        let reach = inputs.reach.get(row).copied().unwrap_or(0).max(context);
        let blocks = (reach as usize).div_ceil(bounds.block_size);
        let len = inputs.max_blocks;
        if blocks > len || blocks > bounds.tables.stride || context < starts[row + 1] - starts[row] {
            return refuse(format!("context of {context} positions in a table of {len} blocks"));
        }
        let tables = (0..num_groups).flat_map(|group| &inputs.block_table(group, row)[..blocks]);
        if let Some(block) = tables.copied().find(|&block| block as usize >= bounds.num_blocks) {
            return refuse(format!("block {block} of {}", bounds.num_blocks));
        }
    }
    Ok(())
}
