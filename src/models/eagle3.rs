//! EAGLE-3 heads (Li et al. 2025): a layer that guesses drafts from hidden states of some layers of the model.
//!
//! At position `p` the head takes the hidden states that some layers of the model, mostly three, have as inputs there, multiplied by
//! one matrix and so joined to one state `h`, and the embedding of the token at `p + 1`. The norms of both, side by side, are the input
//! of attention of one layer of Llama's form; its parts are added to `h`. By an output head of its own, often for a part of the
//! vocabulary alone, it gives the token at `p + 2`. For a further guess the head runs on a position further: the guess stands for the
//! token, and the head's own output before its last norm for `h`.
//!
//! In EAGLE-3.1 the hidden states have norms before they are joined, each its own or one for all, and the head's output behind its last
//! norm stands for `h`.
//!
//! So keys and values of the head are those of an MTP head in all that concerns steps, blocks and rejected drafts
//! ([`crate::mtp`]). The joined state is computed layer by layer while the model runs.

use std::path::Path;

use ops::{AttentionSpec, Device, DeviceError, LayerAttention, LogitSpec, Target};
use settings::WeightPrecision;

use crate::buffers::Buffers;
use crate::config::{DraftConfig, Eagle3Form, JoinedNorm};
use crate::decoder::layer_attention;
use crate::layer::Layer;
use crate::layers::Loader;
use crate::mixer::Counts;
use crate::shard::Shard;
use crate::{Checkpoint, Config, ModelError, families};

/// The names that the layer of a head may have.
const LAYERS: [&str; 4] = ["midlayer", "layers.0", "model.midlayer", "model.layers.0"];

/// Numbers that a norm of a GPU can have.
const MAX_NORM_WIDTH: usize = 32_768;

impl Config {
    pub(crate) fn with_eagle3(
        mut self,
        dir: &Path,
        precision: WeightPrecision,
        target: Target,
    ) -> Result<Self, ModelError> {
        let of_head = |source| ModelError::OfEagle3 { source: Box::new(source) };
        let refused = |reason: String| ModelError::Eagle3 { dir: dir.to_owned(), reason };
        let (config, form, target_hidden_size) = families::read_eagle3(dir, self.num_layers()).map_err(of_head)?;
        let pairs = [
            ("a vocabulary of", "tokens", config.vocab_size, self.vocab_size),
            ("inputs of", "numbers", target_hidden_size.unwrap_or(self.hidden_size), self.hidden_size),
        ];
        if let Some((what, unit, found, expected)) = pairs.into_iter().find(|(.., found, expected)| found != expected) {
            return Err(refused(format!(
                "has {what} {found} {unit}, and the model {expected}; it was made for another one"
            )));
        }
        if let Some(tap) = form.taps.iter().find(|&&tap| tap >= self.num_layers()) {
            let layers = self.num_layers();
            return Err(refused(format!(
                "takes the input of layer {tap}, and the model has {layers}; it was made for another one"
            )));
        }
        let width = form.taps.len() * self.hidden_size;
        if form.joined_norm == JoinedNorm::All && target == Target::Cuda && width > MAX_NORM_WIDTH {
            return Err(refused(format!(
                "has `norm_before_fc` over {width} numbers, and GPUs at most {MAX_NORM_WIDTH}"
            )));
        }
        let precision = if config.stored_quantization.is_some() { WeightPrecision::Checkpoint } else { precision };
        let config = config.in_precision(precision, target).map_err(of_head)?;
        self.notes.push(format!("the EAGLE-3 head in {} guesses drafts", dir.display()));
        Ok(self.with_draft(DraftConfig { dir: dir.to_owned(), config, eagle3: Some(form) }))
    }
}

/// A head with its weights and buffers.
pub(crate) struct Eagle3<D: Device> {
    config: Config,
    shard: Shard,
    form: Eagle3Form,
    joining: Joining<D>,
    embedding: Option<D::Weight>, // the model's if there is none
    hidden_norm: D::Weight,
    layer: Layer<D>,
    norm: D::Weight,
    head: D::Weight,
    pub(crate) hidden: D::Tensor, // [T, E], from which a further guess continues
    both: D::Tensor,              // [T, 2 E], norms of the embedding and of the hidden state
    buffers: Buffers<D>,
}

impl<D: Device> Eagle3<D> {
    /// Loads it behind the layers of a model with hidden states of `target_hidden`, which are those in `counts`.
    pub(crate) fn load(
        draft: &DraftConfig,
        form: &Eagle3Form,
        target_hidden: usize,
        counts: &mut Counts,
        device: &mut D,
    ) -> Result<Self, ModelError> {
        let mut load = |device: &mut D| {
            let shard = Shard::new(&draft.config, device.tensor_parallel())?;
            let checkpoint = Checkpoint::open(&draft.dir)?;
            Self::load_shard(draft, form, target_hidden, shard, &checkpoint, counts, device)
        };
        load(device).map_err(|source| ModelError::OfEagle3 { source: Box::new(source) })
    }

    fn load_shard(
        draft: &DraftConfig,
        form: &Eagle3Form,
        target_hidden: usize,
        shard: Shard,
        checkpoint: &Checkpoint,
        counts: &mut Counts,
        device: &mut D,
    ) -> Result<Self, ModelError> {
        let config = &draft.config;
        let hidden = config.hidden_size;
        let has_layer = |layer: &&str| checkpoint.contains(&format!("{layer}.hidden_norm.weight"));
        let name = LAYERS.into_iter().find(has_layer).unwrap_or(LAYERS[0]);
        let mut loader = Loader::new(&draft.dir, checkpoint, config, &shard, device);
        loader.prefix = if name.starts_with("model.") { "model." } else { "" };
        loader.layer_prefix = Some(name);
        loader.qkv_inputs = 2 * hidden;
        let own_embedding = checkpoint.contains(&format!("{}.weight", loader.model_name("embed_tokens")));
        if !own_embedding && target_hidden != hidden {
            let reason =
                format!("has no embeddings, and its width of {hidden} is not that of the model, {target_hidden}");
            return Err(ModelError::Eagle3 { dir: draft.dir.clone(), reason });
        }
        let joining = Joining::load(&mut loader, form, target_hidden)?;
        let mut widths = Vec::new();
        let layer = Layer::load(&mut loader, 0, &mut widths, counts)?;
        let head = loader.draft_head(form.draft_vocab_size)?;
        let buffers = Buffers::allocate(hidden, layer.has_two_parts(), &widths, loader.device);
        let buffers = loader.or_device_error(buffers)?;
        let tensors = loader.device.tensor(hidden).and_then(|one| Ok((one, loader.device.tensor(2 * hidden)?)));
        let (own_hidden, both) = loader.or_device_error(tensors)?;
        let embedding = if own_embedding { Some(loader.embedding()?) } else { None };
        let hidden_norm = loader.norm(&format!("{name}.hidden_norm"), 1.0)?;
        let norm = loader.norm(&loader.model_name("norm"), 1.0)?;
        loader.refuse_unused(name)?;
        Ok(Self {
            joining,
            embedding,
            hidden_norm,
            layer,
            norm,
            head,
            hidden: own_hidden,
            both,
            buffers,
            config: config.clone(),
            form: form.clone(),
            shard,
        })
    }

    /// Adds what the head takes of the input of layer `index` of the model.
    pub(crate) fn take(&mut self, device: &mut D, index: usize, residual: &mut D::Tensor) -> Result<(), DeviceError> {
        let taps = &self.form.taps;
        if !taps.contains(&index) {
            return Ok(());
        }
        device.make_whole(residual)?;
        let (hidden, scratch, eps) = (&mut self.hidden, &mut self.buffers.residual, self.config.norm.eps);
        match &mut self.joining {
            Joining::Each { weights, normed } => {
                let mut is_first = taps.iter().min() == Some(&index);
                for (number, weight) in weights.iter().enumerate().filter(|&(number, _)| taps[number] == index) {
                    let input = match normed {
                        Some((norms, normed)) => {
                            device.norm(normed, residual, &norms[number], eps)?;
                            normed
                        }
                        None => &*residual,
                    };
                    device.linear(if is_first { &mut *hidden } else { &mut *scratch }, input, weight)?;
                    if !is_first {
                        device.add(hidden, scratch)?;
                    }
                    is_first = false;
                }
            }
            Joining::All { states, normed, norm, width, weight } => {
                for number in (0..taps.len()).filter(|&number| taps[number] == index) {
                    device.put_columns(states, residual, number * *width)?;
                }
                if taps.iter().max() == Some(&index) {
                    device.norm(normed, states, norm, eps)?;
                    device.linear(hidden, normed, weight)?;
                }
            }
        }
        Ok(())
    }

    /// Guesses a token for each row of the step that needs one.
    pub(crate) fn guess(&mut self, device: &mut D, embedding: &D::Weight) -> Result<(), DeviceError> {
        let (b, eps, width) = (&mut self.buffers, self.config.norm.eps, self.config.hidden_size);
        device.embed(&mut b.residual, self.embedding.as_ref().unwrap_or(embedding), 1.0)?;
        let embedding_norm = self.layer.attention_norm.as_ref().expect("a layer of Llama's form begins with a norm");
        device.norm(&mut b.normed, &b.residual, embedding_norm, eps)?;
        device.put_columns(&mut self.both, &b.normed, 0)?;
        device.norm(&mut b.normed, &self.hidden, &self.hidden_norm, eps)?;
        device.put_columns(&mut self.both, &b.normed, width)?;
        let begins = if self.form.norm_before_residual { &b.normed } else { &self.hidden };
        device.put_columns(&mut b.residual, begins, 0)?;
        self.layer.run_beside(device, &self.both, b, &self.norm, eps)?;
        device.make_whole(&mut b.residual)?;
        device.norm(&mut self.hidden, &b.residual, &self.norm, eps)?;
        device.guess(&self.hidden, &self.head, LogitSpec { cap: None })?;
        if self.form.norm_output { Ok(()) } else { device.put_columns(&mut self.hidden, &b.residual, 0) }
    }

    /// Adds its layer to those of the model. `kv_group` is that of the layer.
    pub(crate) fn add_layer(&self, kv_group: usize, num_buffers: &mut [usize], spec: &mut AttentionSpec) {
        let layer = layer_attention(&self.config, &self.shard, 0, &self.layer.mixer);
        let (rope, kv_buffer) = (layer.rope.map(|rope| spec.ropes.len() + rope), num_buffers[kv_group]);
        num_buffers[kv_group] += 1;
        spec.layers.push(LayerAttention { kv_group, kv_buffer, rope, ..layer });
        let max_positions = spec.max_positions;
        spec.ropes.extend(self.config.ropes.iter().map(|rope| rope.table(max_positions)));
    }
}

/// The product with the matrix `fc`, `[E, N Et]`, of the hidden states of `N` layers of the model.
enum Joining<D: Device> {
    /// A part of the matrix for each of them, and a norm of each if there are any.
    Each {
        weights: Vec<D::Weight>,                     // [E, Et]
        normed: Option<(Vec<D::Weight>, D::Tensor)>, // [Et], and [T, Et]
    },
    /// One norm for all of them side by side.
    All {
        states: D::Tensor, // [T, N Et]
        normed: D::Tensor, // [T, N Et]
        norm: D::Weight,   // [N Et]
        width: usize,      // Et
        weight: D::Weight, // [E, N Et]
    },
}

impl<D: Device> Joining<D> {
    /// Loads it for hidden states of `width`.
    fn load(loader: &mut Loader<'_, D>, form: &Eagle3Form, width: usize) -> Result<Self, ModelError> {
        let (count, fc) = (form.taps.len(), loader.model_name("fc"));
        let inputs = count * width;
        if form.joined_norm == JoinedNorm::All {
            let name = format!("{}.weight", loader.model_name("input_norm"));
            let norm = loader.norm_of_width(&name, inputs, 1.0)?;
            let tensors = loader.device.tensor(inputs).and_then(|one| Ok((one, loader.device.tensor(inputs)?)));
            let (states, normed) = loader.or_device_error(tensors)?;
            return Ok(Self::All { states, normed, norm, width, weight: loader.joining(&fc, 0..inputs, inputs)? });
        }
        let part = |index: usize| index * width..(index + 1) * width;
        let weights = (0..count).map(|index| loader.joining(&fc, part(index), inputs)).collect::<Result<_, _>>()?;
        if form.joined_norm == JoinedNorm::None {
            return Ok(Self::Each { weights, normed: None });
        }
        let name = |index: usize| format!("fc_norm.{index}.weight");
        let mut norm = |index| loader.norm_of_width(&loader.model_name(&name(index)), width, 1.0);
        let norms = (0..count).map(&mut norm).collect::<Result<_, _>>()?;
        let tensor = loader.device.tensor(width);
        Ok(Self::Each { weights, normed: Some((norms, loader.or_device_error(tensor)?)) })
    }
}

impl<D: Device> Loader<'_, D> {
    /// Refuses a head with weights beside those of its form, in its layer or before it: they would change what it computes. The first
    /// worker takes all of them.
    fn refuse_unused(&self, layer: &str) -> Result<(), ModelError> {
        if self.device.tensor_parallel().rank > 0 {
            return Ok(());
        }
        let mut parts = vec![format!("{layer}.")];
        parts.extend(["fc.", "fc_norm.", "input_norm."].map(|part| self.model_name(part)));
        let is_part = |name: &String| {
            let is_weight = name.ends_with(".weight") || name.ends_with(".bias");
            is_weight && parts.iter().any(|part| name.starts_with(part.as_str()))
        };
        let Some(name) = self.checkpoint.unused().into_iter().find(is_part) else { return Ok(()) };
        let reason = format!("has a tensor `{name}` that no field of its config.json explains");
        Err(ModelError::Eagle3 { dir: self.dir.into(), reason })
    }

    /// The head of a reduced vocabulary, whole on every worker.
    fn draft_head(&mut self, draft_vocab_size: usize) -> Result<D::Weight, ModelError> {
        let (vocab, width) = (self.config.vocab_size, self.config.hidden_size);
        let token_ids = match self.checkpoint.contains("d2t") {
            true => self.checkpoint.offsets("d2t", draft_vocab_size)?,
            false => vec![0; draft_vocab_size],
        };
        let token_ids: Option<Vec<u32>> = (0..)
            .zip(token_ids)
            .map(|(index, offset): (i64, i64)| {
                let token = index.checked_add(offset)?;
                u32::try_from(token).ok().filter(|&token| (token as usize) < vocab)
            })
            .collect();
        let Some(token_ids) = token_ids else {
            let reason = format!("has a table `d2t` that names tokens outside of the vocabulary of {vocab}");
            return Err(ModelError::Eagle3 { dir: self.dir.into(), reason });
        };
        let slice = self.linear("lm_head.weight", [draft_vocab_size, width], 0..draft_vocab_size, 0..width)?;
        let loaded = self.device.load_draft_head(slice.clone(), token_ids);
        let mut head = self.or_device_error(loaded)?;
        self.copy_rows(&mut head, slice)?;
        Ok(head)
    }
}
