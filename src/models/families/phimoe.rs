//! Phi-3.5-MoE: layer norms, and experts whose weights follow from those that are nearly as likely.

use ops::Scoring;
use serde_json::Value;

use super::adjust::{Adjusted, note_long_rope};
use super::experts::{each_routing, mixtral};
use crate::config::Config;
use crate::fields::Fields;
use crate::rope::RopeScaling;

pub(super) fn phimoe(fields: &Fields, config: &mut Config) -> Adjusted {
    config.head.has_bias = fields.flag("lm_head_bias", false)?;
    fields.ignore(&["input_jitter_noise"]); // Of training.
    mixtral(fields, config)?;
    if let Some(found) = fields.get("num_experts_per_tok").filter(|found| found.as_u64() != Some(2)) {
        return Err(fields.wrong("num_experts_per_tok", "2, the only number that the router chooses", found));
    }
    // The name says what training does with it.
    let noise = fields.positive("router_jitter_noise")?.unwrap_or(0.01);
    let scoring = Scoring::SparseMixer { tolerance: 2.0 * noise as f32 };
    each_routing(config, |routing| (routing.scoring, routing.is_normalized) = (scoring, false));
    long_rope(fields, config)
}

/// cos and sin have multipliers of their own with the short factors and with the long ones.
fn long_rope(fields: &Fields, config: &mut Config) -> Adjusted {
    let name = if fields.get("rope_scaling").is_some() { "rope_scaling" } else { "rope_parameters" };
    let Some(parameters) = fields.object(name)? else { return Ok(()) };
    for kind in ["rope_type", "type"] {
        parameters.only_text(kind, &["longrope", "default"])?;
    }
    let RopeScaling::Long { original_max_positions, attention_factors, .. } = &mut config.ropes[0].scaling else {
        return Ok(());
    };
    *attention_factors = [parameters.required_positive("short_mscale")?, parameters.required_positive("long_mscale")?];
    let original = parameters.size("original_max_position_embeddings")?;
    if original != Some(*original_max_positions) {
        let found = original.map_or(Value::Null, Value::from);
        let expected = format!("{original_max_positions}, the length of the first training");
        return Err(parameters.wrong("original_max_position_embeddings", &expected, &found));
    }
    note_long_rope(config);
    Ok(())
}

#[cfg(test)]
mod tests {
    use ops::Feature;
    use serde_json::json;

    use super::*;
    use crate::ModelError;
    use crate::families::tests::read_config;

    /// The fields of Phi-3.5-MoE, with other sizes.
    fn published(change: impl FnOnce(&mut Value)) -> Result<Config, ModelError> {
        let text = r#"{
            "architectures": ["PhiMoEForCausalLM"], "attention_bias": true, "attention_dropout": 0.0, "bos_token_id": 1,
            "auto_map": {"AutoConfig": "configuration_phimoe.PhiMoEConfig"}, "eos_token_id": 32000, "hidden_act": "silu",
            "hidden_dropout": 0.0, "hidden_size": 64, "initializer_range": 0.02, "input_jitter_noise": 0.01,
            "intermediate_size": 96, "lm_head_bias": true, "max_position_embeddings": 131072, "model_type": "phimoe",
            "num_attention_heads": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2, "num_key_value_heads": 2,
            "num_local_experts": 16, "original_max_position_embeddings": 4096, "output_router_logits": false,
            "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "router_aux_loss_coef": 0.0, "router_jitter_noise": 0.01,
            "rope_scaling": {"long_factor": [1, 2, 3, 4, 5, 6, 7, 8], "long_mscale": 1.24, "type": "longrope",
                             "original_max_position_embeddings": 4096, "short_factor": [1, 1, 1, 1, 1, 1, 1, 1],
                             "short_mscale": 1.2},
            "sliding_window": 131072, "tie_word_embeddings": false, "torch_dtype": "bfloat16", "vocab_size": 501
        }"#;
        let mut config = serde_json::from_str(text).unwrap();
        change(&mut config);
        read_config(&config)
    }

    #[test]
    fn the_published_configuration_is_read() {
        let config = published(|_| ()).unwrap();
        let (attention, routing) = (&config.layers[1].attention, config.layers[1].experts.unwrap().routing);
        assert!(config.head.has_bias && config.norm.has_bias && attention.qkv_bias && attention.out_bias);
        assert_eq!((routing.top_k, routing.is_normalized), (2, false));
        assert_eq!(routing.scoring, Scoring::SparseMixer { tolerance: 0.02 });
        assert!(config.features().contains(&Feature::SparseMixer));
        let cos = |max_positions: usize| config.ropes[0].table(max_positions).cos[0];
        assert_eq!((cos(4096), cos(4097)), (1.2, 1.24));
        assert!(config.notes.iter().any(|note| note.contains("longrope")), "{:?}", config.notes);
    }

    #[test]
    fn what_is_not_supported_is_refused_by_its_name() {
        let refused = |name: &str, change: fn(&mut Value)| {
            let error = published(change).unwrap_err().to_string();
            assert!(error.contains(name), "{name}: {error}");
        };
        refused("num_experts_per_tok", |config| config["num_experts_per_tok"] = json!(1));
        refused("router_jitter_noise", |config| config["router_jitter_noise"] = json!(-0.1));
        refused("rope_scaling.type", |config| config["rope_scaling"] = json!({"type": "linear", "factor": 2.0}));
        refused("long_mscale", |config| config["rope_scaling"]["long_mscale"] = Value::Null);
        refused("original_max_position_embeddings", |config| {
            config["original_max_position_embeddings"] = json!(8192);
        });
    }
}
