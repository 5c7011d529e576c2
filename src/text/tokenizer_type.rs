/// Which files of a checkpoint are read, and by which rules: `tokenizer_type` of TensorRT-LLM's preprocessing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TokenizerType {
    /// `tokenizer.json`, else `tokenizer.model` or `spiece.model`, else `vocab.json` with `merges.txt`.
    #[default]
    Auto,
    /// `tokenizer.model` first; begins a text with `<s>`.
    Llama,
    /// `spiece.model` or `tokenizer.model` first; ends a text with `</s>`.
    T5,
}

impl std::str::FromStr for TokenizerType {
    type Err = String;

    /// # Errors
    /// For another name; the message lists the valid ones.
    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "auto" => Ok(Self::Auto),
            "llama" => Ok(Self::Llama),
            "t5" => Ok(Self::T5),
            other => Err(format!("`tokenizer_type` is `{other}`, expected `auto`, `llama` or `t5`")),
        }
    }
}
