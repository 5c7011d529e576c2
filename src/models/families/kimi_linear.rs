//! Kimi Linear: Kimi Delta Attention beside attention over latent vectors that is not rotated, and experts as in DeepSeek V3.

use ops::{RecurrentRule, RecurrentShape, Scoring};
use serde_json::Value;

use super::adjust::Adjusted;
use super::deepseek::put_latents;
use super::experts::{put_grouped_experts, sparse_layers};
use super::hybrid::{layers_named, put_in_layers};
use crate::config::Config;
use crate::fields::Fields;
use crate::layer_spec::RecurrentLayer;
use crate::rope::RopeScaling;
use crate::{ModelError, Rope};

pub(super) fn kimi_linear(fields: &Fields, config: &mut Config) -> Adjusted {
    for name in ["rope_scaling", "rope_parameters"] {
        if let Some(found) = fields.get(name) {
            return Err(fields.wrong(name, "absent: this architecture is not rotated", found));
        }
    }
    // Nothing is rotated, and layers that predict further tokens are not used.
    fields.ignore(&["rope_theta", "num_nextn_predict_layers"]);
    ["mla_use_nope", "use_grouped_topk"].into_iter().try_for_each(|name| fields.only(name, true))?;
    fields.only_text("moe_router_activation_func", &["sigmoid"])?;
    let eps = config.norm.eps;
    let linear = fields.object("linear_attn_config")?;
    put_in_layers(
        fields,
        config,
        recurrent_layer(fields, linear.as_ref(), eps)?,
        kinds(fields, linear.as_ref(), config)?,
    )?;
    // `head_dim` is not read.
    let own = fields.object_of_itself().with_fields([("head_dim".to_owned(), Value::Null)]);
    put_latents(&own, config, false)?;
    // All frequencies are 0, so that what is rotated stays as it is.
    let scaling = RopeScaling::Proportional { factor: 1.0, share: 0.0 };
    config.ropes = vec![Rope { scaling, ..config.ropes[0].clone() }];
    let first = fields.count("first_k_dense_replace")?;
    let sparse = sparse_layers(fields, config.num_layers(), |index| index >= first)?;
    let size = fields.required_size("moe_intermediate_size")?;
    let sizes = [size, size * fields.count("n_shared_experts")?];
    put_grouped_experts(fields, config, sizes, (Scoring::Sigmoid, true), |index| sparse[index])
}

/// The sizes of Kimi Delta Attention. Those of `linear_attn_config` take precedence.
fn recurrent_layer(fields: &Fields, linear: Option<&Fields>, eps: f32) -> Result<RecurrentLayer, ModelError> {
    let size = |inner: &str, outer: &str| match linear.map(|linear| linear.size(inner)).transpose()?.flatten() {
        Some(size) => {
            fields.ignore(&[outer]);
            Ok(size)
        }
        None => fields.required_size(outer),
    };
    let (num_heads, dim) = (size("num_heads", "linear_num_heads")?, size("head_dim", "linear_head_dim")?);
    let shape = RecurrentShape {
        rule: RecurrentRule::KimiDelta,
        num_key_heads: num_heads,
        num_value_heads: num_heads,
        key_dim: dim,
        value_dim: dim,
        num_taps: size("short_conv_kernel_size", "linear_conv_kernel_dim")?,
    };
    Ok(RecurrentLayer { shape, eps, has_conv_bias: false, has_bias: false })
}

/// Which layers have Kimi Delta Attention: those of `layer_types`, or those that `linear_attn_config` numbers from 1, or all but the
/// fifth, the ninth and so on.
fn kinds(fields: &Fields, linear: Option<&Fields>, config: &Config) -> Result<Vec<bool>, ModelError> {
    let num_layers = config.num_layers();
    let names = ["full_attn_layers", "kda_layers"];
    if let Some(value) = fields.get("layer_types") {
        linear.inspect(|linear| linear.ignore(&names));
        return layers_named(fields, value, num_layers, &["full_attention"], &["linear_attention"]);
    }
    let [full, recurrent] = names.map(|name| linear.and_then(|linear| linear.get(name)));
    let (Some(linear), Some(_), Some(found)) = (linear, full, recurrent) else {
        return Ok((0..num_layers).map(|index| index == 0 || !index.is_multiple_of(4)).collect());
    };
    let [full, recurrent] = [linear.token_ids(names[0])?, linear.token_ids(names[1])?];
    let is_one = |number: &u32| full.contains(number) != recurrent.contains(number);
    let numbers = 1..=num_layers as u32;
    if full.len() + recurrent.len() != num_layers || !numbers.clone().all(|number| is_one(&number)) {
        let expected = format!("the numbers from 1 to {num_layers} that `full_attn_layers` does not have");
        return Err(linear.wrong("kda_layers", &expected, found));
    }
    Ok(numbers.map(|number| recurrent.contains(&number)).collect())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::families::tests::read_config;

    /// The published configuration with fewer layers.
    fn config(change: impl FnOnce(&mut Value)) -> Value {
        let text = r#"{
            "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "dtype": "bfloat16", "hidden_size": 2304,
            "vocab_size": 163840, "num_hidden_layers": 5, "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 72,
            "hidden_act": "silu", "intermediate_size": 9216, "kv_lora_rank": 512, "q_lora_rank": null, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": true, "model_max_length": 1048576, "rms_norm_eps": 1e-5,
            "first_k_dense_replace": 1, "moe_intermediate_size": 1024, "moe_layer_freq": 1, "moe_renormalize": true,
            "moe_router_activation_func": "sigmoid", "num_expert_group": 1, "topk_group": 1, "use_grouped_topk": true,
            "num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1, "routed_scaling_factor": 2.446,
            "num_nextn_predict_layers": 0, "rope_scaling": null, "rope_theta": 10000.0, "tie_word_embeddings": false,
            "linear_attn_config": {"full_attn_layers": [4, 5], "kda_layers": [1, 2, 3], "head_dim": 128, "num_heads": 32,
                                   "short_conv_kernel_size": 4}
        }"#;
        let mut config = serde_json::from_str(text).unwrap();
        change(&mut config);
        config
    }

    #[test]
    fn layers_have_kimi_delta_attention_or_latent_vectors_that_are_not_rotated() {
        let read = read_config(&config(|_| ())).unwrap();
        let is_recurrent: Vec<bool> = read.layers.iter().map(|layer| layer.recurrent.is_some()).collect();
        assert_eq!(is_recurrent, [true, true, true, false, false]);
        let shape = read.layers[0].recurrent.unwrap().shape;
        assert_eq!(
            (shape.rule, shape.num_value_heads, shape.key_dim, shape.num_taps),
            (RecurrentRule::KimiDelta, 32, 128, 4)
        );
        let attention = &read.layers[3].attention;
        assert_eq!((attention.latent.unwrap().shape.width(), attention.scale), (576, 192f32.powf(-0.5)));
        assert!(read.ropes[0].frequencies(1024).iter().all(|frequency| *frequency == 0.0));
        let experts = read.layers[1].experts.unwrap();
        assert_eq!((experts.num_experts, experts.routing.top_k, experts.routing.scale), (256, 8, 2.446));
        assert_eq!(
            read.layers.iter().map(|layer| layer.mlp.unwrap().intermediate_size).collect::<Vec<_>>(),
            [9216, 1024, 1024, 1024, 1024]
        );
        assert_eq!(read.max_position_embeddings, 1_048_576);
    }

    #[test]
    fn what_is_not_supported_is_refused_by_its_name() {
        for (name, value) in [
            ("mla_use_nope", json!(false)),
            ("rope_scaling", json!({"type": "yarn", "factor": 4.0})),
            ("moe_router_activation_func", json!("softmax")),
            ("moe_layer_freq", json!(2)),
            ("use_grouped_topk", json!(false)),
            ("hidden_act", json!("gelu")),
            (
                "linear_attn_config",
                json!({"full_attn_layers": [4], "kda_layers": [1, 2, 3], "head_dim": 128, "num_heads": 32}),
            ),
        ] {
            let error = read_config(&config(|config| config[name] = value)).unwrap_err().to_string();
            assert!(error.contains(name), "{name}: {error}");
        }
    }
}
