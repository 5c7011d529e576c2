//! The generate extension of KServe over HTTP, and OpenAI's protocol.

use client::ClientError;
use serde_json::{Map, Value, json};

use crate::dataset::Prompt;
use crate::http::HttpClient;
use crate::outcome::{Outcome, Sampling};

/// Usual names of the prompt, the length limit and the output text; the first one that the model declares is used.
const PROMPT: [&str; 4] = ["text_input", "prompt", "INPUT_TEXT", "text"];
const LENGTH: [&str; 3] = ["max_tokens", "request_output_len", "max_new_tokens"];
const TEXT: [&str; 3] = ["text_output", "response", "OUTPUT"];
/// The default model.
const DEFAULT_MODEL: &str = "ensemble";

/// A model with the endpoints `generate` and `generate_stream`.
#[derive(Clone)]
pub(crate) struct HttpTarget {
    client: HttpClient,
    pub(crate) model: String,
    inputs: Vec<String>,
    output: String,
}

impl HttpTarget {
    pub(crate) async fn open(address: &str, model: Option<&str>) -> Result<Self, ClientError> {
        let (client, model) = (HttpClient::new(address)?, model.unwrap_or(DEFAULT_MODEL).to_owned());
        let metadata = client.get(&format!("/v2/models/{model}")).await?;
        let names = |key: &str| -> Vec<String> {
            let tensors = metadata[key].as_array().into_iter().flatten();
            tensors.filter_map(|tensor| Some(tensor["name"].as_str()?.to_owned())).collect()
        };
        let outputs = names("outputs");
        let output = TEXT.iter().find(|name| outputs.iter().any(|output| output == *name));
        let output = output
            .ok_or_else(|| ClientError::Usage(format!("model `{model}` gives no text, only {}", outputs.join(", "))))?;
        Ok(Self { client, model, inputs: names("inputs"), output: (*output).to_owned() })
    }

    pub(crate) async fn send(
        &self,
        prompt: &Prompt,
        sampling: &Sampling,
        outcome: &mut Outcome,
    ) -> Result<(), ClientError> {
        let verb = if sampling.stream_output { "generate_stream" } else { "generate" };
        let mut answer =
            self.client.post(&format!("/v2/models/{}/{verb}", self.model), &self.body(prompt, sampling)).await?;
        if !sampling.stream_output {
            let answer = answer.json().await?;
            return self.piece(&answer, outcome);
        }
        while let Some(event) = answer.event().await? {
            let event =
                serde_json::from_str(&event).map_err(|error| ClientError::Protocol(format!("an event: {error}")))?;
            self.piece(&event, outcome)?;
        }
        Ok(())
    }

    fn piece(&self, answer: &Value, outcome: &mut Outcome) -> Result<(), ClientError> {
        if let Some(error) = answer["error"].as_str() {
            return Err(ClientError::Refused { code: "from the model", message: error.to_owned() });
        }
        let counted = answer["num_output_tokens"].as_u64().map(|count| count as usize);
        if let Some(text) = answer[&self.output].as_str() {
            outcome.add_counted_piece(counted, text);
        }
        Ok(())
    }

    fn body(&self, prompt: &Prompt, sampling: &Sampling) -> Value {
        let mut body = Map::new();
        let has = |name: &str| self.inputs.iter().any(|input| input == name);
        let mut add_if_declared = |names: &[&str], value: Value| match names.iter().find(|name| has(name)) {
            Some(name) => body.insert((*name).to_owned(), value).is_none(),
            None => false,
        };
        add_if_declared(&PROMPT, json!(prompt.text));
        add_if_declared(&LENGTH, json!(prompt.max_tokens));
        add_if_declared(&["stream", "streaming"], json!(sampling.stream_output));
        add_if_declared(&["top_k"], json!(sampling.top_k));
        add_if_declared(&["temperature"], json!(sampling.temperature));
        add_if_declared(&["return_num_output_tokens"], json!(true));
        if sampling.top_p > 0.0 {
            add_if_declared(&["top_p"], json!(sampling.top_p));
        }
        if !add_if_declared(&["ignore_eos"], json!(sampling.ignore_eos)) && sampling.ignore_eos {
            add_if_declared(&["end_id"], json!(-1));
        }
        if let Some(priority) = prompt.priority {
            body.insert("priority".to_owned(), json!(priority));
        }
        sampling.extend(&mut body);
        body.into()
    }
}

/// A model with OpenAI's completions endpoints.
#[derive(Clone)]
pub(crate) struct OpenAiTarget {
    client: HttpClient,
    pub(crate) model: String,
    is_chat: bool,
}

impl OpenAiTarget {
    pub(crate) async fn open(address: &str, model: Option<&str>, is_chat: bool) -> Result<Self, ClientError> {
        let client = HttpClient::new(address.trim_end_matches('/').trim_end_matches("/v1"))?;
        let listed = client.get("/v1/models").await?;
        let first = || listed["data"][0]["id"].as_str().map(str::to_owned);
        let none = || ClientError::Usage(format!("`{address}/v1/models` lists no model; name one with `--model`"));
        let model = model.map(str::to_owned).or_else(first).ok_or_else(none)?;
        Ok(Self { client, model, is_chat })
    }

    pub(crate) async fn send(
        &self,
        prompt: &Prompt,
        sampling: &Sampling,
        outcome: &mut Outcome,
    ) -> Result<(), ClientError> {
        let path = if self.is_chat { "/v1/chat/completions" } else { "/v1/completions" };
        let mut answer = self.client.post(path, &self.body(prompt, sampling)).await?;
        if !sampling.stream_output {
            let answer = answer.json().await?;
            self.piece(&answer, outcome);
            return Ok(());
        }
        while let Some(event) = answer.event().await?.filter(|event| event != "[DONE]") {
            let event: Value =
                serde_json::from_str(&event).map_err(|error| ClientError::Protocol(format!("an event: {error}")))?;
            if let Some(error) = event["error"]["message"].as_str() {
                return Err(ClientError::Refused { code: "from the model", message: error.to_owned() });
            }
            self.piece(&event, outcome);
        }
        while answer.event().await?.is_some() {} // A connection is reused only after the end of the body.
        Ok(())
    }

    fn piece(&self, answer: &Value, outcome: &mut Outcome) {
        let choice = &answer["choices"][0];
        let text = choice["text"].as_str().or_else(|| choice["delta"]["content"].as_str());
        let text = text.or_else(|| choice["message"]["content"].as_str()).unwrap_or_default();
        if !text.is_empty() {
            outcome.add_piece(None, text);
        }
        if let Some(count) = answer["usage"]["completion_tokens"].as_u64() {
            outcome.num_tokens = Some(count as usize);
        }
        if let Some(count) = answer["usage"]["prompt_tokens"].as_u64() {
            outcome.prompt_tokens = count as usize;
        }
        if let Some(count) = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64() {
            outcome.cached_tokens = Some(count as usize);
        }
        let ids = choice["token_ids"].as_array().into_iter().flatten();
        outcome.ids.extend(ids.filter_map(|id| u32::try_from(id.as_u64()?).ok()));
    }

    fn body(&self, prompt: &Prompt, sampling: &Sampling) -> Value {
        let mut body = json!({"model": self.model, "max_tokens": prompt.max_tokens, "stream": sampling.stream_output});
        match self.is_chat {
            true => body["messages"] = json!([{"role": "user", "content": prompt.text}]),
            false if prompt.text.is_empty() => body["prompt"] = json!(prompt.ids),
            false => body["prompt"] = json!(prompt.text),
        }
        // OpenAI's protocol has no `top_k`; temperature 0 means greedy.
        match sampling.top_k {
            1 => body["temperature"] = json!(0),
            top_k => {
                body["temperature"] = json!(sampling.temperature);
                body["top_k"] = json!(top_k);
            }
        }
        if sampling.top_p > 0.0 && sampling.top_p < 1.0 {
            body["top_p"] = json!(sampling.top_p);
        }
        if sampling.stream_output {
            body["stream_options"] = json!({"include_usage": true});
        }
        if sampling.ignore_eos {
            body["ignore_eos"] = json!(true);
        }
        if let Some(priority) = prompt.priority {
            body["priority"] = json!(priority);
        }
        sampling.extend(body.as_object_mut().expect("it was made as an object"));
        body
    }
}
