//! The interface of a loaded model.

use ops::{AttentionSpec, Device, DeviceError};

use crate::{Adapter, AdapterLayers};

/// A loaded model: this worker's shard of the weights, and the activation buffers of a step.
pub trait Model<D: Device> {
    /// Attention of every layer of this worker's shard, for [`Device::memory_plan`] and [`Device::allocate_cache`].
    /// `max_sequence_len` is that of [`ops::StepLimits`].
    fn attention_spec(&self, block_size: usize, max_sequence_len: usize) -> AttentionSpec;

    /// The names of tensors in the checkpoint that no layer of the whole model takes; empty for a stage of a pipeline. A worker with
    /// experts of its own counts those of the others.
    /// There may be parts that are not served, or weights that `config.json` does not describe.
    fn unused_tensors(&self) -> &[String];

    /// The weights of this worker in which adapters may add products.
    fn adapter_layers(&self) -> AdapterLayers;

    /// Fills a slot of the device with an adapter's products ([`Adapter::products`]), in place of the one that it held.
    ///
    /// # Errors
    /// Returns the error of the device.
    fn set_products(&self, device: &mut D, slot: u32, products: Vec<Vec<D::Product>>) -> Result<(), DeviceError>;

    /// Makes the products of an adapter, and fills a slot with them.
    ///
    /// # Errors
    /// Returns the error of the device.
    fn set_adapter(&self, device: &mut D, slot: u32, adapter: &Adapter) -> Result<(), DeviceError> {
        self.set_products(device, slot, adapter.products::<D>(&self.adapter_layers()))
    }

    /// Bytes that the device needs for `num_slots` adapters of ranks up to `max_rank` in every layer of this worker that may have one.
    fn adapter_bytes(&self, device: &D, num_slots: usize, max_rank: usize) -> u64;

    /// Allocates these slots, which are empty.
    ///
    /// # Errors
    /// Returns the error of the device.
    fn allocate_adapters(&self, device: &mut D, num_slots: usize, max_rank: usize) -> Result<(), DeviceError>;

    /// Runs the forward pass of the device's current step, up to and including [`Device::sample`].
    ///
    /// # Errors
    /// Returns the error of the device.
    fn forward(&mut self, device: &mut D) -> Result<(), DeviceError>;

    /// Guesses the tokens behind those that the step has chosen, up to [`Device::take_guesses`]. Called once for each step,
    /// before the next one runs. Nothing happens in a model without a head for it, and where [`Device::runs_drafter`] is false.
    ///
    /// # Errors
    /// Returns the error of the device.
    fn guess(&mut self, _device: &mut D) -> Result<(), DeviceError> {
        Ok(())
    }
}
