//! Servers to measure.

use clap::ValueEnum;
use client::ClientError;
use serde::{Deserialize, Serialize};

use crate::dataset::Prompt;
use crate::outcome::{Outcome, Sampling};
use crate::target_grpc::GrpcTarget;
use crate::target_http::{HttpTarget, OpenAiTarget};

/// The protocol of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Protocol {
    /// KServe over gRPC, as in Triton
    Grpc,
    /// KServe over HTTP: `generate_stream`
    Http,
    /// OpenAI's `/v1/completions`, as in vLLM and SGLang
    Openai,
    /// OpenAI's `/v1/chat/completions`
    OpenaiChat,
}

impl Protocol {
    /// Its name on the command line.
    pub(crate) fn name(self) -> String {
        self.to_possible_value().expect("every protocol has a name").get_name().to_owned()
    }
}

/// A server and one of its models.
#[derive(Clone)]
pub enum Target {
    /// Over gRPC.
    #[allow(private_interfaces)] // Only `open` constructs it.
    Grpc(GrpcTarget),
    /// Over HTTP.
    #[allow(private_interfaces)]
    Http(HttpTarget),
    /// OpenAI's protocol.
    #[allow(private_interfaces)]
    OpenAi(OpenAiTarget),
}

impl Target {
    /// Connects to `address` and finds `model`, or a default model if it is `None`. Over gRPC all requests share
    /// `num_connections` connections, at least 1; over HTTP each request in flight has its own.
    ///
    /// # Errors
    /// When the server cannot be reached, or has no such model.
    pub(crate) async fn open(
        protocol: Protocol,
        address: &str,
        model: Option<&str>,
        num_connections: usize,
    ) -> Result<Self, ClientError> {
        Ok(match protocol {
            Protocol::Grpc => Target::Grpc(GrpcTarget::open(address, model, num_connections).await?),
            Protocol::Http => Target::Http(HttpTarget::open(address, model).await?),
            Protocol::Openai => Target::OpenAi(OpenAiTarget::open(address, model, false).await?),
            Protocol::OpenaiChat => Target::OpenAi(OpenAiTarget::open(address, model, true).await?),
        })
    }

    /// The name of the model.
    pub fn model(&self) -> &str {
        match self {
            Target::Grpc(target) => target.model(),
            Target::Http(target) => &target.model,
            Target::OpenAi(target) => &target.model,
        }
    }

    /// Sends a prompt and records its response in `outcome`.
    pub(crate) async fn send(&self, prompt: &Prompt, sampling: &Sampling, outcome: &mut Outcome) {
        let result = match self {
            Target::Grpc(_) if !sampling.extra_body.is_empty() => {
                Err(ClientError::Usage("`--extra-body` needs a protocol over HTTP; name one with `--protocol`".into()))
            }
            Target::Grpc(target) => target.send(prompt, sampling, outcome).await,
            Target::Http(target) => target.send(prompt, sampling, outcome).await,
            Target::OpenAi(target) => target.send(prompt, sampling, outcome).await,
        };
        outcome.end(result);
    }
}
