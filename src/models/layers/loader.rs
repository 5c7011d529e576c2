//! Takes this worker's share of each layer from a checkpoint to a device.

use std::ops::Range;
use std::path::Path;

use device::{Device, DeviceError, LinearRole, WeightSlice};

use crate::shard::Shard;
use crate::{Checkpoint, Config, ModelError};

/// What is needed to load any layer.
pub(crate) struct Loader<'a, D> {
    pub(crate) dir: &'a Path,
    pub(crate) checkpoint: &'a Checkpoint,
    pub(crate) config: &'a Config,
    pub(crate) shard: &'a Shard,
    pub(crate) device: &'a mut D,
}

impl<D: Device> Loader<'_, D> {
    /// A norm's weight.
    pub(crate) fn norm(&mut self, name: &str) -> Result<D::Weight, ModelError> {
        let len = self.config.hidden_size;
        let name = format!("{name}.weight");
        let slice = self.checkpoint.vector(&name, len, 0..len)?;
        let loaded = self.device.load_vector(slice);
        self.or_device_error(loaded)
    }

    /// This worker's rows of the embedding table.
    pub(crate) fn embedding(&mut self, name: &str) -> Result<D::Weight, ModelError> {
        let slice = self.vocabulary_rows(name)?;
        let loaded = self.device.load_embedding(slice, self.shard.vocab.start as u32);
        self.or_device_error(loaded)
    }

    /// This worker's rows of a head of its own.
    pub(crate) fn head(&mut self, name: &str) -> Result<D::Weight, ModelError> {
        let slice = self.vocabulary_rows(name)?;
        let loaded = self.device.load_linear(LinearRole::Head, &[slice], &[]);
        self.or_device_error(loaded)
    }

    /// A head that is the embedding.
    pub(crate) fn tied_head(&mut self, embedding: &D::Weight) -> Result<D::Weight, ModelError> {
        let tied = self.device.tie_head(embedding);
        self.or_device_error(tied)
    }

    fn vocabulary_rows<'a>(&self, name: &'a str) -> Result<WeightSlice<'a>, ModelError> {
        let shape = [self.config.vocab_size, self.config.hidden_size];
        self.checkpoint.matrix(name, shape, self.shard.vocab.clone(), 0..shape[1])
    }

    /// q, k and v of one layer as one matrix, split by heads.
    pub(crate) fn qkv(&mut self, layer: &str) -> Result<D::Weight, ModelError> {
        let (config, dim) = (self.config, self.config.head_dim);
        let heads = scaled(&self.shard.heads, dim);
        let kv_heads = scaled(&self.shard.kv_heads, dim);
        let parts = [
            ("q_proj", config.num_heads * dim, heads),
            ("k_proj", config.num_kv_heads * dim, kv_heads.clone()),
            ("v_proj", config.num_kv_heads * dim, kv_heads),
        ]
        .map(|(name, rows, taken)| (format!("{layer}.self_attn.{name}"), rows, taken));
        self.by_output(LinearRole::Qkv, &parts, config.qkv_bias)
    }

    /// gate and up of one layer as one matrix, split by columns of the gated layer.
    pub(crate) fn gate_up(&mut self, layer: &str) -> Result<D::Weight, ModelError> {
        let parts = ["gate_proj", "up_proj"].map(|name| {
            (format!("{layer}.mlp.{name}"), self.config.intermediate_size, self.shard.intermediate.clone())
        });
        self.by_output(LinearRole::GateUp, &parts, self.config.mlp_bias)
    }

    /// The attention output of one layer, split by heads along its input.
    pub(crate) fn out(&mut self, layer: &str) -> Result<D::Weight, ModelError> {
        let dim = self.config.head_dim;
        let taken = scaled(&self.shard.heads, dim);
        let name = format!("{layer}.self_attn.o_proj");
        self.by_input(LinearRole::Out, &name, self.config.num_heads * dim, taken, self.config.out_bias)
    }

    /// The down projection of one layer, split along its input.
    pub(crate) fn down(&mut self, layer: &str) -> Result<D::Weight, ModelError> {
        let name = format!("{layer}.mlp.down_proj");
        let taken = self.shard.intermediate.clone();
        self.by_input(LinearRole::Down, &name, self.config.intermediate_size, taken, self.config.mlp_bias)
    }

    /// Matrices `(name, rows, rows taken)` stacked, with all of their input.
    fn by_output(
        &mut self,
        role: LinearRole,
        parts: &[(String, usize, Range<usize>)],
        has_bias: bool,
    ) -> Result<D::Weight, ModelError> {
        let cols = self.config.hidden_size;
        let weight_names: Vec<String> = parts.iter().map(|(name, ..)| format!("{name}.weight")).collect();
        let bias_names: Vec<String> = parts.iter().map(|(name, ..)| format!("{name}.bias")).collect();
        let mut weights = Vec::new();
        let mut biases = Vec::new();
        for (index, (_, rows, taken)) in parts.iter().enumerate() {
            weights.push(self.checkpoint.matrix(&weight_names[index], [*rows, cols], taken.clone(), 0..cols)?);
            if has_bias {
                biases.push(self.checkpoint.vector(&bias_names[index], *rows, taken.clone())?);
            }
        }
        let loaded = self.device.load_linear(role, &weights, &biases);
        self.or_device_error(loaded)
    }

    /// One matrix with a part of its input. Its product is a partial sum, so one worker alone adds the bias.
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
        let weight = self.checkpoint.matrix(&weight_name, [rows, cols], 0..rows, taken)?;
        let mut bias = Vec::new();
        if has_bias && self.device.tensor_parallel().rank == 0 {
            bias.push(self.checkpoint.vector(&bias_name, rows, 0..rows)?);
        }
        let loaded = self.device.load_linear(role, &[weight], &bias);
        self.or_device_error(loaded)
    }

    pub(crate) fn or_device_error<T>(&self, result: Result<T, DeviceError>) -> Result<T, ModelError> {
        result.map_err(|source| ModelError::Device { dir: self.dir.into(), source })
    }
}

/// A range of heads as a range of rows.
fn scaled(heads: &Range<usize>, head_dim: usize) -> Range<usize> {
    heads.start * head_dim..heads.end * head_dim
}
