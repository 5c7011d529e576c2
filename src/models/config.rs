//! What `config.json` and `generation_config.json` say about a model.

use std::path::Path;

use device::{Activation, DType};
use serde_json::Value;

use crate::fields::Fields;
use crate::registry::{self, Family};
use crate::{ModelError, Rope};

/// The shape of a model, checked.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// As `architectures` names it, for example `LlamaForCausalLM`.
    pub architecture: String,
    /// `E`.
    pub hidden_size: usize,
    /// Width of the gated layer.
    pub intermediate_size: usize,
    /// Decoder layers.
    pub num_layers: usize,
    /// `H`.
    pub num_heads: usize,
    /// `K`; divides `H`.
    pub num_kv_heads: usize,
    /// `D`, even.
    pub head_dim: usize,
    /// `V`.
    pub vocab_size: usize,
    /// Longest sequence. A caller may lower it before [`crate::load`]: position tables are sized by it.
    pub max_position_embeddings: usize,
    /// Added to the mean square in RMS norms.
    pub rms_norm_eps: f32,
    /// Of the gate.
    pub activation: Activation,
    /// How positions become angles.
    pub rope: Rope,
    /// Whether the head is the embedding table.
    pub tie_word_embeddings: bool,
    /// Whether q, k, v have biases.
    pub qkv_bias: bool,
    /// Whether the attention output has a bias.
    pub out_bias: bool,
    /// Whether gate, up and down have biases.
    pub mlp_bias: bool,
    /// Attention sees only the last so many positions.
    pub sliding_window: Option<usize>,
    /// First token of every prompt, when the checkpoint names one.
    pub bos_id: Option<u32>,
    /// Tokens that end a sequence: from `generation_config.json`, else from `config.json`.
    pub eos_ids: Vec<u32>,
    /// Of the checkpoint, as it says; each tensor's own dtype counts.
    pub dtype: DType,
}

impl Config {
    /// Reads `config.json`, and `generation_config.json` when there is one.
    ///
    /// # Errors
    /// When a file cannot be read, or a field is missing or cannot be used.
    pub fn from_dir(dir: &Path) -> Result<Self, ModelError> {
        let fields = Fields::read(&dir.join("config.json"))?;
        let mut config = Self::from_fields(&fields)?;
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

    fn from_fields(fields: &Fields) -> Result<Self, ModelError> {
        let (architecture, family) = architecture(fields)?;
        let hidden_size = fields.required_size("hidden_size")?;
        let num_heads = fields.required_size("num_attention_heads")?;
        let num_kv_heads = fields.size("num_key_value_heads")?.unwrap_or(num_heads);
        if !num_heads.is_multiple_of(num_kv_heads) {
            let expected = format!("a divisor of `num_attention_heads` ({num_heads})");
            return Err(fields.wrong("num_key_value_heads", &expected, &Value::from(num_kv_heads)));
        }
        let max_position_embeddings = fields.size("max_position_embeddings")?.unwrap_or(2048);
        let attention_bias = fields.flag("attention_bias", family.qkv_bias)?;
        Ok(Self {
            architecture,
            hidden_size,
            intermediate_size: fields.required_size("intermediate_size")?,
            num_layers: fields.required_size("num_hidden_layers")?,
            num_heads,
            num_kv_heads,
            head_dim: head_dim(fields, hidden_size, num_heads)?,
            vocab_size: fields.required_size("vocab_size")?,
            max_position_embeddings,
            rms_norm_eps: fields.positive("rms_norm_eps")?.unwrap_or(1e-6) as f32,
            activation: activation(fields)?,
            rope: Rope::read(fields, max_position_embeddings)?,
            tie_word_embeddings: fields.flag("tie_word_embeddings", false)?,
            qkv_bias: attention_bias,
            out_bias: attention_bias && family.out_bias,
            mlp_bias: fields.flag("mlp_bias", false)?,
            sliding_window: sliding_window(fields, family)?,
            bos_id: fields.token_ids("bos_token_id")?.first().copied(),
            eos_ids: fields.token_ids("eos_token_id")?,
            dtype: dtype(fields)?,
        })
    }
}

fn architecture(fields: &Fields) -> Result<(String, &'static Family), ModelError> {
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
        return registry::family(name).map(|family| (name.to_owned(), family)).ok_or_else(|| unknown(name));
    }
    let model_type = fields.text("model_type")?.unwrap_or("(none)");
    let family = registry::family_of_type(model_type).ok_or_else(|| unknown(model_type))?;
    Ok((family.architecture.to_owned(), family))
}

fn head_dim(fields: &Fields, hidden_size: usize, num_heads: usize) -> Result<usize, ModelError> {
    let head_dim = match fields.size("head_dim")? {
        Some(head_dim) => head_dim,
        None if hidden_size.is_multiple_of(num_heads) => hidden_size / num_heads,
        None => {
            let expected = format!("a divisor of `hidden_size` ({hidden_size}) where `head_dim` is absent");
            return Err(fields.wrong("num_attention_heads", &expected, &Value::from(num_heads)));
        }
    };
    if !head_dim.is_multiple_of(8) {
        return Err(fields.wrong("head_dim", "a multiple of 8", &Value::from(head_dim)));
    }
    Ok(head_dim)
}

fn activation(fields: &Fields) -> Result<Activation, ModelError> {
    match fields.text("hidden_act")? {
        None | Some("silu" | "swish") => Ok(Activation::Silu),
        Some("gelu_pytorch_tanh" | "gelu_new") => Ok(Activation::GeluTanh),
        Some(other) => Err(fields.wrong("hidden_act", "`silu` or `gelu_pytorch_tanh`", &Value::from(other))),
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

/// The window, where the family has one and it is not switched off.
fn sliding_window(fields: &Fields, family: &Family) -> Result<Option<usize>, ModelError> {
    let on = family.sliding_window && fields.flag("use_sliding_window", true)?;
    if on { fields.size("sliding_window") } else { Ok(None) }
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
        assert_eq!(config.rope, Rope { theta: 10_000.0, scaling: RopeScaling::None });
    }

    #[test]
    fn theta_and_scaling_are_found_in_rope_parameters() {
        let config = read(|c| {
            c["rope_parameters"] = json!({"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5});
        });
        assert_eq!(config.unwrap().rope, Rope { theta: 5e5, scaling: RopeScaling::Linear { factor: 4.0 } });
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
}
