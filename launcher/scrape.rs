//! Reads the Prometheus metrics of rank 0.

use std::time::Duration;

use crate::http;

/// Timeout of each connect, read and write.
const IO_TIMEOUT: Duration = Duration::from_millis(1000);

/// One line of `/metrics`.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// Name of the metric.
    pub name: String,
    /// Its labels: names and unescaped values.
    pub labels: Vec<(String, String)>,
    /// Its value.
    pub value: f64,
}

impl Sample {
    /// The value of the label `name`; empty if there is none.
    pub fn label(&self, name: &str) -> &str {
        self.labels.iter().find(|(label, _)| label == name).map_or("", |(_, value)| value)
    }
}

/// All samples of one scrape.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Metrics(pub Vec<Sample>);

impl Metrics {
    /// Fetches `/metrics` from `host:port`.
    ///
    /// # Errors
    /// If the server does not answer in time, or its status is not 200.
    pub fn of(host: &str, port: u16) -> std::io::Result<Self> {
        Ok(Self::parse(&get(host, port, "/metrics")?))
    }

    /// Parses Prometheus' text format. Lines that are no sample are skipped.
    pub fn parse(text: &str) -> Self {
        Self(text.lines().filter(|line| !line.starts_with('#')).filter_map(sample).collect())
    }

    /// The samples of one metric.
    pub fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Sample> {
        self.0.iter().filter(move |sample| sample.name == name)
    }

    /// The sum of a metric over its samples with the label `model`; None if there are none.
    pub fn of_model(&self, name: &str, model: &str) -> Option<f64> {
        let values: Vec<f64> =
            self.all(name).filter(|sample| sample.label("model") == model).map(|sample| sample.value).collect();
        (!values.is_empty()).then(|| values.iter().sum())
    }
}

fn sample(line: &str) -> Option<Sample> {
    let (head, value) = line.trim_end().rsplit_once(' ')?;
    let value = value.parse().ok()?;
    let Some((name, labels)) = head.split_once('{') else {
        return Some(Sample { name: head.to_owned(), labels: Vec::new(), value });
    };
    Some(Sample { name: name.to_owned(), labels: labels_of(labels.strip_suffix('}')?)?, value })
}

/// Parses `a="x",b="y \" z"`; None if malformed.
fn labels_of(mut text: &str) -> Option<Vec<(String, String)>> {
    let mut labels = Vec::new();
    while !text.is_empty() {
        let (name, rest) = text.split_once("=\"")?;
        let (mut value, mut chars) = (String::new(), rest.char_indices());
        let end = loop {
            match chars.next()? {
                (at, '"') => break at,
                (_, '\\') => value.push(match chars.next()?.1 {
                    'n' => '\n',
                    other => other,
                }),
                (_, other) => value.push(other),
            }
        };
        labels.push((name.to_owned(), value));
        text = rest[end + 1..].strip_prefix(',').unwrap_or(&rest[end + 1..]);
    }
    Some(labels)
}

/// The body of `GET path`.
fn get(host: &str, port: u16, path: &str) -> std::io::Result<String> {
    match http::send((host, port), "GET", path, None, IO_TIMEOUT)? {
        (200, body) => Ok(body),
        (status, _) => Err(std::io::Error::other(format!("{path} answers {status}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_read_with_their_labels() {
        let text = "# HELP a b\na 1\nb{model=\"m\",x=\"q \\\"},=\"} 2.5\nb{model=\"n\"} 1e3\nnot a sample\n";
        let metrics = Metrics::parse(text);
        assert_eq!(metrics.0.len(), 3);
        assert_eq!(metrics.0[1].label("x"), "q \"},=");
        assert_eq!(metrics.of_model("b", "n"), Some(1000.0));
        assert_eq!(metrics.of_model("b", "o"), None);
    }
}
