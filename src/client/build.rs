//! Generates the protocol's messages from the front's own files, without protoc.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let includes = ["../front/proto", "../repository/proto"];
    for include in includes {
        println!("cargo::rerun-if-changed={include}");
    }
    let mut descriptors = protox::compile(["grpc_service.proto"], includes)?;
    for file in &mut descriptors.file {
        file.service.clear(); // Calls are made by hand, in `grpc.rs`.
    }
    prost_build::Config::new().bytes(["."]).compile_fds(descriptors)?;
    Ok(())
}
