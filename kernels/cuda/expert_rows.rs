//! The rows that products of experts take.

use super::error::ensure;
use super::route_few_tokens::{MAX_TOKENS, list_bytes};
use super::{CudaError, Span};

const OP: &str = "grouped_gemm";

/// Which rows belong to which expert. Rows are sorted by expert, then by token.
#[derive(Debug, Clone, Copy)]
pub enum ExpertRows {
    /// `[num_experts + 1]` u32: the first row of each expert, and the number of rows.
    Offsets(Span),
    /// [`super::route_few_tokens::list_bytes`]: the experts of at most [`super::route_few_tokens::MAX_TOKENS`] tokens.
    Listed(Span),
}

/// The rows of a step.
#[derive(Debug, Clone, Copy)]
pub struct GroupedRows {
    /// The rows of each expert.
    pub experts: ExpertRows,
    /// Number of tokens; an expert has at most this number of rows.
    pub tokens: usize,
    /// Number of rows of the buffers, at least the number of rows of all experts.
    pub routes: usize,
}

impl GroupedRows {
    pub(super) fn check(self, num_experts: usize) -> Result<(), CudaError> {
        let Self { experts, tokens, routes } = self;
        ensure!(OP, tokens > 0 && routes > 0, "no rows");
        match experts {
            ExpertRows::Offsets(offsets) => {
                let count = num_experts + 1;
                ensure!(OP, offsets.count::<u32>() >= count, "offsets are shorter than {count}");
            }
            ExpertRows::Listed(list) => {
                ensure!(
                    OP,
                    tokens <= MAX_TOKENS,
                    "a list of the experts of {tokens} tokens; expected at most {MAX_TOKENS}"
                );
                let is_enough = list.bytes() >= list_bytes(routes) && list.is_aligned(16);
                ensure!(OP, is_enough, "the list has no room for {routes} experts, or is not aligned");
            }
        }
        Ok(())
    }

    pub(super) fn is_listed(self) -> bool {
        matches!(self.experts, ExpertRows::Listed(_))
    }
}

/// The inputs of a product.
#[derive(Debug, Clone, Copy)]
pub enum RowInputs<X> {
    /// `[routes, k]`, sorted by expert.
    Sorted(X),
    /// `[tokens, k]`, which the kernel gathers.
    OfTokens {
        /// The rows of tokens.
        x: X,
        /// `[routes]` u32: the token of each row.
        of_rows: Span,
    },
    /// `[tokens, k]`. Every listed expert multiplies the rows of all tokens, which cost nothing beside its weights, and stores those of its own.
    OfAllTokens(X),
}

impl<X> RowInputs<X> {
    /// The values, and their number of rows.
    pub(super) fn values(self, rows: GroupedRows) -> (X, usize) {
        match self {
            Self::Sorted(x) => (x, rows.routes),
            Self::OfTokens { x, .. } | Self::OfAllTokens(x) => (x, rows.tokens),
        }
    }

    /// The token of each row; [`Span::NULL`] if rows are not gathered. Fails if there are too few, or the order of rows does not fit.
    pub(super) fn tokens(&self, rows: GroupedRows) -> Result<Span, CudaError> {
        let fits = match self {
            Self::Sorted(_) => true,
            Self::OfTokens { .. } => !rows.is_listed(),
            Self::OfAllTokens(_) => rows.is_listed(),
        };
        ensure!(OP, fits, "the inputs do not fit {:?}", rows.experts);
        let Self::OfTokens { of_rows, .. } = *self else { return Ok(Span::NULL) };
        ensure!(OP, of_rows.count::<u32>() >= rows.routes, "there are tokens of fewer than {} rows", rows.routes);
        Ok(of_rows)
    }
}
