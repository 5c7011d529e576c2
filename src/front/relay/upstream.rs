//! Where rank 0 is. The launcher says so, and a request waits for the next rank 0 while there is none.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout};

/// Pause before rank 0 is asked again whether it is alive: the kernel closes the sockets of a dying process one by one.
const CLOSING_TIME: Duration = Duration::from_millis(200);

/// Pause between attempts to connect to a rank 0 that does not accept.
const RETRY: Duration = Duration::from_millis(20);

/// How long the launcher may take to say that a world which ends no longer serves.
const NOTICE_TIME: Duration = Duration::from_secs(5);

/// A port of rank 0: the name of its socket in the directory of a world.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RelayedPort {
    /// KServe gRPC.
    Grpc,
    /// HTTP.
    Http,
    /// Metrics.
    Metrics,
}

impl RelayedPort {
    /// The path of its socket.
    pub fn socket(self, directory: &Path) -> PathBuf {
        directory.join(match self {
            Self::Grpc => "grpc",
            Self::Http => "http",
            Self::Metrics => "metrics",
        })
    }
}

/// What the relay knows of rank 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankZero {
    /// The directory with the sockets of the world that serves; `None` while none does, and requests wait.
    pub sockets: Option<Arc<Path>>,
    /// Why no world serves.
    pub reason: String,
    /// Whether no world follows, so that no request waits or is sent again.
    pub is_last: bool,
    /// Whether a world is started only for a request.
    pub is_asleep: bool,
}

impl RankZero {
    /// Whether the world with these sockets serves.
    fn is_served_by(&self, world: &Path) -> bool {
        self.sockets.as_deref() == Some(world)
    }
}

impl Default for RankZero {
    /// Before the first world serves.
    fn default() -> Self {
        Self { sockets: None, reason: "the server starts".to_owned(), is_last: false, is_asleep: false }
    }
}

/// Connects to rank 0.
#[derive(Debug, Clone)]
pub(crate) struct Upstream {
    state: watch::Receiver<RankZero>,
    wait: Duration,
}

/// A connection to rank 0.
pub(crate) struct Link {
    pub(crate) stream: UnixStream,
    /// The sockets of its world, which identify it.
    pub(crate) world: Arc<Path>,
}

impl Upstream {
    /// Follows `state`. Requests wait for a rank 0 for `wait`.
    pub(crate) fn new(state: watch::Receiver<RankZero>, wait: Duration) -> Self {
        Self { state, wait }
    }

    /// Connects to rank 0, and waits for the next one while there is none.
    ///
    /// # Errors
    /// The message for the client, when none serves in time or none follows.
    pub(crate) async fn connect(&self, port: RelayedPort) -> Result<Link, String> {
        let deadline = Instant::now() + self.wait;
        let mut state = self.state.clone();
        loop {
            let now = state.borrow_and_update().clone();
            if let Ok(link) = open(&now, port).await {
                return Ok(link);
            }
            if now.is_last {
                return Err("the server is being stopped; send the request to another one".to_owned());
            }
            let changed = async {
                match now.sockets {
                    // It does not accept: its end may not be known yet.
                    Some(_) => drop(timeout(RETRY, state.changed()).await),
                    None => drop(state.changed().await),
                }
            };
            tokio::select! {
                () = changed => {}
                () = sleep_until(deadline) => {
                    let reason = self.state.borrow().reason.clone();
                    return Err(format!("{reason}; no server was ready within {:?}: try again later", self.wait));
                }
            }
        }
    }

    /// Connects to rank 0 if it serves now.
    pub(crate) async fn connect_now(&self, port: RelayedPort) -> Result<Link, String> {
        let now = self.state.borrow().clone();
        open(&now, port).await.map_err(|_| now.reason)
    }

    /// Whether a world is started only for a request.
    pub(crate) fn is_asleep(&self) -> bool {
        self.state.borrow().is_asleep
    }

    /// Whether `world` is the one that serves.
    pub(crate) fn serves(&self, world: &Path) -> bool {
        self.state.borrow().is_served_by(world)
    }

    /// Returns when `world` is no longer the one that serves.
    pub(crate) async fn left(&self, world: &Path) {
        let mut state = self.state.clone();
        if state.wait_for(|now| !now.is_served_by(world)).await.is_err() {
            // The launcher has gone, so the state does not change any more.
            std::future::pending().await
        }
    }

    /// Whether a request that the rank 0 of `world` refused as it [stops](serving::STOPPING) is one for the next world: the request was
    /// on its way when the launcher asked that world to end. Waits until the launcher has said here that it no longer serves.
    pub(crate) async fn goes_on_after_refusal(&self, world: &Path) -> bool {
        let mut state = self.state.clone();
        let noticed = timeout(NOTICE_TIME, state.wait_for(|now| now.is_last || !now.is_served_by(world))).await;
        noticed.is_ok_and(|now| now.is_ok_and(|now| !now.is_served_by(world)))
    }

    /// Whether the rank 0 of `world` still serves, which has closed a connection.
    pub(crate) async fn is_alive(&self, world: &Path) -> bool {
        sleep(CLOSING_TIME).await;
        let now = self.state.borrow().clone();
        now.is_served_by(world) && open(&now, RelayedPort::Http).await.is_ok()
    }
}

async fn open(state: &RankZero, port: RelayedPort) -> io::Result<Link> {
    let world = state.sockets.clone().ok_or(io::ErrorKind::NotFound)?;
    Ok(Link { stream: UnixStream::connect(port.socket(&world)).await?, world })
}
