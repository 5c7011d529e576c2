//! Language models: reads Hugging Face checkpoints and composes their forward passes from device ops.
//!
//! [`Config::from_dir`] reads `config.json`. [`load`] maps the weights, gives each device its shard and returns a
//! [`Model`]; [`Model::forward`] runs one step. A model does not depend on the kind of device; kernels, KV blocks and
//! sampling belong to the device.
#![forbid(unsafe_code)]

mod adapter;
mod alibi;
mod buffers;
mod checkpoint;
mod config;
mod decoder;
mod draft_model;
mod drafter;
mod eagle3;
mod error;
mod estimate;
mod expert_branch;
mod families;
mod fields;
mod kimi_delta;
mod kv_groups;
mod layer;
mod layer_spec;
mod layers;
mod linear_layers;
mod load;
mod mixer;
mod mlp;
mod model;
mod mtp;
mod names;
mod per_layer;
mod python_json;
mod rope;
pub mod rounding;
pub mod shard;
mod weights_form;

pub use adapter::{Adapter, AdapterBounds, AdapterError, AdapterLayers, AdapterTensors, MAX_ADAPTER_RANK};
pub use checkpoint::{Checkpoint, StoredTensor, rounded};
pub use config::{Config, HeadSpec, MtpForm, MtpHead, PerLayerInput, Rounding, StoredQuantization, WeightFormat};
pub use error::ModelError;
pub use estimate::{EstimateMemory, WorkerShape};
pub use families::architectures;
pub use kv_groups::KvGroups;
pub use layer_spec::{
    AttentionLayer, BesideLayer, ExpertLayer, HeadNormSpec, KvSource, LatentLayer, LayerSpec, MlpLayer, NormSpec,
    RecurrentLayer,
};
pub use linear_layers::{InputSource, LinearGroup, linear_groups};
pub use load::load;
pub use model::Model;
pub use python_json::from_python_json;
pub use rope::{Rope, RopeScaling};
pub use weights_form::WeightsForm;
