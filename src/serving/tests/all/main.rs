//! Tests of the server with scripted backends. They are one program, so that the crate is linked once.

mod batching;
mod ensemble;
mod lifecycle;
mod load_requests;
mod polling;
mod requests;
mod sequences;
mod support;
