//! Trace settings, which clients read and change, and the sampling of requests.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serving::{ErrorKind, InferError, RateLimitedLog, SpanContext, Trace, TraceSink};

use crate::telemetry::otlp_export::{Collector, Exporter};
use crate::telemetry::trace_file::{TraceBounds, TraceFile};

/// Names of the trace settings in the order of the protocol.
pub const TRACE_KEYS: [&str; 6] =
    ["trace_level", "trace_rate", "trace_count", "log_frequency", "trace_file", "trace_mode"];

const TRACE_LEVELS: [&str; 3] = ["OFF", "TIMESTAMPS", "TENSORS"];

/// All trace settings. Each has one value, except that `trace_level` may have several.
pub type TraceValues = BTreeMap<&'static str, Vec<String>>;

/// Changes of trace settings; `None` resets one to its default.
pub type TraceChanges = Vec<(String, Option<Vec<String>>)>;

/// Maximum models with their own settings.
const MAX_MODELS: usize = 4096;

/// Initial trace settings and the destination of traces. Without a file or a collector
/// nothing is traced, whatever clients set.
#[derive(Debug, Clone, Default)]
pub struct TraceOptions {
    /// The trace file; with a frequency, the prefix of the names of files.
    pub file: Option<PathBuf>,
    /// The OpenTelemetry collector, which takes precedence over the file.
    pub collector: Option<Collector>,
    /// Settings that differ from the defaults, by Triton's names.
    pub settings: Vec<(String, Vec<String>)>,
    /// Maximum disk space of files.
    pub bounds: TraceBounds,
    /// Whether clients may enable traces of tensors, which contain the prompts of all clients. An initial level of `TENSORS` allows
    /// it, too.
    pub allows_tensors: bool,
}

/// Limits warnings about traces without a destination.
static NO_DESTINATION: RateLimitedLog = RateLimitedLog::new(1);
/// Limits warnings about clients that request traces of tensors without permission.
static TENSORS_NOT_ALLOWED: RateLimitedLog = RateLimitedLog::new(1);

/// Trace settings of the server, and of models with their own settings.
#[derive(Debug)]
pub struct TraceSettings {
    defaults: TraceValues,
    changed: Mutex<BTreeMap<String, TraceValues>>,
    /// Requests and traces, by the model that owns the settings; empty for the server.
    counts: Mutex<BTreeMap<String, (u64, u64)>>,
    /// Whether any request may be traced. Every request reads it.
    is_on: AtomicBool,
    allows_tensors: bool,
    file: Option<Arc<TraceFile>>,
    exporter: Option<Arc<Exporter>>,
}

impl TraceSettings {
    /// Settings with the initial values of `options`.
    ///
    /// # Errors
    /// With the name of an invalid setting.
    pub fn new(options: &TraceOptions) -> Result<Self, String> {
        let mut defaults = default_trace();
        for (key, values) in &options.settings {
            let key =
                TRACE_KEYS.into_iter().find(|known| known == key).ok_or(format!("`{key}` is no trace setting"))?;
            let checked = check_trace(key, values.clone()).map_err(|error| error.message)?;
            let checked = checked.ok_or_else(|| format!("`{}` is no value of `{key}`", values.join(",")))?;
            defaults.insert(key, checked);
        }
        if let Some(file) = &options.file {
            defaults.insert("trace_file", vec![file.display().to_string()]);
        }
        let allows_tensors = options.allows_tensors || has_tensors(&defaults["trace_level"]);
        let file = options.file.clone().map(|path| Arc::new(TraceFile::new(path, options.bounds)));
        let exporter = options.collector.clone().map(Exporter::new).transpose();
        let exporter = exporter.map_err(|error| format!("no thread for spans: {error}"))?.map(Arc::new);
        if exporter.is_some() {
            defaults.insert("trace_mode", vec!["opentelemetry".to_owned()]);
        }
        let (changed, counts, is_on) = Default::default();
        let settings = Self { defaults, changed, counts, is_on, allows_tensors, file, exporter };
        settings.apply();
        Ok(settings)
    }

    fn changed(&self) -> MutexGuard<'_, BTreeMap<String, TraceValues>> {
        self.changed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The settings of a model, or of the server if `model` is empty. `trace_count` is the number of remaining traces.
    pub fn get(&self, model: &str) -> TraceValues {
        let (mut values, owner) = (self.values(model), self.owner(model));
        let count = values.get_mut("trace_count").expect("every setting has a value");
        if let Ok(limit) = count[0].parse::<u64>() {
            let counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
            let (_, traced) = counts.get(owner).copied().unwrap_or_default();
            *count = vec![limit.saturating_sub(traced).to_string()];
        }
        values
    }

    /// The owner of the settings for a model: the model, or the server (empty).
    fn owner<'a>(&self, model: &'a str) -> &'a str {
        if self.changed().contains_key(model) { model } else { "" }
    }

    fn values(&self, model: &str) -> TraceValues {
        let changed = self.changed();
        let mut values = self.defaults.clone();
        for owner in ["", model] {
            values.extend(changed.get(owner).into_iter().flatten().map(|(key, value)| (*key, value.clone())));
        }
        values
    }

    fn sink(&self) -> Option<Arc<dyn TraceSink>> {
        match (&self.exporter, &self.file) {
            (Some(exporter), _) => Some(exporter.clone()),
            (None, Some(file)) => Some(file.clone()),
            (None, None) => None,
        }
    }

    /// Whether the trace context of requests is needed.
    pub fn takes_context(&self) -> bool {
        self.exporter.is_some() && self.is_on.load(Relaxed)
    }

    /// Starts a trace of a request to `model` if the request is sampled. If spans are exported, requests with a trace context are
    /// sampled at any rate.
    pub fn sample(&self, model: &str, context: Option<SpanContext>) -> Option<Trace> {
        if !self.is_on.load(Relaxed) {
            return None;
        }
        let sink = self.sink()?;
        let context = context.filter(|_| self.exporter.is_some());
        let values = self.values(model);
        let with_times = values["trace_level"].iter().any(|level| level == "TIMESTAMPS");
        let with_tensors = has_tensors(&values["trace_level"]) && self.allows_tensors;
        let number = |key: &str| values[key][0].parse::<i64>().unwrap_or(0);
        if !with_times && !with_tensors {
            return None;
        }
        let owner = self.owner(model);
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let (seen, traced) = counts.entry(owner.to_owned()).or_default();
        *seen += 1;
        let (rate, count) = (number("trace_rate"), number("trace_count"));
        let is_due = rate > 0 && (*seen).is_multiple_of(rate as u64);
        if !(is_due || context.is_some()) || (count >= 0 && *traced >= count as u64) {
            return None;
        }
        *traced += 1;
        let with_tensors = with_tensors && self.exporter.is_none(); // Spans do not contain tensors.
        Some(Trace::new(sink, with_times, with_tensors, context))
    }

    /// Changes settings of a model, or of the server if `model` is empty. Unknown names and levels are ignored.
    ///
    /// # Errors
    /// When a value is invalid. Nothing is changed then.
    pub fn update(&self, model: &str, changes: TraceChanges) -> Result<TraceValues, InferError> {
        let mut accepted = Vec::new();
        for (key, values) in changes {
            let Some(key) = TRACE_KEYS.into_iter().find(|known| *known == key) else { continue };
            match values.filter(|values| !values.is_empty()) {
                None => {
                    if key == "trace_file" {
                        return Err(trace_file_is_fixed());
                    }
                    accepted.push((key, None));
                }
                Some(values) => accepted.extend(check_trace(key, values)?.map(|values| (key, Some(values)))),
            }
        }
        let is_on = |(key, values): &(&str, Option<Vec<String>>)| {
            *key == "trace_level" && values.iter().flatten().any(|level| level != "OFF")
        };
        if self.sink().is_none() && accepted.iter().any(is_on) {
            return Err(InferError::invalid(
                "Attempting to set invalid trace setting :trace file name is not given; start with \
                 --trace-config=triton,file=PATH",
            ));
        }
        let is_not_allowed = |(key, values): &(&str, Option<Vec<String>>)| {
            *key == "trace_level" && !self.allows_tensors && values.as_ref().is_some_and(|levels| has_tensors(levels))
        };
        if accepted.iter().any(is_not_allowed)
            && let Some(suppressed) = TENSORS_NOT_ALLOWED.allow()
        {
            tracing::warn!(
                "a client requests traces with TENSORS, which contain prompts of all clients and are not written: start with \
                 --trace-config=level=TENSORS or --allow-client-trace-tensors=true, or restrict `trace` to clients with a \
                 key{suppressed}"
            );
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
        if own.is_empty() {
            changed.remove(model);
        }
        drop(changed);
        self.counts.lock().unwrap_or_else(PoisonError::into_inner).remove(model);
        self.apply();
        Ok(self.get(model))
    }

    /// Applies the settings to the flag and the file.
    fn apply(&self) {
        let is_level = |values: &TraceValues| {
            values.get("trace_level").is_some_and(|levels| levels.iter().any(|level| level != "OFF"))
        };
        let is_on = is_level(&self.get("")) || self.changed().values().any(is_level);
        if is_on
            && self.sink().is_none()
            && let Some(suppressed) = NO_DESTINATION.allow()
        {
            tracing::warn!(
                "traces are enabled but have no destination: start with --trace-config=triton,file=PATH{suppressed}"
            );
        }
        self.is_on.store(is_on, Relaxed);
        if let Some(file) = &self.file {
            file.set_frequency(self.get("")["log_frequency"][0].parse().unwrap_or(0));
        }
    }
}

fn has_tensors(levels: &[String]) -> bool {
    levels.iter().any(|level| level == "TENSORS")
}

fn trace_file_is_fixed() -> InferError {
    let words = "trace file location can not be updated through network protocol";
    InferError::new(ErrorKind::Unsupported, words)
}

fn default_trace() -> TraceValues {
    let defaults = ["OFF", "1000", "-1", "0", "", "triton"];
    TRACE_KEYS.into_iter().zip(defaults.map(|value| vec![value.to_owned()])).collect()
}

/// Checks the values of a setting; `None` if they are to be ignored.
fn check_trace(key: &'static str, values: Vec<String>) -> Result<Option<Vec<String>>, InferError> {
    match key {
        "trace_level" if values.len() > 1 && values.iter().any(|level| level == "OFF") => {
            Err(InferError::invalid("Expect only one trace level 'OFF' is specified"))
        }
        "trace_level" => Ok(values.iter().all(|level| TRACE_LEVELS.contains(&level.as_str())).then_some(values)),
        "trace_file" => Err(trace_file_is_fixed()),
        "trace_mode" => Ok(None),
        _ => {
            let (smallest, largest) =
                if key == "trace_count" { (-1, i64::from(i32::MAX)) } else { (0, i64::from(u32::MAX)) };
            let [value] = values.as_slice() else {
                return Err(InferError::invalid(format!("expect only 1 value for '{key}'")));
            };
            match value.parse::<i64>() {
                Ok(number) if number > largest => Err(InferError::invalid(format!(
                    "Unable to parse '{key}', value is out of range [ {smallest}, {largest} ], got: {value}"
                ))),
                Ok(number) if number >= smallest => Ok(Some(values)),
                Ok(_) => Err(InferError::invalid(format!(
                    "Unable to parse '{key}'. Expecting value >= {smallest}, got: {value}"
                ))),
                Err(_) => Err(InferError::invalid(format!("Unable to parse '{key}', got: {value}"))),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change(key: &str, value: &str) -> TraceChanges {
        vec![(key.to_owned(), Some(vec![value.to_owned()]))]
    }

    #[test]
    fn settings_of_a_model_override_those_of_the_server() {
        let settings = TraceSettings::new(&TraceOptions::default()).unwrap();
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
        let settings = TraceSettings::new(&TraceOptions::default()).unwrap();
        assert_eq!(settings.update("", change("trace_level", "FOO")).unwrap(), default_trace());
        assert!(settings.update("", change("trace_rate", "x")).unwrap_err().message.contains("Unable to parse"));
        assert_eq!(settings.update("", change("trace_file", "/x")).unwrap_err().kind, ErrorKind::Unsupported);
    }

    #[test]
    fn every_nth_request_is_traced_up_to_the_count() {
        let folder = tempfile::tempdir().unwrap();
        let setting = |key: &str, value: &str| (key.to_owned(), vec![value.to_owned()]);
        let settings = TraceSettings::new(&TraceOptions {
            file: Some(folder.path().join("t.json")),
            settings: vec![setting("trace_rate", "3"), setting("trace_count", "2")],
            ..TraceOptions::default()
        })
        .unwrap();
        assert!((0..9).all(|_| settings.sample("m", None).is_none()), "off by default");
        settings.update("", change("trace_level", "TIMESTAMPS")).unwrap();
        let traced: Vec<bool> = (0..12).map(|_| settings.sample("m", None).is_some()).collect();
        assert_eq!(traced.iter().filter(|traced| **traced).count(), 2);
        assert!(traced[2] && traced[5]);
        assert_eq!(settings.get("")["trace_count"], ["0"], "no traces remain");
        settings.update("m", change("trace_level", "OFF")).unwrap();
        assert!((0..9).all(|_| settings.sample("m", None).is_none()));
    }
    #[test]
    fn tensors_of_others_are_written_where_the_operator_said_so_alone() {
        let folder = tempfile::tempdir().unwrap();
        let level = |level: &str| ("trace_level".to_owned(), vec![level.to_owned()]);
        let rate = ("trace_rate".to_owned(), vec!["1".to_owned()]);
        let options = TraceOptions {
            file: Some(folder.path().join("t.json")),
            settings: vec![rate.clone()],
            ..TraceOptions::default()
        };
        let settings = TraceSettings::new(&options).unwrap();
        let answer = settings.update("", change("trace_level", "TENSORS")).unwrap();
        assert_eq!(answer["trace_level"], ["TENSORS"], "the answer is Triton's");
        assert!(settings.sample("m", None).is_none());
        let both = vec![("trace_level".to_owned(), Some(vec!["TIMESTAMPS".to_owned(), "TENSORS".to_owned()]))];
        settings.update("", both.clone()).unwrap();
        assert!(settings.sample("m", None).is_some(), "moments are written");
        for options in [
            TraceOptions { allows_tensors: true, ..options.clone() },
            TraceOptions { settings: vec![rate, level("TENSORS")], ..options.clone() },
        ] {
            let settings = TraceSettings::new(&options).unwrap();
            settings.update("", change("trace_level", "TENSORS")).unwrap();
            assert!(settings.sample("m", None).is_some());
        }
    }
}
