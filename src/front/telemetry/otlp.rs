//! Converts traces to OpenTelemetry spans with Triton's names: a root span `InferRequest`, a span with the model's name for each
//! request to a model, and `compute` in it (Triton's user guide, "OpenTelemetry trace support").

use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue, any_value::Value};
use opentelemetry_proto::tonic::trace::v1::Span;
use opentelemetry_proto::tonic::trace::v1::span::{Event, SpanKind};
use serving::TraceRecord;

/// The kinds of spans of a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Root,
    Model,
    Compute,
}

impl Part {
    /// The span of the event called `event`.
    fn of(event: &str) -> Self {
        match event {
            _ if event.starts_with("COMPUTE_") => Part::Compute,
            "REQUEST_START" | "QUEUE_START" | "INFER_RESPONSE_COMPLETE" | "REQUEST_END" => Part::Model,
            _ => Part::Root,
        }
    }

    fn span_id(self, seed: u64, trace: u64) -> Vec<u8> {
        // Unique per trace and part, and never zero, because the highest bit of `seed` is set.
        (seed ^ ((trace << 2) | self as u64)).to_be_bytes().to_vec()
    }
}

/// The spans of a complete trace. `seed` distinguishes the ids of this process from those of others.
pub(crate) fn spans(trace: &TraceRecord, seed: u64) -> Vec<Span> {
    let parts = [Part::Root, Part::Model, Part::Compute];
    parts.into_iter().filter_map(|part| span(trace, seed, part)).collect()
}

/// `None` for a span without events, and for the root span of a nested trace.
fn span(trace: &TraceRecord, seed: u64, part: Part) -> Option<Span> {
    let is_root = part == Part::Root;
    if is_root && trace.parent_id.is_some() {
        return None;
    }
    let own = trace.times.iter().filter(|(name, _)| Part::of(name) == part);
    let events: Vec<Event> =
        own.map(|&(name, at)| Event { time_unix_nano: at, name: name.to_owned(), ..Event::default() }).collect();
    // The root span covers the events of all spans.
    let times = trace.times.iter().filter(|(name, _)| is_root || Part::of(name) == part).map(|&(_, at)| at);
    let (start, end) = (times.clone().min()?, times.max()?);
    let trace_id = match &trace.context {
        Some(context) => context.trace_id.to_vec(),
        None => [seed.to_be_bytes(), trace.root_id.to_be_bytes()].concat(),
    };
    let parent = match (part, trace.parent_id) {
        (Part::Root, _) => trace.context.map(|context| context.span_id.to_vec()).unwrap_or_default(),
        (Part::Model, None) => Part::Root.span_id(seed, trace.id),
        (Part::Model, Some(parent)) => Part::Model.span_id(seed, parent),
        (Part::Compute, _) => Part::Model.span_id(seed, trace.id),
    };
    let (name, attributes) = match part {
        Part::Root => ("InferRequest".to_owned(), Vec::new()),
        Part::Model => (trace.model.clone(), attributes(trace)),
        Part::Compute => ("compute".to_owned(), Vec::new()),
    };
    Some(Span {
        trace_id,
        span_id: part.span_id(seed, trace.id),
        parent_span_id: parent,
        name,
        kind: SpanKind::Server.into(),
        start_time_unix_nano: start,
        end_time_unix_nano: end,
        attributes,
        events,
        ..Span::default()
    })
}

fn attributes(trace: &TraceRecord) -> Vec<KeyValue> {
    let mut attributes = vec![
        text("triton.model_name", &trace.model),
        number("triton.model_version", trace.version),
        number("triton.trace_id", trace.id.cast_signed()),
        number("triton.trace_parent_id", trace.parent_id.unwrap_or(0).cast_signed()),
    ];
    if !trace.request_id.is_empty() {
        attributes.push(text("triton.request_id", &trace.request_id));
    }
    attributes
}

/// A text attribute.
pub(crate) fn text(key: &str, value: &str) -> KeyValue {
    attribute(key, Value::StringValue(value.to_owned()))
}

fn number(key: &str, value: i64) -> KeyValue {
    attribute(key, Value::IntValue(value))
}

fn attribute(key: &str, value: Value) -> KeyValue {
    KeyValue { key: key.to_owned(), value: Some(AnyValue { value: Some(value) }), ..KeyValue::default() }
}
