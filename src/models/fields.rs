//! Typed access to the fields of a JSON file. Errors contain the file, the field, the expected and the found value.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::ModelError;

/// A JSON object with its path.
#[derive(Debug, Clone)]
pub(crate) struct Fields {
    path: PathBuf,
    prefix: String,
    map: Map<String, Value>,
}

impl Fields {
    /// Reads a file that must contain one object.
    pub(crate) fn read(path: &Path) -> Result<Self, ModelError> {
        let text = std::fs::read(path).map_err(|source| ModelError::Read { path: path.into(), source })?;
        let value = serde_json::from_slice(&text).map_err(|source| ModelError::Json { path: path.into(), source })?;
        match value {
            Value::Object(map) => Ok(Self { path: path.into(), prefix: String::new(), map }),
            other => Err(Self { path: path.into(), prefix: String::new(), map: Map::new() }.wrong(
                "(top level)",
                "an object",
                &other,
            )),
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// A field that exists and is not null.
    pub(crate) fn get(&self, name: &str) -> Option<&Value> {
        self.map.get(name).filter(|value| !value.is_null())
    }

    /// The error for a field that exists but is invalid.
    pub(crate) fn wrong(&self, name: &str, expected: &str, found: &Value) -> ModelError {
        let mut found = found.to_string();
        if found.chars().count() > 80 {
            found = found.chars().take(80).collect::<String>() + "…";
        }
        ModelError::Field {
            path: self.path.clone(),
            field: format!("{}{name}", self.prefix),
            expected: expected.into(),
            found,
        }
    }

    fn required<'a>(&'a self, name: &str, expected: &str) -> Result<&'a Value, ModelError> {
        self.get(name).ok_or_else(|| ModelError::Field {
            path: self.path.clone(),
            field: format!("{}{name}", self.prefix),
            expected: expected.into(),
            found: "nothing".into(),
        })
    }

    /// A whole number in `1..=2^31`, or `None` if absent.
    pub(crate) fn size(&self, name: &str) -> Result<Option<usize>, ModelError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        match value.as_u64() {
            Some(n) if (1..=1 << 31).contains(&n) => Ok(Some(n as usize)),
            _ => Err(self.wrong(name, "a whole number of at least 1", value)),
        }
    }

    /// Like [`Fields::size`], but the field must exist.
    pub(crate) fn required_size(&self, name: &str) -> Result<usize, ModelError> {
        self.required(name, "a whole number of at least 1")?;
        Ok(self.size(name)?.expect("the field was just found"))
    }

    /// A finite number above 0, or `None` if absent.
    pub(crate) fn positive(&self, name: &str) -> Result<Option<f64>, ModelError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        match value.as_f64() {
            Some(x) if x.is_finite() && x > 0.0 => Ok(Some(x)),
            _ => Err(self.wrong(name, "a number above 0", value)),
        }
    }

    /// Like [`Fields::positive`], but the field must exist.
    pub(crate) fn required_positive(&self, name: &str) -> Result<f64, ModelError> {
        self.required(name, "a number above 0")?;
        Ok(self.positive(name)?.expect("the field was just found"))
    }

    /// `true` or `false`, or `default` if absent.
    pub(crate) fn flag(&self, name: &str, default: bool) -> Result<bool, ModelError> {
        match self.get(name) {
            None => Ok(default),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(other) => Err(self.wrong(name, "`true` or `false`", other)),
        }
    }

    /// A string, or `None` if absent.
    pub(crate) fn text(&self, name: &str) -> Result<Option<&str>, ModelError> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(self.wrong(name, "a string", other)),
        }
    }

    /// One token id or a list of them; empty if absent.
    pub(crate) fn token_ids(&self, name: &str) -> Result<Vec<u32>, ModelError> {
        let Some(value) = self.get(name) else { return Ok(Vec::new()) };
        let wrong = || self.wrong(name, "a token id or a list of token ids", value);
        let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(wrong);
        match value {
            Value::Array(values) => values.iter().map(id).collect(),
            value => Ok(vec![id(value)?]),
        }
    }

    /// A nested object, or `None` if absent.
    pub(crate) fn object(&self, name: &str) -> Result<Option<Fields>, ModelError> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Fields {
                path: self.path.clone(),
                prefix: format!("{}{name}.", self.prefix),
                map: map.clone(),
            })),
            Some(other) => Err(self.wrong(name, "an object", other)),
        }
    }
}
