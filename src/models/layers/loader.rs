//! Loads this worker's shard of each layer from a checkpoint to a device.

use std::ops::Range;
use std::path::Path;

use ops::{Device, DeviceError, LinearRole, WeightSlice};

use crate::config::{Mlp, NormKind};
use crate::layers::qkv::{RowSlice, scaled};
use crate::names::Names;
use crate::shard::Shard;
use crate::{Checkpoint, Config, ModelError};

/// Everything that is needed to load a layer.
pub(crate) struct Loader<'a, D> {
    pub(crate) dir: &'a Path,
    pub(crate) checkpoint: &'a Checkpoint,
    pub(crate) config: &'a Config,
    pub(crate) names: &'a Names,
    /// Prefix of every name except the head's.
    pub(crate) prefix: &'static str,
    pub(crate) shard: &'a Shard,
    pub(crate) device: &'a mut D,
}

impl<'a, D: Device> Loader<'a, D> {
    pub(crate) fn new(
        dir: &'a Path,
        checkpoint: &'a Checkpoint,
        config: &'a Config,
        names: &'a Names,
        shard: &'a Shard,
        device: &'a mut D,
    ) -> Self {
        let is_there = |prefix: &&&str| checkpoint.contains(&format!("{prefix}{}.weight", names.embedding));
        let prefix = names.prefixes.iter().find(is_there).unwrap_or(&names.prefixes[0]);
        Self { dir, checkpoint, config, names, prefix, shard, device }
    }

    /// The full name of a weight of layer `index`.
    pub(crate) fn layer_name(&self, index: usize, name: &str) -> String {
        format!("{}{}.{index}.{name}", self.prefix, self.names.layers)
    }

    /// The weight of a norm, with its bias if the model's norms have one.
    pub(crate) fn norm(&mut self, name: &str) -> Result<D::Weight, ModelError> {
        let len = self.config.hidden_size;
        let (weight_name, bias_name) = (format!("{name}.weight"), format!("{name}.bias"));
        let weight = self.checkpoint.vector(&weight_name, len, 0..len)?;
        let loaded = match self.config.norm {
            NormKind::Rms => self.device.load_vector(weight),
            NormKind::Layer => {
                let bias = self.checkpoint.vector(&bias_name, len, 0..len)?;
                self.device.load_layer_norm(weight, bias)
            }
        };
        self.or_device_error(loaded)
    }

    /// The norms of the q and k heads.
    pub(crate) fn head_norms(&mut self, layer: usize) -> Result<[D::Weight; 2], ModelError> {
        let [q, k] = self.names.head_norms;
        Ok([self.head_norm(layer, q)?, self.head_norm(layer, k)?])
    }

    fn head_norm(&mut self, layer: usize, name: &str) -> Result<D::Weight, ModelError> {
        let name = format!("{}.weight", self.layer_name(layer, name));
        let len = self.config.head_dim;
        let loaded = self.device.load_vector(self.checkpoint.vector(&name, len, 0..len)?);
        self.or_device_error(loaded)
    }

    /// This worker's rows of the embedding table.
    pub(crate) fn embedding(&mut self) -> Result<D::Weight, ModelError> {
        let name = format!("{}{}.weight", self.prefix, self.names.embedding);
        let slice = self.checkpoint.matrix(&name, self.vocabulary(), self.shard.vocab.clone(), self.width())?;
        let loaded = self.device.load_embedding(slice, self.shard.vocab.start as u32);
        self.or_device_error(loaded)
    }

    /// The table of learned positions.
    pub(crate) fn positions(&mut self, num_positions: usize) -> Result<D::Weight, ModelError> {
        let name = format!("{}{}.weight", self.prefix, self.names.positions);
        let shape = [num_positions, self.config.hidden_size];
        let loaded = self.device.load_positions(self.checkpoint.matrix(&name, shape, 0..shape[0], 0..shape[1])?);
        self.or_device_error(loaded)
    }

    /// The output head: the embedding, or this worker's rows of a separate matrix.
    pub(crate) fn head(&mut self, embedding: Option<&D::Weight>) -> Result<D::Weight, ModelError> {
        if let Some(embedding) = embedding.filter(|_| self.config.tie_word_embeddings) {
            let tied = self.device.tie_head(embedding);
            return self.or_device_error(tied);
        }
        let name = format!("{}.weight", self.names.head);
        let (shape, rows) = (self.vocabulary(), self.shard.vocab.clone());
        let slice = match self.config.unit_head {
            true => self.checkpoint.unit_rows(&name, shape, rows)?,
            false => self.checkpoint.matrix(&name, shape, rows, self.width())?,
        };
        let loaded = self.device.load_linear(LinearRole::Head, &[slice], &[]);
        self.or_device_error(loaded)
    }

    fn vocabulary(&self) -> [usize; 2] {
        [self.config.vocab_size, self.config.hidden_size]
    }

    fn width(&self) -> Range<usize> {
        0..self.config.hidden_size
    }

    /// q, k and v of one layer as one matrix, sharded by heads.
    pub(crate) fn qkv(&mut self, layer: usize) -> Result<D::Weight, ModelError> {
        let row_slices = self.names.qkv.row_slices(self.config, self.shard);
        self.by_output(LinearRole::Qkv, layer, &row_slices, self.config.qkv_bias)
    }

    /// gate and up of one layer as one matrix, or up alone, sharded by columns of the inner layer.
    pub(crate) fn up(&mut self, layer: usize) -> Result<D::Weight, ModelError> {
        let piece =
            |name| RowSlice { name, rows: self.config.intermediate_size, taken: self.shard.intermediate.clone() };
        let (role, row_slices) = match self.config.mlp {
            Mlp::Gated => (LinearRole::GateUp, vec![piece(self.names.gate), piece(self.names.up)]),
            Mlp::Plain => (LinearRole::Up, vec![piece(self.names.up)]),
        };
        self.by_output(role, layer, &row_slices, self.config.mlp_bias)
    }

    /// The attention output projection of one layer, sharded by heads along its input.
    pub(crate) fn out(&mut self, layer: usize) -> Result<D::Weight, ModelError> {
        let dim = self.config.head_dim;
        let taken = scaled(&self.shard.heads, dim);
        let name = self.layer_name(layer, self.names.out);
        self.by_input(LinearRole::Out, &name, self.config.num_heads * dim, taken, self.config.out_bias)
    }

    /// The down projection of one layer, sharded along its input.
    pub(crate) fn down(&mut self, layer: usize) -> Result<D::Weight, ModelError> {
        let name = self.layer_name(layer, self.names.down);
        let taken = self.shard.intermediate.clone();
        self.by_input(LinearRole::Down, &name, self.config.intermediate_size, taken, self.config.mlp_bias)
    }

    /// Row slices stacked into one matrix, with all of their input.
    fn by_output(
        &mut self,
        role: LinearRole,
        layer: usize,
        row_slices: &[RowSlice],
        has_bias: bool,
    ) -> Result<D::Weight, ModelError> {
        let names: Vec<String> = row_slices.iter().map(|piece| self.layer_name(layer, piece.name)).collect();
        let weight_names: Vec<String> = names.iter().map(|name| format!("{name}.weight")).collect();
        let bias_names: Vec<String> = names.iter().map(|name| format!("{name}.bias")).collect();
        let mut weights = Vec::new();
        let mut biases = Vec::new();
        for (index, RowSlice { rows, taken, .. }) in row_slices.iter().enumerate() {
            let shape = [*rows, self.config.hidden_size];
            weights.push(self.linear(&weight_names[index], shape, taken.clone(), 0..shape[1])?);
            if has_bias {
                biases.push(self.checkpoint.vector(&bias_names[index], *rows, taken.clone())?);
            }
        }
        let loaded = self.device.load_linear(role, &weights, &biases);
        self.or_device_error(loaded)
    }

    /// A matrix with a part of its input. Its product is a partial sum, so only one worker adds the bias.
    fn by_input(
        &mut self,
        role: LinearRole,
        name: &str,
        cols: usize,
        taken: Range<usize>,
        has_bias: bool,
    ) -> Result<D::Weight, ModelError> {
        let rows = self.config.hidden_size;
        let (weight_name, bias_name) = (format!("{name}.weight"), format!("{name}.bias"));
        let weight = self.linear(&weight_name, [rows, cols], 0..rows, taken)?;
        let mut bias = Vec::new();
        if has_bias && self.device.tensor_parallel().rank == 0 {
            bias.push(self.checkpoint.vector(&bias_name, rows, 0..rows)?);
        }
        let loaded = self.device.load_linear(role, &[weight], &bias);
        self.or_device_error(loaded)
    }

    /// A part of a linear layer `[out, in]`, whichever order it is stored in.
    fn linear<'n>(
        &self,
        name: &'n str,
        shape: [usize; 2],
        rows: Range<usize>,
        cols: Range<usize>,
    ) -> Result<WeightSlice<'n>, ModelError> {
        match self.names.transposed {
            true => self.checkpoint.transposed(name, shape, rows, cols),
            false => self.checkpoint.matrix(name, shape, rows, cols),
        }
    }

    pub(crate) fn or_device_error<T>(&self, result: Result<T, DeviceError>) -> Result<T, ModelError> {
        result.map_err(|source| ModelError::Device { dir: self.dir.into(), source })
    }
}
