//! What guesses of drafts need between passes of a drafter. Kernels: `guess.cu`.

use bytemuck::{Pod, Zeroable};

use super::embed::TokenSource;
use super::error::ensure;
use super::launch::Arg;
use super::{CudaError, Launch, Queue, Span};

/// In [`FollowRow::guess`]: nothing is guessed for the row.
pub const NO_GUESS: u32 = u32::MAX;
/// In the columns of [`spread`]: the head lacks the token.
pub const NO_OUTPUT: u32 = u32::MAX;
/// Most tokens that a row may choose in a step.
pub const MAX_SAMPLES: usize = 128;

/// A row of the step whose tokens are followed. A row without tokens is padding.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct FollowRow {
    /// Index of its first token in the step.
    pub first: u32,
    /// Index behind its last token.
    pub end: u32,
    /// Index of its first sample in the outputs.
    pub first_sample: u32,
    /// How many of its last tokens have samples, at most [`MAX_SAMPLES`].
    pub num_samples: u32,
    /// The token behind its last one, if it has no samples.
    pub next_token: u32,
    /// The output position of its first sample.
    pub num_generated: u32,
    /// Its place among the rows that guess, or [`NO_GUESS`].
    pub guess: u32,
    /// Zero.
    pub reserved: u32,
}

/// Rows that guess, `G` of them, padding included.
#[derive(Debug, Clone, Copy)]
pub struct GuessRows {
    /// `[G, 2]` u32: the number of guesses, 0 for padding, and the number of positions for which the row has KV blocks.
    pub wanted: Span,
    /// `[G]` u32: the number of guesses that are made.
    pub made: Span,
    /// `[G]` u32: the position of each row's token in the next pass; before the first, that of the token from which it guesses.
    pub positions: Span,
    /// `[G]` u32: the output positions of the next guesses.
    pub num_generated: Span,
    /// `G`.
    pub count: usize,
}

/// The tokens of a step, and those that it has chosen.
#[derive(Debug, Clone, Copy)]
pub struct Followed {
    /// `[R]` [`FollowRow`], whose indices are within the arrays (asserted when the step is packed).
    pub rows: Span,
    /// `R`, padding included.
    pub num_rows: usize,
    /// `[T]` u32.
    pub token_ids: Span,
    /// `[T]` u32.
    pub positions: Span,
    /// Slots of chosen tokens as [`super::sample::Outputs`] has them.
    pub outputs: Span,
    /// One u32: the step's slot.
    pub slot: Span,
    /// Bytes of a slot.
    pub slot_bytes: usize,
}

/// Writes the token behind each one of a step to `followed` `[T]` u32, and the token from which each row guesses first to `index`
/// `[G]` u32; begins the counts and positions of `guesses`.
pub fn follow(q: &Queue, step: &Followed, followed: Span, index: Span, guesses: &GuessRows) -> Result<(), CudaError> {
    #[derive(Clone, Copy, Pod, Zeroable)]
    #[repr(C)]
    struct Args {
        inputs: [u64; 5],
        slot_words: u64,
        outputs: [u64; 5],
    }
    let op = "guess_follow";
    let Followed { rows, num_rows, token_ids, positions, outputs, slot, slot_bytes } = *step;
    ensure!(op, num_rows > 0 && rows.count::<FollowRow>() >= num_rows, "rows are fewer than {num_rows}");
    let tokens = token_ids.count::<u32>();
    let is_long = positions.count::<u32>() >= tokens && followed.count::<u32>() >= tokens;
    ensure!(op, is_long, "positions or followed tokens are fewer than {tokens}");
    guesses.check(op)?;
    ensure!(op, index.count::<u32>() >= guesses.count, "the index is shorter than {}", guesses.count);
    let GuessRows { made, positions: guess_positions, num_generated, .. } = *guesses;
    let args = Args {
        inputs: [rows, token_ids, positions, outputs, slot].map(Span::address),
        slot_words: (slot_bytes / 4) as u64,
        outputs: [followed, index, made, guess_positions, num_generated].map(Span::address),
    };
    q.launch("guess_follow", Launch::new(num_rows as u32, 128), &[Arg::Bytes(bytemuck::bytes_of(&args))])
}

impl GuessRows {
    fn check(&self, op: &'static str) -> Result<(), CudaError> {
        let count = self.count;
        ensure!(op, self.wanted.count::<u32>() >= 2 * count, "numbers of guesses are fewer than {count}");
        for (name, span) in [("made", self.made), ("positions", self.positions), ("num_generated", self.num_generated)]
        {
            ensure!(op, span.count::<u32>() >= count, "{name} is shorter than {count}");
        }
        Ok(())
    }
}

/// The inputs of the next pass, which [`advance`] makes.
#[derive(Debug, Clone, Copy)]
pub struct NextPass {
    /// `[G]` u32.
    pub token_ids: Span,
    /// `[G]` u32.
    pub context_lens: Span,
    /// `[groups, slot_stride]` u32.
    pub slots: Span,
    /// Words from the slots of a KV group to those of the next.
    pub slot_stride: usize,
    /// `[groups, table_stride]` u32, where each row has `max_blocks`.
    pub block_tables: Span,
    /// Words from the tables of a KV group to those of the next.
    pub table_stride: usize,
    /// Row length of the tables.
    pub max_blocks: usize,
    /// Positions of a block.
    pub block_size: usize,
    /// Number of KV groups.
    pub num_groups: usize,
}

/// Where guesses are reported.
#[derive(Debug, Clone, Copy)]
pub struct Results {
    /// Slots of `[max_rows, 1 + most]` u32.
    pub base: Span,
    /// One u32: the step's slot.
    pub slot: Span,
    /// Rows of a slot.
    pub max_rows: usize,
    /// Most guesses of a row.
    pub most: usize,
}

impl Results {
    /// Bytes of a slot.
    pub fn slot_bytes(max_rows: usize, most: usize) -> usize {
        max_rows * (1 + most) * 4
    }
}

/// The tokens from which the next pass goes on.
#[derive(Debug, Clone, Copy)]
pub enum Newest {
    /// `[G]` u32: the guesses of the last pass.
    Guessed(Span),
    /// Those that the step has chosen, which nothing has guessed: they are at `index` `[G]` u32 in `followed` `[T]` u32, as [`follow`]
    /// writes both.
    Chosen {
        #[allow(missing_docs)]
        followed: Span,
        #[allow(missing_docs)]
        index: Span,
    },
}

/// Reports the guesses of a pass, and makes the inputs of the next.
pub fn advance(
    q: &Queue,
    newest: Newest,
    guesses: &GuessRows,
    next: &NextPass,
    results: &Results,
) -> Result<(), CudaError> {
    #[derive(Clone, Copy, Pod, Zeroable)]
    #[repr(C)]
    struct Args {
        inputs: [u64; 5],
        outputs: [u64; 7],
        sizes: [u32; 8],
    }
    let (op, count) = ("guess_advance", guesses.count);
    guesses.check(op)?;
    let NextPass { token_ids, context_lens, slots, slot_stride, block_tables, table_stride, .. } = *next;
    ensure!(op, count > 0 && count <= results.max_rows, "{count} rows of {}", results.max_rows);
    let (guessed, index, of_rows) = match newest {
        Newest::Guessed(guessed) => (guessed, Span::NULL, guessed),
        Newest::Chosen { followed, index } => (followed, index, index),
    };
    for (name, span) in [("newest", of_rows), ("token_ids", token_ids), ("context_lens", context_lens)] {
        ensure!(op, span.count::<u32>() >= count, "{name} is shorter than {count}");
    }
    let groups = next.num_groups;
    let has_slots = slot_stride >= count && slots.count::<u32>() >= groups * slot_stride;
    ensure!(op, groups > 0 && has_slots, "slots are fewer than {groups} x {count}");
    let has_tables = table_stride >= count * next.max_blocks && block_tables.count::<u32>() >= groups * table_stride;
    ensure!(op, has_tables && next.block_size > 0, "tables are shorter than {groups} x {count} x {}", next.max_blocks);
    let GuessRows { wanted, made, positions, num_generated, .. } = *guesses;
    let sizes =
        [count, groups, slot_stride, table_stride, next.max_blocks, next.block_size, results.most, results.max_rows];
    let args = Args {
        inputs: [guessed, index, wanted, block_tables, results.slot].map(Span::address),
        outputs: [made, token_ids, positions, slots, context_lens, num_generated, results.base].map(Span::address),
        sizes: sizes.map(|size| size as u32),
    };
    let launch = Launch::new(count.div_ceil(128) as u32, 128);
    q.launch("guess_advance", launch, &[Arg::Bytes(bytemuck::bytes_of(&args))])
}

/// A pass with two tokens of each row that guesses, which [`pair`] makes.
#[derive(Debug, Clone, Copy)]
pub struct PairPass {
    /// `[2 G]` u32.
    pub token_ids: Span,
    /// `[2 G]` u32.
    pub positions: Span,
    /// `[2 G]` u32.
    pub context_lens: Span,
    /// `[groups, slot_stride]` u32.
    pub slots: Span,
    /// Words from the slots of a KV group to those of the next.
    pub slot_stride: usize,
}

/// Makes the inputs of a pass over the last token of the step that is right, and then the one of `next`, of each row. `kept` and
/// `positions` `[T]` u32 are those of the step, `index` `[G]` u32 is the place of each row's last token in it.
pub fn pair(
    q: &Queue,
    [kept, positions, index]: [Span; 3],
    guesses: &GuessRows,
    next: &NextPass,
    to: &PairPass,
) -> Result<(), CudaError> {
    #[derive(Clone, Copy, Pod, Zeroable)]
    #[repr(C)]
    struct Args {
        spans: [u64; 13],
        sizes: [u32; 8],
    }
    let (op, count, groups) = ("guess_pair", guesses.count, next.num_groups);
    guesses.check(op)?;
    ensure!(op, count > 0 && index.count::<u32>() >= count, "the index is shorter than {count}");
    ensure!(op, kept.count::<u32>() >= positions.count::<u32>(), "fewer tokens than positions");
    for (name, span) in [("token_ids", to.token_ids), ("positions", to.positions), ("contexts", to.context_lens)] {
        ensure!(op, span.count::<u32>() >= 2 * count, "{name} is shorter than 2 x {count}");
    }
    let has_slots = to.slot_stride >= 2 * count && to.slots.count::<u32>() >= groups * to.slot_stride;
    ensure!(op, has_slots, "slots are fewer than {groups} x 2 x {count}");
    let NextPass { slot_stride, table_stride, max_blocks, block_size, .. } = *next;
    let has_tables = table_stride >= count * max_blocks && next.block_tables.count::<u32>() >= groups * table_stride;
    ensure!(op, has_tables && block_size > 0, "tables are shorter than {groups} x {count} x {max_blocks}");
    let has_next = slot_stride >= count && next.slots.count::<u32>() >= groups * slot_stride;
    let is_long = next.token_ids.count::<u32>() >= count && next.context_lens.count::<u32>() >= count;
    ensure!(op, has_next && is_long, "the next pass has fewer than {count} rows");
    let of_step = [index, guesses.wanted, kept, positions];
    let of_next = [next.token_ids, guesses.positions, next.context_lens, next.slots, next.block_tables];
    let outputs = [to.token_ids, to.positions, to.context_lens, to.slots];
    let mut spans = [0; 13];
    let all = of_step.into_iter().chain(of_next).chain(outputs);
    spans.iter_mut().zip(all).for_each(|(to, span)| *to = span.address());
    let sizes = [count, groups, slot_stride, to.slot_stride, table_stride, max_blocks, block_size, 0];
    let args = Args { spans, sizes: sizes.map(|size| size as u32) };
    let launch = Launch::new(count.div_ceil(128) as u32, 128);
    q.launch("guess_pair", launch, &[Arg::Bytes(bytemuck::bytes_of(&args))])
}

/// Writes the tokens of a step to `kept` `[T]` u32, before it chooses others.
pub fn keep(q: &Queue, kept: Span, tokens: TokenSource, num_tokens: usize) -> Result<(), CudaError> {
    let TokenSource { token_ids, token_rows, last_tokens } = tokens;
    for (name, span) in [("kept", kept), ("token_ids", token_ids), ("token_rows", token_rows)] {
        ensure!("guess_keep", span.count::<u32>() >= num_tokens, "{name} is shorter than {num_tokens}");
    }
    ensure!("guess_keep", num_tokens > 0, "no tokens");
    let args = [kept.into(), token_ids.into(), token_rows.into(), last_tokens.into(), (num_tokens as u32).into()];
    q.launch("guess_keep", Launch::new(num_tokens.div_ceil(128) as u32, 128), &args)
}

/// Logits of all tokens from those of an output head that lacks some: `logits` `[rows, stride]` f32, `outputs` `[rows, num_outputs]` f32.
/// `columns` u32 has for each token its column in `outputs`, below `num_outputs` (asserted when it is made), or [`NO_OUTPUT`]; then its
/// logit becomes minus infinity.
pub fn spread(
    q: &Queue,
    [logits, outputs, columns]: [Span; 3],
    [rows, stride, num_outputs]: [usize; 3],
) -> Result<(), CudaError> {
    let (op, num_tokens) = ("guess_spread", columns.count::<u32>());
    ensure!(op, rows > 0 && num_tokens > 0 && num_tokens <= stride, "{rows} rows of {num_tokens} tokens of {stride}");
    ensure!(op, logits.count::<f32>() >= (rows - 1) * stride + num_tokens, "logits are shorter than {rows} x {stride}");
    ensure!(op, outputs.count::<f32>() >= rows * num_outputs, "outputs are shorter than {rows} x {num_outputs}");
    let launch = Launch::new(0, 256).grid(num_tokens.div_ceil(256) as u32, rows as u32, 1);
    let sizes = [num_tokens, stride, num_outputs].map(|size| Arg::from(size as u32));
    let args: Vec<Arg<'_>> = [logits, outputs, columns].map(Arg::from).into_iter().chain(sizes).collect();
    q.launch("guess_spread", launch, &args)
}
