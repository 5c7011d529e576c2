//! The comparison of a recording with its replay.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use record::{Recording, Request};
use serde::Serialize;
use serde_json::Value;

use super::answer::Answer;
use super::messages;
use super::send::Replayed;
use crate::percentiles::Percentiles;

/// All requests of a replay.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Comparison {
    /// Requests that were sent.
    sent: usize,
    /// Requests with the same answer.
    alike: usize,
    /// Requests whose answers cannot be compared: without a seed, cut off by the client, or recorded without answers.
    not_compared: usize,
    /// Requests of the recording that have no body to be sent.
    not_sent: usize,
    differences: Vec<Difference>,
    /// From sending to the first part of the answer.
    first_part_ms: Latencies,
    /// From sending to the end of the answer.
    whole_ms: Latencies,
    /// Tokens that the server counted in both answers, and seconds of both.
    tokens: [u64; 2],
}

/// The latencies of the requests that have been answered both times.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
struct Latencies {
    recorded: Percentiles,
    replayed: Percentiles,
}

/// A request with another answer, or none.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Difference {
    id: u64,
    path: String,
    /// Where the answers differ.
    place: String,
    recorded: String,
    replayed: String,
}

impl Comparison {
    /// Compares each request with its replay.
    pub(crate) fn of(recording: &Recording, results: &[Option<Replayed>]) -> Self {
        let pairs: Vec<(&Request, &Replayed)> = recording
            .requests
            .iter()
            .zip(results)
            .filter_map(|(request, result)| Some((request, result.as_ref()?)))
            .collect();
        let verdicts: Vec<Verdict> = pairs.iter().map(|(request, replayed)| verdict(request, replayed)).collect();
        let count = |kind: &Verdict| verdicts.iter().filter(|verdict| *verdict == kind).count();
        let both: Vec<_> =
            pairs.iter().filter(|(request, replayed)| request.is_whole && replayed.failure.is_none()).collect();
        let latencies = |recorded: fn(&Request) -> Option<u64>, replayed: fn(&Replayed) -> Option<Duration>| {
            let mut first: Vec<_> =
                both.iter().filter_map(|pair| recorded(pair.0).map(Duration::from_micros)).collect();
            let mut second: Vec<_> = both.iter().filter_map(|pair| replayed(pair.1)).collect();
            Latencies { recorded: Percentiles::of(&mut first), replayed: Percentiles::of(&mut second) }
        };
        let tokens = |answer: Answer| answer.num_tokens().unwrap_or(0);
        let recorded = |request: &Request| request.reply.as_ref().and_then(record::Body::bytes).unwrap_or_default();
        Self {
            sent: pairs.len(),
            alike: count(&Verdict::Alike),
            not_compared: count(&Verdict::NotCompared),
            not_sent: results.len() - pairs.len(),
            first_part_ms: latencies(|request| request.first_us, |replayed| replayed.first),
            whole_ms: latencies(|request| Some(request.last_us), |replayed| Some(replayed.last)),
            tokens: [
                both.iter().map(|pair| tokens(answer(pair.0, &recorded(pair.0)))).sum(),
                both.iter().map(|pair| tokens(answer(pair.0, &pair.1.body))).sum(),
            ],
            differences: verdicts.into_iter().filter_map(Verdict::difference).collect(),
        }
    }

    /// Whether every answer that can be compared is the same.
    pub(crate) fn is_alike(&self) -> bool {
        self.differences.is_empty()
    }

    /// Tables for people, with at most `show` differences.
    pub(crate) fn text(&self, show: usize) -> String {
        let Self { sent, alike, not_compared, not_sent, differences, .. } = self;
        let mut text = format!("{sent} requests sent: {alike} answered alike, {} otherwise", differences.len());
        if *not_compared > 0 {
            let _ = write!(
                text,
                ", {not_compared} not compared (drawn without a seed, cut off, or recorded without answers)"
            );
        }
        if *not_sent > 0 {
            let _ = write!(text, "; {not_sent} without a body were not sent");
        }
        let _ = writeln!(text, "\n\n{:<22}{:>12}{:>12}{:>9}", "", "recorded", "replayed", "ratio");
        for (name, Latencies { recorded, replayed }) in
            [("first part", self.first_part_ms), ("whole answer", self.whole_ms)]
        {
            for (percentile, first, second) in [
                ("p50", recorded.p50, replayed.p50),
                ("p90", recorded.p90, replayed.p90),
                ("p99", recorded.p99, replayed.p99),
            ] {
                let ratio = if first > 0.0 { format!("{:.2}", second / first) } else { "-".to_owned() };
                let _ =
                    writeln!(text, "{:<22}{first:>12.2}{second:>12.2}{ratio:>9}", format!("{name}, {percentile} ms"));
            }
        }
        if self.tokens != [0, 0] {
            let _ = writeln!(text, "{:<22}{:>12}{:>12}", "tokens", self.tokens[0], self.tokens[1]);
        }
        for Difference { id, path, place, recorded, replayed } in differences.iter().take(show) {
            let _ =
                writeln!(text, "\nrequest {id} {path}, {place}:\n  recorded  {recorded:?}\n  replayed  {replayed:?}");
        }
        if differences.len() > show {
            let _ = writeln!(text, "\n{} more; --show={} prints all", differences.len() - show, differences.len());
        }
        text
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Verdict {
    Alike,
    NotCompared,
    Differs(Difference),
}

impl Verdict {
    fn difference(self) -> Option<Difference> {
        match self {
            Verdict::Differs(difference) => Some(difference),
            _ => None,
        }
    }
}

/// The answer in a reply to a request.
fn answer(request: &Request, reply: &[u8]) -> Answer {
    if request.is_grpc() { messages::answer(&request.path, reply) } else { Answer::of(reply) }
}

fn verdict(request: &Request, replayed: &Replayed) -> Verdict {
    let differs = |place: &str, recorded: String, replayed: String| {
        let (id, path) = (request.id, request.path.clone());
        Verdict::Differs(Difference { id, path, place: place.to_owned(), recorded, replayed })
    };
    if let Some(failure) = &replayed.failure {
        return differs("no answer", format!("status {}", request.status), failure.clone());
    }
    if request.is_whole && request.status != replayed.status {
        let body: String = String::from_utf8_lossy(&replayed.body).chars().take(300).collect();
        return differs("status", request.status.to_string(), format!("{}: {body}", replayed.status));
    }
    let Some(reply) = request.reply.as_ref().filter(|_| request.is_whole).and_then(record::Body::bytes) else {
        return Verdict::NotCompared;
    };
    match answer(request, &reply).difference(&answer(request, &replayed.body)) {
        None => Verdict::Alike,
        Some(_) if is_random(request) => Verdict::NotCompared,
        Some((place, recorded, replayed)) => differs(&place, recorded, replayed),
    }
}

/// Whether a server may draw other tokens the second time: the request samples and has no seed.
fn is_random(request: &Request) -> bool {
    let settings = settings(request);
    let number = |name: &str| {
        let names = ["", "runtime_", "sampling_param_"].map(|prefix| format!("{prefix}{name}"));
        names.iter().find_map(|name| settings.get(name)).copied()
    };
    let is_given = |name: &str| number(name).is_some();
    if is_given("seed") || is_given("random_seed") || number("top_k") == Some(1.0) {
        return false;
    }
    let is_openai = request.path.starts_with("/v1/");
    match number("temperature") {
        Some(temperature) => {
            temperature != 0.0 && (is_openai || number("top_k").is_some() || number("top_p").is_some())
        }
        // OpenAI's default draws, Triton's takes the most probable token.
        None => is_openai,
    }
}

/// The numbers that a request sets, by name.
fn settings(request: &Request) -> BTreeMap<String, f64> {
    let body = request.body.as_ref().and_then(record::Body::bytes).unwrap_or_default();
    if request.is_grpc() {
        return messages::settings(body);
    }
    let body: Value = serde_json::from_slice(&body).unwrap_or_default();
    let fields = [&body["parameters"], &body].into_iter().filter_map(Value::as_object).flatten();
    let mut found: BTreeMap<String, f64> =
        fields.filter_map(|(name, value)| Some((name.clone(), value.as_f64()?))).collect();
    for input in body["inputs"].as_array().into_iter().flatten() {
        if let (Some(name), Some(value)) = (input["name"].as_str(), single(&input["data"])) {
            found.insert(name.to_owned(), value);
        }
    }
    found
}

/// The only number in an array.
fn single(value: &Value) -> Option<f64> {
    match value.as_array().map(Vec::as_slice) {
        Some([only]) => single(only),
        Some(_) => None,
        None => value.as_f64(),
    }
}

#[cfg(test)]
mod tests {
    use record::Body;

    use super::*;

    fn judged(body: &str, change: impl FnOnce(&mut Request, &mut Replayed)) -> Verdict {
        let text = |text: &str| Some(Body::Text(text.to_owned()));
        let reply = r#"{"id":"1","choices":[{"text":"once upon"}]}"#;
        let path = "/v1/completions".to_owned();
        let mut request =
            Request { path, body: text(body), reply: text(reply), status: 200, is_whole: true, ..Request::default() };
        let body = reply.replace("\"1\"", "\"2\"").into_bytes();
        let mut replayed = Replayed { status: 200, body, ..Replayed::default() };
        change(&mut request, &mut replayed);
        verdict(&request, &replayed)
    }

    #[test]
    fn another_text_differs_unless_tokens_were_drawn_without_a_seed() {
        let other = |_: &mut Request, replayed: &mut Replayed| {
            replayed.body = br#"{"choices":[{"text":"once more"}]}"#.to_vec()
        };
        assert_eq!(judged(r#"{"temperature":0}"#, |_, _| {}), Verdict::Alike);
        assert!(matches!(judged(r#"{"temperature":0}"#, other), Verdict::Differs(_)));
        assert!(matches!(judged(r#"{"seed":7}"#, other), Verdict::Differs(_)));
        assert_eq!(judged("{}", other), Verdict::NotCompared);
        let triton = |request: &mut Request, replayed: &mut Replayed| {
            request.path = "/v2/models/m/generate".into();
            other(request, replayed);
        };
        assert!(matches!(judged("{}", triton), Verdict::Differs(_)));
        let drawn = r#"{"inputs":[{"name":"runtime_top_k","data":[[5]]},{"name":"temperature","data":[0.5]}]}"#;
        assert_eq!(judged(drawn, triton), Verdict::NotCompared);
        assert!(matches!(judged(&drawn.replace("[[5]]", "[[1]]"), triton), Verdict::Differs(_)));
    }

    #[test]
    fn failures_and_other_statuses_differ_and_answers_that_were_cut_off_are_not_compared() {
        let Verdict::Differs(found) = judged("{}", |_, replayed| replayed.status = 503) else { panic!() };
        assert_eq!((found.place.as_str(), found.recorded.as_str()), ("status", "200"));
        let failed = |_: &mut Request, replayed: &mut Replayed| replayed.failure = Some("no whole answer".to_owned());
        assert!(matches!(judged("{}", failed), Verdict::Differs(_)));
        let cut_off = |request: &mut Request, _: &mut Replayed| request.is_whole = false;
        assert_eq!(judged(r#"{"temperature":0}"#, cut_off), Verdict::NotCompared);
        assert_eq!(judged(r#"{"temperature":0}"#, |request, _| request.reply = None), Verdict::NotCompared);
    }
}
