use supervision::WeightPrecision;

use super::*;

/// The defaults of a world of one rank.
pub(crate) fn llm_defaults() -> LlmDefaults {
    LlmDefaults {
        worker: llm_config().worker,
        host_share: None,
        kv_disk: KvDisk::default(),
        world_size: 1,
        ranks_per_node: 1,
        block_size: 16,
        kv_free_fraction: 0.1,
        max_step_tokens: 256,
        max_inter_token: None,
        weight_updates_dir: None,
        longest_turn: None,
        forced_tokens_per_step: None,
    }
}

/// A model of one worker and a vocabulary of 100 tokens.
pub(crate) fn llm_config() -> LlmConfig {
    LlmConfig {
        name: "llm".to_owned(),
        checkpoint: PathBuf::new(),
        checkpoint_fingerprint: None,
        drafter: None,
        draft_fingerprint: None,
        worker: WorkerSettings {
            device: DeviceChoice::Cpu { threads: 1, first_core: None },
            network: None,
            weight_precision: WeightPrecision::default(),
            batch_invariant: false,
            sleep_mode: false,
            kv_cache_type: Default::default(),
            kv_host_memory_bytes: 0,
            kv_host_memory_is_share: false,
            step_timeout: std::time::Duration::from_secs(60),
            library_dirs: Vec::new(),
            cache_dir: None,
        },
        host_share: None,
        kv_disk: KvDisk::default(),
        weight_updates_dir: None,
        takes_turns: false,
        tp_size: 1,
        pp_size: 1,
        ep_size: 1,
        num_replicas: 1,
        kv_memory: KvMemory::Tokens(1024),
        engine: EngineConfig { max_rows: 8, max_sequence_len: 256, ..EngineConfig::default() },
        adapters: AdapterSettings::default(),
        queue: QueuePolicy::new(&ModelConfig::default()),
        limits: Limits::default(),
        decoupled: true,
        exclude_input: false,
        outputs: ["output_ids", "sequence_length", "context_logits", "generation_logits"].map(str::to_owned).to_vec(),
        has_placeholders: false,
        logits_type: DataType::Fp32,
        vocab_size: 100,
        check_input_ids: false,
        has_wrapped_ids: Arc::default(),
        has_warned_of_greedy: Arc::default(),
        end_ids: Vec::new(),
        sampling_defaults: SamplingDefaults::default(),
    }
}
