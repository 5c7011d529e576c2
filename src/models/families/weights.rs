//! The names of each family's weights.

use crate::names::{ExpertLayout, ExpertNames, Names, QkvNames, UpNames};

/// Prefixes of a text model, also as a part of a model that sees images.
const PREFIXES: &[&str] = &["model.", "language_model.model.", "model.language_model."];

pub(super) const LLAMA: Names = Names {
    prefixes: PREFIXES,
    embedding: "embed_tokens",
    positions: "",
    layers: "layers",
    attention_norm: Some("input_layernorm"),
    qkv: QkvNames::Separate(["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
    head_norms: ["self_attn.q_norm", "self_attn.k_norm"],
    out: "self_attn.o_proj",
    attention_branch_norm: None,
    mlp_norm: Some("post_attention_layernorm"),
    up: UpNames::Separate(["mlp.gate_proj", "mlp.up_proj"]),
    down: "mlp.down_proj",
    experts: None,
    mlp_branch_norm: None,
    final_norm: "norm",
    heads: &["lm_head", "language_model.lm_head"],
    transposed: false,
};

/// Attention and feed-forward behind one norm.
pub(super) const ONE_NORM: Names = Names { mlp_norm: None, ..LLAMA };

/// Norms behind attention and feed-forward alone.
pub(super) const NORMS_BEHIND: Names = Names {
    attention_norm: None,
    attention_branch_norm: Some("post_attention_layernorm"),
    mlp_norm: None,
    mlp_branch_norm: Some("post_feedforward_layernorm"),
    ..LLAMA
};

/// Norms before and behind attention and feed-forward.
pub(super) const GEMMA2: Names = Names {
    attention_branch_norm: Some("post_attention_layernorm"),
    mlp_norm: Some("pre_feedforward_layernorm"),
    mlp_branch_norm: Some("post_feedforward_layernorm"),
    ..LLAMA
};

pub(super) const GLM: Names = Names { up: UpNames::Stacked("mlp.gate_up_proj"), ..LLAMA };

pub(super) const GLM4: Names = Names {
    attention_branch_norm: Some("post_self_attn_layernorm"),
    mlp_branch_norm: Some("post_mlp_layernorm"),
    ..GLM
};

pub(super) const PHI3: Names =
    Names { qkv: QkvNames::Stacked("self_attn.qkv_proj"), up: UpNames::Stacked("mlp.gate_up_proj"), ..LLAMA };

pub(super) const PHI: Names = Names {
    out: "self_attn.dense",
    up: UpNames::Plain("mlp.fc1"),
    down: "mlp.fc2",
    final_norm: "final_layernorm",
    ..ONE_NORM
};

/// A feed-forward without a gate.
pub(super) const PLAIN: Names = Names { up: UpNames::Plain("mlp.up_proj"), ..LLAMA };

pub(super) const STARCODER2: Names = Names { up: UpNames::Plain("mlp.c_fc"), down: "mlp.c_proj", ..LLAMA };

pub(super) const GPT_NEOX: Names = Names {
    prefixes: &["gpt_neox."],
    embedding: "embed_in",
    qkv: QkvNames::Grouped("attention.query_key_value"),
    out: "attention.dense",
    up: UpNames::Plain("mlp.dense_h_to_4h"),
    down: "mlp.dense_4h_to_h",
    final_norm: "final_layer_norm",
    heads: &["embed_out", "lm_head"],
    ..LLAMA
};

/// Falcon with one norm for attention and feed-forward.
pub(super) const FALCON: Names = Names {
    prefixes: &["transformer."],
    embedding: "word_embeddings",
    layers: "h",
    qkv: QkvNames::Grouped("self_attention.query_key_value"),
    out: "self_attention.dense",
    mlp_norm: None,
    up: UpNames::Plain("mlp.dense_h_to_4h"),
    down: "mlp.dense_4h_to_h",
    final_norm: "ln_f",
    ..LLAMA
};

/// Falcon with a norm for each.
pub(super) const FALCON_TWO_NORMS: Names =
    Names { attention_norm: Some("ln_attn"), mlp_norm: Some("ln_mlp"), ..FALCON };

pub(super) const FALCON_SERIAL: Names = Names { mlp_norm: Some("post_attention_layernorm"), ..FALCON };

pub(super) const BAICHUAN: Names = Names { qkv: QkvNames::Stacked("self_attn.W_pack"), ..LLAMA };

pub(super) const INTERNLM2: Names = Names {
    embedding: "tok_embeddings",
    attention_norm: Some("attention_norm"),
    qkv: QkvNames::Grouped("attention.wqkv"),
    out: "attention.wo",
    mlp_norm: Some("ffn_norm"),
    up: UpNames::Separate(["feed_forward.w1", "feed_forward.w3"]),
    down: "feed_forward.w2",
    heads: &["output"],
    ..LLAMA
};

pub(super) const GPT2: Names = Names {
    prefixes: &["transformer.", ""], // The first checkpoints were saved without the prefix.
    embedding: "wte",
    positions: "wpe",
    layers: "h",
    attention_norm: Some("ln_1"),
    qkv: QkvNames::Stacked("attn.c_attn"),
    out: "attn.c_proj",
    mlp_norm: Some("ln_2"),
    up: UpNames::Plain("mlp.c_fc"),
    down: "mlp.c_proj",
    final_norm: "ln_f",
    transposed: true,
    ..LLAMA
};

pub(super) const MIXTRAL: Names = Names {
    experts: Some(ExpertNames {
        router: "block_sparse_moe.gate",
        layout: ExpertLayout::Each { prefix: "block_sparse_moe.experts", names: ["w1", "w3", "w2"] },
        shared: None,
    }),
    ..LLAMA
};

pub(super) const QWEN_MOE: Names = Names {
    experts: Some(ExpertNames {
        router: "mlp.gate",
        layout: ExpertLayout::Each { prefix: "mlp.experts", names: ["gate_proj", "up_proj", "down_proj"] },
        shared: Some((
            UpNames::Separate(["mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"]),
            "mlp.shared_expert.down_proj",
            "mlp.shared_expert_gate",
        )),
    }),
    ..LLAMA
};

pub(super) const GRANITE_MOE: Names = Names {
    experts: Some(ExpertNames {
        router: "block_sparse_moe.router.layer",
        layout: ExpertLayout::Stacked(["block_sparse_moe.input_linear", "block_sparse_moe.output_linear"]),
        shared: None,
    }),
    ..LLAMA
};
