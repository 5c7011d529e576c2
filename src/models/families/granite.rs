//! Granite 3 and 4, with experts, with windows, and with layers that have the recurrent state of Mamba-2; Bamba, which has them, too.

use ops::{RecurrentRule, RecurrentShape};
use serde_json::Value;

use super::adjust::{Adjusted, each_attention, scale_residuals};
use super::experts::{mixtral, put_experts_beside};
use super::hybrid::{layers_named, put_in_layers, without_step_limits};
use crate::config::Config;
use crate::fields::{Fields, MAX_SIZE};
use crate::layer_spec::RecurrentLayer;
use crate::{ModelError, Rope};

/// Four multipliers.
pub(super) fn granite(fields: &Fields, config: &mut Config) -> Adjusted {
    let multiplier = |name| Ok::<_, ModelError>(fields.positive(name)?.unwrap_or(1.0));
    let residual = multiplier("residual_multiplier")?;
    scale_residuals(config, multiplier("embedding_multiplier")?, residual);
    config.head.scale = (1.0 / multiplier("logits_scaling")?) as f32;
    let scale = multiplier("attention_multiplier")? as f32;
    each_attention(config, |attention| attention.scale = scale);
    Ok(())
}

/// Experts in all layers.
pub(super) fn granite_moe(fields: &Fields, config: &mut Config) -> Adjusted {
    granite(fields, config)?;
    mixtral(fields, config)
}

/// The same with an expert that all tokens share, unless its width is 0.
pub(super) fn granite_moe_shared(fields: &Fields, config: &mut Config) -> Adjusted {
    granite(fields, config)?;
    let sizes = [fields.required_size("intermediate_size")?, fields.count("shared_intermediate_size")?];
    put_experts_beside(fields, config, sizes, true, |_| true)
}

/// The same with sinks, windows and rotations of each layer.
pub(super) fn granite_moe_swa(fields: &Fields, config: &mut Config) -> Adjusted {
    granite_moe_shared(fields, config)?;
    layers_of_own_ropes(fields, config)
}

/// Granite with sinks in all layers. Each layer may have a base of its rotation, or 0 if it is not rotated.
pub(super) fn granite_swa(fields: &Fields, config: &mut Config) -> Adjusted {
    granite(fields, config)?;
    layers_of_own_ropes(fields, config)
}

/// The sinks and rotations of Granite with windows.
fn layers_of_own_ropes(fields: &Fields, config: &mut Config) -> Adjusted {
    fields.required_size("sliding_window")?;
    each_attention(config, |attention| attention.has_sinks = true);
    let Some(value) = fields.get("layer_rope_theta") else { return Ok(()) };
    let num_layers = config.num_layers();
    let thetas = value.as_array().filter(|thetas| thetas.len() == num_layers);
    let theta = |value: &Value| value.as_f64().filter(|theta| *theta >= 0.0);
    let thetas = thetas.and_then(|thetas| thetas.iter().map(theta).collect::<Option<Vec<_>>>());
    let expected = format!("a list of {num_layers} numbers, 0 for layers that are not rotated");
    let thetas = thetas.ok_or_else(|| fields.wrong("layer_rope_theta", &expected, value))?;
    let ropes = &mut config.ropes;
    for (layer, theta) in config.layers.iter_mut().zip(thetas) {
        let known = ropes.iter().position(|rope| rope.theta == theta).unwrap_or(ropes.len());
        if known == ropes.len() && theta > 0.0 {
            ropes.push(Rope { theta, ..ropes[0].clone() });
        }
        layer.attention.rope = (theta > 0.0).then_some(known);
    }
    Ok(())
}

/// Granite 4: Mamba-2 in the layers that `layer_types` names, attention that is rotated by a field; a feed-forward for all tokens,
/// beside experts if there are some.
pub(super) fn granite_moe_hybrid(fields: &Fields, config: &mut Config) -> Adjusted {
    let usual_eps = config.norm.eps;
    granite(fields, config)?;
    fields.only_text("normalization_function", &["rmsnorm"])?;
    fields.ignore(&["init_method"]); // Of training.
    match fields.text("position_embedding_type")? {
        Some("rope") => {}
        None | Some("nope") => each_attention(config, |attention| attention.rope = None),
        Some(other) => return Err(fields.wrong("position_embedding_type", "`rope` or `nope`", &other.into())),
    }
    let recurrent = mamba2_layer(fields, config.hidden_size, usual_eps)?;
    let is_recurrent = match fields.get("layer_types") {
        // The first checkpoints have other names.
        Some(value) => {
            let (attention, recurrent) = (["attention", "full_attention"], ["mamba", "linear_attention"]);
            layers_named(fields, value, config.num_layers(), &attention, &recurrent)?
        }
        None => vec![true; config.num_layers()],
    };
    put_in_layers(fields, config, recurrent, is_recurrent)?;
    beside_shared(fields, config)
}

/// Bamba: attention in the layers that `attn_layer_indices` numbers, Mamba-2 in the others.
pub(super) fn bamba(fields: &Fields, config: &mut Config) -> Adjusted {
    fields.ignore(&["num_logits_to_keep"]);
    let num_layers = config.num_layers();
    let numbers = fields.token_ids("attn_layer_indices")?;
    let is_recurrent: Vec<bool> = (0..num_layers).map(|layer| !numbers.contains(&(layer as u32))).collect();
    if !is_recurrent.contains(&false) {
        let found = fields.get("attn_layer_indices").cloned().unwrap_or_default();
        return Err(fields.wrong("attn_layer_indices", &format!("one or more of {num_layers} layers"), &found));
    }
    let recurrent = mamba2_layer(fields, config.hidden_size, config.norm.eps)?;
    put_in_layers(fields, config, recurrent, is_recurrent)
}

fn mamba2_layer(fields: &Fields, hidden_size: usize, eps: f32) -> Result<RecurrentLayer, ModelError> {
    Ok(RecurrentLayer {
        shape: mamba2_shape(fields, fields.required_size("mamba_expand")? * hidden_size)?,
        eps,
        has_conv_bias: fields.flag("mamba_conv_bias", true)?,
        has_bias: fields.flag("mamba_proj_bias", false)?,
    })
}

/// Sizes of Mamba-2 for outputs of `width`. One norm for all heads.
pub(super) fn mamba2_shape(fields: &Fields, width: usize) -> Result<RecurrentShape, ModelError> {
    fields.ignore(&["mamba_chunk_size"]); // States are computed token by token, with other roundings alone.
    if width > MAX_SIZE {
        let expected = format!("a factor of `hidden_size` with a product of at most {MAX_SIZE}");
        return Err(fields.wrong("mamba_expand", &expected, &fields.required_size("mamba_expand")?.into()));
    }
    let num_value_heads = fields.required_size("mamba_n_heads")?;
    let num_key_heads = fields.required_size("mamba_n_groups")?;
    if !num_value_heads.is_multiple_of(num_key_heads) || !width.is_multiple_of(num_value_heads) {
        let expected = format!("a multiple of `mamba_n_groups` ({num_key_heads}) and a divisor of the width {width}");
        return Err(fields.wrong("mamba_n_heads", &expected, &num_value_heads.into()));
    }
    let value_dim = width / num_value_heads;
    if let Some(found) = fields.get("mamba_d_head").filter(|value| !value.is_null() && *value != "auto")
        && found.as_u64() != Some(value_dim as u64)
    {
        return Err(fields.wrong("mamba_d_head", &format!("{value_dim} or `auto`"), found));
    }
    without_step_limits(fields)?;
    Ok(RecurrentShape {
        rule: RecurrentRule::Mamba2 { norm_heads: Some(num_value_heads) },
        num_key_heads,
        num_value_heads,
        key_dim: fields.required_size("mamba_d_state")?,
        value_dim,
        num_taps: fields.required_size("mamba_d_conv")?,
    })
}

/// Experts in all layers, or in none, beside a feed-forward of `shared_intermediate_size`.
fn beside_shared(fields: &Fields, config: &mut Config) -> Adjusted {
    let shared_size = fields.required_size("shared_intermediate_size")?;
    let size = fields.required_size("intermediate_size")?;
    if fields.count("num_experts")? == 0 {
        fields.ignore(&["num_experts_per_tok"]);
        let dense = config.layers.iter_mut().filter_map(|layer| layer.mlp.as_mut());
        dense.for_each(|mlp| mlp.intermediate_size = shared_size);
        return Ok(());
    }
    put_experts_beside(fields, config, [size, shared_size], true, |_| true)
}
