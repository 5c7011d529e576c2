//! Messages and service of `proto/grpc_service.proto`.
#![allow(missing_docs, clippy::all)] // Generated from the protocol's own file.

tonic::include_proto!("inference");

/// The service and all it refers to, as an encoded `FileDescriptorSet`.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));
