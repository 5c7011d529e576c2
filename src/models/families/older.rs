//! Fields of architectures before Llama.

use serde_json::Value;

use super::adjust::{Adjusted, each_attention};
use super::weights;
use crate::config::Config;
use crate::fields::Fields;

/// Learned positions; norms before attention and feed-forward.
pub(super) fn opt(fields: &Fields, config: &mut Config) -> Adjusted {
    fields.only("do_layer_norm_before", true)?;
    fields.only("_remove_final_layer_norm", false)?;
    fields.only("layer_norm_elementwise_affine", true)?;
    fields.ignore(&["layerdrop"]); // Training.
    if let Some(width) = fields.size("word_embed_proj_dim")?.filter(|width| *width != config.hidden_size) {
        let expected =
            format!("`hidden_size` ({}), since projections of embeddings are not supported", config.hidden_size);
        return Err(fields.wrong("word_embed_proj_dim", &expected, &width.into()));
    }
    learn_positions(config);
    Ok(())
}

/// Layers with a window, in the order of `attention_types`: a list of names and how often they repeat. Scores are not scaled.
pub(super) fn gpt_neo(fields: &Fields, config: &mut Config) -> Adjusted {
    fields.ignore(&["attention_layers"]); // What `attention_types` says.
    let window = fields.required_size("window_size")?;
    let usual = serde_json::json!([[["global", "local"], 12]]);
    let types = fields.get("attention_types").unwrap_or(&usual);
    let expected = format!("lists of `global` and `local`, each with a number, for {} layers", config.num_layers());
    let is_local =
        local_layers(types, config.num_layers()).ok_or_else(|| fields.wrong("attention_types", &expected, types))?;
    for (layer, is_local) in config.layers.iter_mut().zip(is_local) {
        (layer.attention.scale, layer.attention.window) = (1.0, is_local.then_some(window));
    }
    learn_positions(config);
    Ok(())
}

/// Which of `num_layers` layers are local.
fn local_layers(types: &Value, num_layers: usize) -> Option<Vec<bool>> {
    let mut is_local = Vec::new();
    for part in types.as_array()? {
        let [names, count] = part.as_array()?.as_slice() else { return None };
        let names = names.as_array()?.iter().map(|name| match name.as_str() {
            Some("local") => Some(true),
            Some("global") => Some(false),
            _ => None,
        });
        let names = names.collect::<Option<Vec<_>>>()?;
        let count =
            usize::try_from(count.as_u64()?).ok().filter(|count| count.saturating_mul(names.len()) <= num_layers)?;
        is_local.extend(std::iter::repeat_n(names, count).flatten());
    }
    (is_local.len() == num_layers).then_some(is_local)
}

/// GPT-2 with one KV head, or with q, k and v of each head together.
pub(super) fn gpt_bigcode(fields: &Fields, config: &mut Config) -> Adjusted {
    fields.only("scale_attn_weights", true)?;
    fields.only("add_cross_attention", false)?;
    fields.ignore(&["attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"]); // Rounding.
    let is_multi_query = fields.flag("multi_query", true)?;
    if !is_multi_query {
        config.names = &weights::GPT_BIGCODE_MHA;
    }
    each_attention(config, |attention| {
        attention.num_kv_heads = if is_multi_query { 1 } else { attention.num_heads };
    });
    learn_positions(config);
    Ok(())
}

fn learn_positions(config: &mut Config) {
    each_attention(config, |attention| attention.rope = None);
    config.ropes.clear();
    config.learned_positions = Some(config.max_position_embeddings);
}

/// The first `rotary_dim` elements of a head are rotated.
pub(super) fn rotary_dim(fields: &Fields, config: &mut Config) -> Adjusted {
    let (rotary_dim, rope) = (fields.required_size("rotary_dim")?, &mut config.ropes[0]);
    if rotary_dim > rope.head_dim || !rotary_dim.is_multiple_of(2) {
        let expected = format!("an even number of at most the size of a head ({})", rope.head_dim);
        return Err(fields.wrong("rotary_dim", &expected, &rotary_dim.into()));
    }
    rope.rotary_dim = rotary_dim;
    Ok(())
}

pub(super) fn gptj(fields: &Fields, config: &mut Config) -> Adjusted {
    config.head.has_bias = true;
    rotary_dim(fields, config)
}

/// ALiBi instead of a rotation.
pub(super) fn bloom(fields: &Fields, config: &mut Config) -> Adjusted {
    fields.only("apply_residual_connection_post_layernorm", false)?;
    fields.ignore(&["slow_but_exact", "offset_alibi", "masked_softmax_fusion", "bias_dropout_fusion"]);
    each_attention(config, |attention| (attention.rope, attention.has_alibi) = (None, true));
    config.ropes.clear();
    Ok(())
}

/// Norms without weights, one of them behind the embedding; heads are rotated backwards, then normed.
pub(super) fn nanochat(fields: &Fields, config: &mut Config) -> Adjusted {
    config.head.cap = fields.positive("final_logit_softcapping")?.map(|cap| cap as f32);
    config.ropes[0].is_reversed = true;
    if config.ropes[0].scaling != crate::RopeScaling::None {
        // The norms of heads follow the rotation in the reference, which is the same only if it keeps lengths.
        return Err(fields.wrong(
            "rope_parameters",
            "without scaling",
            fields.get("rope_parameters").unwrap_or(&Value::Null),
        ));
    }
    each_attention(config, |attention| {
        attention.head_norm = attention.head_norm.map(|norm| crate::HeadNormSpec { has_weight: false, ..norm });
    });
    Ok(())
}
