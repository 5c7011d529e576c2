//! KServe over gRPC: models with text or with token ids as input and output.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use client::ClientError;
use client::grpc::{Connection, frame};
use client::proto::infer_parameter::ParameterChoice;
use client::proto::{
    InferParameter, ModelInferRequest, ModelInferResponse, ModelStreamInferResponse, RepositoryIndexRequest,
    RepositoryIndexResponse,
};
use client::tensor::{Model, Values, texts};

use crate::dataset::Prompt;
use crate::outcome::{Outcome, Sampling};

/// Usual names of inputs; the first one that the model declares is used.
const PROMPT: [&str; 6] = ["text_input", "prompt", "INPUT_TEXT", "PROMPT", "text", "QUERY"];
const LENGTH: [&str; 5] =
    ["max_tokens", "request_output_len", "max_new_tokens", "sampling_param_max_tokens", "REQUEST_OUTPUT_LEN"];
const STREAM: [&str; 2] = ["stream", "streaming"];
const TOP_K: [&str; 3] = ["top_k", "runtime_top_k", "sampling_param_top_k"];
const TOP_P: [&str; 3] = ["top_p", "runtime_top_p", "sampling_param_top_p"];
const TEMPERATURE: [&str; 2] = ["temperature", "sampling_param_temperature"];
/// No end token, so that every response has its full length.
const NO_END_ID: i64 = -1;
/// Default number of connections, which requests share.
pub(crate) const CONNECTIONS: usize = 4;
/// Default models; the first one that is ready is used.
const DEFAULT_MODELS: [&str; 5] = ["ensemble", "lmdeploy_model", "sglang_model", "tensorrt_llm_bls", "llama-python"];

/// A model, and the connections to its server.
#[derive(Clone)]
pub(crate) struct GrpcTarget {
    connections: Arc<[Connection]>,
    next: Arc<AtomicUsize>,
    model: Arc<Model>,
}

impl GrpcTarget {
    pub(crate) async fn open(address: &str, model: Option<&str>, num_connections: usize) -> Result<Self, ClientError> {
        let mut connections = Vec::with_capacity(num_connections);
        for _ in 0..num_connections {
            connections.push(Connection::open(address).await?);
        }
        let name = match model {
            Some(name) => name.to_owned(),
            None => default_model(&connections[0]).await?,
        };
        let model = Arc::new(Model::find(&connections[0], &name).await?);
        Ok(Self { connections: connections.into(), next: Arc::default(), model })
    }

    pub(crate) fn model(&self) -> &str {
        &self.model.metadata.name
    }

    /// The next connection, in round-robin order.
    pub(crate) fn connection(&self) -> &Connection {
        &self.connections[self.next.fetch_add(1, Ordering::Relaxed) % self.connections.len()]
    }

    pub(crate) async fn send(
        &self,
        prompt: &Prompt,
        sampling: &Sampling,
        outcome: &mut Outcome,
    ) -> Result<(), ClientError> {
        let request = self.request(prompt, sampling)?;
        let dropped = if self.returns_prompt() { prompt.ids.len() } else { 0 };
        let mut replies = self.connection().call("ModelStreamInfer", frame(&request)).await?;
        while let Some(reply) = replies.next::<ModelStreamInferResponse>().await? {
            if !reply.error_message.is_empty() {
                return Err(ClientError::Refused { code: "from the model", message: reply.error_message });
            }
            let Some(response) = reply.infer_response else { continue };
            match piece(&response) {
                None => {}
                Some(Piece::Ids(count)) => outcome.add_piece(Some(count.saturating_sub(dropped)), ""),
                Some(Piece::Text(text, count)) => outcome.add_counted_piece(count, &text),
            }
        }
        Ok(())
    }

    /// Whether the output ids begin with the prompt: only without streaming, and if no input of the model can exclude it.
    fn returns_prompt(&self) -> bool {
        self.model.input("input_ids").is_some()
            && self.model.input("exclude_input_in_output").is_none()
            && self.model.input("streaming").is_none()
    }

    fn request(&self, prompt: &Prompt, sampling: &Sampling) -> Result<ModelInferRequest, ClientError> {
        let model = &*self.model;
        let mut request = model.request();
        if let Some(priority) = prompt.priority {
            request.parameters.insert("priority".to_owned(), level(priority)?);
        }
        if model.input("input_ids").is_some() {
            let ids: Vec<i64> = prompt.ids.iter().copied().map(i64::from).collect();
            model.add(&mut request, "input_ids", Values::Integers(&ids))?;
            self.add_if_declared(&mut request, &["input_lengths"], Values::Integers(&[ids.len() as i64]))?;
            self.add_if_declared(&mut request, &["exclude_input_in_output"], Values::Bool(true))?;
        } else {
            let text = [prompt.text.clone()];
            if !self.add_if_declared(&mut request, &PROMPT, Values::Texts(&text))? {
                model.add(&mut request, PROMPT[0], Values::Texts(&text))?; // Fails, and its error lists the inputs.
            }
            self.add_if_declared(&mut request, &["skip_special_tokens"], Values::Bool(false))?;
            self.add_if_declared(&mut request, &["return_num_output_tokens"], Values::Bool(true))?;
        }
        self.add_if_declared(&mut request, &LENGTH, Values::Integers(&[prompt.max_tokens as i64]))?;
        self.add_if_declared(&mut request, &STREAM, Values::Bool(sampling.stream_output && model.streams))?;
        self.add_if_declared(&mut request, &TOP_K, Values::Integers(&[i64::from(sampling.top_k)]))?;
        self.add_if_declared(&mut request, &TEMPERATURE, Values::Float(sampling.temperature))?;
        if sampling.top_p > 0.0 {
            self.add_if_declared(&mut request, &TOP_P, Values::Float(sampling.top_p))?;
        }
        if !self.add_if_declared(&mut request, &["ignore_eos"], Values::Bool(sampling.ignore_eos))?
            && sampling.ignore_eos
        {
            self.add_if_declared(&mut request, &["end_id"], Values::Integers(&[NO_END_ID]))?;
        }
        Ok(request)
    }

    /// Adds an input under the first name that the model declares; returns whether there is one.
    fn add_if_declared(
        &self,
        request: &mut ModelInferRequest,
        names: &[&str],
        values: Values<'_>,
    ) -> Result<bool, ClientError> {
        match names.iter().find(|name| self.model.input(name).is_some()) {
            Some(name) => self.model.add(request, name, values).map(|()| true),
            None => Ok(false),
        }
    }
}

/// The request parameter of a priority level.
fn level(priority: i64) -> Result<InferParameter, ClientError> {
    let level = u64::try_from(priority).map_err(|_| {
        ClientError::Usage(format!("`priority` is {priority}: over gRPC it is a level of the model, from 1 on"))
    })?;
    Ok(InferParameter { parameter_choice: Some(ParameterChoice::Uint64Param(level)) })
}

/// The generated part of a response.
enum Piece {
    /// A number of token ids.
    Ids(usize),
    /// Text, and the number of tokens if the server reports it.
    Text(String, Option<usize>),
}

/// `None` for a response without generated tokens.
fn piece(response: &ModelInferResponse) -> Option<Piece> {
    let outputs = || response.outputs.iter().zip(&response.raw_output_contents);
    if let Some((_, ids)) = outputs().find(|(output, _)| output.name == "output_ids") {
        let count = ids.len() / size_of::<i32>();
        return (count > 0).then_some(Piece::Ids(count));
    }
    let (_, data) = outputs().find(|(output, _)| output.datatype == "BYTES")?;
    let text: Vec<u8> = texts(data).flatten().copied().collect();
    let (_, count) = outputs().find(|(output, _)| output.name == "num_output_tokens").unzip();
    let count =
        count.and_then(|data| data.first_chunk()).and_then(|count| usize::try_from(i32::from_le_bytes(*count)).ok());
    Some(Piece::Text(String::from_utf8_lossy(&text).into_owned(), count))
}

async fn default_model(connection: &Connection) -> Result<String, ClientError> {
    let request = RepositoryIndexRequest { ready: true, ..Default::default() };
    let index: RepositoryIndexResponse =
        connection.unary("RepositoryIndex", &request).await.map_err(ClientError::on_first_call)?;
    let has = |name: &&str| index.models.iter().any(|model| model.name == *name);
    let usual = DEFAULT_MODELS.iter().find(|name| has(name)).map(|name| (*name).to_owned());
    let only = || match &index.models[..] {
        [model] => Some(model.name.clone()),
        _ => None,
    };
    usual.or_else(only).ok_or_else(|| {
        let names: Vec<&str> = index.models.iter().map(|model| model.name.as_str()).collect();
        ClientError::Usage(format!("name the model to ask with `--model`: ready are {}", names.join(", ")))
    })
}
