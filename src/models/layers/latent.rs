//! Loads this worker's shard of a layer whose KV blocks hold latent vectors: heads are divided, and every worker has the products
//! that give the latent vectors of positions.

use ops::{Device, LatentWeights, LinearRole, NormKind, NormSlices};

use super::qkv::scaled;
use super::{LayerSource, Loader};
use crate::ModelError;
use crate::layer_spec::LatentLayer;
use crate::names::LatentNames;

/// Added to the mean square in the norms of latent vectors, in every checkpoint.
pub(crate) const LATENT_EPS: f32 = 1e-6;

/// The products that give q.
pub(crate) enum LatentQuery<D: Device> {
    /// One with the layer's input.
    Direct(D::Weight),
    /// One with a latent vector, which is normed.
    Latent { down: D::Weight, norm: D::Weight, up: D::Weight },
}

impl<D: Device> Loader<'_, D> {
    fn latent_names(&self) -> LatentNames {
        self.names.latent.expect("an architecture with latent vectors names their weights")
    }

    /// A matrix with all of its outputs, or those of this worker's heads.
    fn latent_product(
        &mut self,
        layer: LayerSource<'_>,
        name: &str,
        [rows, cols]: [usize; 2],
        head_dim: Option<usize>,
    ) -> Result<D::Weight, ModelError> {
        let name = self.layer_name(layer.number, name);
        let (weight_name, bias_name) = (format!("{name}.weight"), format!("{name}.bias"));
        let taken = head_dim.map_or(0..rows, |dim| scaled(&layer.shard.heads, dim));
        let weight = self.linear(&weight_name, [rows, cols], taken, 0..cols)?;
        let mut bias = Vec::new();
        if layer.spec.attention.qkv_bias && head_dim.is_none() {
            bias.push(self.checkpoint.vector(&bias_name, rows, 0..rows)?);
        }
        let loaded = self.device.load_linear(LinearRole::Up, &[weight], &bias);
        self.or_device_error(loaded)
    }

    pub(crate) fn latent_query(
        &mut self,
        layer: LayerSource<'_>,
        latent: LatentLayer,
    ) -> Result<LatentQuery<D>, ModelError> {
        let (names, hidden, dim) = (self.latent_names(), self.config.hidden_size, latent.shape.query_dim());
        let rows = layer.spec.attention.num_heads * dim;
        let Some(rank) = latent.query_rank else {
            return Ok(LatentQuery::Direct(self.latent_product(layer, names.query, [rows, hidden], Some(dim))?));
        };
        let down = self.latent_product(layer, names.query_down, [rank, hidden], None)?;
        let name = format!("{}.weight", self.layer_name(layer.number, names.query_norm));
        let weight = Some(self.checkpoint.vector(&name, rank, 0..rank)?);
        let slices = NormSlices { kind: NormKind::Rms, width: rank, weight, bias: None, offset: 0.0, factor: 1.0 };
        let loaded = self.device.load_norm(&slices);
        let norm = self.or_device_error(loaded)?;
        Ok(LatentQuery::Latent { down, norm, up: self.latent_product(layer, names.query_up, [rows, rank], Some(dim))? })
    }

    /// The product that gives the latent vectors and the rotated parts of k.
    pub(crate) fn latents(&mut self, layer: LayerSource<'_>, latent: LatentLayer) -> Result<D::Weight, ModelError> {
        let shape = [latent.shape.width(), self.config.hidden_size];
        self.latent_product(layer, self.latent_names().down, shape, None)
    }

    pub(crate) fn latent_weights(
        &mut self,
        layer: LayerSource<'_>,
        latent: LatentLayer,
    ) -> Result<D::Weight, ModelError> {
        let (names, shape, attention) = (self.latent_names(), latent.shape, &layer.spec.attention);
        let name = |name: &str| format!("{}.weight", self.layer_name(layer.number, name));
        let (norm_name, up_name) = (name(names.norm), name(names.up));
        let dim = shape.key_dim + shape.value_dim;
        let rows = scaled(&layer.shard.heads, dim);
        let weights = LatentWeights {
            shape,
            num_heads: layer.shard.heads.len(),
            norm: self.checkpoint.vector(&norm_name, shape.rank, 0..shape.rank)?,
            eps: LATENT_EPS,
            up: self.matrix(&up_name, [attention.num_heads * dim, shape.rank], rows, 0..shape.rank)?,
        };
        let loaded = self.device.load_latent(&weights);
        self.or_device_error(loaded)
    }

    pub(crate) fn latent_out(&mut self, layer: LayerSource<'_>, latent: LatentLayer) -> Result<D::Weight, ModelError> {
        let (attention, dim) = (&layer.spec.attention, latent.shape.value_dim);
        let name = self.layer_name(layer.number, self.names.out);
        let taken = scaled(&layer.shard.heads, dim);
        self.by_input(LinearRole::Out, &name, attention.num_heads * dim, taken, attention.out_bias)
    }
}
