//! A head that predicts the token behind the next one (multi-token prediction, MTP). Its guesses become drafts.
//!
//! At position `p` the head takes the hidden state behind the model's last norm, and the embedding of the token at `p + 1`.
//! Both are normed and multiplied by the halves of one matrix; the sum passes one decoder layer at position `p`, and a norm. By
//! the model's output head it then gives the token at `p + 2`.
//!
//! So the head's keys and values at `p` exist when the token at `p + 1` does, and that is known at the end of each step: within
//! a chunk of a prompt and behind accepted drafts it is the next token of the step, behind a chunk that is not the prompt's last
//! it is the prompt's next token, and elsewhere it is the one that the step has chosen. All positions of the step pass the head
//! once, right after the tokens are chosen, if the head runs behind the step ([`ops::StepInputs::runs_drafter`]). Otherwise it reads
//! what their slots held before, as soon as it runs again. Its other keys and values do not depend on those. Keys and values behind a rejected draft are wrong, as those of the model's own
//! layers are, and the next step writes them again.
//!
//! One guess follows from the position before the newest token. For a further one the head runs on a position further: the
//! guess stands for the token, and the head's own output for the hidden state. The keys and values that it writes there are
//! replaced when the model reaches that position. They need a KV block, so guesses end where the row's blocks do.
//!
//! A block of the prefix cache ends at a position whose keys and values in the head belong to the token behind it. A sequence
//! that shares the block and goes on with another token reads a slightly wrong position, as does one that shares a block which the head
//! did not compute. That changes guesses, and no token.

use ops::{Device, DeviceError, LogitSpec};

use crate::buffers::Widths;
use crate::config::MtpForm;
use crate::drafter::Target;
use crate::layer::Layer;
use crate::layers::Loader;
use crate::mixer::Counts;
use crate::{Config, ModelError};

impl Config {
    /// The same model with its MTP head.
    ///
    /// # Errors
    /// Returns an error if the architecture has none.
    pub(crate) fn with_mtp(mut self) -> Result<Self, ModelError> {
        let Some(head) = self.mtp.as_ref().filter(|_| !self.has_mtp_layer) else {
            return Err(ModelError::NoMtp { architecture: self.architecture });
        };
        self.layers.push(head.layer.clone());
        self.has_mtp_layer = true;
        Ok(self)
    }
}

/// The weights and buffers of a head.
pub(crate) struct Mtp<D: Device> {
    form: MtpForm,
    embedding_norm: D::Weight,
    hidden_norm: D::Weight,
    from_embedding: D::Weight, // [E, E]
    from_hidden: D::Weight,    // [E, E]
    pub(crate) layer: Layer<D>,
    norm: D::Weight,
    pub(crate) hidden: D::Tensor, // [T, E], behind its norm; from which a guess continues
    product: D::Tensor,           // [T, E]
}

impl<D: Device> Mtp<D> {
    pub(crate) fn load(
        loader: &mut Loader<'_, D>,
        form: MtpForm,
        widths: &mut Vec<Widths>,
        counts: &mut Counts,
    ) -> Result<Self, ModelError> {
        let index = loader.config.num_layers();
        let [embedding_norm, hidden_norm, input, norm] = match form {
            MtpForm::Qwen => {
                ["pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"].map(|name| format!("mtp.{name}"))
            }
            MtpForm::DeepSeek => {
                ["enorm", "hnorm", "eh_proj", "shared_head.norm"].map(|name| loader.layer_name(index, name))
            }
        };
        let hidden = loader.config.hidden_size;
        let [first, second] = [0..hidden, hidden..2 * hidden];
        let layer = Layer::load(loader, index, widths, counts)?;
        let tensors = loader.device.tensor(hidden).and_then(|one| Ok([one, loader.device.tensor(hidden)?]));
        let [own_hidden, product] = loader.or_device_error(tensors)?;
        Ok(Self {
            form,
            embedding_norm: loader.norm(&embedding_norm, 1.0)?,
            hidden_norm: loader.norm(&hidden_norm, 1.0)?,
            from_embedding: loader.joining(&input, first, 2 * hidden)?,
            from_hidden: loader.joining(&input, second, 2 * hidden)?,
            layer,
            norm: loader.norm(&norm, loader.config.head.scale)?,
            hidden: own_hidden,
            product,
        })
    }

    /// Makes the step's tokens those that follow them, and takes the hidden states that the model has behind its last norm.
    pub(crate) fn begin(&mut self, device: &mut D, target: &mut Target<'_, D>) -> Result<(), DeviceError> {
        let eps = target.config.norm.eps;
        device.follow()?;
        device.make_whole(&mut target.b.residual)?;
        device.norm(&mut self.product, &target.b.residual, target.norm, eps)?;
        device.norm(&mut self.hidden, &self.product, &self.hidden_norm, eps)
    }

    /// Guesses a token for each row of the step that needs one.
    pub(crate) fn guess(&mut self, device: &mut D, target: &mut Target<'_, D>) -> Result<(), DeviceError> {
        let Target { b, embedding, head, config, .. } = target;
        let eps = config.norm.eps;
        device.embed(&mut b.residual, embedding, config.embedding_scale)?;
        device.norm(&mut self.product, &b.residual, &self.embedding_norm, eps)?;
        device.linear(&mut b.residual, &self.product, &self.from_embedding)?;
        device.linear(&mut self.product, &self.hidden, &self.from_hidden)?;
        device.add(&mut b.residual, &self.product)?;
        if let Some(norm) = &self.layer.attention_norm {
            device.norm(&mut b.normed, &b.residual, norm, eps)?;
        }
        self.layer.run(device, b, Some(&self.norm), None, eps)?;
        device.make_whole(&mut b.residual)?;
        device.norm(&mut self.product, &b.residual, &self.norm, eps)?;
        device.guess(&self.product, head, LogitSpec { cap: config.head.cap })?;
        let hidden = match self.form {
            MtpForm::Qwen => &self.product,
            MtpForm::DeepSeek => &b.residual,
        };
        device.norm(&mut self.hidden, hidden, &self.hidden_norm, eps)
    }
}
