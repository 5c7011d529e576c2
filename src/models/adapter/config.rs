//! `adapter_config.json`, as PEFT writes it.

use std::path::{Path, PathBuf};

use regex::Regex;
use serde_json::{Map, Value};

use super::AdapterError;

/// Most bytes of the file.
const MAX_BYTES: u64 = 1 << 20;

/// Fields that say how an adapter was trained, or what the names of its tensors say as well.
const HARMLESS: &[&str] = &[
    "base_model_name_or_path",
    "revision",
    "task_type",
    "inference_mode",
    "auto_mapping",
    "peft_version",
    "lora_dropout",
    "eva_config",
    "exclude_modules",
    "fan_in_fan_out",
    "layers_to_transform",
    "layers_pattern",
    "megatron_core",
    "qalora_group_size",
    "runtime_config",
    "target_modules",
];

/// Ways to initialize an adapter that leave the model's own weights as they are.
const PLAIN_INITS: &[&str] = &["gaussian", "eva", "orthogonal"];

/// What of the configuration determines the products.
pub(super) struct AdapterConfig {
    path: PathBuf,
    rank: usize,
    alpha: f64,
    has_root_scale: bool,
    ranks: Vec<(Regex, f64)>,
    alphas: Vec<(Regex, f64)>,
}

impl AdapterConfig {
    pub(super) fn read(path: &Path) -> Result<Self, AdapterError> {
        let failed = |source| AdapterError::Read { path: path.into(), source };
        let len = std::fs::metadata(path).map_err(failed)?.len();
        let wrong = |reason: String| AdapterError::Config { path: path.into(), reason };
        if len > MAX_BYTES {
            return Err(wrong(format!("it has {len} bytes, at most {MAX_BYTES} are read")));
        }
        let text = std::fs::read(path).map_err(failed)?;
        let map: Map<String, Value> =
            serde_json::from_slice(&text).map_err(|error| wrong(format!("it is not a JSON object: {error}")))?;
        Self::of(path, &map).map_err(wrong)
    }

    fn of(path: &Path, map: &Map<String, Value>) -> Result<Self, String> {
        map.iter().try_for_each(|(name, value)| check_field(name, value))?;
        let number = |name: &str| match map.get(name) {
            Some(Value::Number(number)) => number.as_f64().filter(|&it| (it as f32).is_finite()),
            _ => None,
        };
        let rank = number("r").filter(|&r| r >= 1.0 && r.fract() == 0.0);
        let rank = rank.ok_or("field `r` must be a whole number of at least 1")? as usize;
        let alpha = number("lora_alpha").ok_or("field `lora_alpha` must be a number")?;
        Ok(Self {
            path: path.into(),
            rank,
            alpha,
            has_root_scale: map.get("use_rslora") == Some(&Value::Bool(true)),
            ranks: patterns(map, "rank_pattern")?,
            alphas: patterns(map, "alpha_pattern")?,
        })
    }

    /// Rank and scale of the product of a module, by its full name.
    ///
    /// # Errors
    /// When the rank is above `max_rank`.
    pub(super) fn of_module(&self, name: &str, max_rank: usize) -> Result<(usize, f32), AdapterError> {
        let of = |patterns: &[(Regex, f64)]| patterns.iter().find(|(key, _)| key.is_match(name)).map(|it| it.1);
        let rank = of(&self.ranks).map_or(self.rank, |rank| rank as usize);
        if rank == 0 || rank > max_rank {
            return Err(AdapterError::Rank { path: self.path.clone(), found: rank, max: max_rank });
        }
        let alpha = of(&self.alphas).unwrap_or(self.alpha);
        let divisor = if self.has_root_scale { (rank as f64).sqrt() } else { rank as f64 };
        Ok((rank, (alpha / divisor) as f32))
    }
}

/// Refuses a field that changes what the adapter computes in a way that is not served.
fn check_field(name: &str, value: &Value) -> Result<(), String> {
    let is_empty = match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
        _ => false,
    };
    let refused = |what: &str| Err(format!("field `{name}` is {value}: {what}"));
    match name {
        "peft_type" if value != "LORA" => refused("only adapters of type `LORA` are served"),
        "bias" if value != "none" => refused("adapters with biases are not served; train it with `bias` \"none\""),
        "init_lora_weights" => match value {
            Value::Bool(_) | Value::Null => Ok(()),
            Value::String(init) if PLAIN_INITS.contains(&init.as_str()) => Ok(()),
            _ => refused(
                "it changes the model's own weights; convert the adapter to a plain one (`path_initial_model_for_weight_conversion`)",
            ),
        },
        "use_dora" if !is_empty => refused("DoRA is not served; merge the adapter into the model"),
        "modules_to_save" if !is_empty => {
            refused("whole modules in an adapter are not served; merge the adapter into the model")
        }
        "r" | "lora_alpha" | "use_rslora" | "rank_pattern" | "alpha_pattern" | "peft_type" | "bias" => Ok(()),
        _ if is_empty || HARMLESS.contains(&name) => Ok(()),
        _ => refused("it is not understood, and could change what the adapter computes; remove it if it does not"),
    }
}

/// Numbers of modules by regular expressions, which match a name from its start or from behind a dot to its end.
fn patterns(map: &Map<String, Value>, field: &str) -> Result<Vec<(Regex, f64)>, String> {
    let Some(Value::Object(entries)) = map.get(field) else { return Ok(Vec::new()) };
    let entry = |(key, value): (&String, &Value)| {
        let number = value.as_f64().filter(|&it| (it as f32).is_finite());
        let number = number.ok_or_else(|| format!("field `{field}`: `{key}` must be a number"))?;
        let key = Regex::new(&format!(r"^(?:.*\.)?(?:{key})$"));
        Ok((key.map_err(|error| format!("field `{field}`: {error}"))?, number))
    };
    entries.iter().map(entry).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(json: &str) -> Result<AdapterConfig, String> {
        AdapterConfig::of(Path::new("adapter_config.json"), &serde_json::from_str(json).unwrap())
    }

    #[test]
    fn rank_and_scale_follow_the_patterns() {
        let config = config(
            r#"{"r": 8, "lora_alpha": 16, "rank_pattern": {"q_proj": 4, "^layers.1.mlp": 2},
                "alpha_pattern": {"layers.\\d.self_attn.q_proj": 32}, "target_modules": "all-linear"}"#,
        )
        .unwrap();
        let of = |name| config.of_module(name, 16).unwrap();
        assert_eq!(of("model.layers.0.self_attn.q_proj"), (4, 8.0));
        assert_eq!(of("model.layers.0.self_attn.k_proj"), (8, 2.0));
        assert_eq!(of("model.layers.0.self_attn.my_q_proj"), (8, 2.0));
        assert!(config.of_module("k_proj", 7).unwrap_err().to_string().contains("rank 8 is above `max_lora_rank` 7"));
    }

    #[test]
    fn the_scale_may_be_divided_by_the_root_of_the_rank() {
        let config = config(r#"{"r": 16, "lora_alpha": 8, "use_rslora": true}"#).unwrap();
        assert_eq!(config.of_module("q", 64).unwrap(), (16, 2.0));
    }

    #[test]
    fn what_is_not_served_is_refused_by_name() {
        for (field, value) in [
            ("use_dora", "true"),
            ("modules_to_save", r#"["lm_head"]"#),
            ("bias", r#""all""#),
            ("peft_type", r#""IA3""#),
            ("init_lora_weights", r#""pissa""#),
            ("lora_bias", "true"),
            ("target_parameters", r#"["mlp.experts.gate_up_proj"]"#),
            ("some_new_field", "3"),
        ] {
            let error = config(&format!(r#"{{"r": 8, "lora_alpha": 8, "{field}": {value}}}"#)).err().unwrap();
            assert!(error.starts_with(&format!("field `{field}` is ")), "{error}");
        }
        assert!(config(r#"{"r": 8, "lora_alpha": 8, "some_new_field": null, "loftq_config": {}}"#).is_ok());
        // It says how the adapter was initialized.
        let eva = r#"{"r": 8, "lora_alpha": 8, "init_lora_weights": "eva", "eva_config": {"rho": 2.0, "tau": 0.99}}"#;
        assert!(config(eva).is_ok());
    }
}
