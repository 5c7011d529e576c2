//! Log settings that clients read and change.

use std::sync::{Arc, Mutex, PoisonError};

use serving::{ErrorKind, InferError};

/// A log setting's value.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs)] // The types of the protocol.
pub enum LogValue {
    Bool(bool),
    Uint(u32),
    String(String),
}

/// The format of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(u8)]
pub enum LogFormat {
    /// Triton's format.
    #[default]
    Default,
    /// Triton's format with a timestamp of ISO 8601.
    Iso8601,
    /// One JSON object per line.
    Json,
}

const LOG_FORMATS: [(&str, LogFormat); 3] =
    [("default", LogFormat::Default), ("ISO8601", LogFormat::Iso8601), ("JSON", LogFormat::Json)];

impl std::str::FromStr for LogFormat {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let format = LOG_FORMATS.iter().find(|(known, _)| *known == name).map(|(_, format)| *format);
        format.ok_or_else(|| format!("invalid argument for log_format, got: {name}; expected default, ISO8601 or JSON"))
    }
}

/// Log settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogOptions {
    /// The log file; empty for standard error. It cannot be changed at run time.
    pub file: String,
    /// Whether information is logged.
    pub info: bool,
    /// Whether warnings are logged.
    pub warning: bool,
    /// Whether errors are logged.
    pub error: bool,
    /// Verbosity; 0 logs no verbose lines.
    pub verbose_level: u32,
    /// The format of lines.
    pub format: LogFormat,
}

impl Default for LogOptions {
    fn default() -> Self {
        let format = LogFormat::Default;
        Self { file: String::new(), info: true, warning: true, error: true, verbose_level: 0, format }
    }
}

/// Applies changed log options.
pub type LogFollower = Arc<dyn Fn(&LogOptions) + Send + Sync>;

/// The initial log options, and the function that applies changes.
#[derive(Clone, Default)]
pub struct LogControl {
    /// The initial options.
    pub options: LogOptions,
    /// Called after every change.
    pub follower: Option<LogFollower>,
}

impl std::fmt::Debug for LogControl {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("LogControl").field("options", &self.options).finish_non_exhaustive()
    }
}

/// The current log options, which clients read and change.
#[derive(Debug)]
pub struct LogSettings {
    current: Mutex<LogOptions>,
    control: LogControl,
}

impl LogSettings {
    /// Settings with the initial options of `control`.
    pub fn new(control: LogControl) -> Self {
        Self { current: Mutex::new(control.options.clone()), control }
    }

    /// Changes settings, and returns all of them in the order of the protocol. Unknown names are ignored.
    ///
    /// # Errors
    /// When a value is invalid or a setting cannot be changed. Nothing is changed then.
    pub fn update(&self, changes: Vec<(String, LogValue)>) -> Result<[(&'static str, LogValue); 6], InferError> {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        let mut next = current.clone();
        changes.iter().try_for_each(|(key, value)| change_log(&mut next, key, value))?;
        if next != *current {
            *current = next;
            self.control.follower.iter().for_each(|follow| follow(&current));
        }
        Ok(log_values(&current))
    }
}

fn log_values(options: &LogOptions) -> [(&'static str, LogValue); 6] {
    let format = LOG_FORMATS.iter().find(|(_, format)| *format == options.format).map_or("", |(name, _)| name);
    [
        ("log_file", LogValue::String(options.file.clone())),
        ("log_info", LogValue::Bool(options.info)),
        ("log_warning", LogValue::Bool(options.warning)),
        ("log_error", LogValue::Bool(options.error)),
        ("log_verbose_level", LogValue::Uint(options.verbose_level)),
        ("log_format", LogValue::String(format.to_owned())),
    ]
}

fn change_log(options: &mut LogOptions, key: &str, value: &LogValue) -> Result<(), InferError> {
    let expect = |kind: &str| Err(InferError::invalid(format!("expect {kind} for '{key}'")));
    match (key, value) {
        ("log_info", LogValue::Bool(value)) => options.info = *value,
        ("log_warning", LogValue::Bool(value)) => options.warning = *value,
        ("log_error", LogValue::Bool(value)) => options.error = *value,
        ("log_info" | "log_warning" | "log_error", _) => return expect("boolean"),
        ("log_verbose_level", LogValue::Uint(value)) => options.verbose_level = *value,
        ("log_verbose_level", _) => return expect("int32"),
        ("log_format", LogValue::String(name)) => options.format = name.parse().map_err(InferError::invalid)?,
        ("log_file", _) => {
            return Err(InferError::new(
                ErrorKind::Unsupported,
                "log file location can not be updated through network protocol",
            ));
        }
        ("log_format", _) => return expect("string"),
        _ => {}
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_settings_keep_their_types() {
        let applied = Arc::new(Mutex::new(0));
        let follower: Arc<dyn Fn(&LogOptions) + Send + Sync> = {
            let applied = applied.clone();
            Arc::new(move |options: &LogOptions| *applied.lock().unwrap() = options.verbose_level)
        };
        let control = LogControl { follower: Some(follower), ..LogControl::default() };
        let settings = LogSettings::new(control);
        let wrong = vec![("log_info".to_owned(), LogValue::String("yes".into()))];
        assert_eq!(settings.update(wrong).unwrap_err().message, "expect boolean for 'log_info'");
        let values = settings.update(vec![("log_verbose_level".into(), LogValue::Uint(3))]).unwrap();
        assert_eq!((&values[4], *applied.lock().unwrap()), (&("log_verbose_level", LogValue::Uint(3)), 3));
        let iso = vec![("log_format".into(), LogValue::String("ISO8601".into()))];
        assert_eq!(settings.update(iso).unwrap()[5], ("log_format", LogValue::String("ISO8601".into())));
        assert!(settings.update(vec![("log_format".into(), LogValue::String("x".into()))]).is_err());
    }
}
