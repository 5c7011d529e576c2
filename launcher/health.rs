//! Whether a world serves.

use std::io::{Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::Duration;

/// Whether `GET /v2/health/ready` on `host:port` answers 200; takes less than a second.
pub(crate) fn is_ready(host: &str, port: u16) -> bool {
    says_yes(host, port, "ready")
}

/// The same for `/v2/health/live`.
pub(crate) fn is_live(host: &str, port: u16) -> bool {
    says_yes(host, port, "live")
}

fn says_yes(host: &str, port: u16, question: &str) -> bool {
    const PATIENCE: Duration = Duration::from_millis(250);
    let ask = || -> std::io::Result<bool> {
        let address = (host, port).to_socket_addrs()?.next().ok_or(std::io::ErrorKind::NotFound)?;
        let mut stream = TcpStream::connect_timeout(&address, PATIENCE)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let request = format!("GET /v2/health/{question} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes())?;
        let mut status = [0; 12];
        stream.read_exact(&mut status)?;
        Ok(status.starts_with(b"HTTP/1.") && status.ends_with(b" 200"))
    };
    ask().unwrap_or(false)
}
