//! Runs the model on calibration text, and collects the inputs of its linear layers.

use std::path::Path;

use device::cpu::{CpuConfig, CpuDevice, LayerInputs, allowed_cores};
use engine::{RowId, SamplingParams, TokenId};
use indicatif::ProgressBar;
use models::{Config, Model};
use ops::{Device, StepInputs, StepLimits};
use text::Tokenizer;

use crate::error::io;
use crate::{QuantizeArgs, QuantizeError};

/// Tokens of a sequence, and of a step.
const MAX_LEN: usize = 512;
/// Positions in a KV block.
const BLOCK_SIZE: usize = 16;
/// Fewest tokens that say something about a layer's inputs.
const MIN_TOKENS: usize = 512;

/// The inputs of the linear layers of the checkpoint while it computes a text.
///
/// # Errors
/// When the text or the tokenizer cannot be read, the text is too short, or the device cannot run the model.
pub(crate) fn run(args: &QuantizeArgs, text: &Path, config: &Config) -> Result<Vec<LayerInputs>, QuantizeError> {
    let tokens = tokens(args, text, config)?;
    let max_len = MAX_LEN.min(config.max_position_embeddings);
    let limits =
        StepLimits { max_tokens: max_len, max_rows: 1, max_sequence_len: max_len, vocab_size: config.vocab_size };
    let threads = allowed_cores().len().max(1);
    let mut device = CpuDevice::new(CpuConfig { threads, limits, kv_memory_bytes: None, group: None })?;
    device.collect_input_statistics();
    let mut model = models::load(&args.checkpoint, config, &mut device)?;
    let spec = model.attention_spec(BLOCK_SIZE, max_len);
    let num_groups = spec.kv_windows.len();
    device.allocate_cache(&spec, num_groups * max_len.div_ceil(BLOCK_SIZE))?;
    let states: &[u32] = if spec.states.is_empty() { &[] } else { &[0] };
    if !states.is_empty() {
        device.allocate_states(&spec, states.len())?;
    }
    let bar = ProgressBar::new(tokens.len() as u64).with_message("calibration");
    for (step, sequence) in tokens.chunks(max_len).enumerate() {
        run_sequence(&mut device, &mut *model, sequence, (step as u64 + 1, num_groups, states))?;
        bar.inc(sequence.len() as u64);
    }
    bar.finish_and_clear();
    Ok(device.input_statistics().map(|all| all.layers().to_vec()).unwrap_or_default())
}

/// The first tokens of the text.
fn tokens(args: &QuantizeArgs, path: &Path, config: &Config) -> Result<Vec<TokenId>, QuantizeError> {
    let text = std::fs::read_to_string(path).map_err(io("cannot read", path))?;
    let mut ids = Tokenizer::from_dir(&args.checkpoint)?.encode(&text, true)?;
    ids.truncate(args.calibration_tokens as usize);
    ids.retain(|id| (*id as usize) < config.vocab_size);
    match ids.len() < MIN_TOKENS {
        true => Err(QuantizeError::ShortText { path: path.to_owned(), found: ids.len(), needed: MIN_TOKENS }),
        false => Ok(ids.into_iter().map(TokenId).collect()),
    }
}

/// One step with all tokens of a sequence, whose last token's successor is chosen and forgotten.
fn run_sequence(
    device: &mut CpuDevice,
    model: &mut dyn Model<CpuDevice>,
    tokens: &[TokenId],
    (step, num_groups, states): (u64, usize, &[u32]),
) -> Result<(), QuantizeError> {
    device.join_row(RowId(0), tokens, tokens.len() as u32, &SamplingParams::default())?;
    let num_blocks = tokens.len().div_ceil(BLOCK_SIZE);
    let count = tokens.len() as u32;
    let mut inputs = StepInputs { step, row_starts: vec![0, count], max_blocks: num_blocks, ..StepInputs::default() };
    inputs.token_ids = tokens.iter().map(|token| token.0).collect();
    inputs.positions = (0..count).collect();
    inputs.rows = vec![RowId(0)];
    inputs.states = states.to_vec();
    inputs.num_prefill_rows = 1;
    inputs.context_lens = vec![count];
    for group in 0..num_groups {
        let first = (group * num_blocks) as u32;
        inputs.slots.extend((0..count).map(|position| first * BLOCK_SIZE as u32 + position));
        inputs.block_tables.extend(first..first + num_blocks as u32);
    }
    device.run_step(&inputs, &mut |device| model.forward(device))?;
    device.collect(true)?;
    Ok(())
}
