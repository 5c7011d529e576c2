//! Tests of the front over real sockets. They are one program, so that the crate is linked once.

mod access;
mod bad_clients;
mod connections;
mod kserve_grpc;
mod kserve_http;
mod page;
mod relay;
mod support;
