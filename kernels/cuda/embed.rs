//! Embedding lookup, vocabulary-parallel. Kernel: `embed.cu`.

use half::bf16;

use super::error::ensure;
use super::{CudaError, Launch, Queue, Span};

/// Source of the ids of a step's tokens.
#[derive(Debug, Clone, Copy)]
pub struct TokenSource {
    /// `[T]` u32; `u32::MAX` means the row's last token.
    pub token_ids: Span,
    /// `[T]` u32: the row of each token, below the length of `last_tokens` (asserted when the step is packed).
    pub token_rows: Span,
    /// One u32 for each row.
    pub last_tokens: Span,
}

/// The rows of an embedding table that a worker has.
#[derive(Debug, Clone, Copy)]
pub struct Table {
    /// `[V, cols]`.
    pub values: Span,
    /// The token of its first row.
    pub first_token: u32,
    /// Number of columns.
    pub cols: usize,
    /// Multiplies the rows.
    pub scale: f32,
}

/// `out[t, :] = scale * table[id(t) - first_token, :]`, and zeros for tokens of other workers. `out` `[T, cols]`.
pub fn embed(q: &Queue, out: Span, table: Table, tokens: TokenSource, num_tokens: usize) -> Result<(), CudaError> {
    let Table { values: table, first_token, cols, scale } = table;
    ensure!("embed", cols.is_multiple_of(8) && cols > 0, "cols {cols} is not a multiple of 8");
    ensure!("embed", num_tokens > 0, "no tokens");
    ensure!("embed", out.count::<bf16>() >= num_tokens * cols, "out is shorter than {num_tokens} x {cols}");
    ensure!("embed", out.is_aligned(16) && table.is_aligned(16), "a buffer is not 16-byte aligned");
    for (name, span) in [("token_ids", tokens.token_ids), ("token_rows", tokens.token_rows)] {
        ensure!("embed", span.count::<u32>() >= num_tokens, "{name} is shorter than {num_tokens}");
    }
    let vocab = (table.count::<bf16>() / cols) as u32;
    let threads = (cols / 8).min(256).next_multiple_of(32) as u32;
    let args = [
        out.into(),
        table.into(),
        tokens.token_ids.into(),
        tokens.token_rows.into(),
        tokens.last_tokens.into(),
        first_token.into(),
        vocab.into(),
        (cols as u32).into(),
        scale.into(),
    ];
    q.launch("embed_bf16", Launch::new(num_tokens as u32, threads), &args)
}
