//! Generates the protocol's messages from the `.proto` files of the front, without protoc.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let includes = ["../front/proto", "../repository/proto"];
    for include in includes {
        println!("cargo::rerun-if-changed={include}");
    }
    let mut descriptors = protox::compile(["grpc_service.proto"], includes)?;
    for file in &mut descriptors.file {
        file.service.clear(); // `grpc.rs` implements the calls.
    }
    prost_build::Config::new().bytes(["."]).compile_fds(descriptors)?;
    Ok(())
}
