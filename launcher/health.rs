//! Whether a world serves: asked over a socket in the run directory, which no client of the world can reach or fill.
//!
//! Where rank 0 may run on another node that socket cannot be reached, and its HTTP port is asked instead.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::Duration;

use ipc::Health;

use crate::state::WorldState;

/// How rank 0 of `world` is; None when it does not answer. Takes about a second at most.
pub(crate) fn of(world: &WorldState) -> Option<Health> {
    // A world of a launcher that knew of no such socket has none.
    let asked = world.control.as_ref().map_or_else(|| Err(ErrorKind::NotFound.into()), |path| ipc::ask_health(path));
    let is_absent = |error: &io::Error| matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused);
    match asked {
        Err(error) if is_absent(&error) && (world.control.is_none() || world.rank_0_may_be_elsewhere) => {
            over_http(&world.http_host, world.http_port)
        }
        asked => asked.ok(),
    }
}

/// The same from `/v2/health/ready` and `/v2/health/live` on `host:port`.
pub(crate) fn over_http(host: &str, port: u16) -> Option<Health> {
    let is_ready = says_yes(host, port, "ready");
    let is_live = is_ready || says_yes(host, port, "live");
    is_live.then_some(Health { silent: Duration::ZERO, is_ready })
}

fn says_yes(host: &str, port: u16, question: &str) -> bool {
    const PATIENCE: Duration = Duration::from_millis(250);
    let ask = || -> io::Result<bool> {
        let address = (host, port).to_socket_addrs()?.next().ok_or(ErrorKind::NotFound)?;
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
