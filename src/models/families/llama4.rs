//! Llama 4: some layers are not rotated and see all positions; the others see a chunk. Some layers have experts.

use ops::{HeadNormSpan, NormKind, QueryScale, Routing, Scoring};
use serde_json::Value;

use super::adjust::{Adjusted, rotated_layers, usual_rotated_layers};
use crate::ModelError;
use crate::config::Config;
use crate::fields::Fields;
use crate::layer_spec::{ExpertLayer, HeadNormSpec, LayerSpec, MlpLayer};

pub(super) fn llama4(fields: &Fields, config: &mut Config) -> Adjusted {
    let is_empty = |value: &Value| value.as_array().is_some_and(Vec::is_empty);
    let rotated = match fields.get("no_rope_layers").is_some_and(is_empty) {
        true => usual_rotated_layers(fields, config.num_layers())?,
        false => rotated_layers(fields, config.num_layers())?,
    };
    let chunks = chunks(fields, &rotated)?;
    let norm = fields.flag("use_qk_norm", true)?.then_some(HeadNormSpec {
        span: HeadNormSpan::Head,
        kind: NormKind::Rms,
        eps: config.norm.eps,
        has_weight: false,
        has_value: false,
        is_behind_rotation: false,
    });
    if norm.is_some() && !config.ropes[0].scaling.keeps_lengths() {
        // The norms follow the rotation in the reference, which is the same only if the rotation keeps lengths.
        return Err(fields.wrong("use_qk_norm", "`false` with a rotation that scales q and k", &true.into()));
    }
    let tuned = fields.flag("attn_temperature_tuning", true)?;
    let (beta, period) = (fields.positive("attn_scale")?, fields.size("floor_scale")?);
    let scale = QueryScale { beta: beta.unwrap_or(0.1) as f32, period: period.unwrap_or(8192) as u32, offset: 1 };
    for ((layer, is_rotated), chunk) in config.layers.iter_mut().zip(rotated).zip(chunks) {
        let attention = &mut layer.attention;
        attention.chunk = chunk;
        attention.rope = attention.rope.filter(|_| is_rotated);
        attention.head_norm = norm.filter(|_| is_rotated);
        attention.query_scale = Some(scale).filter(|_| tuned && !is_rotated);
    }
    put_experts(fields, config)
}

/// The chunk of each layer: of those that `layer_types` names, or else of those that are rotated.
fn chunks(fields: &Fields, rotated: &[bool]) -> Result<Vec<Option<usize>>, ModelError> {
    let has_chunks = match fields.get("layer_types") {
        None => rotated.to_vec(),
        Some(value) => {
            let expected = format!("a list of {} names, `full_attention` or `chunked_attention`", rotated.len());
            let names = value.as_array().filter(|names| names.len() == rotated.len());
            let has_chunks = |name: &Value| match name.as_str() {
                Some("full_attention") => Some(false),
                Some("chunked_attention") => Some(true),
                _ => None,
            };
            let has_chunks = names.and_then(|names| names.iter().map(has_chunks).collect::<Option<Vec<_>>>());
            has_chunks.ok_or_else(|| fields.wrong("layer_types", &expected, value))?
        }
    };
    let size = fields.size("attention_chunk_size")?;
    if size.is_none() && has_chunks.contains(&true) {
        return Err(fields.wrong("attention_chunk_size", "a whole number, since layers see chunks", &Value::Null));
    }
    Ok(has_chunks.into_iter().map(|has| size.filter(|_| has)).collect())
}

/// Layers with experts have a shared one of the same width. The others are wider.
fn put_experts(fields: &Fields, config: &mut Config) -> Adjusted {
    let (num_experts, top_k) = (fields.required_size("num_experts")?, fields.required_size("num_experts_per_tok")?);
    if top_k > num_experts {
        return Err(fields.wrong("num_experts_per_tok", "at most the number of experts", &top_k.into()));
    }
    let (size, dense_size) =
        (fields.required_size("intermediate_size")?, fields.required_size("intermediate_size_mlp")?);
    let step = fields.size("interleave_moe_layer_step")?.unwrap_or(1);
    let listed = fields.get("moe_layers").map(|_| fields.token_ids("moe_layers")).transpose()?;
    let is_sparse = |index: usize| match &listed {
        Some(listed) => listed.contains(&(index as u32)),
        None => (index + 1).is_multiple_of(step),
    };
    for (index, LayerSpec { mlp, experts, .. }) in config.layers.iter_mut().enumerate() {
        let Some(MlpLayer { intermediate_size, activation, .. }) = mlp else { continue };
        if !is_sparse(index) {
            *intermediate_size = dense_size;
            continue;
        }
        let (scoring, activation) = (Scoring::Sigmoid, *activation);
        let routing =
            Routing { top_k, scoring, scales_input: true, groups: None, is_normalized: false, scale: 1.0, activation };
        *experts = Some(ExpertLayer { num_experts, intermediate_size: size, latent_size: None, routing });
    }
    Ok(())
}
