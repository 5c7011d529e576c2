//! Language models: reads Hugging Face checkpoints and composes their forward passes from device ops.
//!
//! [`Config::from_dir`] reads what `config.json` says; [`load`] maps the weights, hands each device its share
//! and returns a [`Model`], whose [`Model::forward`] is one step. A model never asks which device it runs on;
//! kernels, KV blocks and sampling are the device's.
#![forbid(unsafe_code)]

mod alibi;
mod checkpoint;
mod config;
mod decoder;
mod error;
mod fields;
mod layers;
mod registry;
mod rope;
pub mod shard;

pub use checkpoint::Checkpoint;
pub use config::{Config, Mlp, NormKind, Positions};
pub use error::ModelError;
pub use registry::{Model, architectures, load};
pub use rope::{Rope, RopeScaling};
