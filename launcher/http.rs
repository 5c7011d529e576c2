//! Requests to rank 0 over HTTP. By hand, because one request without a body needs no library.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::Duration;

/// Sends a request without a body to `host:port`, and returns status and body of the answer. Each connect, read and write may take `timeout`.
///
/// # Errors
/// When nothing answers in time, or what answers does not speak HTTP.
pub(crate) fn send(
    (host, port): (&str, u16),
    method: &str,
    target: &str,
    header: Option<&str>,
    timeout: Duration,
) -> io::Result<(u16, String)> {
    let address = (host, port).to_socket_addrs()?.next().ok_or(ErrorKind::NotFound)?;
    let mut stream = TcpStream::connect_timeout(&address, timeout)?;
    stream.set_read_timeout(Some(timeout))?;
    stream.set_write_timeout(Some(timeout))?;
    let header = header.map(|header| format!("{header}\r\n")).unwrap_or_default();
    // HTTP/1.0: the body is not chunked, and the server closes the connection after it.
    let head = "Host: localhost\r\nContent-Length: 0\r\nConnection: close";
    stream.write_all(format!("{method} {target} HTTP/1.0\r\n{head}\r\n{header}\r\n").as_bytes())?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    let answer = String::from_utf8_lossy(&answer);
    let (head, body) = answer.split_once("\r\n\r\n").ok_or(ErrorKind::InvalidData)?;
    let status = head.strip_prefix("HTTP/1.").and_then(|rest| rest.get(2..5)?.parse().ok());
    Ok((status.ok_or(ErrorKind::InvalidData)?, body.to_owned()))
}
