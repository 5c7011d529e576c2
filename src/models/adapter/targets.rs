//! The linear layers in which adapters add products, and the parts of them that a worker has.

use std::ops::Range;

use ops::RecurrentShape;

use crate::Config;
use crate::checkpoint::HeadPadding;
use crate::layer_spec::{AttentionLayer, LatentLayer};
use crate::layers::{RowSlice, gate_slices, recurrent_slices, scaled, up_slices};
use crate::shard::LayerShard;

/// A weight on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TargetWeight {
    Qkv,
    /// Gates of attention's output, whose rows are in the module of q.
    Gates,
    /// Gives q of a layer with latent vectors, from the layer's input or from the latent vector of q.
    LatentQuery,
    /// Gives the latent vector of q.
    QueryLatent,
    /// Gives the latent vector of k and v, and the rotated part of k.
    Latent,
    /// Gives q, k, v and the gates of the output of a layer with a recurrent state.
    State,
    /// Gives its learning rates and steps, or steps alone.
    Steps,
    Out,
    Up,
    Down,
}

/// A part of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LayerPart {
    /// Attention, or what stands in its place.
    Mixer,
    FeedForward,
}

impl TargetWeight {
    pub(crate) fn part(self) -> LayerPart {
        match self {
            TargetWeight::Up | TargetWeight::Down => LayerPart::FeedForward,
            _ => LayerPart::Mixer,
        }
    }
}

/// A weight on a device, which consists of rows of one or more modules of the checkpoint.
#[derive(Debug)]
pub(crate) struct Target {
    pub(crate) weight: TargetWeight,
    pub(crate) modules: Vec<Module>,
    /// Inputs of the whole modules.
    pub(crate) cols: usize,
    /// The inputs that this worker has.
    pub(crate) taken: Range<usize>,
    /// If set, `taken` counts inputs of padded heads, and `cols` those of the checkpoint.
    pub(crate) padding: Option<HeadPadding>,
}

/// Rows of a module that follow each other in the weight.
#[derive(Debug)]
pub(crate) struct Module {
    /// Its name within the layer.
    pub(crate) name: &'static str,
    /// Outputs of the whole module.
    pub(crate) rows: usize,
    pub(crate) slices: Vec<RowSlice>,
    /// The row of the weight with which they begin.
    pub(crate) first_row: usize,
}

/// The weights of a layer in which adapters may add products, with a worker's share of each.
pub(crate) fn targets(config: &Config, layer: usize, shard: &LayerShard) -> Vec<Target> {
    let (spec, names, hidden) = (&config.layers[layer], config.names, config.hidden_size);
    let mut targets = Vec::new();
    let attention = &spec.attention;
    if let Some(recurrent) = spec.recurrent {
        targets.extend(recurrent_targets(config, recurrent.shape, shard));
    } else if let Some(latent) = attention.latent {
        targets.extend(latent_targets(config, attention, latent, shard));
    } else {
        let order = attention.rope.and_then(|rope| config.ropes[rope].head_order());
        targets.push(by_output(TargetWeight::Qkv, names.qkv.row_slices(attention, shard, order), hidden));
        if attention.has_output_gate {
            targets.push(by_output(TargetWeight::Gates, gate_slices(&names.qkv, attention, shard), hidden));
        }
        let taken = scaled(&shard.heads, attention.head_dim);
        let out = by_input(TargetWeight::Out, names.out, [hidden, attention.stored_width()], taken);
        targets.push(Target { padding: attention.padding(), ..out });
    }
    if let Some(beside) = spec.beside {
        // PEFT refuses its output.
        let [state, steps, _] = recurrent_targets(config, beside.recurrent.shape, &shard.of_beside());
        targets.extend([state, steps]);
    }
    if let Some(mlp) = spec.mlp {
        let shared = names.experts.and_then(|names| names.shared).filter(|_| spec.experts.is_some());
        let (up, down, _) = shared.unwrap_or((names.up, names.down, ""));
        let width = mlp.intermediate_size;
        targets.push(by_output(TargetWeight::Up, up_slices(up, &shard.intermediate, width).1, hidden));
        targets.push(by_input(TargetWeight::Down, down, [hidden, width], shard.intermediate.clone()));
    }
    targets
}

/// The projections of a layer with a recurrent state.
fn recurrent_targets(config: &Config, shape: RecurrentShape, shard: &LayerShard) -> [Target; 3] {
    let (names, hidden, width) = (config.names.recurrent.expect("named"), config.hidden_size, shape.widths()[1]);
    let [inputs, steps] = recurrent_slices(names.projections, shape, shard);
    [
        by_output(TargetWeight::State, inputs, hidden),
        by_output(TargetWeight::Steps, steps, hidden),
        by_input(TargetWeight::Out, names.out, [hidden, width], scaled(&shard.heads, shape.value_dim)),
    ]
}

/// The weights of attention over latent vectors. The one that gives k and v from a latent vector is not among them: attention has
/// its rows in the products of queries and outputs, and never computes its outputs.
fn latent_targets(
    config: &Config,
    attention: &AttentionLayer,
    LatentLayer { shape, query_rank }: LatentLayer,
    shard: &LayerShard,
) -> Vec<Target> {
    let (names, hidden, num_heads) = (config.names.latent.expect("named"), config.hidden_size, attention.num_heads);
    let slice = |name, rows, taken| vec![RowSlice { name, rows, taken, head_order: None, padding: None }];
    let whole = |weight, name, rows| by_output(weight, slice(name, rows, 0..rows), hidden);
    let query = |name, cols| {
        let (rows, taken) = (num_heads * shape.query_dim(), scaled(&shard.heads, shape.query_dim()));
        by_output(TargetWeight::LatentQuery, slice(name, rows, taken), cols)
    };
    let mut targets = match query_rank {
        None => vec![query(names.query, hidden)],
        Some(rank) => {
            vec![whole(TargetWeight::QueryLatent, names.query_down, rank), query(names.query_up, rank)]
        }
    };
    targets.push(whole(TargetWeight::Latent, names.down, shape.width()));
    let taken = scaled(&shard.heads, shape.value_dim);
    targets.push(by_input(TargetWeight::Out, config.names.out, [hidden, num_heads * shape.value_dim], taken));
    targets
}

fn by_output(weight: TargetWeight, slices: Vec<RowSlice>, cols: usize) -> Target {
    let mut modules: Vec<Module> = Vec::new();
    let mut first_row = 0;
    for slice in slices {
        let len = slice.taken.len();
        match modules.last_mut() {
            Some(last) if last.name == slice.name => last.slices.push(slice),
            _ => modules.push(Module { name: slice.name, rows: slice.rows, slices: vec![slice], first_row }),
        }
        first_row += len;
    }
    Target { weight, modules, cols, taken: 0..cols, padding: None }
}

fn by_input(weight: TargetWeight, name: &'static str, [rows, cols]: [usize; 2], taken: Range<usize>) -> Target {
    let slice = RowSlice { name, rows, taken: 0..rows, head_order: None, padding: None };
    Target {
        weight,
        modules: vec![Module { name, rows, slices: vec![slice], first_row: 0 }],
        cols,
        taken,
        padding: None,
    }
}
