//! Gemma 4: layers with a window and layers without one differ in more than that. Layers without a window have heads of
//! another size, of which a part is rotated, may use k as v, and may be fewer in KV heads. The last layers may read the
//! keys and values of earlier ones. The small models have an embedding for each layer.

use ops::{Activation, Routing, Scoring};
use serde_json::Value;

use super::adjust::{Adjusted, each_attention, embedding_scale, require_both_ropes};
use super::weights;
use crate::config::{Config, PerLayerInput};
use crate::fields::Fields;
use crate::layer_spec::{ExpertLayer, KvSource};
use crate::rope::RopeShape;
use crate::{ModelError, Rope};

pub(super) fn gemma4(fields: &Fields, config: &mut Config) -> Adjusted {
    refuse_others(fields)?;
    if let Some(last) = config.layers.last_mut() {
        last.attention.window = None;
    }
    each_attention(config, |attention| {
        attention.scale = 1.0;
        attention.head_norm = attention.head_norm.map(|norm| crate::HeadNormSpec { has_value: true, ..norm });
    });
    shape_full_layers(fields, config)?;
    require_both_ropes(fields, config)?;
    config.ropes = vec![rope(fields, config, false)?, rope(fields, config, true)?];
    each_attention(config, |attention| attention.rope = Some(usize::from(attention.window.is_some())));
    share_kv(fields, config)?;
    config.head.cap = fields.positive("final_logit_softcapping")?.map(|cap| cap as f32);
    config.embedding_scale = embedding_scale(config.hidden_size, config.dtype);
    config.per_layer_input = per_layer_input(fields, config)?;
    put_experts(fields, config)
}

/// Gemma 4 12B, whose layers have neither experts nor embeddings of their own.
pub(super) fn gemma4_unified(fields: &Fields, config: &mut Config) -> Adjusted {
    fields.only("enable_moe_block", false)?;
    let width = fields.count("hidden_size_per_layer_input")?;
    if width > 0 {
        return Err(fields.wrong("hidden_size_per_layer_input", "0 or absent", &width.into()));
    }
    gemma4(fields, config)
}

/// Refuses what is not supported, and fields that transformers does not read.
fn refuse_others(fields: &Fields) -> Adjusted {
    for name in ["rope_scaling", "sliding_window_pattern", "_sliding_window_pattern"] {
        if let Some(found) = fields.get(name) {
            return Err(fields.wrong(name, "absent: this architecture does not have it", found));
        }
    }
    match fields.text("use_bidirectional_attention")? {
        None | Some("vision") => Ok(()),
        Some(other) => {
            let expected = "absent or `vision`: text is read in one direction";
            Err(fields.wrong("use_bidirectional_attention", expected, &other.into()))
        }
    }
}

/// Heads of the layers without a window: of `per_layer_config`, or else of `global_head_dim` and
/// `num_global_key_value_heads`.
fn shape_full_layers(fields: &Fields, config: &mut Config) -> Adjusted {
    let key_is_value = fields.flag("attention_k_eq_v", false)?;
    let listed = fields.object("per_layer_config")?;
    let (head_dim, kv_heads) = match listed {
        Some(_) => (None, None),
        None => {
            let kv_heads = fields.size("num_global_key_value_heads")?.filter(|_| key_is_value);
            (Some(fields.size("global_head_dim")?.unwrap_or(512)), kv_heads)
        }
    };
    for (index, layer) in config.layers.iter_mut().enumerate() {
        let attention = &mut layer.attention;
        let is_full = attention.window.is_none();
        let own = listed.as_ref().map(|listed| listed.object(&index.to_string())).transpose()?.flatten();
        let (own_dim, own_heads) = match (&own, is_full) {
            (Some(own), _) => (own.size("head_dim")?, own.size("num_key_value_heads")?),
            (None, true) => (head_dim, kv_heads),
            (None, false) => (None, None),
        };
        attention.head_dim = own_dim.unwrap_or(attention.head_dim);
        attention.num_kv_heads = own_heads.unwrap_or(attention.num_kv_heads);
        if key_is_value && is_full {
            attention.kv = KvSource::KeyProjection;
        }
        if !attention.head_dim.is_multiple_of(8) || !attention.num_heads.is_multiple_of(attention.num_kv_heads) {
            let expected = format!("heads of a multiple of 8, and KV heads that divide {}", attention.num_heads);
            let found = format!("{} KV heads of {}", attention.num_kv_heads, attention.head_dim);
            return Err(fields.wrong(&format!("per_layer_config.{index}"), &expected, &found.into()));
        }
    }
    Ok(())
}

/// The rotation of the layers with or without a window, whose heads must have one size.
fn rope(fields: &Fields, config: &Config, has_window: bool) -> Result<Rope, ModelError> {
    let name = if has_window { "sliding_attention" } else { "full_attention" };
    let mut own = config.layers.iter().map(|layer| &layer.attention).filter(|a| a.window.is_some() == has_window);
    let head_dim = own.next().map_or(config.ropes[0].head_dim, |attention| attention.head_dim);
    if let Some(other) = own.find(|attention| attention.head_dim != head_dim) {
        let expected = format!("one `head_dim` for all layers of `{name}`");
        return Err(fields.wrong("per_layer_config", &expected, &format!("{head_dim} and {}", other.head_dim).into()));
    }
    let max_positions = config.max_position_embeddings;
    let shape = RopeShape { head_dim, is_interleaved: false, partial: None, theta: 10_000.0, max_positions };
    Rope::of_layer_type(fields, name, shape)
}

/// The last `num_kv_shared_layers` layers read the keys and values of the last layer before them that has a window as
/// they do, or none as they do. Their feed-forward may be twice as wide.
fn share_kv(fields: &Fields, config: &mut Config) -> Adjusted {
    let (num_layers, num_shared) = (config.num_layers(), fields.count("num_kv_shared_layers")?);
    let is_wide = fields.flag("use_double_wide_mlp", false)?;
    let wrong = |expected: &str| fields.wrong("num_kv_shared_layers", expected, &num_shared.into());
    let first = num_layers.checked_sub(num_shared).ok_or_else(|| wrong("at most the number of layers"))?;
    let (own, shared) = config.layers.split_at_mut(first);
    for layer in shared {
        let source = own.iter().rposition(|source| source.attention.window == layer.attention.window);
        let source = source.ok_or_else(|| wrong("so small that layers of each type have their own"))?;
        let shape = |attention: &crate::AttentionLayer| (attention.num_kv_heads, attention.head_dim);
        if shape(&own[source].attention) != shape(&layer.attention) {
            return Err(wrong("0, since layers of one type have other heads"));
        }
        layer.attention.kv = KvSource::Layer(source);
        if let (true, Some(mlp)) = (is_wide, &mut layer.mlp) {
            mlp.intermediate_size *= 2;
        }
    }
    Ok(())
}

/// Experts beside the feed-forward of each layer.
fn put_experts(fields: &Fields, config: &mut Config) -> Adjusted {
    if !fields.flag("enable_moe_block", false)? {
        fields.ignore(&["num_experts", "top_k_experts", "moe_intermediate_size"]);
        return Ok(());
    }
    let (num_experts, top_k) = (fields.required_size("num_experts")?, fields.required_size("top_k_experts")?);
    let intermediate_size = fields.required_size("moe_intermediate_size")?;
    if top_k > num_experts {
        return Err(fields.wrong("top_k_experts", "at most the number of experts", &top_k.into()));
    }
    config.names = &weights::GEMMA4_MOE;
    for layer in &mut config.layers {
        let activation = layer.mlp.map_or(Activation::GeluTanh, |mlp| mlp.activation);
        let scoring = Scoring::Softmax;
        let routing =
            Routing { top_k, scoring, scales_input: false, groups: None, is_normalized: true, scale: 1.0, activation };
        layer.experts = Some(ExpertLayer { num_experts, intermediate_size, latent_size: None, routing });
    }
    Ok(())
}

fn per_layer_input(fields: &Fields, config: &Config) -> Result<Option<PerLayerInput>, ModelError> {
    let (width, vocab_size) =
        (fields.count("hidden_size_per_layer_input")?, fields.count("vocab_size_per_layer_input")?);
    if width == 0 {
        return Ok(None);
    }
    if vocab_size < config.vocab_size {
        let expected = format!("at least `vocab_size` ({})", config.vocab_size);
        return Err(fields.wrong("vocab_size_per_layer_input", &expected, &Value::from(vocab_size)));
    }
    let scale = embedding_scale(width, config.dtype);
    let activation = config.layers[0].mlp.map_or(Activation::GeluTanh, |mlp| mlp.activation);
    Ok(Some(PerLayerInput { width, vocab_size, scale, activation }))
}
