use std::path::PathBuf;

/// Why a tokenizer could not be loaded, or a text not be encoded.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // Fields are named by their messages.
pub enum TextError {
    #[error("`{}` has no `tokenizer.json`, `tokenizer.model`, or `vocab.json` with `merges.txt`; copy the checkpoint's there{hint}", .dir.display())]
    NoTokenizer { dir: PathBuf, hint: &'static str },
    #[error("cannot read `{}`", .path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("`{}` is no tokenizer that can be read: {reason}; copy it from the checkpoint again", .path.display())]
    Parse { path: PathBuf, reason: String },
    #[error("`{}` has tiktoken's ranks, as in the original files of Llama 3, which are not read; take `tokenizer.json` of the same model in the form of Hugging Face", .path.display())]
    Tiktoken { path: PathBuf },
    #[error("`{}` has the decoder `{decoder}`, whose text cannot be streamed; expected one of {expected}", .path.display())]
    Decoder { path: PathBuf, decoder: String, expected: &'static str },
    #[error("`{}` names the class `{class}`, whose `vocab.json` is not known here; expected `{expected}`, or a `tokenizer.json`", .path.display())]
    Class { path: PathBuf, class: String, expected: String },
    #[error("`{}` gives the token id {id}, expected at most {max}; copy the file from the checkpoint again", .path.display())]
    TokenId { path: PathBuf, id: u32, max: u32 },
    #[error("the chat template {origin}: {reason}")]
    ChatTemplate { origin: String, reason: String },
    #[error("the text of {num_bytes} bytes cannot be encoded: {reason}")]
    Encode { num_bytes: usize, reason: String },
}
