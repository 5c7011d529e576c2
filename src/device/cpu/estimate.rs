//! Estimates the memory of a worker on the CPU, except its weights, from shapes.

use super::KvType;
use kernels::cpu::{Isa, WeightType};
use ops::{AttentionSpec, KvElements, StepLimits};

use super::linear::{Widest, in_panels};
use crate::kv_elements::kv_codes;

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
        let plain = if has_wide_weights { KvType::F32 } else { KvType::Bf16 };
        let kv_type = kv_type(spec.kv_elements, plain);
        Self {
            workspace_bytes: (logits + activations) * size_of::<f32>() + widest.input_bytes(limits.max_tokens),
            block_bytes: block_bytes(spec, kv_type),
        }
    }
}

/// Bytes of a KV block.
pub(crate) fn block_bytes(spec: &AttentionSpec, kv_type: KvType) -> usize {
    spec.block_size * kv_type.position_bytes(2 * spec.kv_heads(), spec.position_elements())
}

/// The type of KV blocks; `plain` is that of numbers as the device computes with them.
pub(crate) fn kv_type(elements: KvElements, plain: KvType) -> KvType {
    kv_codes(elements).map_or(plain, KvType::Codes)
}
