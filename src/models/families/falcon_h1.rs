//! Falcon-H1: Mamba-2 beside attention in each layer, and multipliers of all parts.

use ops::RecurrentRule;

use super::adjust::{Adjusted, each_attention};
use super::granite::mamba2_shape;
use super::hybrid::require_silu;
use crate::ModelError;
use crate::config::Config;
use crate::fields::Fields;
use crate::layer_spec::{BesideLayer, RecurrentLayer};

/// Fields that nothing reads, or by which training began.
const UNUSED: &[&str] = &[
    "num_logits_to_keep",
    "mlp_expansion_factor",
    "time_step_floor",
    "time_step_max",
    "time_step_min",
    "time_step_rank",
];

/// The norm before both mixers has the factor of Mamba-2's gates, and the one before the feed-forward that of its gate. What else reads
/// a norm is divided by them.
pub(super) fn falcon_h1(fields: &Fields, config: &mut Config) -> Adjusted {
    fields.ignore(UNUSED);
    fields.only("mamba_use_mlp", true)?;
    require_silu(fields, config)?;
    // Multipliers would not apply to biases alike.
    for name in ["attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias"] {
        fields.only(name, false)?;
    }
    let multiplier = |name| Ok::<_, ModelError>(fields.positive(name)?.unwrap_or(1.0));
    let all = multiplier("ssm_in_multiplier")?;
    let [z, x, b, c, dt] = multipliers(fields, "ssm_multipliers")?.map(|own| own * all);
    let [gate, down] = multipliers(fields, "mlp_multipliers")?;
    let input = multiplier("attention_in_multiplier")? / z;
    let score = multiplier("key_multiplier")? * input * input;
    each_attention(config, |attention| attention.scale = (f64::from(attention.scale) * score) as f32);
    let out = [multiplier("attention_out_multiplier")? * input, multiplier("ssm_out_multiplier")?];
    let beside = BesideLayer {
        recurrent: mamba2(fields, config)?,
        conv_scales: [c, b, x].map(|own| (own / z) as f32),
        step_scale: (dt / z) as f32,
        out_scales: out.map(|own| own as f32),
    };
    for layer in &mut config.layers {
        layer.beside = Some(beside);
        layer.norm_scales = [z as f32, gate as f32];
        layer.mlp.iter_mut().for_each(|mlp| mlp.scale = (down / gate) as f32);
    }
    config.embedding_scale = multiplier("embedding_multiplier")? as f32;
    config.head.scale = multiplier("lm_head_multiplier")? as f32;
    Ok(())
}

/// One norm for the heads of each group, or none.
fn mamba2(fields: &Fields, config: &Config) -> Result<RecurrentLayer, ModelError> {
    let expanded = fields.required_size("mamba_expand")? * config.hidden_size;
    let mut shape = mamba2_shape(fields, fields.size("mamba_d_ssm")?.unwrap_or(expanded))?;
    let has_norm = fields.flag("mamba_rms_norm", false)?;
    let is_normed_first = fields.flag("mamba_norm_before_gate", true)?;
    if has_norm && is_normed_first {
        return Err(fields.wrong("mamba_norm_before_gate", "false, with `mamba_rms_norm`", &true.into()));
    }
    let norm_heads = has_norm.then_some(shape.num_value_heads / shape.num_key_heads);
    shape.rule = RecurrentRule::Mamba2 { norm_heads };
    let has_conv_bias = fields.flag("mamba_conv_bias", true)?;
    Ok(RecurrentLayer { shape, eps: config.norm.eps, has_conv_bias, has_bias: false })
}

/// The numbers of a list of `N`, 1 without it.
fn multipliers<const N: usize>(fields: &Fields, name: &str) -> Result<[f64; N], ModelError> {
    let Some(found) = fields.positives(name)? else { return Ok([1.0; N]) };
    <[f64; N]>::try_from(found).map_err(|found| fields.wrong(name, &format!("a list of {N} numbers"), &found.into()))
}
