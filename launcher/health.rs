//! Health checks of a world, over a socket in the run directory that clients of the world can neither reach nor fill.
//!
//! If rank 0 runs on another node, its socket cannot be reached; the check then uses its HTTP port.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::Duration;

use ipc::Health;

use crate::state::WorldState;

/// The health of rank 0 of `world`; None when it does not answer. Takes about a second at most.
pub(crate) fn of(world: &WorldState) -> Option<Health> {
    // A world started by an older launcher has no control socket.
    let answer = world.control.as_ref().map_or_else(|| Err(ErrorKind::NotFound.into()), |path| ipc::ask_health(path));
    let is_absent = |error: &io::Error| matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused);
    match answer {
        Err(error) if is_absent(&error) && (world.control.is_none() || world.rank_0_may_be_elsewhere) => {
            over_http(&world.http_host, world.http_port)
        }
        answer => answer.ok(),
    }
}

/// The health that `/v2/health/ready` and `/v2/health/live` on `host:port` report.
pub(crate) fn over_http(host: &str, port: u16) -> Option<Health> {
    let is_ready = is_ok(host, port, "ready");
    let is_live = is_ready || is_ok(host, port, "live");
    is_live.then_some(Health { silent: Duration::ZERO, is_ready, num_requests: None })
}

fn is_ok(host: &str, port: u16, check: &str) -> bool {
    const IO_TIMEOUT: Duration = Duration::from_millis(250);
    let ask = || -> io::Result<bool> {
        let address = (host, port).to_socket_addrs()?.next().ok_or(ErrorKind::NotFound)?;
        let mut stream = TcpStream::connect_timeout(&address, IO_TIMEOUT)?;
        stream.set_read_timeout(Some(IO_TIMEOUT))?;
        stream.set_write_timeout(Some(IO_TIMEOUT))?;
        let request = format!("GET /v2/health/{check} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes())?;
        let mut status = [0; 12];
        stream.read_exact(&mut status)?;
        Ok(status.starts_with(b"HTTP/1.") && status.ends_with(b" 200"))
    };
    ask().unwrap_or(false)
}
