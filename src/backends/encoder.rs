//! Encodes clients' texts, with bounds on their sizes and on the texts that are encoded at the same time.
//!
//! While a text of `n` bytes is encoded, it needs about 300 `n` bytes of memory and `n` / 2 microseconds of a core.

use std::path::Path;
use std::sync::{Arc, LazyLock};

use serving::{InferError, Limit, Limits, LoadRequest, ResponseSender};
use text::{Coverage, TextError, Tokenizer};
use tokio::runtime::Handle;
use tokio::sync::Semaphore;

/// Texts up to this size are encoded by the caller, which takes a millisecond or two. Longer ones are encoded on a blocking
/// thread.
const INLINE_BYTES: usize = 4096;

/// Bytes of text for each permit of [`PERMITS`]. Longer texts take several permits, at most all.
const BYTES_PER_PERMIT: usize = 1 << 20;

/// After a text of this size, the allocator returns free memory to the system.
const LARGE_BYTES: usize = 256 << 10;

/// Longest text for a tokenizer without a model, whose sequence length would bound it.
const MAX_BYTES_WITHOUT_MODEL: usize = 16 << 20;

/// A text up to this size is encoded for every model, so that the model itself returns the error for too many tokens.
const MIN_BOUND_BYTES: usize = 64 << 10;

/// Factor on the bound for tokenizers that may drop characters or join any number of them in one token. The bound is then at least
/// [`BYTES_PER_PERMIT`].
const UNCERTAIN_COVERAGE_FACTOR: usize = 16;

/// One permit for each core.
static NUM_PERMITS: LazyLock<usize> = LazyLock::new(|| std::thread::available_parallelism().map_or(1, usize::from));
static PERMITS: LazyLock<Arc<Semaphore>> = LazyLock::new(|| Arc::new(Semaphore::new(*NUM_PERMITS)));

/// A tokenizer that refuses texts that are too long for its model, without encoding them.
pub(crate) struct Encoder {
    pub(crate) tokenizer: Arc<Tokenizer>,
    /// Largest size of a text in bytes.
    pub(crate) max_bytes: usize,
    /// Longest sequence of the model that belongs to the tokenizer, in tokens; `None` without such a model.
    pub(crate) max_tokens: Option<usize>,
}

impl Encoder {
    /// An encoder for prompts of the model whose checkpoint is in `dir`, if there is one.
    pub(crate) fn new(tokenizer: Arc<Tokenizer>, dir: &Path, load: &LoadRequest) -> Self {
        let max_tokens = models::Config::from_dir(dir).ok().map(|config| config.max_position_embeddings);
        let max_bytes = max_prompt_bytes(&tokenizer, max_tokens, &load.limits);
        Self { tokenizer, max_bytes, max_tokens }
    }

    /// The token ids of `text`.
    ///
    /// # Errors
    /// When it is too long, or the tokenizer cannot encode it. `wrong` converts an error of the tokenizer.
    pub(crate) fn encode(
        &self,
        text: &str,
        add_special: bool,
        wrong: impl FnOnce(TextError) -> InferError,
    ) -> Result<Vec<u32>, InferError> {
        self.check(text.len())?;
        self.tokenizer.encode(text, add_special).map_err(wrong)
    }

    /// Checks the size of a text.
    ///
    /// # Errors
    /// When the text is longer than the bound. The error has both sizes.
    pub(crate) fn check(&self, num_bytes: usize) -> Result<(), InferError> {
        match num_bytes > self.max_bytes {
            true => Err(Limit::PromptBytes.refuse(num_bytes as u64, self.max_bytes as u64)),
            false => Ok(()),
        }
    }
}

/// The bound on a text in bytes, for a model whose sequences have at most `max_tokens`; `None` without a model.
pub(crate) fn max_prompt_bytes(tokenizer: &Tokenizer, max_tokens: Option<usize>, limits: &Limits) -> usize {
    match limits.get(Limit::PromptBytes) {
        0 => max_tokens.map_or(MAX_BYTES_WITHOUT_MODEL, |max_tokens| longest_text(tokenizer.coverage(), max_tokens)),
        configured => usize::try_from(configured).unwrap_or(usize::MAX),
    }
}

/// The bound on a text: a longer one has more than `max_tokens` tokens.
fn longest_text(coverage: Coverage, max_tokens: usize) -> usize {
    let longest = coverage.max_bytes.saturating_mul(max_tokens);
    if coverage.is_certain {
        longest.max(MIN_BOUND_BYTES)
    } else {
        longest.saturating_mul(UNCERTAIN_COVERAGE_FACTOR).max(BYTES_PER_PERMIT)
    }
}

/// Whether texts of `num_bytes` in all must be encoded by [`on_blocking_thread`].
pub(crate) fn is_long(num_bytes: usize) -> bool {
    num_bytes > INLINE_BYTES
}

/// Runs `work`, which encodes `num_bytes` of texts, on a blocking thread of `runtime`, as soon as there are permits. `None` if the
/// client of `sender` leaves before that.
///
/// # Errors
/// When the work panics.
pub(crate) async fn on_blocking_thread<T: Send + 'static>(
    runtime: &Handle,
    num_bytes: usize,
    sender: &ResponseSender,
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<Result<T, InferError>> {
    let num_permits = (1 + num_bytes / BYTES_PER_PERMIT).min(*NUM_PERMITS) as u32;
    let permit = tokio::select! {
        biased;
        () = sender.cancelled() => return None,
        permit = Arc::clone(&PERMITS).acquire_many_owned(num_permits) => permit.expect("the semaphore is never closed"),
    };
    let client = sender.clone();
    let done = runtime.spawn_blocking(move || {
        // The client may have left while the work waited for a thread.
        let done = (!client.is_cancelled()).then(work);
        drop(permit);
        if num_bytes >= LARGE_BYTES {
            ipc::give_memory_back();
        }
        done
    });
    match done.await {
        Ok(done) => Some(Ok(done?)),
        Err(_) => Some(Err(InferError::internal("encoding the request's text was interrupted by a panic"))),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

    use futures::FutureExt as _;
    use serving::{InferResponse, ResponseStream};

    use super::*;

    #[test]
    fn the_longest_text_follows_from_the_longest_token() {
        let coverage = |is_certain| Coverage { max_bytes: 100, is_certain };
        assert_eq!(longest_text(coverage(true), 2048), 204_800);
        assert_eq!(longest_text(coverage(true), 2), 65_536);
        assert_eq!(longest_text(coverage(false), 2048), 3_276_800);
        assert_eq!(longest_text(coverage(false), 2), 1 << 20);
        assert_eq!(longest_text(coverage(true), usize::MAX), usize::MAX);
    }

    #[tokio::test]
    async fn no_more_texts_are_encoded_at_once_than_there_are_cores_and_none_for_a_client_that_left() {
        static RUNNING: AtomicUsize = AtomicUsize::new(0);
        static MOST: AtomicUsize = AtomicUsize::new(0);
        static DONE: AtomicUsize = AtomicUsize::new(0);
        let work = || {
            MOST.fetch_max(RUNNING.fetch_add(1, SeqCst) + 1, SeqCst);
            std::thread::sleep(std::time::Duration::from_millis(5));
            RUNNING.fetch_sub(1, SeqCst);
            DONE.fetch_add(1, SeqCst);
        };
        let all_permits = Arc::clone(&PERMITS).acquire_many_owned(*NUM_PERMITS as u32).await.unwrap();
        let begin = |_| {
            ResponseStream::from_future(move |sender| async move {
                let done = on_blocking_thread(&Handle::current(), 5000, &sender, work).await;
                if let Some(Ok(())) = done {
                    sender.send(Ok(InferResponse { is_final: true, ..InferResponse::default() })).await;
                }
            })
        };
        let mut streams: Vec<ResponseStream> = (0..40).map(begin).collect();
        for stream in &mut streams {
            assert!(stream.next_response().now_or_never().is_none(), "there is no permit");
        }
        streams.truncate(20);
        drop(all_permits);
        let responses = streams.iter_mut().map(ResponseStream::next_response);
        assert!(futures::future::join_all(responses).await.iter().all(|response| matches!(response, Some(Ok(_)))));
        assert_eq!(DONE.load(SeqCst), 20, "texts of clients that have left are not encoded");
        assert!(MOST.load(SeqCst) <= *NUM_PERMITS, "{MOST:?}");
    }
}
