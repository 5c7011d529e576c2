//! Generates the gRPC service from `proto/`, without protoc.

use std::path::{Path, PathBuf};

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
    Ok(())
}

fn write_descriptors(descriptors: &impl prost::Message, path: &Path) -> std::io::Result<()> {
    std::fs::write(path, descriptors.encode_to_vec())
}
