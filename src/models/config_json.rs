//! Reads a model's configuration from `config.json` and `generation_config.json`.

use std::path::Path;

use ops::{Activation, DType};
use serde_json::Value;

use crate::config::{Config, Mlp, NormKind, Positions};
use crate::fields::Fields;
use crate::registry::{self, Architecture, AttentionBias, ConfigStyle, WindowRule};
use crate::{ModelError, Rope};

impl Config {
    /// Reads `config.json`, and `generation_config.json` if it exists.
    ///
    /// # Errors
    /// Returns an error if a file cannot be read, or if a field is missing or invalid.
    pub fn from_dir(dir: &Path) -> Result<Self, ModelError> {
        let fields = Fields::read(&dir.join("config.json"))?;
        let architecture = architecture(&fields)?;
        let mut config = match architecture.style {
            ConfigStyle::Llama | ConfigStyle::Baichuan => llama(&fields, architecture)?,
            ConfigStyle::Gpt2 => gpt2(&fields, architecture)?,
        };
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

/// Reads the configuration of Llama and architectures with the same fields.
fn llama(fields: &Fields, architecture: &Architecture) -> Result<Config, ModelError> {
    let hidden_size = fields.required_size("hidden_size")?;
    let num_heads = fields.required_size("num_attention_heads")?;
    let num_kv_heads = fields.size("num_key_value_heads")?.unwrap_or(num_heads);
    if !num_heads.is_multiple_of(num_kv_heads) {
        let expected = format!("a divisor of `num_attention_heads` ({num_heads})");
        return Err(fields.wrong("num_key_value_heads", &expected, &Value::from(num_kv_heads)));
    }
    let vocab_size = fields.required_size("vocab_size")?;
    let num_layers = fields.required_size("num_hidden_layers")?;
    let is_baichuan = architecture.style == ConfigStyle::Baichuan;
    let max_positions = match fields.size("max_position_embeddings")? {
        Some(positions) => positions,
        None => fields.size("model_max_length")?.unwrap_or(2048),
    };
    let (qkv_bias, out_bias) = attention_bias(fields, architecture)?;
    Ok(Config {
        architecture: architecture.name.to_owned(),
        hidden_size,
        intermediate_size: fields.required_size("intermediate_size")?,
        num_layers,
        num_heads,
        num_kv_heads,
        head_dim: head_dim(fields, ["head_dim", "num_attention_heads", "hidden_size"], hidden_size, num_heads)?,
        vocab_size,
        max_position_embeddings: max_positions,
        norm: NormKind::Rms,
        norm_eps: fields.positive("rms_norm_eps")?.unwrap_or(1e-6) as f32,
        head_norms: architecture.head_norms,
        activation: activation(fields, "hidden_act", "silu")?,
        mlp: Mlp::Gated,
        positions: match is_baichuan && has_alibi(fields, hidden_size) {
            true => Positions::Alibi,
            false => Positions::Rotary(Rope::read(fields, max_positions)?),
        },
        tie_word_embeddings: fields.flag("tie_word_embeddings", architecture.tied)?,
        unit_head: is_baichuan && is_second_baichuan(fields, vocab_size),
        qkv_bias,
        out_bias,
        mlp_bias: fields.flag("mlp_bias", false)?,
        sliding_window: sliding_window(fields, architecture, num_layers)?,
        bos_id: fields.token_ids("bos_token_id")?.first().copied(),
        eos_ids: fields.token_ids("eos_token_id")?,
        dtype: dtype(fields)?,
    })
}

/// Baichuan has two position schemes. Only the rotary models have `max_position_embeddings`; the 13B models use ALiBi.
fn has_alibi(fields: &Fields, hidden_size: usize) -> bool {
    fields.get("max_position_embeddings").is_none() || hidden_size == 5120
}

/// The second generation is recognized by its vocabulary size, or by a loss weight that only it has.
fn is_second_baichuan(fields: &Fields, vocab_size: usize) -> bool {
    vocab_size == 125_696 || fields.get("z_loss_weight").is_some()
}

/// Reads the configuration of GPT-2, which has its own field names.
fn gpt2(fields: &Fields, architecture: &Architecture) -> Result<Config, ModelError> {
    for (name, only) in
        [("scale_attn_weights", true), ("scale_attn_by_inverse_layer_idx", false), ("add_cross_attention", false)]
    {
        if fields.flag(name, only)? != only {
            return Err(fields.wrong(name, &format!("`{only}`, the only way that is supported"), &Value::Bool(!only)));
        }
    }
    let hidden_size = fields.required_size("n_embd")?;
    let num_heads = fields.required_size("n_head")?;
    let num_positions = fields.size("n_positions")?.unwrap_or(1024);
    Ok(Config {
        architecture: architecture.name.to_owned(),
        hidden_size,
        intermediate_size: fields.size("n_inner")?.unwrap_or(4 * hidden_size),
        num_layers: fields.required_size("n_layer")?,
        num_heads,
        num_kv_heads: num_heads,
        head_dim: head_dim(fields, ["head_dim", "n_head", "n_embd"], hidden_size, num_heads)?,
        vocab_size: fields.required_size("vocab_size")?,
        max_position_embeddings: num_positions,
        norm: NormKind::Layer,
        norm_eps: fields.positive("layer_norm_epsilon")?.unwrap_or(1e-5) as f32,
        head_norms: false,
        activation: activation(fields, "activation_function", "gelu_new")?,
        mlp: Mlp::Plain,
        positions: Positions::Learned { num_positions },
        tie_word_embeddings: fields.flag("tie_word_embeddings", architecture.tied)?,
        unit_head: false,
        qkv_bias: true,
        out_bias: true,
        mlp_bias: true,
        sliding_window: None,
        bos_id: fields.token_ids("bos_token_id")?.first().copied(),
        eos_ids: fields.token_ids("eos_token_id")?,
        dtype: dtype(fields)?,
    })
}

fn architecture(fields: &Fields) -> Result<&'static Architecture, ModelError> {
    let named = match fields.get("architectures") {
        Some(Value::Array(names)) => names.first().and_then(Value::as_str),
        Some(other) => return Err(fields.wrong("architectures", "a list of names", other)),
        None => None,
    };
    let unknown = |found: &str| ModelError::Architecture {
        path: fields.path().into(),
        found: found.into(),
        known: registry::architectures().join(", "),
    };
    if let Some(name) = named {
        return registry::find(name).ok_or_else(|| unknown(name));
    }
    let model_type = fields.text("model_type")?.unwrap_or("(none)");
    registry::find_by_model_type(model_type).ok_or_else(|| unknown(model_type))
}

/// `head_dim` as given, or `hidden_size` divided by the number of heads. The names are those of the architecture's
/// fields.
fn head_dim(
    fields: &Fields,
    [head_dim_name, heads_name, hidden_name]: [&str; 3],
    hidden_size: usize,
    num_heads: usize,
) -> Result<usize, ModelError> {
    let head_dim = match fields.size(head_dim_name)? {
        Some(head_dim) => head_dim,
        None if hidden_size.is_multiple_of(num_heads) => hidden_size / num_heads,
        None => {
            let expected = format!("a divisor of `{hidden_name}` ({hidden_size}) where `{head_dim_name}` is absent");
            return Err(fields.wrong(heads_name, &expected, &Value::from(num_heads)));
        }
    };
    if !head_dim.is_multiple_of(8) {
        return Err(fields.wrong(head_dim_name, "a multiple of 8", &Value::from(head_dim)));
    }
    Ok(head_dim)
}

/// Whether q, k, v have biases, and whether the output projection has one.
fn attention_bias(fields: &Fields, architecture: &Architecture) -> Result<(bool, bool), ModelError> {
    Ok(match architecture.attention_bias {
        AttentionBias::Field { name, default, out } => {
            let has_bias = fields.flag(name, default)?;
            (has_bias, has_bias && out)
        }
        AttentionBias::QkvAlways => (true, false),
        AttentionBias::Always => (true, true),
        AttentionBias::Never => (false, false),
    })
}

fn activation(fields: &Fields, name: &str, default: &str) -> Result<Activation, ModelError> {
    match fields.text(name)?.unwrap_or(default) {
        "silu" | "swish" => Ok(Activation::Silu),
        "gelu_pytorch_tanh" | "gelu_new" => Ok(Activation::GeluTanh),
        other => Err(fields.wrong(name, "`silu`, `gelu_new` or `gelu_pytorch_tanh`", &Value::from(other))),
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

/// The sliding window, if the architecture has one and it is enabled for all layers.
fn sliding_window(
    fields: &Fields,
    architecture: &Architecture,
    num_layers: usize,
) -> Result<Option<usize>, ModelError> {
    let on = match architecture.window {
        WindowRule::Ignored => false,
        WindowRule::Used => true,
        WindowRule::IfEnabled => fields.flag("use_sliding_window", false)?,
    };
    let Some(window) = fields.size("sliding_window")?.filter(|_| on) else { return Ok(None) };
    // Layers before `max_window_layers` have no window; `layer_types` lists the kind of each layer.
    let first = fields
        .get("max_window_layers")
        .filter(|_| architecture.window == WindowRule::IfEnabled)
        .and_then(Value::as_u64);
    let first = first.unwrap_or(0) as usize;
    if first >= num_layers {
        return Ok(None);
    }
    let types = fields.get("layer_types").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    if first > 0 || types.iter().any(|kind| kind != "sliding_attention") {
        let (name, found) =
            if first > 0 { ("max_window_layers", Value::from(first)) } else { ("layer_types", Value::from(types)) };
        return Err(fields.wrong(
            name,
            "the same for all layers: windows of some layers alone are not supported",
            &found,
        ));
    }
    Ok(Some(window))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::RopeScaling;

    fn read(change: impl FnOnce(&mut Value)) -> Result<Config, ModelError> {
        let mut config = json!({
            "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 501,
            "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "eos_token_id": [2, 3], "torch_dtype": "float16",
        });
        change(&mut config);
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
        Config::from_dir(dir.path())
    }

    #[test]
    fn a_llama_config_is_read_with_its_defaults() {
        let config = read(|_| ()).unwrap();
        assert_eq!((config.head_dim, config.num_kv_heads, config.dtype), (16, 2, DType::F16));
        assert_eq!(config.eos_ids, [2, 3]);
        assert_eq!(config.positions, Positions::Rotary(Rope { theta: 10_000.0, scaling: RopeScaling::None }));
    }

    #[test]
    fn theta_and_scaling_are_found_in_rope_parameters() {
        let config = read(|c| {
            c["rope_parameters"] = json!({"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5});
        });
        let rope = Rope { theta: 5e5, scaling: RopeScaling::Linear { factor: 4.0 } };
        assert_eq!(config.unwrap().positions, Positions::Rotary(rope));
    }

    #[test]
    fn an_error_names_file_field_expected_and_found() {
        let error = read(|c| c["vocab_size"] = json!("many")).unwrap_err().to_string();
        assert!(
            error.ends_with("config.json: field `vocab_size` must be a whole number of at least 1, found \"many\"")
        );
        let error = read(|c| c["rope_scaling"] = json!({"rope_type": "magic"})).unwrap_err().to_string();
        assert!(error.contains("field `rope_scaling.rope_type` must be `default`, `linear`"), "{error}");
        let error = read(|c| c["hidden_size"] = Value::Null).unwrap_err().to_string();
        assert!(error.contains("`hidden_size`") && error.ends_with("found nothing"), "{error}");
    }

    #[test]
    fn an_unknown_architecture_lists_the_known() {
        let error = read(|c| c["architectures"] = json!(["OpusForCausalLM"])).unwrap_err().to_string();
        assert!(error.contains("`OpusForCausalLM` is not supported; supported: LlamaForCausalLM"), "{error}");
    }

    #[test]
    fn a_baichuan_config_tells_size_and_generation_apart() {
        let baichuan = |change: fn(&mut Value)| {
            read(|c| {
                c["architectures"] = json!(["BaichuanForCausalLM"]);
                change(c);
            })
            .unwrap()
        };
        let first_7b = baichuan(|_| ());
        assert!(matches!(first_7b.positions, Positions::Rotary(_)) && !first_7b.unit_head);
        let second_13b = baichuan(|c| {
            c.as_object_mut().unwrap().remove("max_position_embeddings");
            c["model_max_length"] = json!(4096);
            c["z_loss_weight"] = json!(0);
        });
        assert_eq!((second_13b.positions, second_13b.unit_head), (Positions::Alibi, true));
        assert_eq!(second_13b.max_position_embeddings, 4096);
    }

    #[test]
    fn windows_are_used_if_the_architecture_enables_them_and_must_be_equal_in_all_layers() {
        let qwen = |change: fn(&mut Value)| {
            read(|c| {
                c["architectures"] = json!(["Qwen2ForCausalLM"]);
                c["sliding_window"] = json!(32);
                change(c);
            })
        };
        assert_eq!(qwen(|_| ()).unwrap().sliding_window, None);
        assert_eq!(qwen(|c| c["use_sliding_window"] = json!(true)).unwrap().sliding_window, Some(32));
        let half = |c: &mut Value| {
            c["use_sliding_window"] = json!(true);
            c["max_window_layers"] = json!(1);
        };
        let error = qwen(half).unwrap_err().to_string();
        assert!(error.contains("`max_window_layers` must be the same for all layers"), "{error}");
    }

    #[test]
    fn a_gpt2_with_another_scale_of_scores_is_refused() {
        let error = read(|c| {
            *c = json!({"architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_head": 4, "n_layer": 2,
                        "vocab_size": 100, "scale_attn_by_inverse_layer_idx": true});
        });
        let error = error.unwrap_err().to_string();
        assert!(error.contains("`scale_attn_by_inverse_layer_idx` must be `false`"), "{error}");
    }
}
