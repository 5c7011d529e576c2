//! Calls of a model to its server: requests to other models, loading and unloading, shared memory, metrics.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use ipc::lock;
use serving::{ErrorKind, InferError, InferRequest, LoadOverrides, ResponseStream, Server};
use tokio::sync::Semaphore;

use super::connection::{Call, Connection};
use super::instance::Instance;
use super::message::{read_request, refusal, reply, response_reply};
use super::metrics::Kind;
use super::wire::{Value, WireError};

/// Responses of another model that the process may hold unread.
const UNREAD_RESPONSES: usize = 16;

/// Handles a call, at once or in a task of its own.
pub(super) fn handle(
    connection: &Arc<Connection>,
    instance: &Instance,
    call: i64,
    method: &str,
    arguments: Vec<Value>,
) -> Result<(), WireError> {
    let arguments = Value::Tuple(arguments);
    match method {
        "infer" => infer(connection, instance, call, arguments)?,
        "taken" => {
            let [taken] = arguments.parts()?;
            if let Some(call) = calls(connection).get(&taken.int::<i64>()?) {
                call.credits.add_permits(1);
            }
        }
        "region" => {
            let [bytes] = arguments.parts()?;
            let mut answer = reply(call);
            match connection.add_output_region(bytes.int()?, &mut answer) {
                Ok(()) => connection.process.send(&answer.finish()),
                Err(error) => connection.process.send(&refusal(call, &error)),
            }
        }
        "metric_family" | "metric" | "metric_value" => {
            let made = metric(connection, method, arguments)?;
            let message = match made {
                Ok(value) => {
                    let mut answer = reply(call);
                    match value {
                        Value::Int(number) => answer.int(number),
                        Value::Float(value) => answer.float(value),
                        _ => answer.none(),
                    }
                    answer.finish()
                }
                Err(why) => refusal(call, &InferError::invalid(why)),
            };
            connection.process.send(&message);
        }
        _ => control(connection, call, method, arguments)?,
    }
    Ok(())
}

/// Ends a call whose further responses the process does not need.
pub(super) fn cancel(connection: &Connection, call: i64) {
    // Dropped after the lock is released: dropping a call aborts its task.
    let ended = calls(connection).remove(&call);
    drop(ended);
}

fn calls(connection: &Connection) -> std::sync::MutexGuard<'_, std::collections::HashMap<i64, Call>> {
    lock(&connection.calls)
}

fn server(connection: &Connection) -> Result<Arc<Server>, InferError> {
    let server = connection.host.server.get().and_then(Weak::upgrade);
    server.ok_or_else(|| InferError::unavailable("the server cannot serve requests of models yet, or is stopping"))
}

fn infer(connection: &Arc<Connection>, instance: &Instance, call: i64, arguments: Value) -> Result<(), WireError> {
    let [request, cause] = arguments.parts()?;
    let (mut request, decoupled) = read_request(request, &mut |block| connection.take(block))?;
    if let Some(cause) = cause.optional() {
        request.trace = instance.trace_of(cause.int()?);
    }
    let stream = match server(connection).and_then(|server| start(&server, request, decoupled)) {
        Ok(stream) => stream,
        Err(error) => {
            connection.process.send(&refusal(call, &error));
            return Ok(());
        }
    };
    let credits = Arc::new(Semaphore::new(UNREAD_RESPONSES));
    // The task must not end before it is registered.
    let mut calls = calls(connection);
    let task = tokio::spawn(forward(connection.clone(), call, stream, credits.clone())).abort_handle();
    calls.insert(call, Call { credits, task });
    Ok(())
}

fn start(server: &Server, request: InferRequest, decoupled: bool) -> Result<ResponseStream, InferError> {
    if !decoupled && server.is_decoupled(&request.model_name, &request.model_version)? {
        return Err(InferError::new(
            ErrorKind::Unsupported,
            format!(
                "model '{}' is decoupled: use `exec(decoupled=True)` and iterate over its responses",
                request.model_name
            ),
        ));
    }
    server.infer_for_model(request)
}

/// Sends each response to the process, as fast as the process reads them.
async fn forward(connection: Arc<Connection>, call: i64, mut stream: ResponseStream, credits: Arc<Semaphore>) {
    loop {
        // The semaphore is never closed.
        if let Ok(credit) = credits.acquire().await {
            credit.forget();
        }
        let ended = || InferError::internal("the model ended its stream without a final response");
        let response = stream.next_response().await.unwrap_or_else(|| Err(ended()));
        let is_last = response.as_ref().map_or(true, |response| response.is_final);
        connection.process.send(&response_reply(call, &response, &mut |bytes| connection.place(bytes)));
        if is_last {
            cancel(&connection, call);
            return;
        }
    }
}

/// Makes a metric or reads its value. Returns its number or value, or why that failed.
fn metric(connection: &Connection, method: &str, arguments: Value) -> Result<Result<Value, String>, WireError> {
    let mut held = lock(&connection.metrics);
    let number = |made: Result<i64, String>| made.map(|number| Value::Int(number.into()));
    Ok(match method {
        "metric_family" => {
            let [name, help, kind] = arguments.parts()?;
            match Kind::from_number(kind.int()?) {
                Some(kind) => number(held.family(&name.text()?, &help.text()?, kind)),
                None => Err("unknown kind of metric".to_owned()),
            }
        }
        "metric" => {
            let [family, labels, buckets] = arguments.parts()?;
            let pair = |pair: Value| {
                let [name, value] = pair.parts()?;
                Ok((name.text()?, value.text()?))
            };
            let labels = labels.tuple()?.into_iter().map(pair).collect::<Result<Vec<_>, WireError>>()?;
            let buckets = buckets.tuple()?.into_iter().map(Value::float).collect::<Result<Vec<_>, _>>()?;
            number(held.metric(family.int()?, labels, &buckets))
        }
        _ => {
            let [metric] = arguments.parts()?;
            held.value(metric.int()?).map(Value::Float).ok_or_else(|| "the metric was deleted".to_owned())
        }
    })
}

/// Loads or unloads a model, or checks its readiness.
fn control(connection: &Arc<Connection>, call: i64, method: &str, arguments: Value) -> Result<(), WireError> {
    let server = match server(connection) {
        Ok(server) => server,
        Err(error) => {
            connection.process.send(&refusal(call, &error));
            return Ok(());
        }
    };
    let connection = connection.clone();
    match method {
        "load_model" => {
            let [name, config, files] = arguments.parts()?;
            let (name, config) = (name.text()?, config.text()?);
            let file = |(name, content): (Value, Value)| Ok((name.text()?, content.bytes()?));
            let files = files.dict()?.into_iter().map(file).collect::<Result<BTreeMap<_, _>, WireError>>()?;
            let overrides = LoadOverrides { config: (!config.is_empty()).then_some(config), files };
            tokio::spawn(async move { done(&connection, call, server.load_model(&name, overrides).await) });
        }
        "unload_model" => {
            let [name, with_parts] = arguments.parts()?;
            let (name, with_parts) = (name.text()?, with_parts.bool()?);
            tokio::spawn(async move { done(&connection, call, server.unload_model(&name, with_parts).await) });
        }
        "is_model_ready" => {
            let [name, version] = arguments.parts()?;
            let (name, version) = (name.text()?, version.text()?);
            tokio::spawn(async move {
                let message = match server.probe_model(&name, &version).await {
                    Ok(is_ready) => {
                        let mut answer = reply(call);
                        answer.bool(is_ready);
                        answer.finish()
                    }
                    Err(error) => refusal(call, &error),
                };
                connection.process.send(&message);
            });
        }
        _ => {
            let error = InferError::new(ErrorKind::Unsupported, format!("the server does not know `{method}`"));
            connection.process.send(&refusal(call, &error));
        }
    }
    Ok(())
}

fn done(connection: &Connection, call: i64, result: Result<(), InferError>) {
    let message = match result {
        Ok(()) => {
            let mut answer = reply(call);
            answer.none();
            answer.finish()
        }
        Err(error) => refusal(call, &error),
    };
    connection.process.send(&message);
}
