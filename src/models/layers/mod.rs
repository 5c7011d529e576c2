//! Weights of the layers that decoders are composed of. Each worker loads its shard.

mod loader;
mod qkv;

pub(crate) use loader::{LayerSource, Loader};
