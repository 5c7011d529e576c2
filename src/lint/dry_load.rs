//! Loads a repository as a server does, without workers and model processes.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use backends::layouts::Layouts;
use backends::llm::{CheckFactory, LlmDefaults};
use backends::python::CheckPythonFactory;
use models::EstimateMemory;
use serving::{BackendFactory, LoadFailure, Server, ServerConfig};
use supervision::{DeviceChoice, WorkerSettings};

use crate::LintError;

/// The models that a server cannot load, with its error messages.
///
/// # Errors
/// When the repository cannot be read.
pub(crate) fn failures(
    roots: &[PathBuf],
    world_size: u32,
    estimate: EstimateMemory,
) -> Result<Vec<LoadFailure>, LintError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|source| LintError::Io { what: "starting a runtime".to_owned(), source })?;
    runtime.block_on(async {
        let llm = Arc::new(CheckFactory::new(defaults(world_size), estimate));
        let layouts = Layouts::new(llm, Arc::new(CheckPythonFactory));
        let mut factories: HashMap<String, Arc<dyn BackendFactory>> = backends::builtin();
        factories.extend(layouts.factories());
        let config =
            ServerConfig { repositories: roots.to_vec(), response_cache_bytes: 1 << 20, ..ServerConfig::default() };
        let server = Server::new(config, factories).map_err(|error| LintError::Usage(error.to_string()))?;
        layouts.attach(&server);
        Ok(server.load_all().await.err().unwrap_or_default())
    })
}

fn defaults(world_size: u32) -> LlmDefaults {
    LlmDefaults {
        worker: WorkerSettings {
            device: DeviceChoice::Cpu { threads: 1, first_core: None },
            network: None,
            weight_precision: Default::default(),
            batch_invariant: false,
            sleep_mode: false,
            kv_cache_type: Default::default(),
            kv_host_memory_bytes: 0,
            kv_host_memory_is_share: false,
            step_timeout: Duration::from_secs(10),
            library_dirs: Vec::new(),
            cache_dir: None,
        },
        host_share: None,
        kv_disk: Default::default(),
        world_size,
        ranks_per_node: world_size,
        block_size: 16,
        kv_free_fraction: 0.25,
        max_step_tokens: 512,
        max_inter_token: None,
        weight_updates_dir: None,
        longest_turn: None,
        forced_tokens_per_step: None,
    }
}
