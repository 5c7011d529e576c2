//! Mistral 4: DeepSeek's attention over latent vectors with queries that are scaled by position, and experts by a softmax.

use ops::Scoring;
use serde_json::Value;

use super::adjust::{Adjusted, ministral3};
use super::deepseek::put_latents;
use super::experts::put_grouped_experts;
use crate::ModelError;
use crate::config::Config;
use crate::fields::Fields;

pub(super) fn mistral4(fields: &Fields, config: &mut Config) -> Adjusted {
    let own = fields.object_of_itself().with_fields([("head_dim".to_owned(), Value::Null)]);
    put_latents(&own, config, fields.flag("rope_interleave", true)?)?;
    ministral3(fields, config)?;
    require_sizes(fields, config)?;
    let (first, size) = (fields.count("first_k_dense_replace")?, fields.required_size("moe_intermediate_size")?);
    let shared_size = size * fields.count("n_shared_experts")?;
    put_grouped_experts(fields, config, [size, shared_size], (Scoring::Softmax, true), |index| index >= first)
}

/// `head_dim` is the size of a head's parts together, and the share that is rotated is that of the rotated part.
fn require_sizes(fields: &Fields, config: &Config) -> Adjusted {
    let shape = config.layers[0].attention.latent.expect("all layers have latent vectors").shape;
    let named = fields.to_map().get("head_dim").cloned().unwrap_or_default();
    if !named.is_null() && named.as_u64() != Some(shape.query_dim() as u64) {
        return Err(ModelError::Field {
            path: fields.path().into(),
            field: "head_dim".into(),
            expected: format!("{} or absent", shape.query_dim()),
            found: named.to_string(),
        });
    }
    let name = if fields.get("rope_scaling").is_some() { "rope_scaling" } else { "rope_parameters" };
    let Some(parameters) = fields.object(name)? else { return Ok(()) };
    let Some(share) = parameters.positive("partial_rotary_factor")? else { return Ok(()) };
    if (shape.query_dim() as f64 * share) as usize == shape.rotary_dim {
        return Ok(());
    }
    let expected = format!("the share of {} elements in {}", shape.rotary_dim, shape.query_dim());
    Err(parameters.wrong("partial_rotary_factor", &expected, &share.into()))
}

#[cfg(test)]
mod tests {
    use ops::{Feature, QueryScale};
    use serde_json::json;

    use super::*;
    use crate::families::tests::read_config;

    fn config(change: impl FnOnce(&mut Value)) -> Value {
        let text = r#"{
            "architectures": ["Mistral4ForCausalLM"], "model_type": "mistral4", "hidden_size": 64, "vocab_size": 501,
            "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2, "intermediate_size": 96,
            "kv_lora_rank": 256, "q_lora_rank": 48, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "qk_head_dim": 128,
            "v_head_dim": 128, "head_dim": 128, "n_routed_experts": 8, "num_experts_per_tok": 4, "n_shared_experts": 1,
            "moe_intermediate_size": 32, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1,
            "norm_topk_prob": true, "routed_scaling_factor": 1.0, "rope_interleave": true, "attention_bias": false,
            "max_position_embeddings": 1048576, "rms_norm_eps": 1e-6, "tie_word_embeddings": false,
            "rope_parameters": {"type": "yarn", "rope_type": "yarn", "rope_theta": 10000.0, "factor": 128.0,
                                "original_max_position_embeddings": 8192, "max_position_embeddings": 1048576,
                                "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                                "llama_4_scaling_beta": 0.1, "partial_rotary_factor": 0.5}
        }"#;
        let mut config = serde_json::from_str(text).unwrap();
        change(&mut config);
        config
    }

    #[test]
    fn queries_of_latent_vectors_are_scaled_by_position() {
        let whole = json!({
            "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "vision_config": {},
            "text_config": config(|_| ()),
        });
        for file in [config(|_| ()), whole] {
            let config = read_config(&file).unwrap();
            let attention = &config.layers[1].attention;
            assert_eq!(attention.query_scale, Some(QueryScale { beta: 0.1, period: 8192, offset: 0 }));
            assert_eq!((attention.latent.unwrap().shape.rank, config.ropes[0].rotary_dim), (256, 64));
            let magnitude = 0.1 * 128f32.ln() + 1.0;
            assert!((attention.scale - magnitude * magnitude / 128f32.sqrt()).abs() < 1e-6, "{}", attention.scale);
            let routing = config.layers[0].experts.unwrap().routing;
            assert_eq!((routing.scoring, routing.is_normalized, routing.groups), (Scoring::Softmax, true, None));
            let features = config.features();
            assert!(features.contains(&Feature::LatentQueryScale) && !features.contains(&Feature::QueryScale));
        }
    }

    #[test]
    fn what_is_not_supported_is_refused_by_its_name() {
        let refused = |name: &str, change: fn(&mut Value)| {
            let error = read_config(&config(change)).unwrap_err().to_string();
            assert!(error.contains(name), "{name}: {error}");
        };
        refused("head_dim", |config| config["head_dim"] = json!(64));
        refused("num_key_value_heads", |config| config["num_key_value_heads"] = json!(2));
        refused("partial_rotary_factor", |config| config["rope_parameters"]["partial_rotary_factor"] = json!(1.0));
        refused("llama_4_scaling_beta", |config| config["rope_parameters"]["llama_4_scaling_beta"] = Value::Null);
        refused("n_group", |config| config["n_group"] = json!(3));
        refused("scoring_func", |config| config["scoring_func"] = json!("sigmoid"));
    }
}
