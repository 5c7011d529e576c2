//! The rows of q, k and v that a worker's shard takes from the matrices of a checkpoint.

use std::ops::Range;

use crate::Config;
use crate::names::QkvNames;
use crate::shard::Shard;

/// A slice of a matrix's rows. A worker's shard stacks such slices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RowSlice {
    /// Name within the layer.
    pub(crate) name: &'static str,
    /// Number of rows of the whole matrix.
    pub(crate) rows: usize,
    /// The rows of the slice.
    pub(crate) taken: Range<usize>,
}

impl QkvNames {
    /// The slices of this worker's q, then k, then v.
    pub(crate) fn row_slices(&self, config: &Config, shard: &Shard) -> Vec<RowSlice> {
        let dim = config.head_dim;
        let (q, kv) = (config.num_heads * dim, config.num_kv_heads * dim);
        let heads = scaled(&shard.heads, dim);
        let kv_heads = scaled(&shard.kv_heads, dim);
        let after = |offset: usize, range: &Range<usize>| offset + range.start..offset + range.end;
        match *self {
            QkvNames::Separate([q_name, k_name, v_name]) => vec![
                RowSlice { name: q_name, rows: q, taken: heads },
                RowSlice { name: k_name, rows: kv, taken: kv_heads.clone() },
                RowSlice { name: v_name, rows: kv, taken: kv_heads },
            ],
            QkvNames::Stacked(name) => {
                let taken = [heads, after(q, &kv_heads), after(q + kv, &kv_heads)];
                taken.map(|taken| RowSlice { name, rows: q + 2 * kv, taken }).into()
            }
            QkvNames::Grouped(name) => {
                grouped(config, shard).into_iter().map(|taken| RowSlice { name, rows: q + 2 * kv, taken }).collect()
            }
        }
    }
}

/// Rows of q, of k and of v in a matrix that groups them by KV head.
fn grouped(config: &Config, shard: &Shard) -> Vec<Range<usize>> {
    let dim = config.head_dim;
    let queries = config.num_heads / config.num_kv_heads;
    let first = |kv_head: usize| kv_head * (queries + 2) * dim;
    let q = shard.kv_heads.clone().map(|kv_head| {
        let own = shard.heads.start.max(kv_head * queries)..shard.heads.end.min((kv_head + 1) * queries);
        first(kv_head) + (own.start - kv_head * queries) * dim..first(kv_head) + (own.end - kv_head * queries) * dim
    });
    let one = |offset: usize| {
        let start = move |kv_head: usize| first(kv_head) + offset * dim;
        shard.kv_heads.clone().map(move |kv_head| start(kv_head)..start(kv_head) + dim)
    };
    q.chain(one(queries)).chain(one(queries + 1)).collect()
}

/// Converts a range of heads to a range of rows.
pub(crate) fn scaled(heads: &Range<usize>, head_dim: usize) -> Range<usize> {
    heads.start * head_dim..heads.end * head_dim
}

#[cfg(test)]
mod tests {
    use ops::TensorParallel;

    use super::*;
    use crate::shard::tests::config;

    #[test]
    fn grouped_rows_are_found_where_a_kv_head_is_shared_by_workers() {
        // There are two KV heads of four queries each, and heads of size 8. The rows of a group are q 0..32, k 32..40,
        // v 40..48.
        let config = config(8, 2, 512);
        let whole = Shard::new(&config, TensorParallel { rank: 0, size: 1 }).unwrap();
        assert_eq!(grouped(&config, &whole), [0..32, 48..80, 32..40, 80..88, 40..48, 88..96]);
        let third = Shard::new(&config, TensorParallel { rank: 3, size: 4 }).unwrap();
        assert_eq!(grouped(&config, &third), [64..80, 80..88, 88..96]);
    }

    #[test]
    fn stacked_rows_follow_all_of_q() {
        let config = config(8, 2, 512);
        let second = Shard::new(&config, TensorParallel { rank: 1, size: 2 }).unwrap();
        let taken: Vec<_> = QkvNames::Stacked("w").row_slices(&config, &second).into_iter().map(|p| p.taken).collect();
        assert_eq!(taken, [32..64, 72..80, 88..96]);
    }
}
