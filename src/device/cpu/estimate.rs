//! Estimates the memory of a worker on the CPU, except its weights, from shapes.

use super::KvType;
use kernels::cpu::{Isa, WeightType};
use ops::{AttentionSpec, StepLimits};

use super::linear::{Widest, in_panels};

pub(crate) struct CpuEstimate {
    pub(crate) workspace_bytes: usize,
    /// Bytes of a KV block.
    pub(crate) block_bytes: usize,
}

impl CpuEstimate {
    /// Whether bf16 weights of linear layers are copied on this processor.
    pub(crate) fn copies_bf16() -> bool {
        in_panels(Isa::detect(), WeightType::Bf16)
    }

    /// For activation buffers with `tensor_cols` columns in total, and linear layers of up to the given numbers of inputs.
    pub(crate) fn new(
        limits: &StepLimits,
        tensor_cols: usize,
        widest: Widest,
        has_wide_weights: bool,
        spec: &AttentionSpec,
    ) -> Self {
        let logits = limits.max_rows * limits.vocab_size;
        let activations = limits.max_tokens * tensor_cols;
        let kv_type = if has_wide_weights { KvType::F32 } else { KvType::Bf16 };
        Self {
            workspace_bytes: (logits + activations) * size_of::<f32>() + widest.input_bytes(limits.max_tokens),
            block_bytes: block_bytes(spec, kv_type),
        }
    }
}

/// Bytes of a KV block.
pub(crate) fn block_bytes(spec: &AttentionSpec, kv_type: KvType) -> usize {
    spec.block_size * 2 * spec.kv_width() * kv_type.size()
}
