//! Language models: reads Hugging Face checkpoints and composes their forward passes from device ops.
//!
//! [`Config::from_dir`] reads `config.json`. [`load`] maps the weights, gives each device its shard and returns a
//! [`Model`]; [`Model::forward`] runs one step. A model does not depend on the kind of device; kernels, KV blocks and
//! sampling belong to the device.
#![forbid(unsafe_code)]

mod alibi;
mod checkpoint;
mod config;
mod config_json;
mod decoder;
mod error;
mod estimate;
mod fields;
mod layers;
mod load;
mod model;
mod names;
mod registry;
mod rope;
pub mod shard;

pub use checkpoint::Checkpoint;
pub use config::{Config, Mlp, NormKind, Positions};
pub use error::ModelError;
pub use estimate::{EstimateMemory, WorkerShape};
pub use load::load;
pub use model::Model;
pub use registry::architectures;
pub use rope::{Rope, RopeScaling};
