//! Tensors of requests, in the types that a model declares.

use bytes::Bytes;

use crate::ClientError;
use crate::grpc::Connection;
use crate::proto::model_config::SchedulingChoice;
use crate::proto::model_infer_request::InferInputTensor;
use crate::proto::model_metadata_response::TensorMetadata;
use crate::proto::{
    ModelConfig, ModelConfigRequest, ModelConfigResponse, ModelInferRequest, ModelMetadataRequest,
    ModelMetadataResponse, ModelReadyRequest, ModelReadyResponse, RepositoryIndexRequest, RepositoryIndexResponse,
};

/// A model's inputs and outputs, from the server's metadata.
pub struct Model {
    /// The server's metadata.
    pub metadata: ModelMetadataResponse,
    /// Whether a request may have several responses: the model is decoupled, or a step of the ensemble is.
    pub streams: bool,
}

impl Model {
    /// Queries the metadata of a model that is ready.
    ///
    /// # Errors
    /// When the model is not ready; the message lists the models that are.
    pub async fn find(connection: &Connection, name: &str) -> Result<Self, ClientError> {
        let request = ModelReadyRequest { name: name.to_owned(), version: String::new() };
        let ready: ModelReadyResponse =
            connection.unary("ModelReady", &request).await.map_err(ClientError::on_first_call)?;
        if !ready.ready {
            let (model, url) = (name.to_owned(), connection.url().to_owned());
            return Err(ClientError::NotReady { model, url, known: known_models(connection, name).await? });
        }
        let request = ModelMetadataRequest { name: name.to_owned(), version: String::new() };
        let metadata = connection.unary("ModelMetadata", &request).await?;
        Ok(Self { metadata, streams: streams(connection, name).await })
    }

    /// The declared input called `name`.
    pub fn input(&self, name: &str) -> Option<&TensorMetadata> {
        self.metadata.inputs.iter().find(|input| input.name == name)
    }

    /// A request without tensors.
    pub fn request(&self) -> ModelInferRequest {
        ModelInferRequest { model_name: self.metadata.name.clone(), ..ModelInferRequest::default() }
    }

    /// Adds `values` as the input called `name`, which the model must have.
    ///
    /// # Errors
    /// When the model has no such input, or the values do not fit its type.
    pub fn add(&self, request: &mut ModelInferRequest, name: &str, values: Values<'_>) -> Result<(), ClientError> {
        let input = self.input(name).ok_or_else(|| {
            let model = &self.metadata.name;
            let names: Vec<&str> = self.metadata.inputs.iter().map(|input| input.name.as_str()).collect();
            ClientError::Usage(format!("model `{model}` has no input `{name}`, only {}", names.join(", ")))
        })?;
        let data = values.encode(&input.datatype).ok_or_else(|| {
            ClientError::Usage(format!("input `{name}` of model `{}` is {}", self.metadata.name, input.datatype))
        })?;
        let mut shape = vec![1; input.shape.len()];
        if let Some(last) = shape.last_mut() {
            *last = values.len() as i64;
        }
        push(request, input, shape, data);
        Ok(())
    }
}

/// Whether a model streams its responses; assumed if the server does not return the configuration.
async fn streams(connection: &Connection, name: &str) -> bool {
    let Some(config) = config(connection, name).await else { return true };
    if is_decoupled(&config) {
        return true;
    }
    let Some(SchedulingChoice::EnsembleScheduling(ensemble)) = &config.scheduling_choice else { return false };
    for step in &ensemble.step {
        if self::config(connection, &step.model_name).await.is_none_or(|config| is_decoupled(&config)) {
            return true;
        }
    }
    false
}

async fn config(connection: &Connection, name: &str) -> Option<ModelConfig> {
    let request = ModelConfigRequest { name: name.to_owned(), version: String::new() };
    connection.unary::<ModelConfigResponse>("ModelConfig", &request).await.ok()?.config
}

fn is_decoupled(config: &ModelConfig) -> bool {
    config.model_transaction_policy.is_some_and(|policy| policy.decoupled)
}

/// Adds a tensor of raw `data`.
pub fn push(request: &mut ModelInferRequest, input: &TensorMetadata, shape: Vec<i64>, data: Bytes) {
    let (name, datatype) = (input.name.clone(), input.datatype.clone());
    request.inputs.push(InferInputTensor { name, datatype, shape, ..InferInputTensor::default() });
    request.raw_input_contents.push(data);
}

/// Explains why a model is not ready: its state, or the models that are ready.
async fn known_models(connection: &Connection, name: &str) -> Result<String, ClientError> {
    let index: RepositoryIndexResponse =
        connection.unary("RepositoryIndex", &RepositoryIndexRequest::default()).await?;
    if let Some(model) = index.models.iter().find(|model| model.name == name) {
        return Ok(format!("it is {} {}", model.state, model.reason).trim_end().to_owned());
    }
    let ready: Vec<&str> =
        index.models.iter().filter(|model| model.state == "READY").map(|model| model.name.as_str()).collect();
    Ok(if ready.is_empty() { "no model is".to_owned() } else { format!("these are: {}", ready.join(", ")) })
}

/// Values of one input, independent of its declared type.
#[derive(Clone, Copy)]
pub enum Values<'a> {
    /// Integers.
    Integers(&'a [i64]),
    /// One floating-point number.
    Float(f64),
    /// One boolean.
    Bool(bool),
    /// Strings.
    Texts(&'a [String]),
}

impl Values<'_> {
    fn len(self) -> usize {
        match self {
            Values::Integers(values) => values.len(),
            Values::Texts(values) => values.len(),
            Values::Float(_) | Values::Bool(_) => 1,
        }
    }

    /// The values as raw elements of `datatype`; `None` if they do not fit.
    fn encode(self, datatype: &str) -> Option<Bytes> {
        let data: Vec<u8> = match (self, datatype) {
            (Values::Integers(values), "INT32") => pack(values, i32::to_le_bytes)?,
            (Values::Integers(values), "UINT32") => pack(values, u32::to_le_bytes)?,
            (Values::Integers(values), "UINT64") => pack(values, u64::to_le_bytes)?,
            (Values::Integers(values), "INT64") => pack(values, i64::to_le_bytes)?,
            (Values::Float(value), "FP32") => (value as f32).to_le_bytes().into(),
            (Values::Float(value), "FP64") => value.to_le_bytes().into(),
            (Values::Bool(value), "BOOL") => vec![u8::from(value)],
            (Values::Texts(values), "BYTES") => values
                .iter()
                .flat_map(|text| (text.len() as u32).to_le_bytes().into_iter().chain(text.bytes()))
                .collect(),
            _ => return None,
        };
        Some(data.into())
    }
}

fn pack<T: TryFrom<i64>, const SIZE: usize>(values: &[i64], bytes: impl Fn(T) -> [u8; SIZE]) -> Option<Vec<u8>> {
    let mut data = Vec::with_capacity(values.len() * SIZE);
    for &value in values {
        data.extend(bytes(T::try_from(value).ok()?));
    }
    Some(data)
}

/// The elements of a BYTES tensor.
pub fn texts(data: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut rest = data;
    std::iter::from_fn(move || {
        let length = u32::from_le_bytes(*rest.first_chunk::<4>()?) as usize;
        let text = rest.get(4..4 + length)?;
        rest = &rest[4 + length..];
        Some(text)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_take_the_declared_type() {
        assert_eq!(Values::Integers(&[-1]).encode("INT32").unwrap(), Bytes::from_static(&[255; 4]));
        assert_eq!(Values::Integers(&[-1]).encode("UINT64"), None);
        assert_eq!(Values::Float(1.0).encode("FP64").unwrap().len(), 8);
        let strings = Values::Texts(&["ab".into(), String::new()]).encode("BYTES").unwrap();
        assert_eq!(texts(&strings).collect::<Vec<_>>(), [b"ab".as_slice(), b""]);
    }
}
