//! What the rows of the table cannot say: one function for each architecture that differs by more.

use ops::{Activation, DType, HeadNormSpan, QueryScale};
use serde_json::Value;

use super::granite::granite;
use super::{layer_types::layer_types, weights};
use crate::config::Config;
use crate::fields::Fields;
use crate::layer_spec::{AttentionLayer, HeadNormSpec};
use crate::rope::{RopeScaling, RopeShape};
use crate::{ModelError, Rope};

pub(super) type Adjusted = Result<(), ModelError>;

pub(super) fn nothing(_: &Fields, _: &mut Config) -> Adjusted {
    Ok(())
}

pub(super) fn each_attention(config: &mut Config, mut change: impl FnMut(&mut AttentionLayer)) {
    config.layers.iter_mut().for_each(|layer| change(&mut layer.attention));
}

/// Refuses another number than `only`, which is what `meaning` says, in a field that repeats it. Absent fields are fine.
pub(super) fn require_equal(fields: &Fields, name: &str, only: usize, meaning: &str) -> Adjusted {
    match fields.get(name).filter(|found| found.as_u64() != Some(only as u64)) {
        Some(found) => Err(fields.wrong(name, &format!("{meaning} ({only})"), found)),
        None => Ok(()),
    }
}

/// The shape of the rotary embedding that was read for all layers, for one that is read again.
fn rope_shape(config: &Config, theta: f64) -> RopeShape {
    let rope = &config.ropes[0];
    RopeShape {
        head_dim: rope.head_dim,
        is_interleaved: rope.is_interleaved,
        partial: None,
        theta,
        max_positions: config.max_position_embeddings,
    }
}

/// The root of the width of an embedding, which scales it. With bf16 weights it is a bf16 number, as in training.
pub(super) fn embedding_scale(width: usize, dtype: DType) -> f32 {
    let root = (width as f32).sqrt();
    if dtype == DType::Bf16 { half::bf16::from_f32(root).to_f32() } else { root }
}

fn scale_embeddings(fields: &Fields, config: &mut Config) -> Adjusted {
    config.embedding_scale = embedding_scale(config.hidden_size, config.dtype);
    fields.only("use_bidirectional_attention", false)
}

/// The first configurations name the exact GELU but mean the approximation.
pub(super) fn gemma(fields: &Fields, config: &mut Config) -> Adjusted {
    let mlps = config.layers.iter_mut().filter_map(|layer| layer.mlp.as_mut());
    for mlp in mlps.filter(|mlp| mlp.activation == Activation::Gelu) {
        mlp.activation = Activation::GeluTanh;
    }
    fields.ignore(&["hidden_activation"]); // It has no effect on this generation.
    scale_embeddings(fields, config)
}

pub(super) fn gemma2(fields: &Fields, config: &mut Config) -> Adjusted {
    let scale = fields.required_positive("query_pre_attn_scalar")?.powf(-0.5) as f32;
    let score_cap = fields.positive("attn_logit_softcapping")?.map(|cap| cap as f32);
    config.head.cap = fields.positive("final_logit_softcapping")?.map(|cap| cap as f32);
    each_attention(config, |attention| (attention.scale, attention.score_cap) = (scale, score_cap));
    scale_embeddings(fields, config)
}

/// Layers with a window have a rotary embedding of their own, which is not scaled.
pub(super) fn gemma3(fields: &Fields, config: &mut Config) -> Adjusted {
    gemma2(fields, config)?;
    let local = fields.positive("rope_local_base_freq")?.unwrap_or(10_000.0);
    layers_of_two_ropes(fields, config, 1_000_000.0, local)
}

pub(super) fn apertus(fields: &Fields, _: &mut Config) -> Adjusted {
    fields.only("qk_norm", true)?;
    fields.only("post_norm", false)
}

pub(super) fn olmo3(fields: &Fields, config: &mut Config) -> Adjusted {
    let theta = fields.positive("rope_theta")?.unwrap_or(500_000.0);
    layers_of_two_ropes(fields, config, theta, theta)
}

/// Layers without a window use `rope_parameters.full_attention`, or `rope_theta` with `rope_scaling`; layers with one
/// use `rope_parameters.sliding_attention`, or `local_theta` without scaling.
pub(super) fn layers_of_two_ropes(fields: &Fields, config: &mut Config, theta: f64, local_theta: f64) -> Adjusted {
    let (full_shape, local_shape) = (rope_shape(config, theta), rope_shape(config, local_theta));
    let full = match fields.object("rope_scaling")? {
        Some(scaling) => Rope::of(fields, Some(scaling), full_shape)?,
        None => Rope::of_layer_type(fields, "full_attention", full_shape)?,
    };
    let local = Rope { theta: local_theta, scaling: RopeScaling::None, ..full.clone() };
    let nested = fields.object("rope_parameters")?.map(|nested| nested.object("sliding_attention")).transpose()?;
    config.ropes = match nested.flatten() {
        Some(nested) => {
            let theta = nested.positive("rope_theta")?.unwrap_or(local_theta);
            let read = Rope::of(fields, Some(nested), local_shape)?;
            vec![full, Rope { theta, ..read }]
        }
        None => vec![full, local],
    };
    each_attention(config, |attention| attention.rope = Some(usize::from(attention.window.is_some())));
    Ok(())
}

/// Where `rope_parameters` is given, transformers needs the frequencies of each type of layer that there is.
pub(super) fn require_both_ropes(fields: &Fields, config: &Config) -> Adjusted {
    let Some(parameters) = fields.object("rope_parameters")? else { return Ok(()) };
    for (name, has_window) in [("full_attention", false), ("sliding_attention", true)] {
        if config.layers.iter().any(|layer| layer.attention.window.is_some() == has_window) {
            let missing = || parameters.wrong(name, "an object with `rope_theta`", &Value::Null);
            parameters.object(name)?.ok_or_else(missing)?.required_positive("rope_theta")?;
        }
    }
    Ok(())
}

/// A text has one position for each token, with which sections of several positions rotate as usual.
pub(super) fn qwen_vl(fields: &Fields, _: &mut Config) -> Adjusted {
    for name in ["rope_parameters", "rope_scaling"] {
        if let Some(parameters) = fields.object(name)? {
            parameters.ignore(&["mrope_section", "mrope_interleaved"]);
        }
    }
    Ok(())
}

pub(super) fn qwen2_5_vl(fields: &Fields, config: &mut Config) -> Adjusted {
    let name = if fields.get("rope_scaling").is_some() { "rope_scaling" } else { "rope_parameters" };
    match fields.object(name)?.is_some_and(|parameters| parameters.get("mrope_section").is_some()) {
        true => qwen_vl(fields, config),
        false => Err(fields.wrong(name, "an object with `mrope_section`", &Value::Null)),
    }
}

/// The same where sections are required to have all rotated pairs, and heads have the usual size.
pub(super) fn glm4v(fields: &Fields, config: &mut Config) -> Adjusted {
    let (num_heads, head_dim) = (config.layers[0].attention.num_heads, config.layers[0].attention.head_dim);
    if head_dim * num_heads != config.hidden_size {
        let expected = format!("`hidden_size` ({}) divided by `num_attention_heads` ({num_heads})", config.hidden_size);
        return Err(fields.wrong("head_dim", &expected, &head_dim.into()));
    }
    glm_sections(fields, config)
}

/// Sections of several positions that have all rotated pairs.
pub(super) fn glm_sections(fields: &Fields, config: &Config) -> Adjusted {
    let name = if fields.get("rope_scaling").is_some() { "rope_scaling" } else { "rope_parameters" };
    let pairs = (config.ropes[0].rotary_dim / 2) as f64;
    let sections = fields.object(name)?.map(|parameters| parameters.positives("mrope_section")).transpose()?.flatten();
    let sections = sections.unwrap_or_else(|| vec![8.0, 12.0, 12.0]);
    match sections.iter().sum::<f64>() == pairs {
        true => Ok(()),
        false => {
            Err(fields.wrong(name, &format!("an object whose `mrope_section` has {pairs} pairs"), &sections.into()))
        }
    }
}

pub(super) fn ministral(fields: &Fields, _: &mut Config) -> Adjusted {
    fields.required_size("head_dim").map(|_| ())
}

/// Queries of late positions are longer.
pub(super) fn ministral3(fields: &Fields, config: &mut Config) -> Adjusted {
    let name = if fields.get("rope_scaling").is_some() { "rope_scaling" } else { "rope_parameters" };
    let missing = || fields.wrong(name, "an object with `llama_4_scaling_beta`", &Value::Null);
    let nested = fields.object(name)?.ok_or_else(missing)?;
    nested.ignore(&["max_position_embeddings"]); // A copy.
    let beta = nested.required_positive("llama_4_scaling_beta")? as f32;
    let period = nested.required_size("original_max_position_embeddings")? as u32;
    each_attention(config, |attention| attention.query_scale = Some(QueryScale { beta, period, offset: 0 }));
    Ok(())
}

pub(super) fn phi3(fields: &Fields, config: &mut Config) -> Adjusted {
    for name in ["full_attn_mod", "interpolate_factor"] {
        if let Some(found) = fields.get(name).filter(|value| value.as_u64() != Some(1)) {
            return Err(fields.wrong(name, "1, the only value that is supported", found));
        }
    }
    note_long_rope(config);
    Ok(())
}

/// The text part of a model that also sees images and hears speech. What it has for them, adapters too, has no part in texts.
pub(super) fn phi4_multimodal(fields: &Fields, config: &mut Config) -> Adjusted {
    ["attention_bias", "mlp_bias", "lm_head_bias"].into_iter().try_for_each(|name| fields.only(name, false))?;
    fields.ignore(&["vision_config", "img_processor", "vision_lora", "image_token_id"]);
    fields.ignore(&["audio_config", "audio_processor", "speech_lora", "audio_token_id", "embd_layer"]);
    config.notes.push("only the text model of this checkpoint is served: images and speech are refused".to_owned());
    phi3(fields, config)
}

/// Says which factors are used.
pub(super) fn note_long_rope(config: &mut Config) {
    if let RopeScaling::Long { original_max_positions, .. } = config.ropes[0].scaling {
        config.notes.push(format!(
            "rope `longrope`: one set of factors is used for all sequences, the short ones if no sequence may be longer \
             than {original_max_positions} tokens, else the long ones"
        ));
    }
}

pub(super) fn phi(fields: &Fields, config: &mut Config) -> Adjusted {
    fields.only("qk_layernorm", false)?;
    config.head.has_bias = true;
    Ok(())
}

/// Multiplies the embeddings, and what layers add to the hidden state. The latter is moved to the embeddings: norms do not
/// change if the whole hidden state is divided by it, except for the number that they add to the mean square.
pub(super) fn scale_residuals(config: &mut Config, embedding: f64, residual: f64) {
    config.embedding_scale = (embedding / residual) as f32;
    config.norm.eps = (f64::from(config.norm.eps) / (residual * residual)) as f32;
}

/// The multipliers of Granite, with norms behind attention and feed-forward, which take that of the residuals. That of
/// the logits is a factor.
pub(super) fn hyperclovax(fields: &Fields, config: &mut Config) -> Adjusted {
    let usual_scale = config.layers[0].attention.scale;
    let (eps, residual) = (config.norm.eps, fields.positive("residual_multiplier")?.unwrap_or(1.0));
    granite(fields, config)?;
    config.head.scale = 1.0 / config.head.scale;
    if fields.get("attention_multiplier").is_none() {
        each_attention(config, |attention| attention.scale = usual_scale);
    }
    if fields.flag("use_post_norm", true)? {
        config.names = &weights::HYPERCLOVAX;
        config.embedding_scale = (f64::from(config.embedding_scale) * residual) as f32;
        (config.norm.eps, config.branch_scale) = (eps, residual as f32);
    }
    Ok(())
}

pub(super) fn cohere(fields: &Fields, config: &mut Config) -> Adjusted {
    config.head.scale = fields.required_positive("logit_scale")? as f32;
    if fields.flag("use_qk_norm", false)? {
        norm_each_head(config);
    }
    Ok(())
}

/// Norms of q and k that have weights of their own for each head.
fn norm_each_head(config: &mut Config) {
    let (span, kind, eps) = (HeadNormSpan::EachHead, config.norm.kind, config.norm.eps);
    let norm = HeadNormSpec { span, kind, eps, has_weight: true, has_value: false, is_behind_rotation: false };
    each_attention(config, |attention| attention.head_norm = Some(norm));
}

/// Scaled logits; only layers with a window are rotated.
pub(super) fn cohere2(fields: &Fields, config: &mut Config) -> Adjusted {
    fields.ignore(&[
        "layer_switch",
        "order_of_interleaved_layers",
        "position_embedding_type",
        "rotary_pct",
        "use_embedding_sharing",
        "use_gated_activation",
        "use_parallel_block",
        "use_parallel_embedding",
    ]);
    config.head.scale = fields.required_positive("logit_scale")? as f32;
    each_attention(config, |attention| attention.rope = attention.rope.filter(|_| attention.window.is_some()));
    Ok(())
}

/// Only layers with a window are rotated, unless no layer has one.
pub(super) fn exaone4(_: &Fields, config: &mut Config) -> Adjusted {
    if config.layers.iter().any(|layer| layer.attention.window.is_some()) {
        each_attention(config, |attention| attention.rope = attention.rope.filter(|_| attention.window.is_some()));
    }
    Ok(())
}

/// All layers but every n-th.
pub(super) fn usual_rotated_layers(fields: &Fields, num_layers: usize) -> Result<Vec<bool>, ModelError> {
    let interval = fields.size("no_rope_layer_interval")?.unwrap_or(4);
    Ok((1..=num_layers).map(|number| !number.is_multiple_of(interval)).collect())
}

/// Which layers are rotated: those with a 1 in `no_rope_layers`, or all but every n-th.
pub(super) fn rotated_layers(fields: &Fields, num_layers: usize) -> Result<Vec<bool>, ModelError> {
    let Some(value) = fields.get("no_rope_layers") else { return usual_rotated_layers(fields, num_layers) };
    fields.ignore(&["no_rope_layer_interval"]);
    let flags = value.as_array().filter(|flags| flags.len() >= num_layers);
    let flags = flags.and_then(|flags| flags.iter().map(Value::as_u64).collect::<Option<Vec<_>>>());
    let expected = format!("a list of at least {num_layers} numbers, 1 for a rotated layer and 0 for others");
    let flags = flags.ok_or_else(|| fields.wrong("no_rope_layers", &expected, value))?;
    Ok(flags.into_iter().take(num_layers).map(|flag| flag != 0).collect())
}

pub(super) fn smollm3(fields: &Fields, config: &mut Config) -> Adjusted {
    let num_layers = config.num_layers();
    let rotated = rotated_layers(fields, num_layers)?;
    let is_windowed = config.layers.iter().any(|layer| layer.attention.window.is_some());
    for (layer, is_rotated) in config.layers.iter_mut().zip(rotated) {
        layer.attention.rope = layer.attention.rope.filter(|_| is_rotated);
    }
    if is_windowed && layer_types(fields, num_layers)?.is_none() {
        let found = fields.get("use_sliding_window").cloned().unwrap_or(Value::Null);
        return Err(fields.wrong(
            "use_sliding_window",
            "`false`, or `layer_types` must name the layers with a window",
            &found,
        ));
    }
    Ok(())
}

pub(super) fn stablelm(fields: &Fields, config: &mut Config) -> Adjusted {
    if fields.flag("qk_layernorm", false)? {
        norm_each_head(config);
    }
    if fields.flag("use_parallel_residual", false)? {
        config.names = &weights::STABLELM_PARALLEL;
        config.layers.iter_mut().for_each(|layer| layer.is_parallel = true);
    }
    Ok(())
}

pub(super) fn starcoder2(fields: &Fields, _: &mut Config) -> Adjusted {
    fields.ignore(&[
        "activation_function",
        "attention_softmax_in_fp32",
        "layer_norm_epsilon",
        "mlp_type",
        "norm_type",
        "scale_attention_softmax_in_fp32",
        "scale_attn_weights",
    ]);
    Ok(())
}

pub(super) fn gpt_neox(fields: &Fields, config: &mut Config) -> Adjusted {
    let is_parallel = fields.flag("use_parallel_residual", true)?;
    config.layers.iter_mut().for_each(|layer| layer.is_parallel = is_parallel);
    Ok(())
}

/// Three generations: one KV head or all, or some KV heads with one or two norms.
pub(super) fn falcon(fields: &Fields, config: &mut Config) -> Adjusted {
    fields.only("alibi", false)?;
    let is_new = fields.flag("new_decoder_architecture", false)?;
    let (is_parallel, multi_query) = (fields.flag("parallel_attn", true)?, fields.flag("multi_query", true)?);
    let num_norms = fields.size("num_ln_in_parallel_attn")?.unwrap_or(if is_new { 2 } else { 1 });
    if is_new && !is_parallel {
        return Err(fields.wrong("parallel_attn", "`true` with `new_decoder_architecture`", &false.into()));
    }
    config.names = match (is_parallel, is_new && num_norms == 2) {
        (true, true) => &weights::FALCON_TWO_NORMS,
        (true, false) => &weights::FALCON,
        (false, _) => &weights::FALCON_SERIAL,
    };
    for layer in &mut config.layers {
        layer.is_parallel = is_parallel;
        if !is_new {
            layer.attention.num_kv_heads = if multi_query { 1 } else { layer.attention.num_heads };
        }
    }
    Ok(())
}

/// Baichuan has two position schemes. Only the rotary models have `max_position_embeddings`; the 13B models use ALiBi.
/// The second generation is recognized by its vocabulary size, or by a loss weight that only it has; the rows of its
/// head are normalized.
pub(super) fn baichuan(fields: &Fields, config: &mut Config) -> Adjusted {
    if fields.get("max_position_embeddings").is_none() || config.hidden_size == 5120 {
        each_attention(config, |attention| (attention.rope, attention.has_alibi) = (None, true));
        config.ropes.clear();
    }
    config.head.has_unit_rows = config.vocab_size == 125_696 || fields.get("z_loss_weight").is_some();
    Ok(())
}

pub(super) fn gpt2(fields: &Fields, config: &mut Config) -> Adjusted {
    fields.only("scale_attn_weights", true)?;
    fields.only("scale_attn_by_inverse_layer_idx", false)?;
    fields.only("add_cross_attention", false)?;
    each_attention(config, |attention| attention.rope = None);
    config.ropes.clear();
    config.learned_positions = Some(config.max_position_embeddings);
    Ok(())
}
