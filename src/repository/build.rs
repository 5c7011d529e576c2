//! Generates Rust types and a descriptor from `proto/model_config.proto`, without `protoc`.

use std::path::PathBuf;

use prost::Message as _;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=proto/model_config.proto");
    let out_dir = PathBuf::from(std::env::var("OUT_DIR")?);
    let descriptors = protox::compile(["model_config.proto"], ["proto"])?;
    std::fs::write(out_dir.join("model_config.bin"), descriptors.encode_to_vec())?;
    prost_build::Config::new().btree_map(["."]).compile_fds(descriptors)?;
    Ok(())
}
