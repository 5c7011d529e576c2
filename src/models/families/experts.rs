//! Families with experts: what the rows of the table cannot say.

use ops::{Activation, DType, ExpertGroups, GroupScore, Routing, Scoring};
use serde_json::Value;

use super::adjust::{
    Adjusted, each_attention, embedding_scale, exaone4, glm_sections, layers_of_two_ropes, qwen_vl, require_both_ropes,
    require_equal,
};
use super::mtp::put_mtp;
use super::older::rotary_dim;
use crate::ModelError;
use crate::config::Config;
use crate::config::MtpForm;
use crate::fields::Fields;
use crate::layer_spec::{ExpertLayer, MlpLayer};

/// Experts in all layers, whose probabilities are divided by their sum.
pub(super) fn mixtral(fields: &Fields, config: &mut Config) -> Adjusted {
    let size = fields.required_size("intermediate_size")?;
    put_experts(fields, config, size, true, |_| true)
}

/// Experts with clamped gates, and sinks in all layers.
pub(super) fn gpt_oss(fields: &Fields, config: &mut Config) -> Adjusted {
    // Other names of fields that are read.
    fields.ignore(&["experts_per_token", "initial_context_length"]);
    if config.layers.iter().any(|layer| layer.mlp.is_some_and(|mlp| mlp.activation != Activation::Silu)) {
        let found = fields.get("hidden_act").cloned().unwrap_or_default();
        return Err(fields.wrong("hidden_act", "`silu`", &found));
    }
    let (alpha, limit) = (fields.positive("swiglu_alpha")?, fields.positive("swiglu_limit")?);
    let activation =
        Activation::ClampedSwiglu { alpha: alpha.unwrap_or(1.702) as f32, limit: limit.unwrap_or(7.0) as f32 };
    // The softmax over the chosen experts alone is that over all, divided by the sum of the chosen ones.
    put_experts(fields, config, fields.required_size("intermediate_size")?, true, |_| true)?;
    for layer in &mut config.layers {
        layer.attention.has_sinks = true;
        if let Some(experts) = &mut layer.experts {
            experts.routing.activation = activation;
        }
    }
    Ok(())
}

/// Experts in the layers that `mlp_layer_types` names, or in all; layers with a window have a rotation of their own.
pub(super) fn mellum(fields: &Fields, config: &mut Config) -> Adjusted {
    let sparse = sparse_layers(fields, config.num_layers(), |_| true)?;
    // The layers that predict further tokens are not used.
    fields.ignore(&["num_mtp_layers", "num_nextn_predict_layers", "mtp_layer_types", "mtp_mlp_layer_types"]);
    require_both_ropes(fields, config)?;
    layers_of_two_ropes(fields, config, 500_000.0, 10_000.0)?;
    let (size, is_normalized) = (fields.required_size("moe_intermediate_size")?, fields.flag("norm_topk_prob", true)?);
    put_experts(fields, config, size, is_normalized, |index| sparse[index])
}

/// The layers that `mlp_layer_types` names, or those that `otherwise` does.
pub(super) fn sparse_layers(
    fields: &Fields,
    num_layers: usize,
    otherwise: impl Fn(usize) -> bool,
) -> Result<Vec<bool>, ModelError> {
    let Some(value) = fields.get("mlp_layer_types") else { return Ok((0..num_layers).map(otherwise).collect()) };
    let names = value.as_array().filter(|names| names.len() == num_layers);
    let is_sparse = |name: &Value| match name.as_str() {
        Some("dense") => Some(false),
        Some("sparse") => Some(true),
        _ => None,
    };
    let sparse = names.and_then(|names| names.iter().map(is_sparse).collect::<Option<Vec<_>>>());
    let expected = format!("a list of {num_layers} names, `dense` or `sparse`");
    sparse.ok_or_else(|| fields.wrong("mlp_layer_types", &expected, value))
}

/// A field that says the same, which transformers does not read.
pub(super) fn require_dense_first(fields: &Fields, sparse: &[bool]) -> Adjusted {
    let count = sparse.iter().position(|is_sparse| *is_sparse).unwrap_or(sparse.len());
    require_equal(fields, "first_k_dense_replace", count, "the number of layers before those with experts")
}

pub(super) fn olmoe(fields: &Fields, config: &mut Config) -> Adjusted {
    let size = fields.required_size("intermediate_size")?;
    let is_normalized = fields.flag("norm_topk_prob", false)?;
    put_experts(fields, config, size, is_normalized, |_| true)
}

/// Experts in some layers; the others have a feed-forward of `intermediate_size`.
pub(super) fn qwen_moe(fields: &Fields, config: &mut Config) -> Adjusted {
    let size = fields.required_size("moe_intermediate_size")?;
    let is_normalized = fields.flag("norm_topk_prob", false)?;
    let step = fields.size("decoder_sparse_step")?.unwrap_or(1);
    let dense: Vec<u32> = fields.token_ids("mlp_only_layers")?;
    let is_sparse = |index: usize| !dense.contains(&(index as u32)) && (index + 1).is_multiple_of(step);
    put_experts(fields, config, size, is_normalized, is_sparse)
}

/// The same, where the probabilities of the chosen experts are always divided by their sum.
pub(super) fn qwen3_vl_moe(fields: &Fields, config: &mut Config) -> Adjusted {
    qwen_vl(fields, config)?;
    fields.only("norm_topk_prob", true)?;
    qwen_moe(fields, config)?;
    each_routing(config, |routing| routing.is_normalized = true);
    Ok(())
}

/// Experts in some layers, with one that all tokens share.
pub(super) fn qwen2_moe(fields: &Fields, config: &mut Config) -> Adjusted {
    let dense: Vec<_> = config.layers.iter().map(|layer| layer.mlp).collect();
    qwen_moe(fields, config)?;
    let shared_size = fields.required_size("shared_expert_intermediate_size")?;
    for (layer, dense) in config.layers.iter_mut().zip(dense).filter(|(layer, _)| layer.experts.is_some()) {
        layer.mlp = dense.map(|mlp| MlpLayer { intermediate_size: shared_size, has_output_gate: true, ..mlp });
    }
    Ok(())
}

/// Experts in all layers, whose probabilities are divided by their sum, beside one that all tokens share.
pub(super) fn qwen3_5_moe(fields: &Fields, config: &mut Config) -> Adjusted {
    let [size, shared_size] =
        [fields.required_size("moe_intermediate_size")?, fields.required_size("shared_expert_intermediate_size")?];
    put_experts_beside(fields, config, [size, shared_size], true, |_| true)?;
    let shared = config.layers.iter_mut().filter_map(|layer| layer.mlp.as_mut());
    shared.for_each(|mlp| mlp.has_output_gate = true);
    Ok(())
}

/// GLM-4.5: the first layers are dense; norms of q and k by a flag.
pub(super) fn glm4_moe(fields: &Fields, config: &mut Config) -> Adjusted {
    if !fields.flag("use_qk_norm", false)? {
        each_attention(config, |attention| attention.head_norm = None);
    }
    deepseek_moe(fields, config)?;
    put_mtp(fields, config, MtpForm::DeepSeek, &["num_nextn_predict_layers", "num_mtp_layers"]);
    Ok(())
}

/// GLM-4.5V: GLM-4.5 whose positions have sections.
pub(super) fn glm4v_moe(fields: &Fields, config: &mut Config) -> Adjusted {
    glm_sections(fields, config)?;
    deepseek_moe(fields, config)
}

/// GLM-4.7-Flash: experts in the layers that `mlp_layer_types` names, or in all but the first.
pub(super) fn glm4_moe_lite(fields: &Fields, config: &mut Config) -> Adjusted {
    let sparse = sparse_layers(fields, config.num_layers(), |index| index >= 1)?;
    require_dense_first(fields, &sparse)?;
    put_deepseek_experts(fields, config, true, |index| sparse[index])
}

/// K-EXAONE: layers with a window are rotated.
pub(super) fn exaone_moe(fields: &Fields, config: &mut Config) -> Adjusted {
    exaone4(fields, config)?;
    let first = fields.count("first_k_dense_replace")?;
    let sparse = sparse_layers(fields, config.num_layers(), |index| index >= first)?;
    put_deepseek_experts(fields, config, false, |index| sparse[index])
}

/// Experts behind some dense layers.
pub(super) fn deepseek_moe(fields: &Fields, config: &mut Config) -> Adjusted {
    let first = fields.count("first_k_dense_replace")?;
    put_deepseek_experts(fields, config, false, |index| index >= first)
}

/// The same, where the probabilities of the chosen experts are divided by their sum unless the configuration says otherwise.
pub(super) fn deepseek_v3_moe(fields: &Fields, config: &mut Config) -> Adjusted {
    let first = fields.count("first_k_dense_replace")?;
    put_deepseek_experts(fields, config, true, |index| index >= first)
}

/// How experts are chosen among groups: V2 has two ways.
fn v2_groups(fields: &Fields) -> Result<Option<ExpertGroups>, ModelError> {
    match fields.text("topk_method")?.unwrap_or("greedy") {
        "greedy" => {
            fields.ignore(&["n_group", "topk_group"]);
            Ok(None)
        }
        "group_limited_greedy" => {
            for name in ["n_group", "topk_group"] {
                fields.required_size(name)?;
            }
            expert_groups(fields, GroupScore::Best)
        }
        other => Err(fields.wrong("topk_method", "`greedy` or `group_limited_greedy`", &other.into())),
    }
}

/// Experts as in DeepSeek V2: a softmax that is not divided by the sum of the chosen ones, beside a feed-forward for all tokens.
pub(super) fn deepseek_v2_moe(fields: &Fields, config: &mut Config) -> Adjusted {
    fields.only_text("scoring_func", &["softmax"])?;
    fields.only("norm_topk_prob", false)?;
    let (first, size) = (fields.count("first_k_dense_replace")?, fields.required_size("moe_intermediate_size")?);
    let shared_size = size * fields.count("n_shared_experts")?;
    let scale = fields.positive("routed_scaling_factor")?.unwrap_or(1.0) as f32;
    let groups = v2_groups(fields)?;
    put_experts_beside(fields, config, [size, shared_size], false, |index| index >= first)?;
    each_routing(config, |routing| (routing.scale, routing.groups) = (scale, groups));
    Ok(())
}

/// Experts as in DeepSeek V3: sigmoids, chosen with a bias and within groups, beside a feed-forward for all tokens.
fn put_deepseek_experts(
    fields: &Fields,
    config: &mut Config,
    is_normalized: bool,
    is_sparse: impl Fn(usize) -> bool,
) -> Adjusted {
    fields.only_text("scoring_func", &["sigmoid", "noaux_tc"])?;
    fields.only_text("topk_method", &["noaux_tc"])?;
    let size = fields.required_size("moe_intermediate_size")?;
    if fields.get("n_shared_experts").is_none() {
        return Err(fields.wrong("n_shared_experts", "a whole number", &Value::Null));
    }
    let shared_size = size * fields.count("n_shared_experts")?;
    put_grouped_experts(fields, config, [size, shared_size], (Scoring::Sigmoid, is_normalized), is_sparse)
}

/// Experts that are chosen within groups by the sum of the two best, and whose weights have a factor, beside a feed-forward for all tokens.
/// `is_normalized` counts if the configuration does not say it.
pub(super) fn put_grouped_experts(
    fields: &Fields,
    config: &mut Config,
    sizes: [usize; 2],
    (scoring, is_normalized): (Scoring, bool),
    is_sparse: impl Fn(usize) -> bool,
) -> Adjusted {
    let is_normalized = fields.flag("norm_topk_prob", is_normalized)?;
    put_experts_beside(fields, config, sizes, is_normalized, is_sparse)?;
    let scale = fields.positive("routed_scaling_factor")?.unwrap_or(1.0) as f32;
    let groups = expert_groups(fields, GroupScore::BestTwo)?;
    each_routing(config, |routing| (routing.scoring, routing.scale, routing.groups) = (scoring, scale, groups));
    Ok(())
}

/// ERNIE 4.5: experts that are chosen with a bias, in some layers, beside a feed-forward for all tokens.
pub(super) fn ernie_moe(fields: &Fields, config: &mut Config) -> Adjusted {
    fields.only("use_bias", false)?;
    fields.only("moe_use_aux_free", true)?;
    fields.only_text("moe_gate", &["topk"])?;
    // Of training, and of the layers that predict further tokens, which are not used.
    fields.ignore(&["moe_capacity", "num_nextn_predict_layers"]);
    if fields.positive("moe_norm_min")?.is_some_and(|min| min > 1e-9) {
        let found = fields.get("moe_norm_min").cloned().unwrap_or_default();
        return Err(fields.wrong("moe_norm_min", "at most 1e-9, which has no effect", &found));
    }
    let first = fields.count("moe_layer_start_index")?;
    let last = match fields.get("moe_layer_end_index") {
        Some(value) if value.as_i64() == Some(-1) => usize::MAX,
        _ => fields.count("moe_layer_end_index")?,
    };
    let interval = fields.required_size("moe_layer_interval")?;
    let is_sparse = |index: usize| (first..=last).contains(&index) && (index + 1).is_multiple_of(interval);
    let size = fields.required_size("moe_intermediate_size")?;
    let shared_size = size * fields.count("n_shared_experts")?;
    put_experts_beside(fields, config, [size, shared_size], true, is_sparse)
}

/// Experts with sigmoids, chosen with a bias, in all layers.
pub(super) fn minimax_m2(fields: &Fields, config: &mut Config) -> Adjusted {
    ["use_qk_norm", "use_routing_bias"].into_iter().try_for_each(|name| fields.only(name, true))?;
    fields.only_text("qk_norm_type", &["per_layer"])?;
    fields.only_text("scoring_func", &["sigmoid"])?;
    // Of the layers that predict further tokens, which are not used.
    fields.ignore(&["use_mtp", "num_mtp_modules", "mtp_transformer_layers"]);
    if fields.get("rotary_dim").is_some() && fields.get("rope_parameters").is_none() {
        rotary_dim(fields, config)?;
    }
    mixtral(fields, config)?;
    each_routing(config, |routing| routing.scoring = Scoring::Sigmoid);
    Ok(())
}

/// Solar Open: experts as in DeepSeek V3, in all layers.
pub(super) fn solar_open(fields: &Fields, config: &mut Config) -> Adjusted {
    fields.only("use_qk_norm", false)?;
    let first = fields.count("first_k_dense_replace")?;
    if first > 0 {
        return Err(fields.wrong("first_k_dense_replace", "0: this architecture has no dense layers", &first.into()));
    }
    let rope = &config.ropes[0];
    if rope.rotary_dim != rope.head_dim {
        let found = (rope.rotary_dim as f64 / rope.head_dim as f64).into();
        return Err(fields.wrong("partial_rotary_factor", "1: whole heads are rotated", &found));
    }
    put_deepseek_experts(fields, config, true, |_| true)
}

/// Arcee Trinity: the output of attention has gates, and only layers with a window are rotated; experts with sigmoids, chosen with a
/// bias, behind some dense layers.
pub(super) fn afmoe(fields: &Fields, config: &mut Config) -> Adjusted {
    fields.required_size("sliding_window")?;
    each_attention(config, |attention| {
        attention.has_output_gate = true;
        attention.rope = attention.rope.filter(|_| attention.window.is_some());
    });
    if fields.flag("mup_enabled", false)? {
        config.embedding_scale = embedding_scale(config.hidden_size, DType::F32);
    }
    let first = fields.count("num_dense_layers")?;
    let scale = fields.positive("route_scale")?.unwrap_or(1.0);
    put_sigmoid_experts(fields, config, fields.count("num_shared_experts")?, scale, |index| index >= first)
}

/// Experts with sigmoids whose weights are divided by their sum and multiplied by `scale`, beside a feed-forward as wide as
/// `num_shared` of them.
pub(super) fn put_sigmoid_experts(
    fields: &Fields,
    config: &mut Config,
    num_shared: usize,
    scale: f64,
    is_sparse: impl Fn(usize) -> bool,
) -> Adjusted {
    let size = fields.required_size("moe_intermediate_size")?;
    put_experts_beside(fields, config, [size, size * num_shared], true, is_sparse)?;
    each_routing(config, |routing| (routing.scoring, routing.scale) = (Scoring::Sigmoid, scale as f32));
    Ok(())
}

pub(super) fn each_routing(config: &mut Config, change: impl FnMut(&mut Routing)) {
    let experts = config.layers.iter_mut().filter_map(|layer| layer.experts.as_mut());
    experts.map(|experts| &mut experts.routing).for_each(change);
}

/// The groups of `n_group`, of which a token chooses `topk_group`.
pub(super) fn expert_groups(fields: &Fields, score: GroupScore) -> Result<Option<ExpertGroups>, ModelError> {
    let (num_experts, top_k) = (fields.required_size("num_experts")?, fields.required_size("num_experts_per_tok")?);
    let count = fields.size("n_group")?.unwrap_or(1);
    let chosen = fields.size("topk_group")?.unwrap_or(1);
    let least = if score == GroupScore::BestTwo { 2 } else { 1 };
    if !num_experts.is_multiple_of(count) || num_experts / count < least {
        let expected = format!("a number of groups of equal size, {least} or more of {num_experts} experts in each");
        return Err(fields.wrong("n_group", &expected, &count.into()));
    }
    if chosen > count || chosen * (num_experts / count) < top_k {
        let expected = format!("at most {count} groups that together have {top_k} experts or more");
        return Err(fields.wrong("topk_group", &expected, &chosen.into()));
    }
    Ok((chosen < count).then_some(ExpertGroups { count, chosen, score }))
}

/// Replaces the feed-forward of the layers that `is_sparse` names by experts and a feed-forward of other width for all
/// tokens, unless its width is 0.
pub(super) fn put_experts_beside(
    fields: &Fields,
    config: &mut Config,
    [size, shared_size]: [usize; 2],
    is_normalized: bool,
    is_sparse: impl Fn(usize) -> bool,
) -> Adjusted {
    let dense: Vec<_> = config.layers.iter().map(|layer| layer.mlp).collect();
    put_experts(fields, config, size, is_normalized, is_sparse)?;
    let sparse = config.layers.iter_mut().zip(dense).filter(|(layer, _)| layer.experts.is_some());
    for (layer, dense) in sparse.filter(|_| shared_size > 0) {
        layer.mlp = dense.map(|mlp| MlpLayer { intermediate_size: shared_size, ..mlp });
    }
    Ok(())
}

/// Replaces the feed-forward of the layers that `is_sparse` names by experts.
pub(super) fn put_experts(
    fields: &Fields,
    config: &mut Config,
    intermediate_size: usize,
    is_normalized: bool,
    is_sparse: impl Fn(usize) -> bool,
) -> Adjusted {
    let (num_experts, top_k) = (fields.required_size("num_experts")?, fields.required_size("num_experts_per_tok")?);
    if top_k > num_experts {
        let expected = format!("at most the number of experts ({num_experts})");
        return Err(fields.wrong("num_experts_per_tok", &expected, &top_k.into()));
    }
    for (index, layer) in config.layers.iter_mut().enumerate().filter(|(index, _)| is_sparse(*index)) {
        debug_assert!(layer.experts.is_none(), "layer {index} is replaced once");
        let activation = layer.mlp.take().map_or(Activation::Silu, |mlp| mlp.activation);
        let routing = Routing {
            top_k,
            scoring: Scoring::Softmax,
            scales_input: false,
            groups: None,
            is_normalized,
            scale: 1.0,
            activation,
        };
        layer.experts = Some(ExpertLayer { num_experts, intermediate_size, latent_size: None, routing });
    }
    Ok(())
}
