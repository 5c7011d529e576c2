//! The KServe v2 protocol over HTTP.

pub(crate) mod base64;
pub(crate) mod flat_response;
pub(crate) mod generate;
pub(crate) mod infer;
pub(crate) mod json;
pub(crate) mod json_writer;
pub(crate) mod models;
pub(crate) mod reply;
pub(crate) mod repository;
pub(crate) mod request_body;
pub(crate) mod route;
pub(crate) mod settings;

use std::convert::Infallible;
use std::sync::Arc;

use bytes::Bytes;
use http::header::{ACCEPT_ENCODING, CONTENT_ENCODING, HeaderMap, HeaderName, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use hyper::body::Incoming;
use serving::{ErrorKind, InferError, InferResponse, Limit, SharedLimit, Trace};

use crate::api::status::generate_status;
use crate::api::triton::header_parameters::forward;
use crate::api::triton::http::generate::{Events, NOT_ONE_RESPONSE};
use crate::api::triton::http::infer::ParsedRequest;
use crate::api::triton::http::reply::{
    BINARY, EVENTS, JSON, Reply, TEXT, allow_origin, denial, error_reply, error_text, json_reply, model_error,
    plain_error, preflight, probe, reply, unknown_coding, wants_json, without_body,
};
use crate::api::triton::http::request_body::{ChargedBody, content_coding, header, read_coded};
use crate::api::triton::http::route::{ModelPath, Route};
use crate::api::triton::shared_memory::run_device_work;
use crate::api::triton::single_response::{Transactions, single_response};
use crate::api::{openai, page};
use crate::state::State;
use crate::telemetry::recording::Recorded;
use crate::transport::body::ReplyBody;
use crate::transport::budget::Charge;
use crate::transport::content_coding::Coding;
use crate::transport::large_work::{block_in_place_if_large, block_in_place_in_turn};
use crate::transport::restricted::Api;

const HEAD_LENGTH: HeaderName = HeaderName::from_static("inference-header-content-length");

/// Answers one request. Errors are replies, too.
pub async fn handle(state: Arc<State>, request: Request<Incoming>) -> Result<Reply, Infallible> {
    let (head, body) = request.into_parts();
    let cors = state.config.http_origins.cors(&head.headers);
    if head.method == Method::OPTIONS
        && let Some(origin) = &cors
    {
        return Ok(preflight(origin.clone(), &head.headers));
    }
    let mut reply = match Recorded::begin(state.config.recorder.as_ref(), &head) {
        Some(recorded) => recorded.answered(handle_request(state, head, body)).await,
        None => handle_request(state, head, body).await,
    };
    cors.into_iter().for_each(|origin| allow_origin(reply.headers_mut(), origin));
    Ok(reply)
}

/// Answers a HEAD request as the GET request of its path, without the body.
async fn handle_request(state: Arc<State>, mut head: http::request::Parts, body: Incoming) -> Reply {
    if head.method != Method::HEAD {
        return handle_method(state, head, body).await;
    }
    head.method = Method::GET;
    without_body(handle_method(state, head, body).await)
}

async fn handle_method(state: Arc<State>, head: http::request::Parts, body: Incoming) -> Reply {
    if let Err(words) = state.config.http_origins.check(&head.method, &head.uri, &head.headers) {
        SharedLimit::Origins.count_refusal();
        return plain_error(StatusCode::FORBIDDEN, &words);
    }
    let longest = head.uri.path().split('/').map(str::len).max().unwrap_or(0);
    if let Err(error) = state.server.limits().check(Limit::NameBytes, longest) {
        return error_reply(&error);
    }
    if openai::is_path(head.uri.path()) {
        return openai::handle(&state, &head, body).await;
    }
    if state.config.serves_page && page::is_path(head.uri.path()) {
        return page::handle(&state, &head);
    }
    let Some(route) = Route::of(head.uri.path()) else {
        return plain_error(StatusCode::NOT_FOUND, "Not Found");
    };
    if let Err(denied) = state.config.http_restrictions.check(Api::of_route(&route), &head.headers) {
        return denial(denied);
    }
    if !route.allows(&head.method) {
        let kind = if route.answers_in_json() { JSON } else { TEXT };
        return reply(StatusCode::METHOD_NOT_ALLOWED, kind, error_text("Method Not Allowed"));
    }
    let changes = head.method == http::Method::POST;
    answer(&state, route, changes, &head.headers, body).await.unwrap_or_else(|error| error_reply(&error))
}

/// `changes`: whether the request may change settings, which depends on its method.
async fn answer(
    state: &Arc<State>,
    route: Route<'_>,
    changes: bool,
    headers: &HeaderMap,
    body: Incoming,
) -> Result<Reply, InferError> {
    match route {
        Route::Infer(model) => infer(state, model, headers, body).await,
        Route::Generate(model) => generate(state, model, headers, body).await,
        Route::GenerateStream(model) => generate_stream(state, model, headers, body).await,
        Route::Live => {
            Ok(probe(state.server.is_live(), StatusCode::BAD_REQUEST, wants_json(headers).then_some("live")))
        }
        Route::Ready => Ok(ready(state, headers)),
        Route::ModelReady(model) => model_ready(state, model, headers).await,
        Route::ServerMetadata => Ok(json_reply(models::server_metadata(&state.server))),
        Route::ModelMetadata(model) => models::model_metadata(&state.server, model).map(json_reply),
        Route::ModelConfig(model) => models::model_config(&state.server, model).map(json_reply),
        Route::ModelStatistics(model) => models::statistics(&state.server, model).map(json_reply),
        other => {
            // An unknown coding is ignored.
            let coding = content_coding(headers).unwrap_or(None);
            let ChargedBody { bytes, charge: _charge } = read_coded(state, coding, body).await?;
            control(state, other, changes, bytes).await.map(json_reply)
        }
    }
}

/// Requests that read or change the state of the server.
async fn control(state: &Arc<State>, route: Route<'_>, changes: bool, body: Bytes) -> Result<Vec<u8>, InferError> {
    let done = |()| Vec::new();
    match route {
        Route::RepositoryIndex => repository::index(&state.server, &body),
        Route::LoadModel(model) => repository::load(&state.server, model, &body).await.map(done),
        Route::UnloadModel(model) => repository::unload(&state.server, model, &body).await.map(done),
        Route::NamedRepository => {
            Err(InferError::new(ErrorKind::Unsupported, "'repository_name' specification is not supported"))
        }
        Route::MemoryStatus { kind, region } => settings::memory_status(state, kind, region),
        Route::MemoryRegister { kind, region } => settings::register_memory(state, kind, region, &body).await.map(done),
        Route::MemoryUnregister { kind, region } => {
            let (server, region) = (Arc::clone(state), region.to_owned());
            let unregister = move || {
                server.memory.unregister(kind, &region);
                Ok(())
            };
            run_device_work(unregister).await.map(done)
        }
        Route::TraceSetting { model } => settings::trace(state, model, changes.then_some(&body)),
        Route::Logging => settings::logging(state, changes.then_some(&body)),
        _ => unreachable!("`answer` handles the other routes"),
    }
}

fn ready(state: &State, headers: &HeaderMap) -> Reply {
    let status = if state.is_draining() { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::BAD_REQUEST };
    probe(state.is_ready(), status, wants_json(headers).then_some("ready"))
}

async fn model_ready(state: &State, model: ModelPath<'_>, headers: &HeaderMap) -> Result<Reply, InferError> {
    let is_ready = state.server.probe_model(model.name, model.version).await? && !state.is_draining();
    let not_ready = || plain_error(StatusCode::BAD_REQUEST, "Model version not ready");
    Ok(if is_ready { probe(true, StatusCode::OK, wants_json(headers).then_some("ready")) } else { not_ready() })
}

async fn infer(state: &State, model: ModelPath<'_>, headers: &HeaderMap, body: Incoming) -> Result<Reply, InferError> {
    let accepted = header(headers, &ACCEPT_ENCODING).map_or(Ok(None), Coding::accepted)?;
    let trace = state.sample_trace(model.name, state.span_context(headers));
    mark(&trace, "HTTP_RECV_START");
    let coding = content_coding(headers);
    let ChargedBody { bytes: body, charge } = read_coded(state, coding.clone().unwrap_or(None), body).await?;
    mark(&trace, "HTTP_RECV_END");
    let transactions = match Transactions::of(&state.server, model.name, model.version) {
        Ok(transactions) => transactions,
        Err(error) => return Ok(model_error(&error)),
    };
    if transactions == Transactions::Decoupled {
        return Ok(model_error(&decoupled()));
    }
    if let Err(error) = coding {
        return Ok(unknown_coding(&error));
    }
    let head_len = match head_len(headers, body.len()) {
        Ok(head_len) => head_len,
        Err(error) => return Ok(model_error(&error)),
    };
    let num_bytes = body.len();
    let mut parsed = if body.is_empty() || head_len == Some(0) {
        infer::read_raw(body, &*state.server.model_config(model.name, model.version)?)?
    } else {
        let limits = state.server.limits();
        let head = &body[..head_len.unwrap_or(num_bytes).min(num_bytes)];
        charge.add(json::tensor_bytes(head))?;
        let head_bytes = head.len();
        block_in_place_in_turn(head_bytes, || infer::read(model.name, body, head_len, &state.memory, limits)).await?
    };
    if transactions.may_answer_more_than_once(&parsed.request) {
        return Ok(model_error(&decoupled()));
    }
    parsed.request.model_name = model.name.into();
    parsed.request.model_version = model.version.into();
    parsed.request.trace = trace.clone();
    forward(&mut parsed.request, &state.config.http_forward.select(headers)?);
    let ParsedRequest { request, outputs, is_binary } = parsed;
    let responses = block_in_place_in_turn(num_bytes, || state.server.infer(request)).await?;
    let response = single_response(model.name, responses).await;
    mark(&trace, "HTTP_SEND_START");
    let delivered = response.and_then(|response| state.deliver(&outputs, response));
    let write = |response: InferResponse| {
        let num_bytes = response.outputs.iter().map(|output| output.data.len()).sum();
        block_in_place_if_large(num_bytes, || infer::write(response, &outputs, is_binary))
    };
    let answer = match delivered.and_then(write) {
        Ok(answer) => answer,
        Err(error) => return Ok(model_error(&error)),
    };
    mark(&trace, "HTTP_SEND_END");
    let mut reply = reply(StatusCode::OK, if answer.head_len.is_some() { BINARY } else { JSON }, answer.body);
    if let Some(head_len) = answer.head_len {
        reply.headers_mut().insert(HEAD_LENGTH, HeaderValue::from(head_len));
    }
    match accepted {
        Some(coding) => compress(reply, coding),
        None => Ok(reply),
    }
}

fn decoupled() -> InferError {
    InferError::new(ErrorKind::Unsupported, "HTTP end point doesn't support models with decoupled transaction policy")
}

async fn generate(
    state: &State,
    model: ModelPath<'_>,
    headers: &HeaderMap,
    body: Incoming,
) -> Result<Reply, InferError> {
    let GenerateRun { responses, is_decoupled, charge: _charge } = start_generate(state, model, headers, body).await?;
    let response = match generate::only_response(responses, is_decoupled).await {
        Ok(response) => response,
        Err(error) => return Ok(reply(generate_status(error.kind), JSON, error_text(&error.message))),
    };
    match response {
        Some(response) => Ok(reply(StatusCode::OK, JSON, generate::write(response)?)),
        None => Ok(reply(StatusCode::OK, JSON, error_text(NOT_ONE_RESPONSE))), // As in Triton, the status is 200.
    }
}

async fn generate_stream(
    state: &State,
    model: ModelPath<'_>,
    headers: &HeaderMap,
    body: Incoming,
) -> Result<Reply, InferError> {
    let GenerateRun { responses, is_decoupled, charge } = start_generate(state, model, headers, body).await?;
    let (events, error) = Events::start(responses, is_decoupled, charge).await;
    let status = error.map_or(StatusCode::OK, |error| generate_status(error.kind));
    Ok(reply(status, EVENTS, ReplyBody::Events(Box::pin(events))))
}

/// A started `generate` request.
struct GenerateRun {
    responses: serving::ResponseStream,
    /// Whether there may be any number of responses.
    is_decoupled: bool,
    /// The charge of the request, until its last response.
    charge: Charge,
}

async fn start_generate(
    state: &State,
    model: ModelPath<'_>,
    headers: &HeaderMap,
    body: Incoming,
) -> Result<GenerateRun, InferError> {
    let trace = state.sample_trace(model.name, state.span_context(headers));
    mark(&trace, "HTTP_RECV_START");
    let coding = content_coding(headers);
    let ChargedBody { bytes: body, charge } = read_coded(state, coding.clone().unwrap_or(None), body).await?;
    mark(&trace, "HTTP_RECV_END");
    let config = state.server.model_config(model.name, model.version)?;
    let unsupported = "Unsupported content-encoding, only 'identity', 'gzip' and 'deflate' are supported.";
    coding.map_err(|_| InferError::invalid(unsupported))?;
    charge.add(json::tensor_bytes(&body))?;
    let num_bytes = body.len();
    let generates_text = || state.server.generator(model.name, model.version).is_ok_and(|it| it.is_some());
    let read = || generate::read(&body, &config, state.server.limits(), &generates_text);
    let mut request = block_in_place_in_turn(num_bytes, read).await?;
    drop(body);
    request.model_name = model.name.into();
    request.model_version = model.version.into();
    request.trace = trace;
    forward(&mut request, &state.config.http_forward.select(headers)?);
    let is_decoupled = state.server.is_decoupled(model.name, model.version)?;
    let responses = block_in_place_in_turn(num_bytes, || state.server.infer(request)).await?;
    Ok(GenerateRun { responses, is_decoupled, charge })
}

fn mark(trace: &Option<Trace>, name: &'static str) {
    trace.iter().for_each(|trace| trace.mark(name));
}

fn compress(reply: Reply, coding: Coding) -> Result<Reply, InferError> {
    let (mut head, body) = reply.into_parts();
    let ReplyBody::Parts(parts) = body else { return Ok(Response::from_parts(head, body)) };
    let whole: Vec<u8> = parts.iter().flat_map(|part| part.iter().copied()).collect();
    let packed = block_in_place_if_large(whole.len(), || coding.encode(&whole))
        .map_err(|error| InferError::internal(format!("response cannot be compressed: {error}")))?;
    head.headers.insert(CONTENT_ENCODING, HeaderValue::from_static(coding.name()));
    Ok(Response::from_parts(head, packed.into()))
}

fn head_len(headers: &HeaderMap, body_len: usize) -> Result<Option<usize>, InferError> {
    let Some(value) = header(headers, &HEAD_LENGTH).map(str::trim) else { return Ok(None) };
    let digits = value.strip_prefix(['-', '+']).unwrap_or(value);
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(InferError::invalid(format!(
            "Unable to parse Inference-Header-Content-Length: got '{value}', expected a length"
        )));
    }
    value.parse().map(Some).map_err(|_| infer::not_in_body(value, body_len))
}
