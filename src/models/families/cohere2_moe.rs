//! Command A+: Cohere 2 with experts, whose first layers may be dense.

use ops::{NormKind, Scoring};

use super::adjust::{Adjusted, cohere2};
use super::experts::{each_routing, put_experts_beside, sparse_layers};
use crate::config::Config;
use crate::fields::Fields;

pub(super) fn cohere2_moe(fields: &Fields, config: &mut Config) -> Adjusted {
    let first = fields.count("first_k_dense_replace")?;
    let prefix_pattern = fields.size("prefix_dense_sliding_window_pattern")?.unwrap_or(1);
    if fields.get("layer_types").is_none() {
        put_windows(fields, config, [first, prefix_pattern])?;
    }
    cohere2(fields, config)?;
    // transformers does not take that beside them.
    if let Some(parameters) = fields.object("rope_parameters")? {
        parameters.required_positive("rope_theta")?;
    }
    let sparse = sparse_layers(fields, config.num_layers(), |index| index >= first)?;
    let dense_size = fields.size("prefix_dense_intermediate_size")?;
    for (layer, _) in config.layers.iter_mut().zip(&sparse).filter(|(_, is_sparse)| !**is_sparse) {
        if prefix_pattern == 1 {
            layer.attention.rope = Some(0);
        }
        if let (Some(mlp), Some(size)) = (&mut layer.mlp, dense_size) {
            mlp.intermediate_size = size;
        }
    }
    if let Some(eps) = fields.positive("rms_norm_eps")? {
        (config.norm.kind, config.norm.eps) = (NormKind::Rms, eps as f32);
    }
    put_experts(fields, config, &sparse)
}

/// The windows of the dense layers, of which every n-th has none, and then those of the others.
fn put_windows(fields: &Fields, config: &mut Config, [first, prefix_pattern]: [usize; 2]) -> Adjusted {
    let (window, pattern) =
        (fields.required_size("sliding_window")?, fields.size("sliding_window_pattern")?.unwrap_or(4));
    for (index, layer) in config.layers.iter_mut().enumerate() {
        let (number, every) = if index < first { (index + 1, prefix_pattern) } else { (index + 1 - first, pattern) };
        layer.attention.window = (!number.is_multiple_of(every)).then_some(window);
    }
    Ok(())
}

/// Experts beside a feed-forward for all tokens, of which the sum or the mean counts.
fn put_experts(fields: &Fields, config: &mut Config, sparse: &[bool]) -> Adjusted {
    let (size, num_shared) = (fields.required_size("intermediate_size")?, fields.count("num_shared_experts")?);
    fields.only_text("expert_selection_fn", &["softmax", "sigmoid"])?;
    fields.only_text("shared_expert_combination_strategy", &["average", "sum"])?;
    let norm_sigmoids = fields.flag("norm_topk_prob", true)?;
    // The softmax over the chosen experts alone is that over all, divided by the sum of the chosen ones.
    let (scoring, is_normalized) = match fields.has_text("expert_selection_fn", "sigmoid") {
        true => (Scoring::Sigmoid, norm_sigmoids),
        false => (Scoring::Softmax, true),
    };
    let is_mean = num_shared > 0 && !fields.has_text("shared_expert_combination_strategy", "sum");
    let scale = if is_mean { 0.5 } else { 1.0 };
    put_experts_beside(fields, config, [size, size * num_shared], is_normalized, |index| sparse[index])?;
    each_routing(config, |routing| (routing.scoring, routing.scale) = (scoring, scale));
    let shared =
        config.layers.iter_mut().filter(|layer| layer.experts.is_some()).filter_map(|layer| layer.mlp.as_mut());
    shared.for_each(|mlp| mlp.scale = scale);
    Ok(())
}

#[cfg(test)]
mod tests {
    use ops::Feature;
    use serde_json::{Value, json};

    use super::*;
    use crate::ModelError;
    use crate::families::tests::read_config;

    /// Six layers, of which two are dense by the first layers' number.
    fn read(change: impl FnOnce(&mut Value)) -> Result<Config, ModelError> {
        let text = r#"{
            "architectures": ["Cohere2MoeForCausalLM"], "model_type": "cohere2_moe", "hidden_size": 64, "vocab_size": 501,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 6,
            "intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "num_shared_experts": 2,
            "first_k_dense_replace": 2, "sliding_window": 64, "sliding_window_pattern": 2, "rope_theta": 50000,
            "prefix_dense_intermediate_size": 96, "logit_scale": 0.25, "expert_selection_fn": "sigmoid",
            "norm_topk_prob": false, "use_parallel_block": true, "position_embedding_type": "rope_gptj"
        }"#;
        let mut config = serde_json::from_str(text).unwrap();
        change(&mut config);
        read_config(&config)
    }

    fn windows_and_ropes(config: &Config) -> Vec<(bool, bool)> {
        let attention = config.layers.iter().map(|layer| &layer.attention);
        attention.map(|attention| (attention.window.is_some(), attention.rope.is_some())).collect()
    }

    #[test]
    fn first_layers_may_be_dense_and_have_windows_of_their_own() {
        let config = read(|_| ()).unwrap();
        let (none, rotated, windowed) = ((false, false), (false, true), (true, true));
        assert_eq!(windows_and_ropes(&config), [rotated, rotated, windowed, none, windowed, none]);
        let sizes = config.layers.iter().map(|layer| (layer.experts.is_some(), layer.mlp.unwrap().intermediate_size));
        assert_eq!(sizes.collect::<Vec<_>>()[1..3], [(false, 96), (true, 64)]);
        let config = read(|config| config["prefix_dense_sliding_window_pattern"] = json!(2)).unwrap();
        assert_eq!(windows_and_ropes(&config), [windowed, none, windowed, none, windowed, none]);
    }

    #[test]
    fn outputs_of_experts_and_feed_forward_are_added_or_their_mean_is() {
        let config = read(|_| ()).unwrap();
        let (mlp, routing) = (config.layers[2].mlp.unwrap(), config.layers[2].experts.unwrap().routing);
        assert_eq!((mlp.scale, routing.scale, config.layers[0].mlp.unwrap().scale), (0.5, 0.5, 1.0));
        assert_eq!((routing.scoring, routing.is_normalized), (Scoring::Sigmoid, false));
        assert!(config.features().contains(&Feature::LayerScale));
        let config = read(|config| config["shared_expert_combination_strategy"] = json!("sum")).unwrap();
        let (mlp, routing) = (config.layers[2].mlp.unwrap(), config.layers[2].experts.unwrap().routing);
        assert_eq!((mlp.scale, routing.scale), (1.0, 1.0));
        let config = read(|config| {
            (config["num_shared_experts"], config["expert_selection_fn"]) = (json!(0), json!("softmax"));
        });
        let layer = config.unwrap().layers.remove(2);
        let routing = layer.experts.unwrap().routing;
        assert_eq!((layer.mlp, routing.scale, routing.is_normalized), (None, 1.0, true));
    }

    #[test]
    fn what_is_not_supported_is_refused_by_its_name() {
        for (name, value) in [
            ("expert_selection_fn", json!("noaux_tc")),
            ("shared_expert_combination_strategy", json!("max")),
            ("mlp_layer_types", json!(["dense", "sparse"])),
            ("sliding_window", Value::Null),
            ("use_qk_norm", json!(true)),
        ] {
            let error = read(|config| config[name] = value).unwrap_err().to_string();
            assert!(error.contains(name), "{name}: {error}");
        }
    }
}
