//! Configurations as JSON: the output of `/config`, and the input of load requests.

use prost_reflect::{
    DeserializeOptions, DynamicMessage, FieldDescriptor, MessageDescriptor, ReflectMessage, SerializeOptions,
};
use serde_json::Value;

use crate::error::RepositoryError;
use crate::proto::{self, ModelConfig};

/// The configuration as JSON. Every scalar has its value, messages appear if they are set, and 64-bit integers are numbers.
pub fn to_json(config: &ModelConfig) -> String {
    use prost::Message as _;
    let message = DynamicMessage::decode(proto::model_config_descriptor(), config.encode_to_vec().as_slice())
        .expect("the descriptor and the type come from one proto");
    let options =
        SerializeOptions::new().skip_default_fields(false).use_proto_field_name(true).stringify_64_bit_integers(false);
    let value =
        message.serialize_with_options(serde_json::value::Serializer, &options).expect("a configuration is valid JSON");
    let mut text = String::new();
    write_in_order(&message.descriptor(), &value, &mut text);
    text
}

/// Writes a message or an array of messages, with members in the order of the proto file, as Triton does.
fn write_in_order(message: &MessageDescriptor, value: &Value, text: &mut String) {
    match value {
        Value::Array(items) => write_all('[', ']', items, text, |item, text| write_in_order(message, item, text)),
        Value::Object(members) => {
            let declared =
                message.descriptor_proto().field.iter().filter_map(|field| members.get_key_value(field.name()));
            write_all('{', '}', declared, text, |(name, value), text| {
                text.push_str(&format!("\"{name}\":"));
                let field = message.get_field_by_name(name).expect("the message declares it");
                write_field(&field, value, text);
            });
        }
        scalar => text.push_str(&scalar.to_string()),
    }
}

fn write_field(field: &FieldDescriptor, value: &Value, text: &mut String) {
    let kind = field.kind();
    let Some(message) = kind.as_message() else { return text.push_str(&value.to_string()) };
    let (true, Value::Object(entries)) = (field.is_map(), value) else { return write_in_order(message, value, text) };
    write_all('{', '}', entries, text, |(key, value), text| {
        text.push_str(&format!("{}:", Value::from(key.as_str())));
        write_field(&message.map_entry_value_field(), value, text);
    });
}

fn write_all<T>(
    open: char,
    close: char,
    items: impl IntoIterator<Item = T>,
    text: &mut String,
    mut write: impl FnMut(T, &mut String),
) {
    text.push(open);
    for (index, item) in items.into_iter().enumerate() {
        if index > 0 {
            text.push(',');
        }
        write(item, text);
    }
    text.push(close);
}

/// Parses a configuration given as JSON for model `name`.
///
/// # Errors
/// If the text is no JSON or does not follow the schema.
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
