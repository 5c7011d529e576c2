//! The configuration's types, generated from `proto/model_config.proto`, and their descriptors.

use std::sync::LazyLock;

use prost_reflect::{DescriptorPool, MessageDescriptor};

#[allow(missing_docs)] // Triton's own names; the .proto file says what they mean.
mod generated {
    include!(concat!(env!("OUT_DIR"), "/inference.rs"));
}

pub use generated::*;

/// `model_config.proto` as an encoded `FileDescriptorSet`, for reflection and for build scripts of other crates.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/model_config.bin"));

/// The descriptor of `inference.ModelConfig`.
pub(crate) fn model_config_descriptor() -> MessageDescriptor {
    static POOL: LazyLock<DescriptorPool> =
        LazyLock::new(|| DescriptorPool::decode(FILE_DESCRIPTOR_SET).expect("built from this crate's own proto"));
    POOL.get_message_by_name("inference.ModelConfig").expect("the proto defines it")
}
