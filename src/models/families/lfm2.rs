//! LFM2: most layers have a short convolution, the others attention.

use ops::{RecurrentRule, RecurrentShape, Scoring};
use serde_json::Value;

use super::adjust::Adjusted;
use super::experts::{each_routing, put_experts};
use super::hybrid::{layers_named, put_in_layers};
use crate::ModelError;
use crate::config::Config;
use crate::fields::{Fields, MAX_SIZE};
use crate::layer_spec::RecurrentLayer;

pub(super) fn lfm2(fields: &Fields, config: &mut Config) -> Adjusted {
    check_copies(fields, config)?;
    let inner = inner_size(fields)?;
    config.layers.iter_mut().filter_map(|layer| layer.mlp.as_mut()).for_each(|mlp| mlp.intermediate_size = inner);
    let num_layers = config.num_layers();
    let is_recurrent = match fields.get("layer_types") {
        Some(value) => {
            fields.ignore(&["full_attn_idxs"]);
            convolutions(fields, value, num_layers)?
        }
        None if fields.get("full_attn_idxs").is_some() => {
            let attention = fields.token_ids("full_attn_idxs")?;
            (0..num_layers).map(|index| !attention.contains(&(index as u32))).collect()
        }
        None => vec![false; num_layers],
    };
    put_convolutions(fields, config, is_recurrent)
}

/// Experts with sigmoids, chosen with a bias, behind some dense layers. transformers adds 1e-6 to the sum by which their weights are
/// divided; that is less than the rounding of a product in bf16 unless all chosen weights are below 1e-4.
pub(super) fn lfm2_moe(fields: &Fields, config: &mut Config) -> Adjusted {
    check_copies(fields, config)?;
    fields.only("use_expert_bias", true)?;
    let listed = fields.get("layer_types").unwrap_or(&Value::Null);
    let is_recurrent = convolutions(fields, listed, config.num_layers())?;
    put_convolutions(fields, config, is_recurrent)?;
    let (size, first) = (fields.required_size("moe_intermediate_size")?, fields.count("num_dense_layers")?);
    put_experts(fields, config, size, fields.flag("norm_topk_prob", true)?, |index| index >= first)?;
    let scale = fields.positive("routed_scaling_factor")?.unwrap_or(1.0) as f32;
    each_routing(config, |routing| (routing.scoring, routing.scale) = (Scoring::Sigmoid, scale));
    Ok(())
}

fn convolutions(fields: &Fields, layer_types: &Value, num_layers: usize) -> Result<Vec<bool>, ModelError> {
    layers_named(fields, layer_types, num_layers, &["full_attention"], &["conv"])
}

/// Replaces attention in some layers. The channels of the convolution are divided like the heads of attention.
fn put_convolutions(fields: &Fields, config: &mut Config, is_recurrent: Vec<bool>) -> Adjusted {
    let num_heads = config.layers[0].attention.num_heads;
    if !config.hidden_size.is_multiple_of(num_heads) {
        let expected = format!("a divisor of the hidden size ({})", config.hidden_size);
        return Err(fields.wrong("num_attention_heads", &expected, &num_heads.into()));
    }
    let num_taps = fields.required_size("conv_L_cache")?;
    if num_taps < 2 {
        return Err(fields.wrong("conv_L_cache", "at least 2", &num_taps.into()));
    }
    let shape = RecurrentShape {
        rule: RecurrentRule::ShortConv,
        num_key_heads: num_heads,
        num_value_heads: num_heads,
        key_dim: 0,
        value_dim: config.hidden_size / num_heads,
        num_taps,
    };
    let has_bias = fields.flag("conv_bias", false)?;
    let recurrent = RecurrentLayer { shape, eps: config.norm.eps, has_conv_bias: has_bias, has_bias };
    put_in_layers(fields, config, recurrent, is_recurrent)
}

/// The inner width of the feed-forward, which may be two thirds of the field's, multiplied and rounded up.
fn inner_size(fields: &Fields) -> Result<usize, ModelError> {
    let size = fields.required_size("intermediate_size")?;
    let multiple = fields.required_size("block_multiple_of")?;
    let factor = fields.positive("block_ffn_dim_multiplier")?;
    if !fields.flag("block_auto_adjust_ff_dim", true)? {
        return Ok(size);
    }
    let size = 2 * size / 3;
    let Some(factor) = factor else { return Ok(size) };
    let rounded = ((factor * size as f64) as usize).checked_next_multiple_of(multiple);
    rounded.filter(|size| (1..=MAX_SIZE).contains(size)).ok_or_else(|| {
        fields.wrong("block_ffn_dim_multiplier", "a factor by which the inner width stays a size", &factor.into())
    })
}

/// Refuses fields of published files that transformers does not read, if they say something else than those that it reads.
fn check_copies(fields: &Fields, config: &Config) -> Adjusted {
    // How training began.
    fields.ignore(&["block_use_xavier_init", "block_mlp_init_scale", "block_out_init_scale", "conv_use_xavier_init"]);
    ["block_use_swiglu", "use_pos_enc"].into_iter().try_for_each(|name| fields.only(name, true))?;
    let hidden = config.hidden_size as f64;
    let copies = [
        ("block_dim", hidden),
        ("conv_dim", hidden),
        ("conv_dim_out", hidden),
        ("num_heads", config.layers[0].attention.num_heads as f64),
        ("block_norm_eps", f64::from(config.norm.eps)),
        ("theta", config.ropes[0].theta),
    ];
    for (name, value) in copies {
        let differs = |found: &&Value| found.as_f64().is_none_or(|found| found as f32 != value as f32);
        if let Some(found) = fields.get(name).filter(differs) {
            return Err(fields.wrong(name, &format!("{value}, as another field says"), found));
        }
    }
    Ok(())
}
