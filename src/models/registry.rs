//! The supported architectures, and how each is built.

use crate::names::{Names, QkvNames};

/// A supported architecture: how its configuration is read and the names of its weights.
#[derive(Debug)]
pub(crate) struct Architecture {
    /// The name in `architectures` of `config.json`.
    pub(crate) name: &'static str,
    /// The name in `model_type`.
    pub(crate) model_type: &'static str,
    pub(crate) style: ConfigStyle,
    pub(crate) attention_bias: AttentionBias,
    pub(crate) window: WindowRule,
    /// Whether q and k of each head are normalized.
    pub(crate) head_norms: bool,
    /// Whether the head is the embedding table if `tie_word_embeddings` is absent.
    pub(crate) tied: bool,
    pub(crate) names: &'static Names,
}

/// The fields of `config.json`, and the kinds of positions, norms and MLP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ConfigStyle {
    /// Rotary positions, RMS norms, gated MLP.
    Llama,
    /// Like Llama, but the larger models use ALiBi, and the head of the second generation has normalized rows.
    Baichuan,
    /// Learned positions, layer norms, MLP without a gate.
    Gpt2,
}

/// Which linear layers of attention have biases.
#[derive(Debug, Clone, Copy)]
pub(crate) enum AttentionBias {
    /// Set by a field of `config.json`, else `default`. The output projection has a bias only if q, k, v have one and
    /// `out` is set.
    Field { name: &'static str, default: bool, out: bool },
    /// q, k, v always have biases, the output projection never.
    QkvAlways,
    /// All layers always have biases.
    Always,
    /// No layer has a bias.
    Never,
}

/// How the field `sliding_window` is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WindowRule {
    /// It is ignored.
    Ignored,
    /// It is always used.
    Used,
    /// It is used if `use_sliding_window` is set.
    IfEnabled,
}

const LLAMA_NAMES: Names = Names {
    prefixes: &[""],
    embedding: "model.embed_tokens",
    positions: "",
    layers: "model.layers",
    attention_norm: "input_layernorm",
    qkv: QkvNames::Separate(["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
    head_norms: ["self_attn.q_norm", "self_attn.k_norm"],
    out: "self_attn.o_proj",
    mlp_norm: "post_attention_layernorm",
    gate: "mlp.gate_proj",
    up: "mlp.up_proj",
    down: "mlp.down_proj",
    final_norm: "model.norm",
    head: "lm_head",
    transposed: false,
};

const BAICHUAN_NAMES: Names = Names { qkv: QkvNames::Stacked("self_attn.W_pack"), ..LLAMA_NAMES };

const INTERNLM2_NAMES: Names = Names {
    embedding: "model.tok_embeddings",
    attention_norm: "attention_norm",
    qkv: QkvNames::Grouped("attention.wqkv"),
    out: "attention.wo",
    mlp_norm: "ffn_norm",
    gate: "feed_forward.w1",
    up: "feed_forward.w3",
    down: "feed_forward.w2",
    head: "output",
    ..LLAMA_NAMES
};

const GPT2_NAMES: Names = Names {
    prefixes: &["transformer.", ""], // The first checkpoints were saved without the prefix.
    embedding: "wte",
    positions: "wpe",
    layers: "h",
    attention_norm: "ln_1",
    qkv: QkvNames::Stacked("attn.c_attn"),
    head_norms: ["", ""],
    out: "attn.c_proj",
    mlp_norm: "ln_2",
    gate: "",
    up: "mlp.c_fc",
    down: "mlp.c_proj",
    final_norm: "ln_f",
    head: "lm_head",
    transposed: true,
};

const LLAMA: Architecture = Architecture {
    name: "LlamaForCausalLM",
    model_type: "llama",
    style: ConfigStyle::Llama,
    attention_bias: AttentionBias::Field { name: "attention_bias", default: false, out: true },
    window: WindowRule::Ignored,
    head_norms: false,
    tied: false,
    names: &LLAMA_NAMES,
};

const ARCHITECTURES: &[Architecture] = &[
    LLAMA,
    Architecture {
        name: "MistralForCausalLM",
        model_type: "mistral",
        attention_bias: AttentionBias::Never,
        window: WindowRule::Used,
        ..LLAMA
    },
    Architecture {
        name: "Qwen2ForCausalLM",
        model_type: "qwen2",
        attention_bias: AttentionBias::QkvAlways,
        window: WindowRule::IfEnabled,
        ..LLAMA
    },
    Architecture {
        name: "Qwen3ForCausalLM",
        model_type: "qwen3",
        window: WindowRule::IfEnabled,
        head_norms: true,
        ..LLAMA
    },
    Architecture {
        name: "InternLMForCausalLM",
        model_type: "internlm",
        attention_bias: AttentionBias::Field { name: "bias", default: true, out: true },
        ..LLAMA
    },
    Architecture {
        name: "InternLM2ForCausalLM",
        model_type: "internlm2",
        attention_bias: AttentionBias::Field { name: "bias", default: true, out: true },
        names: &INTERNLM2_NAMES,
        ..LLAMA
    },
    Architecture {
        name: "BaichuanForCausalLM",
        model_type: "baichuan",
        style: ConfigStyle::Baichuan,
        attention_bias: AttentionBias::Never,
        names: &BAICHUAN_NAMES,
        ..LLAMA
    },
    Architecture {
        name: "BaiChuanForCausalLM", // The first model of the family uses this spelling.
        model_type: "baichuan",
        style: ConfigStyle::Baichuan,
        attention_bias: AttentionBias::Never,
        names: &BAICHUAN_NAMES,
        ..LLAMA
    },
    Architecture {
        name: "GPT2LMHeadModel",
        model_type: "gpt2",
        style: ConfigStyle::Gpt2,
        attention_bias: AttentionBias::Always,
        tied: true,
        names: &GPT2_NAMES,
        ..LLAMA
    },
];

/// The names of the supported architectures.
pub fn architectures() -> Vec<&'static str> {
    ARCHITECTURES.iter().map(|architecture| architecture.name).collect()
}

/// The architecture with this name in `architectures`.
pub(crate) fn find(name: &str) -> Option<&'static Architecture> {
    ARCHITECTURES.iter().find(|architecture| architecture.name == name)
}

/// The architecture with this `model_type`.
pub(crate) fn find_by_model_type(model_type: &str) -> Option<&'static Architecture> {
    ARCHITECTURES.iter().find(|architecture| architecture.model_type == model_type)
}
