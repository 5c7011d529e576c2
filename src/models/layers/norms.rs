//! Loads norms of the hidden state and of heads.

use std::ops::Range;

use ops::{Device, HeadNormSpan, NormSlices};

use crate::ModelError;
use crate::layer_spec::{HeadNormSpec, KvSource};
use crate::layers::qkv::scaled;
use crate::layers::{LayerSource, Loader};

/// The norms of a layer's heads.
pub(crate) struct HeadNormWeights<D: Device> {
    pub(crate) spec: HeadNormSpec,
    pub(crate) q: D::Weight,
    pub(crate) k: Option<D::Weight>,
    pub(crate) v: Option<D::Weight>,
}

impl<D: Device> Loader<'_, D> {
    /// A norm of a layer's hidden state, if the architecture has it. Its weights are multiplied by `factor`.
    pub(crate) fn layer_norm(
        &mut self,
        layer: LayerSource<'_>,
        name: Option<&str>,
        factor: f32,
    ) -> Result<Option<D::Weight>, ModelError> {
        name.map(|name| self.norm(&self.layer_name(layer.number, name), factor)).transpose()
    }

    /// A norm behind a branch, if the architecture has it.
    pub(crate) fn branch_norm(
        &mut self,
        layer: LayerSource<'_>,
        name: Option<&str>,
    ) -> Result<Option<D::Weight>, ModelError> {
        name.map(|name| self.norm(&self.layer_name(layer.number, name), self.config.branch_scale)).transpose()
    }

    /// The norm of the embeddings, if the architecture has it.
    pub(crate) fn embedding_norm(&mut self) -> Result<Option<D::Weight>, ModelError> {
        self.names.embedding_norm.map(|name| self.norm(&self.model_name(name), 1.0)).transpose()
    }

    /// The norm after the last layer. The scale of the logits is a part of it.
    pub(crate) fn final_norm(&mut self) -> Result<D::Weight, ModelError> {
        self.norm(&format!("{}{}", self.prefix, self.names.final_norm), self.config.head.scale)
    }

    /// A norm of the hidden state with this full name. Its weights are multiplied by `factor`.
    pub(crate) fn norm(&mut self, name: &str, factor: f32) -> Result<D::Weight, ModelError> {
        let (norm, width) = (self.config.norm, self.config.hidden_size);
        let (weight_name, bias_name) = (format!("{name}.weight"), format!("{name}.bias"));
        let vector = |name| self.checkpoint.vector(name, width, 0..width);
        let slices = NormSlices {
            kind: norm.kind,
            width,
            weight: norm.has_weight.then(|| vector(&weight_name)).transpose()?,
            bias: norm.has_bias.then(|| vector(&bias_name)).transpose()?,
            offset: norm.offset,
            factor,
        };
        let loaded = self.device.load_norm(&slices);
        self.or_device_error(loaded)
    }

    /// The norms of q, of k unless it is another layer's, and of v if it has one.
    pub(crate) fn head_norms(
        &mut self,
        layer: LayerSource<'_>,
        norm: HeadNormSpec,
    ) -> Result<HeadNormWeights<D>, ModelError> {
        let [q, k] = self.names.head_norms;
        let (attention, shard) = (&layer.spec.attention, layer.shard);
        let has_kv = !matches!(attention.kv, KvSource::Layer(_));
        let q = self.head_norm(layer, norm, q, attention.num_heads, &shard.heads)?;
        let k = has_kv.then(|| self.head_norm(layer, norm, k, attention.num_kv_heads, &shard.kv_heads)).transpose()?;
        let v = (has_kv && norm.has_value).then(|| self.norm_of_ones(norm, attention.head_dim));
        Ok(HeadNormWeights { spec: norm, q, k, v: v.transpose()? })
    }

    /// What scores are multiplied by for the norms of q and k if these follow the rotation: the products of both weights, for each
    /// element of a head.
    pub(crate) fn query_gains(&self, layer: LayerSource<'_>) -> Result<Vec<f32>, ModelError> {
        let attention = &layer.spec.attention;
        if !attention.head_norm.is_some_and(|norm| norm.is_behind_rotation) {
            return Ok(Vec::new());
        }
        let (dim, offset, order) = (attention.head_dim, self.config.norm.offset, self.head_order(layer.spec));
        let weights = |name| {
            let name = format!("{}.weight", self.layer_name(layer.number, name));
            self.checkpoint.values(&name, &[dim], 0..dim)
        };
        let [q, k] = self.names.head_norms;
        let (q, k) = (weights(q)?, weights(k)?);
        let stored = |index: usize| order.map_or(index, |order| order.stored(index));
        Ok((0..dim).map(stored).map(|index| (q[index] + offset) * (k[index] + offset)).collect())
    }

    /// A norm of one head whose weights are 1.
    fn norm_of_ones(&mut self, norm: HeadNormSpec, width: usize) -> Result<D::Weight, ModelError> {
        let slices = NormSlices { kind: norm.kind, width, weight: None, bias: None, offset: 0.0, factor: 1.0 };
        let loaded = self.device.load_norm(&slices);
        self.or_device_error(loaded)
    }

    fn head_norm(
        &mut self,
        layer: LayerSource<'_>,
        norm: HeadNormSpec,
        name: &str,
        count: usize,
        taken: &Range<usize>,
    ) -> Result<D::Weight, ModelError> {
        let prefix = self.layer_name(layer.number, name);
        let name = format!("{prefix}.weight");
        let dim = layer.spec.attention.head_dim;
        if !norm.has_weight || norm.is_behind_rotation {
            return self.norm_of_ones(norm, dim);
        }
        let mut weight = match norm.span {
            HeadNormSpan::Head => self.checkpoint.vector(&name, dim, 0..dim)?,
            HeadNormSpan::AllHeads => self.checkpoint.vector(&name, count * dim, scaled(taken, dim))?,
            HeadNormSpan::EachHead if !self.checkpoint.contains(&name) => {
                self.checkpoint.joined(&prefix, dim, taken.clone())?
            }
            HeadNormSpan::EachHead => self.checkpoint.flattened(&name, [count, dim], taken.clone())?,
        };
        weight.head_order = self.head_order(layer.spec);
        let slices = NormSlices {
            kind: norm.kind,
            width: weight.cols.len(),
            weight: Some(weight),
            bias: None,
            offset: self.config.norm.offset,
            factor: 1.0,
        };
        let loaded = self.device.load_norm(&slices);
        self.or_device_error(loaded)
    }
}
