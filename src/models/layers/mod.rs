//! Weights of the pieces that decoders are composed of, each loaded as this worker's share.

mod loader;
mod names;

pub(crate) use loader::Loader;
pub(crate) use names::{Names, QkvNames};
