//! Metadata of the server and its models.

use repository::ModelConfig;

use crate::DataType;

/// Metadata of the server.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs)] // The protocol's own names.
pub struct ServerMetadata {
    pub name: String,
    pub version: String,
    pub extensions: Vec<String>,
}

/// Metadata of a model: its versions, inputs and outputs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelMetadata {
    /// Model name.
    pub name: String,
    /// Versions that serve, ascending.
    pub versions: Vec<String>,
    /// `platform` of the configuration, else its `backend`.
    pub platform: String,
    /// Input tensors.
    pub inputs: Vec<TensorMetadata>,
    /// Output tensors.
    pub outputs: Vec<TensorMetadata>,
}

impl ModelMetadata {
    /// Metadata of a model with a validated configuration.
    pub(crate) fn new(config: &ModelConfig, versions: Vec<String>) -> Self {
        let batched = config.max_batch_size > 0;
        let tensor = |name: &String, data_type, dims: &[i64]| TensorMetadata {
            name: name.clone(),
            datatype: DataType::from_config(data_type).expect("validated: each tensor has a type"),
            shape: batched.then_some(-1).into_iter().chain(dims.iter().copied()).collect(),
        };
        Self {
            name: config.name.clone(),
            versions,
            platform: if config.platform.is_empty() { config.backend.clone() } else { config.platform.clone() },
            inputs: config.input.iter().map(|input| tensor(&input.name, input.data_type(), &input.dims)).collect(),
            outputs: config
                .output
                .iter()
                .map(|output| tensor(&output.name, output.data_type(), &output.dims))
                .collect(),
        }
    }
}

/// Metadata of a model's input or output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorMetadata {
    /// Name of the tensor in the model.
    pub name: String,
    /// Element type.
    pub datatype: DataType,
    /// Sizes, -1 for any, batch dimension included.
    pub shape: Vec<i64>,
}
