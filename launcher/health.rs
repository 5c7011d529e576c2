//! Whether a world serves.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::Duration;

/// Whether `GET /v2/health/ready` on `port` of this machine answers 200; at most half a second.
pub(crate) fn is_ready(port: u16) -> bool {
    const PATIENCE: Duration = Duration::from_millis(250);
    let ask = || -> std::io::Result<bool> {
        let mut stream = TcpStream::connect_timeout(&SocketAddr::from((Ipv4Addr::LOCALHOST, port)), PATIENCE)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        stream.write_all(b"GET /v2/health/ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
        let mut status = [0; 12];
        stream.read_exact(&mut status)?;
        Ok(status.starts_with(b"HTTP/1.") && status.ends_with(b" 200"))
    };
    ask().unwrap_or(false)
}
