//! The names of each family's weights. One file: families are compared with each other.

use crate::names::{
    ApartNames, BiasForm, ExpertLayout, ExpertNames, LatentNames, Names, PerLayerNames, QkvNames, RecurrentNames,
    RecurrentProjections, UpNames,
};

/// Prefixes of a text model, also as a part of a model that sees images.
const PREFIXES: &[&str] = &["model.", "language_model.model.", "model.language_model."];

pub(super) const LLAMA: Names = Names {
    prefixes: PREFIXES,
    embedding: "embed_tokens",
    embedding_norm: None,
    positions: "",
    first_position: 0,
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
    sinks: None,
    recurrent: None,
    of_recurrent: None,
    latent: None,
    mlp_branch_norm: None,
    layer_scalar: None,
    per_layer_input: None,
    final_norm: "norm",
    heads: &["lm_head", "language_model.lm_head"],
    transposed: false,
};

/// Attention and feed-forward behind one norm.
pub(super) const ONE_NORM: Names = Names { mlp_norm: None, ..LLAMA };

/// A norm for each head, if it has any.
pub(super) const STABLELM: Names =
    Names { head_norms: ["self_attn.q_layernorm.norms", "self_attn.k_layernorm.norms"], ..LLAMA };

pub(super) const STABLELM_PARALLEL: Names = Names { mlp_norm: None, ..STABLELM };

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

pub(super) const GEMMA4: Names = Names {
    layer_scalar: Some("layer_scalar"),
    per_layer_input: Some(PerLayerNames {
        embedding: "embed_tokens_per_layer",
        context: "per_layer_model_projection",
        context_norm: "per_layer_projection_norm",
        gate: "per_layer_input_gate",
        out: "per_layer_projection",
        branch_norm: "post_per_layer_input_norm",
    }),
    ..GEMMA2
};

/// With experts beside the feed-forward.
pub(super) const GEMMA4_MOE: Names = Names {
    experts: Some(ExpertNames {
        router: "router.proj",
        layout: ExpertLayout::Stacked(["experts.gate_up_proj", "experts.down_proj"]),
        selection_bias: None,
        apart: Some(ApartNames {
            input_norm: "pre_feedforward_layernorm_2",
            router_gain: "router.scale",
            scales: "router.per_expert_scale",
            branch_norms: ["post_feedforward_layernorm_1", "post_feedforward_layernorm_2"],
        }),
        has_biases: false,
        latents: None,
        shared: None,
    }),
    ..GEMMA4
};

pub(super) const GLM: Names = Names { up: UpNames::Stacked("mlp.gate_up_proj"), ..LLAMA };

pub(super) const GLM4: Names = Names {
    attention_branch_norm: Some("post_self_attn_layernorm"),
    mlp_branch_norm: Some("post_mlp_layernorm"),
    ..GLM
};

pub(super) const PHI3: Names =
    Names { qkv: QkvNames::Stacked("self_attn.qkv_proj"), up: UpNames::Stacked("mlp.gate_up_proj"), ..LLAMA };

/// The layers of which adapters for images and speech are parts.
pub(super) const PHI4_MM: Names = Names {
    qkv: QkvNames::Stacked("self_attn.qkv_proj.base_layer"),
    out: "self_attn.o_proj.base_layer",
    up: UpNames::Stacked("mlp.gate_up_proj.base_layer"),
    down: "mlp.down_proj.base_layer",
    ..LLAMA
};

pub(super) const PHI: Names = Names {
    out: "self_attn.dense",
    up: UpNames::Plain("mlp.fc1"),
    down: "mlp.fc2",
    final_norm: "final_layernorm",
    ..ONE_NORM
};

/// A feed-forward without a gate.
pub(super) const PLAIN: Names = Names { up: UpNames::Plain("mlp.up_proj"), ..LLAMA };

pub(super) const APERTUS: Names =
    Names { attention_norm: Some("attention_layernorm"), mlp_norm: Some("feedforward_layernorm"), ..PLAIN };

pub(super) const NANOCHAT: Names = Names {
    embedding_norm: Some("norm"), // It has no weights, so the name is not looked up.
    up: UpNames::Plain("mlp.fc1"),
    down: "mlp.fc2",
    ..LLAMA
};

pub(super) const OPT: Names = Names {
    prefixes: &["model.decoder.", "decoder."],
    positions: "embed_positions",
    first_position: 2,
    attention_norm: Some("self_attn_layer_norm"),
    out: "self_attn.out_proj",
    mlp_norm: Some("final_layer_norm"),
    up: UpNames::Plain("fc1"),
    down: "fc2",
    final_norm: "final_layer_norm",
    ..LLAMA
};

pub(super) const GPTJ: Names = Names {
    prefixes: &["transformer."],
    embedding: "wte",
    layers: "h",
    attention_norm: Some("ln_1"),
    qkv: QkvNames::Separate(["attn.q_proj", "attn.k_proj", "attn.v_proj"]),
    out: "attn.out_proj",
    mlp_norm: None,
    up: UpNames::Plain("mlp.fc_in"),
    down: "mlp.fc_out",
    final_norm: "ln_f",
    ..LLAMA
};

/// Norms before and behind attention and feed-forward.
pub(super) const HYPERCLOVAX: Names =
    Names { attention_branch_norm: Some("post_norm1"), mlp_branch_norm: Some("post_norm2"), ..LLAMA };

pub(super) const VAULT_GEMMA: Names = Names { mlp_norm: Some("pre_feedforward_layernorm"), ..LLAMA };

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

pub(super) const BLOOM: Names =
    Names { embedding_norm: Some("word_embeddings_layernorm"), mlp_norm: Some("post_attention_layernorm"), ..FALCON };

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

/// GPT-2 with q, k and v in three matrices, which are not transposed.
pub(super) const GPT_NEO: Names = Names {
    prefixes: &["transformer."],
    qkv: QkvNames::Separate(["attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"]),
    out: "attn.attention.out_proj",
    transposed: false,
    ..GPT2
};

/// GPT-2 with one KV head and other layouts.
pub(super) const GPT_BIGCODE: Names = Names { transposed: false, ..GPT2 };

/// The same with a KV head for each query head.
pub(super) const GPT_BIGCODE_MHA: Names = Names { qkv: QkvNames::Grouped("attn.c_attn"), ..GPT_BIGCODE };

pub(super) const MIXTRAL: Names = Names {
    experts: Some(ExpertNames {
        router: "block_sparse_moe.gate",
        layout: ExpertLayout::Each { prefix: "block_sparse_moe.experts", names: ["w1", "w3", "w2"] },
        selection_bias: None,
        apart: None,
        has_biases: false,
        latents: None,
        shared: None,
    }),
    ..LLAMA
};

pub(super) const GPT_OSS: Names = Names {
    sinks: Some("self_attn.sinks"),
    experts: Some(ExpertNames {
        router: "mlp.router",
        layout: ExpertLayout::Alternating(["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]),
        selection_bias: None,
        apart: None,
        has_biases: true,
        latents: None,
        shared: None,
    }),
    ..LLAMA
};

/// The names of Qwen's experts.
const QWEN_EXPERTS: ExpertNames = ExpertNames {
    router: "mlp.gate",
    layout: ExpertLayout::Each { prefix: "mlp.experts", names: ["gate_proj", "up_proj", "down_proj"] },
    selection_bias: None,
    apart: None,
    has_biases: false,
    latents: None,
    shared: Some((
        UpNames::Separate(["mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"]),
        "mlp.shared_expert.down_proj",
        "mlp.shared_expert_gate",
    )),
};

pub(super) const QWEN_MOE: Names = Names { experts: Some(QWEN_EXPERTS), ..LLAMA };

pub(super) const QWEN3_VL_MOE: Names = Names {
    experts: Some(ExpertNames {
        layout: ExpertLayout::Either {
            stacked: ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            may_be_transposed: true,
            prefix: "mlp.experts",
            names: ["gate_proj", "up_proj", "down_proj"],
        },
        shared: None,
        ..QWEN_EXPERTS
    }),
    ..LLAMA
};

const GATED_DELTA: RecurrentNames = RecurrentNames {
    projections: RecurrentProjections::Separate {
        qkv: "linear_attn.in_proj_qkv",
        z: "linear_attn.in_proj_z",
        b: "linear_attn.in_proj_b",
        a: "linear_attn.in_proj_a",
    },
    conv: "linear_attn.conv1d.weight",
    conv_bias: "",
    a_log: "linear_attn.A_log",
    dt_bias: "linear_attn.dt_bias",
    skip: "",
    norm: "linear_attn.norm.weight",
    out: "linear_attn.out_proj",
};

pub(super) const QWEN3_NEXT: Names = Names {
    recurrent: Some(RecurrentNames {
        projections: RecurrentProjections::Grouped { qkvz: "linear_attn.in_proj_qkvz", ba: "linear_attn.in_proj_ba" },
        ..GATED_DELTA
    }),
    ..QWEN_MOE
};

pub(super) const QWEN3_5: Names = Names { recurrent: Some(GATED_DELTA), ..LLAMA };

pub(super) const QWEN3_5_MOE: Names = Names {
    experts: Some(ExpertNames {
        layout: ExpertLayout::Either {
            stacked: ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            may_be_transposed: false,
            prefix: "mlp.experts",
            names: ["gate_proj", "up_proj", "down_proj"],
        },
        ..QWEN_EXPERTS
    }),
    ..QWEN3_5
};

/// The names of DeepSeek V3's experts.
const DEEPSEEK_EXPERTS: ExpertNames = ExpertNames {
    router: "mlp.gate",
    layout: ExpertLayout::Each { prefix: "mlp.experts", names: ["gate_proj", "up_proj", "down_proj"] },
    selection_bias: Some(("mlp.gate.e_score_correction_bias", BiasForm::Vector)),
    apart: None,
    has_biases: false,
    latents: None,
    shared: Some((
        UpNames::Separate(["mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"]),
        "mlp.shared_experts.down_proj",
        "",
    )),
};

pub(super) const DEEPSEEK_MOE: Names = Names { experts: Some(DEEPSEEK_EXPERTS), ..LLAMA };

/// The names of Ling 2.0.
pub(super) const BAILING_MOE_V2: Names = Names {
    embedding: "word_embeddings",
    qkv: QkvNames::Stacked("attention.query_key_value"),
    head_norms: ["attention.query_layernorm", "attention.key_layernorm"],
    out: "attention.dense",
    experts: Some(ExpertNames { selection_bias: Some(("mlp.gate.expert_bias", BiasForm::Vector)), ..DEEPSEEK_EXPERTS }),
    ..LLAMA
};

pub(super) const MIMO_V2: Names = Names { sinks: Some("self_attn.attention_sink_bias"), ..DEEPSEEK_MOE };

/// Attention and experts behind one norm.
pub(super) const COHERE2_MOE: Names = Names { mlp_norm: None, ..DEEPSEEK_V2_MOE };

/// Experts that are chosen without a bias.
const DEEPSEEK_V2_MOE: Names =
    Names { experts: Some(ExpertNames { selection_bias: None, ..DEEPSEEK_EXPERTS }), ..LLAMA };

/// The names of DeepSeek's attention.
const DEEPSEEK_LATENT: LatentNames = LatentNames {
    query: "self_attn.q_proj",
    query_down: "self_attn.q_a_proj",
    query_norm: "self_attn.q_a_layernorm",
    query_up: "self_attn.q_b_proj",
    down: "self_attn.kv_a_proj_with_mqa",
    norm: "self_attn.kv_a_layernorm",
    up: "self_attn.kv_b_proj",
};

/// Latent vectors in all layers, and no experts.
pub(super) const LATENT: Names = Names { latent: Some(DEEPSEEK_LATENT), ..LLAMA };

pub(super) const DEEPSEEK_V2: Names = Names { latent: Some(DEEPSEEK_LATENT), ..DEEPSEEK_V2_MOE };

pub(super) const DEEPSEEK_V3: Names = Names { latent: Some(DEEPSEEK_LATENT), ..DEEPSEEK_MOE };

pub(super) const KIMI_LINEAR: Names = Names {
    experts: Some(ExpertNames {
        router: "block_sparse_moe.gate",
        layout: ExpertLayout::Each { prefix: "block_sparse_moe.experts", names: ["w1", "w3", "w2"] },
        selection_bias: Some(("block_sparse_moe.gate.e_score_correction_bias", BiasForm::Vector)),
        shared: Some((
            UpNames::Separate(["block_sparse_moe.shared_experts.gate_proj", "block_sparse_moe.shared_experts.up_proj"]),
            "block_sparse_moe.shared_experts.down_proj",
            "",
        )),
        ..DEEPSEEK_EXPERTS
    }),
    recurrent: Some(RecurrentNames {
        projections: RecurrentProjections::LowRank {
            qkvb: ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.b_proj"],
            convs: ["self_attn.q_conv1d.weight", "self_attn.k_conv1d.weight", "self_attn.v_conv1d.weight"],
            steps: ["self_attn.f_a_proj", "self_attn.f_b_proj"],
            gates: ["self_attn.g_a_proj", "self_attn.g_b_proj"],
        },
        conv: "",
        conv_bias: "",
        a_log: "self_attn.A_log",
        dt_bias: "self_attn.dt_bias",
        skip: "",
        norm: "self_attn.o_norm.weight",
        out: "self_attn.o_proj",
    }),
    ..DEEPSEEK_V3
};

/// Experts in two tensors, or each on its own.
pub(super) const MISTRAL4: Names = Names {
    experts: Some(ExpertNames {
        layout: ExpertLayout::Either {
            stacked: ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            may_be_transposed: false,
            prefix: "mlp.experts",
            names: ["gate_proj", "up_proj", "down_proj"],
        },
        selection_bias: None,
        ..DEEPSEEK_EXPERTS
    }),
    ..LATENT
};

pub(super) const EXAONE_MOE: Names = Names {
    experts: Some(ExpertNames {
        selection_bias: Some(("mlp.e_score_correction_bias", BiasForm::Vector)),
        ..DEEPSEEK_EXPERTS
    }),
    ..LLAMA
};

pub(super) const HUNYUAN: Names =
    Names { head_norms: ["self_attn.query_layernorm", "self_attn.key_layernorm"], ..LLAMA };

pub(super) const HUNYUAN_MOE: Names = Names {
    experts: Some(ExpertNames {
        router: "mlp.gate.wg",
        selection_bias: None,
        shared: HUNYUAN_SHARED,
        ..DEEPSEEK_EXPERTS
    }),
    ..HUNYUAN
};

/// The feed-forward beside Hunyuan's experts.
const HUNYUAN_SHARED: Option<(UpNames, &str, &str)> =
    Some((UpNames::Separate(["mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj"]), "mlp.shared_mlp.down_proj", ""));

pub(super) const HUNYUAN3: Names = Names {
    experts: Some(ExpertNames {
        router: "mlp.router.gate",
        selection_bias: Some(("mlp.expert_bias", BiasForm::Vector)),
        shared: HUNYUAN_SHARED,
        ..DEEPSEEK_EXPERTS
    }),
    ..LLAMA
};

/// Norms before and behind attention and feed-forward, and gates of the output of attention.
pub(super) const AFMOE: Names = Names {
    qkv: QkvNames::Gated(["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.gate_proj"]),
    attention_branch_norm: Some("post_attention_layernorm"),
    mlp_norm: Some("pre_mlp_layernorm"),
    mlp_branch_norm: Some("post_mlp_layernorm"),
    experts: Some(ExpertNames {
        router: "mlp.router.gate",
        selection_bias: Some(("mlp.expert_bias", BiasForm::Vector)),
        ..DEEPSEEK_EXPERTS
    }),
    ..LLAMA
};

pub(super) const ERNIE_MOE: Names = Names {
    experts: Some(ExpertNames {
        selection_bias: Some(("mlp.moe_statics.e_score_correction_bias", BiasForm::Row)),
        ..DEEPSEEK_EXPERTS
    }),
    ..LLAMA
};

pub(super) const MINIMAX_M2: Names = Names {
    experts: Some(ExpertNames {
        router: "block_sparse_moe.gate",
        layout: ExpertLayout::Each { prefix: "block_sparse_moe.experts", names: ["w1", "w3", "w2"] },
        selection_bias: Some(("block_sparse_moe.e_score_correction_bias", BiasForm::Vector)),
        apart: None,
        has_biases: false,
        latents: None,
        shared: None,
    }),
    ..LLAMA
};

/// With norms behind attention and experts alone.
pub(super) const FLEX_OLMO: Names = Names { experts: QWEN_MOE.experts, ..NORMS_BEHIND };

pub(super) const LLAMA4: Names = Names {
    up: UpNames::Separate(["feed_forward.gate_proj", "feed_forward.up_proj"]),
    down: "feed_forward.down_proj",
    experts: Some(ExpertNames {
        router: "feed_forward.router",
        layout: ExpertLayout::StackedTransposed([
            "feed_forward.experts.gate_up_proj",
            "feed_forward.experts.down_proj",
        ]),
        selection_bias: None,
        apart: None,
        has_biases: false,
        latents: None,
        shared: Some((
            UpNames::Separate(["feed_forward.shared_expert.gate_proj", "feed_forward.shared_expert.up_proj"]),
            "feed_forward.shared_expert.down_proj",
            "",
        )),
    }),
    ..LLAMA
};

pub(super) const GRANITE_MOE: Names = Names {
    experts: Some(ExpertNames {
        router: "block_sparse_moe.router.layer",
        layout: ExpertLayout::Stacked([
            "block_sparse_moe.input_linear.weight",
            "block_sparse_moe.output_linear.weight",
        ]),
        selection_bias: None,
        apart: None,
        shared: Some((UpNames::Stacked("shared_mlp.input_linear"), "shared_mlp.output_linear", "")),
        has_biases: false,
        latents: None,
    }),
    ..LLAMA
};

pub(super) const GRANITE_SWA: Names = Names { sinks: Some("self_attn.sinks"), ..LLAMA };

/// Experts have the names of transformers.
pub(super) const GRANITE_MOE_SWA: Names = Names {
    experts: Some(ExpertNames {
        router: "block_sparse_moe.router",
        layout: ExpertLayout::Stacked(["block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj"]),
        selection_bias: None,
        apart: None,
        shared: Some((UpNames::Stacked("shared_mlp.input_linear"), "shared_mlp.output_linear", "")),
        has_biases: false,
        latents: None,
    }),
    ..GRANITE_SWA
};

pub(super) const GRANITE_MOE_HYBRID: Names = Names {
    up: UpNames::Stacked("shared_mlp.input_linear"),
    down: "shared_mlp.output_linear",
    recurrent: Some(MAMBA),
    ..GRANITE_MOE
};

const MAMBA: RecurrentNames = RecurrentNames {
    projections: RecurrentProjections::Together("mamba.in_proj"),
    conv: "mamba.conv1d.weight",
    conv_bias: "mamba.conv1d.bias",
    a_log: "mamba.A_log",
    dt_bias: "mamba.dt_bias",
    skip: "mamba.D",
    norm: "mamba.norm.weight",
    out: "mamba.out_proj",
};

pub(super) const BAMBA: Names = Names {
    mlp_norm: Some("pre_ff_layernorm"),
    up: UpNames::Separate(["feed_forward.gate_proj", "feed_forward.up_proj"]),
    down: "feed_forward.down_proj",
    recurrent: Some(MAMBA),
    final_norm: "final_layernorm",
    ..LLAMA
};

/// Each layer has one norm and one part.
pub(super) const NEMOTRON_H: Names = Names {
    prefixes: &["backbone.", "model."],
    embedding: "embeddings",
    attention_norm: Some("norm"),
    qkv: QkvNames::Separate(["mixer.q_proj", "mixer.k_proj", "mixer.v_proj"]),
    out: "mixer.o_proj",
    mlp_norm: Some("norm"),
    up: UpNames::Plain("mixer.up_proj"),
    down: "mixer.down_proj",
    experts: Some(ExpertNames {
        router: "mixer.gate",
        layout: ExpertLayout::EachPlain { prefix: "mixer.experts", names: ["up_proj", "down_proj"] },
        selection_bias: Some(("mixer.gate.e_score_correction_bias", BiasForm::Vector)),
        apart: None,
        has_biases: false,
        latents: Some(["mixer.fc1_latent_proj", "mixer.fc2_latent_proj"]),
        shared: Some((UpNames::Plain("mixer.shared_experts.up_proj"), "mixer.shared_experts.down_proj", "")),
    }),
    recurrent: Some(RecurrentNames {
        projections: RecurrentProjections::Together("mixer.in_proj"),
        conv: "mixer.conv1d.weight",
        conv_bias: "mixer.conv1d.bias",
        a_log: "mixer.A_log",
        dt_bias: "mixer.dt_bias",
        skip: "mixer.D",
        norm: "mixer.norm.weight",
        out: "mixer.out_proj",
    }),
    final_norm: "norm_f",
    ..LLAMA
};

const LFM2_CONV: RecurrentNames = RecurrentNames {
    projections: RecurrentProjections::ShortConv("conv.in_proj"),
    conv: "conv.conv.weight",
    conv_bias: "conv.conv.bias",
    a_log: "",
    dt_bias: "",
    skip: "",
    norm: "",
    out: "conv.out_proj",
};

pub(super) const LFM2: Names = Names {
    attention_norm: Some("operator_norm"),
    head_norms: ["self_attn.q_layernorm", "self_attn.k_layernorm"],
    out: "self_attn.out_proj",
    mlp_norm: Some("ffn_norm"),
    up: UpNames::Separate(["feed_forward.w1", "feed_forward.w3"]),
    down: "feed_forward.w2",
    recurrent: Some(LFM2_CONV),
    final_norm: "embedding_norm",
    ..LLAMA
};

pub(super) const LFM2_MOE: Names = Names {
    experts: Some(ExpertNames {
        router: "feed_forward.gate",
        layout: ExpertLayout::Each { prefix: "feed_forward.experts", names: ["w1", "w3", "w2"] },
        selection_bias: Some(("feed_forward.expert_bias", BiasForm::Vector)),
        apart: None,
        has_biases: false,
        latents: None,
        shared: None,
    }),
    ..LFM2
};

const OLMO_HYBRID_DELTA: RecurrentNames = RecurrentNames {
    projections: RecurrentProjections::Each {
        qkvz: ["linear_attn.q_proj", "linear_attn.k_proj", "linear_attn.v_proj", "linear_attn.g_proj"],
        ba: ["linear_attn.b_proj", "linear_attn.a_proj"],
        convs: ["linear_attn.q_conv1d.weight", "linear_attn.k_conv1d.weight", "linear_attn.v_conv1d.weight"],
    },
    conv: "",
    norm: "linear_attn.o_norm.weight",
    out: "linear_attn.o_proj",
    ..GATED_DELTA
};

/// Layers with a recurrent state begin with norms, those with attention have them behind their parts.
pub(super) const OLMO_HYBRID: Names = Names {
    recurrent: Some(OLMO_HYBRID_DELTA),
    of_recurrent: Some(&Names { recurrent: Some(OLMO_HYBRID_DELTA), ..LLAMA }),
    ..NORMS_BEHIND
};
