//! Loads this worker's shard of a layer with a recurrent state. Value heads are divided like query heads, and key heads like KV
//! heads.

use std::ops::Range;

use ops::{Device, LinearRole, RecurrentRule, RecurrentShape, RecurrentWeights};

use super::qkv::{RowSlice, scaled};
use super::{LayerSource, Loader};
use crate::ModelError;
use crate::layer_spec::RecurrentLayer;
use crate::names::{RecurrentNames, RecurrentProjections};
use crate::shard::LayerShard;

impl<D: Device> Loader<'_, D> {
    fn recurrent_names(&self) -> RecurrentNames {
        self.names.recurrent.expect("an architecture with recurrent layers names them")
    }

    /// The projections of the input: q, k, v and gates of as many channels as v has as one matrix, and the rest as another.
    pub(crate) fn recurrent_inputs(
        &mut self,
        layer: LayerSource<'_>,
        RecurrentLayer { shape, has_bias, .. }: RecurrentLayer,
    ) -> Result<[D::Weight; 2], ModelError> {
        let [qkvz, ba] = recurrent_slices(self.recurrent_names().projections, shape, layer.shard);
        Ok([
            self.by_output(LinearRole::Qkv, layer.number, &qkvz, self.config.hidden_size, has_bias)?,
            self.by_output(LinearRole::Up, layer.number, &ba, self.config.hidden_size, has_bias)?,
        ])
    }

    /// The projections of Kimi Delta Attention: q, k, v and learning rates as one matrix; the two products that give steps, and those that
    /// give gates. All workers have all outputs of the first product.
    pub(crate) fn kimi_delta_inputs(
        &mut self,
        layer: LayerSource<'_>,
        RecurrentLayer { shape, .. }: RecurrentLayer,
    ) -> Result<[D::Weight; 5], ModelError> {
        let (names, hidden) = (self.recurrent_names(), self.config.hidden_size);
        let RecurrentProjections::LowRank { steps, gates, .. } = names.projections else {
            unreachable!("this rule has products of low rank")
        };
        let [qkvb, _] = recurrent_slices(names.projections, shape, layer.shard);
        let qkvb = self.by_output(LinearRole::Qkv, layer.number, &qkvb, hidden, false)?;
        // The first product has as many outputs as a head has channels.
        let rank = shape.key_dim;
        let mut pair = |[low, high]: [&'static str; 2], dim: usize| {
            let slice = |name, rows, taken| RowSlice { name, rows, taken, head_order: None, padding: None };
            let taken = scaled(&layer.shard.heads, dim);
            let slices = [slice(low, rank, 0..rank), slice(high, shape.num_value_heads * dim, taken)];
            Ok::<_, ModelError>([
                self.by_output(LinearRole::Up, layer.number, &slices[..1], hidden, false)?,
                self.by_output(LinearRole::Up, layer.number, &slices[1..], rank, false)?,
            ])
        };
        let ([steps_low, steps], [gates_low, gates]) = (pair(steps, shape.key_dim)?, pair(gates, shape.value_dim)?);
        Ok([qkvb, steps_low, steps, gates_low, gates])
    }

    pub(crate) fn recurrent_out(
        &mut self,
        layer: LayerSource<'_>,
        RecurrentLayer { shape, has_bias, .. }: RecurrentLayer,
    ) -> Result<D::Weight, ModelError> {
        let name = self.layer_name(layer.number, self.recurrent_names().out);
        let taken = scaled(&layer.shard.heads, shape.value_dim);
        self.by_input(LinearRole::Out, &name, shape.widths()[1], taken, has_bias)
    }

    pub(crate) fn recurrent_weights(
        &mut self,
        layer: LayerSource<'_>,
        RecurrentLayer { shape, has_conv_bias, .. }: RecurrentLayer,
        conv_scales: [f32; 3],
    ) -> Result<D::Weight, ModelError> {
        let (names, shard) = (self.recurrent_names(), layer.shard);
        let name = |name: &str| self.layer_name(layer.number, name);
        let (mut conv, mut conv_bias) = (Vec::new(), Vec::new());
        for ((own, channels, Range { start, end }), scale) in
            convolutions(&names, shape, shard).into_iter().zip(conv_scales)
        {
            let taps = start * shape.num_taps..end * shape.num_taps;
            let taps = self.checkpoint.values(&name(own), &[channels, 1, shape.num_taps], taps)?;
            conv.extend(taps.into_iter().map(|tap| tap * scale));
            if has_conv_bias {
                conv_bias.extend(self.checkpoint.values(&name(names.conv_bias), &[channels], start..end)?);
            }
        }
        let of_heads = |own: &str| self.checkpoint.values(&name(own), &[shape.num_value_heads], shard.heads.clone());
        let norm = |len, taken| self.checkpoint.values(&name(names.norm), &[len], taken);
        let own = |skip, norm| Ok::<_, ModelError>([of_heads(names.a_log)?, of_heads(names.dt_bias)?, skip, norm]);
        let [a_log, dt_bias, skip, norm] = match shape.rule {
            RecurrentRule::GatedDelta { .. } => own(Vec::new(), norm(shape.value_dim, 0..shape.value_dim)?)?,
            RecurrentRule::Mamba2 { norm_heads: None } => own(of_heads(names.skip)?, Vec::new())?,
            RecurrentRule::Mamba2 { norm_heads: Some(_) } => {
                own(of_heads(names.skip)?, norm(shape.widths()[1], scaled(&shard.heads, shape.value_dim))?)?
            }
            RecurrentRule::KimiDelta => {
                let (heads, dims) = (shape.num_value_heads, shape.num_value_heads * shape.key_dim);
                let a_log = self.checkpoint.values(&name(names.a_log), &[1, 1, heads, 1], shard.heads.clone())?;
                let taken = scaled(&shard.heads, shape.key_dim);
                let dt_bias = self.checkpoint.values(&name(names.dt_bias), &[dims], taken)?;
                [a_log, dt_bias, Vec::new(), norm(shape.value_dim, 0..shape.value_dim)?]
            }
            RecurrentRule::ShortConv => Default::default(),
        };
        let weights = RecurrentWeights { shape: shape_of(shape, shard), conv, conv_bias, a_log, dt_bias, skip, norm };
        let loaded = self.device.load_recurrent(&weights);
        self.or_device_error(loaded)
    }
}

/// The sizes of a worker's shard.
pub(crate) fn shape_of(shape: RecurrentShape, shard: &LayerShard) -> RecurrentShape {
    RecurrentShape { num_key_heads: shard.kv_heads.len(), num_value_heads: shard.heads.len(), ..shape }
}

/// The worker's channels of q, of k and of v, as the convolution is stored.
fn channels(projections: RecurrentProjections, shape: RecurrentShape, shard: &LayerShard) -> [Range<usize>; 3] {
    let [keys, values] = shape.widths();
    let [key, value] = [scaled(&shard.kv_heads, shape.key_dim), scaled(&shard.heads, shape.value_dim)];
    match projections {
        RecurrentProjections::Together(_) => [after(values + keys, &key), after(values, &key), value],
        RecurrentProjections::Separate { .. }
        | RecurrentProjections::Grouped { .. }
        | RecurrentProjections::ShortConv(_)
        | RecurrentProjections::LowRank { .. }
        | RecurrentProjections::Each { .. } => [key.clone(), after(keys, &key), after(2 * keys, &value)],
    }
}

/// The tensors of the convolution, with their channels and the worker's ones: of q, of k and of v.
fn convolutions(
    names: &RecurrentNames,
    shape: RecurrentShape,
    shard: &LayerShard,
) -> [(&'static str, usize, Range<usize>); 3] {
    match names.projections {
        RecurrentProjections::Each { convs: [q, k, v], .. }
        | RecurrentProjections::LowRank { convs: [q, k, v], .. } => {
            let [keys, values] = shape.widths();
            let key = scaled(&shard.kv_heads, shape.key_dim);
            [(q, keys, key.clone()), (k, keys, key), (v, values, scaled(&shard.heads, shape.value_dim))]
        }
        projections => channels(projections, shape, shard).map(|taken| (names.conv, shape.channels(), taken)),
    }
}

fn after(offset: usize, range: &Range<usize>) -> Range<usize> {
    offset + range.start..offset + range.end
}

/// The rows of q, k, v and the gates of the output, and those of learning rates and steps, or of steps alone; of q, k, v and learning
/// rates where steps and gates have products of low rank; of a short convolution
/// the rows of v and the gates of the input, and those of the gates of the output.
pub(crate) fn recurrent_slices(
    projections: RecurrentProjections,
    shape: RecurrentShape,
    shard: &LayerShard,
) -> [Vec<RowSlice>; 2] {
    let slice = |name, rows, taken| RowSlice { name, rows, taken, head_order: None, padding: None };
    match projections {
        RecurrentProjections::Separate { qkv, z, b, a } => {
            let qkv = channels(projections, shape, shard).map(|taken| slice(qkv, shape.channels(), taken));
            let z = slice(z, shape.widths()[1], scaled(&shard.heads, shape.value_dim));
            let ba = [b, a].map(|name| slice(name, shape.num_value_heads, shard.heads.clone()));
            [qkv.into_iter().chain([z]).collect(), ba.into()]
        }
        RecurrentProjections::Each { qkvz: [q, k, v, z], ba, .. } => {
            let ([keys, values], key) = (shape.widths(), scaled(&shard.kv_heads, shape.key_dim));
            let value = scaled(&shard.heads, shape.value_dim);
            let of_keys = [q, k].map(|name| slice(name, keys, key.clone()));
            let of_values = [v, z].map(|name| slice(name, values, value.clone()));
            let ba = ba.map(|name| slice(name, shape.num_value_heads, shard.heads.clone()));
            [of_keys.into_iter().chain(of_values).collect(), ba.into()]
        }
        RecurrentProjections::LowRank { qkvb: [q, k, v, b], .. } => {
            let ([keys, values], key) = (shape.widths(), scaled(&shard.kv_heads, shape.key_dim));
            let of_keys = [q, k].map(|name| slice(name, keys, key.clone()));
            let v = slice(v, values, scaled(&shard.heads, shape.value_dim));
            let b = slice(b, shape.num_value_heads, shard.heads.clone());
            [of_keys.into_iter().chain([v, b]).collect(), Vec::new()]
        }
        RecurrentProjections::Together(name) => {
            let (values, inner) = (shape.widths()[1], shape.channels() + shape.widths()[1]);
            let rows = inner + shape.num_value_heads;
            let qkv = channels(projections, shape, shard).map(|taken| slice(name, rows, after(values, &taken)));
            let z = slice(name, rows, scaled(&shard.heads, shape.value_dim));
            [qkv.into_iter().chain([z]).collect(), vec![slice(name, rows, after(inner, &shard.heads))]]
        }
        RecurrentProjections::ShortConv(name) => {
            let (width, own) = (shape.widths()[1], scaled(&shard.heads, shape.value_dim));
            let [gates, out_gates, values] = [0, 1, 2].map(|part| slice(name, 3 * width, after(part * width, &own)));
            [vec![values, gates], vec![out_gates]]
        }
        RecurrentProjections::Grouped { qkvz, ba } => {
            let ratio = shape.num_value_heads / shape.num_key_heads;
            let (dim, values) = (shape.key_dim, ratio * shape.value_dim);
            // Each key head has its q, its k, and v and the gates of its value heads.
            let (stride, rows) = (2 * dim + 2 * values, shape.num_key_heads * (2 * dim + 2 * values));
            let key_part = |offset: usize| {
                shard.kv_heads.clone().map(move |head| head * stride + offset..head * stride + offset + dim)
            };
            let value_part = |offset: usize| of_heads(shard, ratio, (stride, offset, shape.value_dim));
            let taken = key_part(0).chain(key_part(dim)).chain(value_part(2 * dim)).chain(value_part(2 * dim + values));
            let gates = of_heads(shard, ratio, (2 * ratio, 0, 1)).chain(of_heads(shard, ratio, (2 * ratio, ratio, 1)));
            [
                taken.map(|taken| slice(qkvz, rows, taken)).collect(),
                gates.map(|taken| slice(ba, 2 * shape.num_value_heads, taken)).collect(),
            ]
        }
    }
}

/// Rows of the worker's value heads, where those of each key head are together: a key head has `stride` rows, and its value heads
/// have `dim` rows each from `offset` on.
fn of_heads(
    shard: &LayerShard,
    ratio: usize,
    (stride, offset, dim): (usize, usize, usize),
) -> impl Iterator<Item = Range<usize>> {
    let heads = shard.heads.clone();
    shard.kv_heads.clone().map(move |key| {
        let own = heads.start.max(key * ratio)..heads.end.min((key + 1) * ratio);
        let first = key * stride + offset;
        first + (own.start - key * ratio) * dim..first + (own.end - key * ratio) * dim
    })
}

#[cfg(test)]
mod tests {
    use std::iter::once;

    use super::*;

    fn taken(projections: RecurrentProjections, heads: Range<usize>, kv_heads: Range<usize>) -> [Vec<Range<usize>>; 2] {
        // Two key heads of 3, four value heads of 5: q 6, k 6, v 20, gates 20.
        let (rule, num_key_heads, num_value_heads) = (RecurrentRule::GatedDelta { has_doubled_rates: false }, 2, 4);
        let shape = RecurrentShape { rule, num_key_heads, num_value_heads, key_dim: 3, value_dim: 5, num_taps: 4 };
        let beside = [0..0, 0..0];
        let shard =
            LayerShard { heads, kv_heads, beside, intermediate: 0..0, experts: 0..0, expert_intermediate: 0..0 };
        recurrent_slices(projections, shape, &shard).map(|slices| slices.into_iter().map(|slice| slice.taken).collect())
    }

    #[test]
    fn separate_projections_are_divided_by_heads() {
        let names = RecurrentProjections::Separate { qkv: "qkv", z: "z", b: "b", a: "a" };
        assert_eq!(taken(names, 2..4, 1..2), [vec![3..6, 9..12, 22..32, 10..20], vec![2..4, 2..4]]);
        assert_eq!(taken(names, 3..4, 1..2), [vec![3..6, 9..12, 27..32, 15..20], vec![3..4, 3..4]]);
    }

    #[test]
    fn projections_and_convolutions_may_have_a_tensor_for_each_of_q_k_and_v() {
        let names =
            RecurrentProjections::Each { qkvz: ["q", "k", "v", "z"], ba: ["b", "a"], convs: ["qc", "kc", "vc"] };
        assert_eq!(taken(names, 2..4, 1..2), [vec![3..6, 3..6, 10..20, 10..20], vec![2..4, 2..4]]);
    }

    #[test]
    fn learning_rates_are_behind_q_k_and_v_where_steps_and_gates_have_products_of_low_rank() {
        let names = RecurrentProjections::LowRank {
            qkvb: ["q", "k", "v", "b"],
            convs: ["qc", "kc", "vc"],
            steps: ["fa", "fb"],
            gates: ["ga", "gb"],
        };
        assert_eq!(taken(names, 2..4, 1..2), [vec![3..6, 3..6, 10..20, 2..4], vec![]]);
    }

    #[test]
    fn one_matrix_of_gates_values_keys_queries_and_steps_is_put_in_order() {
        // Gates 20, v 20, k 6, q 6, steps 4.
        let names = RecurrentProjections::Together("all");
        assert_eq!(taken(names, 0..4, 0..2), [vec![46..52, 40..46, 20..40, 0..20], Vec::from_iter(once(52..56))]);
        assert_eq!(taken(names, 2..4, 1..2), [vec![49..52, 43..46, 30..40, 10..20], Vec::from_iter(once(54..56))]);
    }

    #[test]
    fn one_matrix_of_two_kinds_of_gates_and_values_is_put_in_order() {
        let (rule, num_key_heads, num_value_heads) = (RecurrentRule::ShortConv, 4, 4);
        let shape = RecurrentShape { rule, num_key_heads, num_value_heads, key_dim: 0, value_dim: 5, num_taps: 3 };
        let (intermediate, experts, expert_intermediate) = (0..0, 0..0, 0..0);
        let beside = [0..0, 0..0];
        let shard = LayerShard { heads: 2..4, kv_heads: 2..4, beside, intermediate, experts, expert_intermediate };
        let [inputs, gates] = recurrent_slices(RecurrentProjections::ShortConv("all"), shape, &shard);
        let taken =
            |slices: Vec<RowSlice>| slices.into_iter().map(|slice| (slice.rows, slice.taken)).collect::<Vec<_>>();
        // Gates of the input 20, gates of the output 20, v 20.
        assert_eq!([taken(inputs), taken(gates)], [vec![(60, 50..60), (60, 10..20)], vec![(60, 30..40)]]);
        assert_eq!(channels(RecurrentProjections::ShortConv("all"), shape, &shard), [0..0, 0..0, 10..20]);
    }

    #[test]
    fn projections_that_are_grouped_by_key_heads_are_put_in_order() {
        let names = RecurrentProjections::Grouped { qkvz: "qkvz", ba: "ba" };
        // A key head has q 3, k 3, v 10, gates 10; then learning rates 2, steps 2.
        let whole = [vec![0..3, 26..29, 3..6, 29..32, 6..16, 32..42, 16..26, 42..52], vec![0..2, 4..6, 2..4, 6..8]];
        assert_eq!(taken(names, 0..4, 0..2), whole);
        assert_eq!(taken(names, 3..4, 1..2), [vec![26..29, 29..32, 37..42, 47..52], vec![5..6, 7..8]]);
    }
}
