//! Metrics of models. Models share families by name and metrics by labels; each exists as long as a process holds it.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::sync::{Arc, Mutex, MutexGuard};

use ipc::lock;

/// The type of a metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Counter,
    Gauge,
    Histogram,
}

impl Kind {
    pub fn from_number(number: u8) -> Option<Self> {
        [Kind::Counter, Kind::Gauge, Kind::Histogram].get(usize::from(number)).copied()
    }

    fn name(self) -> &'static str {
        match self {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram => "histogram",
        }
    }
}

/// Prefixes of the names of the server's own metrics.
const RESERVED: [&str; 4] = ["nv_inference_", "nv_cache_", "nv_gpu_", "nv_cpu_"];

type Labels = Vec<(String, String)>;

/// All metrics of all models.
#[derive(Debug, Default)]
pub(super) struct Registry {
    families: Mutex<BTreeMap<String, Family>>,
}

#[derive(Debug)]
struct Family {
    help: String,
    kind: Kind,
    holders: usize,
    metrics: BTreeMap<Labels, Metric>,
}

#[derive(Debug, Default)]
struct Metric {
    holders: usize,
    value: f64,
    /// Upper bounds in ascending order. Each has the number of observations up to it and above the bound before.
    buckets: Vec<(f64, u64)>,
    count: u64,
}

/// The metrics that one model process holds, until it ends.
#[derive(Debug)]
pub(super) struct Held {
    registry: Arc<Registry>,
    held: HashMap<i64, Handle>,
    last: i64,
}

#[derive(Debug, Clone)]
enum Handle {
    Family(String),
    Metric(String, Labels),
}

impl Registry {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Family>> {
        lock(&self.families)
    }

    /// All metrics in Prometheus' text format.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for (name, family) in self.lock().iter() {
            let help = family.help.replace('\\', "\\\\").replace('\n', "\\n");
            let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {}", family.kind.name());
            for (labels, metric) in &family.metrics {
                metric.write(&mut text, name, family.kind, labels);
            }
        }
        text
    }
}

impl Metric {
    fn write(&self, text: &mut String, name: &str, kind: Kind, labels: &Labels) {
        if kind != Kind::Histogram {
            let _ = writeln!(text, "{name}{} {}", shown(labels, None), self.value);
            return;
        }
        let mut count = 0;
        for (bound, found) in &self.buckets {
            count += found;
            let _ = writeln!(text, "{name}_bucket{} {count}", shown(labels, Some(bound.to_string())));
        }
        let _ = writeln!(text, "{name}_bucket{} {}", shown(labels, Some("+Inf".to_owned())), self.count);
        let _ = writeln!(text, "{name}_sum{} {}", shown(labels, None), self.value);
        let _ = writeln!(text, "{name}_count{} {}", shown(labels, None), self.count);
    }
}

fn shown(labels: &Labels, bound: Option<String>) -> String {
    let quoted = |value: &str| value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    let mut pairs: Vec<String> = labels.iter().map(|(name, value)| format!("{name}=\"{}\"", quoted(value))).collect();
    pairs.extend(bound.map(|bound| format!("le=\"{bound}\"")));
    if pairs.is_empty() { String::new() } else { format!("{{{}}}", pairs.join(",")) }
}

fn is_name(text: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b':';
    !text.is_empty() && text.bytes().all(plain) && !text.as_bytes()[0].is_ascii_digit()
}

impl Held {
    pub fn new(registry: Arc<Registry>) -> Self {
        Self { registry, held: HashMap::new(), last: 0 }
    }

    fn hold(&mut self, handle: Handle) -> i64 {
        self.last += 1;
        self.held.insert(self.last, handle);
        self.last
    }

    /// Makes a family, or shares the family of this name.
    ///
    /// # Errors
    /// When the name is invalid, or belongs to a family of another kind.
    pub fn family(&mut self, name: &str, help: &str, kind: Kind) -> Result<i64, String> {
        if !is_name(name) || RESERVED.iter().any(|prefix| name.starts_with(prefix)) {
            return Err(format!(
                "`{name}` cannot name a metric: use letters, digits and `_`, not beginning with a digit or with {}",
                RESERVED.join(", ")
            ));
        }
        let mut families = self.registry.lock();
        let family = families.entry(name.to_owned()).or_insert_with(|| Family {
            help: help.to_owned(),
            kind,
            holders: 0,
            metrics: BTreeMap::new(),
        });
        if family.kind != kind {
            return Err(format!("metric family `{name}` is a {} already", family.kind.name()));
        }
        family.holders += 1;
        drop(families);
        Ok(self.hold(Handle::Family(name.to_owned())))
    }

    /// Makes a metric of a family, or shares the one with these labels.
    ///
    /// # Errors
    /// When the family was deleted, or the name of a label is invalid.
    pub fn metric(&mut self, family: i64, mut labels: Labels, buckets: &[f64]) -> Result<i64, String> {
        labels.sort();
        if let Some((name, _)) = labels.iter().find(|(name, _)| !is_name(name) || name.contains(':') || name == "le") {
            return Err(format!("`{name}` cannot name a label"));
        }
        let Some(Handle::Family(name)) = self.held.get(&family).cloned() else {
            return Err("its metric family was deleted".to_owned());
        };
        let mut families = self.registry.lock();
        let made = families.get_mut(&name).ok_or("its metric family was deleted")?;
        let metric = made.metrics.entry(labels.clone()).or_insert_with(|| Metric {
            buckets: buckets.iter().map(|&bound| (bound, 0)).collect(),
            ..Metric::default()
        });
        metric.holders += 1;
        drop(families);
        Ok(self.hold(Handle::Metric(name, labels)))
    }

    /// Calls `work` with a metric. `None` when the metric was deleted.
    fn with<R>(&self, number: i64, work: impl FnOnce(&mut Metric) -> R) -> Option<R> {
        let Some(Handle::Metric(family, labels)) = self.held.get(&number) else { return None };
        Some(work(self.registry.lock().get_mut(family)?.metrics.get_mut(labels)?))
    }

    pub fn value(&self, number: i64) -> Option<f64> {
        self.with(number, |metric| metric.value)
    }

    /// Applies an operation: `increment`, `set`, `observe` or `drop`.
    pub fn change(&mut self, operation: &str, number: i64, value: f64) {
        match operation {
            "increment" => self.with(number, |metric| metric.value += value),
            "set" => self.with(number, |metric| metric.value = value),
            "observe" => self.with(number, |metric| {
                metric.value += value;
                metric.count += 1;
                if let Some((_, count)) = metric.buckets.iter_mut().find(|(bound, _)| value <= *bound) {
                    *count += 1;
                }
            }),
            _ => {
                if let Some(handle) = self.held.remove(&number) {
                    self.release(&handle);
                }
                None
            }
        };
    }

    fn release(&self, handle: &Handle) {
        let mut families = self.registry.lock();
        match handle {
            Handle::Family(name) => {
                let Some(family) = families.get_mut(name) else { return };
                family.holders -= 1;
                if family.holders == 0 {
                    families.remove(name);
                }
            }
            Handle::Metric(name, labels) => {
                let Some(family) = families.get_mut(name) else { return };
                let Some(metric) = family.metrics.get_mut(labels) else { return };
                metric.holders -= 1;
                if metric.holders == 0 {
                    family.metrics.remove(labels);
                }
            }
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let handles: Vec<Handle> = self.held.drain().map(|(_, handle)| handle).collect();
        // Metrics are released before their families.
        let (families, metrics): (Vec<Handle>, _) =
            handles.into_iter().partition(|handle| matches!(handle, Handle::Family(_)));
        metrics.iter().chain(&families).for_each(|handle| self.release(handle));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_models_share_a_metric_until_both_have_released_it() {
        let registry = Arc::new(Registry::default());
        let labels = || vec![("model".to_owned(), "a\"b".to_owned())];
        let mut held: Vec<Held> = (0..2).map(|_| Held::new(registry.clone())).collect();
        for held in &mut held {
            let family = held.family("requests", "Requests", Kind::Counter).unwrap();
            let metric = held.metric(family, labels(), &[]).unwrap();
            held.change("increment", metric, 2.5);
        }
        let expected = "# HELP requests Requests\n# TYPE requests counter\nrequests{model=\"a\\\"b\"} 5\n";
        assert_eq!(registry.text(), expected);
        assert!(held[0].family("requests", "", Kind::Gauge).is_err(), "it is a counter");
        held.pop();
        assert_eq!(registry.text(), expected);
        held.pop();
        assert_eq!(registry.text(), "");
    }

    #[test]
    fn a_histogram_counts_cumulatively() {
        let registry = Arc::new(Registry::default());
        let mut held = Held::new(registry.clone());
        let family = held.family("seconds", "Seconds", Kind::Histogram).unwrap();
        let metric = held.metric(family, vec![], &[0.5, 1.0]).unwrap();
        for value in [0.25, 0.75, 4.0] {
            held.change("observe", metric, value);
        }
        let text = registry.text();
        let samples: Vec<&str> = text.lines().skip(2).collect();
        assert_eq!(
            samples,
            [
                "seconds_bucket{le=\"0.5\"} 1",
                "seconds_bucket{le=\"1\"} 2",
                "seconds_bucket{le=\"+Inf\"} 3",
                "seconds_sum 5",
                "seconds_count 3"
            ]
        );
    }
}
