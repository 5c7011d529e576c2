//! Triton's protocol (KServe v2 with its extensions) over HTTP and gRPC.

pub(crate) mod classification;
pub(crate) mod grpc;
pub(crate) mod header_parameters;
pub(crate) mod http;
pub(crate) mod output_request;
pub(crate) mod shapes;
pub(crate) mod shared_memory;
pub(crate) mod single_response;
