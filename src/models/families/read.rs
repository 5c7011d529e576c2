//! Reads a model's configuration from `config.json` and `generation_config.json`.

use std::path::Path;

use ops::{Activation, DType, KvElements, NormKind};
use serde_json::{Map, Value};

use super::harmless::refuse_unread;
use super::layer_types::windows;
use super::quantization::{from_other_files, weight_format};
use super::{BiasRule, Family, NormRule, architectures, find, find_by_model_type, weights};
use crate::config::{Config, HeadSpec, WeightFormat};
use crate::fields::Fields;
use crate::layer_spec::{AttentionLayer, HeadNormSpec, KvSource, LayerSpec, MlpLayer, NormSpec};
use crate::rope::RopeShape;
use crate::{ModelError, Rope};

impl Config {
    /// Reads `config.json`, and `generation_config.json` if it exists.
    ///
    /// # Errors
    /// Returns an error if a file cannot be read, or if a field is missing, invalid or unknown.
    pub fn from_dir(dir: &Path) -> Result<Self, ModelError> {
        let top = Fields::read(&dir.join("config.json"))?.with_defaults(&from_other_files(dir)?);
        let family = family(&top)?;
        let mut notes = Vec::new();
        if dir.join("adapter_config.json").exists() {
            notes.push(
                "the adapter beside this checkpoint is not applied; merge it into the weights to serve it".to_owned(),
            );
        }
        let (family, fields) = match family.is_nested {
            true => text_model(family, top, &mut notes)?,
            false => (family, top),
        };
        let fields = fields.with_aliases(family.aliases).with_defaults(&defaults(family));
        let (weight_format, stored_quantization, quantization_notes) = weight_format(&fields, family)?;
        let mut config = decoder(&fields, family)?;
        config.weight_format = weight_format;
        config.stored_quantization = stored_quantization;
        (family.adjust)(&fields, &mut config)?;
        refuse_unread(&fields, family)?;
        notes.extend(quantization_notes);
        config.notes.append(&mut notes);
        let generation = dir.join("generation_config.json");
        if generation.exists() {
            let generation = Fields::read(&generation)?;
            let eos_ids = generation.token_ids("eos_token_id")?;
            if !eos_ids.is_empty() {
                config.eos_ids = eos_ids;
            }
            config.bos_id = generation.token_ids("bos_token_id")?.first().copied().or(config.bos_id);
        }
        Ok(config)
    }
}

pub(super) fn defaults(family: &Family) -> Map<String, Value> {
    serde_json::from_str(family.defaults).expect("defaults are a JSON object")
}

fn family(fields: &Fields) -> Result<&'static Family, ModelError> {
    let named = match fields.get("architectures") {
        Some(Value::Array(names)) => names.first().and_then(Value::as_str),
        Some(other) => return Err(fields.wrong("architectures", "a list of names", other)),
        None => None,
    };
    let unknown = |found: &str| ModelError::Architecture {
        path: fields.path().into(),
        found: found.into(),
        known: architectures().join(", "),
    };
    if let Some(name) = named {
        return find(name).ok_or_else(|| unknown(name));
    }
    let model_type = fields.text("model_type")?.unwrap_or("(none)");
    find_by_model_type(model_type).ok_or_else(|| unknown(model_type))
}

/// The most layers that are read. The deepest models have some hundred.
const MAX_LAYERS: usize = 10_000;

/// The most heads of a layer. The widest layers have some hundred.
const MAX_HEADS: usize = 1 << 16;

/// Fields of a vision model in a file that has those of the text model beside them.
const VISION_FIELDS: &[&str] = &[
    "vision_config",
    "vision_start_token_id",
    "vision_end_token_id",
    "vision_token_id",
    "image_token_id",
    "video_token_id",
];

/// The architecture and the fields of the text model in a file that also describes a vision model. `usual` is its
/// architecture if `model_type` names no other.
fn text_model(
    usual: &'static Family,
    top: Fields,
    notes: &mut Vec<String>,
) -> Result<(&'static Family, Fields), ModelError> {
    notes.push("only the text model of this checkpoint is served: images are refused".to_owned());
    let Some(text) = top.object("text_config")? else {
        if !usual.may_be_flat {
            return Err(top.wrong("text_config", "an object", &Value::Null));
        }
        top.ignore(VISION_FIELDS);
        return Ok((usual, top));
    };
    let named = match text.text("model_type")? {
        Some(name) if name.strip_suffix("_text") == Some(usual.model_type) => usual,
        Some(name) => text_family(name).ok_or_else(|| ModelError::Architecture {
            path: top.path().into(),
            found: name.into(),
            known: architectures().join(", "),
        })?,
        None => usual,
    };
    // The head and the embedding are parts of the whole model, whose field decides whether they are one.
    let usual_tied = defaults(usual).get("tie_word_embeddings").cloned();
    let top = top.with_aliases(usual.aliases);
    let tied = top.get("tie_word_embeddings").cloned().or(usual_tied).unwrap_or(Value::Bool(false));
    let names = named.aliases.iter().filter(|(usual, _)| *usual == "tie_word_embeddings").map(|(_, own)| own);
    let tied = names.chain([&"tie_word_embeddings"]).map(|name| ((*name).to_owned(), tied.clone()));
    let outer = ["bos_token_id", "eos_token_id", "dtype", "torch_dtype", "quantization_config"];
    let outer = outer.into_iter().filter_map(|name| Some((name.to_owned(), top.get(name)?.clone())));
    Ok((named, text.with_fields(tied).with_defaults(&outer.collect())))
}

/// The architecture with this `model_type`, or whose text model has it.
fn text_family(name: &str) -> Option<&'static Family> {
    find_by_model_type(name).or_else(|| find_by_model_type(name.strip_suffix("_text")?))
}

/// Reads a decoder whose layers are alike, except for their windows.
pub(super) fn decoder(fields: &Fields, family: &Family) -> Result<Config, ModelError> {
    fields.only("is_causal", true)?;
    let hidden_size = fields.required_size("hidden_size")?;
    let num_layers = fields.required_count("num_hidden_layers", MAX_LAYERS)?;
    let max_positions = match fields.size("max_position_embeddings")? {
        Some(positions) => positions,
        None => fields.size("model_max_length")?.unwrap_or(2048),
    };
    let norm = norm(fields, family.norm)?;
    let attention = attention(fields, family, hidden_size, norm)?;
    let shape = RopeShape {
        head_dim: attention.head_dim,
        is_interleaved: family.is_interleaved,
        partial: family.partial_rotary,
        theta: 10_000.0,
        max_positions,
    };
    let intermediate_size = match (fields.size("intermediate_size")?, family.inner_factor) {
        (None, Some(factor)) => factor * hidden_size,
        (_, None | Some(_)) => fields.required_size("intermediate_size")?,
    };
    let mlp = MlpLayer {
        intermediate_size,
        is_gated: family.names.up.is_gated(),
        activation: activation(fields, family)?,
        has_bias: has_bias(fields, family.mlp_bias)?,
        has_output_gate: false,
        scale: 1.0,
    };
    let layer = |window| LayerSpec {
        attention: AttentionLayer { window, ..attention.clone() },
        mlp: Some(mlp),
        experts: None,
        recurrent: None,
        beside: None,
        norm_scales: [1.0; 2],
        is_parallel: family.is_parallel,
        numbers: None,
    };
    Ok(Config {
        architecture: family.name.to_owned(),
        names: family.names,
        hidden_size,
        vocab_size: fields.required_size("vocab_size")?,
        max_position_embeddings: max_positions,
        embedding_scale: 1.0,
        branch_scale: 1.0,
        learned_positions: None,
        per_layer_input: None,
        norm,
        ropes: vec![Rope::read(fields, shape)?],
        layers: windows(fields, family.window, num_layers)?.into_iter().map(layer).collect(),
        head: HeadSpec {
            is_tied: fields.flag("tie_word_embeddings", false)?,
            has_unit_rows: false,
            has_bias: false,
            scale: 1.0,
            cap: None,
        },
        mtp: None,
        has_mtp_layer: false,
        draft: None,
        bos_id: fields.token_ids("bos_token_id")?.first().copied(),
        eos_ids: fields.token_ids("eos_token_id")?,
        dtype: dtype(fields)?,
        expert_groups: 1,
        weight_format: WeightFormat::Plain,
        stored_quantization: None,
        rounding: None,
        kv_elements: KvElements::default(),
        notes: Vec::new(),
    })
}

fn norm(fields: &Fields, rule: NormRule) -> Result<NormSpec, ModelError> {
    let (kind, has_weight, has_bias, offset) = match rule {
        NormRule::Rms => (NormKind::Rms, true, false, 0.0),
        NormRule::RmsFromOne => (NormKind::Rms, true, false, 1.0),
        NormRule::RmsWithoutWeight => (NormKind::Rms, false, false, 0.0),
        NormRule::Layer => (NormKind::Layer, true, true, 0.0),
        NormRule::LayerFromOne => (NormKind::Layer, true, true, 1.0),
        NormRule::LayerWithoutBias => (NormKind::Layer, true, false, 0.0),
        NormRule::LayerWithoutWeight => (NormKind::Layer, false, false, 0.0),
    };
    let (name, usual) = match kind {
        NormKind::Rms => ("rms_norm_eps", 1e-6),
        NormKind::Layer => ("layer_norm_eps", 1e-5),
    };
    let eps = fields.positive(name)?.unwrap_or(usual) as f32;
    Ok(NormSpec { kind, eps, has_weight, has_bias, offset })
}

fn attention(
    fields: &Fields,
    family: &Family,
    hidden_size: usize,
    norm: NormSpec,
) -> Result<AttentionLayer, ModelError> {
    let num_heads = fields.required_count("num_attention_heads", MAX_HEADS)?;
    let num_kv_heads = fields.size("num_key_value_heads")?.unwrap_or(num_heads);
    if !num_heads.is_multiple_of(num_kv_heads) {
        let expected = format!("a divisor of `num_attention_heads` ({num_heads})");
        return Err(fields.wrong("num_key_value_heads", &expected, &Value::from(num_kv_heads)));
    }
    let head_dim = head_dim(fields, hidden_size, num_heads)?;
    Ok(AttentionLayer {
        num_heads,
        num_kv_heads,
        head_dim,
        value_dim: None,
        latent: None,
        kv: KvSource::Projections,
        scale: (head_dim as f32).powf(-0.5),
        rope: Some(0),
        has_alibi: false,
        window: None,
        chunk: None,
        score_cap: None,
        has_sinks: false,
        has_output_gate: false,
        query_scale: None,
        head_norm: family.head_norm.map(|span| HeadNormSpec {
            span,
            kind: norm.kind,
            eps: norm.eps,
            has_weight: true,
            has_value: false,
            is_behind_rotation: false,
        }),
        qkv_bias: has_bias(fields, family.attention_bias.qkv)?,
        out_bias: has_bias(fields, family.attention_bias.out)?,
        out_scale: 1.0,
    })
}

/// `head_dim` as given, or `hidden_size` divided by the number of heads.
fn head_dim(fields: &Fields, hidden_size: usize, num_heads: usize) -> Result<usize, ModelError> {
    let head_dim = match fields.size("head_dim")? {
        Some(head_dim) => head_dim,
        None if hidden_size.is_multiple_of(num_heads) => hidden_size / num_heads,
        None => {
            let expected = format!("a divisor of the hidden size ({hidden_size}) where `head_dim` is absent");
            return Err(fields.wrong("num_attention_heads", &expected, &Value::from(num_heads)));
        }
    };
    if !head_dim.is_multiple_of(8) {
        return Err(fields.wrong("head_dim", "a multiple of 8", &Value::from(head_dim)));
    }
    Ok(head_dim)
}

fn has_bias(fields: &Fields, rule: BiasRule) -> Result<bool, ModelError> {
    match rule {
        BiasRule::Always => Ok(true),
        BiasRule::Never => Ok(false),
        BiasRule::Field { name, default } => fields.flag(name, default),
    }
}

fn activation(fields: &Fields, family: &Family) -> Result<Activation, ModelError> {
    match fields.text("hidden_act")?.unwrap_or("silu") {
        "silu" | "swish" => Ok(Activation::Silu),
        "gelu_pytorch_tanh" | "gelu_new" | "gelu_fast" => Ok(Activation::GeluTanh),
        "gelu" => Ok(Activation::Gelu),
        "relu" => Ok(Activation::Relu),
        "relu2" => Ok(Activation::ReluSquared),
        // Its numbers are those of a feed-forward without a gate.
        "xielu" if family.names.up == weights::PLAIN.up => {
            Ok(Activation::Xielu { positive: 0.8, negative: 0.8, slope: 0.5, edge: -1e-6 })
        }
        other => {
            let expected = "`silu`, `gelu`, `gelu_new`, `gelu_pytorch_tanh`, `relu` or `relu2`";
            Err(fields.wrong("hidden_act", expected, &Value::from(other)))
        }
    }
}

fn dtype(fields: &Fields) -> Result<DType, ModelError> {
    let name = if fields.get("dtype").is_some() { "dtype" } else { "torch_dtype" };
    match fields.text(name)? {
        None | Some("bfloat16") => Ok(DType::Bf16),
        Some("float16") => Ok(DType::F16),
        Some("float32") => Ok(DType::F32),
        Some(other) => Err(fields.wrong(name, "`bfloat16`, `float16` or `float32`", &Value::from(other))),
    }
}
