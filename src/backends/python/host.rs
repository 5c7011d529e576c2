//! What all model processes of a server share.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use ipc::IpcError;
use serving::{InferError, Server};

use super::config::PythonConfig;
use super::files::Files;
use super::memory::Shared;
use super::metrics::Registry;
use super::spawner::Spawner;

/// What all model processes of a server share.
pub(super) struct Host {
    pub config: PythonConfig,
    pub spawner: Spawner,
    pub files: Files,
    pub metrics: Arc<Registry>,
    pub server: OnceLock<Weak<Server>>,
    num_regions: AtomicU64,
    num_worlds: AtomicU64,
}

impl Host {
    /// # Errors
    /// When the thread that starts processes cannot be started.
    pub fn new(config: PythonConfig) -> std::io::Result<Self> {
        let (files, metrics, server, num_regions, num_worlds) = Default::default();
        Ok(Self { config, spawner: Spawner::start()?, files, metrics, server, num_regions, num_worlds })
    }

    /// A new name for a directory of one model's processes on all ranks.
    pub fn new_scratch(&self) -> Result<PathBuf, InferError> {
        Ok(self.files.dir()?.join(format!("w{}", self.num_worlds.fetch_add(1, Ordering::Relaxed))))
    }

    /// A region of at least `bytes` for a process whose regions have `held` bytes together.
    pub fn new_region(&self, bytes: usize, held: usize) -> Result<Shared, IpcError> {
        // Doubling the size keeps the number of regions small.
        let grown = if held == 0 { self.config.shm_default_bytes } else { self.config.shm_growth_bytes.max(held) };
        let number = self.num_regions.fetch_add(1, Ordering::Relaxed);
        let prefix = &self.config.prefix;
        let full = |error: &IpcError| matches!(error, IpcError::Full { .. });
        match Shared::create(prefix, &format!("python{number}"), bytes.max(grown)) {
            Err(error) if full(&error) && grown > bytes => Shared::create(prefix, &format!("python{number}"), bytes),
            made => made,
        }
    }
}
