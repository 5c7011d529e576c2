//! Loads this worker's shard of each layer from a checkpoint to a device.

use std::ops::Range;
use std::path::Path;

use ops::{Activation, Device, DeviceError, HeadOrder, LinearRole, WeightData, WeightSlice};

use crate::checkpoint::{padded_cols, padded_rows, padded_vector, rounded};
use crate::config::{MtpForm, MtpHead, Rounding};
use crate::layer_spec::{LayerSpec, MlpLayer};
use crate::layers::qkv::{RowSlice, gate_slices, scaled};
use crate::linear_layers::prefix;
use crate::names::{Names, QkvNames, UpNames};
use crate::shard::{LayerShard, Shard};
use crate::{Checkpoint, Config, ModelError};

/// Everything that is needed to load a layer.
pub(crate) struct Loader<'a, D> {
    pub(crate) dir: &'a Path,
    pub(crate) checkpoint: &'a Checkpoint,
    pub(crate) config: &'a Config,
    pub(crate) names: &'a Names,
    /// Prefix of every name except the head's.
    pub(crate) prefix: &'static str,
    /// What stands before the names of the only layer, if not its number.
    pub(crate) layer_prefix: Option<&'static str>,
    /// Inputs of the projections to q, k and v.
    pub(crate) qkv_inputs: usize,
    pub(crate) shard: &'a Shard,
    pub(crate) device: &'a mut D,
}

/// One layer to load: its specification, this worker's share, and the number that it or its feed-forward has in the names of the
/// checkpoint.
#[derive(Clone, Copy)]
pub(crate) struct LayerSource<'a> {
    pub(crate) number: usize,
    pub(crate) spec: &'a LayerSpec,
    pub(crate) shard: &'a LayerShard,
}

impl LayerSource<'_> {
    /// The same layer with the number of its feed-forward.
    pub(crate) fn feed_forward(self) -> Self {
        Self { number: self.spec.numbers(self.number)[1], ..self }
    }
}

impl<'a, D: Device> Loader<'a, D> {
    pub(crate) fn new(
        dir: &'a Path,
        checkpoint: &'a Checkpoint,
        config: &'a Config,
        shard: &'a Shard,
        device: &'a mut D,
    ) -> Self {
        let names = config.names;
        let prefix = prefix(checkpoint, names);
        let qkv_inputs = config.hidden_size;
        Self { dir, checkpoint, config, names, prefix, layer_prefix: None, qkv_inputs, shard, device }
    }

    pub(crate) fn layer(&self, index: usize) -> LayerSource<'a> {
        let spec = &self.config.layers[index];
        LayerSource { number: spec.numbers(index)[0], spec, shard: &self.shard.layers[index] }
    }

    /// The full name of a weight of the layer with this number.
    pub(crate) fn layer_name(&self, number: usize, name: &str) -> String {
        match &self.config.mtp {
            _ if self.layer_prefix.is_some() => format!("{}.{name}", self.layer_prefix.unwrap_or_default()),
            Some(MtpHead { form: MtpForm::Qwen, .. }) if number == self.config.num_layers() => {
                format!("mtp.layers.0.{name}")
            }
            _ => format!("{}{}.{number}.{name}", self.prefix, self.names.layers),
        }
    }

    /// The columns `taken` of a matrix `[E, cols]` that joins inputs of a head. All workers have all of its rows.
    pub(crate) fn joining(&mut self, name: &str, taken: Range<usize>, cols: usize) -> Result<D::Weight, ModelError> {
        let (name, rows) = (format!("{name}.weight"), self.config.hidden_size);
        let slice = self.linear(&name, [rows, cols], 0..rows, taken)?;
        let loaded = self.device.load_linear(LinearRole::Up, &[slice], &[]);
        self.or_device_error(loaded)
    }

    /// The full name of a weight of the model, without its suffix.
    pub(crate) fn model_name(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// This worker's rows of the embedding table.
    pub(crate) fn embedding(&mut self) -> Result<D::Weight, ModelError> {
        let name = self.embedding_name();
        let slice = self.checkpoint.matrix(&name, self.vocabulary(), self.shard.vocab.clone(), self.width())?;
        let loaded = self.device.load_embedding(slice, self.shard.vocab.start as u32);
        self.or_device_error(loaded)
    }

    /// The table of learned positions.
    pub(crate) fn positions(&mut self, num_positions: usize) -> Result<D::Weight, ModelError> {
        let name = format!("{}{}.weight", self.prefix, self.names.positions);
        let (first, width) = (self.names.first_position, self.config.hidden_size);
        let last = first + num_positions;
        let loaded = self.device.load_positions(self.checkpoint.matrix(&name, [last, width], first..last, 0..width)?);
        self.or_device_error(loaded)
    }

    /// Whether the head is the embedding. A checkpoint may say so and still have a head with other values, for example
    /// after training with adapters; then the head is used, as in transformers.
    pub(crate) fn has_tied_head(&self) -> bool {
        let (head, embedding) = (format!("{}.weight", self.head_name()), self.embedding_name());
        self.config.head.is_tied && self.checkpoint.have_equal_bytes(&head, &embedding).unwrap_or(true)
    }

    fn head_name(&self) -> &'static str {
        let names = self.names.heads;
        let is_there = |name: &&&str| self.checkpoint.contains(&format!("{name}.weight"));
        names.iter().find(is_there).unwrap_or(&names[0])
    }

    fn embedding_name(&self) -> String {
        format!("{}{}.weight", self.prefix, self.names.embedding)
    }

    /// The output head: the embedding that is tied to it, or this worker's rows of a separate matrix.
    pub(crate) fn head(&mut self, tied: Option<&D::Weight>) -> Result<D::Weight, ModelError> {
        let head = self.config.head;
        if let Some(embedding) = tied {
            let tied = self.device.tie_head(embedding);
            return self.or_device_error(tied);
        }
        let name = self.head_name();
        let (name, bias_name) = (format!("{name}.weight"), format!("{name}.bias"));
        let slice = self.head_rows(&name)?;
        let bias = || self.checkpoint.vector(&bias_name, self.config.vocab_size, self.shard.vocab.clone());
        let bias = head.has_bias.then(bias).transpose()?;
        let loaded = self.device.load_linear(LinearRole::Head, &[slice], bias.as_slice());
        self.or_device_error(loaded)
    }

    /// This worker's rows of a separate output head.
    fn head_rows<'n>(&self, name: &'n str) -> Result<WeightSlice<'n>, ModelError> {
        let (shape, rows) = (self.vocabulary(), self.shard.vocab.clone());
        match self.config.head.has_unit_rows {
            true => self.checkpoint.unit_rows(name, shape, rows),
            false => self.matrix(name, shape, rows, self.width()),
        }
    }

    /// Gives the output head a copy in fewer bits for guesses.
    pub(crate) fn copy_head(&mut self, head: &mut D::Weight, is_tied: bool) -> Result<(), ModelError> {
        let name = if is_tied { self.embedding_name() } else { format!("{}.weight", self.head_name()) };
        let slice = match is_tied {
            true => self.checkpoint.matrix(&name, self.vocabulary(), self.shard.vocab.clone(), self.width())?,
            false => self.head_rows(&name)?,
        };
        self.copy_rows(head, slice)
    }

    /// Gives an output head of these rows a copy in fewer bits for guesses, unless they have fewer bits already.
    pub(crate) fn copy_rows(&mut self, head: &mut D::Weight, slice: WeightSlice<'_>) -> Result<(), ModelError> {
        if matches!(&slice.data, WeightData::Computed(source) if source.quantized().is_some()) {
            return Ok(());
        }
        let loaded = self.device.load_head_copy(head, rounded(slice, Rounding::Fp8Rows));
        self.or_device_error(loaded)
    }

    fn vocabulary(&self) -> [usize; 2] {
        [self.config.vocab_size, self.config.hidden_size]
    }

    pub(super) fn width(&self) -> Range<usize> {
        0..self.config.hidden_size
    }

    /// How the checkpoint orders the elements of q and k heads, if not as devices rotate them.
    pub(super) fn head_order(&self, layer: &LayerSpec) -> Option<HeadOrder> {
        let rope = &self.config.ropes[layer.attention.rope?];
        rope.head_order()
    }

    /// q, k and v of one layer as one matrix, sharded by heads.
    pub(crate) fn qkv(&mut self, layer: LayerSource<'_>) -> Result<D::Weight, ModelError> {
        let attention = &layer.spec.attention;
        let row_slices = self.names.qkv.row_slices(attention, layer.shard, self.head_order(layer.spec));
        self.by_output(LinearRole::Qkv, layer.number, &row_slices, self.qkv_inputs, attention.qkv_bias)
    }

    /// The gates of the output of one layer's attention, sharded by heads; `None` if it has none.
    pub(crate) fn attention_gates(&mut self, layer: LayerSource<'_>) -> Result<Option<D::Weight>, ModelError> {
        let attention = &layer.spec.attention;
        let row_slices = gate_slices(&self.names.qkv, attention, layer.shard);
        let cols = self.config.hidden_size;
        let has_bias = attention.qkv_bias && !matches!(self.names.qkv, QkvNames::Gated(_));
        let load = || self.by_output(LinearRole::Up, layer.number, &row_slices, cols, has_bias);
        (!row_slices.is_empty()).then(load).transpose()
    }

    /// gate and up of one layer as one matrix, or up alone, sharded by columns of the inner layer.
    pub(crate) fn up(
        &mut self,
        layer: LayerSource<'_>,
        mlp: MlpLayer,
        names: UpNames,
    ) -> Result<D::Weight, ModelError> {
        let (role, row_slices) = up_slices(names, &layer.shard.intermediate, mlp.intermediate_size);
        self.by_output(role, layer.number, &row_slices, self.config.hidden_size, mlp.has_bias)
    }

    /// An activation function with the numbers that the checkpoint has for it. Without them it keeps those from which
    /// training starts, as in transformers.
    pub(crate) fn activation(&self, layer: LayerSource<'_>, usual: Activation) -> Result<Activation, ModelError> {
        let Activation::Xielu { positive, negative, slope, edge } = usual else { return Ok(usual) };
        let read = |name: &str| {
            let name = self.layer_name(layer.number, &format!("mlp.act_fn.{name}"));
            self.checkpoint.contains(&name).then(|| self.checkpoint.scalar(&name)).transpose()
        };
        let softplus = |x: f32| x.max(0.0) + (-x.abs()).exp().ln_1p();
        let slope = read("beta")?.unwrap_or(slope);
        let (above, below) = (read("alpha_p")?.map(softplus), read("alpha_n")?.map(softplus));
        let negative = below.map_or(negative, |below| slope + below);
        Ok(Activation::Xielu {
            positive: above.unwrap_or(positive),
            negative,
            slope,
            edge: read("eps")?.unwrap_or(edge),
        })
    }

    /// The vector whose product with the input gates the output of a feed-forward, as a linear layer with one row.
    pub(crate) fn output_gate(&mut self, layer: LayerSource<'_>, name: &str) -> Result<D::Weight, ModelError> {
        let name = format!("{}.weight", self.layer_name(layer.number, name));
        let slice = self.checkpoint.matrix(&name, [1, self.config.hidden_size], 0..1, self.width())?;
        let loaded = self.device.load_linear(LinearRole::Up, &[slice], &[]);
        self.or_device_error(loaded)
    }

    /// The sinks of this worker's heads; none if the layer has none.
    pub(crate) fn sinks(&self, layer: LayerSource<'_>) -> Result<Vec<f32>, ModelError> {
        match self.names.sinks.filter(|_| layer.spec.attention.has_sinks) {
            Some(name) => {
                let (name, heads) = (self.layer_name(layer.number, name), layer.shard.heads.clone());
                self.checkpoint.values(&name, &[layer.spec.attention.num_heads], heads)
            }
            None => Ok(Vec::new()),
        }
    }

    /// The attention output projection of one layer, sharded by heads along its input.
    pub(crate) fn out(&mut self, layer: LayerSource<'_>) -> Result<D::Weight, ModelError> {
        let attention = &layer.spec.attention;
        let taken = scaled(&layer.shard.heads, attention.head_dim);
        let name = self.layer_name(layer.number, self.names.out);
        let Some(padding) = attention.padding() else {
            return self.by_input(LinearRole::Out, &name, attention.stored_width(), taken, attention.out_bias);
        };
        assert!(!attention.out_bias, "no architecture with padded heads has this bias");
        let (name, shape) = (format!("{name}.weight"), [self.config.hidden_size, attention.stored_width()]);
        let weight = padded_cols(self.linear(&name, shape, 0..shape[0], 0..shape[1])?, padding, taken);
        let loaded = self.device.load_linear(LinearRole::Out, &[weight], &[]);
        self.or_device_error(loaded)
    }

    /// The down projection of one layer, sharded along its input.
    pub(crate) fn down(&mut self, layer: LayerSource<'_>, mlp: MlpLayer, name: &str) -> Result<D::Weight, ModelError> {
        let name = self.layer_name(layer.number, name);
        let taken = layer.shard.intermediate.clone();
        self.by_input(LinearRole::Down, &name, mlp.intermediate_size, taken, mlp.has_bias)
    }

    /// Row slices stacked into one matrix, with all of their input of `cols` columns.
    pub(super) fn by_output(
        &mut self,
        role: LinearRole,
        layer: usize,
        row_slices: &[RowSlice],
        cols: usize,
        has_bias: bool,
    ) -> Result<D::Weight, ModelError> {
        let names: Vec<String> = row_slices.iter().map(|piece| self.layer_name(layer, piece.name)).collect();
        let weight_names: Vec<String> = names.iter().map(|name| format!("{name}.weight")).collect();
        let bias_names: Vec<String> = names.iter().map(|name| format!("{name}.bias")).collect();
        let mut weights = Vec::new();
        let mut biases = Vec::new();
        for (index, RowSlice { rows, taken, head_order, padding, .. }) in row_slices.iter().enumerate() {
            let stored = if padding.is_some() { 0..*rows } else { taken.clone() };
            let weight = self.linear(&weight_names[index], [*rows, cols], stored.clone(), 0..cols)?;
            weights.push(match padding {
                Some(padding) => padded_rows(weight, *padding, taken.clone()),
                None => WeightSlice { head_order: *head_order, ..weight },
            });
            if has_bias {
                let bias = self.checkpoint.vector(&bias_names[index], *rows, stored)?;
                biases.push(match padding {
                    Some(padding) => padded_vector(&bias, *padding, taken.clone()),
                    None => WeightSlice { head_order: *head_order, ..bias },
                });
            }
        }
        let loaded = self.device.load_linear(role, &weights, &biases);
        self.or_device_error(loaded)
    }

    /// A matrix with a part of its input. Its product is a partial sum, so only one worker adds the bias.
    pub(super) fn by_input(
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

    /// A part of a matrix that may be quantized.
    pub(super) fn matrix<'n>(
        &self,
        name: &'n str,
        shape: [usize; 2],
        rows: Range<usize>,
        cols: Range<usize>,
    ) -> Result<WeightSlice<'n>, ModelError> {
        self.checkpoint.maybe_quantized(name, shape, (rows, cols), self.config.weight_format)
    }

    /// A part of a linear layer `[out, in]`, whichever order it is stored in.
    pub(crate) fn linear<'n>(
        &self,
        name: &'n str,
        shape: [usize; 2],
        rows: Range<usize>,
        cols: Range<usize>,
    ) -> Result<WeightSlice<'n>, ModelError> {
        let slice = match self.names.transposed && self.checkpoint.contains(name) {
            true => self.checkpoint.transposed(name, shape, rows, cols)?,
            false => self.matrix(name, shape, rows, cols)?,
        };
        Ok(self.at_load(slice))
    }

    /// A matrix of products in the form that it gets while it is loaded.
    pub(super) fn at_load<'n>(&self, slice: WeightSlice<'n>) -> WeightSlice<'n> {
        match self.config.rounding {
            Some(rounding) => rounded(slice, rounding),
            None => slice,
        }
    }

    pub(crate) fn or_device_error<T>(&self, result: Result<T, DeviceError>) -> Result<T, ModelError> {
        result.map_err(|source| ModelError::Device { dir: self.dir.into(), source })
    }
}

/// The columns `taken` of gate and up, or of up alone, as rows of the matrices of a checkpoint.
pub(crate) fn up_slices(names: UpNames, taken: &Range<usize>, width: usize) -> (LinearRole, Vec<RowSlice>) {
    let slice = |name, rows, offset: usize| RowSlice {
        name,
        rows,
        taken: offset + taken.start..offset + taken.end,
        head_order: None,
        padding: None,
    };
    match names {
        UpNames::Separate([gate, up]) => (LinearRole::GateUp, vec![slice(gate, width, 0), slice(up, width, 0)]),
        UpNames::Stacked(name) => (LinearRole::GateUp, vec![slice(name, 2 * width, 0), slice(name, 2 * width, width)]),
        UpNames::Plain(up) => (LinearRole::Up, vec![slice(up, width, 0)]),
    }
}
