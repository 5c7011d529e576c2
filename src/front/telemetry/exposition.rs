//! The text format of Prometheus (<https://prometheus.io/docs/instrumenting/exposition_formats/>).
//!
//! `prometheus-client` writes OpenMetrics, whose counters have other names than Triton's.

use std::borrow::Cow;
use std::fmt::Write;

use serving::HistogramValues;

/// Names and values of the labels of a sample.
pub type Labels = Vec<(Cow<'static, str>, String)>;

/// One metric and its samples.
#[derive(Debug, Clone, PartialEq)]
pub struct Family {
    /// The metric's name.
    pub name: &'static str,
    /// A description in one line.
    pub help: &'static str,
    /// The type of the metric.
    pub kind: FamilyKind,
    /// The samples.
    pub samples: Vec<Sample>,
}

/// The type of a metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)] // Names of Prometheus.
pub enum FamilyKind {
    Counter,
    Gauge,
    Histogram,
    Summary,
}

/// A value of a metric.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// Suffix of the name: empty, or `_bucket`, `_sum`, `_count` of a histogram or summary.
    pub suffix: &'static str,
    /// The labels.
    pub labels: Labels,
    /// The value.
    pub value: f64,
}

impl Sample {
    /// A sample without a suffix.
    pub fn new(labels: Labels, value: f64) -> Self {
        Self { suffix: "", labels, value }
    }

    /// All samples of a histogram with these labels.
    pub fn of_histogram(labels: &Labels, values: &HistogramValues) -> Vec<Self> {
        let bounds = values.bounds.iter().map(f64::to_string).chain(["+Inf".to_owned()]);
        let counts = values.counts.iter().chain([&values.count]);
        let bucket = |(bound, &count): (String, &u64)| {
            let labels = labels.iter().cloned().chain([("le".into(), bound)]).collect();
            Self { suffix: "_bucket", labels, value: count as f64 }
        };
        let mut samples: Vec<Self> = bounds.zip(counts).map(bucket).collect();
        samples.push(Self { suffix: "_sum", labels: labels.clone(), value: values.sum });
        samples.push(Self { suffix: "_count", labels: labels.clone(), value: values.count as f64 });
        samples
    }
}

// Written here because `prometheus-client` appends `_total` to the names of counters, which would rename Triton's `nv_*`, and
// `prometheus` encodes its own protobuf types only, into which each scrape would copy every sample.
/// Appends a metric in the text format. A metric without samples is omitted.
pub(crate) fn write_family(text: &mut String, family: &Family) {
    if family.samples.is_empty() {
        return;
    }
    let kind = match family.kind {
        FamilyKind::Counter => "counter",
        FamilyKind::Gauge => "gauge",
        FamilyKind::Histogram => "histogram",
        FamilyKind::Summary => "summary",
    };
    let (name, help) = (family.name, family.help);
    let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}"); // Writing to a String cannot fail.
    for sample in &family.samples {
        let _ = write!(text, "{name}{}", sample.suffix);
        for (index, (key, value)) in sample.labels.iter().enumerate() {
            let open = if index == 0 { '{' } else { ',' };
            let _ = write!(text, "{open}{key}=\"{}\"", escape(value));
        }
        let close = if sample.labels.is_empty() { "" } else { "}" };
        let _ = writeln!(text, "{close} {}", sample.value);
    }
}

fn escape(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_metric_is_written_in_the_text_format() {
        let mut text = String::new();
        let labels: Labels = vec![("model".into(), "a\"b".into())];
        let values = HistogramValues { bounds: vec![0.5, 2.0], counts: vec![1, 3], count: 4, sum: 7.25 };
        let mut samples = Sample::of_histogram(&labels, &values);
        samples.push(Sample::new(Vec::new(), 0.5));
        write_family(&mut text, &Family { name: "x", help: "Some help", kind: FamilyKind::Histogram, samples });
        let wanted = [
            "# HELP x Some help",
            "# TYPE x histogram",
            r#"x_bucket{model="a\"b",le="0.5"} 1"#,
            r#"x_bucket{model="a\"b",le="2"} 3"#,
            r#"x_bucket{model="a\"b",le="+Inf"} 4"#,
            r#"x_sum{model="a\"b"} 7.25"#,
            r#"x_count{model="a\"b"} 4"#,
            "x 0.5",
        ];
        assert_eq!(text.lines().collect::<Vec<_>>(), wanted);
    }
}
