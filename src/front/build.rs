//! Generates the gRPC service from `proto/`, without protoc, and the page's reference of the API from `docs/openapi.yaml`.

use std::path::{Path, PathBuf};

use serde_json::Value;
use yaml_rust2::{Yaml, YamlLoader};

/// The description of the HTTP API.
const OPENAPI: &str = "../../docs/openapi.yaml";

/// Encoded by `response.rs` directly from the responses of models.
const HAND_WRITTEN: [(&str, &str); 2] = [
    (".inference.ModelInferResponse", "crate::api::triton::grpc::response::InferReply"),
    (".inference.ModelStreamInferResponse", "crate::api::triton::grpc::response::StreamReply"),
];

/// Served by `stream_call.rs` without `tonic`.
const STREAM: &str = "ModelStreamInfer";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let includes = ["proto", "../repository/proto"];
    for include in includes {
        println!("cargo::rerun-if-changed={include}");
    }
    let mut descriptors = protox::compile(["grpc_service.proto"], includes)?;
    let out_dir = PathBuf::from(std::env::var("OUT_DIR")?);
    write_descriptors(&descriptors, &out_dir.join("descriptors.bin"))?;

    let mut config = tonic_prost_build::configure()
        .build_client(false)
        .bytes(".")
        .btree_map(".")
        .codec_path("crate::api::triton::grpc::codec::MessageCodec");
    for (message, path) in HAND_WRITTEN {
        config = config.extern_path(message, path);
    }
    // The model configuration's types are generated in `repository`.
    for file in descriptors.file.iter().filter(|file| file.name() == "model_config.proto") {
        let messages = file.message_type.iter().map(|message| message.name());
        for name in messages.chain(file.enum_type.iter().map(|choice| choice.name())) {
            config = config.extern_path(format!(".inference.{name}"), format!("::repository::proto::{name}"));
        }
    }
    for service in descriptors.file.iter_mut().flat_map(|file| &mut file.service) {
        service.method.retain(|method| method.name() != STREAM);
    }
    config.compile_fds(descriptors)?;
    println!("cargo::rerun-if-changed={OPENAPI}");
    write_openapi(&out_dir.join("openapi.json"))?;
    Ok(())
}

/// Writes the description as JSON, which browsers can read.
fn write_openapi(path: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let documents = YamlLoader::load_from_str(&std::fs::read_to_string(OPENAPI)?)?;
    let [document] = documents.as_slice() else { return Err(format!("{OPENAPI} is not one document").into()) };
    std::fs::write(path, json(document)?.to_string())?;
    Ok(())
}

fn json(yaml: &Yaml) -> Result<Value, String> {
    Ok(match yaml {
        Yaml::Null => Value::Null,
        Yaml::Boolean(value) => Value::Bool(*value),
        Yaml::Integer(value) => Value::from(*value),
        Yaml::Real(_) => yaml.as_f64().map(Value::from).ok_or_else(|| format!("{yaml:?} is no number"))?,
        Yaml::String(text) => Value::from(text.as_str()),
        Yaml::Array(items) => items.iter().map(json).collect::<Result<Vec<Value>, String>>()?.into(),
        Yaml::Hash(members) => {
            let name = |key: &Yaml| key.as_str().map(str::to_owned).ok_or_else(|| format!("{key:?} is no name"));
            let member = |(key, value): (&Yaml, &Yaml)| Ok((name(key)?, json(value)?));
            Value::Object(members.iter().map(member).collect::<Result<_, String>>()?)
        }
        Yaml::Alias(_) | Yaml::BadValue => return Err(format!("{yaml:?} has no place in JSON")),
    })
}

fn write_descriptors(descriptors: &impl prost::Message, path: &Path) -> std::io::Result<()> {
    std::fs::write(path, descriptors.encode_to_vec())
}
