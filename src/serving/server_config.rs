//! The configuration of a server.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use crate::Limits;

/// Which models are loaded, and whether clients may load and unload models.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ControlMode {
    /// All models of the repository are loaded at start. None can be loaded or unloaded later.
    None,
    /// The named models are loaded at start (`*` alone for all). Clients load and unload models later.
    Explicit {
        /// Models to load at start.
        load: Vec<String>,
    },
    /// All models of the repository are loaded, and loaded again when their files change.
    Poll {
        /// Time between two checks of the repository; none are made if it is zero, as in Triton.
        interval: Duration,
    },
}

/// Configuration of a server.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// Name shown in the server's metadata.
    pub name: String,
    /// Version shown in the server's metadata.
    pub version: String,
    /// Protocol extensions shown in the server's metadata.
    pub extensions: Vec<String>,
    /// Directories of the model repository.
    pub repositories: Vec<PathBuf>,
    /// Which models are loaded, and whether clients may load and unload models.
    pub control_mode: ControlMode,
    /// Whether the server is ready only while every required model is ready. Otherwise it is ready when loading is over.
    pub strict_readiness: bool,
    /// Number of models that are loaded at the same time at start.
    pub load_parallelism: usize,
    /// Further attempts to load a model that failed at start.
    pub load_retries: u32,
    /// How long an unload waits for requests in flight before it continues in the background.
    pub unload_timeout: Duration,
    /// Size of the response cache in bytes (`--cache-config=local,size=N`), for models with `response_cache`; 0 for no cache.
    pub response_cache_bytes: usize,
    /// Whether models keep the durations of the last minute, for quantiles.
    pub keeps_recent_durations: bool,
    /// Limits on the contents of one request.
    pub limits: Limits,
    /// Further names by which clients may request models, each with the name of its model.
    pub served_names: BTreeMap<String, String>,
}

impl Default for ServerConfig {
    fn default() -> Self {
        let extensions = [
            "classification",
            "sequence",
            "model_repository",
            "model_repository(unload_dependents)",
            "schedule_policy",
            "model_configuration",
            "system_shared_memory",
            "cuda_shared_memory",
            "binary_tensor_data",
            "parameters",
            "statistics",
            "trace",
            "logging",
        ];
        Self {
            name: "trireme".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            extensions: extensions.map(str::to_owned).to_vec(),
            repositories: Vec::new(),
            control_mode: ControlMode::None,
            strict_readiness: true,
            load_parallelism: 4,
            load_retries: 0,
            unload_timeout: Duration::from_secs(30),
            response_cache_bytes: 0,
            keeps_recent_durations: false,
            limits: Limits::default(),
            served_names: BTreeMap::new(),
        }
    }
}
