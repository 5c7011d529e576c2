//! One gRPC connection's service: dispatch by path to inference, health and reflection.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use http::{Request, Response};
use hyper::body::Incoming;
use tonic::body::Body;
use tonic::codec::CompressionEncoding;
use tonic_reflection::server::v1::{ServerReflection, ServerReflectionServer};
use tower_service::Service;

use crate::config::Compression;
use crate::health::Health;
use crate::kserve_grpc::KserveGrpc;
use crate::proto::grpc_inference_service_server::GrpcInferenceServiceServer;
use crate::state::State;
use tonic_health::pb::health_server::HealthServer;

type Answer = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

/// All gRPC services of the port; cheap to clone.
pub struct GrpcService<R: ServerReflection> {
    inference: GrpcInferenceServiceServer<KserveGrpc>,
    health: HealthServer<Health>,
    reflection: ServerReflectionServer<R>,
}

impl<R: ServerReflection> Clone for GrpcService<R> {
    fn clone(&self) -> Self {
        let (inference, health, reflection) = (self.inference.clone(), self.health.clone(), self.reflection.clone());
        Self { inference, health, reflection }
    }
}

/// The services over shared state.
///
/// # Panics
/// Never: the descriptors are built with this crate.
pub fn grpc_service(state: Arc<State>) -> GrpcService<impl ServerReflection> {
    let limit = state.config.max_grpc_message_bytes;
    let mut inference = GrpcInferenceServiceServer::new(KserveGrpc::new(state.clone()))
        .max_decoding_message_size(limit)
        .max_encoding_message_size(limit)
        .accept_compressed(CompressionEncoding::Gzip)
        .accept_compressed(CompressionEncoding::Deflate);
    inference = match state.config.grpc_response_compression {
        Compression::None => inference,
        Compression::Gzip => inference.send_compressed(CompressionEncoding::Gzip),
        Compression::Deflate => inference.send_compressed(CompressionEncoding::Deflate),
    };
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(crate::proto::DESCRIPTORS)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .build_v1()
        .expect("the descriptors are built with this crate");
    GrpcService { inference, health: HealthServer::new(Health::new(state)), reflection }
}

impl<R: ServerReflection> Service<Request<Incoming>> for GrpcService<R> {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Answer;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Incoming>) -> Answer {
        let path = request.uri().path();
        if path.starts_with("/inference.GRPCInferenceService/") {
            self.inference.call(request)
        } else if path.starts_with("/grpc.health.v1.Health/") {
            self.health.call(request)
        } else if path.starts_with("/grpc.reflection.v1.ServerReflection/") {
            self.reflection.call(request)
        } else {
            let status = tonic::Status::unimplemented(format!("no service at '{path}'"));
            Box::pin(std::future::ready(Ok(status.into_http())))
        }
    }
}
