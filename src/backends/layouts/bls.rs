//! TensorRT-LLM's `tensorrt_llm_bls`: text to text by requests to the models `preprocessing`, `tensorrt_llm` and `postprocessing` of
//! the same repository.

use std::sync::{Arc, OnceLock, Weak};

use futures::FutureExt as _;
use futures::future::BoxFuture;
use generation::Generator;
use generation::input_names::RELEASES;
use repository::ModelConfig;
use repository::proto::ModelInput;
use serving::{
    Adapters, Backend, BackendFactory, EnsembleStep, EventStream, GenerateCall, InferError, InferRequest,
    InferResponse, LoadRequest, Name, ResponseSender, ResponseStream, Server, Sleeper, Tensor, TextOutput, TextOutputs,
};

use super::engine_request::{Renames, renamed, selected};
use super::keys::Use;
use crate::parameters;

const PREPROCESSING: &str = "preprocessing";
const POSTPROCESSING: &str = "postprocessing";

/// Inputs of `preprocessing`.
const TO_PREPROCESSING: &Renames = &[
    ("text_input", "QUERY"),
    ("decoder_text_input", "DECODER_QUERY"),
    ("max_tokens", "REQUEST_OUTPUT_LEN"),
    ("bad_words", "BAD_WORDS_DICT"),
    ("stop_words", "STOP_WORDS_DICT"),
    ("embedding_bias_words", "EMBEDDING_BIAS_WORDS"),
    ("embedding_bias_weights", "EMBEDDING_BIAS_WEIGHTS"),
    ("end_id", "END_ID"),
    ("pad_id", "PAD_ID"),
];

/// Outputs of `preprocessing`, which are inputs of the language model.
const FROM_PREPROCESSING: &Renames = &[
    ("INPUT_ID", "input_ids"),
    ("REQUEST_INPUT_LEN", "input_lengths"),
    ("DECODER_INPUT_ID", "decoder_input_ids"),
    ("REQUEST_DECODER_INPUT_LEN", "decoder_input_lengths"),
    ("REQUEST_OUTPUT_LEN", "request_output_len"),
    ("BAD_WORDS_IDS", "bad_words_list"),
    ("STOP_WORDS_IDS", "stop_words_list"),
    ("EMBEDDING_BIAS", "embedding_bias"),
    ("OUT_END_ID", "end_id"),
    ("OUT_PAD_ID", "pad_id"),
];

/// Outputs of the language model, which are inputs of `postprocessing`.
const TO_POSTPROCESSING: &Renames = &[
    ("output_ids", "TOKENS_BATCH"),
    ("sequence_length", "SEQUENCE_LENGTH"),
    ("sequence_index", "SEQUENCE_INDEX"),
    ("sequence_end", "SEQUENCE_END"),
];

/// The output of text.
const TEXT: &str = "text_output";

/// Outputs of `postprocessing`.
const FROM_POSTPROCESSING: &Renames = &[("OUTPUT", TEXT)];

/// Inputs of the language model, which have other names there.
const RENAMED: &Renames = &[
    ("top_k", "runtime_top_k"),
    ("top_p", "runtime_top_p"),
    ("min_p", "runtime_min_p"),
    ("length_penalty", "len_penalty"),
    ("stream", "streaming"),
];

const IMAGES: [&str; 4] = ["image_input", "image_bytes_input", "image_url_input", "video_bytes_input"];
const DRAFT: [&str; 2] = ["num_draft_tokens", "use_draft_logits"];

/// What becomes of an input; `None` for an unknown one.
pub(super) fn input(name: &str) -> Option<Use> {
    if IMAGES.contains(&name) {
        return Some(Use::Refused("models read text only"));
    }
    if DRAFT.contains(&name) {
        return Some(Use::Ignored("drafts are a matter of the model's parameters; answers are the same without"));
    }
    if TO_PREPROCESSING.iter().any(|(input, _)| *input == name) {
        return Some(Use::Used("handed to `preprocessing`"));
    }
    super::keys::find(super::keys::LLM_INPUTS, renamed(RENAMED, name)).or(match name {
        "prompt_table_extra_id" => Some(Use::Ignored("it belongs to `prompt_embedding_table`")),
        _ => None,
    })
}

/// The server that runs the other models. It is set after its construction.
#[derive(Default)]
pub(super) struct ServerLink(OnceLock<Weak<Server>>);

impl ServerLink {
    pub(super) fn attach(&self, server: &Arc<Server>) {
        let _ = self.0.set(Arc::downgrade(server));
    }

    fn server(&self) -> Result<Arc<Server>, InferError> {
        self.0.get().and_then(Weak::upgrade).ok_or_else(|| InferError::unavailable("the server has stopped"))
    }
}

/// Loads `tensorrt_llm_bls`.
pub(super) struct BlsFactory {
    pub(super) server: Arc<ServerLink>,
}

impl BackendFactory for BlsFactory {
    fn load(&self, model: LoadRequest) -> BoxFuture<'static, Result<Arc<dyn Backend>, InferError>> {
        let config = &model.config;
        let bls = parameters::flag(config, "accumulate_tokens").map(|accumulate| Bls {
            link: self.server.clone(),
            language_model: config.parameter("tensorrt_llm_model_name").unwrap_or("tensorrt_llm").to_owned(),
            accumulate: accumulate.unwrap_or(false),
            is_batched: config.max_batch_size > 0,
            reshaped: reshaped_inputs(config),
            outputs: config.output.iter().map(|output| Name::from(&output.name)).collect(),
        });
        std::future::ready(bls.map(|bls| Arc::new(bls) as Arc<dyn Backend>)).boxed()
    }
}

#[derive(Clone)]
struct Bls {
    link: Arc<ServerLink>,
    language_model: String,
    accumulate: bool,
    outputs: Vec<Name>,
    is_batched: bool,
    /// Inputs with a `reshape`, and the shapes that clients send, without the batch.
    reshaped: Vec<(Name, Vec<i64>)>,
}

/// Inputs with a `reshape` whose shape for clients is fixed.
fn reshaped_inputs(config: &ModelConfig) -> Vec<(Name, Vec<i64>)> {
    let is_fixed = |input: &&ModelInput| input.reshape.is_some() && input.dims.iter().all(|dim| *dim >= 0);
    config.input.iter().filter(is_fixed).map(|input| (Name::from(&input.name), input.dims.clone())).collect()
}

impl Bls {
    /// Restores the shapes that the client sent, because the other models have a `reshape` of their own.
    fn undo_reshapes(&self, inputs: &mut [Tensor]) {
        for tensor in inputs {
            let reshaped = self.reshaped.iter().find(|(name, _)| *name == tensor.name);
            let Some((_, dims)) = reshaped else { continue };
            tensor.shape.truncate(usize::from(self.is_batched));
            tensor.shape.extend_from_slice(dims);
        }
    }
}

impl Backend for Bls {
    fn infer(&self, mut request: InferRequest) -> Result<ResponseStream, InferError> {
        self.undo_reshapes(&mut request.inputs);
        for name in IMAGES {
            if request.input(name).is_some() {
                return Err(InferError::invalid(format!(
                    "input `{name}` is not supported: models read text only; leave it out"
                )));
            }
        }
        let models = Models::find(&self.link, &self.language_model)?;
        let bls = self.clone();
        Ok(ResponseStream::from_future(|sender| async move {
            if let Err(error) = bls.run(&request, &models, &sender).await {
                sender.send(Err(error)).await;
            }
        }))
    }

    fn generator(&self) -> Option<Generator> {
        self.link.server().ok()?.generator(&self.language_model, "").ok()?
    }

    fn generate(&self, call: GenerateCall) -> Result<ResponseStream, InferError> {
        let model_name = Name::from(&self.language_model);
        let call = GenerateCall { model_name, model_version: Name::default(), ..call };
        self.link.server()?.generate(call).map(EventStream::into_responses)
    }

    fn adapters(&self) -> Option<Arc<dyn Adapters>> {
        self.link.server().ok()?.adapters_of(&self.language_model)
    }

    fn sleeper(&self) -> Option<Arc<dyn Sleeper>> {
        self.link.server().ok()?.sleeper_of(&self.language_model)
    }

    fn weights(&self) -> Option<Arc<dyn serving::Weights>> {
        self.link.server().ok()?.weights_of(&self.language_model)
    }

    fn reset_prefix_cache(&self) -> BoxFuture<'_, bool> {
        async {
            let Ok(server) = self.link.server() else { return false };
            server.reset_prefix_cache(Some(&self.language_model)).await.is_ok()
        }
        .boxed()
    }

    fn is_ready(&self) -> bool {
        let names = [PREPROCESSING, self.language_model.as_str(), POSTPROCESSING];
        self.link.server().is_ok_and(|server| names.iter().all(|name| server.model_is_ready(name, "") == Ok(true)))
    }

    fn is_complete(&self) -> bool {
        let names = [PREPROCESSING, self.language_model.as_str(), POSTPROCESSING];
        self.link.server().is_ok_and(|server| names.iter().all(|name| server.model_is_loaded(name)))
    }

    fn drain(&self) -> BoxFuture<'_, ()> {
        std::future::ready(()).boxed()
    }
}

/// The current configurations of the other models.
struct Models {
    server: Arc<Server>,
    preprocessing: Arc<ModelConfig>,
    language: Arc<ModelConfig>,
    postprocessing: Arc<ModelConfig>,
}

impl Models {
    fn find(link: &ServerLink, language_model: &str) -> Result<Self, InferError> {
        let server = link.server()?;
        let config = |name: &str| server.model_config(name, "");
        Ok(Self {
            preprocessing: config(PREPROCESSING)?,
            language: config(language_model)?,
            postprocessing: config(POSTPROCESSING)?,
            server,
        })
    }

    /// Sends a request to a model.
    fn infer(
        &self,
        config: &ModelConfig,
        from: &InferRequest,
        inputs: Vec<Tensor>,
        step: Option<EnsembleStep>,
    ) -> Result<ResponseStream, InferError> {
        self.server.infer_for_model(InferRequest { step, ..model_request(config, from, inputs) })
    }
}

/// A request to a model, without inputs that it does not declare.
fn model_request(config: &ModelConfig, from: &InferRequest, inputs: Vec<Tensor>) -> InferRequest {
    let declared = |name: &str| config.input.iter().any(|input| input.name == name);
    InferRequest {
        model_name: Name::from(&config.name),
        model_version: Name::default(),
        inputs: inputs.into_iter().filter(|tensor| declared(&tensor.name)).collect(),
        requested_outputs: Vec::new(),
        step: None,
        ..from.clone()
    }
}

impl Bls {
    async fn run(&self, request: &InferRequest, models: &Models, sender: &ResponseSender) -> Result<(), InferError> {
        let mut text = TextState::default();
        let inputs = selected(TO_PREPROCESSING, &request.inputs);
        let mut stream = models.infer(&models.preprocessing, request, inputs, Some(text.step.clone()))?;
        let prompt = only_response(&mut stream, PREPROCESSING).await?;
        let generate = model_request(&models.language, request, language_inputs(request, &prompt, models));
        let text_outputs = self.text_outputs(&generate, request, models)?;
        text.is_decoded = text_outputs.is_some();
        let mut generated = match text_outputs {
            Some(outputs) => models.server.infer_text_for_model(generate, outputs)?,
            None => models.server.infer_for_model(generate)?,
        };
        sender.mark_scheduled();
        loop {
            let Some(response) = generated.next_response().await.transpose()? else { return Ok(()) };
            let is_final = response.is_final;
            if response.outputs.is_empty() {
                sender.send(Ok(InferResponse { is_final, ..InferResponse::default() })).await;
            } else {
                let response = self.postprocess(request, models, response, &mut text).await?;
                if !sender.send(Ok(response)).await {
                    return Ok(());
                }
            }
            if is_final {
                return Ok(());
            }
        }
    }

    /// The outputs, for a language model that makes the text itself. `None` where each response is a request to `postprocessing`: a
    /// trace shows these requests, and one response to several rows has several texts.
    fn text_outputs(
        &self,
        generate: &InferRequest,
        request: &InferRequest,
        models: &Models,
    ) -> Result<Option<TextOutputs>, InferError> {
        let num_rows = generate.inputs.first().and_then(|tensor| tensor.shape.first()).copied().unwrap_or(1);
        if request.trace.is_some() || (num_rows > 1 && models.language.max_batch_size > 0) {
            return Ok(None);
        }
        let generated = models.language.output.iter().map(|output| Name::from(&output.name));
        let generated = generated.map(|name| (name.clone(), TextOutput::Generated(name)));
        let outputs = generated.chain([(Name::new_static(TEXT), TextOutput::Text)]);
        let outputs = outputs.filter(|(name, _)| self.returns(request, name)).collect();
        models.server.text_outputs(&models.language.name, POSTPROCESSING, outputs)
    }

    fn returns(&self, request: &InferRequest, output: &Name) -> bool {
        self.outputs.contains(output) && request.wants_output(output.as_str())
    }

    async fn postprocess(
        &self,
        request: &InferRequest,
        models: &Models,
        mut response: InferResponse,
        text: &mut TextState,
    ) -> Result<InferResponse, InferError> {
        let is_final = response.is_final;
        if !text.is_decoded {
            let inputs = selected(TO_POSTPROCESSING, &response.outputs);
            let mut step = text.step.clone();
            step.is_last = is_final;
            let mut stream = models.infer(&models.postprocessing, request, inputs, Some(step))?;
            let detokenized = only_response(&mut stream, POSTPROCESSING).await?;
            response.outputs.extend(selected(FROM_POSTPROCESSING, &detokenized.outputs));
            response.outputs.retain(|tensor| self.returns(request, &tensor.name));
        }
        if self.accumulate {
            let texts = response.outputs.iter_mut().filter(|tensor| tensor.name == TEXT);
            texts.for_each(|output| *output = text.accumulate(output));
        }
        Ok(InferResponse { outputs: response.outputs, is_final, id: request.id.clone(), ..InferResponse::default() })
    }
}

/// State of one request: that of `postprocessing`, and the text so far with `accumulate_tokens`.
#[derive(Default)]
struct TextState {
    step: EnsembleStep,
    /// Whether responses of the language model have their text.
    is_decoded: bool,
    texts: Vec<Vec<u8>>,
}

impl TextState {
    /// Adds the pieces of `output`. Returns the whole texts so far.
    fn accumulate(&mut self, output: &Tensor) -> Tensor {
        for (row, piece) in output.to_byte_strings().unwrap_or_default().iter().enumerate() {
            if self.texts.len() <= row {
                self.texts.push(Vec::new());
            }
            self.texts[row].extend_from_slice(piece);
        }
        Tensor::from_byte_strings(output.name.clone(), &output.shape, &self.texts)
    }
}

/// The inputs of the language model: outputs of `preprocessing`, and the client's other inputs.
fn language_inputs(request: &InferRequest, prompt: &InferResponse, models: &Models) -> Vec<Tensor> {
    let is_declared = |name: &str| models.language.input.iter().any(|input| input.name == name);
    let is_encoded = |tensor: &&Tensor| TO_PREPROCESSING.iter().any(|(input, _)| tensor.name == *input);
    let mut inputs = selected(FROM_PREPROCESSING, &prompt.outputs);
    inputs.extend(request.inputs.iter().filter(|tensor| !is_encoded(tensor)).map(|tensor| {
        let name = renamed(RENAMED, tensor.name.as_str());
        let releases = RELEASES.iter().find(|(earlier, later)| [*earlier, *later].contains(&name));
        let name = releases.map_or(name, |&(earlier, later)| if is_declared(later) { later } else { earlier });
        Tensor { name: name.into(), ..tensor.clone() }
    }));
    inputs
}

/// The response of a model that sends one.
async fn only_response(stream: &mut ResponseStream, model: &str) -> Result<InferResponse, InferError> {
    stream.next_response().await.ok_or_else(|| InferError::internal(format!("`{model}` gave no answer")))?
}
