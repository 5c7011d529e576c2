//! The parser of requests as tensors, for the fuzz targets.

use std::time::Duration;

use serving::{InferError, InferRequest, LoadRequest};
use supervision::{DeviceChoice, WeightPrecision, WorkerSettings};

use super::config::{LlmConfig, LlmDefaults};
use super::inputs::{self, Command};

/// Parses requests for one language model.
pub struct LlmInputs(LlmConfig);

impl LlmInputs {
    /// The parser for a model of a repository, of which only `config.pbtxt` and `config.json` are read.
    ///
    /// # Errors
    /// When the configuration is invalid.
    pub fn new(load: &LoadRequest) -> Result<Self, InferError> {
        let defaults = LlmDefaults {
            worker: WorkerSettings {
                device: DeviceChoice::Cpu { threads: 1, first_core: None },
                network: None,
                weight_precision: WeightPrecision::Checkpoint,
                batch_invariant: false,
                sleep_mode: false,
                kv_cache_type: Default::default(),
                kv_host_memory_bytes: 0,
                kv_host_memory_is_share: false,
                step_timeout: Duration::from_secs(1),
                library_dirs: Vec::new(),
                cache_dir: None,
            },
            host_share: None,
            kv_disk: Default::default(),
            world_size: 1,
            ranks_per_node: 1,
            block_size: 16,
            kv_free_fraction: 0.1,
            max_step_tokens: 256,
            max_inter_token: None,
            weight_updates_dir: None,
            longest_turn: None,
            forced_tokens_per_step: None,
        };
        LlmConfig::new(load, &defaults).map(Self)
    }

    /// Parses a request. An accepted request has at most as many sequences as the model has rows.
    ///
    /// # Errors
    /// When the request is invalid.
    pub fn parse(&self, request: &InferRequest) -> Result<(), InferError> {
        if let Command::Generate(parsed) = inputs::parse(&self.0, request)? {
            let (num_sequences, max_rows) = (parsed.generate.num_sequences, self.0.engine.max_rows);
            assert!(num_sequences <= max_rows, "{num_sequences} sequences for {max_rows} rows");
            assert!(parsed.generate.into_sequences().len() <= max_rows);
        }
        Ok(())
    }
}
