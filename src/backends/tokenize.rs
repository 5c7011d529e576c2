//! `tokenize`: turns prompts into token ids, with the tensors of TensorRT-LLM's preprocessing model.

use std::sync::Arc;

use bytes::Bytes;
use futures::FutureExt as _;
use futures::future::BoxFuture;
use repository::ModelConfig;
use repository::proto::{self, ModelOutput};
use serving::{
    Backend, BackendFactory, DataType, ErrorKind, InferError, InferRequest, InferResponse, Limit, Limits, LoadRequest,
    Name, Parameter, ResponseStream, Tensor, TextModel,
};
use text::Tokenizer;
use tokio::runtime::Handle;

use crate::encoder::{self, Encoder};
use crate::layouts::keys::{self, TEXT_INPUTS, Use};
use crate::padding::pad_rows;
use crate::tensor_values::{strings, utf8};
use crate::words::WordList;
use crate::{checkpoint, parameters};

/// Largest number of ids in a padded output of several rows. A model with longer sequences allows more.
const MAX_PADDED_IDS: usize = 16 << 20;

/// Inputs that are returned unchanged, with the names of their outputs.
const PASSTHROUGH: [(&str, &str); 4] = [
    ("REQUEST_OUTPUT_LEN", "REQUEST_OUTPUT_LEN"),
    ("END_ID", "OUT_END_ID"),
    ("PAD_ID", "OUT_PAD_ID"),
    ("PROMPT_TABLE_EXTRA_ID", "OUT_PROMPT_TABLE_EXTRA_IDS"),
];

/// Texts that LMDeploy's clients send to get the ids of the begin and end tokens.
const BEGIN: &[u8] = b"<BOS>";
const END: &[u8] = b"<EOS>";

/// Loads `backend: "tokenize"`.
pub(crate) struct TokenizeFactory;

impl BackendFactory for TokenizeFactory {
    fn load(&self, model: LoadRequest) -> BoxFuture<'static, Result<Arc<dyn Backend>, InferError>> {
        let load = move || {
            let (tokenizer, dir) = checkpoint::tokenizer(&model)?;
            let preprocessor = Preprocessor {
                encoder: Encoder::new(tokenizer, &dir, &model),
                limits: model.limits,
                add_special_tokens: parameters::flag(&model.config, "add_special_tokens")?.unwrap_or(true),
                is_batched: model.config.max_batch_size > 0,
                outputs: model.config.output.iter().map(|output| Name::from(&output.name)).collect(),
                unsigned: unsigned(&model.config),
            };
            Ok(Arc::new(Tokenize(Arc::new(preprocessor))) as Arc<dyn Backend>)
        };
        async { tokio::task::spawn_blocking(load).await.map_err(|error| InferError::internal(error.to_string()))? }
            .boxed()
    }
}

fn unsigned(config: &ModelConfig) -> Vec<Name> {
    let is_unsigned = |output: &&ModelOutput| output.data_type() == proto::DataType::TypeUint32;
    config.output.iter().filter(is_unsigned).map(|output| Name::from(&output.name)).collect()
}

struct Tokenize(Arc<Preprocessor>);

struct Preprocessor {
    encoder: Encoder,
    /// Limits on the contents of one request.
    limits: Limits,
    add_special_tokens: bool,
    is_batched: bool,
    /// Outputs that the configuration declares.
    outputs: Vec<Name>,
    /// Outputs of type UINT32.
    unsigned: Vec<Name>,
}

impl Backend for Tokenize {
    fn infer(&self, request: InferRequest) -> Result<ResponseStream, InferError> {
        self.0.check(&request)?;
        let num_bytes = request.inputs.iter().map(|tensor| tensor.data.len()).sum();
        if !encoder::is_long(num_bytes) {
            return self.0.encode(&request).map(ResponseStream::ready);
        }
        let (preprocessor, runtime) = (self.0.clone(), Handle::current());
        Ok(ResponseStream::from_future(move |sender| async move {
            let encode = move || preprocessor.encode(&request);
            if let Some(done) = encoder::on_blocking_thread(&runtime, num_bytes, &sender, encode).await {
                sender.send(done.flatten()).await;
            }
        }))
    }

    fn text_model(&self) -> Option<TextModel> {
        Some(TextModel::Tokenizer { adds_special_tokens: self.0.add_special_tokens })
    }

    fn drain(&self) -> BoxFuture<'_, ()> {
        std::future::ready(()).boxed()
    }
}

impl Preprocessor {
    fn tokenizer(&self) -> &Tokenizer {
        &self.encoder.tokenizer
    }

    /// Checks the sizes of texts and lists of words, before any of them is encoded.
    fn check(&self, request: &InferRequest) -> Result<(), InferError> {
        for input in ["QUERY", "DECODER_QUERY"] {
            let Some(tensor) = request.input(input) else { continue };
            strings(tensor)?.iter().try_for_each(|text| self.encoder.check(text.len()))?;
        }
        for input in ["STOP_WORDS_DICT", "BAD_WORDS_DICT", "EMBEDDING_BIAS_WORDS"] {
            let Some(tensor) = request.input(input) else { continue };
            let words = strings(tensor)?;
            self.limits.check(Limit::Words, words.len().div_ceil(self.num_rows(tensor)))?;
            words.iter().try_for_each(|word| self.limits.check(Limit::WordBytes, word.len()))?;
        }
        Ok(())
    }

    fn encode(&self, request: &InferRequest) -> Result<InferResponse, InferError> {
        for tensor in &request.inputs {
            if let Some(Use::Refused(reason)) = keys::find(TEXT_INPUTS, &tensor.name) {
                let words = format!("input `{}` is not supported: {reason}; leave it out", tensor.name);
                return Err(InferError::new(ErrorKind::Unsupported, words));
            }
        }
        let mut outputs = Vec::new();
        self.encode_prompts(request, ("QUERY", "INPUT_ID", "REQUEST_INPUT_LEN"), &mut outputs)?;
        let decoder = ("DECODER_QUERY", "DECODER_INPUT_ID", "REQUEST_DECODER_INPUT_LEN");
        self.encode_prompts(request, decoder, &mut outputs)?;
        self.encode_words(request, "STOP_WORDS_DICT", "STOP_WORDS_IDS", &mut outputs)?;
        self.encode_words(request, "BAD_WORDS_DICT", "BAD_WORDS_IDS", &mut outputs)?;
        outputs.extend(self.embedding_bias(request)?);
        for (input, output) in PASSTHROUGH {
            outputs.extend(request.input(input).map(|tensor| Tensor { name: output.into(), ..tensor.clone() }));
        }
        if request.step.is_none() {
            self.add_defaults(request, &mut outputs);
        }
        outputs.retain(|tensor| self.outputs.contains(&tensor.name));
        // LMDeploy's models and clients use unsigned token ids, with the same bits.
        let is_unsigned =
            |tensor: &&mut Tensor| tensor.datatype == DataType::Int32 && self.unsigned.contains(&tensor.name);
        outputs.iter_mut().filter(is_unsigned).for_each(|tensor| tensor.datatype = DataType::Uint32);
        Ok(InferResponse { outputs, is_final: true, ..InferResponse::default() })
    }

    /// Rows of a request: its batch size, or 1.
    fn num_rows(&self, tensor: &Tensor) -> usize {
        let batch = tensor.shape.first().filter(|_| self.is_batched);
        batch.and_then(|&batch| usize::try_from(batch).ok()).unwrap_or(1).max(1)
    }

    /// `sizes` after the batch dimension, if there is one.
    fn shape(&self, num_rows: usize, sizes: &[usize]) -> Vec<i64> {
        let batch = self.is_batched.then_some(num_rows);
        batch.iter().chain(sizes).map(|&size| i64::try_from(size).expect("sizes of memory fit")).collect()
    }

    /// Token ids of one text for each row, padded to the longest, and their lengths.
    fn encode_prompts(
        &self,
        request: &InferRequest,
        (input, ids_output, length_output): (&str, &str, &str),
        outputs: &mut Vec<Tensor>,
    ) -> Result<(), InferError> {
        let Some(tensor) = request.input(input) else { return Ok(()) };
        let texts = strings(tensor)?;
        let num_rows = self.num_rows(tensor);
        if texts.len() != num_rows {
            return Err(InferError::invalid(format!(
                "input `{input}` holds {} texts for a batch of {num_rows}; send one each",
                texts.len()
            )));
        }
        let mut rows = Vec::with_capacity(num_rows);
        for text in &texts {
            // LMDeploy's clients end a session with a request without text.
            if text.is_empty() && self.unsigned.is_empty() {
                return Err(InferError::invalid(format!(
                    "input `{input}` is empty; send a prompt of at least one character"
                )));
            }
            rows.push(self.encode_text(request, input, text)?);
        }
        self.check_padded(num_rows, rows.iter().map(Vec::len).max().unwrap_or(0), input)?;
        let pad = request.input("PAD_ID").and_then(|tensor| tensor.to_i32()?.first().copied()).unwrap_or(0);
        let (width, ids) = pad_rows(rows.iter().map(Vec::as_slice), pad.cast_unsigned());
        let ids: Vec<i32> = ids.into_iter().map(u32::cast_signed).collect();
        let lengths: Vec<i32> = rows.iter().map(|row| i32::try_from(row.len()).unwrap_or(i32::MAX)).collect();
        outputs.push(Tensor::from_i32(ids_output, &self.shape(num_rows, &[width]), &ids));
        outputs.push(Tensor::from_i32(length_output, &self.shape(num_rows, &[1]), &lengths));
        Ok(())
    }

    fn encode_text(&self, request: &InferRequest, input: &str, text: &Bytes) -> Result<Vec<u32>, InferError> {
        let roles = self.tokenizer().roles();
        // LMDeploy's model returns -1 for a token that the tokenizer lacks.
        match (self.unsigned.is_empty(), text.as_ref()) {
            (false, BEGIN) => return Ok(vec![roles.bos.unwrap_or(u32::MAX)]),
            (false, END) => return Ok(vec![roles.eos.unwrap_or(u32::MAX)]),
            _ => {}
        }
        let add_special = add_special_tokens(request, self.add_special_tokens);
        let wrong = |error| InferError::invalid(format!("input `{input}`: {error}"));
        self.encoder.encode(utf8(input, text)?, add_special, wrong)
    }

    /// Refuses a batch whose padding to its longest row would be much larger than the request.
    fn check_padded(&self, num_rows: usize, width: usize, input: &str) -> Result<(), InferError> {
        let max_row = self.encoder.max_tokens.unwrap_or(0).max(MAX_PADDED_IDS / num_rows);
        if num_rows == 1 || width <= max_row {
            return Ok(());
        }
        Err(InferError::invalid(format!(
            "a row of input `{input}` has {width} tokens, at most {max_row} are taken in a batch of {num_rows}; send long \
             texts alone"
        )))
    }

    /// Adds defaults for inputs that the client did not send, as TensorRT-LLM's model does: the tokenizer's end and padding tokens,
    /// and a decoder prompt of padding. Not for steps of an ensemble, because the language model knows all end tokens of its
    /// checkpoint.
    fn add_defaults(&self, request: &InferRequest, outputs: &mut Vec<Tensor>) {
        let num_rows = request.input("QUERY").map_or(1, |tensor| self.num_rows(tensor));
        let roles = self.tokenizer().roles();
        let pad = roles.pad.or(roles.eos);
        let defaults = [
            ("OUT_END_ID", roles.eos),
            ("OUT_PAD_ID", pad),
            ("DECODER_INPUT_ID", pad),
            ("REQUEST_DECODER_INPUT_LEN", pad.and(Some(1))),
        ];
        for (name, value) in defaults {
            let Some(value) = value.filter(|_| outputs.iter().all(|tensor| tensor.name != name)) else { continue };
            let values = vec![value.cast_signed(); num_rows];
            outputs.push(Tensor::from_i32(name, &self.shape(num_rows, &[1]), &values));
        }
    }

    fn encode_words(
        &self,
        request: &InferRequest,
        input: &str,
        output: &str,
        outputs: &mut Vec<Tensor>,
    ) -> Result<(), InferError> {
        let Some(tensor) = request.input(input) else { return Ok(()) };
        let words = strings(tensor)?;
        let num_rows = self.num_rows(tensor);
        if words.is_empty() {
            return Ok(());
        }
        let mut lists = Vec::with_capacity(num_rows);
        for row in words.chunks(words.len().div_ceil(num_rows)) {
            let row: Vec<&str> = row.iter().map(|word| utf8(input, word)).collect::<Result<_, _>>()?;
            lists.push(WordList::encode(self.tokenizer(), &self.limits, &row)?);
        }
        let width = lists.iter().map(WordList::width).max().unwrap_or(1);
        self.check_padded(num_rows, width, input)?;
        let mut values = Vec::with_capacity(2 * width * num_rows);
        lists.iter().for_each(|list| list.write(width, &mut values));
        outputs.push(Tensor::from_i32(output, &self.shape(num_rows, &[2, width]), &values));
        Ok(())
    }

    /// A weight for each token of the vocabulary, from words and their weights.
    fn embedding_bias(&self, request: &InferRequest) -> Result<Option<Tensor>, InferError> {
        let Some(tensor) = request.input("EMBEDDING_BIAS_WORDS") else { return Ok(None) };
        let words = strings(tensor)?;
        let weights = request.input("EMBEDDING_BIAS_WEIGHTS").and_then(Tensor::to_f32).unwrap_or_default();
        if words.len() != weights.len() {
            return Err(InferError::invalid(format!(
                "`EMBEDDING_BIAS_WORDS` holds {} words and `EMBEDDING_BIAS_WEIGHTS` {} weights; send one weight for each word",
                words.len(),
                weights.len()
            )));
        }
        let num_rows = self.num_rows(tensor);
        let per_row = words.len().div_ceil(num_rows).max(1);
        let vocab_size = self.tokenizer().vocab_size();
        let mut biases = vec![0.0; num_rows * vocab_size];
        for (row, (words, weights)) in words.chunks(per_row).zip(weights.chunks(per_row)).enumerate() {
            for (word, weight) in words.iter().zip(weights) {
                let ids = self.tokenizer().encode(utf8("EMBEDDING_BIAS_WORDS", word)?, false);
                let ids = ids.map_err(|error| InferError::invalid(format!("`EMBEDDING_BIAS_WORDS`: {error}")))?;
                ids.iter().for_each(|&id| biases[row * vocab_size + id as usize] += weight);
            }
        }
        Ok(Some(Tensor::from_f32("EMBEDDING_BIAS", &self.shape(num_rows, &[vocab_size]), &biases)))
    }
}

/// The request's parameter `add_special_tokens`, or else `configured`. Prompts of chat templates have these tokens already.
pub(crate) fn add_special_tokens(request: &InferRequest, configured: bool) -> bool {
    match request.parameters.get("add_special_tokens") {
        Some(Parameter::Bool(add)) => *add,
        _ => configured,
    }
}
