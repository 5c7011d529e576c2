//! Paths of RPCs that are handled apart from the others.

/// The inference service; a method's name follows.
pub const INFERENCE: &str = "/inference.GRPCInferenceService/";
/// One request, one response.
pub const MODEL_INFER: &str = "/inference.GRPCInferenceService/ModelInfer";
/// Many requests and responses over one stream.
pub const MODEL_STREAM_INFER: &str = "/inference.GRPCInferenceService/ModelStreamInfer";
/// Loads a model.
pub const MODEL_LOAD: &str = "/inference.GRPCInferenceService/RepositoryModelLoad";
