//! Reads fields of a JSON object. Errors contain the file, the field, and the expected and actual values.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use serde_json::{Map, Value};

use crate::{ModelError, from_python_json};

/// The largest size that is read.
pub(crate) const MAX_SIZE: usize = 1 << 31;

/// Fields whose default is a value, and of which null says that there is none.
const MAY_BE_NULL: &[&str] = &[
    "attention_chunk_size",
    "attn_logit_softcapping",
    "block_ffn_dim_multiplier",
    "final_logit_softcapping",
    "mamba_d_ssm",
    "num_key_value_heads",
    "q_lora_rank",
    "sliding_window",
];

/// A JSON object of a file, with the fields that were read so far.
pub(crate) struct Fields {
    path: PathBuf,
    /// The path of this object within the file, for messages.
    prefix: String,
    map: Map<String, Value>,
    /// Other names that the architecture uses: the usual name, then its own.
    aliases: &'static [(&'static str, &'static str)],
    /// Full names of the fields that were read, shared with nested objects.
    read: Rc<RefCell<BTreeSet<String>>>,
}

impl Fields {
    /// Reads a file that contains a JSON object.
    pub(crate) fn read(path: &Path) -> Result<Self, ModelError> {
        let text = std::fs::read(path).map_err(|source| ModelError::Read { path: path.into(), source })?;
        let value = from_python_json(&text).map_err(|source| ModelError::Json { path: path.into(), source })?;
        let of = |map| Self {
            path: path.into(),
            prefix: String::new(),
            map,
            aliases: &[],
            read: Rc::new(RefCell::new(BTreeSet::new())),
        };
        match value {
            Value::Object(map) => Ok(of(map)),
            other => Err(of(Map::new()).wrong("(top level)", "an object", &other)),
        }
    }

    /// The same object, in which some fields have the names of an architecture.
    pub(crate) fn with_aliases(self, aliases: &'static [(&'static str, &'static str)]) -> Self {
        Self { aliases, ..self }
    }

    /// The same object, with values for fields that it lacks, or that are null where null has no meaning of its own.
    pub(crate) fn with_defaults(mut self, defaults: &Map<String, Value>) -> Self {
        for (name, value) in defaults {
            let own = self.own_name(name).to_owned();
            let is_missing = match (self.map.get(name), self.map.get(&own)) {
                (None, None) => true,
                (_, Some(Value::Null)) => !MAY_BE_NULL.contains(&name.as_str()),
                _ => false,
            };
            if is_missing {
                self.read.borrow_mut().insert(format!("{}{own}", self.prefix));
                self.map.insert(own, value.clone());
            }
        }
        self
    }

    /// The same object with other values of some fields.
    pub(crate) fn with_fields(mut self, fields: impl IntoIterator<Item = (String, Value)>) -> Self {
        self.map.extend(fields);
        self
    }

    /// All fields of the object.
    pub(crate) fn to_map(&self) -> Map<String, Value> {
        self.map.clone()
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The name that the file uses for a field.
    fn own_name<'a>(&self, name: &'a str) -> &'a str {
        let has_alias = |(usual, own): &&(&str, &str)| *usual == name && self.map.contains_key(*own);
        self.aliases.iter().find(has_alias).map_or(name, |(_, own)| own)
    }

    /// A field that exists and is not null.
    pub(crate) fn get(&self, name: &str) -> Option<&Value> {
        let own = self.own_name(name);
        // Beside its own name an architecture may also have the usual one, which it does not read.
        self.read.borrow_mut().extend([own, name].map(|name| format!("{}{name}", self.prefix)));
        self.map.get(own).filter(|value| !value.is_null())
    }

    /// The names of fields, at any depth that was read, that were not read. Those that are null, `false` or empty say that
    /// something is not there, and are left out.
    pub(crate) fn unread(&self) -> Vec<String> {
        let read = self.read.borrow();
        let mut unread = Vec::new();
        for (name, value) in &self.map {
            collect_unread(&format!("{}{name}", self.prefix), value, &read, &mut unread);
        }
        unread
    }

    /// The error for a field that exists but is invalid.
    pub(crate) fn wrong(&self, name: &str, expected: &str, found: &Value) -> ModelError {
        let mut found = found.to_string();
        if found.chars().count() > 80 {
            found = found.chars().take(80).collect::<String>() + "…";
        }
        ModelError::Field {
            path: self.path.clone(),
            field: format!("{}{}", self.prefix, self.own_name(name)),
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
            Some(n) if (1..=MAX_SIZE as u64).contains(&n) => Ok(Some(n as usize)),
            _ => Err(self.wrong(name, "a whole number of at least 1", value)),
        }
    }

    /// Like [`Fields::size`], but 0 is allowed and is the value of an absent field.
    pub(crate) fn count(&self, name: &str) -> Result<usize, ModelError> {
        match self.get(name) {
            Some(value) if value.as_u64() == Some(0) => Ok(0),
            _ => Ok(self.size(name)?.unwrap_or(0)),
        }
    }

    /// Like [`Fields::size`], but the field must exist.
    pub(crate) fn required_size(&self, name: &str) -> Result<usize, ModelError> {
        self.required(name, "a whole number of at least 1")?;
        Ok(self.size(name)?.expect("the field was just found"))
    }

    /// Like [`Fields::required_size`], but at most `most`, of what has an entry of its own in a list.
    pub(crate) fn required_count(&self, name: &str, most: usize) -> Result<usize, ModelError> {
        match self.required_size(name)? {
            count if count > most => Err(self.wrong(name, &format!("at most {most}"), &count.into())),
            count => Ok(count),
        }
    }

    /// A number above 0, also as the device holds it, or `None` if absent.
    pub(crate) fn positive(&self, name: &str) -> Result<Option<f64>, ModelError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        match value.as_f64() {
            Some(x) if is_positive(x) => Ok(Some(x)),
            _ => Err(self.wrong(name, "a number above 0, in the range of 32 bits", value)),
        }
    }

    /// Like [`Fields::positive`], but the field must exist.
    pub(crate) fn required_positive(&self, name: &str) -> Result<f64, ModelError> {
        self.required(name, "a number above 0")?;
        Ok(self.positive(name)?.expect("the field was just found"))
    }

    /// `true` or `false`, or `default` if absent. A null counts as `false` in transformers, so it is refused where the
    /// default is `true`.
    pub(crate) fn flag(&self, name: &str, default: bool) -> Result<bool, ModelError> {
        match self.get(name) {
            None if default && self.map.contains_key(self.own_name(name)) => {
                Err(self.wrong(name, "`true` or `false`", &Value::Null))
            }
            None => Ok(default),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(other) => Err(self.wrong(name, "`true` or `false`", other)),
        }
    }

    /// Refuses a flag that has another value than `only`, the only one that is supported.
    pub(crate) fn only(&self, name: &str, only: bool) -> Result<(), ModelError> {
        match self.flag(name, only)? == only {
            true => Ok(()),
            false => Err(self.wrong(name, &format!("`{only}`, the only way that is supported"), &Value::Bool(!only))),
        }
    }

    /// Refuses a string other than those of `only`, which mean what is supported.
    pub(crate) fn only_text(&self, name: &str, only: &[&str]) -> Result<(), ModelError> {
        match self.text(name)? {
            Some(text) if !only.contains(&text) => {
                let expected = format!("`{}`, the only way that is supported", only.join("` or `"));
                Err(self.wrong(name, &expected, &text.into()))
            }
            _ => Ok(()),
        }
    }

    /// Accepts fields that describe what the architecture always does.
    pub(crate) fn ignore(&self, names: &[&str]) {
        names.iter().for_each(|name| _ = self.get(name));
    }

    /// A string, or `None` if absent.
    pub(crate) fn text(&self, name: &str) -> Result<Option<&str>, ModelError> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(self.wrong(name, "a string", other)),
        }
    }

    /// Whether a field is this string. Otherwise it does not count as read.
    pub(crate) fn has_text(&self, name: &str, text: &str) -> bool {
        self.map.get(self.own_name(name)).and_then(Value::as_str) == Some(text) && self.get(name).is_some()
    }

    /// A list of numbers above 0, or `None` if absent.
    pub(crate) fn positives(&self, name: &str) -> Result<Option<Vec<f64>>, ModelError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let numbers = value.as_array().and_then(|list| list.iter().map(Value::as_f64).collect::<Option<Vec<_>>>());
        match numbers.filter(|numbers| numbers.iter().all(|x| is_positive(*x))) {
            Some(numbers) => Ok(Some(numbers)),
            None => Err(self.wrong(name, "a list of numbers above 0, in the range of 32 bits", value)),
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

    /// The same object once more; what is read of either is read of both.
    pub(crate) fn object_of_itself(&self) -> Fields {
        Fields {
            path: self.path.clone(),
            prefix: self.prefix.clone(),
            map: self.map.clone(),
            aliases: self.aliases,
            read: self.read.clone(),
        }
    }

    /// A nested object, or `None` if absent.
    pub(crate) fn object(&self, name: &str) -> Result<Option<Fields>, ModelError> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Fields {
                path: self.path.clone(),
                prefix: format!("{}{}.", self.prefix, self.own_name(name)),
                map: map.clone(),
                aliases: &[],
                read: self.read.clone(),
            })),
            Some(other) => Err(self.wrong(name, "an object", other)),
        }
    }
}

/// Whether a number is finite and above 0 in 32 bits, too.
fn is_positive(x: f64) -> bool {
    (x as f32).is_finite() && x as f32 > 0.0
}

/// Fields of an object are looked at one by one if at least one of them was read.
fn collect_unread(name: &str, value: &Value, read: &BTreeSet<String>, unread: &mut Vec<String>) {
    let inside = format!("{name}.");
    match value {
        Value::Null | Value::Bool(false) => {}
        Value::Array(values) if values.is_empty() => {}
        Value::Object(map) if map.is_empty() => {}
        Value::Object(map) if read.range(inside.clone()..).next().is_some_and(|next| next.starts_with(&inside)) => {
            map.iter().for_each(|(key, value)| collect_unread(&format!("{inside}{key}"), value, read, unread));
        }
        _ if read.contains(name) => {}
        _ => unread.push(name.to_owned()),
    }
}
