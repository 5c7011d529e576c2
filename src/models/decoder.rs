//! Decoders: a stack of layers, each built from its specification.

use std::path::Path;

use ops::{AdapterSlots, AttentionSpec, Device, DeviceError, DrafterKind, LayerAttention, LogitSpec, PipelineStage};

use crate::adapter::targets::{Module, Target, targets};
use crate::buffers::Buffers;
use crate::draft_model::DraftDecoder;
use crate::drafter::{Drafter, Target as DraftTarget};
use crate::eagle3::Eagle3;
use crate::layer::Layer;
use crate::layer_spec::{KvSource, LayerSpec};
use crate::layers::{Loader, shape_of};
use crate::mixer::{Counts, Mixer};
use crate::model::Model;
use crate::mtp::Mtp;
use crate::per_layer::PerLayerInputs;
use crate::shard::Shard;
use crate::{AdapterLayers, Checkpoint, Config, ModelError, alibi};

/// A decoder on device `D`, or one pipeline stage of it.
pub(crate) struct Decoder<D: Device> {
    config: Config,
    shard: Shard,
    stage: PipelineStage,
    /// Set in the first stage, and in the last stage if the head is tied to the embedding.
    embedding: Option<D::Weight>,
    embedding_norm: Option<D::Weight>,
    positions: Option<D::Weight>,
    /// Set if the layers have embeddings of their own.
    per_layer: Option<PerLayerInputs<D>>,
    layers: Vec<Layer<D>>,
    /// Set in the last stage.
    final_layers: Option<FinalLayers<D>>,
    /// Set if it guesses drafts.
    drafter: Option<Drafter<D>>,
    buffers: Buffers<D>,
    unused_tensors: Vec<String>,
}

/// The layers after the last decoder layer: final norm and output head.
struct FinalLayers<D: Device> {
    norm: D::Weight,
    head: D::Weight,
}

impl<D: Device> Decoder<D> {
    pub(crate) fn load(
        dir: &Path,
        checkpoint: &Checkpoint,
        config: &Config,
        shard: Shard,
        device: &mut D,
    ) -> Result<Self, ModelError> {
        Self::load_behind(dir, checkpoint, config, shard, &mut Counts::default(), device)
    }

    /// The same for a model whose layers come behind others on the device. `counts` has these, and then all.
    pub(crate) fn load_behind(
        dir: &Path,
        checkpoint: &Checkpoint,
        config: &Config,
        shard: Shard,
        counts: &mut Counts,
        device: &mut D,
    ) -> Result<Self, ModelError> {
        let mut loader = Loader::new(dir, checkpoint, config, &shard, device);
        let stage = loader.device.pipeline_stage();
        refuse_split(dir, config, stage)?;
        let has_tied_head = stage.is_last() && loader.has_tied_head();
        let needs_embedding = stage.is_first() || has_tied_head;
        let embedding = if needs_embedding { Some(loader.embedding()?) } else { None };
        let embedding_norm = if stage.is_first() { loader.embedding_norm()? } else { None };
        let positions = match config.learned_positions {
            Some(num_positions) if stage.is_first() => Some(loader.positions(num_positions)?),
            _ => None,
        };
        let per_layer = match config.per_layer_input {
            Some(input) => Some(PerLayerInputs::load(&mut loader, input)?),
            None => None,
        };
        let mut widths = Vec::new();
        let own = stage.layers(config.num_layers());
        let layers =
            own.map(|index| Layer::load(&mut loader, index, &mut widths, counts)).collect::<Result<Vec<_>, _>>()?;
        let mut final_layers = if stage.is_last() {
            Some(FinalLayers::load(&mut loader, embedding.as_ref().filter(|_| has_tied_head))?)
        } else {
            None
        };
        match &config.draft {
            Some(draft) if draft.eagle3.is_none() => {
                let vocab_size = config.vocab_size.min(draft.config.vocab_size);
                loader.device.begin_drafter(DrafterKind::Model, vocab_size);
            }
            draft if draft.is_some() || config.has_mtp_layer => {
                loader.device.begin_drafter(DrafterKind::Head, config.vocab_size);
            }
            _ => {}
        }
        let drafter = match (&config.mtp, &config.draft) {
            (Some(head), _) if config.has_mtp_layer => {
                if let Some(last) = &mut final_layers {
                    loader.copy_head(&mut last.head, has_tied_head)?;
                }
                Some(Drafter::Mtp(Mtp::load(&mut loader, head.form, &mut widths, counts)?))
            }
            (_, Some(draft)) => Some(match &draft.eagle3 {
                Some(form) => {
                    Drafter::Eagle3(Box::new(Eagle3::load(draft, form, config.hidden_size, counts, loader.device)?))
                }
                None => Drafter::Model(DraftDecoder::load(draft, config.vocab_size, counts, loader.device)?),
            }),
            _ => None,
        };
        let has_second = layers.iter().chain(drafter.as_ref().and_then(Drafter::own_layer)).any(Layer::has_two_parts);
        let buffers = Buffers::allocate(config.hidden_size, has_second, &widths, loader.device);
        let buffers = loader.or_device_error(buffers)?;
        let unused_tensors = if stage == PipelineStage::WHOLE { checkpoint.unused() } else { Vec::new() };
        let config = config.clone();
        Ok(Self {
            config,
            shard,
            stage,
            embedding,
            embedding_norm,
            positions,
            per_layer,
            layers,
            final_layers,
            drafter,
            buffers,
            unused_tensors,
        })
    }
}

/// Refuses a pipeline that would divide what its stages need in one place.
fn refuse_split(dir: &Path, config: &Config, stage: PipelineStage) -> Result<(), ModelError> {
    let own = stage.layers(config.num_layers());
    let reads_outside = |layer: &LayerSpec| matches!(layer.attention.kv, KvSource::Layer(source) if source < own.start);
    let what = match () {
        () if stage == PipelineStage::WHOLE => return Ok(()),
        () if config.has_mtp_layer => "an MTP head that guesses drafts",
        () if config.draft.is_some() => "a draft model or an EAGLE-3 head",
        () if config.per_layer_input.is_some() => "an embedding for each layer",
        () if config.layers[own.clone()].iter().all(|layer| layer.recurrent.is_some()) => {
            "a stage whose layers all have recurrent states"
        }
        () if config.layers[own.clone()].iter().any(reads_outside) => "layers that share keys and values across stages",
        () => return Ok(()),
    };
    Err(ModelError::Pipeline { dir: dir.into(), architecture: config.architecture.clone(), what })
}

impl<D: Device> FinalLayers<D> {
    fn load(loader: &mut Loader<'_, D>, tied_head: Option<&D::Weight>) -> Result<Self, ModelError> {
        Ok(Self { norm: loader.final_norm()?, head: loader.head(tied_head)? })
    }
}

impl<D: Device> Decoder<D> {
    /// Computes the input of the first layer: embeds the step's tokens, or receives the hidden state from the previous
    /// stage, and normalizes it.
    fn begin(&mut self, device: &mut D) -> Result<(), DeviceError> {
        let b = &mut self.buffers;
        match &self.embedding {
            Some(embedding) if self.stage.is_first() => {
                let to = if self.embedding_norm.is_some() { &mut b.normed } else { &mut b.residual };
                device.embed(to, embedding, self.config.embedding_scale)?;
                if let Some(norm) = &self.embedding_norm {
                    device.norm(&mut b.residual, &b.normed, norm, self.config.norm.eps)?;
                }
            }
            _ => device.recv_hidden(&mut b.residual)?,
        }
        if let Some(positions) = &self.positions {
            device.add_positions(&mut b.residual, positions)?;
        }
        if let Some(per_layer) = &mut self.per_layer {
            per_layer.begin(device, &b.residual)?;
        }
        let final_norm = self.final_layers.as_ref().map(|layers| &layers.norm);
        let first_norm = self.layers.first().map_or(final_norm, |layer| layer.attention_norm.as_ref());
        match first_norm {
            Some(norm) => device.norm(&mut b.normed, &b.residual, norm, self.config.norm.eps),
            None => Ok(()),
        }
    }

    /// Runs layer `index` of this stage.
    fn run_layer(&mut self, device: &mut D, index: usize) -> Result<(), DeviceError> {
        let layer = &self.layers[index];
        let next_layer = self.layers.get(index + 1);
        let is_read = layer.mlp_branch_norm.is_none() && next_layer.is_some_and(|next| next.attention_norm.is_none());
        // Where the sum itself is read, by the next layer or stage, any norm may be computed beside it.
        let any = layer.attention_norm.as_ref().or(layer.mlp_norm.as_ref());
        let next = match (next_layer, &self.final_layers) {
            (Some(_), _) if is_read => any,
            (Some(next), _) => next.attention_norm.as_ref(),
            (None, Some(layers)) => Some(&layers.norm),
            (None, None) => any,
        };
        let per_layer = self.per_layer.as_mut().map(|inputs| (inputs, index));
        layer.run(device, &mut self.buffers, next, per_layer, self.config.norm.eps)?;
        if is_read { device.make_whole(&mut self.buffers.residual) } else { Ok(()) }
    }

    /// Runs all layers of this stage.
    pub(crate) fn run_layers(&mut self, device: &mut D) -> Result<(), DeviceError> {
        self.begin(device)?;
        for index in 0..self.layers.len() {
            if let Some(Drafter::Eagle3(head)) = self.drafter.as_mut().filter(|_| device.runs_drafter()) {
                head.take(device, index, &mut self.buffers.residual)?;
            }
            self.run_layer(device, index)?;
        }
        Ok(())
    }

    /// The input of the output head, and the head; `None` before the last stage.
    pub(crate) fn output(&self) -> Option<(&D::Tensor, &D::Weight)> {
        self.final_layers.as_ref().map(|layers| (&self.buffers.normed, &layers.head))
    }

    pub(crate) fn config(&self) -> &Config {
        &self.config
    }

    /// Adds the layers of this stage and that of its MTP head to those that the device has. `groups` are the KV groups of the model's
    /// layers, `num_buffers` the layers of each group so far.
    pub(crate) fn add_layers(&self, groups: &[usize], num_buffers: &mut [usize], spec: &mut AttentionSpec) {
        let own = self.stage.layers(self.config.num_layers());
        let head = self.drafter.as_ref().and_then(Drafter::own_layer).map(|_| self.config.num_layers());
        let (first_layer, first_rope) = (spec.layers.len(), spec.ropes.len());
        for index in own.clone().chain(head) {
            if let Some(recurrent) = self.config.layers[index].recurrent {
                spec.states.push(shape_of(recurrent.shape, &self.shard.layers[index]));
                continue;
            }
            if let Some(beside) = self.config.layers[index].beside {
                spec.states.push(shape_of(beside.recurrent.shape, &self.shard.layers[index].of_beside()));
            }
            let kv_group = groups[index];
            let kv_buffer = match self.config.layers[index].attention.kv {
                KvSource::Layer(source) => spec.layers[first_layer + source - own.start].kv_buffer,
                KvSource::Projections | KvSource::KeyProjection => {
                    num_buffers[kv_group] += 1;
                    num_buffers[kv_group] - 1
                }
            };
            let layer = layer_attention(&self.config, &self.shard, index, &self.layer(index).mixer);
            let rope = layer.rope.map(|rope| first_rope + rope);
            spec.layers.push(LayerAttention { kv_group, kv_buffer, rope, ..layer });
        }
        spec.ropes.extend(self.config.ropes.iter().map(|rope| rope.table(spec.max_positions)));
    }

    /// The weights of this stage in which adapters may add products, with the index of their layer.
    fn targets(&self) -> Vec<(&D::Weight, usize, Target)> {
        let mut found = Vec::new();
        for (layer, index) in self.layers.iter().zip(self.stage.layers(self.config.num_layers())) {
            for target in targets(&self.config, index, &self.shard.layers[index]) {
                found.extend(layer.target_weight(target.weight).map(|weight| (weight, index, target)));
            }
        }
        found
    }

    /// The slots beside these weights.
    fn adapter_slots(&self, count: usize, max_rank: usize) -> Vec<(&D::Weight, AdapterSlots)> {
        let slots = |(weight, _, target): (_, usize, Target)| {
            let rows = |module: &Module| module.slices.iter().map(|slice| slice.taken.len()).sum();
            let modules = target.modules.iter().map(rows).collect();
            (weight, AdapterSlots { count, max_rank, cols: target.taken.len(), modules })
        };
        self.targets().into_iter().map(slots).collect()
    }

    /// Layer `index` of the model, which this stage has, or that of the MTP head.
    fn layer(&self, index: usize) -> &Layer<D> {
        let first = self.stage.layers(self.config.num_layers()).start;
        let head = self.drafter.as_ref().and_then(Drafter::own_layer);
        self.layers.get(index - first).or(head).expect("the layer is one of this stage")
    }
}

/// Attention of layer `index` of a model, for this worker's heads.
pub(crate) fn layer_attention<D: Device>(
    config: &Config,
    shard: &Shard,
    index: usize,
    mixer: &Mixer<D>,
) -> LayerAttention {
    let (attention, shard) = (&config.layers[index].attention, &shard.layers[index]);
    LayerAttention {
        num_heads: shard.heads.len(),
        num_kv_heads: shard.kv_heads.len(),
        head_dim: attention.head_dim,
        latent: attention.latent.map(|latent| latent.shape),
        scale: attention.scale,
        rope: attention.rope,
        window: attention.window,
        chunk: attention.chunk,
        score_cap: attention.score_cap,
        sinks: mixer.sinks().to_vec(),
        query_gains: mixer.query_gains().to_vec(),
        kv_group: 0,
        kv_buffer: index,
        query_scale: attention.query_scale,
        has_shared_kv: matches!(attention.kv, KvSource::Layer(_)),
        alibi_slopes: match attention.has_alibi {
            true => alibi::slopes(attention.num_heads)[shard.heads.clone()].to_vec(),
            false => Vec::new(),
        },
    }
}

impl<D: Device> Model<D> for Decoder<D> {
    fn attention_spec(&self, block_size: usize, max_sequence_len: usize) -> AttentionSpec {
        let groups = self.config.kv_groups(max_sequence_len);
        let mut num_buffers = vec![0; groups.windows.len()];
        let mut spec = AttentionSpec {
            block_size,
            max_positions: self.config.max_position_embeddings,
            ropes: Vec::new(),
            layers: Vec::new(),
            kv_windows: groups.windows,
            kv_elements: self.config.kv_elements,
            states: Vec::new(),
        };
        let (own, of_draft) = groups.of_layers.split_at(self.config.layers.len());
        self.add_layers(own, &mut num_buffers, &mut spec);
        match &self.drafter {
            Some(Drafter::Model(draft)) => draft.add_layers(of_draft, &mut num_buffers, &mut spec),
            Some(Drafter::Eagle3(head)) => head.add_layer(of_draft[0], &mut num_buffers, &mut spec),
            Some(Drafter::Mtp(_)) | None => {}
        }
        spec
    }

    fn adapter_layers(&self) -> AdapterLayers {
        AdapterLayers(self.targets().into_iter().map(|(_, index, target)| (index, target)).collect())
    }

    fn set_products(&self, device: &mut D, slot: u32, products: Vec<Vec<D::Product>>) -> Result<(), DeviceError> {
        let mut all = self.targets().into_iter().zip(products);
        all.try_for_each(|((weight, ..), products)| device.set_adapter(weight, slot, products))
    }

    fn adapter_bytes(&self, device: &D, num_slots: usize, max_rank: usize) -> u64 {
        let layers = self.adapter_slots(num_slots, max_rank).into_iter().map(|(_, slots)| slots);
        device.adapter_bytes(&layers.collect::<Vec<_>>())
    }

    fn allocate_adapters(&self, device: &mut D, num_slots: usize, max_rank: usize) -> Result<(), DeviceError> {
        device.allocate_adapters(&self.adapter_slots(num_slots, max_rank))
    }

    fn unused_tensors(&self) -> &[String] {
        &self.unused_tensors
    }

    fn forward(&mut self, device: &mut D) -> Result<(), DeviceError> {
        self.run_layers(device)?;
        match self.output() {
            Some((x, head)) => device.sample(x, head, LogitSpec { cap: self.config.head.cap }),
            None => device.send_hidden(&self.buffers.residual),
        }
    }

    fn guess(&mut self, device: &mut D) -> Result<(), DeviceError> {
        match (&mut self.drafter, &self.embedding, &self.final_layers) {
            (Some(drafter), Some(embedding), Some(layers)) if device.runs_drafter() => {
                let (b, FinalLayers { norm, head }, config) = (&mut self.buffers, layers, &self.config);
                drafter.guess(device, &mut DraftTarget { b, embedding, head, norm, config })
            }
            _ => Ok(()),
        }
    }
}
