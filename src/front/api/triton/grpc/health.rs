//! `grpc.health.v1.Health`, from the current state of the models.
//!
//! As in Triton, every service name has the server's status.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures::{Stream, stream};
use tonic::{Request, Response, Status};
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse, health_server};

use crate::state::State;

/// The interval at which a watch checks the status.
const WATCH_INTERVAL: Duration = Duration::from_secs(1);

/// The health service.
pub struct Health {
    state: Arc<State>,
}

impl Health {
    /// A service with shared state.
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

#[tonic::async_trait]
impl health_server::Health for Health {
    async fn check(&self, _: Request<HealthCheckRequest>) -> Result<Response<HealthCheckResponse>, Status> {
        Ok(Response::new(response(status(&self.state))))
    }

    type WatchStream = Pin<Box<dyn Stream<Item = Result<HealthCheckResponse, Status>> + Send>>;

    async fn watch(&self, _: Request<HealthCheckRequest>) -> Result<Response<Self::WatchStream>, Status> {
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
