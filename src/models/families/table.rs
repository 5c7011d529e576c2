//! One row for each architecture. One file: families are compared with each other.

use ops::HeadNormSpan;

use super::{
    AttentionBias, BiasRule, Family, NormRule, WindowRule, adjust, bailing, cohere2_moe, deepseek, experts, falcon_h1,
    gemma4, granite, hunyuan, hybrid, kimi_linear, lfm2, llama4, mimo_v2, mistral4, nemotron_h, older, phimoe, weights,
};

const NEVER: AttentionBias = AttentionBias { qkv: BiasRule::Never, out: BiasRule::Never };
const ALWAYS: AttentionBias = AttentionBias { qkv: BiasRule::Always, out: BiasRule::Always };
const QKV_ALWAYS: AttentionBias = AttentionBias { qkv: BiasRule::Always, out: BiasRule::Never };

/// q, k, v and the output projection have biases if the flag is set.
const fn both(name: &'static str, default: bool) -> AttentionBias {
    let rule = BiasRule::Field { name, default };
    AttentionBias { qkv: rule, out: rule }
}

/// q, k and v have biases if the flag is set.
const fn qkv(name: &'static str, default: bool) -> AttentionBias {
    AttentionBias { qkv: BiasRule::Field { name, default }, out: BiasRule::Never }
}

const LLAMA: Family = Family {
    name: "LlamaForCausalLM",
    model_type: "llama",
    other_model_type: None,
    names: &weights::LLAMA,
    aliases: &[],
    defaults: "{}",
    is_nested: false,
    may_be_flat: false,
    norm: NormRule::Rms,
    attention_bias: both("attention_bias", false),
    mlp_bias: BiasRule::Field { name: "mlp_bias", default: false },
    inner_factor: None,
    window: WindowRule::Never,
    head_norm: None,
    partial_rotary: None,
    is_interleaved: false,
    is_parallel: false,
    quantizations: &[],
    adjust: adjust::nothing,
};

/// A Llama whose feed-forward never has biases.
const WITHOUT_MLP_BIAS: Family = Family { mlp_bias: BiasRule::Never, ..LLAMA };

const LLAMA4: Family = Family {
    name: "Llama4ForCausalLM",
    model_type: "llama4_text",
    names: &weights::LLAMA4,
    aliases: &[("num_experts", "num_local_experts")],
    is_interleaved: true,
    defaults: r#"{"vocab_size": 202048, "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
                  "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
                  "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "num_experts": 16, "num_experts_per_tok": 1,
                  "attention_chunk_size": 8192, "rope_theta": 500000.0}"#,
    adjust: llama4::llama4,
    ..WITHOUT_MLP_BIAS
};

const MISTRAL: Family = Family {
    name: "MistralForCausalLM",
    model_type: "mistral",
    attention_bias: NEVER,
    window: WindowRule::AllLayers,
    defaults: r#"{"sliding_window": 4096, "max_position_embeddings": 131072}"#,
    ..WITHOUT_MLP_BIAS
};

const QWEN2: Family = Family {
    name: "Qwen2ForCausalLM",
    model_type: "qwen2",
    attention_bias: QKV_ALWAYS,
    window: WindowRule::IfEnabled,
    defaults: r#"{"max_position_embeddings": 32768}"#,
    ..WITHOUT_MLP_BIAS
};

const QWEN3: Family = Family {
    name: "Qwen3ForCausalLM",
    model_type: "qwen3",
    window: WindowRule::IfEnabled,
    head_norm: Some(HeadNormSpan::Head),
    defaults: r#"{"head_dim": 128, "max_position_embeddings": 32768}"#,
    ..WITHOUT_MLP_BIAS
};

const GEMMA: Family = Family {
    name: "GemmaForCausalLM",
    model_type: "gemma",
    norm: NormRule::RmsFromOne,
    defaults: r#"{"head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": true,
                  "max_position_embeddings": 8192}"#,
    adjust: adjust::gemma,
    ..WITHOUT_MLP_BIAS
};

const GEMMA3: Family = Family {
    name: "Gemma3ForCausalLM",
    model_type: "gemma3_text",
    names: &weights::GEMMA2,
    aliases: &[("hidden_act", "hidden_activation")],
    window: WindowRule::Pattern(6),
    head_norm: Some(HeadNormSpan::Head),
    defaults: r#"{"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
                  "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": true, "sliding_window": 4096,
                  "max_position_embeddings": 131072, "query_pre_attn_scalar": 256}"#,
    adjust: adjust::gemma3,
    ..GEMMA
};

const GEMMA4: Family = Family {
    name: "Gemma4ForCausalLM",
    model_type: "gemma4_text",
    names: &weights::GEMMA4,
    norm: NormRule::Rms,
    defaults: r#"{"vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
                  "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
                  "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": true, "sliding_window": 512,
                  "max_position_embeddings": 131072, "vocab_size_per_layer_input": 262144,
                  "hidden_size_per_layer_input": 256,
                  "rope_parameters": {
                      "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                      "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25,
                                         "rope_theta": 1000000.0}}}"#,
    adjust: gemma4::gemma4,
    ..GEMMA3
};

const GEMMA4_UNIFIED: Family = Family {
    name: "Gemma4UnifiedForCausalLM",
    model_type: "gemma4_unified_text",
    defaults: r#"{"vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
                  "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
                  "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": true, "sliding_window": 1024,
                  "max_position_embeddings": 262144, "hidden_size_per_layer_input": 0,
                  "rope_parameters": {
                      "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                      "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25,
                                         "rope_theta": 1000000.0}}}"#,
    adjust: gemma4::gemma4_unified,
    ..GEMMA4
};

const PHI3: Family = Family {
    name: "Phi3ForCausalLM",
    model_type: "phi3",
    names: &weights::PHI3,
    attention_bias: NEVER,
    window: WindowRule::AllLayers,
    partial_rotary: Some(1.0),
    defaults: r#"{"rms_norm_eps": 1e-5, "max_position_embeddings": 4096}"#,
    adjust: adjust::phi3,
    ..WITHOUT_MLP_BIAS
};

const PHI4_MULTIMODAL: Family = Family {
    name: "Phi4MultimodalForCausalLM",
    model_type: "phi4_multimodal",
    defaults: r#"{"vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
                  "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
                  "max_position_embeddings": 131072, "original_max_position_embeddings": 4096}"#,
    adjust: adjust::phi4_multimodal,
    ..PHI3
};

/// Sizes of the recurrent layers of Qwen3.5 where `config.json` has none, and what all of these models share.
const QWEN3_5: Family = Family {
    name: "Qwen3_5ForCausalLM",
    model_type: "qwen3_5_text",
    names: &weights::QWEN3_5,
    norm: NormRule::RmsFromOne,
    head_norm: Some(HeadNormSpan::Head),
    partial_rotary: Some(0.25),
    defaults: r#"{"vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32,
                  "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256,
                  "max_position_embeddings": 32768, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
                  "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32}"#,
    adjust: hybrid::qwen3_5,
    ..WITHOUT_MLP_BIAS
};

const QWEN3_5_MOE: Family = Family {
    name: "Qwen3_5MoeForCausalLM",
    model_type: "qwen3_5_moe_text",
    names: &weights::QWEN3_5_MOE,
    // There is no dense layer, so its width has no effect.
    defaults: r#"{"vocab_size": 248320, "hidden_size": 2048, "intermediate_size": 512, "num_hidden_layers": 40,
                  "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
                  "max_position_embeddings": 32768, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
                  "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
                  "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts_per_tok": 8,
                  "num_experts": 256}"#,
    adjust: hybrid::qwen3_5_moe,
    ..QWEN3_5
};

const OLMO2: Family = Family {
    name: "Olmo2ForCausalLM",
    model_type: "olmo2",
    names: &weights::NORMS_BEHIND,
    defaults: r#"{"rms_norm_eps": 1e-5}"#,
    head_norm: Some(HeadNormSpan::AllHeads),
    ..WITHOUT_MLP_BIAS
};

const COHERE: Family = Family {
    name: "CohereForCausalLM",
    model_type: "cohere",
    names: &weights::ONE_NORM,
    norm: NormRule::LayerWithoutBias,
    is_interleaved: true,
    is_parallel: true,
    defaults: r#"{"logit_scale": 0.0625, "tie_word_embeddings": true, "max_position_embeddings": 8192,
                  "rope_theta": 500000.0}"#,
    adjust: adjust::cohere,
    ..WITHOUT_MLP_BIAS
};

const GLM: Family = Family {
    name: "GlmForCausalLM",
    model_type: "glm",
    names: &weights::GLM,
    attention_bias: qkv("attention_bias", true),
    is_interleaved: true,
    partial_rotary: Some(0.5),
    defaults: r#"{"num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072,
                  "rms_norm_eps": 1.5625e-07}"#,
    ..WITHOUT_MLP_BIAS
};

const DEEPSEEK_V3: Family = Family {
    name: "DeepseekV3ForCausalLM",
    model_type: "deepseek_v3",
    names: &weights::DEEPSEEK_V3,
    aliases: &[("num_experts", "n_routed_experts"), ("head_dim", "qk_rope_head_dim")],
    defaults: r#"{"vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
                  "num_attention_heads": 128, "num_key_value_heads": 128, "num_experts": 256,
                  "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 2048,
                  "first_k_dense_replace": 3, "n_group": 8,
                  "topk_group": 4, "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "q_lora_rank": 1536,
                  "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "max_position_embeddings": 4096}"#,
    adjust: deepseek::deepseek_v3,
    ..WITHOUT_MLP_BIAS
};

/// The text model is DeepSeek V3's, or Kimi K2's, which has its shape.
const KIMI_K25: Family = Family {
    name: "KimiK25ForConditionalGeneration",
    model_type: "kimi_k25",
    is_nested: true,
    defaults: r#"{"tie_word_embeddings": true}"#,
    ..DEEPSEEK_V3
};

const EXAONE4: Family = Family {
    name: "Exaone4ForCausalLM",
    model_type: "exaone4",
    names: &weights::NORMS_BEHIND,
    attention_bias: NEVER,
    window: WindowRule::Pattern(4),
    head_norm: Some(HeadNormSpan::Head),
    defaults: r#"{"rms_norm_eps": 1e-5, "sliding_window": 4096}"#,
    adjust: adjust::exaone4,
    ..WITHOUT_MLP_BIAS
};

const GLM4V: Family = Family {
    name: "Glm4vForConditionalGeneration",
    model_type: "glm4v",
    names: &weights::GLM4,
    is_nested: true,
    attention_bias: QKV_ALWAYS,
    partial_rotary: Some(1.0),
    defaults: r#"{"vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 13696, "num_hidden_layers": 40,
                  "num_attention_heads": 32, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
                  "max_position_embeddings": 32768}"#,
    adjust: adjust::glm4v,
    ..GLM
};

const PHIMOE: Family = Family {
    name: "PhimoeForCausalLM",
    model_type: "phimoe",
    names: &weights::MIXTRAL,
    aliases: &[("num_experts", "num_local_experts"), ("layer_norm_eps", "rms_norm_eps")],
    norm: NormRule::Layer,
    window: WindowRule::AllLayers,
    defaults: r#"{"vocab_size": 32064, "hidden_size": 4096, "intermediate_size": 6400, "num_hidden_layers": 32,
                  "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
                  "num_experts": 16, "num_experts_per_tok": 2, "rope_theta": 1000000.0}"#,
    adjust: phimoe::phimoe,
    ..WITHOUT_MLP_BIAS
};

const BAICHUAN: Family = Family {
    name: "BaichuanForCausalLM",
    model_type: "baichuan",
    attention_bias: NEVER,
    names: &weights::BAICHUAN,
    adjust: adjust::baichuan,
    ..LLAMA
};

const LFM2: Family = Family {
    name: "Lfm2ForCausalLM",
    model_type: "lfm2",
    names: &weights::LFM2,
    aliases: &[
        ("rms_norm_eps", "norm_eps"),
        ("intermediate_size", "block_ff_dim"),
        ("tie_word_embeddings", "tie_embedding"),
    ],
    attention_bias: NEVER,
    head_norm: Some(HeadNormSpan::Head),
    defaults: r#"{"vocab_size": 65536, "hidden_size": 2560, "intermediate_size": 12288, "num_hidden_layers": 32,
                  "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 128000,
                  "conv_L_cache": 3, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0, "rms_norm_eps": 1e-5,
                  "tie_word_embeddings": true, "rope_theta": 1000000.0}"#,
    adjust: lfm2::lfm2,
    ..WITHOUT_MLP_BIAS
};

pub(super) const FAMILIES: &[Family] = &[
    LLAMA,
    LLAMA4,
    Family { name: "Llama4ForConditionalGeneration", model_type: "llama4", is_nested: true, ..LLAMA4 },
    MISTRAL,
    Family {
        name: "Mistral3ForConditionalGeneration",
        model_type: "mistral3",
        is_nested: true,
        defaults: r#"{"sliding_window": 4096, "max_position_embeddings": 131072, "tie_word_embeddings": true}"#,
        ..MISTRAL
    },
    Family {
        name: "Ministral3ForCausalLM",
        model_type: "ministral3",
        defaults: r#"{"head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
                      "max_position_embeddings": 262144,
                      "rope_parameters": {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0,
                                          "original_max_position_embeddings": 16384, "mscale": 1.0,
                                          "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}}"#,
        adjust: adjust::ministral3,
        ..MISTRAL
    },
    Family {
        name: "MinistralForCausalLM",
        model_type: "ministral",
        window: WindowRule::Listed,
        adjust: adjust::ministral,
        ..MISTRAL
    },
    QWEN2,
    Family {
        name: "Qwen2_5_VLForConditionalGeneration",
        model_type: "qwen2_5_vl",
        is_nested: true,
        may_be_flat: true,
        defaults: r#"{"max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0}"#,
        adjust: adjust::qwen2_5_vl,
        ..QWEN2
    },
    QWEN3,
    Family {
        name: "Qwen3VLForConditionalGeneration",
        model_type: "qwen3_vl",
        is_nested: true,
        attention_bias: both("attention_bias", false),
        window: WindowRule::Never,
        defaults: r#"{"head_dim": 128, "max_position_embeddings": 128000, "rope_theta": 500000.0}"#,
        adjust: adjust::qwen_vl,
        ..QWEN3
    },
    GEMMA,
    Family {
        name: "Gemma2ForCausalLM",
        model_type: "gemma2",
        window: WindowRule::Pattern(2),
        head_norm: None,
        defaults: r#"{"num_key_value_heads": 4, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
                      "tie_word_embeddings": true, "sliding_window": 4096, "max_position_embeddings": 8192,
                      "query_pre_attn_scalar": 256, "final_logit_softcapping": 30.0,
                      "attn_logit_softcapping": 50.0}"#,
        adjust: adjust::gemma2,
        ..GEMMA3
    },
    Family {
        name: "VaultGemmaForCausalLM",
        model_type: "vaultgemma",
        names: &weights::VAULT_GEMMA,
        window: WindowRule::Pattern(2),
        head_norm: None,
        defaults: r#"{"num_key_value_heads": 4, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
                      "tie_word_embeddings": true, "sliding_window": 4096, "max_position_embeddings": 8192,
                      "query_pre_attn_scalar": 256, "final_logit_softcapping": 30.0,
                      "attn_logit_softcapping": 50.0}"#,
        adjust: adjust::gemma2,
        ..GEMMA3
    },
    GEMMA3,
    Family { name: "Gemma3ForConditionalGeneration", model_type: "gemma3", is_nested: true, ..GEMMA3 },
    GEMMA4,
    Family { name: "Gemma4ForConditionalGeneration", model_type: "gemma4", is_nested: true, ..GEMMA4 },
    GEMMA4_UNIFIED,
    Family {
        name: "Gemma4UnifiedForConditionalGeneration",
        model_type: "gemma4_unified",
        is_nested: true,
        ..GEMMA4_UNIFIED
    },
    PHI3,
    PHI4_MULTIMODAL,
    // The publisher's form, whose layers have products for images and speech beside those for texts.
    Family { name: "Phi4MMForCausalLM", model_type: "phi4mm", names: &weights::PHI4_MM, ..PHI4_MULTIMODAL },
    Family {
        name: "PhiForCausalLM",
        model_type: "phi",
        names: &weights::PHI,
        norm: NormRule::Layer,
        attention_bias: ALWAYS,
        mlp_bias: BiasRule::Always,
        partial_rotary: Some(0.5),
        is_parallel: true,
        defaults: r#"{"hidden_act": "gelu_new"}"#,
        adjust: adjust::phi,
        ..LLAMA
    },
    Family { name: "GraniteForCausalLM", model_type: "granite", adjust: granite::granite, ..LLAMA },
    Family {
        name: "GraniteSWAForCausalLM",
        model_type: "granite_swa",
        names: &weights::GRANITE_SWA,
        window: WindowRule::PatternFromFirst(4),
        defaults: r#"{"vocab_size": 100352, "hidden_size": 2560, "intermediate_size": 8192, "num_hidden_layers": 24,
                      "num_attention_heads": 20, "num_key_value_heads": 4, "max_position_embeddings": 8192,
                      "rms_norm_eps": 1e-5, "tie_word_embeddings": true, "sliding_window": 128}"#,
        adjust: granite::granite_swa,
        ..LLAMA
    },
    Family { name: "HyperCLOVAXForCausalLM", model_type: "hyperclovax", adjust: adjust::hyperclovax, ..LLAMA },
    Family { name: "OlmoForCausalLM", model_type: "olmo", norm: NormRule::LayerWithoutWeight, ..WITHOUT_MLP_BIAS },
    OLMO2,
    Family {
        name: "Olmo3ForCausalLM",
        model_type: "olmo3",
        window: WindowRule::Pattern(4),
        defaults: r#"{"rms_norm_eps": 1e-5, "sliding_window": 4096}"#,
        adjust: adjust::olmo3,
        ..OLMO2
    },
    COHERE,
    Family {
        name: "Cohere2ForCausalLM",
        model_type: "cohere2",
        window: WindowRule::Pattern(4),
        defaults: r#"{"logit_scale": 0.0625, "tie_word_embeddings": true, "max_position_embeddings": 8192,
                      "sliding_window": 4096}"#,
        adjust: adjust::cohere2,
        ..COHERE
    },
    Family {
        name: "Cohere2MoeForCausalLM",
        model_type: "cohere2_moe",
        names: &weights::COHERE2_MOE,
        window: WindowRule::Pattern(4),
        defaults: r#"{"vocab_size": 256000, "hidden_size": 8192, "intermediate_size": 22528, "num_hidden_layers": 40,
                      "num_attention_heads": 64, "head_dim": 128, "num_experts": 8, "num_experts_per_tok": 2,
                      "logit_scale": 0.0625, "tie_word_embeddings": true, "max_position_embeddings": 8192,
                      "sliding_window": 4096}"#,
        adjust: cohere2_moe::cohere2_moe,
        ..COHERE
    },
    Family {
        name: "SmolLM3ForCausalLM",
        model_type: "smollm3",
        window: WindowRule::IfEnabled,
        defaults: r#"{"num_key_value_heads": 4, "rope_theta": 2000000.0, "tie_word_embeddings": true,
                      "max_position_embeddings": 32768}"#,
        adjust: adjust::smollm3,
        ..LLAMA
    },
    GLM,
    Family { name: "Glm4ForCausalLM", model_type: "glm4", names: &weights::GLM4, ..GLM },
    GLM4V,
    Family { name: "Glm46VForConditionalGeneration", model_type: "glm46v", ..GLM4V },
    Family {
        name: "StableLmForCausalLM",
        model_type: "stablelm",
        names: &weights::STABLELM,
        norm: NormRule::Layer,
        attention_bias: qkv("use_qkv_bias", false),
        partial_rotary: Some(0.25),
        defaults: r#"{"max_position_embeddings": 4096}"#,
        adjust: adjust::stablelm,
        ..WITHOUT_MLP_BIAS
    },
    Family {
        name: "GPTNeoXForCausalLM",
        model_type: "gpt_neox",
        names: &weights::GPT_NEOX,
        aliases: &[("partial_rotary_factor", "rotary_pct"), ("rope_theta", "rotary_emb_base")],
        norm: NormRule::Layer,
        attention_bias: both("attention_bias", true),
        mlp_bias: BiasRule::Always,
        partial_rotary: Some(0.25),
        defaults: r#"{"hidden_act": "gelu"}"#,
        adjust: adjust::gpt_neox,
        ..LLAMA
    },
    Family {
        name: "FalconForCausalLM",
        model_type: "falcon",
        names: &weights::FALCON,
        aliases: &[
            ("num_attention_heads", "n_head"),
            ("num_hidden_layers", "n_layer"),
            ("num_key_value_heads", "num_kv_heads"),
            ("intermediate_size", "ffn_hidden_size"),
            ("hidden_act", "activation"),
            ("layer_norm_eps", "layer_norm_epsilon"),
        ],
        norm: NormRule::Layer,
        attention_bias: both("bias", false),
        mlp_bias: BiasRule::Field { name: "bias", default: false },
        inner_factor: Some(4),
        is_parallel: true,
        defaults: r#"{"hidden_act": "gelu", "tie_word_embeddings": true}"#,
        adjust: adjust::falcon,
        ..LLAMA
    },
    Family {
        name: "Starcoder2ForCausalLM",
        model_type: "starcoder2",
        names: &weights::STARCODER2,
        aliases: &[("layer_norm_eps", "norm_epsilon")],
        norm: NormRule::Layer,
        attention_bias: both("use_bias", true),
        mlp_bias: BiasRule::Field { name: "use_bias", default: true },
        window: WindowRule::AllLayers,
        defaults: r#"{"num_key_value_heads": 2, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": true,
                      "max_position_embeddings": 4096}"#,
        adjust: adjust::starcoder2,
        ..LLAMA
    },
    Family {
        name: "NemotronForCausalLM",
        model_type: "nemotron",
        names: &weights::PLAIN,
        aliases: &[("layer_norm_eps", "norm_eps")],
        norm: NormRule::LayerFromOne,
        partial_rotary: Some(0.5),
        defaults: r#"{"hidden_act": "relu2", "max_position_embeddings": 4096}"#,
        ..LLAMA
    },
    EXAONE4,
    Family { name: "Exaone4_5_ForConditionalGeneration", model_type: "exaone4_5", is_nested: true, ..EXAONE4 },
    Family {
        name: "CwmForCausalLM",
        model_type: "cwm",
        attention_bias: NEVER,
        window: WindowRule::PatternFromFirst(4),
        defaults: r#"{"head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "sliding_window": 8192,
                      "max_position_embeddings": 131072, "rope_theta": 1000000.0,
                      "rope_parameters": {"rope_type": "llama3", "rope_theta": 1000000.0, "factor": 16.0,
                                          "original_max_position_embeddings": 8192, "low_freq_factor": 1.0,
                                          "high_freq_factor": 4.0}}"#,
        ..LLAMA
    },
    Family {
        name: "Jais2ForCausalLM",
        model_type: "jais2",
        names: &weights::PLAIN,
        norm: NormRule::Layer,
        attention_bias: both("attention_bias", true),
        mlp_bias: BiasRule::Field { name: "mlp_bias", default: true },
        defaults: r#"{"hidden_act": "relu2", "max_position_embeddings": 8192}"#,
        ..LLAMA
    },
    Family {
        name: "NanoChatForCausalLM",
        model_type: "nanochat",
        names: &weights::NANOCHAT,
        norm: NormRule::RmsWithoutWeight,
        head_norm: Some(HeadNormSpan::Head),
        defaults: r#"{"hidden_act": "relu2", "final_logit_softcapping": 15.0}"#,
        adjust: older::nanochat,
        ..WITHOUT_MLP_BIAS
    },
    Family {
        name: "OPTForCausalLM",
        model_type: "opt",
        names: &weights::OPT,
        aliases: &[("intermediate_size", "ffn_dim"), ("hidden_act", "activation_function")],
        norm: NormRule::Layer,
        attention_bias: both("enable_bias", true),
        mlp_bias: BiasRule::Field { name: "enable_bias", default: true },
        defaults: r#"{"hidden_act": "relu", "tie_word_embeddings": true}"#,
        adjust: older::opt,
        ..LLAMA
    },
    Family {
        name: "BloomForCausalLM",
        model_type: "bloom",
        names: &weights::BLOOM,
        aliases: &[
            ("hidden_size", "n_embed"),
            ("num_attention_heads", "n_head"),
            ("num_hidden_layers", "n_layer"),
            ("layer_norm_eps", "layer_norm_epsilon"),
        ],
        norm: NormRule::Layer,
        attention_bias: ALWAYS,
        mlp_bias: BiasRule::Always,
        inner_factor: Some(4),
        defaults: r#"{"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": true}"#,
        adjust: older::bloom,
        ..LLAMA
    },
    Family {
        name: "ArceeForCausalLM",
        model_type: "arcee",
        names: &weights::PLAIN,
        defaults: r#"{"hidden_act": "relu2", "rms_norm_eps": 1e-5, "max_position_embeddings": 4096}"#,
        ..LLAMA
    },
    Family {
        name: "ApertusForCausalLM",
        model_type: "apertus",
        names: &weights::APERTUS,
        head_norm: Some(HeadNormSpan::Head),
        defaults: r#"{"hidden_act": "xielu", "rms_norm_eps": 1e-5, "max_position_embeddings": 65536,
                      "rope_theta": 12000000.0,
                      "rope_parameters": {"rope_type": "llama3", "rope_theta": 12000000.0, "factor": 8.0,
                                          "original_max_position_embeddings": 8192, "low_freq_factor": 1.0,
                                          "high_freq_factor": 4.0}}"#,
        adjust: adjust::apertus,
        ..WITHOUT_MLP_BIAS
    },
    Family {
        name: "SeedOssForCausalLM",
        model_type: "seed_oss",
        attention_bias: AttentionBias {
            qkv: BiasRule::Field { name: "attention_bias", default: true },
            out: BiasRule::Field { name: "attention_out_bias", default: false },
        },
        defaults: r#"{"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524288}"#,
        ..LLAMA
    },
    Family {
        name: "HeliumForCausalLM",
        model_type: "helium",
        is_interleaved: true,
        attention_bias: qkv("attention_bias", false),
        defaults: r#"{"num_key_value_heads": 20, "head_dim": 128, "rms_norm_eps": 1e-8, "rope_theta": 100000.0,
                      "max_position_embeddings": 4096}"#,
        ..LLAMA
    },
    Family {
        name: "Ernie4_5ForCausalLM",
        model_type: "ernie4_5",
        is_interleaved: true,
        attention_bias: both("use_bias", false),
        mlp_bias: BiasRule::Field { name: "use_bias", default: false },
        defaults: r#"{"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
                      "tie_word_embeddings": true, "max_position_embeddings": 131072}"#,
        ..LLAMA
    },
    Family {
        name: "MixtralForCausalLM",
        model_type: "mixtral",
        names: &weights::MIXTRAL,
        aliases: &[("num_experts", "num_local_experts")],
        defaults: r#"{"num_experts": 8, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0,
                      "num_key_value_heads": 8, "max_position_embeddings": 131072}"#,
        adjust: experts::mixtral,
        ..MISTRAL
    },
    Family {
        name: "GptOssForCausalLM",
        model_type: "gpt_oss",
        names: &weights::GPT_OSS,
        aliases: &[("num_experts", "num_local_experts")],
        attention_bias: both("attention_bias", true),
        window: WindowRule::Pattern(2),
        quantizations: &["mxfp4"],
        defaults: r#"{"vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
                      "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5,
                      "num_experts": 128, "num_experts_per_tok": 4, "sliding_window": 128,
                      "max_position_embeddings": 131072, "rope_theta": 150000.0,
                      "rope_parameters": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                                          "truncate": false, "original_max_position_embeddings": 4096,
                                          "rope_theta": 150000.0}}"#,
        adjust: experts::gpt_oss,
        ..WITHOUT_MLP_BIAS
    },
    Family {
        name: "Qwen2MoeForCausalLM",
        model_type: "qwen2_moe",
        names: &weights::QWEN_MOE,
        attention_bias: qkv("qkv_bias", true),
        window: WindowRule::IfEnabled,
        defaults: r#"{"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
                      "shared_expert_intermediate_size": 5632, "max_position_embeddings": 32768}"#,
        adjust: experts::qwen2_moe,
        ..WITHOUT_MLP_BIAS
    },
    Family {
        name: "Qwen3MoeForCausalLM",
        model_type: "qwen3_moe",
        names: &weights::QWEN_MOE,
        aliases: &[("num_experts", "num_local_experts")],
        window: WindowRule::IfEnabled,
        head_norm: Some(HeadNormSpan::Head),
        defaults: r#"{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
                      "num_key_value_heads": 4, "max_position_embeddings": 32768}"#,
        adjust: experts::qwen_moe,
        ..WITHOUT_MLP_BIAS
    },
    Family {
        name: "Qwen3VLMoeForConditionalGeneration",
        model_type: "qwen3_vl_moe",
        is_nested: true,
        attention_bias: both("attention_bias", false),
        names: &weights::QWEN3_VL_MOE,
        aliases: &[("num_experts", "num_local_experts")],
        head_norm: Some(HeadNormSpan::Head),
        defaults: r#"{"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
                      "num_key_value_heads": 16, "max_position_embeddings": 128000, "rope_theta": 500000.0}"#,
        adjust: experts::qwen3_vl_moe,
        ..WITHOUT_MLP_BIAS
    },
    Family {
        name: "Qwen3NextForCausalLM",
        model_type: "qwen3_next",
        names: &weights::QWEN3_NEXT,
        defaults: r#"{"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 48,
                      "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
                      "max_position_embeddings": 32768, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
                      "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
                      "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
                      "num_experts_per_tok": 10, "num_experts": 512, "norm_topk_prob": true}"#,
        adjust: hybrid::qwen3_next,
        ..QWEN3_5
    },
    QWEN3_5,
    Family { name: "Qwen3_5ForConditionalGeneration", model_type: "qwen3_5", is_nested: true, ..QWEN3_5 },
    QWEN3_5_MOE,
    Family { name: "Qwen3_5MoeForConditionalGeneration", model_type: "qwen3_5_moe", is_nested: true, ..QWEN3_5_MOE },
    Family {
        name: "OlmoeForCausalLM",
        model_type: "olmoe",
        names: &weights::QWEN_MOE,
        head_norm: Some(HeadNormSpan::AllHeads),
        defaults: r#"{"num_experts": 64, "num_experts_per_tok": 8, "rms_norm_eps": 1e-5,
                      "max_position_embeddings": 4096}"#,
        adjust: experts::olmoe,
        ..WITHOUT_MLP_BIAS
    },
    Family {
        name: "FlexOlmoForCausalLM",
        model_type: "flex_olmo",
        names: &weights::FLEX_OLMO,
        head_norm: Some(HeadNormSpan::AllHeads),
        defaults: r#"{"num_experts": 7, "num_experts_per_tok": 5, "max_position_embeddings": 4096,
                      "rope_theta": 500000.0}"#,
        adjust: experts::olmoe,
        ..WITHOUT_MLP_BIAS
    },
    Family {
        name: "Glm4MoeForCausalLM",
        model_type: "glm4_moe",
        names: &weights::DEEPSEEK_MOE,
        aliases: &[("num_experts", "n_routed_experts")],
        attention_bias: qkv("attention_bias", false),
        head_norm: Some(HeadNormSpan::Head),
        partial_rotary: Some(0.5),
        defaults: r#"{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "n_shared_experts": 1,
                      "first_k_dense_replace": 1, "norm_topk_prob": true, "num_key_value_heads": 8,
                      "rms_norm_eps": 1e-5, "max_position_embeddings": 131072}"#,
        adjust: experts::glm4_moe,
        ..WITHOUT_MLP_BIAS
    },
    Family {
        name: "BailingMoeV2ForCausalLM",
        model_type: "bailing_moe_v2",
        names: &weights::BAILING_MOE_V2,
        attention_bias: AttentionBias {
            qkv: BiasRule::Field { name: "use_qkv_bias", default: false },
            out: BiasRule::Field { name: "use_bias", default: false },
        },
        head_norm: Some(HeadNormSpan::Head),
        partial_rotary: Some(1.0),
        adjust: bailing::bailing_moe_v2,
        ..WITHOUT_MLP_BIAS
    },
    Family {
        name: "DeepseekV2ForCausalLM",
        model_type: "deepseek_v2",
        names: &weights::DEEPSEEK_V2,
        // Heads have parts of several sizes; rotations are those of one.
        aliases: &[("num_experts", "n_routed_experts"), ("head_dim", "qk_rope_head_dim")],
        mlp_bias: BiasRule::Field { name: "mlp_bias", default: false },
        defaults: r#"{"vocab_size": 102400, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
                      "num_attention_heads": 32, "num_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407,
                      "first_k_dense_replace": 0, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
                      "qk_rope_head_dim": 64, "v_head_dim": 128, "max_position_embeddings": 2048}"#,
        adjust: deepseek::deepseek_v2,
        ..LLAMA
    },
    Family {
        name: "Glm4vMoeForConditionalGeneration",
        model_type: "glm4v_moe",
        is_nested: true,
        names: &weights::DEEPSEEK_MOE,
        aliases: &[("num_experts", "n_routed_experts")],
        attention_bias: qkv("attention_bias", true),
        partial_rotary: Some(0.5),
        defaults: r#"{"vocab_size": 151424, "hidden_size": 4096, "intermediate_size": 10944, "num_hidden_layers": 46,
                      "num_attention_heads": 96, "num_key_value_heads": 8, "num_experts": 128,
                      "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "n_shared_experts": 1,
                      "first_k_dense_replace": 1, "norm_topk_prob": true, "rms_norm_eps": 1e-5,
                      "max_position_embeddings": 65536}"#,
        adjust: experts::glm4v_moe,
        ..WITHOUT_MLP_BIAS
    },
    // Kimi K2 has its shape.
    Family { other_model_type: Some("kimi_k2"), ..DEEPSEEK_V3 },
    KIMI_K25,
    Family { name: "Kimi_K25ForConditionalGeneration", ..KIMI_K25 }, // The name in transformers.
    Family {
        name: "Glm4MoeLiteForCausalLM",
        model_type: "glm4_moe_lite",
        partial_rotary: Some(1.0),
        defaults: r#"{"vocab_size": 154880, "hidden_size": 2048, "intermediate_size": 10240, "num_hidden_layers": 47,
                      "num_attention_heads": 20, "num_key_value_heads": 20, "num_experts": 64,
                      "num_experts_per_tok": 4, "n_shared_experts": 1, "moe_intermediate_size": 1536,
                      "routed_scaling_factor": 1.8, "kv_lora_rank": 512, "q_lora_rank": 768, "qk_nope_head_dim": 192,
                      "qk_rope_head_dim": 64, "v_head_dim": 256, "rms_norm_eps": 1e-5,
                      "max_position_embeddings": 202752}"#,
        adjust: deepseek::glm4_moe_lite,
        ..DEEPSEEK_V3
    },
    Family {
        name: "Mistral4ForCausalLM",
        model_type: "mistral4",
        names: &weights::MISTRAL4,
        defaults: r#"{"vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
                      "num_attention_heads": 32, "num_key_value_heads": 32, "num_experts": 128,
                      "num_experts_per_tok": 4, "n_shared_experts": 1, "moe_intermediate_size": 2048,
                      "kv_lora_rank": 256, "q_lora_rank": 1024, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64,
                      "v_head_dim": 128, "max_position_embeddings": 1048576}"#,
        adjust: mistral4::mistral4,
        ..DEEPSEEK_V3
    },
    Family {
        name: "YoutuForCausalLM",
        model_type: "youtu",
        names: &weights::LATENT,
        defaults: r#"{"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 32,
                      "num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512, "q_lora_rank": 1536,
                      "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "tie_word_embeddings": true,
                      "max_position_embeddings": 131072}"#,
        adjust: deepseek::youtu,
        ..DEEPSEEK_V3
    },
    Family {
        name: "MiniCPM3ForCausalLM",
        model_type: "minicpm3",
        names: &weights::LATENT,
        aliases: &[("head_dim", "qk_rope_head_dim")],
        defaults: r#"{"vocab_size": 73448, "hidden_size": 2560, "intermediate_size": 6400, "num_hidden_layers": 62,
                      "num_attention_heads": 40, "num_key_value_heads": 40, "kv_lora_rank": 256, "q_lora_rank": 768,
                      "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "rms_norm_eps": 1e-5,
                      "tie_word_embeddings": true, "max_position_embeddings": 32768}"#,
        adjust: deepseek::minicpm3,
        ..LLAMA
    },
    Family {
        name: "Dots1ForCausalLM",
        model_type: "dots1",
        names: &weights::DEEPSEEK_MOE,
        aliases: &[("num_experts", "n_routed_experts")],
        head_norm: Some(HeadNormSpan::Head),
        window: WindowRule::IfEnabled,
        defaults: r#"{"use_sliding_window": true, "sliding_window": 4096, "max_window_layers": 62,
                      "max_position_embeddings": 2048}"#,
        adjust: experts::deepseek_moe,
        ..WITHOUT_MLP_BIAS
    },
    Family {
        name: "ExaoneMoeForCausalLM",
        model_type: "exaone_moe",
        names: &weights::EXAONE_MOE,
        aliases: &[("n_shared_experts", "num_shared_experts")],
        attention_bias: NEVER,
        window: WindowRule::Pattern(4),
        head_norm: Some(HeadNormSpan::Head),
        defaults: r#"{"rms_norm_eps": 1e-5, "sliding_window": 4096, "num_experts": 64, "num_experts_per_tok": 8,
                      "moe_intermediate_size": 1024, "n_shared_experts": 1, "first_k_dense_replace": 1,
                      "norm_topk_prob": true, "routed_scaling_factor": 2.5, "max_position_embeddings": 2048}"#,
        adjust: experts::exaone_moe,
        ..WITHOUT_MLP_BIAS
    },
    Family {
        name: "SolarOpenForCausalLM",
        model_type: "solar_open",
        names: &weights::DEEPSEEK_MOE,
        aliases: &[("num_experts", "n_routed_experts")],
        attention_bias: qkv("attention_bias", false),
        partial_rotary: Some(1.0),
        // There is no dense layer, so its width has no effect.
        defaults: r#"{"vocab_size": 196608, "hidden_size": 4096, "intermediate_size": 1280, "num_hidden_layers": 48,
                      "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "num_experts": 128,
                      "num_experts_per_tok": 8, "moe_intermediate_size": 1280, "n_shared_experts": 1,
                      "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "max_position_embeddings": 131072}"#,
        adjust: experts::solar_open,
        ..WITHOUT_MLP_BIAS
    },
    Family {
        name: "MiMoV2FlashForCausalLM",
        model_type: "mimo_v2_flash",
        names: &weights::MIMO_V2,
        aliases: &[("num_experts", "n_routed_experts")],
        attention_bias: qkv("attention_bias", false),
        window: WindowRule::Pattern(6),
        partial_rotary: Some(0.334),
        defaults: r#"{"vocab_size": 152576, "hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 48,
                      "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128,
                      "sliding_window": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072,
                      "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
                      "rope_parameters": {
                          "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                          "full_attention": {"rope_type": "default", "rope_theta": 5000000.0}}}"#,
        adjust: mimo_v2::mimo_v2_flash,
        ..WITHOUT_MLP_BIAS
    },
    PHIMOE,
    Family { name: "PhiMoEForCausalLM", ..PHIMOE },
    Family {
        name: "HunYuanDenseV1ForCausalLM",
        model_type: "hunyuan_v1_dense",
        names: &weights::HUNYUAN,
        head_norm: Some(HeadNormSpan::Head),
        defaults: r#"{"rms_norm_eps": 1e-5}"#,
        adjust: hunyuan::hunyuan_dense,
        ..WITHOUT_MLP_BIAS
    },
    Family {
        name: "HunYuanMoEV1ForCausalLM",
        model_type: "hunyuan_v1_moe",
        names: &weights::HUNYUAN_MOE,
        aliases: &[("num_experts_per_tok", "moe_topk")],
        head_norm: Some(HeadNormSpan::Head),
        defaults: r#"{"rms_norm_eps": 1e-5}"#,
        adjust: hunyuan::hunyuan_moe,
        ..WITHOUT_MLP_BIAS
    },
    Family {
        name: "HYV3ForCausalLM",
        model_type: "hy_v3",
        names: &weights::HUNYUAN3,
        aliases: &[("num_experts", "num_local_experts")],
        head_norm: Some(HeadNormSpan::Head),
        defaults: r#"{"vocab_size": 120832, "hidden_size": 4096, "intermediate_size": 13312, "num_hidden_layers": 80,
                      "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "num_experts": 192,
                      "num_experts_per_tok": 8, "num_shared_experts": 1, "moe_intermediate_size": 1536,
                      "router_scaling_factor": 2.826, "rms_norm_eps": 1e-5, "rope_theta": 11158840.0,
                      "max_position_embeddings": 131072}"#,
        adjust: hunyuan::hunyuan3,
        ..LLAMA
    },
    Family {
        name: "AfmoeForCausalLM",
        model_type: "afmoe",
        names: &weights::AFMOE,
        aliases: &[("sliding_window_pattern", "global_attn_every_n_layers")],
        window: WindowRule::Pattern(4),
        head_norm: Some(HeadNormSpan::Head),
        defaults: r#"{"vocab_size": 200192, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 32,
                      "num_attention_heads": 16, "head_dim": 128, "num_dense_layers": 1, "num_experts": 64,
                      "num_experts_per_tok": 6, "num_shared_experts": 2, "moe_intermediate_size": 1408,
                      "sliding_window": 1024, "rms_norm_eps": 1e-5, "max_position_embeddings": 16384}"#,
        adjust: experts::afmoe,
        ..WITHOUT_MLP_BIAS
    },
    Family {
        name: "Ernie4_5_MoeForCausalLM",
        model_type: "ernie4_5_moe",
        names: &weights::ERNIE_MOE,
        aliases: &[
            ("num_experts", "moe_num_experts"),
            ("num_experts_per_tok", "moe_k"),
            ("n_shared_experts", "moe_num_shared_experts"),
        ],
        is_interleaved: true,
        attention_bias: NEVER,
        defaults: r#"{"num_key_value_heads": 4, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
                      "tie_word_embeddings": true, "max_position_embeddings": 131072, "num_experts": 64, "num_experts_per_tok": 6,
                      "n_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": -1,
                      "moe_layer_interval": 1, "moe_intermediate_size": 1536}"#,
        adjust: experts::ernie_moe,
        ..WITHOUT_MLP_BIAS
    },
    Family {
        name: "MiniMaxM2ForCausalLM",
        model_type: "minimax_m2",
        names: &weights::MINIMAX_M2,
        aliases: &[("num_experts", "num_local_experts")],
        attention_bias: NEVER,
        head_norm: Some(HeadNormSpan::AllHeads),
        partial_rotary: Some(1.0),
        defaults: r#"{"head_dim": 128, "num_experts": 256, "num_experts_per_tok": 8, "num_key_value_heads": 8,
                      "rope_theta": 5000000.0, "max_position_embeddings": 196608}"#,
        adjust: experts::minimax_m2,
        ..WITHOUT_MLP_BIAS
    },
    Family {
        name: "MellumForCausalLM",
        model_type: "mellum",
        names: &weights::QWEN_MOE,
        aliases: &[("num_experts", "num_local_experts")],
        window: WindowRule::Pattern(1),
        head_norm: Some(HeadNormSpan::Head),
        defaults: r#"{"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 896, "head_dim": 128,
                      "num_key_value_heads": 4, "sliding_window": 1024, "max_position_embeddings": 131072}"#,
        adjust: experts::mellum,
        ..WITHOUT_MLP_BIAS
    },
    Family {
        name: "GraniteMoeSharedForCausalLM",
        model_type: "granitemoeshared",
        names: &weights::GRANITE_MOE,
        aliases: &[("num_experts", "num_local_experts")],
        defaults: r#"{"num_experts": 8, "num_experts_per_tok": 2}"#,
        adjust: granite::granite_moe_shared,
        ..WITHOUT_MLP_BIAS
    },
    Family {
        name: "GraniteMoeHybridForCausalLM",
        model_type: "granitemoehybrid",
        names: &weights::GRANITE_MOE_HYBRID,
        aliases: &[("num_experts", "num_local_experts")],
        defaults: r#"{"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
                      "num_attention_heads": 32, "num_experts": 8, "num_experts_per_tok": 2,
                      "shared_intermediate_size": 1024, "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256,
                      "mamba_d_conv": 4, "mamba_expand": 2}"#,
        adjust: granite::granite_moe_hybrid,
        ..WITHOUT_MLP_BIAS
    },
    Family {
        name: "BambaForCausalLM",
        model_type: "bamba",
        names: &weights::BAMBA,
        partial_rotary: Some(0.5),
        defaults: r#"{"vocab_size": 128000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                      "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "mamba_n_heads": 128,
                      "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2,
                      "max_position_embeddings": 262144}"#,
        adjust: granite::bamba,
        ..LLAMA
    },
    Family {
        name: "FalconH1ForCausalLM",
        model_type: "falcon_h1",
        names: &weights::BAMBA,
        defaults: r#"{"vocab_size": 128000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                      "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "mamba_n_heads": 128,
                      "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_d_ssm": 1024,
                      "max_position_embeddings": 8192}"#,
        adjust: falcon_h1::falcon_h1,
        ..LLAMA
    },
    Family {
        name: "NemotronHForCausalLM",
        model_type: "nemotron_h",
        names: &weights::NEMOTRON_H,
        aliases: &[
            ("rms_norm_eps", "layer_norm_epsilon"),
            ("hidden_act", "mlp_hidden_act"),
            ("num_experts", "n_routed_experts"),
        ],
        attention_bias: NEVER,
        defaults: r#"{"vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 21504, "num_hidden_layers": 4,
                      "hybrid_override_pattern": "ME*-", "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
                      "max_position_embeddings": 4096, "hidden_act": "relu2", "rms_norm_eps": 1e-5, "mamba_num_heads": 128,
                      "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4, "num_experts": 8,
                      "num_experts_per_tok": 2, "moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688}"#,
        adjust: nemotron_h::nemotron_h,
        ..LLAMA
    },
    Family {
        name: "GraniteMoeForCausalLM",
        model_type: "granitemoe",
        names: &weights::GRANITE_MOE,
        aliases: &[("num_experts", "num_local_experts")],
        defaults: r#"{"num_experts": 8, "num_experts_per_tok": 2}"#,
        adjust: granite::granite_moe,
        ..WITHOUT_MLP_BIAS
    },
    Family {
        name: "GraniteMoeSWAForCausalLM",
        model_type: "granitemoe_swa",
        names: &weights::GRANITE_MOE_SWA,
        aliases: &[("num_experts", "num_local_experts")],
        window: WindowRule::PatternFromFirst(4),
        defaults: r#"{"num_experts": 8, "num_experts_per_tok": 2, "sliding_window": 128}"#,
        adjust: granite::granite_moe_swa,
        ..WITHOUT_MLP_BIAS
    },
    Family {
        name: "OlmoHybridForCausalLM",
        model_type: "olmo_hybrid",
        names: &weights::OLMO_HYBRID,
        defaults: r#"{"vocab_size": 100352, "hidden_size": 3840, "intermediate_size": 11008, "num_hidden_layers": 32,
                      "num_attention_heads": 30, "max_position_embeddings": 65536, "linear_conv_kernel_dim": 4}"#,
        adjust: hybrid::olmo_hybrid,
        ..OLMO2
    },
    Family {
        name: "KimiLinearForCausalLM",
        model_type: "kimi_linear",
        names: &weights::KIMI_LINEAR,
        aliases: &[
            ("max_position_embeddings", "model_max_length"),
            ("num_experts_per_tok", "num_experts_per_token"),
            ("n_shared_experts", "num_shared_experts"),
            ("n_group", "num_expert_group"),
            ("norm_topk_prob", "moe_renormalize"),
            ("head_dim", "qk_rope_head_dim"),
        ],
        defaults: r#"{"vocab_size": 163840, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 27,
                      "num_attention_heads": 32, "num_key_value_heads": 32, "num_experts": 256, "num_experts_per_tok": 8,
                      "n_shared_experts": 1, "moe_intermediate_size": 1024, "first_k_dense_replace": 1,
                      "routed_scaling_factor": 2.446, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
                      "v_head_dim": 128, "max_position_embeddings": 1048576, "rms_norm_eps": 1e-5, "linear_head_dim": 128,
                      "linear_num_heads": 32, "linear_conv_kernel_dim": 4}"#,
        adjust: kimi_linear::kimi_linear,
        ..DEEPSEEK_V3
    },
    LFM2,
    Family { name: "Lfm2VlForConditionalGeneration", model_type: "lfm2_vl", is_nested: true, ..LFM2 },
    Family {
        name: "Lfm2MoeForCausalLM",
        model_type: "lfm2_moe",
        names: &weights::LFM2_MOE,
        aliases: &[("rms_norm_eps", "norm_eps"), ("tie_word_embeddings", "tie_embedding")],
        defaults: r#"{"vocab_size": 65536, "hidden_size": 2048, "intermediate_size": 7168, "num_hidden_layers": 32,
                      "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 128000,
                      "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 1792, "num_dense_layers": 2,
                      "conv_L_cache": 3, "rms_norm_eps": 1e-5, "tie_word_embeddings": true, "rope_theta": 1000000.0}"#,
        adjust: lfm2::lfm2_moe,
        ..LFM2
    },
    Family { name: "InternLMForCausalLM", model_type: "internlm", attention_bias: both("bias", true), ..LLAMA },
    Family {
        name: "InternLM2ForCausalLM",
        model_type: "internlm2",
        attention_bias: both("bias", true),
        names: &weights::INTERNLM2,
        ..LLAMA
    },
    BAICHUAN,
    Family { name: "BaiChuanForCausalLM", ..BAICHUAN }, // The first model of the family uses this spelling.
    Family {
        name: "GPT2LMHeadModel",
        model_type: "gpt2",
        names: &weights::GPT2,
        aliases: &[
            ("hidden_size", "n_embd"),
            ("num_attention_heads", "n_head"),
            ("num_hidden_layers", "n_layer"),
            ("max_position_embeddings", "n_positions"),
            ("intermediate_size", "n_inner"),
            ("hidden_act", "activation_function"),
            ("layer_norm_eps", "layer_norm_epsilon"),
        ],
        norm: NormRule::Layer,
        attention_bias: ALWAYS,
        mlp_bias: BiasRule::Always,
        inner_factor: Some(4),
        defaults: r#"{"max_position_embeddings": 1024, "hidden_act": "gelu_new", "tie_word_embeddings": true}"#,
        adjust: adjust::gpt2,
        ..LLAMA
    },
    Family {
        name: "GPTNeoForCausalLM",
        model_type: "gpt_neo",
        names: &weights::GPT_NEO,
        aliases: &[
            ("num_attention_heads", "num_heads"),
            ("num_hidden_layers", "num_layers"),
            ("hidden_act", "activation_function"),
            ("layer_norm_eps", "layer_norm_epsilon"),
        ],
        norm: NormRule::Layer,
        attention_bias: AttentionBias { qkv: BiasRule::Never, out: BiasRule::Always },
        mlp_bias: BiasRule::Always,
        inner_factor: Some(4),
        defaults: r#"{"vocab_size": 50257, "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16,
                      "max_position_embeddings": 2048, "hidden_act": "gelu_new", "tie_word_embeddings": true,
                      "window_size": 256}"#,
        adjust: older::gpt_neo,
        ..LLAMA
    },
    Family {
        name: "GPTJForCausalLM",
        model_type: "gptj",
        names: &weights::GPTJ,
        aliases: &[
            ("hidden_size", "n_embd"),
            ("num_attention_heads", "n_head"),
            ("num_hidden_layers", "n_layer"),
            ("max_position_embeddings", "n_positions"),
            ("intermediate_size", "n_inner"),
            ("hidden_act", "activation_function"),
            ("layer_norm_eps", "layer_norm_epsilon"),
        ],
        norm: NormRule::Layer,
        attention_bias: NEVER,
        mlp_bias: BiasRule::Always,
        inner_factor: Some(4),
        is_interleaved: true,
        is_parallel: true,
        defaults: r#"{"max_position_embeddings": 2048, "hidden_act": "gelu_new", "rotary_dim": 64}"#,
        adjust: older::gptj,
        ..LLAMA
    },
    Family {
        name: "GPTBigCodeForCausalLM",
        model_type: "gpt_bigcode",
        names: &weights::GPT_BIGCODE,
        aliases: &[
            ("hidden_size", "n_embd"),
            ("num_attention_heads", "n_head"),
            ("num_key_value_heads", "n_head"), // transformers writes a number that it does not read.
            ("num_hidden_layers", "n_layer"),
            ("max_position_embeddings", "n_positions"),
            ("intermediate_size", "n_inner"),
            ("hidden_act", "activation_function"),
            ("layer_norm_eps", "layer_norm_epsilon"),
        ],
        norm: NormRule::Layer,
        attention_bias: ALWAYS,
        mlp_bias: BiasRule::Always,
        inner_factor: Some(4),
        defaults: r#"{"max_position_embeddings": 1024, "hidden_act": "gelu_pytorch_tanh",
                      "tie_word_embeddings": true}"#,
        adjust: older::gpt_bigcode,
        ..LLAMA
    },
];
