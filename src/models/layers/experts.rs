//! Loads this worker's experts of a layer.

use std::ops::Range;

use ops::{DType, Device, ExpertSlice, ExpertSlices, LinearRole, WeightData, WeightSlice};

use super::LayerSource;
use super::loader::Loader;
use super::qkv::RowSlice;
use crate::ModelError;
use crate::checkpoint::RowOrder;
use crate::layer_spec::ExpertLayer;
use crate::names::{BiasForm, ExpertLayout, ExpertNames};

/// The full names of an expert's weights: gate, up, down. Without a gate, that of up stands twice.
type WeightNames = [String; 3];

impl<D: Device> Loader<'_, D> {
    /// The experts of one layer: this worker's part of the group, sharded by columns of their inner layers.
    pub(crate) fn experts(
        &mut self,
        layer: LayerSource<'_>,
        experts: ExpertLayer,
        names: &ExpertNames,
    ) -> Result<D::Weight, ModelError> {
        let names = &self.with_layout(layer.number, experts, *names);
        let router_name = format!("{}.weight", self.layer_name(layer.number, names.router));
        let shape = [experts.num_experts, self.config.hidden_size];
        let router = self.checkpoint.matrix(&router_name, shape, 0..shape[0], self.width())?;
        let bias_name = format!("{}.bias", self.layer_name(layer.number, names.router));
        let router_bias = match names.has_biases {
            true => Some(self.checkpoint.vector(&bias_name, shape[0], 0..shape[0])?),
            false => None,
        };
        let selection_bias = names.selection_bias.map(|(name, form)| (self.layer_name(layer.number, name), form));
        let selection_bias = match &selection_bias {
            None => None,
            Some((name, BiasForm::Vector)) => Some(self.checkpoint.vector(name, shape[0], 0..shape[0])?),
            Some((name, BiasForm::Row)) => Some(self.checkpoint.flattened(name, [1, shape[0]], 0..1)?),
        };
        let own = layer.shard.experts.clone();
        let weight_names: Vec<WeightNames> =
            own.clone().map(|expert| self.expert_names(layer.number, expert, names.layout)).collect();
        let mut slices = Vec::with_capacity(own.len());
        for (expert, weight_names) in own.clone().zip(&weight_names) {
            slices.push(self.expert(layer, experts, expert, (names, weight_names))?);
        }
        let scales_name = names.apart.map(|apart| self.layer_name(layer.number, apart.scales));
        let scales =
            scales_name.as_ref().map(|name| self.checkpoint.vector(name, shape[0], 0..shape[0])).transpose()?;
        let (first, routing) = (own.start, experts.routing);
        let slices = ExpertSlices { router, router_bias, selection_bias, first, experts: slices, routing, scales };
        let loaded = self.device.load_experts(&slices);
        self.or_device_error(loaded)
    }

    /// The projections from the width of the model to that of a layer's experts, and back, if they have another width. All workers
    /// have both, and the second one computes a worker's part of the sum.
    pub(crate) fn expert_latents(&mut self, layer: LayerSource<'_>) -> Result<Option<[D::Weight; 2]>, ModelError> {
        let names = self.names.experts.and_then(|names| names.latents);
        let (Some([down, up]), Some(size)) = (names, layer.spec.experts.and_then(|experts| experts.latent_size)) else {
            return Ok(None);
        };
        let has_bias = layer.spec.mlp.is_some_and(|mlp| mlp.has_bias);
        let rows = RowSlice { name: down, rows: size, taken: 0..size, head_order: None, padding: None };
        let down = self.by_output(LinearRole::Up, layer.number, &[rows], self.config.hidden_size, has_bias)?;
        let up = self.layer_name(layer.number, up);
        Ok(Some([down, self.by_input(LinearRole::Down, &up, size, 0..size, has_bias)?]))
    }

    /// The names with the layout that the checkpoint has.
    fn with_layout(&self, layer: usize, experts: ExpertLayer, own: ExpertNames) -> ExpertNames {
        let ExpertLayout::Either { stacked, may_be_transposed, prefix, names } = own.layout else { return own };
        let name = self.layer_name(layer, stacked[0]);
        let shape = [experts.num_experts, 2 * experts.intermediate_size, self.config.hidden_size];
        let layout = match self.checkpoint.contains(&name) {
            true if may_be_transposed && !self.checkpoint.has_shape(&name, &shape) => {
                ExpertLayout::StackedTransposed(stacked)
            }
            true => ExpertLayout::Stacked(stacked),
            false => ExpertLayout::Each { prefix, names },
        };
        ExpertNames { layout, ..own }
    }

    fn expert_names(&self, layer: usize, expert: usize, layout: ExpertLayout) -> WeightNames {
        match layout {
            ExpertLayout::Each { prefix, names } => {
                names.map(|name| format!("{}.weight", self.layer_name(layer, &format!("{prefix}.{expert}.{name}"))))
            }
            ExpertLayout::EachPlain { prefix, names: [up, down] } => [up, up, down]
                .map(|name| format!("{}.weight", self.layer_name(layer, &format!("{prefix}.{expert}.{name}")))),
            ExpertLayout::StackedTransposed([gate_up, down])
            | ExpertLayout::Stacked([gate_up, down])
            | ExpertLayout::Alternating([gate_up, down]) => {
                [gate_up, gate_up, down].map(|name| self.layer_name(layer, name))
            }
            ExpertLayout::Either { .. } => unreachable!("the layout is chosen before"),
        }
    }

    fn expert<'n>(
        &self,
        layer: LayerSource<'_>,
        experts: ExpertLayer,
        expert: usize,
        (names, [gate, up, down]): (&ExpertNames, &'n WeightNames),
    ) -> Result<ExpertSlice<'n>, ModelError> {
        let (hidden, inner) = (experts.latent_size.unwrap_or(self.config.hidden_size), experts.intermediate_size);
        let (taken, count) = (layer.shard.expert_intermediate.clone(), experts.num_experts);
        let rows = |first: usize| first + taken.start..first + taken.end;
        // Experts that are stored together are one matrix with their rows one below the other.
        let (gate_up, down_slice) = match names.layout {
            ExpertLayout::StackedTransposed(_) => {
                let part = |name, shape: [usize; 2], rows, cols| {
                    self.checkpoint.transposed_of(name, (expert, count), shape, RowOrder::AsStored, (rows, cols))
                };
                let gate = part(gate, [2 * inner, hidden], rows(0), 0..hidden)?;
                let up = part(up, [2 * inner, hidden], rows(inner), 0..hidden)?;
                (vec![gate, up], part(down, [hidden, inner], 0..hidden, taken.clone())?)
            }
            ExpertLayout::Alternating(_) => {
                let matrix = (expert, count);
                let part = |name, rows| {
                    self.alternating(name, matrix, [2 * inner, hidden], RowOrder::EvenFirst, (rows, 0..hidden))
                };
                let own = (0..hidden, taken.clone());
                let down = self.alternating(down, matrix, [hidden, inner], RowOrder::AsStored, own)?;
                (vec![part(gate, rows(0))?, part(up, rows(inner))?], down)
            }
            ExpertLayout::Each { .. } | ExpertLayout::EachPlain { .. } => {
                let part = |name| self.matrix(name, [inner, hidden], rows(0), 0..hidden);
                let gate = names.layout.is_gated().then(|| part(gate)).transpose()?;
                (
                    gate.into_iter().chain([part(up)?]).collect(),
                    self.matrix(down, [hidden, inner], 0..hidden, taken.clone())?,
                )
            }
            ExpertLayout::Either { .. } => unreachable!("the layout is chosen before"),
            ExpertLayout::Stacked(_) => {
                let shape = [count, 2 * inner, hidden];
                let part = |first| self.checkpoint.stack(gate, shape, rows(first), 0..hidden);
                let own = expert * hidden..(expert + 1) * hidden;
                let down = self.checkpoint.stack(down, [count, hidden, inner], own, taken.clone())?;
                (vec![part(expert * 2 * inner)?, part(expert * 2 * inner + inner)?], down)
            }
        };
        let gate_up: Vec<_> = gate_up.into_iter().map(|part| self.at_load(part)).collect();
        let down_slice = self.at_load(down_slice);
        let mut slice = ExpertSlice { gate_up, down: down_slice, gate_up_bias: Vec::new(), down_bias: None };
        if names.has_biases {
            let values = |name: &str, width: usize| {
                let range = expert * width..(expert + 1) * width;
                self.checkpoint.values(&format!("{name}_bias"), &[count, width], range)
            };
            let both = values(gate, 2 * inner)?;
            let half = |first| both.iter().skip(first).step_by(2).copied();
            let part = |first| vector(gate, half(first).skip(taken.start).take(taken.len()));
            slice.gate_up_bias = vec![part(0), part(1)];
            // The outputs of workers that share an expert are added.
            if taken.start == 0 {
                slice.down_bias = Some(vector(down, values(down, hidden)?.into_iter()));
            }
        }
        Ok(slice)
    }

    /// The given rows and columns of a matrix that is stored in MXFP4 or transposed.
    fn alternating<'n>(
        &self,
        name: &'n str,
        matrix: (usize, usize),
        shape: [usize; 2],
        order: RowOrder,
        part: (Range<usize>, Range<usize>),
    ) -> Result<WeightSlice<'n>, ModelError> {
        match self.checkpoint.mxfp4_of(name, matrix, shape, order, part.clone())? {
            Some(slice) => Ok(slice),
            None => self.checkpoint.transposed_of(name, matrix, shape, order, part),
        }
    }
}

/// A vector in f32.
fn vector<'n>(name: &'n str, values: impl Iterator<Item = f32>) -> WeightSlice<'n> {
    let data: Vec<u8> = values.flat_map(f32::to_le_bytes).collect();
    let len = data.len() / size_of::<f32>();
    let data = WeightData::Stored(data.into());
    WeightSlice { name, data, dtype: DType::F32, matrix_cols: len, rows: 0..1, cols: 0..len, head_order: None }
}
