//! Text in, text out, from a checkpoint: LMDeploy's and SGLang's Python models, TensorRT-LLM's `llmapi`, and models that
//! run a Hugging Face checkpoint themselves.
//!
//! They differ in what they call things, so a request is read by the names in `text_names` and handed to the engine under its
//! own. No chat template is applied: the prompt is what the client sends.

use std::sync::Arc;

use futures::FutureExt as _;
use futures::future::{BoxFuture, join_all};
use generation::Generator;
use repository::ModelConfig;
use repository::proto::{DataType as ConfigType, ModelOutput, ModelParameter};
use serving::{
    Backend, BackendFactory, GenerateCall, InferError, InferRequest, InferResponse, Limits, LoadRequest,
    ResponseSender, ResponseStream, Tensor,
};
use text::Detokenizer;
use tokio::runtime::Handle;

use super::engine::{add_missing, engine_output, with_checkpoint};
use super::keys::Use;
use super::text_names::{
    BAD_WORDS, EXCLUDE_INPUT, NAMES, STOP_WORDS, STREAM, default_inputs, input, missing_inputs, text_output,
};
use super::text_values::{Answer, Row, RunningText, find, flag, prompts};
use crate::encoder::{self, Encoder};
use crate::tokenize::add_special_tokens;
use crate::words::WordList;
use crate::{checkpoint, parameters};

/// Parameters that say how many tokens to generate when a request does not.
const DEFAULT_LENGTH: [&str; 3] = ["max_output_length", "max_output_tokens", "max_new_tokens"];

/// Tokens to generate when nobody says: what LMDeploy takes.
const DEFAULT_MAX_TOKENS: i32 = 512;

/// The output of natural logarithms, one for each token; with `return_log_probs`.
const LOG_PROBS: &str = "output_log_probs";

/// Sequences that run at once where the configuration has no batches: what LMDeploy's engine takes.
const MAX_ROWS: i32 = 128;

/// Loads text models.
pub(super) struct TextModelFactory {
    pub(super) llm: Arc<dyn BackendFactory>,
}

impl BackendFactory for TextModelFactory {
    fn is_exclusive(&self) -> bool {
        true
    }

    /// A checkpoint without a configuration takes and gives what LMDeploy's model does.
    fn complete(&self, config: &mut ModelConfig) {
        if config.input.is_empty() && config.output.is_empty() {
            config.input = default_inputs();
            config.output = vec![text_output("text_output")];
            config.model_transaction_policy.get_or_insert_default().decoupled = true;
        }
        config.input.extend(missing_inputs(config));
        if !config.output.iter().any(|output| output.name == LOG_PROBS) {
            config.output.push(engine_output(LOG_PROBS, ConfigType::TypeFp32));
        }
    }

    fn load(&self, model: LoadRequest) -> BoxFuture<'static, Result<Arc<dyn Backend>, InferError>> {
        let llm = self.llm.clone();
        async move {
            let request = with_checkpoint(&model, fit)?;
            let text_model = TextModel::new(&model, &request)?;
            let llm = llm.load(request).await?;
            Ok(Arc::new(TextModel { llm: Some(llm), ..text_model }) as Arc<dyn Backend>)
        }
        .boxed()
    }
}

/// The engine streams whatever the model around it does.
fn fit(config: &mut ModelConfig) {
    config.max_batch_size = config.max_batch_size.max(MAX_ROWS);
    config.model_transaction_policy.get_or_insert_default().decoupled = true;
    let outputs = [
        ("output_ids", ConfigType::TypeInt32),
        ("sequence_length", ConfigType::TypeInt32),
        (LOG_PROBS, ConfigType::TypeFp32),
    ];
    config.output = outputs.map(|(name, data_type)| engine_output(name, data_type)).to_vec();
    config.parameters.insert("exclude_input_in_output".to_owned(), ModelParameter { string_value: "true".to_owned() });
}

/// What draws from all tokens where a temperature or a top-k of 0 stands alone: text models take that for sampling, where the
/// engine under them, as TensorRT-LLM, is greedy.
fn all_tokens(inputs: &[Tensor]) -> Option<Tensor> {
    let find = |name: &str| inputs.iter().find(|tensor| tensor.name == name);
    let asks = find("temperature").is_some() || find("runtime_top_k").is_some();
    (asks && find("runtime_top_p").is_none()).then(|| Tensor::from_f32("runtime_top_p", &[1, 1], &[1.0]))
}

/// What LMDeploy takes where a request does not say (`GenerationConfig` of 0.4): greedy without a top-k.
fn lmdeploys_defaults() -> [Tensor; 3] {
    [
        Tensor::from_i32("runtime_top_k", &[1, 1], &[1]),
        Tensor::from_f32("runtime_top_p", &[1, 1], &[1.0]),
        Tensor::from_f32("temperature", &[1, 1], &[0.8]),
    ]
}

/// A loaded text model. Clones share the engine.
#[derive(Clone)]
struct TextModel {
    /// Set once the engine is loaded.
    llm: Option<Arc<dyn Backend>>,
    encoder: Arc<Encoder>,
    limits: Limits,
    max_tokens: i32,
    /// Whether each text lies in a row of its own; else, where the output is a list of any length, all in one: clients of
    /// TensorRT-LLM's text models read `text_output[0]`.
    is_nested: bool,
    is_decoupled: bool,
    has_lmdeploys_defaults: bool,
    add_special_tokens: bool,
    text_output: String,
    outputs: Vec<String>,
}

impl TextModel {
    fn new(model: &LoadRequest, engine: &LoadRequest) -> Result<Self, InferError> {
        let config = &model.config;
        let wrong = |words: String| InferError::invalid(format!("model `{}`: {words}", config.name));
        let dir = engine.config.parameter("gpt_model_path").unwrap_or_default();
        let tokenizer = match checkpoint::has_tokenizer(dir.as_ref()) {
            true => generation::tokenizer(dir.as_ref()).map_err(|error| wrong(error.to_string()))?,
            false => checkpoint::tokenizer(model)?.0,
        };
        let mut max_tokens = DEFAULT_MAX_TOKENS;
        for key in DEFAULT_LENGTH {
            max_tokens = parameters::number(config, key)?.unwrap_or(max_tokens);
        }
        let is_text = |output: &&ModelOutput| output.data_type() == ConfigType::TypeString;
        let text = config.output.iter().find(|output| output.name == "response" || output.name == "text_output");
        let text = text.or_else(|| config.output.iter().find(is_text));
        let text = text.ok_or_else(|| wrong("no output is TYPE_STRING; declare `text_output`".to_owned()))?;
        Ok(Self {
            llm: None,
            encoder: Arc::new(Encoder::new(tokenizer, dir.as_ref(), model)),
            limits: model.limits,
            max_tokens,
            is_nested: config.max_batch_size > 0 && text.dims != [-1],
            is_decoupled: config.is_decoupled(),
            // SGLang's model has the same tensors, and draws at any temperature.
            has_lmdeploys_defaults: super::is_lmdeploys(config) && !config.name.contains("sglang"),
            add_special_tokens: parameters::flag(config, "add_special_tokens")?.unwrap_or(true),
            text_output: text.name.clone(),
            outputs: config.output.iter().map(|output| output.name.clone()).collect(),
        })
    }

    fn llm(&self) -> &Arc<dyn Backend> {
        self.llm.as_ref().expect("the engine was loaded before the model serves")
    }

    /// The engine's request for one prompt.
    fn engine_request(
        &self,
        request: &InferRequest,
        prompt: &str,
        row: Row,
        streaming: bool,
        words: &[Tensor],
    ) -> Result<InferRequest, InferError> {
        let wrong = |error| InferError::invalid(format!("cannot encode the prompt: {error}"));
        let ids = self.encoder.encode(prompt, add_special_tokens(request, self.add_special_tokens), wrong)?;
        let ids: Vec<i32> = ids.into_iter().map(u32::cast_signed).collect();
        let mut inputs = vec![
            Tensor::from_i32("input_ids", &[1, ids.len() as i64], &ids),
            Tensor::from_bool("streaming", &[1, 1], &[streaming]),
        ];
        for (name, aliases) in NAMES {
            let Some(tensor) = find(request, aliases) else { continue };
            inputs.push(row.of(tensor, name)?);
        }
        if !inputs.iter().any(|tensor| tensor.name == "request_output_len") {
            inputs.push(Tensor::from_i32("request_output_len", &[1, 1], &[self.max_tokens]));
        }
        match self.has_lmdeploys_defaults {
            true => add_missing(&mut inputs, lmdeploys_defaults()),
            false => inputs.extend(all_tokens(&inputs)),
        }
        if flag(request, &["ignore_eos"])?.unwrap_or(false) {
            inputs.retain(|tensor| tensor.name != "end_id");
            inputs.push(Tensor::from_i32("end_id", &[1, 1], &[-1]));
        }
        inputs.extend(words.iter().cloned());
        Ok(InferRequest { inputs, requested_outputs: Vec::new(), ..request.clone() })
    }

    fn words(&self, request: &InferRequest, names: &[&str], output: &str) -> Result<Option<Tensor>, InferError> {
        let tensor = names.iter().filter_map(|name| request.input(name)).find_map(|tensor| tensor.to_byte_strings());
        let Some(words) = tensor else { return Ok(None) };
        let words: Vec<_> = words.iter().map(|word| String::from_utf8_lossy(word)).collect();
        let words: Vec<&str> = words.iter().map(|word| &**word).collect();
        let list = WordList::encode(&self.encoder.tokenizer, &self.limits, &words)?;
        let mut values = Vec::new();
        list.write(list.width(), &mut values);
        Ok(Some(Tensor::from_i32(output, &[1, 2, list.width() as i64], &values)))
    }

    /// The running text of one prompt's answer.
    fn text(&self, request: &InferRequest, prompt: &str, streaming: bool) -> Result<RunningText, InferError> {
        let skip = flag(request, &["skip_special_tokens"])?.unwrap_or(true);
        // As in TensorRT-LLM: a stream never repeats its prompt.
        let leading = match streaming || flag(request, &EXCLUDE_INPUT)?.unwrap_or(true) {
            true => String::new(),
            false => prompt.to_owned(),
        };
        let max_tokens = find(request, NAMES[0].1).and_then(|tensor| tensor.to_i32()?.first().copied());
        Ok(RunningText {
            detokenizer: Detokenizer::new(self.encoder.tokenizer.clone(), skip),
            piece: leading,
            log_probs: Vec::new(),
            cumulative: 0.0,
            num_tokens: 0,
            max_tokens: usize::try_from(max_tokens.unwrap_or(self.max_tokens)).unwrap_or(0),
        })
    }

    fn response(&self, request: &InferRequest, rows: &[Answer], is_final: bool) -> InferResponse {
        let shape = if self.is_nested { vec![rows.len() as i64, 1] } else { vec![rows.len() as i64] };
        let asked =
            |name: &str| request.requested_outputs.is_empty() || request.requested_outputs.iter().any(|it| it == name);
        let declared = |name: &str| self.outputs.iter().any(|output| output == name);
        let texts: Vec<&str> = rows.iter().map(|row| row.text.as_str()).collect();
        let mut outputs = vec![Tensor::from_byte_strings(&self.text_output, &shape, &texts)];
        if is_final && declared("finish_reason") {
            let reasons: Vec<&str> = rows.iter().map(|row| row.finish_reason).collect();
            outputs.push(Tensor::from_byte_strings("finish_reason", &shape, &reasons));
        }
        let longest = rows.iter().map(|row| row.log_probs.len()).max().unwrap_or(0);
        if longest > 0 {
            // Rows that are shorter end in zeros.
            let mut values = Vec::with_capacity(rows.len() * longest);
            for row in rows {
                values.extend(&row.log_probs);
                values.resize(values.len() + longest - row.log_probs.len(), 0.0);
            }
            outputs.push(Tensor::from_f32(LOG_PROBS, &[rows.len() as i64, longest as i64], &values));
            if declared("cumulative_logprob") {
                let sums: Vec<f32> = rows.iter().map(|row| row.cumulative).collect();
                outputs.push(Tensor::from_f32("cumulative_logprob", &shape, &sums));
            }
        }
        outputs.retain(|output| asked(&output.name));
        InferResponse { outputs, is_final, id: request.id.clone(), ..InferResponse::default() }
    }
}

impl Backend for TextModel {
    fn infer(&self, request: InferRequest) -> Result<ResponseStream, InferError> {
        if let Some((tensor, reason)) = request.inputs.iter().find_map(|tensor| match input(&tensor.name) {
            Some(Use::Refused(reason)) => Some((tensor, reason)),
            _ => None,
        }) {
            return Err(InferError::invalid(format!(
                "input `{}` is not supported: {reason}; leave it out",
                tensor.name
            )));
        }
        if let Some(stop) =
            request.input("stop").filter(|stop| stop.to_bool().is_some_and(|stop| stop.first() == Some(&true)))
        {
            let inputs = vec![stop.clone()];
            return self.llm().infer(InferRequest { inputs, requested_outputs: Vec::new(), ..request.clone() });
        }
        let prompts = prompts(&request)?;
        let streaming = flag(&request, &STREAM)?.unwrap_or(false);
        if streaming && !self.is_decoupled {
            return Err(InferError::invalid(
                "the request asks for a stream, but this model is not decoupled; set `model_transaction_policy { decoupled: \
                 true }`, or do not ask for one",
            ));
        }
        if streaming && prompts.len() != 1 {
            return Err(InferError::invalid(format!(
                "{} prompts in one stream; send a request for each",
                prompts.len()
            )));
        }
        prompts.iter().try_for_each(|prompt| self.encoder.check(prompt.len()))?;
        let num_bytes = request.inputs.iter().map(|tensor| tensor.data.len()).sum();
        let (model, runtime) = (self.clone(), Handle::current());
        if !encoder::is_long(num_bytes) {
            let runs = self.begin(self.prepare(&request, &prompts, streaming)?)?;
            return Ok(ResponseStream::from_future(|sender| model.respond(request, runs, streaming, sender)));
        }
        Ok(ResponseStream::from_future(move |sender| async move {
            let (encoding, its_request) = (model.clone(), request.clone());
            let prepare = move || encoding.prepare(&its_request, &prompts, streaming);
            let Some(prepared) = encoder::on_blocking_thread(&runtime, num_bytes, &sender, prepare).await else {
                return;
            };
            let runs = prepared.flatten().and_then(|prepared| {
                let _within = runtime.enter();
                model.begin(prepared)
            });
            match runs {
                Ok(runs) => model.respond(request, runs, streaming, sender).await,
                Err(error) => drop(sender.send(Err(error)).await),
            }
        }))
    }

    fn generator(&self) -> Option<Generator> {
        Some(Generator {
            tokenizer: self.encoder.tokenizer.clone(),
            max_prompt_bytes: self.encoder.max_bytes,
            adds_special_tokens: self.add_special_tokens,
            ..self.llm().generator()?
        })
    }

    fn generate(&self, call: GenerateCall) -> Result<ResponseStream, InferError> {
        self.llm().generate(call)
    }

    fn is_ready(&self) -> bool {
        self.llm().is_ready()
    }

    fn drain(&self) -> BoxFuture<'_, ()> {
        self.llm().drain()
    }
}

/// A request to the engine, and the text of its answer.
type Prepared = (InferRequest, RunningText);

/// An answer of the engine, and its text.
type Run = (ResponseStream, RunningText);

impl TextModel {
    /// What the engine is asked for each prompt.
    fn prepare(
        &self,
        request: &InferRequest,
        prompts: &[String],
        streaming: bool,
    ) -> Result<Vec<Prepared>, InferError> {
        let stop_words = self.words(request, &STOP_WORDS, "stop_words_list")?;
        let bad_words = self.words(request, &BAD_WORDS, "bad_words_list")?;
        let words: Vec<Tensor> = stop_words.into_iter().chain(bad_words).collect();
        let prepare = |(index, prompt): (usize, &String)| {
            let row = Row { index, count: prompts.len() };
            let engine_request = self.engine_request(request, prompt, row, streaming, &words)?;
            Ok((engine_request, self.text(request, prompt, streaming)?))
        };
        prompts.iter().enumerate().map(prepare).collect()
    }

    fn begin(&self, prepared: Vec<Prepared>) -> Result<Vec<Run>, InferError> {
        prepared.into_iter().map(|(request, text)| Ok((self.llm().infer(request)?, text))).collect()
    }

    async fn respond(self, request: InferRequest, mut runs: Vec<Run>, streaming: bool, sender: ResponseSender) {
        match (streaming, runs.pop()) {
            (true, Some((engine, text))) => self.stream(request, engine, text, sender).await,
            (_, last) => self.answer(request, runs.into_iter().chain(last).collect(), sender).await,
        }
    }

    /// A response for each piece of text, the last of them final.
    async fn stream(
        self,
        request: InferRequest,
        mut engine: ResponseStream,
        mut text: RunningText,
        sender: ResponseSender,
    ) {
        loop {
            let item = engine.next_response().await;
            sender.mark_scheduled();
            engine.generation().into_iter().for_each(|told| sender.report(told));
            let response = match item {
                None => return,
                Some(Err(error)) => {
                    sender.send(Err(error)).await;
                    return;
                }
                Some(Ok(response)) => response,
            };
            text.push(&response);
            if text.piece.is_empty() && !response.is_final {
                continue;
            }
            let told = self.response(&request, &[text.take()], response.is_final);
            if !sender.send(Ok(told)).await || response.is_final {
                return;
            }
        }
    }

    /// One response with the whole text of every prompt.
    async fn answer(self, request: InferRequest, runs: Vec<Run>, sender: ResponseSender) {
        let report = |engine: &ResponseStream| engine.generation().into_iter().for_each(|told| sender.report(told));
        let whole = |(mut engine, mut text): Run| async move {
            while let Some(item) = engine.next_response().await {
                text.push(&item?);
            }
            report(&engine);
            Ok(text.take())
        };
        let texts: Vec<Result<Answer, InferError>> = join_all(runs.into_iter().map(whole)).await;
        sender.mark_scheduled();
        let rows: Result<Vec<_>, InferError> = texts.into_iter().collect();
        sender.send(rows.map(|rows| self.response(&request, &rows, true))).await;
    }
}
