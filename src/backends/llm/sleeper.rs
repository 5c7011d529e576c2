//! The replicas of a model as one model that can sleep.

use std::sync::Arc;

use futures::future::{BoxFuture, FutureExt as _, ready};
use serving::{InferError, SleepLevel, Sleeper};
use tokio::sync::oneshot;

use super::inbox::{Message, SleepResult};
use super::router::{Replica, Router};
use super::submission::UNLOADED;

/// All replicas of a model.
pub(crate) struct Replicas {
    /// Name of the model, for errors.
    pub(crate) model: String,
    pub(crate) router: Arc<Router>,
}

impl Replicas {
    /// Sends a message to each replica.
    pub(super) fn send(&self, message: impl Fn() -> Message) {
        for replica in self.router.replicas() {
            replica.inbox.send(message());
        }
    }

    /// Sends a message to each replica. Resolves to the first failure when all have answered.
    pub(super) fn ask(&self, message: impl Fn(SleepResult) -> Message) -> BoxFuture<'static, Result<(), InferError>> {
        let ask = |replica: &Replica| {
            let (done, answer) = oneshot::channel();
            replica.inbox.send(message(done));
            answer
        };
        let answers: Vec<_> = self.router.replicas().iter().map(ask).collect();
        let model = self.model.clone();
        async move {
            let mut result = Ok(());
            for answer in answers {
                result = result.and(answer.await.unwrap_or_else(|_| Err(UNLOADED.to_owned())));
            }
            result.map_err(|reason| InferError::unavailable(format!("model `{model}`: {reason}")))
        }
        .boxed()
    }

    /// The error of a request to sleep or to wake while the weights are replaced; `None` at other times.
    fn refusal(&self) -> Option<BoxFuture<'static, Result<(), InferError>>> {
        let reason = || format!("the weights of model `{}` are being replaced; try again later", self.model);
        self.router.is_updating().then(|| ready(Err(InferError::unavailable(reason()))).boxed())
    }
}

impl Sleeper for Replicas {
    fn sleep(&self, level: SleepLevel) -> BoxFuture<'static, Result<(), InferError>> {
        if let Some(refusal) = self.refusal() {
            return refusal;
        }
        let slept = self.ask(|done| Message::Sleep { level, done });
        let replicas = Self { model: self.model.clone(), router: Arc::clone(&self.router) };
        async move {
            let result = slept.await;
            if result.is_err() {
                // All replicas sleep, or none.
                let _ = replicas.wake().await;
            }
            result
        }
        .boxed()
    }

    fn wake(&self) -> BoxFuture<'static, Result<(), InferError>> {
        self.refusal().unwrap_or_else(|| self.ask(|done| Message::Wake { done }))
    }

    fn is_sleeping(&self) -> bool {
        self.router.replicas().iter().any(|replica| replica.shared.is_sleeping())
    }
}
