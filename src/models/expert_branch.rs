//! Experts beside a feed-forward that have inputs and norms of their own: the hidden state grows by
//! `norm(norm1(mlp(x)) + norm2(experts(norm3(h))))`, and tokens choose experts by a fourth norm of `h`.

use ops::{Device, DeviceError};

use crate::ModelError;
use crate::buffers::Buffers;
use crate::layers::{LayerSource, Loader};

/// The norms around the experts of a layer.
pub(crate) struct ExpertBranch<D: Device> {
    input_norm: D::Weight,
    router_norm: D::Weight,
    mlp_norm: D::Weight,
    experts_norm: D::Weight,
}

impl<D: Device> ExpertBranch<D> {
    /// The norms of a layer, if it has experts and the architecture has such norms.
    pub(crate) fn load(loader: &mut Loader<'_, D>, layer: LayerSource<'_>) -> Result<Option<Self>, ModelError> {
        let names = loader.names.experts.and_then(|experts| experts.apart).filter(|_| layer.spec.experts.is_some());
        let Some(names) = names else { return Ok(None) };
        let width = loader.config.hidden_size;
        let mut norm = |name: &str, factor: f32| {
            let name = loader.layer_name(layer.number, name);
            loader.norm_of_width(&name, width, factor)
        };
        let [mlp, experts] = names.branch_norms.map(|name| format!("{name}.weight"));
        Ok(Some(Self {
            input_norm: norm(&format!("{}.weight", names.input_norm), 1.0)?,
            router_norm: norm(names.router_gain, (width as f32).powf(-0.5))?,
            mlp_norm: norm(&mlp, 1.0)?,
            experts_norm: norm(&experts, 1.0)?,
        }))
    }

    /// Adds to the hidden state the norm `outer` of both outputs. `b.partial` is that of the feed-forward. All other
    /// buffers are overwritten.
    pub(crate) fn add(
        &self,
        device: &mut D,
        experts: &D::Weight,
        outer: &D::Weight,
        b: &mut Buffers<D>,
        eps: f32,
    ) -> Result<(), DeviceError> {
        let second = b.second.as_mut().expect("a layer of two parts has two sets of buffers");
        device.reduce_norm(&mut b.normed, &b.partial, &self.mlp_norm, eps)?;
        device.norm(&mut b.partial, &b.residual, &self.router_norm, eps)?;
        device.norm(&mut second.normed, &b.residual, &self.input_norm, eps)?;
        device.experts_of(&mut second.partial, &second.normed, &b.partial, experts)?;
        device.reduce_norm(&mut second.normed, &second.partial, &self.experts_norm, eps)?;
        device.add(&mut b.normed, &second.normed)?;
        device.norm(&mut b.partial, &b.normed, outer, eps)?;
        device.add(&mut b.residual, &b.partial)
    }
}
