//! Weights of the layers that decoders are composed of. Each worker loads its shard.

mod experts;
mod latent;
mod loader;
mod norms;
mod per_layer;
mod qkv;
mod recurrent;

pub(crate) use latent::{LATENT_EPS, LatentQuery};
pub(crate) use loader::{LayerSource, Loader, up_slices};
pub(crate) use norms::HeadNormWeights;
pub(crate) use qkv::{RowSlice, gate_slices, scaled};
pub(crate) use recurrent::{recurrent_slices, shape_of};
