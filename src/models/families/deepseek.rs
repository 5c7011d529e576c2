//! DeepSeek V2, V3 and what has their shape (R1, Kimi K2): attention over latent vectors, and experts.

use ops::LatentShape;
use serde_json::Value;

use super::adjust::{Adjusted, each_attention, scale_residuals};
use super::experts;
use super::mtp::put_mtp;
use crate::ModelError;
use crate::config::Config;
use crate::config::MtpForm;
use crate::fields::Fields;
use crate::layer_spec::LatentLayer;
use crate::rope::RopeScaling;

pub(super) fn deepseek_v2(fields: &Fields, config: &mut Config) -> Adjusted {
    put_latents(fields, config, true)?;
    experts::deepseek_v2_moe(fields, config)
}

pub(super) fn deepseek_v3(fields: &Fields, config: &mut Config) -> Adjusted {
    put_latents(fields, config, fields.flag("rope_interleave", true)?)?;
    experts::deepseek_v3_moe(fields, config)?;
    put_mtp(fields, config, MtpForm::DeepSeek, &["num_nextn_predict_layers", "num_mtp_layers"]);
    Ok(())
}

/// GLM-4.7-Flash: DeepSeek V3 whose layers with experts are listed, or all but the first.
pub(super) fn glm4_moe_lite(fields: &Fields, config: &mut Config) -> Adjusted {
    if config.ropes[0].rotary_dim != config.ropes[0].head_dim {
        let found = fields.get("partial_rotary_factor").cloned().unwrap_or_default();
        return Err(fields.wrong("partial_rotary_factor", "1, the only value that is supported", &found));
    }
    require_kv_heads(fields)?;
    put_latents(fields, config, fields.flag("rope_interleave", true)?)?;
    experts::glm4_moe_lite(fields, config)?;
    put_mtp(fields, config, MtpForm::DeepSeek, &["num_nextn_predict_layers", "num_mtp_layers"]);
    Ok(())
}

/// Latent vectors in all layers, and no experts.
pub(super) fn youtu(fields: &Fields, config: &mut Config) -> Adjusted {
    require_kv_heads(fields)?;
    put_latents(fields, config, fields.flag("rope_interleave", true)?)
}

/// In these architectures null does not stand for all heads.
fn require_kv_heads(fields: &Fields) -> Adjusted {
    fields.required_size("num_key_value_heads").map(|_| ())
}

/// The same with three multipliers: of embeddings, of what layers add to the hidden state, and of logits.
pub(super) fn minicpm3(fields: &Fields, config: &mut Config) -> Adjusted {
    let (hidden, layers) = (config.hidden_size, config.num_layers() as f64);
    let value_dim = hidden / config.layers[0].attention.num_heads;
    let defaults = [("v_head_dim".to_owned(), value_dim.into())].into_iter().collect();
    put_latents(&fields.object_of_itself().with_defaults(&defaults), config, false)?;
    // Only an absent field has the value of the published model; null says that there is no multiplier.
    let multiplier = |name: &str, absent: f64, null: f64| match fields.to_map().contains_key(name) {
        true => Ok::<_, ModelError>(fields.positive(name)?.unwrap_or(null)),
        false => Ok(absent),
    };
    let residual = multiplier("scale_depth", 1.4, layers.sqrt())? / layers.sqrt();
    let embedding = fields.positive("scale_emb")?.unwrap_or(12.0);
    config.head.scale = (multiplier("dim_model_base", 256.0, hidden as f64)? / hidden as f64) as f32;
    scale_residuals(config, embedding, residual);
    Ok(())
}

/// Latent vectors in all layers.
pub(super) fn put_latents(fields: &Fields, config: &mut Config, is_interleaved: bool) -> Adjusted {
    fields.ignore(&["qk_head_dim"]); // The sum of two others.
    if let Some(found) = fields.get("moe_layer_freq").filter(|value| value.as_u64() != Some(1)) {
        return Err(fields.wrong("moe_layer_freq", "1, the only value that is supported", found));
    }
    let multiple = |name: &str, of: usize| match fields.required_size(name)? {
        size if size.is_multiple_of(of) => Ok(size),
        size => Err(fields.wrong(name, &format!("a multiple of {of}"), &size.into())),
    };
    let shape = LatentShape {
        rank: multiple("kv_lora_rank", 16)?,
        rotary_dim: multiple("qk_rope_head_dim", 8)?,
        key_dim: multiple("qk_nope_head_dim", 8)?,
        value_dim: multiple("v_head_dim", 8)?,
        is_interleaved,
    };
    let named = fields.to_map().get("head_dim").cloned().unwrap_or_default();
    if !named.is_null() && named.as_u64() != Some(shape.rotary_dim as u64) {
        let expected = format!("`qk_rope_head_dim` ({}) or absent", shape.rotary_dim);
        return Err(ModelError::Field {
            path: fields.path().into(),
            field: "head_dim".into(),
            expected,
            found: named.to_string(),
        });
    }
    let query_rank = fields.size("q_lora_rank")?;
    let (num_heads, num_kv_heads) = (config.layers[0].attention.num_heads, config.layers[0].attention.num_kv_heads);
    if num_heads != num_kv_heads {
        let expected = format!("`num_attention_heads` ({num_heads}) or absent: k and v have all heads");
        return Err(fields.wrong("num_key_value_heads", &expected, &num_kv_heads.into()));
    }
    let magnitude = query_magnitude(fields, config)?;
    let scale = (shape.query_dim() as f64).powf(-0.5) * magnitude * magnitude;
    each_attention(config, |attention| {
        attention.latent = Some(LatentLayer { shape, query_rank });
        (attention.num_kv_heads, attention.head_dim) = (1, shape.width());
        attention.scale = scale as f32;
    });
    Ok(())
}

/// The square root of the factor of scores that goes with YaRN.
fn query_magnitude(fields: &Fields, config: &Config) -> Result<f64, ModelError> {
    let RopeScaling::Yarn { factor, .. } = config.ropes[0].scaling else { return Ok(1.0) };
    let name = if fields.get("rope_scaling").is_some() { "rope_scaling" } else { "rope_parameters" };
    let parameters = fields.object(name)?.ok_or_else(|| fields.wrong(name, "an object", &Value::Null))?;
    let mscale = parameters.positive("mscale_all_dim")?;
    Ok(mscale.filter(|_| factor > 1.0).map_or(1.0, |mscale| 0.1 * mscale * factor.ln() + 1.0))
}

#[cfg(test)]
mod tests {
    use ops::{ExpertGroups, GroupScore, Scoring};
    use serde_json::json;

    use super::*;
    use crate::families::tests::read_config;

    /// The fields of DeepSeek-V2-Lite that differ from the defaults of its class.
    fn v2_lite() -> Value {
        json!({
            "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944,
            "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": null,
            "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_routed_experts": 64, "n_shared_experts": 2, "n_group": 1,
            "topk_group": 1, "topk_method": "greedy", "norm_topk_prob": false, "num_experts_per_tok": 6, "first_k_dense_replace": 1,
            "scoring_func": "softmax", "seq_aux": true, "aux_loss_alpha": 0.001, "vocab_size": 102400, "torch_dtype": "bfloat16",
            "max_position_embeddings": 163840, "routed_scaling_factor": 1.0, "rope_theta": 10000,
            "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
                             "mscale": 0.707, "mscale_all_dim": 0.707},
        })
    }

    fn v3() -> Value {
        json!({
            "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168, "num_attention_heads": 128,
            "num_key_value_heads": 128, "num_hidden_layers": 61, "vocab_size": 129280, "ep_size": 1, "moe_layer_freq": 1,
            "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": true,
            "num_nextn_predict_layers": 1, "routed_scaling_factor": 2.5, "max_position_embeddings": 163840,
            "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
            "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
                             "mscale": 1.0, "mscale_all_dim": 1.0},
        })
    }

    fn error(mut config: Value, name: &str, value: Value) -> String {
        config[name] = value;
        read_config(&config).unwrap_err().to_string()
    }

    #[test]
    fn published_configurations_are_read() {
        let lite = read_config(&v2_lite()).unwrap();
        let (attention, mlp) = (&lite.layers[26].attention, lite.layers[26].mlp.unwrap());
        let latent = attention.latent.unwrap();
        assert_eq!((latent.query_rank, latent.shape.width(), latent.shape.query_dim()), (None, 576, 192));
        assert_eq!(
            (attention.num_heads, attention.num_kv_heads, attention.head_dim, lite.ropes[0].head_dim),
            (16, 1, 576, 64)
        );
        let magnitude = 0.0707 * 40f32.ln() + 1.0;
        assert!((attention.scale - magnitude * magnitude / 192f32.sqrt()).abs() < 1e-6, "{}", attention.scale);
        assert_eq!((mlp.intermediate_size, lite.layers[0].mlp.unwrap().intermediate_size), (2816, 10944));
        assert!(lite.layers[0].experts.is_none());
        let routing = lite.layers[1].experts.unwrap().routing;
        assert_eq!(
            (routing.top_k, routing.scoring, routing.groups, routing.is_normalized),
            (6, Scoring::Softmax, None, false)
        );

        let v3 = read_config(&v3()).unwrap();
        let latent = v3.layers[60].attention.latent.unwrap();
        assert_eq!((latent.query_rank, latent.shape.rank, latent.shape.is_interleaved), (Some(1536), 512, true));
        let routing = v3.layers[3].experts.unwrap().routing;
        let groups = ExpertGroups { count: 8, chosen: 4, score: GroupScore::BestTwo };
        assert_eq!((routing.scoring, routing.groups, routing.scale), (Scoring::Sigmoid, Some(groups), 2.5));
        assert!(routing.is_normalized && v3.layers[2].experts.is_none());
    }

    #[test]
    fn kimi_k2_is_known_by_its_own_name_alone_or_as_a_part_of_a_model_that_sees_images() {
        let mut text = v3();
        text.as_object_mut().unwrap().remove("architectures");
        text["model_type"] = json!("kimi_k2");
        let whole = json!({"architectures": ["KimiK25ForConditionalGeneration"], "text_config": text.clone()});
        for config in [text, whole] {
            assert_eq!(read_config(&config).unwrap().architecture, "DeepseekV3ForCausalLM");
        }
    }

    #[test]
    fn v2_chooses_within_the_groups_of_the_best_experts() {
        let mut config = v2_lite();
        for (name, value) in
            [("topk_method", json!("group_limited_greedy")), ("n_group", json!(8)), ("topk_group", json!(3))]
        {
            config[name] = value;
        }
        let routing = read_config(&config).unwrap().layers[1].experts.unwrap().routing;
        assert_eq!(routing.groups, Some(ExpertGroups { count: 8, chosen: 3, score: GroupScore::Best }));
        assert!(error(config.clone(), "n_group", json!(7)).contains("`n_group`"));
        assert!(error(config, "topk_method", json!("noaux_tc")).contains("`group_limited_greedy`"));
    }

    #[test]
    fn what_is_not_supported_is_refused_by_its_name() {
        for (name, value) in [
            ("num_key_value_heads", json!(8)),
            ("kv_lora_rank", json!(500)),
            ("qk_rope_head_dim", json!(36)),
            ("moe_layer_freq", json!(2)),
            ("norm_topk_prob", json!(true)),
            ("scoring_func", json!("sigmoid")),
        ] {
            let error = error(v2_lite(), name, value);
            assert!(error.contains(name), "{name}: {error}");
        }
        assert!(error(v3(), "topk_method", json!("greedy")).contains("topk_method"));
        assert!(error(v3(), "index_topk", json!(2048)).contains("`index_topk`"), "sparse attention of V3.2");
    }

    #[test]
    fn latent_vectors_stay_numbers_whatever_type_a_checkpoint_names() {
        let mut config = v3();
        config["quantization_config"] = json!({
            "quant_method": "compressed-tensors", "format": "float-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
            "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": false, "symmetric": true, "strategy": "tensor"},
        });
        let config = read_config(&config).unwrap().in_kv_cache(settings::KvCacheType::Auto);
        assert_eq!(config.kv_elements, ops::KvElements::Plain);
    }
}
