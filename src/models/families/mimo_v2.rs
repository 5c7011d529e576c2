//! MiMo-V2-Flash: heads of v that are narrower than those of k; layers with a window have sinks, twice the KV heads and a rotation of
//! their own; experts with sigmoids, chosen with a bias.

use ops::Scoring;
use serde_json::{Value, json};

use super::adjust::{Adjusted, require_both_ropes};
use super::experts::{put_grouped_experts, sparse_layers};
use crate::Rope;
use crate::config::Config;
use crate::fields::Fields;
use crate::rope::RopeShape;

/// The share of a head that is rotated.
const ROTATED: f64 = 0.334;

pub(super) fn mimo_v2_flash(fields: &Fields, config: &mut Config) -> Adjusted {
    for name in ["rope_scaling", "sliding_window_pattern", "_sliding_window_pattern"] {
        if let Some(found) = fields.get(name) {
            return Err(fields.wrong(name, "absent: this architecture does not have it", found));
        }
    }
    fields.only_text("scoring_func", &["sigmoid"])?;
    fields.only_text("topk_method", &["noaux_tc"])?;
    fields.required_size("sliding_window")?;
    // The first layer and every sixth one have no window.
    if fields.get("layer_types").is_none() {
        config.layers[0].attention.window = None;
    }
    shape_attention(fields, config)?;
    require_both_ropes(fields, config)?;
    let shape = RopeShape {
        head_dim: config.layers[0].attention.head_dim,
        is_interleaved: false,
        partial: Some(ROTATED),
        theta: 10_000.0,
        max_positions: config.max_position_embeddings,
    };
    config.ropes = vec![
        Rope::of_layer_type(fields, "full_attention", shape)?,
        Rope::of_layer_type(fields, "sliding_attention", shape)?,
    ];
    let sparse = sparse_layers(fields, config.num_layers(), |index| index > 0)?;
    let size = fields.required_size("moe_intermediate_size")?;
    put_grouped_experts(fields, config, [size, 0], (Scoring::Sigmoid, true), |index| sparse[index])?;
    require_equal(fields, config, &sparse)
}

/// The heads of each layer.
fn shape_attention(fields: &Fields, config: &mut Config) -> Adjusted {
    let attention = &config.layers[0].attention;
    let (num_heads, num_kv_heads, head_dim) = (attention.num_heads, attention.num_kv_heads, attention.head_dim);
    let value_dim = fields.required_size("v_head_dim")?;
    if value_dim > head_dim {
        return Err(fields.wrong("v_head_dim", &format!("at most `head_dim` ({head_dim})"), &value_dim.into()));
    }
    // An absent scale is the usual one, and null means none.
    let is_null = fields.to_map().get("attention_value_scale").is_some_and(Value::is_null);
    let usual = if is_null { 1.0 } else { 0.707 };
    let value_scale = fields.positive("attention_value_scale")?.unwrap_or(usual) as f32;
    for attention in config.layers.iter_mut().map(|layer| &mut layer.attention) {
        attention.value_dim = (value_dim < head_dim).then_some(value_dim);
        // The output is linear in v.
        attention.out_scale = value_scale;
        attention.rope = Some(usize::from(attention.window.is_some()));
        attention.has_sinks = attention.window.is_some();
        if attention.window.is_some() {
            attention.num_kv_heads = 2 * num_kv_heads;
        }
        if !num_heads.is_multiple_of(attention.num_kv_heads) {
            let expected = format!("half of a divisor of `num_attention_heads` ({num_heads})");
            return Err(fields.wrong("num_key_value_heads", &expected, &num_kv_heads.into()));
        }
    }
    Ok(())
}

/// Fields of the publisher that transformers does not read must say what it assumes.
fn require_equal(fields: &Fields, config: &Config, sparse: &[bool]) -> Adjusted {
    let attention = &config.layers[0].attention;
    let kv_heads = fields.size("num_key_value_heads")?;
    let window = fields.required_size("sliding_window")?;
    let numbers = |flags: &mut dyn Iterator<Item = bool>| flags.map(u8::from).collect::<Vec<_>>();
    let with_window = numbers(&mut config.layers.iter().map(|layer| layer.attention.window.is_some()));
    let expected = [
        ("hybrid_layer_pattern", json!(with_window)),
        ("moe_layer_freq", json!(numbers(&mut sparse.iter().copied()))),
        ("rope_theta", json!(config.ropes[0].theta)),
        ("swa_rope_theta", json!(config.ropes[1].theta)),
        ("partial_rotary_factor", json!(ROTATED)),
        ("layernorm_epsilon", fields.get("rms_norm_eps").cloned().unwrap_or_default()),
        ("swa_num_attention_heads", json!(attention.num_heads)),
        ("swa_num_key_value_heads", json!(kv_heads.map(|count| 2 * count))),
        ("swa_head_dim", json!(attention.head_dim)),
        ("swa_v_head_dim", json!(fields.size("v_head_dim")?)),
        ("sliding_window_size", json!(window)),
        ("attention_chunk_size", json!(window)),
        ("add_swa_attention_sink_bias", json!(true)),
        ("add_full_attention_sink_bias", json!(false)),
    ];
    for (name, expected) in &expected {
        let is_equal = |found: &Value| match (found.as_f64(), expected.as_f64()) {
            (Some(found), Some(expected)) => found == expected,
            _ => found == expected,
        };
        if let Some(found) = fields.get(name).filter(|found| !is_equal(found)) {
            return Err(fields.wrong(name, &format!("{expected} or absent"), found));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::families::tests::read_config;

    /// The publisher's fields.
    fn config(change: impl FnOnce(&mut Value)) -> Value {
        let text = r#"{
            "architectures": ["MiMoV2FlashForCausalLM"], "model_type": "mimo_v2_flash", "hidden_size": 4096, "vocab_size": 152576,
            "num_hidden_layers": 7, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128,
            "swa_num_attention_heads": 64, "swa_num_key_value_heads": 8, "swa_head_dim": 192, "swa_v_head_dim": 128,
            "hidden_act": "silu", "intermediate_size": 16384, "layernorm_epsilon": 1e-5, "max_position_embeddings": 262144,
            "rope_theta": 5000000, "swa_rope_theta": 10000, "partial_rotary_factor": 0.334, "sliding_window": 128,
            "sliding_window_size": 128, "attention_chunk_size": 128, "hybrid_block_size": null,
            "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0, 1], "moe_layer_freq": [0, 1, 1, 1, 1, 1, 1],
            "add_full_attention_sink_bias": false, "add_swa_attention_sink_bias": true, "attention_bias": false,
            "attention_value_scale": 0.707, "n_routed_experts": 256, "n_shared_experts": null, "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048, "norm_topk_prob": true, "routed_scaling_factor": null, "scoring_func": "sigmoid",
            "topk_method": "noaux_tc", "n_group": 1, "topk_group": 1, "tie_word_embeddings": false
        }"#;
        let mut config = serde_json::from_str(text).unwrap();
        change(&mut config);
        config
    }

    #[test]
    fn layers_with_a_window_have_sinks_twice_the_kv_heads_and_a_rotation_of_their_own() {
        let read = read_config(&config(|_| ())).unwrap();
        let of = |index: usize| &read.layers[index].attention;
        assert_eq!([0, 4, 5].map(|index| of(index).window), [None, Some(128), None]);
        assert_eq!(
            [0, 4, 5].map(|index| (of(index).has_sinks, of(index).num_kv_heads)),
            [(false, 4), (true, 8), (false, 4)]
        );
        let thetas = [0, 4].map(|index| read.ropes[of(index).rope.unwrap()].theta);
        assert_eq!((thetas, read.ropes[0].rotary_dim), ([5e6, 1e4], 64));
        assert_eq!((of(1).head_dim, of(1).value_dim, of(1).out_scale), (192, Some(128), 0.707));
        assert_eq!(read.layers.iter().filter(|layer| layer.experts.is_some() && layer.mlp.is_none()).count(), 6);
    }

    #[test]
    fn null_means_that_values_have_no_scale() {
        let read = read_config(&config(|config| config["attention_value_scale"] = Value::Null)).unwrap();
        assert_eq!(read.layers[0].attention.out_scale, 1.0);
    }

    #[test]
    fn fields_that_say_anything_else_are_refused_by_their_name() {
        for (name, value) in [
            ("hybrid_layer_pattern", json!([0, 1, 1, 1, 0, 1, 1])),
            ("moe_layer_freq", json!([1, 1, 1, 1, 1, 1, 1])),
            ("rope_theta", json!(10_000)),
            ("swa_rope_theta", json!(5_000_000)),
            ("partial_rotary_factor", json!(0.5)),
            ("layernorm_epsilon", json!(1e-6)),
            ("swa_num_attention_heads", json!(32)),
            ("swa_num_key_value_heads", json!(4)),
            ("swa_head_dim", json!(128)),
            ("swa_v_head_dim", json!(192)),
            ("attention_chunk_size", json!(64)),
            ("add_full_attention_sink_bias", json!(true)),
            ("add_swa_attention_sink_bias", json!(false)),
            ("v_head_dim", json!(256)),
            ("num_key_value_heads", json!(64)),
            ("n_shared_experts", json!(1)),
            ("scoring_func", json!("softmax")),
            ("rope_scaling", json!({"type": "linear", "factor": 2.0})),
        ] {
            let error = read_config(&config(|config| config[name] = value)).unwrap_err().to_string();
            assert!(error.contains(name), "{name}: {error}");
        }
    }
}
