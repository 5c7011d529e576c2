//! Tokenizing of prompts: how long one may be, and how many are tokenized at once.

use std::path::Path;
use std::sync::{Arc, OnceLock};

use serving::{InferError, Limit, Limits};
use text::Tokenizer;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Most bytes of a prompt where the length of the model's sequences is not known.
const BYTES_WITHOUT_MODEL: usize = 4 << 20;

/// A prompt of this size is taken whatever the model, so that the model itself says that it is too long.
const LEAST_BYTES: usize = 64 << 10;

/// The longest prompt that a model can take, in bytes.
///
/// A token stands for at most as many bytes of text as the longest token of the vocabulary has, so a text of more than
/// that times the longest sequence has too many tokens, and need not be tokenized to know it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PromptBound {
    limits: Limits,
    max_bytes: usize,
}

impl PromptBound {
    /// For prompts of the model whose `config.json` lies in `dir`, encoded by `tokenizer`.
    pub(crate) fn new(limits: Limits, tokenizer: &Tokenizer, dir: Option<&Path>) -> Self {
        let max_len =
            dir.and_then(|dir| models::Config::from_dir(dir).ok()).map(|config| config.max_position_embeddings);
        let derived = max_len.map_or(BYTES_WITHOUT_MODEL, |len| len.saturating_mul(tokenizer.max_token_bytes()));
        let max_bytes = match limits.get(Limit::PromptBytes) {
            0 => derived.max(LEAST_BYTES),
            bytes => usize::try_from(bytes).unwrap_or(usize::MAX),
        };
        Self { limits, max_bytes }
    }

    /// What one request may contain.
    pub(crate) fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Refuses a prompt of `num_bytes` that cannot fit.
    ///
    /// # Errors
    /// With both sizes, when it is longer than the bound.
    pub(crate) fn check(&self, num_bytes: usize) -> Result<(), InferError> {
        match num_bytes > self.max_bytes {
            true => Err(Limit::PromptBytes.refuse(num_bytes as u64, self.max_bytes as u64)),
            false => Ok(()),
        }
    }
}

/// Waits until fewer long texts are being tokenized than this machine has cores. The permit is held meanwhile. Tokenizing
/// takes some hundred bytes of memory for each byte of text, so it is this and [`PromptBound`] that bound its memory.
pub(crate) async fn turn() -> OwnedSemaphorePermit {
    static TURNS: OnceLock<Arc<Semaphore>> = OnceLock::new();
    let num_cores = || std::thread::available_parallelism().map_or(1, usize::from);
    let turns = TURNS.get_or_init(|| Arc::new(Semaphore::new(num_cores())));
    Arc::clone(turns).acquire_owned().await.expect("nobody closes it")
}
