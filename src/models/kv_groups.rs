//! The KV groups of a model: which layers share the block tables of a sequence.
//!
//! A layer with a sliding window needs only the last blocks of a sequence, a layer without one needs all. So layers with
//! the same window share a block table, and layers with another window have another table. All tables take their blocks
//! from one pool. For this a block must have the same size in every group, so the layers are divided into groups of
//! equal size: of 48 layers, 8 without a window, those are one group and the others five groups of 8. The last groups of
//! a window may have fewer layers; their blocks are partly unused.

use crate::{AttentionLayer, Config, KvSource};

/// A sequence needs a table for each group, so there are not more.
const MAX_GROUPS: usize = 16;

/// Groups of the same window may lack one layer for this number of layers that they have.
const LAYERS_PER_FILLER: usize = 6;

/// The KV groups of a whole model, the same for every worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvGroups {
    /// For each group, the number of last positions that its layers read; `None` if they read all. Groups without a
    /// window come first.
    pub windows: Vec<Option<usize>>,
    /// For each layer, its group; then for each layer of the draft model.
    pub of_layers: Vec<usize>,
}

impl Config {
    /// Divides the layers, those of the draft model included, into KV groups, for sequences of up to `max_len` positions. Layers of different KV shapes are one
    /// group, which keeps all positions. A layer that reads the keys and values of another is in that layer's group.
    pub fn kv_groups(&self, max_len: usize) -> KvGroups {
        let of_draft = self.draft.as_ref().map_or(&[][..], |draft| &draft.config.layers[..]);
        let all = || self.layers.iter().chain(of_draft);
        let with_attention = all().filter(|layer| layer.recurrent.is_none());
        let own: Vec<&AttentionLayer> = with_attention.map(|layer| &layer.attention).filter(has_own_kv).collect();
        let shape = |layer: &AttentionLayer| (layer.num_kv_heads, layer.head_dim);
        let is_uniform = own.iter().all(|layer| shape(layer) == shape(own[0]));
        // A window as long as the longest sequence is none.
        let windows: Vec<_> = own.iter().map(|layer| layer.window.filter(|&window| window < max_len)).collect();
        let one = KvGroups { windows: vec![None], of_layers: vec![0; own.len()] };
        let groups = if is_uniform { divided(&windows).unwrap_or(one) } else { one };
        let mut own_groups = groups.of_layers.into_iter();
        let mut of_layers: Vec<usize> = Vec::with_capacity(self.layers.len() + of_draft.len());
        for (index, layer) in all().enumerate() {
            let first = if index < self.layers.len() { 0 } else { self.layers.len() };
            of_layers.push(match layer.attention.kv {
                _ if layer.recurrent.is_some() => 0, // Not used.
                KvSource::Layer(source) => of_layers[first + source],
                KvSource::Projections | KvSource::KeyProjection => own_groups.next().unwrap_or(0),
            });
        }
        KvGroups { of_layers, ..groups }
    }
}

fn has_own_kv(layer: &&AttentionLayer) -> bool {
    !matches!(layer.kv, KvSource::Layer(_))
}

/// The groups of layers with these windows; `None` if there would be too many.
fn divided(windows: &[Option<usize>]) -> Option<KvGroups> {
    let mut kinds: Vec<Option<usize>> = Vec::new();
    windows.iter().for_each(|window| {
        if !kinds.contains(window) {
            kinds.push(*window)
        }
    });
    kinds.sort_by_key(Option::is_some);
    let counts: Vec<usize> = kinds.iter().map(|kind| windows.iter().filter(|window| *window == kind).count()).collect();
    let num_layers = group_size(&kinds, &counts)?;
    let mut groups = KvGroups { windows: Vec::new(), of_layers: vec![0; windows.len()] };
    for (kind, count) in kinds.into_iter().zip(counts) {
        let (first, num_groups) = (groups.windows.len(), count.div_ceil(num_layers));
        let layers = (0..windows.len()).filter(|&layer| windows[layer] == kind);
        // In turn, so that a stage of a pipeline has layers of every group.
        layers.enumerate().for_each(|(index, layer)| groups.of_layers[layer] = first + index % num_groups);
        groups.windows.extend(std::iter::repeat_n(kind, num_groups));
    }
    (groups.windows.len() <= MAX_GROUPS).then_some(groups)
}

/// The largest number of layers in a group that wastes little. Blocks without a window stay as long as their sequence, so
/// nothing is wasted there.
fn group_size(kinds: &[Option<usize>], counts: &[usize]) -> Option<usize> {
    let wastes_little = |size: usize, (kind, &count): (&Option<usize>, &usize)| {
        let num_fillers = count.next_multiple_of(size) - count;
        num_fillers == 0 || (kind.is_some() && num_fillers * LAYERS_PER_FILLER <= count)
    };
    let most = counts.iter().copied().max()?;
    (1..=most).rev().find(|&size| kinds.iter().zip(counts).all(|kind| wastes_little(size, kind)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `num_layers` layers, every `every`-th without a window.
    fn pattern(num_layers: usize, every: usize, window: usize) -> Vec<Option<usize>> {
        (1..=num_layers).map(|layer| (!layer.is_multiple_of(every)).then_some(window)).collect()
    }

    fn sizes(groups: &KvGroups) -> Vec<usize> {
        let count = |group| groups.of_layers.iter().filter(|&&of| of == group).count();
        (0..groups.windows.len()).map(count).collect()
    }

    #[test]
    fn one_kind_of_layer_is_one_group() {
        for window in [None, Some(4096)] {
            let groups = divided(&[window; 32]).unwrap();
            assert_eq!(groups, KvGroups { windows: vec![window], of_layers: vec![0; 32] });
        }
    }

    #[test]
    fn layers_are_divided_into_groups_of_nearly_equal_size() {
        let cases: [(Vec<Option<usize>>, &[usize]); 6] = [
            (pattern(42, 2, 4096), &[21, 21]),
            (pattern(32, 4, 4096), &[8, 8, 8, 8]),
            (pattern(48, 6, 1024), &[8; 6]),
            (pattern(26, 6, 512), &[4, 4, 4, 4, 4, 3, 3]),
            (pattern(34, 6, 1024), &[5, 5, 5, 5, 5, 5, 4]),
            (pattern(62, 6, 1024), &[10, 9, 9, 9, 9, 8, 8]),
        ];
        for (windows, expected) in cases {
            let groups = divided(&windows).unwrap();
            assert_eq!(sizes(&groups), expected);
            assert_eq!(groups.windows.iter().filter(|window| window.is_none()).count(), 1);
            assert_eq!(groups.windows[0], None);
            for (layer, window) in windows.iter().enumerate() {
                assert_eq!(groups.windows[groups.of_layers[layer]], *window, "layer {layer}");
            }
        }
    }

    #[test]
    fn several_windows_have_groups_of_their_own() {
        let groups = divided(&[Some(8), None, Some(4), None, Some(8), Some(4)]).unwrap();
        assert_eq!(groups.windows, [None, Some(8), Some(4)]);
        assert_eq!(groups.of_layers, [1, 0, 2, 0, 1, 2]);
    }

    #[test]
    fn a_layer_that_shares_keys_is_in_the_group_of_their_owner() {
        let mut config = crate::shard::tests::config(8, 4, 512);
        config.layers = vec![config.layers[0].clone(); 6];
        for (index, layer) in config.layers.iter_mut().enumerate() {
            layer.attention.window = (index % 2 == 0).then_some(32);
            if index >= 4 {
                layer.attention.kv = KvSource::Layer(index - 2);
            }
        }
        let groups = config.kv_groups(128);
        assert_eq!((groups.windows, groups.of_layers), (vec![None, Some(32)], vec![1, 0, 1, 0, 1, 0]));
    }

    #[test]
    fn too_many_groups_are_refused() {
        assert_eq!(divided(&pattern(40, 40, 512)), None);
        assert_eq!(divided(&pattern(16, 16, 512)).unwrap().windows.len(), 16);
    }
}
