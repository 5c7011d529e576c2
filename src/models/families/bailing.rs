//! Ling 2.0 and Ring 2.0: GLM-4.5's formulas with other names of fields and weights, and q, k and v in one matrix.

use ops::Scoring;
use serde_json::Value;

use super::adjust::{Adjusted, require_equal};
use super::experts::put_grouped_experts;
use crate::config::Config;
use crate::fields::Fields;

/// Experts with sigmoids, chosen with a bias and within groups, behind some dense layers. transformers does not have this architecture, so
/// fields whose defaults are in the publisher's code must be there.
pub(super) fn bailing_moe_v2(fields: &Fields, config: &mut Config) -> Adjusted {
    // Rounding, and the layers that predict further tokens, which are not used.
    fields.ignore(&["router_dtype", "num_nextn_predict_layers", "mtp_loss_scaling_factor", "output_dropout"]);
    for name in ["use_qk_norm", "use_rmsnorm", "norm_topk_prob", "moe_router_enable_expert_bias"] {
        fields.only(name, true)?;
    }
    fields.only_text("score_function", &["sigmoid"])?;
    for name in ["n_group", "topk_group"] {
        fields.required_size(name)?;
    }
    fields.required_positive("routed_scaling_factor")?;
    let size = fields.required_size("moe_intermediate_size")?;
    let shared_size = size * fields.count("num_shared_experts")?;
    require_equal(fields, "moe_shared_expert_intermediate_size", shared_size, "the width of all shared experts")?;
    if fields.get("first_k_dense_replace").is_none() {
        return Err(fields.wrong("first_k_dense_replace", "a whole number", &Value::Null));
    }
    let first = fields.count("first_k_dense_replace")?;
    // The weight of a single expert would not be divided by the sum.
    if fields.required_size("num_experts_per_tok")? == 1 {
        return Err(fields.wrong("num_experts_per_tok", "at least 2", &1.into()));
    }
    put_grouped_experts(fields, config, [size, shared_size], (Scoring::Sigmoid, true), |index| index >= first)
}

#[cfg(test)]
mod tests {
    use ops::{ExpertGroups, GroupScore};
    use serde_json::json;

    use super::*;
    use crate::families::tests::read_config;

    /// The fields of the published Ling mini 2.0.
    fn ling_mini() -> Value {
        json!({
            "architectures": ["BailingMoeV2ForCausalLM"], "model_type": "bailing_moe", "attention_dropout": 0.0,
            "embedding_dropout": 0.0, "first_k_dense_replace": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
            "initializer_range": 0.02, "intermediate_size": 5120, "max_position_embeddings": 32768, "moe_intermediate_size": 512,
            "moe_router_enable_expert_bias": true, "moe_shared_expert_intermediate_size": 512, "n_group": 8, "topk_group": 4,
            "norm_topk_prob": true, "num_attention_heads": 16, "num_experts": 256, "num_experts_per_tok": 8,
            "num_hidden_layers": 20, "num_key_value_heads": 4, "num_nextn_predict_layers": 0, "num_shared_experts": 1,
            "output_dropout": 0.0, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-6, "rope_scaling": null,
            "rope_theta": 600000, "routed_scaling_factor": 2.5, "router_dtype": "fp32", "score_function": "sigmoid",
            "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_bias": false, "use_qk_norm": true,
            "use_qkv_bias": false, "use_rmsnorm": true, "vocab_size": 157184, "eos_token_id": 156892, "pad_token_id": 156892,
        })
    }

    #[test]
    fn the_published_configuration_is_read() {
        let config = read_config(&ling_mini()).unwrap();
        let (mlp, experts) = (config.layers[1].mlp.unwrap(), config.layers[1].experts.unwrap());
        assert_eq!((mlp.intermediate_size, experts.intermediate_size, experts.num_experts), (512, 512, 256));
        let groups = ExpertGroups { count: 8, chosen: 4, score: GroupScore::BestTwo };
        assert_eq!((experts.routing.groups, experts.routing.scale, experts.routing.top_k), (Some(groups), 2.5, 8));
        assert!(experts.routing.is_normalized && config.layers[0].experts.is_none());
        assert_eq!((config.layers[0].mlp.unwrap().intermediate_size, config.ropes[0].rotary_dim), (5120, 64));
    }

    #[test]
    fn what_is_not_supported_is_refused_by_its_name() {
        for (name, value) in [
            ("first_k_dense_replace", Value::Null),
            ("moe_router_enable_expert_bias", json!(false)),
            ("moe_shared_expert_intermediate_size", json!(1024)),
            ("n_group", Value::Null),
            ("norm_head", json!(true)),
            ("norm_topk_prob", json!(false)),
            ("num_experts_per_tok", json!(1)),
            ("routed_scaling_factor", Value::Null),
            ("score_function", json!("softmax")),
            ("use_qk_norm", json!(false)),
        ] {
            let mut config = ling_mini();
            config[name] = value;
            let error = read_config(&config).unwrap_err().to_string();
            assert!(error.contains(&format!("`{name}`")), "{name}: {error}");
        }
    }
}
