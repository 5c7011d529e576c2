//! Nemotron-H and Nemotron 3: layers of one part each, which are Mamba-2, attention without rotation, a feed-forward, or experts. A layer
//! of the model is a mixer and the feed-forward behind it, if there is one.

use ops::{RecurrentRule, RecurrentShape, Scoring};
use serde_json::Value;

use super::adjust::{Adjusted, require_equal};
use super::experts::put_grouped_experts;
use super::hybrid::without_step_limits;
use crate::ModelError;
use crate::config::Config;
use crate::fields::Fields;
use crate::layer_spec::{LayerSpec, RecurrentLayer};

/// What a layer of the checkpoint is.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Part {
    Mamba2,
    Attention,
    FeedForward,
    Experts,
}

impl Part {
    /// By its letter in `hybrid_override_pattern`.
    fn of_letter(letter: char) -> Option<Self> {
        match letter {
            'M' => Some(Part::Mamba2),
            '*' => Some(Part::Attention),
            '-' => Some(Part::FeedForward),
            'E' => Some(Part::Experts),
            _ => None,
        }
    }

    /// By its name in `layers_block_type`, of which two have older ones.
    fn of_name(name: &str) -> Option<Self> {
        match name {
            "linear_attention" | "mamba" => Some(Part::Mamba2),
            "full_attention" | "attention" => Some(Part::Attention),
            "mlp" => Some(Part::FeedForward),
            "moe" => Some(Part::Experts),
            _ => None,
        }
    }
}

/// Fields that transformers does not read, or that belong to training or to the layers that predict further tokens, which are not used.
const UNUSED: &[&str] = &[
    "chunk_size", // States are computed token by token, with other roundings alone.
    "expand",
    "moe_shared_expert_overlap",
    "mtp_hybrid_override_pattern",
    "mtp_layers_block_type",
    "n_shared_experts",
    "norm_eps",
    "num_logits_to_keep",
    "num_nextn_predict_layers",
    "partial_rotary_factor",
    "rescale_prenorm_residual",
    "residual_in_fp32",
    "rope_theta",
    "time_step_floor",
    "time_step_max",
    "time_step_rank",
    "use_mamba_kernels",
];

/// Fields of experts, which a model without any may have.
const OF_EXPERTS: &[&str] = &[
    "moe_intermediate_size",
    "moe_latent_size",
    "moe_shared_expert_intermediate_size",
    "n_group",
    "norm_topk_prob",
    "num_experts",
    "num_experts_per_tok",
    "routed_scaling_factor",
    "topk_group",
];

pub(super) fn nemotron_h(fields: &Fields, config: &mut Config) -> Adjusted {
    fields.ignore(UNUSED);
    require_equal(fields, "attention_head_dim", config.layers[0].attention.head_dim, "the size of a head")?;
    fields.only("tie_word_embeddings", false)?;
    fields.only_text("mamba_hidden_act", &["silu"])?;
    fields.only_text("mamba_ssm_cache_dtype", &["float32"])?;
    without_step_limits(fields)?;
    // transformers raises the steps of prompts to it, but not those of single tokens. The publisher's code raises none, nor is it done here.
    if fields.positive("time_step_min")?.is_some_and(|least| least > 0.001) {
        let found = fields.get("time_step_min").cloned().unwrap_or_default();
        return Err(fields.wrong("time_step_min", "at most 0.001: smaller steps are not raised", &found));
    }
    let (name, parts) = parts(fields)?;
    let recurrent = RecurrentLayer {
        shape: shape(fields)?,
        eps: config.norm.eps,
        has_conv_bias: fields.flag("use_conv_bias", true)?,
        has_bias: fields.flag("use_bias", false)?,
    };
    let wrong = |expected: &str| fields.wrong(name, expected, fields.get(name).unwrap_or(&Value::Null));
    if !parts.contains(&Part::Attention) {
        return Err(wrong("layers of which one or more have attention"));
    }
    let usual = config.layers.swap_remove(0);
    config.layers.clear();
    let mut has_experts = Vec::new();
    for (number, part) in parts.into_iter().enumerate() {
        if let Part::Mamba2 | Part::Attention = part {
            let recurrent = (part == Part::Mamba2).then_some(recurrent);
            let mut layer = LayerSpec { recurrent, mlp: None, numbers: Some([number; 2]), ..usual.clone() };
            layer.attention.rope = None;
            config.layers.push(layer);
            has_experts.push(false);
            continue;
        }
        let mixer = config.layers.last_mut().filter(|layer| layer.mlp.is_none());
        let mixer = mixer.ok_or_else(|| wrong("a layer of Mamba-2 or attention before each feed-forward"))?;
        (mixer.mlp, mixer.numbers) = (usual.mlp, mixer.numbers.map(|[mixer, _]| [mixer, number]));
        has_experts.pop();
        has_experts.push(part == Part::Experts);
    }
    match has_experts.contains(&true) {
        true => put_experts(fields, config, |index| has_experts[index]),
        false => {
            fields.ignore(OF_EXPERTS);
            Ok(())
        }
    }
}

/// The layers of the checkpoint, and the field that has them: a list of names, or a text of letters.
fn parts(fields: &Fields) -> Result<(&'static str, Vec<Part>), ModelError> {
    let letters = fields.get("hybrid_override_pattern");
    if let Some(value) = fields.get("layers_block_type") {
        let names = value.as_array().filter(|names| !names.is_empty());
        let parts = names.and_then(|names| names.iter().map(|name| Part::of_name(name.as_str()?)).collect());
        let expected = "a list of `linear_attention`, `full_attention`, `mlp` and `moe`";
        return Ok(("layers_block_type", parts.ok_or_else(|| fields.wrong("layers_block_type", expected, value))?));
    }
    let name = "hybrid_override_pattern";
    let value = letters.unwrap_or(&Value::Null);
    let parts =
        value.as_str().filter(|text| !text.is_empty()).and_then(|text| text.chars().map(Part::of_letter).collect());
    Ok((name, parts.ok_or_else(|| fields.wrong(name, "a text of `M`, `*`, `-` and `E`", value))?))
}

/// Sizes of Mamba-2. Value heads of the same B and C have one norm.
fn shape(fields: &Fields) -> Result<RecurrentShape, ModelError> {
    let num_value_heads = fields.required_size("mamba_num_heads")?;
    let num_key_heads = fields.required_size("n_groups")?;
    if !num_value_heads.is_multiple_of(num_key_heads) {
        let expected = format!("a multiple of `n_groups` ({num_key_heads})");
        return Err(fields.wrong("mamba_num_heads", &expected, &num_value_heads.into()));
    }
    Ok(RecurrentShape {
        rule: RecurrentRule::Mamba2 { norm_heads: Some(num_value_heads / num_key_heads) },
        num_key_heads,
        num_value_heads,
        key_dim: fields.required_size("ssm_state_size")?,
        value_dim: fields.required_size("mamba_head_dim")?,
        num_taps: fields.required_size("conv_kernel")?,
    })
}

/// Experts with sigmoids, chosen with a bias and within groups, beside a feed-forward for all tokens.
fn put_experts(fields: &Fields, config: &mut Config, is_sparse: impl Fn(usize) -> bool) -> Adjusted {
    let sizes = ["moe_intermediate_size", "moe_shared_expert_intermediate_size"].map(|name| fields.required_size(name));
    let [size, shared_size] = sizes;
    put_grouped_experts(fields, config, [size?, shared_size?], (Scoring::Sigmoid, true), is_sparse)?;
    let latent_size = fields.size("moe_latent_size")?;
    let experts = config.layers.iter_mut().filter_map(|layer| layer.experts.as_mut());
    experts.for_each(|experts| experts.latent_size = latent_size);
    Ok(())
}
