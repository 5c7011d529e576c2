//! Health checks of a world, over a socket in the run directory that clients of the world can neither reach nor fill.
//!
//! If rank 0 runs on another node, its socket cannot be reached; the check then uses its HTTP port.

use std::io::{self, ErrorKind};
use std::time::Duration;

use ipc::Health;

use crate::http;
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
    is_live.then_some(Health { silent: Duration::ZERO, is_ready, num_requests: None, lost: Vec::new() })
}

fn is_ok(host: &str, port: u16, check: &str) -> bool {
    const IO_TIMEOUT: Duration = Duration::from_millis(250);
    let answer = http::send((host, port), "GET", &format!("/v2/health/{check}"), None, IO_TIMEOUT);
    answer.is_ok_and(|(status, _)| status == 200)
}
