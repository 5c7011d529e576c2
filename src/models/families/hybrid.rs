//! Qwen3-Next, Qwen3.5, Qwen3.6 and OLMo Hybrid: most layers have a recurrent state (Gated DeltaNet), the others attention, whose
//! output is gated in Qwen's models.

use ops::{Activation, RecurrentRule, RecurrentShape};
use serde_json::Value;

use super::adjust::{Adjusted, each_attention};
use super::experts;
use super::mtp::put_mtp;
use crate::ModelError;
use crate::config::Config;
use crate::config::MtpForm;
use crate::fields::Fields;
use crate::layer_spec::RecurrentLayer;

/// Fields that count the layers of the MTP head.
const MTP_LAYERS: &[&str] = &["mtp_num_hidden_layers", "num_nextn_predict_layers"];

pub(super) fn qwen3_next(fields: &Fields, config: &mut Config) -> Adjusted {
    put_recurrent_layers(fields, config)?;
    experts::qwen2_moe(fields, config)?;
    put_mtp(fields, config, MtpForm::Qwen, MTP_LAYERS);
    Ok(())
}

pub(super) fn qwen3_5(fields: &Fields, config: &mut Config) -> Adjusted {
    fields.only("attn_output_gate", true)?;
    fields.only_text("mamba_ssm_dtype", &["float32"])?;
    if let Some(parameters) = fields.object("rope_parameters")? {
        // Sections of positions of images. All positions of a text are equal.
        parameters.ignore(&["mrope_section", "mrope_interleaved"]);
    }
    put_recurrent_layers(fields, config)?;
    put_mtp(fields, config, MtpForm::Qwen, MTP_LAYERS);
    Ok(())
}

/// Experts in all layers, whose probabilities are divided by their sum.
pub(super) fn qwen3_5_moe(fields: &Fields, config: &mut Config) -> Adjusted {
    qwen3_5(fields, config)?;
    fields.only("norm_topk_prob", true)?;
    experts::qwen3_5_moe(fields, config)?;
    put_mtp(fields, config, MtpForm::Qwen, MTP_LAYERS);
    Ok(())
}

fn put_recurrent_layers(fields: &Fields, config: &mut Config) -> Adjusted {
    each_attention(config, |attention| attention.has_output_gate = true);
    let shape = shape(fields)?;
    let recurrent = RecurrentLayer { shape, eps: config.norm.eps, has_conv_bias: false, has_bias: false };
    let is_recurrent = recurrent_layers(fields, config.num_layers())?;
    put_in_layers(fields, config, recurrent, is_recurrent)
}

/// Replaces attention in some layers. The activation of the feed-forward is that of the convolution.
pub(super) fn put_in_layers(
    fields: &Fields,
    config: &mut Config,
    recurrent: RecurrentLayer,
    is_recurrent: Vec<bool>,
) -> Adjusted {
    require_silu(fields, config)?;
    if !is_recurrent.contains(&false) {
        let found = fields.get("layer_types").or(fields.get("full_attention_interval")).cloned().unwrap_or_default();
        return Err(fields.wrong("layer_types", "a list with `full_attention` at least once", &found));
    }
    for (layer, is_recurrent) in config.layers.iter_mut().zip(is_recurrent) {
        layer.recurrent = is_recurrent.then_some(recurrent);
    }
    Ok(())
}

/// Refuses another activation of the feed-forward and the convolution than SiLU.
pub(super) fn require_silu(fields: &Fields, config: &Config) -> Adjusted {
    if config.layers.iter().any(|layer| layer.mlp.is_some_and(|mlp| mlp.activation != Activation::Silu)) {
        let found = fields.get("hidden_act").cloned().unwrap_or_default();
        return Err(fields.wrong("hidden_act", "`silu`", &found));
    }
    Ok(())
}

fn shape(fields: &Fields) -> Result<RecurrentShape, ModelError> {
    let shape = RecurrentShape {
        rule: RecurrentRule::GatedDelta { has_doubled_rates: false },
        num_key_heads: fields.required_size("linear_num_key_heads")?,
        num_value_heads: fields.required_size("linear_num_value_heads")?,
        key_dim: fields.required_size("linear_key_head_dim")?,
        value_dim: fields.required_size("linear_value_head_dim")?,
        num_taps: fields.required_size("linear_conv_kernel_dim")?,
    };
    check_heads(fields, shape)?;
    Ok(shape)
}

fn check_heads(fields: &Fields, shape: RecurrentShape) -> Adjusted {
    if shape.num_value_heads.is_multiple_of(shape.num_key_heads) {
        return Ok(());
    }
    let expected = format!("a multiple of `linear_num_key_heads` ({})", shape.num_key_heads);
    Err(fields.wrong("linear_num_value_heads", &expected, &shape.num_value_heads.into()))
}

/// OLMo Hybrid: attention with norms behind it, which a null of `rope_theta` leaves without rotation; learning rates that may be
/// doubled.
pub(super) fn olmo_hybrid(fields: &Fields, config: &mut Config) -> Adjusted {
    // How training began.
    fields.ignore(&["linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor"]);
    if !is_rotated(fields) {
        each_attention(config, |attention| attention.rope = None);
    }
    let num_heads = config.layers[0].attention.num_heads;
    let num_key_heads = fields.size("linear_num_key_heads")?.unwrap_or(num_heads);
    let key_dim = fields.size("linear_key_head_dim")?.unwrap_or(config.hidden_size * 3 / 4 / num_key_heads);
    let shape = RecurrentShape {
        rule: RecurrentRule::GatedDelta { has_doubled_rates: fields.flag("linear_allow_neg_eigval", true)? },
        num_key_heads,
        num_value_heads: fields.size("linear_num_value_heads")?.unwrap_or(num_heads),
        key_dim,
        value_dim: fields.size("linear_value_head_dim")?.unwrap_or(2 * key_dim),
        num_taps: fields.required_size("linear_conv_kernel_dim")?,
    };
    check_heads(fields, shape)?;
    let num_layers = config.num_layers();
    let is_recurrent = match fields.get("layer_types") {
        Some(value) => layers_named(fields, value, num_layers, &["full_attention"], &["linear_attention"])?,
        // The last of fewer than four layers has attention, too.
        None => (1..=num_layers).map(|number| number % 4 != 0 && (number < num_layers || num_layers > 3)).collect(),
    };
    // The norm of the output has a constant of its own.
    put_in_layers(
        fields,
        config,
        RecurrentLayer { shape, eps: 1e-5, has_conv_bias: false, has_bias: false },
        is_recurrent,
    )
}

/// Whether no `rope_theta` is null. Later files of the first checkpoint have a null `rope_type` alone.
fn is_rotated(fields: &Fields) -> bool {
    let map = fields.to_map();
    let object = |name: &str| map.get(name).and_then(Value::as_object).filter(|object| !object.is_empty());
    let nested = object("rope_scaling").or_else(|| object("rope_parameters"));
    let theta = nested.and_then(|nested| nested.get("rope_theta")).or_else(|| map.get("rope_theta"));
    match theta {
        Some(theta) => !theta.is_null(),
        None => nested.and_then(|nested| nested.get("rope_type")).is_none_or(|name| !name.is_null()),
    }
}

/// The layers that `layer_types` names, or all but every n-th.
fn recurrent_layers(fields: &Fields, num_layers: usize) -> Result<Vec<bool>, ModelError> {
    let interval = fields.size("full_attention_interval")?.unwrap_or(4);
    let Some(value) = fields.get("layer_types") else {
        return Ok((1..=num_layers).map(|number| !number.is_multiple_of(interval)).collect());
    };
    layers_named(fields, value, num_layers, &["full_attention"], &["linear_attention"])
}

/// Which layers of the list `layer_types` are named as recurrent; the others are named as attention.
pub(super) fn layers_named(
    fields: &Fields,
    value: &Value,
    num_layers: usize,
    attention: &[&str],
    recurrent: &[&str],
) -> Result<Vec<bool>, ModelError> {
    let names = value.as_array().filter(|names| names.len() == num_layers);
    let is_recurrent = |name: &Value| {
        let name = name.as_str()?;
        let is_recurrent = recurrent.contains(&name);
        (is_recurrent || attention.contains(&name)).then_some(is_recurrent)
    };
    let layers = names.and_then(|names| names.iter().map(is_recurrent).collect::<Option<Vec<_>>>());
    let expected = || format!("a list of {num_layers} names, `{}` or `{}`", attention[0], recurrent[0]);
    layers.ok_or_else(|| fields.wrong("layer_types", &expected(), value))
}

/// Refuses bounds of the steps of Mamba-2 other than 0 and infinity.
pub(super) fn without_step_limits(fields: &Fields) -> Adjusted {
    let is_open = |limit: &Value| limit[0].as_f64() == Some(0.0) && limit[1]["__float__"] == "Infinity";
    match fields.get("time_step_limit").filter(|limit| !is_open(limit)) {
        Some(found) => Err(fields.wrong("time_step_limit", "from 0 to infinity", found)),
        None => Ok(()),
    }
}
