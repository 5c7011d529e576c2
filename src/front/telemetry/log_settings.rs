//! Log settings that clients read and change.

use std::sync::{Arc, Mutex, PoisonError};

use serving::{ErrorKind, InferError};

/// A log setting's value.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs)] // The protocol's own choices.
pub enum LogValue {
    Bool(bool),
    Uint(u32),
    String(String),
}

/// How log lines are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(u8)]
pub enum LogFormat {
    /// As Triton writes them.
    #[default]
    Default,
    /// The same with a date of ISO 8601.
    Iso8601,
    /// One JSON object a line.
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

/// What is logged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogOptions {
    /// The log file; empty for standard error. It never changes while the server runs.
    pub file: String,
    /// Whether information is written.
    pub info: bool,
    /// Whether warnings are written.
    pub warning: bool,
    /// Whether errors are written.
    pub error: bool,
    /// 0 is quiet; each level says more.
    pub verbose_level: u32,
    /// How lines are written.
    pub format: LogFormat,
}

impl Default for LogOptions {
    fn default() -> Self {
        let format = LogFormat::Default;
        Self { file: String::new(), info: true, warning: true, error: true, verbose_level: 0, format }
    }
}

/// Takes up changed log options.
pub type LogFollower = Arc<dyn Fn(&LogOptions) + Send + Sync>;

/// The log options, and who follows their changes.
#[derive(Clone, Default)]
pub struct LogControl {
    /// What is logged at the start.
    pub options: LogOptions,
    /// Called after every change.
    pub follower: Option<LogFollower>,
}

impl std::fmt::Debug for LogControl {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("LogControl").field("options", &self.options).finish_non_exhaustive()
    }
}

/// What is logged, as clients read and change it.
#[derive(Debug)]
pub struct LogSettings {
    now: Mutex<LogOptions>,
    control: LogControl,
}

impl LogSettings {
    /// Settings that begin as `control` says.
    pub fn new(control: LogControl) -> Self {
        Self { now: Mutex::new(control.options.clone()), control }
    }

    /// Changes settings; unknown names are ignored. Answers all of them, in the order in which they are listed.
    ///
    /// # Errors
    /// When a value cannot be, or the setting cannot change; then nothing is changed.
    pub fn update(&self, changes: Vec<(String, LogValue)>) -> Result<[(&'static str, LogValue); 6], InferError> {
        let mut now = self.now.lock().unwrap_or_else(PoisonError::into_inner);
        let mut next = now.clone();
        changes.iter().try_for_each(|(key, value)| change_log(&mut next, key, value))?;
        if next != *now {
            *now = next;
            self.control.follower.iter().for_each(|follow| follow(&now));
        }
        Ok(log_values(&now))
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
        let heard = Arc::new(Mutex::new(0));
        let follower: Arc<dyn Fn(&LogOptions) + Send + Sync> = {
            let heard = heard.clone();
            Arc::new(move |options: &LogOptions| *heard.lock().unwrap() = options.verbose_level)
        };
        let control = LogControl { follower: Some(follower), ..LogControl::default() };
        let settings = LogSettings::new(control);
        let wrong = vec![("log_info".to_owned(), LogValue::String("yes".into()))];
        assert_eq!(settings.update(wrong).unwrap_err().message, "expect boolean for 'log_info'");
        let values = settings.update(vec![("log_verbose_level".into(), LogValue::Uint(3))]).unwrap();
        assert_eq!((&values[4], *heard.lock().unwrap()), (&("log_verbose_level", LogValue::Uint(3)), 3));
        let iso = vec![("log_format".into(), LogValue::String("ISO8601".into()))];
        assert_eq!(settings.update(iso).unwrap()[5], ("log_format", LogValue::String("ISO8601".into())));
        assert!(settings.update(vec![("log_format".into(), LogValue::String("x".into()))]).is_err());
    }
}
