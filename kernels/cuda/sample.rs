//! Chooses the next token on the device. Kernels: `sample.cu`, `sample_any.cu`.

use bytemuck::{Pod, Zeroable};

use super::error::ensure;
use super::launch::Arg;
use super::{CudaError, Launch, Queue, Span};

/// [`RowParams::flags`]: the likeliest token is chosen.
pub const GREEDY: u32 = 1;
/// [`RowParams::flags`]: a penalty is on, so token counts must be kept.
pub const PENALTIES: u32 = 2;
/// [`RowParams::flags`]: bias, bad words or end ids change logits, so the history must be kept.
pub const LISTS: u32 = 4;

/// [`RowParams::flags`]: top-p changes with each token.
pub const DECAYS: u32 = 8;
/// Set in an entry of [`Samples::rows`]: nothing is appended to the row, because the host decides which of its samples
/// are accepted.
pub const VERIFIES: u32 = 1 << 31;

/// In an entry of [`Masks::rows`]: all tokens are allowed.
pub const NO_MASK: u32 = u32::MAX;

/// Number of chunks in which [`argmax`] searches a worker's share of a row.
pub const ARGMAX_CHUNKS: usize = 32;

/// Bytes of what a chunk of a row has in [`sample`], `Partial` of `sample.cuh`.
const PARTIAL_BYTES: usize = 88;

/// Bytes of the partial results of `rows` samples in [`sample`].
pub const fn partials_bytes(rows: usize) -> usize {
    rows * ARGMAX_CHUNKS * PARTIAL_BYTES
}

/// Sampling settings of one row, as `sample.cuh` declares them.
#[derive(Debug, Clone, Copy, Default, Pod, Zeroable)]
#[repr(C, align(16))]
#[allow(missing_docs)] // The names are those of engine::SamplingParams; the counts are those of `lists`.
pub struct RowParams {
    pub temperature: f32,
    pub top_p: f32,
    pub min_p: f32,
    pub repetition: f32,
    pub presence: f32,
    pub frequency: f32,
    pub top_k: u32,
    pub flags: u32,
    pub seed: u64,
    pub min_tokens: u32,
    pub num_prompt: u32,
    pub num_end: u32,
    pub num_bias: u32,
    pub num_bad: u32,
    /// 0 for none, otherwise the number of likeliest tokens to report plus one.
    pub num_logprobs: u32,
    /// Device address of u32: end ids; bias ids; bias values (bits of f32); then for each bad word its length and
    /// tokens.
    pub lists: u64,
    /// Above 0, the row is a beam: nothing is drawn or appended, and this number of its likeliest tokens is reported.
    pub num_candidates: u32,
    /// The token that resets `top_p` to `top_p_first`; `u32::MAX` for none.
    pub top_p_reset: u32,
    pub top_p_first: f32,
    pub top_p_decay: f32,
    pub top_p_min: f32,
    /// Zero.
    pub reserved: u32,
}

/// The state of all rows, on the device.
#[derive(Debug, Clone, Copy)]
pub struct RowState {
    /// `[rows]` [`RowParams`].
    pub params: Span,
    /// `[rows]` u32.
    pub last_tokens: Span,
    /// `[rows, max_len]` u32.
    pub history: Span,
    /// `[rows, V]` u32.
    pub counts: Span,
    /// Maximum length of a row's history.
    pub max_len: usize,
}

/// The samples of this step.
#[derive(Debug, Clone, Copy)]
pub struct Samples {
    /// `[S]` u32, below the number of rows in [`RowState`], possibly with [`VERIFIES`] (asserted when the step is
    /// packed).
    pub rows: Span,
    /// `[S]` u32.
    pub num_generated: Span,
    /// `S`, the number of samples.
    pub count: usize,
}

/// The tokens that samples may choose.
#[derive(Debug, Clone, Copy)]
pub struct Masks {
    /// `[S]` u32: the mask of a sample, or [`NO_MASK`]. Each is below the number of masks (asserted when they are uploaded).
    pub rows: Span,
    /// `[masks, ceil(V / 32)]` u32: bit `v % 32` of word `v / 32` allows token `v`.
    pub words: Span,
}

impl Masks {
    /// Checks the lengths for `count` samples. Returns the rows and the words.
    fn check(self, op: &'static str, count: usize, vocab: usize) -> Result<(Span, Span), CudaError> {
        ensure!(op, self.rows.count::<u32>() >= count, "mask rows are shorter than {count}");
        let words = self.words.count::<u32>();
        ensure!(op, words >= vocab.div_ceil(32), "{words} words of masks for {vocab} tokens");
        Ok((self.rows, self.words))
    }
}

/// Destination of tokens and log-probabilities: slots in memory that the host reads.
#[derive(Debug, Clone, Copy)]
pub struct Outputs {
    /// Slots of [`Outputs::slot_bytes`] each.
    pub base: Span,
    /// One u32 on the device: the index of this step's slot.
    pub slot: Span,
    /// Number of samples that fit into a slot.
    pub max_samples: usize,
    /// Number of likeliest tokens that fit for a sample.
    pub max_top: usize,
    /// Index in the slot of the first sample.
    pub first: usize,
}

impl Outputs {
    /// Bytes of a slot: tokens, log-probabilities, top tokens, top log-probabilities.
    pub fn slot_bytes(max_samples: usize, max_top: usize) -> usize {
        max_samples * (2 + 2 * max_top) * 4
    }
}

/// Logits of all workers of a group: `[groups, S, share]` f32, of which `vocab` tokens are valid.
#[derive(Debug, Clone, Copy)]
pub struct Logits {
    /// The values.
    pub values: Span,
    /// Number of tokens of one worker.
    pub share: usize,
    /// `V`, the number of tokens in the vocabulary.
    pub vocab: usize,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Args {
    logits: u64,
    work: u64,
    params: u64,
    last_tokens: u64,
    history: u64,
    counts: u64,
    rows: u64,
    num_generated: u64,
    slot: u64,
    outputs: u64,
    mask_rows: u64,
    masks: u64,
    num_samples: u32,
    vocab: u32,
    share: u32,
    max_len: u32,
    max_samples: u32,
    max_top: u32,
    first_output: u32,
    reserved: u32,
    partials: u64,
}

fn arguments(
    logits: Logits,
    work: Span,
    state: RowState,
    samples: Samples,
    outputs: Outputs,
) -> Result<Args, CudaError> {
    let op = "sample";
    let count = samples.count;
    let fits = count > 0 && outputs.first + count <= outputs.max_samples;
    ensure!(op, fits, "{count} samples from {} on, of at most {}", outputs.first, outputs.max_samples);
    ensure!(op, outputs.slot.count::<u32>() >= 1, "no slot number");
    for (name, span) in [("rows", samples.rows), ("num_generated", samples.num_generated)] {
        ensure!(op, span.count::<u32>() >= count, "{name} is shorter than {count}");
    }
    Ok(Args {
        logits: logits.values.address(),
        work: work.address(),
        params: state.params.address(),
        last_tokens: state.last_tokens.address(),
        history: state.history.address(),
        counts: state.counts.address(),
        rows: samples.rows.address(),
        num_generated: samples.num_generated.address(),
        slot: outputs.slot.address(),
        outputs: outputs.base.address(),
        mask_rows: 0,
        masks: 0,
        num_samples: count as u32,
        vocab: logits.vocab as u32,
        share: logits.share as u32,
        max_len: state.max_len as u32,
        max_samples: outputs.max_samples as u32,
        max_top: outputs.max_top as u32,
        first_output: outputs.first as u32,
        reserved: 0,
        partials: 0,
    })
}

/// A worker's part of the logits, for [`argmax`].
#[derive(Debug, Clone, Copy)]
pub struct Share {
    /// `[rows, stride]` f32, of which the first `len` columns are used.
    pub logits: Span,
    /// Number of tokens.
    pub len: usize,
    /// Row length of `logits`.
    pub stride: usize,
    /// The token of the first column.
    pub first_token: u32,
}

/// Finds the best token of each chunk of this worker's share, among the tokens of the row's mask if there are masks.
/// `pairs` `[rows, ARGMAX_CHUNKS]` u64; `vocab` is the length of a mask in bits.
pub fn argmax(
    q: &Queue,
    pairs: Span,
    part: Share,
    rows: usize,
    masks: Option<Masks>,
    vocab: usize,
) -> Result<(), CudaError> {
    let op = "sample_argmax";
    let Share { logits, len: share, stride, first_token } = part;
    ensure!(op, rows > 0 && share > 0 && share <= stride, "{rows} rows of {share} tokens, stride {stride}");
    ensure!(op, logits.count::<f32>() >= (rows - 1) * stride + share, "logits are shorter than {rows} x {stride}");
    ensure!(op, pairs.count::<u64>() >= rows * ARGMAX_CHUNKS, "pairs are shorter than {rows} x {ARGMAX_CHUNKS}");
    ensure!(op, first_token as usize + share <= vocab, "{share} tokens from {first_token} on, of {vocab}");
    let (mask_rows, words) = masks.map_or(Ok((Span::NULL, Span::NULL)), |masks| masks.check(op, rows, vocab))?;
    let launch = Launch::new(0, 256).grid(rows as u32, ARGMAX_CHUNKS as u32, 1);
    let (share, stride, row_words) = (share as u32, stride as u32, vocab.div_ceil(32) as u32);
    let operands = [pairs.into(), logits.into(), share.into(), stride.into(), first_token.into()];
    let masks = [mask_rows.into(), words.into(), row_words.into()];
    let args: Vec<Arg<'_>> = operands.into_iter().chain(masks).collect();
    q.launch("sample_argmax_f32", launch, &args)
}

/// Chooses the best of the pairs `[groups, S, ARGMAX_CHUNKS]` for each sample, appends and reports it.
pub fn greedy(
    q: &Queue,
    pairs: Span,
    groups: usize,
    vocab: usize,
    state: RowState,
    samples: Samples,
    outputs: Outputs,
) -> Result<(), CudaError> {
    let found = pairs.count::<u64>();
    ensure!("sample_greedy", found >= groups * samples.count * ARGMAX_CHUNKS, "{found} pairs for {groups} workers");
    let logits = Logits { values: Span::NULL, share: vocab, vocab };
    let args = arguments(logits, Span::NULL, state, samples, outputs)?;
    let launch = Launch::new(samples.count as u32, 32);
    let args =
        [Arg::Bytes(bytemuck::bytes_of(&args)), pairs.into(), (groups as u32).into(), (ARGMAX_CHUNKS as u32).into()];
    q.launch("sample_greedy", launch, &args)
}

/// Memory of [`sample`], without contents between calls.
#[derive(Debug, Clone, Copy)]
pub struct Work {
    /// `[S, V]` f32.
    pub logits: Span,
    /// [`partials_bytes`].
    pub partials: Span,
}

/// Chooses the next token of each sample with its row's settings, among the tokens of its mask if there are masks;
/// appends and reports it.
pub fn sample(
    q: &Queue,
    logits: Logits,
    work: Work,
    state: RowState,
    samples: Samples,
    masks: Option<Masks>,
    outputs: Outputs,
) -> Result<(), CudaError> {
    let op = "sample";
    let Logits { values, share, vocab } = logits;
    let count = samples.count;
    let needed = vocab.div_ceil(share.max(1)) * count * share;
    ensure!(op, vocab > 0 && share > 0 && values.count::<f32>() >= needed, "logits are shorter than {needed}");
    ensure!(op, work.logits.count::<f32>() >= count * vocab, "work is shorter than {count} x {vocab}");
    ensure!(
        op,
        work.partials.bytes() >= partials_bytes(count),
        "partial results are shorter than those of {count} rows"
    );
    let mut args = arguments(logits, work.logits, state, samples, outputs)?;
    args.partials = work.partials.address();
    if let Some(masks) = masks {
        let (rows, words) = masks.check(op, count, vocab)?;
        (args.mask_rows, args.masks) = (rows.address(), words.address());
    }
    let args = [Arg::Bytes(bytemuck::bytes_of(&args))];
    let by_chunks = || Launch::new(0, 256).grid(count as u32, ARGMAX_CHUNKS as u32, 1);
    q.launch("sample_adjust_f32", by_chunks(), &args)?;
    q.launch("sample_levels_f32", by_chunks(), &args)?;
    q.launch("sample_choose_f32", Launch::new(count as u32, 1024), &args)
}

/// Counts the tokens of a row that joined: `counts` `[V]` u32 of this row, `history` its first `num_tokens` tokens.
pub fn join(q: &Queue, counts: Span, history: Span, num_prompt: usize, num_tokens: usize) -> Result<(), CudaError> {
    ensure!("sample_join", history.count::<u32>() >= num_tokens, "history is shorter than {num_tokens}");
    let vocab = counts.count::<u32>() as u32;
    let args = [counts.into(), history.into(), vocab.into(), (num_prompt as u32).into(), (num_tokens as u32).into()];
    q.launch("sample_join", Launch::new(1, 1024), &args)
}
