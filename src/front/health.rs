//! `grpc.health.v1.Health`: asked of the models at every call, never of a flag that someone forgot to set.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures::{Stream, stream};
use tonic::{Request, Response, Status};
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse, health_server};

use crate::state::State;

/// How often a watch looks.
const WATCH_INTERVAL: Duration = Duration::from_secs(1);

/// The health service.
pub struct Health {
    state: Arc<State>,
}

impl Health {
    /// The service over shared state.
    pub fn new(state: Arc<State>) -> Self {
        Self { state }
    }
}

fn status(state: &State) -> ServingStatus {
    if state.is_ready() { ServingStatus::Serving } else { ServingStatus::NotServing }
}

fn response(status: ServingStatus) -> HealthCheckResponse {
    HealthCheckResponse { status: status.into() }
}

fn is_ours(service: &str) -> bool {
    service.is_empty() || service == "inference.GRPCInferenceService"
}

#[tonic::async_trait]
impl health_server::Health for Health {
    async fn check(&self, request: Request<HealthCheckRequest>) -> Result<Response<HealthCheckResponse>, Status> {
        let service = request.into_inner().service;
        if !is_ours(&service) {
            return Err(Status::not_found(format!("unknown service '{service}'")));
        }
        Ok(Response::new(response(status(&self.state))))
    }

    type WatchStream = Pin<Box<dyn Stream<Item = Result<HealthCheckResponse, Status>> + Send>>;

    async fn watch(&self, request: Request<HealthCheckRequest>) -> Result<Response<Self::WatchStream>, Status> {
        if !is_ours(&request.get_ref().service) {
            let unknown = stream::iter([Ok(response(ServingStatus::ServiceUnknown))]);
            return Ok(Response::new(Box::pin(unknown)));
        }
        let changes = stream::unfold((self.state.clone(), None), |(state, last)| async move {
            loop {
                let now = status(&state);
                if Some(now) != last {
                    return Some((Ok(response(now)), (state, Some(now))));
                }
                tokio::time::sleep(WATCH_INTERVAL).await;
            }
        });
        Ok(Response::new(Box::pin(changes)))
    }
}
