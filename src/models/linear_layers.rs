//! The linear layers of a checkpoint: what a program that quantizes it has to know.

use std::collections::BTreeSet;

use crate::layer_spec::{KvSource, LatentLayer, LayerSpec, RecurrentLayer};
use crate::names::{ExpertLayout, LatentNames, Names, QkvNames, RecurrentNames, RecurrentProjections, UpNames};
use crate::{Checkpoint, Config, ModelError};

/// Linear layers with the same input.
#[derive(Debug, Clone, PartialEq)]
pub struct LinearGroup {
    /// The names of their weights, each `[outputs, inputs]`.
    pub weights: Vec<String>,
    /// Inputs of each.
    pub cols: usize,
    /// What makes the input, if nothing else reads that.
    pub source: Option<InputSource>,
}

/// What makes the input of a linear layer. If its outputs are divided by some factors, and the layer's columns multiplied by them, the model
/// computes the same.
#[derive(Debug, Clone, PartialEq)]
pub enum InputSource {
    /// A norm.
    Norm {
        /// The name of its weight.
        weight: String,
        /// The name of its bias, if it has one.
        bias: Option<String>,
        /// What the model adds to the weight.
        offset: f32,
    },
    /// A linear layer whose outputs are multiplied by activated gates.
    Up {
        /// The name of its weight, whose rows are its outputs.
        weight: String,
        /// The name of its bias, if it has one.
        bias: Option<String>,
    },
}

/// The linear layers of the model's layers in the order of the forward pass: attention or what stands in its place, feed-forward, experts
/// that are stored one by one.
/// Heads, embeddings and routers are none of them.
///
/// # Errors
/// When the architecture stores its linear layers in another form than `[outputs, inputs]`.
pub fn linear_groups(checkpoint: &Checkpoint, config: &Config) -> Result<Vec<LinearGroup>, ModelError> {
    let names = config.names;
    if names.transposed {
        return Err(ModelError::Transposed { architecture: config.architecture.clone() });
    }
    let mut groups = Vec::new();
    for (index, layer) in config.layers.iter().enumerate() {
        let [attention, feed_forward] =
            layer.numbers(index).map(|number| format!("{}{}.{number}.", prefix(checkpoint, names), names.layers));
        let names = names.of(layer);
        LayerNames { config, names, layer, prefix: attention }.mixer(&mut groups);
        LayerNames { config, names, layer, prefix: feed_forward }.feed_forward(&mut groups);
    }
    Ok(groups)
}

/// The prefix of every name except the head's.
pub(crate) fn prefix(checkpoint: &Checkpoint, names: &Names) -> &'static str {
    let is_there = |prefix: &&&str| checkpoint.contains(&format!("{prefix}{}.weight", names.embedding));
    names.prefixes.iter().find(is_there).unwrap_or(&names.prefixes[0])
}

struct LayerNames<'a> {
    config: &'a Config,
    names: &'a Names,
    layer: &'a LayerSpec,
    prefix: String,
}

impl LayerNames<'_> {
    fn weight(&self, name: &str) -> String {
        format!("{}{name}.weight", self.prefix)
    }

    fn group(&self, names: &[&str], cols: usize, source: Option<InputSource>) -> LinearGroup {
        let weights: BTreeSet<String> = names.iter().map(|name| self.weight(name)).collect();
        LinearGroup { weights: weights.into_iter().collect(), cols, source }
    }

    /// A norm whose output nothing but one group of linear layers reads.
    fn norm(&self, name: Option<&str>) -> Option<InputSource> {
        let norm = self.config.norm;
        let name = name.filter(|_| norm.has_weight && !self.layer.is_parallel && self.layer.beside.is_none())?;
        Some(InputSource::Norm {
            weight: self.weight(name),
            bias: norm.has_bias.then(|| format!("{}{name}.bias", self.prefix)),
            offset: norm.offset,
        })
    }

    fn mixer(&self, out: &mut Vec<LinearGroup>) {
        if let (Some(recurrent), Some(names)) = (self.layer.recurrent, self.names.recurrent) {
            return self.recurrent(recurrent, names, out);
        }
        let (attention, hidden) = (&self.layer.attention, self.config.hidden_size);
        let qkv: &[&str] = match (&self.names.qkv, attention.kv) {
            (QkvNames::Separate(names), KvSource::Projections) => names,
            (QkvNames::Separate(names), KvSource::KeyProjection) => &names[..2],
            (QkvNames::Separate(names), KvSource::Layer(_)) => &names[..1],
            (QkvNames::Gated(names), _) => names,
            (QkvNames::Stacked(name) | QkvNames::Grouped(name), _) => &[*name],
        };
        match (attention.latent, self.names.latent) {
            (Some(latent), Some(names)) => self.latent(latent, names, out),
            _ => {
                out.push(self.group(qkv, hidden, self.norm(self.names.attention_norm)));
                out.push(self.group(&[self.names.out], attention.stored_width(), None));
            }
        }
        if let (Some(beside), Some(names)) = (self.layer.beside, self.names.recurrent) {
            self.recurrent(beside.recurrent, names, out);
        }
    }

    /// Without small products of their own that give learning rates and steps. These read the norm, too.
    fn recurrent(&self, layer: RecurrentLayer, names: RecurrentNames, out: &mut Vec<LinearGroup>) {
        let norm = self.norm(self.names.attention_norm);
        let (inputs, source): (&[&str], _) = match &names.projections {
            RecurrentProjections::Separate { qkv, z, .. } => (&[qkv, z], None),
            RecurrentProjections::Grouped { qkvz, .. } => (&[qkvz], None),
            RecurrentProjections::Each { qkvz, .. } => (qkvz, None),
            // Learning rates are rows of the same matrix.
            RecurrentProjections::LowRank { qkvb, .. } => (qkvb, None),
            RecurrentProjections::Together(name) | RecurrentProjections::ShortConv(name) => (&[name], norm),
        };
        out.push(self.group(inputs, self.config.hidden_size, source));
        out.push(self.group(&[names.out], layer.shape.widths()[1], None));
    }

    /// Without the products that give k and v of a latent vector.
    fn latent(&self, latent: LatentLayer, names: LatentNames, out: &mut Vec<LinearGroup>) {
        let hidden = self.config.hidden_size;
        let query = if latent.query_rank.is_some() { names.query_down } else { names.query };
        out.push(self.group(&[query, names.down], hidden, self.norm(self.names.attention_norm)));
        if let Some(rank) = latent.query_rank {
            out.push(self.group(&[names.query_up], rank, None));
        }
        let width = self.layer.attention.num_heads * latent.shape.value_dim;
        out.push(self.group(&[self.names.out], width, None));
    }

    fn feed_forward(&self, out: &mut Vec<LinearGroup>) {
        self.mlp(out);
        self.experts(out);
    }

    fn mlp(&self, out: &mut Vec<LinearGroup>) {
        let Some(mlp) = self.layer.mlp else { return };
        let has_experts = self.layer.experts.is_some();
        let shared = self.names.experts.and_then(|names| names.shared).filter(|_| has_experts);
        let (up, down, _) = shared.unwrap_or((self.names.up, self.names.down, ""));
        let norm = self.norm(self.names.mlp_norm).filter(|_| !has_experts);
        let names: &[&str] = match &up {
            UpNames::Separate(names) => names,
            UpNames::Stacked(name) | UpNames::Plain(name) => &[*name],
        };
        out.push(self.group(names, self.config.hidden_size, norm));
        let source = match up {
            UpNames::Separate([_, up]) => Some(InputSource::Up {
                weight: self.weight(up),
                bias: mlp.has_bias.then(|| format!("{}{up}.bias", self.prefix)),
            }),
            UpNames::Stacked(_) | UpNames::Plain(_) => None,
        };
        out.push(self.group(&[down], mlp.intermediate_size, source));
    }

    fn experts(&self, out: &mut Vec<LinearGroup>) {
        let (Some(experts), Some(names)) = (self.layer.experts, self.names.experts) else { return };
        let (prefix, [gate, up, down]) = match names.layout {
            ExpertLayout::Each { prefix, names } => (prefix, names),
            ExpertLayout::EachPlain { prefix, names: [up, down] } => (prefix, [up, up, down]),
            _ => return,
        };
        for expert in 0..experts.num_experts {
            let [gate, up, down] = [gate, up, down].map(|name| format!("{prefix}.{expert}.{name}"));
            let width = experts.latent_size.unwrap_or(self.config.hidden_size);
            out.push(self.group(&[&gate, &up], width, None));
            out.push(self.group(&[&down], experts.intermediate_size, None));
        }
    }
}
