//! Hunyuan 1, dense and with experts: norms of q and k follow the rotation, whose base may have a factor. Hunyuan 3: experts with sigmoids.

use serde_json::Value;

use super::adjust::{Adjusted, each_attention, require_equal};
use super::experts::{put_experts_beside, put_sigmoid_experts, require_dense_first, sparse_layers};
use crate::ModelError;
use crate::config::Config;
use crate::fields::Fields;

/// Fields of published checkpoints that have no effect on texts: tokens, heads of other tasks, parts of models that see images, and
/// sizes of parts whose flags are off.
const UNUSED: &[&str] = &[
    "im_start_id",
    "im_end_id",
    "im_newline_id",
    "image_token_id",
    "text_start_id",
    "text_end_id",
    "video_start_id",
    "video_end_id",
    "mask_init_id",
    "pad_id",
    "org_vocab_size",
    "class_num",
    "dense_list",
    "pool_type",
    "num_media_embeds",
    "vit_path",
    "vit_type",
    "vit_input_resolution",
    "vit_token",
    "vit_patch",
    "vit_mapping_type",
    "vit_norm_type",
    "vit_used_rms_norm",
    "vit_remove_prenorm",
    "vit_add_patchemb_bias",
    "anyres_vit_max_image_size",
    "anyres_pooling_size",
    "anyres_vit_two_views",
    "skip_cls_token",
    "xdrope_section",
    "cla_share_factor",
    "enable_lm_head_fp32", // Rounding.
    "kv_lora_rank",
    "q_lora_rank",
    "qk_rope_head_dim",
    "qk_nope_head_dim",
    "v_head_dim",
];

/// Without experts.
pub(super) fn hunyuan_dense(fields: &Fields, config: &mut Config) -> Adjusted {
    require_all(fields, "num_experts", config.num_layers(), 1)?;
    // They describe experts, of which there are none.
    fields.ignore(&["moe_topk", "num_shared_expert", "use_mixed_mlp_moe", "moe_intermediate_size"]);
    hunyuan(fields, config)
}

/// Experts in all layers, whose probabilities are divided by their sum, beside a feed-forward of the same width for all tokens.
pub(super) fn hunyuan_moe(fields: &Fields, config: &mut Config) -> Adjusted {
    let num_layers = config.num_layers();
    let size = fields.required_size("intermediate_size")?;
    require_all(fields, "moe_intermediate_size", num_layers, size)?;
    require_all(fields, "num_shared_expert", num_layers, 1)?;
    fields.only("use_mixed_mlp_moe", true)?;
    if fields.count("moe_layer_num_skipped")? > 0 {
        let found = fields.get("moe_layer_num_skipped").cloned().unwrap_or_default();
        return Err(fields.wrong("moe_layer_num_skipped", "0: all layers have experts", &found));
    }
    for name in ["group_limited_greedy", "moe_drop_tokens", "moe_random_routing_dropped_token"] {
        fields.only(name, false)?;
    }
    // Of experts that are chosen within groups.
    fields.ignore(&["norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group"]);
    let chosen = of_layers(fields, "num_experts_per_tok", num_layers)?.unwrap_or_else(|| vec![1; num_layers]);
    let most = chosen.iter().copied().max().unwrap_or(1);
    let names = ["num_experts_per_tok", "moe_topk"].map(|name| (name.to_owned(), most.into()));
    let alike = fields.object_of_itself().with_fields(names);
    put_experts_beside(&alike, config, [size, size], true, |_| true)?;
    for (layer, top_k) in config.layers.iter_mut().zip(chosen) {
        layer.experts.as_mut().expect("all layers have experts").routing.top_k = top_k;
    }
    hunyuan(fields, config)
}

/// Hunyuan 3: experts with sigmoids, chosen with a bias, in the layers that `mlp_layer_types` names, or in all but the first.
pub(super) fn hunyuan3(fields: &Fields, config: &mut Config) -> Adjusted {
    // How sums are rounded, how products are computed, and the layers that predict further tokens, which are not used.
    fields.ignore(&[
        "enable_attention_fp32_softmax",
        "enable_lm_head_fp32",
        "enable_moe_fp32_combine",
        "use_grouped_mm",
        "num_nextn_predict_layers",
    ]);
    // What the architecture always has, whatever transformers reads.
    for name in ["qk_norm", "route_norm", "moe_router_use_sigmoid", "moe_router_enable_expert_bias"] {
        fields.only(name, true)?;
    }
    let sparse = sparse_layers(fields, config.num_layers(), |index| index > 0)?;
    require_dense_first(fields, &sparse)?;
    let size = fields.required_size("moe_intermediate_size")?;
    require_equal(fields, "expert_hidden_dim", size, "`moe_intermediate_size`")?;
    // For 0 shared experts transformers has one of another width.
    let num_shared = fields.required_size("num_shared_experts")?;
    let scale = fields.required_positive("router_scaling_factor")?;
    put_sigmoid_experts(fields, config, num_shared, scale, |index| sparse[index])
}

fn hunyuan(fields: &Fields, config: &mut Config) -> Adjusted {
    ["use_qk_norm", "use_rotary_pos_emb"].into_iter().try_for_each(|name| fields.only(name, true))?;
    // Keys and values of several layers, latent vectors, several positions of a token.
    for name in ["use_cla", "use_mla", "position_embedding_xdrope"] {
        fields.only(name, false)?;
    }
    fields.only_text("norm_type", &["rms", "hf_rms"])?;
    fields.ignore(UNUSED);
    let head_dim = config.layers[0].attention.head_dim;
    require_equal(fields, "attention_head_dim", head_dim, "the size of a head")?;
    let name = if fields.get("rope_scaling").is_some() { "rope_scaling" } else { "rope_parameters" };
    let rope = &mut config.ropes[0];
    if !rope.scaling.keeps_lengths() {
        let found = fields.get(name).cloned().unwrap_or_default();
        return Err(fields.wrong(name, "a rotation that keeps the lengths of q and k, since norms follow it", &found));
    }
    if let Some(parameters) = fields.object(name)?.filter(is_dynamic) {
        // `factor` changes the frequencies behind the longest sequence alone.
        parameters.required_positive("factor")?;
        parameters.ignore(&["beta_fast", "beta_slow", "mscale", "mscale_all_dim"]);
        if let Some(alpha) = parameters.positive("alpha")? {
            let dim = head_dim as f64;
            rope.theta *= alpha.powf(dim / (dim - 2.0));
        }
    }
    each_attention(config, |attention| {
        attention.head_norm.iter_mut().for_each(|norm| norm.is_behind_rotation = true);
    });
    Ok(())
}

fn is_dynamic(parameters: &Fields) -> bool {
    let name = if parameters.get("rope_type").is_some() { "rope_type" } else { "type" };
    parameters.has_text(name, "dynamic")
}

/// A number of each layer, from one for all or a list.
fn of_layers(fields: &Fields, name: &str, num_layers: usize) -> Result<Option<Vec<usize>>, ModelError> {
    let Some(value) = fields.get(name) else { return Ok(None) };
    let number = |value: &Value| value.as_u64().filter(|number| *number > 0).map(|number| number as usize);
    let numbers = match value {
        Value::Array(numbers) if numbers.len() == num_layers => numbers.iter().map(number).collect(),
        Value::Array(_) => None,
        value => number(value).map(|number| vec![number; num_layers]),
    };
    let expected = format!("a whole number above 0, or a list of {num_layers}");
    numbers.map(Some).ok_or_else(|| fields.wrong(name, &expected, value))
}

/// Refuses another number of a layer than `only`, which the architecture always has.
fn require_all(fields: &Fields, name: &str, num_layers: usize, only: usize) -> Adjusted {
    let numbers = of_layers(fields, name, num_layers)?.unwrap_or_default();
    match numbers.iter().find(|number| **number != only) {
        Some(&found) => Err(fields.wrong(name, &format!("{only} in all layers"), &found.into())),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use ops::Feature;
    use serde_json::json;

    use super::*;
    use crate::families::tests::read_config;

    /// The fields of published dense models, with other sizes.
    fn dense() -> Value {
        let text = r#"{
            "add_classification_head": false, "architectures": ["HunYuanDenseV1ForCausalLM"], "attention_bias": false,
            "attention_dropout": 0.0, "attention_head_dim": 32, "bos_token_id": 1, "cla_share_factor": 2, "class_num": 0,
            "dense_list": [64, 0], "enable_lm_head_fp32": true, "eod_token_id": 3, "eos_token_id": 2, "head_dim": 32, "hidden_act": "silu",
            "hidden_size": 64, "im_end_id": 6, "im_newline_id": 12, "im_start_id": 5, "initializer_range": 0.02,
            "intermediate_size": 96, "mask_init_id": 13, "max_position_embeddings": 32768, "mlp_bias": false,
            "model_type": "hunyuan_v1_dense", "norm_type": "rms", "num_attention_heads": 4, "num_experts": 1,
            "num_hidden_layers": 2, "num_key_value_heads": 2, "org_vocab_size": 500, "pad_id": 4, "pad_token_id": 4,
            "pool_type": "last", "pretraining_tp": 1, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "sep_token_id": 9,
            "rope_scaling": {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0,
                             "mscale_all_dim": 1.0, "type": "dynamic"},
            "text_end_id": 8, "text_start_id": 7, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
            "use_cache": true, "use_cla": false, "use_qk_norm": true, "use_rotary_pos_emb": true, "vocab_size": 501
        }"#;
        serde_json::from_str(text).unwrap()
    }

    /// The same for models with experts.
    fn moe() -> Value {
        let mut config = dense();
        let own = r#"{
            "anyres_pooling_size": 2, "anyres_vit_max_image_size": null, "anyres_vit_two_views": false,
            "architectures": ["HunYuanMoEV1ForCausalLM"], "group_limited_greedy": false, "image_token_id": 9,
            "kv_lora_rank": null, "model_type": "hunyuan_v1_moe", "moe_drop_tokens": false,
            "moe_intermediate_size": [96, 96], "moe_layer_num_skipped": 0, "moe_random_routing_dropped_token": false,
            "moe_topk": [3, 3], "n_group": null, "norm_topk_prob": true, "num_experts": 8, "num_media_embeds": 257,
            "num_shared_expert": [1, 1], "position_embedding_xdrope": false, "q_lora_rank": null,
            "routed_scaling_factor": 1.0, "skip_cls_token": false, "topk_group": null, "use_mixed_mlp_moe": true,
            "use_mla": false, "video_end_id": 10, "video_start_id": 11, "vit_add_patchemb_bias": false,
            "vit_input_resolution": 224, "vit_mapping_type": "resampler", "vit_norm_type": "fused", "vit_patch": 1,
            "vit_path": null, "vit_remove_prenorm": false, "vit_token": 64, "vit_type": null, "vit_used_rms_norm": false,
            "xdrope_section": null
        }"#;
        let own: Value = serde_json::from_str(own).unwrap();
        for (name, value) in own.as_object().unwrap() {
            config[name] = value.clone();
        }
        config
    }

    #[test]
    fn published_configurations_are_read() {
        let config = read_config(&dense()).unwrap();
        let base = 10_000.0 * 1000f64.powf(32.0 / 30.0);
        assert!((config.ropes[0].theta / base - 1.0).abs() < 1e-12, "{}", config.ropes[0].theta);
        assert!(config.head.is_tied && config.layers[1].attention.head_norm.unwrap().is_behind_rotation);
        assert!(config.features().contains(&Feature::QueryGains));
        let config = read_config(&moe()).unwrap();
        let (mlp, experts) = (config.layers[1].mlp.unwrap(), config.layers[1].experts.unwrap());
        assert_eq!((mlp.intermediate_size, experts.intermediate_size, experts.num_experts), (96, 96, 8));
        assert!(experts.routing.is_normalized && experts.routing.top_k == 3);
    }

    /// The fields of the published Hunyuan 3, with other sizes.
    fn hunyuan_3() -> Value {
        let text = r#"{
            "architectures": ["HYV3ForCausalLM"], "bos_token_id": 1, "dtype": "bfloat16", "enable_attention_fp32_softmax": false,
            "enable_lm_head_fp32": true, "enable_moe_fp32_combine": false, "eod_token_id": 3, "eos_token_id": 2,
            "expert_hidden_dim": 32, "first_k_dense_replace": 1, "head_dim": 32, "hidden_act": "silu", "hidden_size": 64,
            "initializer_range": 0.006, "intermediate_size": 96, "max_position_embeddings": 262144, "model_type": "hy_v3",
            "moe_intermediate_size": 32, "moe_router_enable_expert_bias": true, "moe_router_use_sigmoid": true,
            "num_attention_heads": 4, "num_experts": 8, "num_experts_per_tok": 3, "num_hidden_layers": 3,
            "num_key_value_heads": 2, "num_nextn_predict_layers": 1, "num_shared_experts": 1, "output_router_logits": true,
            "pad_token_id": 4, "qk_norm": true, "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_theta": 11158840.0, "rope_type": "default"}, "route_norm": true,
            "router_scaling_factor": 2.826, "sep_token_id": 5, "tie_word_embeddings": false, "use_cache": true,
            "use_grouped_mm": false, "vocab_size": 501
        }"#;
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn what_hunyuan_3_says_twice_must_be_the_same() {
        let config = read_config(&hunyuan_3()).unwrap();
        let experts = config.layers[1].experts.unwrap();
        assert_eq!(
            (experts.intermediate_size, experts.routing.scale, experts.routing.is_normalized),
            (32, 2.826, true)
        );
        assert!(config.layers[0].experts.is_none() && config.layers[1].attention.head_norm.is_some());
        for (name, value) in [
            ("expert_hidden_dim", json!(48)),
            ("first_k_dense_replace", json!(2)),
            ("moe_router_enable_expert_bias", json!(false)),
            ("moe_router_use_sigmoid", json!(false)),
            ("qk_norm", json!(false)),
            ("route_norm", json!(false)),
        ] {
            let mut config = hunyuan_3();
            config[name] = value;
            let error = read_config(&config).unwrap_err().to_string();
            assert!(error.contains(&format!("`{name}` must be ")), "{name}: {error}");
        }
    }

    #[test]
    fn layers_may_choose_different_numbers_of_experts() {
        let mut config = moe();
        config["moe_topk"] = json!([1, 2]);
        let chosen = |layer: &crate::LayerSpec| layer.experts.unwrap().routing.top_k;
        assert_eq!(read_config(&config).unwrap().layers.iter().map(chosen).collect::<Vec<_>>(), [1, 2]);
        config["moe_topk"] = json!([1, 9]);
        assert!(read_config(&config).unwrap_err().to_string().contains("moe_topk"));
    }

    #[test]
    fn what_is_not_supported_is_refused_by_its_name() {
        let yarn = json!({"type": "yarn", "factor": 4.0});
        for (name, value) in [
            ("use_qk_norm", json!(false)),
            ("use_rotary_pos_emb", json!(false)),
            ("use_cla", json!(true)),
            ("use_mla", json!(true)),
            ("position_embedding_xdrope", json!(true)),
            ("norm_type", json!("fused")),
            ("mlp_bias", json!(true)),
            ("attention_head_dim", json!(16)),
            ("rope_scaling", yarn),
            ("num_experts", json!([8, 8])),
            ("moe_layer_num_skipped", json!(1)),
            ("moe_intermediate_size", json!([96, 80])),
            ("num_shared_expert", json!(2)),
            ("use_mixed_mlp_moe", json!(false)),
            ("group_limited_greedy", json!(true)),
            ("moe_drop_tokens", json!(true)),
            ("moe_topk", json!([3])),
        ] {
            let mut config = moe();
            config[name] = value;
            let error = read_config(&config).unwrap_err().to_string();
            assert!(error.contains(name), "{name}: {error}");
        }
        let mut config = dense();
        config["num_experts"] = json!(2);
        assert!(read_config(&config).unwrap_err().to_string().contains("num_experts"));
    }
}
