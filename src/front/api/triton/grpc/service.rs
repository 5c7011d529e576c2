//! Dispatches the calls of gRPC connections to inference, health and reflection.

use std::convert::Infallible;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::future::FutureExt as _;
use h2::server::SendResponse;
use http::{Request, Response};
use serving::{InferError, SharedLimit};
use tokio::sync::OwnedSemaphorePermit;
use tonic::Status;
use tonic::body::Body;
use tonic::codec::CompressionEncoding;
use tonic_reflection::server::{v1, v1alpha};
use tower_service::Service;

use crate::api::status::grpc_status;
use crate::api::triton::grpc::KserveGrpc;
use crate::api::triton::grpc::call_context::CallContext;
use crate::api::triton::grpc::codings::Codings;
use crate::api::triton::grpc::health::Health;
use crate::api::triton::grpc::messages::{CompleteMessages, KeptMessage, Messages};
use crate::api::triton::grpc::paths;
use crate::api::triton::grpc::proto::grpc_inference_service_server::GrpcInferenceServiceServer;
use crate::api::triton::grpc::stream_call::StreamCall;
use crate::config::Compression;
use crate::state::State;
use crate::transport::content_coding::Coding;
use crate::transport::http2::{self, Call, RequestBody};
use crate::transport::restricted::{Api, Denied};
use tonic_health::pb::health_server::HealthServer;

/// Maximum response, which is the limit of gRPC.
const MAX_RESPONSE_BYTES: usize = i32::MAX as usize;

/// All gRPC services of the port; cheap to clone.
pub struct GrpcService<R: v1::ServerReflection, E: v1alpha::ServerReflection> {
    state: Arc<State>,
    inference: GrpcInferenceServiceServer<KserveGrpc>,
    health: HealthServer<Health>,
    reflection: v1::ServerReflectionServer<R>,
    /// The version of reflection before `v1`, which older clients still ask for.
    early_reflection: v1alpha::ServerReflectionServer<E>,
}

impl<R: v1::ServerReflection, E: v1alpha::ServerReflection> Clone for GrpcService<R, E> {
    fn clone(&self) -> Self {
        Self {
            state: self.state.clone(),
            inference: self.inference.clone(),
            health: self.health.clone(),
            reflection: self.reflection.clone(),
            early_reflection: self.early_reflection.clone(),
        }
    }
}

/// Creates the services with shared state.
///
/// # Panics
/// Never, because the descriptors are built with this crate.
pub fn grpc_service(state: Arc<State>) -> GrpcService<impl v1::ServerReflection, impl v1alpha::ServerReflection> {
    const BUILT: &str = "the descriptors are built with this crate";
    let inference = inference(&state);
    let services = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(crate::api::triton::grpc::proto::DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let (reflection, early_reflection) =
        (services().build_v1().expect(BUILT), services().build_v1alpha().expect(BUILT));
    let health = HealthServer::new(Health::new(state.clone()));
    GrpcService { inference, health, reflection, early_reflection, state }
}

/// The inference service. Its messages have passed [`Messages`], which limits and decompresses them.
fn inference(state: &Arc<State>) -> GrpcInferenceServiceServer<KserveGrpc> {
    let inference = GrpcInferenceServiceServer::new(KserveGrpc::new(state.clone()))
        .max_decoding_message_size(usize::MAX)
        .max_encoding_message_size(MAX_RESPONSE_BYTES)
        .accept_compressed(CompressionEncoding::Gzip)
        .accept_compressed(CompressionEncoding::Deflate);
    match state.config.grpc_response_compression {
        Compression::None => inference,
        Compression::Gzip => inference.send_compressed(CompressionEncoding::Gzip),
        Compression::Deflate => inference.send_compressed(CompressionEncoding::Deflate),
    }
}

/// Checks the key of a restricted API, and attaches the [`CallContext`] to inference calls.
fn admit(state: &State, request: &mut Request<RequestBody>) -> Result<(), Status> {
    let Some(api) = Api::of_rpc(request.uri().path()) else { return Ok(()) };
    let config = &state.config;
    config.grpc_restrictions.check(api, request.headers()).map_err(|Denied { header, is_bearer }| match is_bearer {
        true => Status::unauthenticated("This protocol is restricted, expecting metadata 'authorization: Bearer KEY'"),
        false => Status::unavailable(format!("This protocol is restricted, expecting header '{header}'")),
    })?;
    if api == Api::Inference {
        let headers = config.grpc_forward.select(request.headers()).map_err(grpc_status)?;
        let span = state.span_context(request.headers());
        if !headers.is_empty() || span.is_some() {
            request.extensions_mut().insert(CallContext { headers: headers.into(), span });
        }
    }
    Ok(())
}

impl<R: v1::ServerReflection, E: v1alpha::ServerReflection> GrpcService<R, E> {
    /// Starts a call; `None` if its client has disconnected.
    pub fn begin(&mut self, mut request: Request<RequestBody>, respond: SendResponse<Bytes>) -> Option<Box<dyn Call>> {
        if let Err(status) = admit(&self.state, &mut request) {
            return Some(refuse(status, respond));
        }
        let write_timeout = self.state.config.write_timeout;
        let Ok(permit) = self.state.grpc_calls.clone().try_acquire_owned() else {
            SharedLimit::GrpcStreams.count_refusal();
            let most = self.state.config.max_grpc_streams;
            let words = format!("{most} gRPC calls are open, as many as may be (--grpc-max-streams); try again later");
            return Some(refuse(grpc_status(InferError::unavailable(words)), respond));
        };
        let path = request.uri().path().to_owned();
        if path == paths::MODEL_STREAM_INFER {
            let codings = match Codings::of(request.headers(), self.state.config.grpc_response_compression) {
                Ok(codings) => codings,
                Err(status) => return Some(refuse(status, respond)),
            };
            let call = StreamCall::begin(self.state.clone(), request, codings, permit, respond);
            return call.map(|call| Box::new(call) as Box<dyn Call>);
        }
        // `tonic` refuses unsupported codings, and compresses the response.
        let coding =
            request.headers().get("grpc-encoding").and_then(|it| Coding::of_content(it.to_str().ok()?).ok()?);
        let charge = Arc::new(self.state.budget.charge());
        request.extensions_mut().insert(charge.clone());
        let state = self.state.clone();
        let is_recorded = state.config.recorder.as_ref().is_some_and(|recorder| !recorder.is_over());
        let kept = (is_recorded && path == paths::MODEL_INFER).then(KeptMessage::default);
        if let Some(kept) = &kept {
            request.extensions_mut().insert(kept.clone());
        }
        let request =
            request.map(|body| CompleteMessages::new(Messages::new(state, &path, coding, body), charge, kept));
        if path.starts_with(paths::INFERENCE) {
            Some(tonic_call(self.inference.call(request), permit, respond, write_timeout))
        } else if path.starts_with("/grpc.health.v1.Health/") {
            Some(tonic_call(self.health.call(request), permit, respond, write_timeout))
        } else if path.starts_with("/grpc.reflection.v1.ServerReflection/") {
            Some(tonic_call(self.reflection.call(request), permit, respond, write_timeout))
        } else if path.starts_with("/grpc.reflection.v1alpha.ServerReflection/") {
            Some(tonic_call(self.early_reflection.call(request), permit, respond, write_timeout))
        } else {
            let status = Status::unimplemented(format!("no service at '{path}'"));
            Some(refuse(status, respond))
        }
    }
}

/// A call that a service of `tonic` answers; `permit` counts it as open.
fn tonic_call(
    response: impl Future<Output = Result<Response<Body>, Infallible>> + Send + 'static,
    permit: OwnedSemaphorePermit,
    respond: SendResponse<Bytes>,
    timeout: Option<Duration>,
) -> Box<dyn Call> {
    let sent = http2::send(response.map(|Ok(response)| response), respond, timeout);
    Box::new(sent.map(move |()| drop(permit)).boxed())
}

fn refuse(status: Status, respond: SendResponse<Bytes>) -> Box<dyn Call> {
    Box::new(http2::send(std::future::ready(status.into_http::<Body>()), respond, None).boxed())
}
