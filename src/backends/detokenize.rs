//! `detokenize`: turns token ids into text, with the tensors of TensorRT-LLM's postprocessing model.
//!
//! After a decoupled model it gets a few tokens at a time. It keeps one detokenizer for each sequence as long as the ensemble's
//! request runs, so that the joined pieces equal the text of the whole sequence.

use std::sync::Arc;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use generation::TextDecoder;
use repository::ModelConfig;
use serving::{
    Backend, BackendFactory, DataType, DetokenizerModel, InferError, InferRequest, InferResponse, LoadRequest, Name,
    ResponseStream, Shape, Tensor, TextModel,
};
use smallvec::SmallVec;
use text::{Detokenizer, Tokenizer};

use crate::{checkpoint, parameters};

/// Inputs that the postprocessing model of TensorRT-LLM up to 0.13 returns unchanged, as `OUT_` and their name.
const PASSTHROUGH: [&str; 5] =
    ["CUM_LOG_PROBS", "OUTPUT_LOG_PROBS", "CONTEXT_LOGITS", "GENERATION_LOGITS", "BATCH_INDEX"];

/// Loads `backend: "detokenize"`.
pub(crate) struct DetokenizeFactory;

impl BackendFactory for DetokenizeFactory {
    /// Makes log probabilities optional. Releases before 0.9 require them, but only some requests have them.
    fn complete(&self, config: &mut ModelConfig) {
        let passthrough = config.input.iter_mut().filter(|input| PASSTHROUGH.contains(&input.name.as_str()));
        passthrough.for_each(|input| input.optional = true);
    }

    fn load(&self, model: LoadRequest) -> BoxFuture<'static, Result<Arc<dyn Backend>, InferError>> {
        let load = move || {
            let skip_special_tokens = parameters::flag(&model.config, "skip_special_tokens")?.unwrap_or(true);
            let has_beams = model.config.output.iter().any(|output| output.name == "OUTPUT" && output.dims.len() > 1);
            let is_nested = has_beams && model.config.max_batch_size > 0;
            let (tokenizer, _) = checkpoint::tokenizer(&model)?;
            let is_declared = |name: &Name| model.config.output.iter().any(|output| *name == output.name.as_str());
            let named = PASSTHROUGH.map(|name| (Name::from(name), Name::from(format!("OUT_{name}"))));
            let passthrough = named.into_iter().filter(|(_, output)| is_declared(output)).collect();
            Ok(Arc::new(Detokenize { tokenizer, skip_special_tokens, is_nested, passthrough }) as Arc<dyn Backend>)
        };
        async { tokio::task::spawn_blocking(load).await.map_err(|error| InferError::internal(error.to_string()))? }
            .boxed()
    }
}

struct Detokenize {
    tokenizer: Arc<Tokenizer>,
    skip_special_tokens: bool,
    /// Whether texts are in rows of beams. Otherwise they are in one list, as from TensorRT-LLM's model, whose clients read
    /// `text_output[0]`.
    is_nested: bool,
    /// Inputs of [`PASSTHROUGH`] whose outputs the configuration declares, with the names of these outputs.
    passthrough: Arc<[(Name, Name)]>,
}

/// Unfinished texts of one request to an ensemble.
#[derive(Default)]
struct Texts {
    /// Sorted by key. Most requests have one text.
    of_rows: SmallVec<[(TextKey, Detokenizer); 1]>,
    /// The pieces that one request adds, row by row.
    pieces: String,
}

/// Key of a text: the sequence index, and the position in the rows and beams.
type TextKey = (i32, usize);

impl Texts {
    /// The index of a text, or the index to insert it at.
    fn find(&self, key: TextKey) -> Result<usize, usize> {
        self.of_rows.binary_search_by_key(&key, |(key, _)| *key)
    }
}

impl Backend for Detokenize {
    fn infer(&self, request: InferRequest) -> Result<ResponseStream, InferError> {
        let inputs = Inputs::of(&request);
        let tokens = Tokens::new(&inputs, self.is_nested)?;
        if let Some(num_decoded) = inputs.num_decoded {
            return self.remaining_text(&inputs, &tokens, &token_ids(num_decoded)?).map(ResponseStream::ready);
        }
        let texts = match &request.step {
            Some(step) => step.with_state(Texts::default, |texts| self.push(texts, &tokens, step.is_last)),
            None => self.push(&mut Texts::default(), &tokens, true),
        };
        let mut outputs = vec![texts];
        outputs.extend(self.passthrough.iter().filter_map(|(input, output)| {
            request.input(input).map(|tensor| Tensor { name: output.clone(), ..tensor.clone() })
        }));
        Ok(ResponseStream::ready(InferResponse { outputs, ..InferResponse::default() }))
    }

    fn text_model(&self) -> Option<TextModel> {
        let decoder = TextDecoder { tokenizer: self.tokenizer.clone(), skip_special_tokens: self.skip_special_tokens };
        let (is_nested, passthrough) = (self.is_nested, self.passthrough.clone());
        Some(TextModel::Detokenizer(DetokenizerModel { decoder, is_nested, passthrough }))
    }

    fn drain(&self) -> BoxFuture<'_, ()> {
        std::future::ready(()).boxed()
    }
}

impl Detokenize {
    /// Serves LMDeploy's form of a request: the client sends all tokens of a sequence, and the number of tokens whose text it has.
    fn remaining_text(
        &self,
        inputs: &Inputs,
        tokens: &Tokens,
        num_decoded: &[u32],
    ) -> Result<InferResponse, InferError> {
        let skip = inputs.skip_special_tokens.map(token_ids).transpose()?;
        let skip = skip.and_then(|skip| skip.first().copied()).map_or(self.skip_special_tokens, |skip| skip != 0);
        let text = |(row, ids): (usize, &[u32])| {
            let begin =
                num_decoded.get(row).or(num_decoded.first()).map_or(0, |&begin| (begin as usize).min(ids.len()));
            let mut text = Detokenizer::new(self.tokenizer.clone(), skip);
            ids[..begin].iter().for_each(|&id| text.push_into(id, &mut String::new()));
            let mut rest = String::new();
            ids[begin..].iter().for_each(|&id| text.push_into(id, &mut rest));
            text.finish_into(&mut rest);
            rest
        };
        let texts: Vec<String> = tokens.rows().enumerate().map(text).collect();
        let outputs = vec![Tensor::from_byte_strings("OUTPUT", &[texts.len() as i64], &texts)];
        Ok(InferResponse { outputs, ..InferResponse::default() })
    }

    /// The text that the new tokens of each row complete. Text that was held back is included if these are the last tokens.
    fn push(&self, texts: &mut Texts, tokens: &Tokens, is_last: bool) -> Tensor {
        let mut ends = SmallVec::<[usize; 4]>::new();
        texts.pieces.clear();
        for (row, ids) in tokens.rows().enumerate() {
            let key = (tokens.sequence_index, row);
            let place = texts.find(key).unwrap_or_else(|place| {
                let text = Detokenizer::new(self.tokenizer.clone(), self.skip_special_tokens);
                texts.of_rows.insert(place, (key, text));
                place
            });
            let Texts { of_rows, pieces, .. } = &mut *texts;
            let (_, text) = &mut of_rows[place];
            ids.iter().for_each(|&id| text.push_into(id, pieces));
            if tokens.sequence_end.unwrap_or(is_last) {
                text.finish_into(pieces);
            }
            ends.push(pieces.len());
        }
        let (mut each, mut begin) = (SmallVec::<[&str; 4]>::new(), 0);
        for end in ends {
            each.push(&texts.pieces[begin..end]);
            begin = end;
        }
        Tensor::from_byte_strings("OUTPUT", &tokens.output_shape, &each)
    }
}

/// The inputs of a request.
#[derive(Default)]
struct Inputs<'a> {
    tokens: Option<&'a Tensor>,
    lengths: Option<&'a Tensor>,
    sequence_index: Option<&'a Tensor>,
    sequence_end: Option<&'a Tensor>,
    /// Number of tokens whose text the client has, in LMDeploy's form.
    num_decoded: Option<&'a Tensor>,
    skip_special_tokens: Option<&'a Tensor>,
}

impl<'a> Inputs<'a> {
    /// Finds the inputs in one pass, because this runs for each token.
    fn of(request: &'a InferRequest) -> Self {
        let mut inputs = Self::default();
        for tensor in &request.inputs {
            let place = match tensor.name.as_str() {
                "TOKENS_BATCH" => &mut inputs.tokens,
                "SEQUENCE_LENGTH" => &mut inputs.lengths,
                "SEQUENCE_INDEX" => &mut inputs.sequence_index,
                "SEQUENCE_END" => &mut inputs.sequence_end,
                "sequence_length" => &mut inputs.num_decoded,
                "skip_special_tokens" => &mut inputs.skip_special_tokens,
                _ => continue,
            };
            *place = Some(tensor);
        }
        inputs
    }
}

/// The new tokens of each row and beam.
struct Tokens {
    ids: Ids,
    width: usize,
    /// Lengths of the rows. A length above `width` means the whole row.
    lengths: Ids,
    output_shape: Shape,
    sequence_index: i32,
    /// Whether these are the last tokens of their sequence. `None` if the request does not say so: then those of the last request
    /// are.
    sequence_end: Option<bool>,
}

impl Tokens {
    fn new(inputs: &Inputs, is_nested: bool) -> Result<Self, InferError> {
        let missing = || InferError::invalid("input `TOKENS_BATCH` is missing: it holds the token ids");
        let tensor = inputs.tokens.ok_or_else(missing)?;
        let ids = token_ids(tensor)?;
        let (&width, rows) = tensor.shape.split_last().ok_or_else(missing)?;
        let num_rows = rows.iter().product::<i64>().try_into().unwrap_or(0usize);
        let width = usize::try_from(width).unwrap_or(0);
        let lengths = match inputs.lengths.map(token_ids).transpose()? {
            None => SmallVec::from_elem(width as u32, num_rows),
            Some(lengths) if lengths.len() == num_rows => lengths,
            Some(lengths) => {
                return Err(InferError::invalid(format!(
                    "`SEQUENCE_LENGTH` holds {} lengths for the {num_rows} rows of `TOKENS_BATCH`; send one each",
                    lengths.len()
                )));
            }
        };
        let one_list = [num_rows as i64];
        let output_shape = Shape::from_slice(if is_nested { rows } else { &one_list });
        let first = |tensor: &Tensor| Some(i32::from_le_bytes(*tensor.data.first_chunk()?));
        let sequence_index = inputs.sequence_index.filter(|index| index.datatype == DataType::Int32);
        let sequence_index = sequence_index.and_then(first).unwrap_or(0);
        let sequence_end = inputs.sequence_end.filter(|end| end.datatype == DataType::Bool);
        let sequence_end = sequence_end.and_then(|end| end.data.first().map(|&end| end != 0));
        Ok(Self { ids, width, lengths, output_shape, sequence_index, sequence_end })
    }

    fn rows(&self) -> impl Iterator<Item = &[u32]> {
        let row_len = |length: u32| (length as usize).min(self.width);
        self.lengths.iter().enumerate().map(move |(row, &length)| &self.ids[row * self.width..][..row_len(length)])
    }
}

/// Token ids or lengths. After a decoupled model there is nearly always one.
type Ids = SmallVec<[u32; 8]>;

/// Non-negative integers of type INT32 or UINT32.
fn token_ids(tensor: &Tensor) -> Result<Ids, InferError> {
    let name = &tensor.name;
    if !matches!(tensor.datatype, DataType::Int32 | DataType::Uint32) {
        let found = tensor.datatype.name();
        return Err(InferError::invalid(format!("input `{name}` is {found}, expected INT32")));
    }
    let mut ids = Ids::new();
    for bytes in tensor.data.as_chunks().0 {
        ids.push(u32::from_le_bytes(*bytes));
    }
    if tensor.datatype == DataType::Int32
        && let Some(negative) = ids.iter().map(|id| id.cast_signed()).find(|id| *id < 0)
    {
        return Err(InferError::invalid(format!("input `{name}` holds {negative}, expected 0 or more")));
    }
    Ok(ids)
}
