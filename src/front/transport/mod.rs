//! Connections: sockets, TLS, HTTP/2, limits of clients' memory and connections, and access control.

pub(crate) mod body;
pub(crate) mod budget;
pub(crate) mod client_stream;
pub(crate) mod connections;
pub(crate) mod content_coding;
pub(crate) mod http2;
pub(crate) mod large_work;
pub(crate) mod listener;
pub(crate) mod origins;
pub(crate) mod restricted;
pub(crate) mod tls;
pub(crate) mod wake_flag;
pub(crate) mod write_batching;
