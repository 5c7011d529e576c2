//! Weights of the layers that decoders are composed of. Each worker loads its shard.

mod loader;
mod names;

pub(crate) use loader::Loader;
pub(crate) use names::{Names, QkvNames};
