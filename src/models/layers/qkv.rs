//! The rows of q, k and v that a worker's shard takes from the matrices of a checkpoint.

use std::ops::Range;

use ops::HeadOrder;

use crate::checkpoint::HeadPadding;
use crate::layer_spec::{AttentionLayer, KvSource};
use crate::names::QkvNames;
use crate::shard::LayerShard;

/// A slice of a matrix's rows. A worker's shard stacks such slices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RowSlice {
    /// Name within the layer.
    pub(crate) name: &'static str,
    /// Number of rows of the whole matrix.
    pub(crate) rows: usize,
    /// The rows of the slice.
    pub(crate) taken: Range<usize>,
    /// The order in which the elements of a head are stored.
    pub(crate) head_order: Option<HeadOrder>,
    /// If set, `taken` counts rows of padded heads, and `rows` those of the checkpoint.
    pub(crate) padding: Option<HeadPadding>,
}

impl AttentionLayer {
    /// The padding of the heads of v, and of the inputs of the output projection.
    pub(crate) fn padding(&self) -> Option<HeadPadding> {
        self.value_dim.map(|stored| HeadPadding { stored, dim: self.head_dim })
    }

    /// Inputs of the output projection in the checkpoint.
    pub(crate) fn stored_width(&self) -> usize {
        self.num_heads * self.value_dim.unwrap_or(self.head_dim)
    }
}

impl QkvNames {
    /// The slices of this worker's q, then k, then v. `order` is that of q and k.
    pub(crate) fn row_slices(
        &self,
        attention: &AttentionLayer,
        shard: &LayerShard,
        order: Option<HeadOrder>,
    ) -> Vec<RowSlice> {
        let dim = attention.head_dim;
        let (q, kv) = (attention.num_heads * dim, attention.num_kv_heads * dim);
        let heads = scaled(&shard.heads, dim);
        let kv_heads = scaled(&shard.kv_heads, dim);
        let after = |offset: usize, range: &Range<usize>| offset + range.start..offset + range.end;
        match *self {
            QkvNames::Separate([q_name, k_name, v_name]) | QkvNames::Gated([q_name, k_name, v_name, _]) => {
                let v_name = if attention.kv == KvSource::KeyProjection { k_name } else { v_name };
                let (padding, v) = (attention.padding(), attention.num_kv_heads * attention.value_dim.unwrap_or(dim));
                let mut slices = vec![
                    RowSlice { name: q_name, rows: q, taken: heads, head_order: order, padding: None },
                    RowSlice { name: k_name, rows: kv, taken: kv_heads.clone(), head_order: order, padding: None },
                    RowSlice { name: v_name, rows: v, taken: kv_heads, head_order: None, padding },
                ];
                if matches!(attention.kv, KvSource::Layer(_)) {
                    slices.truncate(1);
                }
                if attention.has_output_gate && matches!(self, QkvNames::Separate(_)) {
                    slices.splice(0..1, half_heads(q_name, attention, shard, 0, order));
                }
                slices
            }
            _ if attention.kv != KvSource::Projections
                || attention.has_output_gate
                || attention.value_dim.is_some() =>
            {
                unreachable!("only separate matrices are left out, shared, gated or padded")
            }
            QkvNames::Stacked(name) => {
                let parts = [(heads, order), (after(q, &kv_heads), order), (after(q + kv, &kv_heads), None)];
                let slice = |(taken, head_order)| RowSlice { name, rows: q + 2 * kv, taken, head_order, padding: None };
                parts.map(slice).into()
            }
            QkvNames::Grouped(name) => {
                let [q_rows, k_rows, v_rows] = grouped(attention, shard);
                let part = |rows: Vec<Range<usize>>, head_order| {
                    let slice = move |taken| RowSlice { name, rows: q + 2 * kv, taken, head_order, padding: None };
                    rows.into_iter().map(slice)
                };
                part(q_rows, order).chain(part(k_rows, order)).chain(part(v_rows, None)).collect()
            }
        }
    }
}

/// The slices of this worker's gates of the output.
pub(crate) fn gate_slices(names: &QkvNames, attention: &AttentionLayer, shard: &LayerShard) -> Vec<RowSlice> {
    match *names {
        QkvNames::Separate([name, ..]) if attention.has_output_gate => half_heads(name, attention, shard, 1, None),
        QkvNames::Gated([.., name]) => {
            let (rows, taken) = (attention.num_heads * attention.head_dim, scaled(&shard.heads, attention.head_dim));
            vec![RowSlice { name, rows, taken, head_order: None, padding: None }]
        }
        _ => Vec::new(),
    }
}

/// The first or second half of each head in a matrix that has q and gates of a head one after the other.
fn half_heads(
    name: &'static str,
    attention: &AttentionLayer,
    shard: &LayerShard,
    half: usize,
    head_order: Option<HeadOrder>,
) -> Vec<RowSlice> {
    let (dim, rows) = (attention.head_dim, 2 * attention.num_heads * attention.head_dim);
    let taken = |head: usize| (2 * head + half) * dim..(2 * head + half + 1) * dim;
    shard.heads.clone().map(|head| RowSlice { name, rows, taken: taken(head), head_order, padding: None }).collect()
}

/// Rows of q, of k and of v in a matrix that groups them by KV head.
fn grouped(attention: &AttentionLayer, shard: &LayerShard) -> [Vec<Range<usize>>; 3] {
    let dim = attention.head_dim;
    let queries = attention.num_heads / attention.num_kv_heads;
    let first = |kv_head: usize| kv_head * (queries + 2) * dim;
    let q = shard.kv_heads.clone().map(|kv_head| {
        let own = shard.heads.start.max(kv_head * queries)..shard.heads.end.min((kv_head + 1) * queries);
        first(kv_head) + (own.start - kv_head * queries) * dim..first(kv_head) + (own.end - kv_head * queries) * dim
    });
    let one = |offset: usize| {
        let start = move |kv_head: usize| first(kv_head) + offset * dim;
        shard.kv_heads.clone().map(move |kv_head| start(kv_head)..start(kv_head) + dim).collect()
    };
    [q.collect(), one(queries), one(queries + 1)]
}

/// Converts a range of heads to a range of rows.
pub(crate) fn scaled(heads: &Range<usize>, head_dim: usize) -> Range<usize> {
    heads.start * head_dim..heads.end * head_dim
}

#[cfg(test)]
mod tests {
    use ops::TensorParallel;

    use super::*;
    use crate::shard::Shard;
    use crate::shard::tests::config;

    fn layer_shard(rank: u32, size: u32) -> (AttentionLayer, LayerShard) {
        let config = config(8, 2, 512);
        let shard = Shard::new(&config, TensorParallel { rank, size }).unwrap();
        (config.layers[0].attention.clone(), shard.layers[0].clone())
    }

    #[test]
    fn grouped_rows_are_found_where_a_kv_head_is_shared_by_workers() {
        // There are two KV heads of four queries each, and heads of size 8. The rows of a group are q 0..32, k 32..40,
        // v 40..48.
        let (attention, whole) = layer_shard(0, 1);
        assert_eq!(grouped(&attention, &whole), [[0..32, 48..80], [32..40, 80..88], [40..48, 88..96]]);
        let (attention, third) = layer_shard(3, 4);
        assert_eq!(grouped(&attention, &third).concat(), [64..80, 80..88, 88..96]);
    }

    #[test]
    fn stacked_rows_follow_all_of_q() {
        let (attention, second) = layer_shard(1, 2);
        let slices = QkvNames::Stacked("w").row_slices(&attention, &second, None);
        let taken: Vec<_> = slices.into_iter().map(|p| p.taken).collect();
        assert_eq!(taken, [32..64, 72..80, 88..96]);
    }

    #[test]
    fn v_may_be_the_projection_of_k_and_a_layer_may_have_q_alone() {
        let (mut attention, second) = layer_shard(1, 2);
        let mut names_of = |kv| {
            attention.kv = kv;
            let slices = QkvNames::Separate(["q", "k", "v"]).row_slices(&attention, &second, None);
            slices.into_iter().map(|slice| slice.name).collect::<Vec<_>>()
        };
        assert_eq!(names_of(KvSource::Projections), ["q", "k", "v"]);
        assert_eq!(names_of(KvSource::KeyProjection), ["q", "k", "k"]);
        assert_eq!(names_of(KvSource::Layer(0)), ["q"]);
    }

    #[test]
    fn gates_of_the_output_are_taken_from_between_the_heads_of_q() {
        let (mut attention, second) = layer_shard(1, 4);
        attention.has_output_gate = true;
        let names = QkvNames::Separate(["q", "k", "v"]);
        let taken = |slices: Vec<RowSlice>| slices.into_iter().map(|s| (s.rows, s.taken)).collect::<Vec<_>>();
        let (q, kv) = (128, 16);
        let qkv = taken(names.row_slices(&attention, &second, None));
        assert_eq!(qkv, [(q, 32..40), (q, 48..56), (kv, 0..8), (kv, 0..8)]);
        assert_eq!(taken(gate_slices(&names, &attention, &second)), [(q, 40..48), (q, 56..64)]);
        let (names, q) = (QkvNames::Gated(["q", "k", "v", "gates"]), q / 2);
        let qkv = taken(names.row_slices(&attention, &second, None));
        assert_eq!(qkv, [(q, 16..32), (kv, 0..8), (kv, 0..8)]);
        assert_eq!(taken(gate_slices(&names, &attention, &second)), [(q, 16..32)]);
    }
}
