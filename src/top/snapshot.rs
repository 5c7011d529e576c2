//! The metrics and processes of a server at one moment.

use std::time::Instant;

use anyhow::{Result, bail};
use launcher::scrape::Metrics;
use launcher::status::WorldStatus;

/// Default port of the metrics.
const METRICS_PORT: u16 = 8002;

/// The server to show.
#[derive(Debug, Clone, Default)]
pub struct Source {
    /// Its host; `None` for a world on this machine.
    pub host: Option<String>,
    /// Port of its metrics; `None` for the default.
    pub metrics_port: Option<u16>,
    /// Selects one of several worlds on this machine.
    pub http_port: Option<u16>,
}

/// State of a server at one moment.
#[derive(Debug, Clone)]
pub struct Snapshot {
    /// When it was taken.
    pub at: Instant,
    /// Host and port of the metrics.
    pub server: String,
    /// The world, if `launch` started it on this machine.
    pub world: Option<WorldStatus>,
    /// The metrics of rank 0, or why they cannot be read.
    pub metrics: Result<Metrics, String>,
}

impl Source {
    /// Takes a snapshot. A server that does not answer is not an error; it is recorded in [`Snapshot::metrics`].
    ///
    /// # Errors
    /// When several worlds run here and none is selected, or the selected one does not run.
    pub fn snapshot(&self) -> Result<Snapshot> {
        let world = if self.host.is_none() { self.choose(launcher::worlds()?)? } else { None };
        let port = self.metrics_port.or(world.as_ref().map(|world| world.metrics_port)).unwrap_or(METRICS_PORT);
        let host = self.host.as_deref().unwrap_or("localhost");
        let metrics = Metrics::of(host, port).map_err(|error| error.to_string());
        Ok(Snapshot { at: Instant::now(), server: format!("{host}:{port}"), world, metrics })
    }

    /// The selected world, or the only one.
    fn choose(&self, mut worlds: Vec<WorldStatus>) -> Result<Option<WorldStatus>> {
        let fits = |world: &WorldStatus| {
            self.http_port.is_none_or(|port| world.http_port == port)
                && self.metrics_port.is_none_or(|port| world.metrics_port == port)
        };
        let ports: Vec<String> = worlds.iter().map(|world| world.http_port.to_string()).collect();
        worlds.retain(fits);
        match (worlds.len(), self.http_port) {
            (2.., _) => bail!("several worlds run here; choose one with --http-port: {}", ports.join(", ")),
            (0, Some(port)) => bail!("no world with --http-port={port} runs here; there are: {}", ports.join(", ")),
            _ => Ok(worlds.pop()),
        }
    }
}
