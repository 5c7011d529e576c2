//! Trace and log settings that clients read and change.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use serving::{ErrorKind, InferError};

/// Names of the trace settings, in the order in which they are listed.
pub const TRACE_KEYS: [&str; 6] =
    ["trace_level", "trace_rate", "trace_count", "log_frequency", "trace_file", "trace_mode"];

const TRACE_LEVELS: [&str; 3] = ["OFF", "TIMESTAMPS", "TENSORS"];

/// Every trace setting; each has one value, but a level may have several.
pub type TraceValues = BTreeMap<&'static str, Vec<String>>;

/// Changes to trace settings; no value clears one.
pub type TraceChanges = Vec<(String, Option<Vec<String>>)>;

/// Models with settings of their own that are remembered.
const MAX_MODELS: usize = 4096;

/// Trace settings of the server and, where they differ, of models.
#[derive(Debug, Default)]
pub struct TraceSettings {
    changed: Mutex<BTreeMap<String, TraceValues>>,
}

impl TraceSettings {
    fn changed(&self) -> MutexGuard<'_, BTreeMap<String, TraceValues>> {
        self.changed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The settings of a model, or the server's when `model` is empty.
    pub fn get(&self, model: &str) -> TraceValues {
        let changed = self.changed();
        let mut values = default_trace();
        for owner in ["", model] {
            values.extend(changed.get(owner).into_iter().flatten().map(|(key, value)| (*key, value.clone())));
        }
        values
    }

    /// Changes settings of a model, or the server's when `model` is empty. Unknown names and levels are ignored.
    ///
    /// # Errors
    /// When a value cannot be; then nothing is changed.
    pub fn update(&self, model: &str, changes: TraceChanges) -> Result<TraceValues, InferError> {
        let mut accepted = Vec::new();
        for (key, values) in changes {
            let Some(key) = TRACE_KEYS.into_iter().find(|known| *known == key) else { continue };
            match values.filter(|values| !values.is_empty()) {
                None => accepted.push((key, None)),
                Some(values) => accepted.extend(check_trace(key, values)?.map(|values| (key, Some(values)))),
            }
        }
        let mut changed = self.changed();
        if !changed.contains_key(model) && changed.len() == MAX_MODELS {
            return Err(InferError::unavailable(format!(
                "{MAX_MODELS} models have trace settings of their own already"
            )));
        }
        let own = changed.entry(model.to_owned()).or_default();
        for (key, values) in accepted {
            match values {
                Some(values) => drop(own.insert(key, values)),
                None => drop(own.remove(key)),
            }
        }
        drop(changed);
        Ok(self.get(model))
    }
}

fn default_trace() -> TraceValues {
    let defaults = ["OFF", "1000", "-1", "0", "", "triton"];
    TRACE_KEYS.into_iter().zip(defaults.map(|value| vec![value.to_owned()])).collect()
}

/// The values as they will be kept; `None` when they are to be ignored.
fn check_trace(key: &'static str, values: Vec<String>) -> Result<Option<Vec<String>>, InferError> {
    match key {
        "trace_level" => Ok(values.iter().all(|level| TRACE_LEVELS.contains(&level.as_str())).then_some(values)),
        "trace_file" => Err(InferError::new(
            ErrorKind::Unsupported,
            "trace file location can not be updated through network protocol",
        )),
        "trace_mode" => Ok(None),
        _ => {
            let smallest = if key == "trace_count" { -1 } else { 0 };
            let [value] = values.as_slice() else {
                return Err(InferError::invalid(format!("expect one value for '{key}', got {}", values.len())));
            };
            match value.parse::<i64>() {
                Ok(number) if number >= smallest => Ok(Some(values)),
                _ => Err(InferError::invalid(format!(
                    "Unable to parse '{key}', got: {value}, expected a number of at least {smallest}"
                ))),
            }
        }
    }
}

/// A log setting's value.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs)] // The protocol's own choices.
pub enum LogValue {
    Bool(bool),
    Uint(u32),
    String(String),
}

/// What is logged.
#[derive(Debug)]
pub struct LogSettings {
    values: Mutex<BTreeMap<&'static str, LogValue>>,
}

impl Default for LogSettings {
    fn default() -> Self {
        let values = [
            ("log_file", LogValue::String(String::new())),
            ("log_info", LogValue::Bool(true)),
            ("log_warning", LogValue::Bool(true)),
            ("log_error", LogValue::Bool(true)),
            ("log_verbose_level", LogValue::Uint(0)),
            ("log_format", LogValue::String("default".into())),
        ];
        Self { values: Mutex::new(values.into()) }
    }
}

impl LogSettings {
    fn values(&self) -> MutexGuard<'_, BTreeMap<&'static str, LogValue>> {
        self.values.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes settings; unknown names are ignored.
    ///
    /// # Errors
    /// When a value cannot be, or the setting cannot change; then nothing is changed.
    pub fn update(&self, changes: Vec<(String, LogValue)>) -> Result<BTreeMap<&'static str, LogValue>, InferError> {
        let mut values = self.values();
        let mut accepted = Vec::new();
        for (key, value) in changes {
            let Some((known, now)) = values.get_key_value(key.as_str()) else { continue };
            check_log(known, now, &value)?;
            accepted.push((*known, value));
        }
        values.extend(accepted);
        Ok(values.clone())
    }
}

fn check_log(key: &str, now: &LogValue, value: &LogValue) -> Result<(), InferError> {
    let expected = match (now, value) {
        (LogValue::Bool(_), LogValue::Bool(_)) | (LogValue::Uint(_), LogValue::Uint(_)) => return Ok(()),
        (LogValue::String(_), LogValue::String(_)) if key == "log_file" => {
            return Err(InferError::new(
                ErrorKind::Unsupported,
                "log file location can not be updated through network protocol",
            ));
        }
        (LogValue::String(_), LogValue::String(format)) => {
            return if format == "default" || format == "ISO8601" {
                Ok(())
            } else {
                Err(InferError::invalid(format!("invalid value '{format}' for '{key}', expected default or ISO8601")))
            };
        }
        (LogValue::Bool(_), _) => "boolean",
        (LogValue::Uint(_), _) => "unsigned int",
        (LogValue::String(_), _) => "string",
    };
    Err(InferError::invalid(format!("expect {expected} for '{key}'")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change(key: &str, value: &str) -> TraceChanges {
        vec![(key.to_owned(), Some(vec![value.to_owned()]))]
    }

    #[test]
    fn a_models_trace_settings_cover_the_servers() {
        let settings = TraceSettings::default();
        settings.update("", change("trace_rate", "800")).unwrap();
        assert_eq!(settings.get("m")["trace_rate"], ["800"]);
        settings.update("m", change("trace_rate", "5")).unwrap();
        assert_eq!(
            (settings.get("m")["trace_rate"][0].as_str(), settings.get("")["trace_rate"][0].as_str()),
            ("5", "800")
        );
        settings.update("m", vec![("trace_rate".into(), None)]).unwrap();
        assert_eq!(settings.get("m")["trace_rate"], ["800"]);
    }

    #[test]
    fn unknown_levels_are_ignored_and_bad_rates_refused() {
        let settings = TraceSettings::default();
        assert_eq!(settings.update("", change("trace_level", "FOO")).unwrap(), default_trace());
        assert!(settings.update("", change("trace_rate", "x")).unwrap_err().message.contains("Unable to parse"));
        assert_eq!(settings.update("", change("trace_file", "/x")).unwrap_err().kind, ErrorKind::Unsupported);
    }

    #[test]
    fn log_settings_keep_their_types() {
        let settings = LogSettings::default();
        let wrong = vec![("log_info".to_owned(), LogValue::String("yes".into()))];
        assert_eq!(settings.update(wrong).unwrap_err().message, "expect boolean for 'log_info'");
        let values = settings.update(vec![("log_verbose_level".into(), LogValue::Uint(3))]).unwrap();
        assert_eq!(values["log_verbose_level"], LogValue::Uint(3));
        assert!(settings.update(vec![("log_format".into(), LogValue::String("x".into()))]).is_err());
    }
}
