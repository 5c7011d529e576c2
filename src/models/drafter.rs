//! What guesses drafts at the end of a step, on the device.

use ops::{Device, DeviceError};
use settings::{DeviceDrafter, WeightPrecision};

use crate::buffers::Buffers;
use crate::draft_model::DraftDecoder;
use crate::eagle3::Eagle3;
use crate::layer::Layer;
use crate::mtp::Mtp;
use crate::{Config, ModelError};

impl Config {
    /// The same model with what guesses its drafts. A draft model gets `precision`, too, unless its weights are quantized already.
    ///
    /// # Errors
    /// Returns an error if the architecture has no head for it, or if the other model cannot guess for this one.
    pub fn with_drafter(
        self,
        drafter: &DeviceDrafter,
        precision: WeightPrecision,
        target: ops::Target,
    ) -> Result<Self, ModelError> {
        match drafter {
            DeviceDrafter::Mtp => self.with_mtp(),
            DeviceDrafter::Model(dir) => self.with_draft_model(dir, precision, target),
            DeviceDrafter::Eagle3(dir) => self.with_eagle3(dir, precision, target),
        }
    }
}

/// What guesses drafts, with its weights and buffers.
pub(crate) enum Drafter<D: Device> {
    /// A head of the model, which continues from the model's hidden states.
    Mtp(Mtp<D>),
    /// Another model.
    Model(DraftDecoder<D>),
    /// A head with a checkpoint of its own, which continues from hidden states of three layers.
    Eagle3(Box<Eagle3<D>>),
}

/// What the model lends its drafter. `b` has the hidden state before the model's last norm.
pub(crate) struct Target<'a, D: Device> {
    pub(crate) b: &'a mut Buffers<D>,
    pub(crate) embedding: &'a D::Weight,
    pub(crate) head: &'a D::Weight,
    /// The norm before the head.
    pub(crate) norm: &'a D::Weight,
    pub(crate) config: &'a Config,
}

impl<D: Device> Drafter<D> {
    /// Guesses the tokens behind those that the step has chosen. The first pass has all positions of the step, each further one a
    /// position of the rows that need another guess.
    pub(crate) fn guess(&mut self, device: &mut D, target: &mut Target<'_, D>) -> Result<(), DeviceError> {
        let mut is_first = true;
        loop {
            device.run_guess(&mut |device| self.run_pass(device, target, is_first))?;
            let hidden = match self {
                Drafter::Mtp(mtp) => Some(&mut mtp.hidden),
                Drafter::Eagle3(head) => Some(&mut head.hidden),
                Drafter::Model(_) => None,
            };
            if !device.next_guess(hidden)? {
                return Ok(());
            }
            is_first = false;
        }
    }

    fn run_pass(&mut self, device: &mut D, target: &mut Target<'_, D>, is_first: bool) -> Result<(), DeviceError> {
        match self {
            Drafter::Mtp(mtp) if is_first => mtp.begin(device, target)?,
            Drafter::Model(_) if is_first => device.extend()?,
            Drafter::Eagle3(_) if is_first => device.follow()?,
            _ => {}
        }
        match self {
            Drafter::Mtp(mtp) => mtp.guess(device, target),
            Drafter::Eagle3(head) => head.guess(device, target.embedding),
            Drafter::Model(model) => model.guess(device),
        }
    }

    /// The layer that counts as one of the model's.
    pub(crate) fn own_layer(&self) -> Option<&Layer<D>> {
        match self {
            Drafter::Mtp(mtp) => Some(&mtp.layer),
            Drafter::Model(_) | Drafter::Eagle3(_) => None,
        }
    }
}
