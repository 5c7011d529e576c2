//! Loads the weights around the embedding of each layer. Every worker has all of them, except for the table.

use ops::{Device, LinearRole, NormSlices};

use crate::ModelError;
use crate::config::PerLayerInput;
use crate::layers::{LayerSource, Loader};

impl<D: Device> Loader<'_, D> {
    /// The value that multiplies the hidden state behind a layer, if the architecture has one.
    pub(crate) fn layer_scalar(&self, layer: LayerSource<'_>) -> Result<Option<f32>, ModelError> {
        let scalar = |name| self.checkpoint.scalar(&self.layer_name(layer.number, name));
        self.names.layer_scalar.map(scalar).transpose()
    }

    /// This worker's tokens of the table with the embeddings of all layers.
    pub(crate) fn per_layer_embedding(&mut self, input: PerLayerInput, name: &str) -> Result<D::Weight, ModelError> {
        let (name, tokens) = (format!("{}.weight", self.model_name(name)), self.shard.vocab.clone());
        let cols = self.config.num_layers() * input.width;
        let slice = self.checkpoint.matrix(&name, [input.vocab_size, cols], tokens.clone(), 0..cols)?;
        let loaded = self.device.load_embedding(slice, tokens.start as u32);
        self.or_device_error(loaded)
    }

    /// A whole matrix `[rows, cols]` without a bias. `name` is its full name.
    pub(crate) fn whole(&mut self, name: &str, [rows, cols]: [usize; 2]) -> Result<D::Weight, ModelError> {
        let name = format!("{name}.weight");
        let slice = self.checkpoint.matrix(&name, [rows, cols], 0..rows, 0..cols)?;
        let loaded = self.device.load_linear(LinearRole::Up, &[slice], &[]);
        self.or_device_error(loaded)
    }

    /// A norm of the model's kind, but of `width` elements, whose gain is multiplied by `factor`. `name` is that of the
    /// tensor.
    pub(crate) fn norm_of_width(&mut self, name: &str, width: usize, factor: f32) -> Result<D::Weight, ModelError> {
        let norm = self.config.norm;
        let weight = Some(self.checkpoint.vector(name, width, 0..width)?);
        let slices = NormSlices { kind: norm.kind, width, weight, bias: None, offset: norm.offset, factor };
        let loaded = self.device.load_norm(&slices);
        self.or_device_error(loaded)
    }
}
