//! Text models: LMDeploy's and SGLang's Python models, TensorRT-LLM's `llmapi`, and models that run a Hugging Face checkpoint themselves.
//!
//! They have different names for the same inputs, which `text_names` converts to those of the engine. No chat template is applied to
//! prompts.

mod inputs;
mod request;
mod response;
mod row_text;

use std::sync::Arc;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use generation::Generator;
use generation::input_names::STREAM;
use repository::ModelConfig;
use repository::proto::{DataType as ConfigType, ModelOutput};
use serving::{
    Adapters, Backend, BackendFactory, EventStream, GenerateCall, InferError, InferRequest, Limits, LoadRequest,
    ResponseStream, Sleeper, Tensor,
};
use tokio::runtime::Handle;

use super::engine_bounds::EngineBounds;
use super::engine_config::{check_engine, engine_output, with_checkpoint, with_tokenizer};
use super::keys::Use;
use super::recognise::is_lmdeploy_model;
use super::text_names::{default_inputs, input, missing_inputs, text_output};
use crate::encoder::{self, Encoder};
use crate::tensor_values::first;
use crate::{checkpoint, parameters};
use inputs::prompts;
use row_text::RowText;

/// Parameters with the default number of tokens to generate.
const DEFAULT_LENGTH: [&str; 3] = ["max_output_length", "max_output_tokens", "max_new_tokens"];

/// The default number of tokens to generate where the configuration has none: that of LMDeploy.
const DEFAULT_MAX_TOKENS: u32 = 512;

/// The output of natural log-probabilities of tokens, with `return_log_probs`.
const LOG_PROBS: &str = "output_log_probs";

/// Minimum of the maximum number of running sequences: the default of LMDeploy's engine.
const MAX_ROWS: i32 = 128;

/// Loads text models.
pub(super) struct TextModelFactory {
    pub(super) llm: Arc<dyn BackendFactory>,
}

impl BackendFactory for TextModelFactory {
    fn is_exclusive(&self) -> bool {
        true
    }

    /// Adds the tensors of LMDeploy's model to a checkpoint without a configuration, and missing optional tensors to any model.
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

    fn check(&self, model: LoadRequest) -> BoxFuture<'static, Result<(), InferError>> {
        check_engine(&self.llm, engine_of(&model))
    }

    fn load(&self, model: LoadRequest) -> BoxFuture<'static, Result<Arc<dyn Backend>, InferError>> {
        let llm = self.llm.clone();
        async move {
            let request = engine_of(&model)?;
            let text_model = TextModel::new(&model, &request)?;
            let llm = llm.load(request).await?;
            let engine = Some(Engine { bounds: EngineBounds::new(&model, &*llm), llm });
            Ok(Arc::new(TextModel { engine, ..text_model }) as Arc<dyn Backend>)
        }
        .boxed()
    }
}

/// The load of the engine in a model.
fn engine_of(model: &LoadRequest) -> Result<LoadRequest, InferError> {
    with_tokenizer(with_checkpoint(model, configure_engine)?)
}

/// The engine inside a text model sends events, so it has no outputs.
fn configure_engine(config: &mut ModelConfig) {
    config.max_batch_size = config.max_batch_size.max(MAX_ROWS);
    config.output.clear();
}

/// The loaded engine.
#[derive(Clone)]
struct Engine {
    llm: Arc<dyn Backend>,
    bounds: Arc<EngineBounds>,
}

/// A loaded text model. Clones share the engine.
#[derive(Clone)]
struct TextModel {
    /// Set once the engine is loaded.
    engine: Option<Engine>,
    encoder: Arc<Encoder>,
    limits: Limits,
    max_tokens: u32,
    /// Whether texts have the shape `[rows, 1]`. Otherwise they have the shape `[rows]`, because clients of TensorRT-LLM's text models
    /// read `text_output[0]`.
    is_nested: bool,
    is_decoupled: bool,
    has_lmdeploy_defaults: bool,
    add_special_tokens: bool,
    text_output: String,
    outputs: Vec<String>,
}

impl TextModel {
    fn new(model: &LoadRequest, engine: &LoadRequest) -> Result<Self, InferError> {
        let config = &model.config;
        let wrong = |message: String| InferError::invalid(format!("model `{}`: {message}", config.name));
        let dir = engine.config.parameter("gpt_model_path").unwrap_or_default();
        let tokenizer = match checkpoint::has_tokenizer(dir.as_ref()) {
            true => generation::tokenizer(dir.as_ref()).map_err(|error| wrong(error.to_string()))?,
            false => checkpoint::tokenizer(engine)?.0,
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
            engine: None,
            encoder: Arc::new(Encoder::new(tokenizer, dir.as_ref(), model)),
            limits: model.limits,
            max_tokens,
            is_nested: config.max_batch_size > 0 && text.dims != [-1],
            is_decoupled: config.is_decoupled(),
            // SGLang's model has the same tensors, but not these defaults.
            has_lmdeploy_defaults: is_lmdeploy_model(config) && !config.name.contains("sglang"),
            add_special_tokens: parameters::flag(config, "add_special_tokens")?.unwrap_or(true),
            text_output: text.name.clone(),
            outputs: config.output.iter().map(|output| output.name.clone()).collect(),
        })
    }

    fn engine(&self) -> &Engine {
        self.engine.as_ref().expect("the engine was loaded before the model serves")
    }

    fn llm(&self) -> &Arc<dyn Backend> {
        &self.engine().llm
    }
}

impl Backend for TextModel {
    fn infer(&self, request: InferRequest) -> Result<ResponseStream, InferError> {
        refuse_unsupported(&request)?;
        if let Some(stop) =
            request.input("stop").filter(|stop| stop.to_bool().is_some_and(|stop| stop.first() == Some(&true)))
        {
            let inputs = vec![stop.clone()];
            return self.llm().infer(InferRequest { inputs, requested_outputs: Vec::new(), ..request.clone() });
        }
        let prompts = prompts(&request)?;
        let streaming = first(&request, &STREAM)?.unwrap_or(false);
        self.check_streaming(streaming, prompts.len())?;
        prompts.iter().try_for_each(|prompt| self.encoder.check(prompt.len()))?;
        let num_bytes = request.inputs.iter().map(|tensor| tensor.data.len()).sum();
        let (model, runtime) = (self.clone(), Handle::current());
        if !encoder::is_long(num_bytes) {
            let runs = self.start(self.prepare(&request, &prompts, streaming)?)?;
            return Ok(ResponseStream::from_future(|sender| model.respond(request, runs, streaming, sender)));
        }
        Ok(ResponseStream::from_future(move |sender| async move {
            let (encoding, its_request) = (model.clone(), request.clone());
            let prepare = move || encoding.prepare(&its_request, &prompts, streaming);
            let Some(prepared) = encoder::on_blocking_thread(&runtime, num_bytes, &sender, prepare).await else {
                return;
            };
            let runs = prepared.flatten().and_then(|prepared| {
                let _guard = runtime.enter();
                model.start(prepared)
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

    fn sleeper(&self) -> Option<Arc<dyn Sleeper>> {
        self.llm().sleeper()
    }

    fn weights(&self) -> Option<Arc<dyn serving::Weights>> {
        self.llm().weights()
    }

    fn adapters(&self) -> Option<Arc<dyn Adapters>> {
        self.llm().adapters()
    }

    fn reset_prefix_cache(&self) -> BoxFuture<'_, bool> {
        self.llm().reset_prefix_cache()
    }

    fn is_ready(&self) -> bool {
        self.llm().is_ready()
    }

    fn drain(&self) -> BoxFuture<'_, ()> {
        self.llm().drain()
    }
}

/// Refuses inputs that would change the output if they were ignored.
fn refuse_unsupported(request: &InferRequest) -> Result<(), InferError> {
    for Tensor { name, .. } in &request.inputs {
        if let Some(Use::Refused(reason)) = input(name) {
            return Err(InferError::invalid(format!("input `{name}` is not supported: {reason}; leave it out")));
        }
    }
    Ok(())
}

/// The events of the engine, and the text for them.
type Run = (EventStream, RowText);

impl TextModel {
    /// Checks that the response to `num_prompts` prompts can be streamed.
    fn check_streaming(&self, streaming: bool, num_prompts: usize) -> Result<(), InferError> {
        if streaming && !self.is_decoupled {
            return Err(InferError::invalid(
                "the request asks for a stream, but this model is not decoupled; set `model_transaction_policy { decoupled: \
                 true }`, or do not ask for one",
            ));
        }
        if streaming && num_prompts != 1 {
            return Err(InferError::invalid(format!("{num_prompts} prompts in one stream; send a request for each")));
        }
        Ok(())
    }

    /// Starts requests on the engine.
    fn start(&self, prepared: Vec<(GenerateCall, RowText)>) -> Result<Vec<Run>, InferError> {
        prepared.into_iter().map(|(call, text)| Ok((self.llm().generate(call)?.into(), text))).collect()
    }
}
