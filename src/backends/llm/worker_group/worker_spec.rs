//! The parameters of a worker.

use engine::EngineConfig;
use supervision::{ShmName, WorkerSpec};

use super::super::config::LlmConfig;

pub(super) fn spec(config: &LlmConfig, next_step: u64) -> WorkerSpec {
    WorkerSpec {
        model: config.name.clone(),
        checkpoint: config.checkpoint.clone(),
        settings: config.worker.clone(),
        rank: 0,
        num_local_workers: 1,
        tp_rank: 0,
        tp_size: config.tp_size,
        stage: 0,
        num_stages: config.pp_size,
        expert_groups: config.ep_size,
        nodes: Vec::new(),
        node_names: Vec::new(),
        checkpoint_fingerprint: config.checkpoint_fingerprint.clone(),
        draft_fingerprint: config.draft_fingerprint.clone(),
        group_region: ShmName::default(),
        host_memory: None,
        plan_ring: ShmName::default(),
        output_ring: ShmName::default(),
        ring_bytes: ring_bytes(&config.engine),
        max_step_tokens: config.max_device_tokens(),
        max_rows: config.engine.max_rows,
        max_drafts: config.engine.max_drafts,
        drafter: config.drafter.clone(),
        max_adapters: config.adapters.num_slots,
        max_adapter_rank: config.adapters.max_rank,
        max_sequence_len: config.engine.max_sequence_len,
        block_size: config.engine.block_size,
        kv_memory: config.kv_memory,
        next_step,
    }
}

/// Maximum size of the candidates of one row of a beam search: their number times the bytes of one.
const MAX_CANDIDATES_BYTES: usize = 256 * 16;

/// Maximum size of a message with logits.
const LOGITS_PIECE_BYTES: usize = supervision::MAX_LOGITS_PIECE * size_of::<f32>() + 64;

/// Maximum size of a message with weights of an adapter.
const ADAPTER_PIECE_BYTES: usize = supervision::MAX_ADAPTER_PIECE + 64;

/// Size of the fields beside the words of a mask.
const MASK_HEAD_BYTES: usize = 32;

/// Ring size: twice the largest message, so that one can be written while another is read.
fn ring_bytes(config: &EngineConfig) -> usize {
    let num_masks = config.max_rows * (1 + config.max_drafts);
    let masks_bytes = supervision::MAX_MASK_WORDS * size_of::<u32>() + num_masks * MASK_HEAD_BYTES;
    let pieces_bytes = LOGITS_PIECE_BYTES.max(ADAPTER_PIECE_BYTES).max(masks_bytes);
    let output_bytes = config.max_rows * MAX_CANDIDATES_BYTES + config.max_guess_bytes();
    2 * config.max_plan_bytes().max(output_bytes).max(pieces_bytes)
}
