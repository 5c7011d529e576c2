//! `identity`: returns its inputs. For probes and load tests.
//!
//! Output i is input i of the configuration, of any type. The parameter `execute_delay_ms` delays each request, or each
//! execution if the configuration has dynamic or sequence batching.

use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use serving::{
    Backend, BackendFactory, BatchedRequest, InferError, InferRequest, InferResponse, LoadRequest, Name,
    ResponseStream, Tensor,
};

use crate::parameters;

/// Loads `backend: "identity"`.
pub(crate) struct IdentityFactory;

struct Identity {
    /// Input and output names.
    pairs: Vec<(String, String)>,
    delay: Option<Duration>,
    /// 0 if requests need no queue.
    num_instances: usize,
}

impl BackendFactory for IdentityFactory {
    fn load(&self, model: LoadRequest) -> BoxFuture<'static, Result<Arc<dyn Backend>, InferError>> {
        std::future::ready(Identity::new(&model).map(|identity| Arc::new(identity) as Arc<dyn Backend>)).boxed()
    }
}

impl Identity {
    fn new(model: &LoadRequest) -> Result<Self, InferError> {
        let config = &model.config;
        if config.input.len() != config.output.len() {
            return Err(InferError::invalid(format!(
                "model `{}`: `identity` needs one output for each input, found {} inputs and {} outputs",
                config.name,
                config.input.len(),
                config.output.len()
            )));
        }
        let pairs = config.input.iter().zip(&config.output);
        if let Some((input, output)) = pairs.clone().find(|(input, output)| input.data_type != output.data_type) {
            return Err(InferError::invalid(format!(
                "model `{}`: output `{}` has another `data_type` than input `{}`, which it returns",
                config.name, output.name, input.name
            )));
        }
        Ok(Self {
            pairs: pairs.map(|(input, output)| (input.name.clone(), output.name.clone())).collect(),
            delay: parameters::number(config, "execute_delay_ms")?.map(Duration::from_millis),
            num_instances: if config.scheduling_choice.is_some() { config.num_instances() } else { 0 },
        })
    }

    fn echo(&self, request: InferRequest) -> InferResponse {
        let rename = |tensor: Tensor| {
            let (_, output) = self.pairs.iter().find(|(input, _)| *input == tensor.name)?;
            Some(Tensor { name: Name::from(output), ..tensor })
        };
        let outputs = request.inputs.into_iter().filter_map(rename).collect();
        InferResponse { outputs, is_final: true, ..InferResponse::default() }
    }
}

impl Backend for Identity {
    fn infer(&self, request: InferRequest) -> Result<ResponseStream, InferError> {
        let response = self.echo(request);
        let Some(delay) = self.delay else { return Ok(ResponseStream::ready(response)) };
        let (sender, stream) = ResponseStream::channel(1);
        tokio::spawn(async move {
            tokio::select! {
                () = tokio::time::sleep(delay) => { sender.send(Ok(response)).await; }
                () = sender.cancelled() => {}
            }
        });
        Ok(stream)
    }

    fn num_instances(&self) -> usize {
        self.num_instances
    }

    fn execute(&self, _instance: usize, batch: Vec<BatchedRequest>) -> BoxFuture<'_, ()> {
        async move {
            if let Some(delay) = self.delay {
                tokio::time::sleep(delay).await;
            }
            for BatchedRequest { request, responses } in batch {
                responses.send(Ok(self.echo(request))).await;
            }
        }
        .boxed()
    }

    fn drain(&self) -> BoxFuture<'_, ()> {
        std::future::ready(()).boxed()
    }
}
