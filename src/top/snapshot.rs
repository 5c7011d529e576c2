//! One glance at a server.

use std::time::Instant;

use anyhow::{Result, bail};
use launcher::scrape::Metrics;
use launcher::status::WorldStatus;

/// Port of the metrics where nobody says.
const METRICS_PORT: u16 = 8002;

/// Which server to look at.
#[derive(Debug, Clone, Default)]
pub struct Source {
    /// Its host; None for a world of this machine.
    pub host: Option<String>,
    /// Its metrics' port, if not the usual one.
    pub metrics_port: Option<u16>,
    /// Chooses among worlds of this machine.
    pub http_port: Option<u16>,
}

/// What one glance finds.
#[derive(Debug, Clone)]
pub struct Snapshot {
    /// When.
    pub at: Instant,
    /// Host and port of the metrics.
    pub server: String,
    /// The world, if `launch` started it on this machine.
    pub world: Option<WorldStatus>,
    /// What rank 0 publishes, or why there is nothing.
    pub metrics: Result<Metrics, String>,
}

impl Source {
    /// Takes a look. A server that does not answer is part of what is seen.
    ///
    /// # Errors
    /// When several worlds run here and none was chosen, or the chosen one does not.
    pub fn snapshot(&self) -> Result<Snapshot> {
        let world = if self.host.is_none() { self.choose(launcher::worlds()?)? } else { None };
        let port = self.metrics_port.or(world.as_ref().map(|world| world.metrics_port)).unwrap_or(METRICS_PORT);
        let host = self.host.as_deref().unwrap_or("localhost");
        let metrics = Metrics::of(host, port).map_err(|error| error.to_string());
        Ok(Snapshot { at: Instant::now(), server: format!("{host}:{port}"), world, metrics })
    }

    /// The world that was asked for, or the only one.
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
