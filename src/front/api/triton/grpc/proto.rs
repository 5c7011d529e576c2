//! Messages and service of `proto/grpc_service.proto`.
#![allow(missing_docs, clippy::all)] // Generated code.

tonic::include_proto!("inference");

/// The descriptors of the service and its messages, as an encoded `FileDescriptorSet`.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));
