//! Weights of the pieces that decoders are composed of, each loaded as this worker's share.

mod loader;

pub(crate) use loader::Loader;
