//! A configuration as JSON: as `/config` shows it, and as a load request gives it.

use prost_reflect::{DeserializeOptions, DynamicMessage, SerializeOptions};

use crate::error::RepositoryError;
use crate::proto::{self, ModelConfig};

/// The configuration as JSON: every scalar with its value, messages where set, 64-bit integers as numbers.
pub fn to_json(config: &ModelConfig) -> String {
    use prost::Message as _;
    let message = DynamicMessage::decode(proto::model_config_descriptor(), config.encode_to_vec().as_slice())
        .expect("the descriptor and the type come from one proto");
    let options =
        SerializeOptions::new().skip_default_fields(false).use_proto_field_name(true).stringify_64_bit_integers(false);
    let mut bytes = Vec::new();
    let mut serializer = serde_json::Serializer::new(&mut bytes);
    message.serialize_with_options(&mut serializer, &options).expect("a configuration is valid JSON");
    String::from_utf8(bytes).expect("JSON is UTF-8")
}

/// A configuration given as JSON for model `name`.
///
/// # Errors
/// When it is no JSON, or does not follow the schema.
pub fn from_json(name: &str, json: &str) -> Result<ModelConfig, RepositoryError> {
    let wrong = |error: serde_json::Error| RepositoryError::Json {
        name: name.to_owned(),
        line: error.line(),
        column: error.column(),
        message: error.to_string(),
    };
    let mut deserializer = serde_json::Deserializer::from_str(json);
    let options = DeserializeOptions::new().deny_unknown_fields(true);
    let message =
        DynamicMessage::deserialize_with_options(proto::model_config_descriptor(), &mut deserializer, &options)
            .map_err(wrong)?;
    deserializer.end().map_err(wrong)?;
    Ok(message.transcode_to().expect("the descriptor and the type come from one proto"))
}
