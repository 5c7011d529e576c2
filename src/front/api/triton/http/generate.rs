//! The generate extension: requests in flat JSON, responses in flat JSON or as server-sent events.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures::Stream;
use generation::input_names::{STREAM, changes_text, other_release};
use repository::ModelConfig;
use repository::proto::ModelInput;
use serving::{
    DataType, InferError, InferRequest, InferResponse, Limit, Limits, OutputDelta, Parameter, ResponseStream,
    StreamItem, Tensor,
};

use crate::api::triton::http::flat_response::Template;
use crate::api::triton::http::infer::{model_parameter, set_parameter};
use crate::api::triton::http::json::{self, Value, in_field};
use crate::api::triton::http::reply::error_text;
use crate::api::triton::shapes::fit_shape;
use crate::transport::budget::Charge;

/// Reads a request. Members with the name of an input become tensors, all others parameters. `generates_text` says whether the
/// model generates text natively; it is called only for members that are not inputs. Such a model also takes inputs by the names
/// of another release of TensorRT-LLM.
///
/// # Errors
/// When the body is not a JSON object, a value is invalid for its input or parameter, or the model generates text and the name
/// of a member is that of an input that its configuration does not declare.
pub fn read(
    body: &[u8],
    config: &ModelConfig,
    limits: &Limits,
    generates_text: &dyn Fn() -> bool,
) -> Result<InferRequest, InferError> {
    let model = Model { config, limits, generates_text };
    let root = json::parse(body, limits)?;
    let mut request = InferRequest::default();
    let Value::Object(members) = &root else {
        return Err(InferError::internal("attempt to get members for non-object"));
    };
    for (key, value) in members {
        match (key.as_ref(), value) {
            ("id", _) if !names_input(config, key) => {
                request.id = value.as_str().map_err(|error| in_field("id", error))?.into();
                limits.check(Limit::IdBytes, request.id.len())?;
                request.parameters.insert("id".into(), Parameter::String(request.id.to_string()));
            }
            ("parameters", _) if !names_input(config, key) => {
                let words = |error: InferError| {
                    let message = format!("Expected JSON object for keyword: 'parameters': {}", error.message);
                    InferError::new(error.kind, message)
                };
                for (key, value) in value.as_object().map_err(words)? {
                    let words = |error: InferError| {
                        InferError::new(error.kind, format!("Converting keyword: 'parameters': {}", error.message))
                    };
                    model.read_member(&mut request, key, value).map_err(words)?;
                }
            }
            _ => model.read_member(&mut request, key, value)?,
        }
    }
    Ok(request)
}

fn names_input(config: &ModelConfig, key: &str) -> bool {
    config.input.iter().any(|input| input.name == key)
}

/// The model that a request is for.
struct Model<'a> {
    config: &'a ModelConfig,
    limits: &'a Limits,
    generates_text: &'a dyn Fn() -> bool,
}

impl Model<'_> {
    fn read_member(&self, request: &mut InferRequest, key: &str, value: &Value<'_>) -> Result<(), InferError> {
        self.limits.check(Limit::NameBytes, key.len())?;
        let Some(input) = self.input(key, value)? else {
            // Valid values of reserved names set fields of the request. The parameters are passed to the model, too.
            let _ = set_parameter(request, key, value);
            request.parameters.insert(key.to_owned(), model_parameter(key, value)?);
            return self.limits.check(Limit::Parameters, request.parameters.len());
        };
        self.limits.check(Limit::Inputs, request.inputs.len() + 1)?;
        request.inputs.push(tensor(self.config, input, value)?);
        Ok(())
    }

    /// The input that a member is for; `None` for a parameter.
    fn input(&self, key: &str, value: &Value<'_>) -> Result<Option<&ModelInput>, InferError> {
        let declared = |name: &str| self.config.input.iter().find(|input| input.name == name);
        if let Some(input) = declared(key) {
            return Ok(Some(input));
        }
        let other = other_release(key);
        if other.is_none() && !changes_text(key) || !(self.generates_text)() {
            return Ok(None);
        }
        if let Some(input) = other.and_then(declared) {
            return Ok(Some(input));
        }
        if !changes_text(key) || changes_nothing(key, value) {
            return Ok(None);
        }
        let message = format!(
            "'{key}' changes the text, but model '{}' does not declare it as an input; add it to the model's config.pbtxt if its \
             layout has such an input, send it to /v1/chat/completions if it is a field of OpenAI's, or leave it out",
            self.config.name
        );
        Err(InferError::invalid(message))
    }
}

/// Whether a value of a field that changes the text is what a model without such an input does: one answer, at once.
fn changes_nothing(key: &str, value: &Value<'_>) -> bool {
    match value {
        Value::Bool(false) => STREAM.contains(&key) || key == "logprobs",
        Value::Number("1") => matches!(key, "n" | "best_of"),
        _ => false,
    }
}

/// Converts a value to the tensor of an input.
///
/// # Errors
/// When the value does not have the type and shape of the input.
pub fn tensor(config: &ModelConfig, input: &ModelInput, value: &Value<'_>) -> Result<Tensor, InferError> {
    let key = input.name.as_str();
    let datatype = DataType::from_config(input.data_type())
        .ok_or_else(|| InferError::internal(format!("input '{key}' of model '{}' has no type", config.name)))?;
    let count = match value {
        Value::Array(array) => array.count()?,
        _ => 1,
    };
    let shape = fit_shape(&input.dims, config.max_batch_size > 0, count);
    if count > 0 && shape.iter().product::<i64>() != count as i64 {
        return Err(InferError::invalid(format!(
            "The schema can not convert input '{key}' to tensor with proper shape: {count} elements do not fill its dims {:?}",
            input.dims
        )));
    }
    let mut data = Vec::new();
    let held = match value {
        Value::Array(array) => array.flatten(datatype, count, &mut data)?,
        scalar => json::push_element(scalar, datatype, &mut data).map(|()| 1)?,
    };
    if held != count {
        return Err(json::shape_mismatch());
    }
    Ok(Tensor { name: key.into(), datatype, shape: shape.into(), data: data.into() })
}

/// Writes a response as flat JSON, sorted by member.
///
/// # Errors
/// When an output has no JSON form.
pub fn write(response: InferResponse) -> Result<Vec<u8>, InferError> {
    let mut text = Vec::with_capacity(256);
    Template::of(response)?.write(&mut text);
    Ok(text)
}

/// The error of `generate` for a model that returned no or several responses.
pub const NOT_ONE_RESPONSE: &str = "generate expects model to produce exactly 1 response, \
                                    use generate stream for model that generates various number of responses";

/// Reads the only response of a request; `Ok(None)` if there are none or several. An empty final response ends the stream and is
/// not counted.
///
/// # Errors
/// When the model returns an error.
pub async fn only_response(
    mut responses: ResponseStream,
    is_decoupled: bool,
) -> Result<Option<InferResponse>, InferError> {
    let mut only = None;
    while let Some(response) = responses.next_response().await {
        let response = response?;
        let is_final = response.is_final;
        let is_end = is_final && response.outputs.is_empty() && (is_decoupled || only.is_some());
        if !is_end && only.replace(response).is_some() {
            return Ok(None);
        }
        if is_final {
            break;
        }
    }
    Ok(only)
}

/// Events that are ready together are sent in chunks of up to this size.
const CHUNK_BYTES: usize = 16 << 10;

/// Responses as server-sent events.
pub struct Events {
    responses: Option<ResponseStream>,
    /// Whether an empty final response is no event: the model is decoupled, or another response came before.
    skips_empty_final: bool,
    /// The last response, and the values that a delta has for it.
    template: Template,
    delta: OutputDelta,
    ready: Vec<u8>,
    /// The charge of the request until it is answered.
    _charge: Charge,
}

impl Events {
    /// Waits for the first response. Returns its error if the request failed.
    pub async fn start(
        mut responses: ResponseStream,
        is_decoupled: bool,
        charge: Charge,
    ) -> (Self, Option<InferError>) {
        responses.accept_deltas();
        let mut delta = OutputDelta::default();
        let first = responses.next_item(&mut delta).await;
        let mut events = Self {
            responses: Some(responses),
            skips_empty_final: is_decoupled,
            template: Template::default(),
            delta,
            ready: Vec::with_capacity(256),
            _charge: charge,
        };
        let error = match &first {
            Some(Err(error)) => Some(error.clone()),
            _ => None,
        };
        events.push(first);
        (events, error)
    }

    fn push(&mut self, item: Option<Result<StreamItem, InferError>>) {
        let changed = match item {
            None => {
                self.responses = None;
                return;
            }
            // A decoupled model may send further responses. Otherwise the stream of responses ends.
            Some(Err(error)) => {
                self.error(&error);
                return;
            }
            Some(Ok(StreamItem::Event(_))) => return, // Only typed requests have events.
            Some(Ok(StreamItem::Delta(_))) => self.template.apply(&self.delta),
            Some(Ok(StreamItem::Response(response))) => {
                if response.is_final {
                    self.responses = None;
                }
                if response.is_final && response.outputs.is_empty() && self.skips_empty_final {
                    return;
                }
                self.skips_empty_final = true;
                Template::of(*response).map(|template| self.template = template)
            }
        };
        match changed {
            Ok(()) => {
                self.ready.extend_from_slice(b"data: ");
                self.template.write(&mut self.ready);
                self.ready.extend_from_slice(b"\n\n");
            }
            Err(error) => {
                self.responses = None;
                self.error(&error);
            }
        }
    }

    fn error(&mut self, error: &InferError) {
        self.ready.extend_from_slice(b"data: ");
        self.ready.extend_from_slice(&error_text(&error.message));
        self.ready.extend_from_slice(b"\n\n");
    }
}

impl Stream for Events {
    type Item = Bytes;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Bytes>> {
        let events = self.get_mut();
        while events.ready.len() < CHUNK_BYTES {
            let Some(responses) = &mut events.responses else { break };
            match responses.poll_item(&mut events.delta, context) {
                Poll::Ready(item) => events.push(item),
                Poll::Pending => break,
            }
        }
        if events.ready.is_empty() {
            return if events.responses.is_none() { Poll::Ready(None) } else { Poll::Pending };
        }
        Poll::Ready(Some(std::mem::take(&mut events.ready).into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_openai_that_a_text_model_does_not_declare_are_refused_unless_they_change_nothing() {
        let config = ModelConfig { name: "m".to_owned(), ..ModelConfig::default() };
        let model = Model { config: &config, limits: &Limits::default(), generates_text: &|| true };
        let refused = [
            ("n", Value::Number("2")),
            ("best_of", Value::Number("3")),
            ("functions", Value::String("f".into())),
            ("stream", Value::Bool(true)),
            ("logprobs", Value::Bool(true)),
            ("top_logprobs", Value::Number("1")),
        ];
        for (key, value) in refused {
            let error = model.input(key, &value).unwrap_err();
            assert!(error.message.contains(&format!("'{key}' changes the text")), "{}", error.message);
        }
        let taken = [
            ("n", Value::Number("1")),
            ("best_of", Value::Number("1")),
            ("stream", Value::Bool(false)),
            ("logprobs", Value::Bool(false)),
            ("priority", Value::Number("2")),
        ];
        for (key, value) in taken {
            assert_eq!(model.input(key, &value).unwrap(), None, "{key}");
        }
        let other = Model { generates_text: &|| false, ..model };
        assert_eq!(other.input("n", &Value::Number("2")).unwrap(), None, "other models may read any parameter");
    }
}
