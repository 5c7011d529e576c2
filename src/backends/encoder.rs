//! Encoding of clients' texts: bounded in size, and in how much of it goes on at once.
//!
//! A text of `n` bytes takes some 300 `n` bytes of memory while it is encoded, and half a microsecond of a core for each.

use std::path::Path;
use std::sync::{Arc, LazyLock};

use serving::{InferError, Limit, Limits, LoadRequest, ResponseSender};
use text::{Coverage, TextError, Tokenizer};
use tokio::runtime::Handle;
use tokio::sync::Semaphore;

/// Texts up to this size are encoded at once, longer ones on a thread of their own: about a millisecond's work.
const INLINE_BYTES: usize = 4096;

/// Bytes of texts that take one of [`PLACES`]; longer ones take more, up to all.
const BYTES_PER_PLACE: usize = 1 << 20;

/// Memory that is kept for the next text after a short one goes back to the system after one of this size.
const LARGE_BYTES: usize = 256 << 10;

/// Longest text for a tokenizer without a model beside it that says how long its sequences are.
const MAX_BYTES_ALONE: usize = 16 << 20;

/// A text of this size is encoded whatever the model, so that the model itself says that it is too long.
const LEAST_BYTES: usize = 64 << 10;

/// Where a tokenizer may drop characters or join them in one token, a text may be so many times longer than its tokens could
/// otherwise stand for, and at least [`BYTES_PER_PLACE`] long.
const DROPPED: usize = 16;

/// As many texts are encoded at once as there are cores.
static NUM_PLACES: LazyLock<usize> = LazyLock::new(|| std::thread::available_parallelism().map_or(1, usize::from));
static PLACES: LazyLock<Arc<Semaphore>> = LazyLock::new(|| Arc::new(Semaphore::new(*NUM_PLACES)));

/// A tokenizer that refuses texts which are too long for its model before it encodes them.
pub(crate) struct Encoder {
    pub(crate) tokenizer: Arc<Tokenizer>,
    /// Most bytes of a text.
    pub(crate) max_bytes: usize,
    /// Tokens of the longest sequence of the model beside the tokenizer, where there is one.
    pub(crate) max_tokens: Option<usize>,
}

impl Encoder {
    /// For prompts of the model whose checkpoint is in `dir`, if one is.
    pub(crate) fn new(tokenizer: Arc<Tokenizer>, dir: &Path, load: &LoadRequest) -> Self {
        let max_tokens = models::Config::from_dir(dir).ok().map(|config| config.max_position_embeddings);
        let max_bytes = max_prompt_bytes(&tokenizer, max_tokens, &load.limits);
        Self { tokenizer, max_bytes, max_tokens }
    }

    /// The token ids of `text`.
    ///
    /// # Errors
    /// When it is too long, or the tokenizer cannot encode it; `wrong` puts words to the latter.
    pub(crate) fn encode(
        &self,
        text: &str,
        add_special: bool,
        wrong: impl FnOnce(TextError) -> InferError,
    ) -> Result<Vec<u32>, InferError> {
        self.check(text.len())?;
        self.tokenizer.encode(text, add_special).map_err(wrong)
    }

    /// Refuses a text of `num_bytes` that no sequence of the model can hold.
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

/// Longest text in bytes that is encoded for a model of sequences of `max_tokens`, where that is known.
pub(crate) fn max_prompt_bytes(tokenizer: &Tokenizer, max_tokens: Option<usize>, limits: &Limits) -> usize {
    match limits.get(Limit::PromptBytes) {
        0 => max_tokens.map_or(MAX_BYTES_ALONE, |max_tokens| longest_text(tokenizer.coverage(), max_tokens)),
        configured => usize::try_from(configured).unwrap_or(usize::MAX),
    }
}

/// A text of more bytes has more than `max_tokens` tokens.
fn longest_text(coverage: Coverage, max_tokens: usize) -> usize {
    let longest = coverage.max_bytes.saturating_mul(max_tokens);
    if coverage.is_certain { longest.max(LEAST_BYTES) } else { longest.saturating_mul(DROPPED).max(BYTES_PER_PLACE) }
}

/// Whether the encoding of so many bytes is to be left to [`on_blocking_thread`].
pub(crate) fn is_long(num_bytes: usize) -> bool {
    num_bytes > INLINE_BYTES
}

/// Does `work`, which encodes so many bytes of texts, on a thread of `runtime` once there is a place for it. `None` when the
/// client of `sender` has left before.
///
/// # Errors
/// When the work broke off.
pub(crate) async fn on_blocking_thread<T: Send + 'static>(
    runtime: &Handle,
    num_bytes: usize,
    sender: &ResponseSender,
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<Result<T, InferError>> {
    let num_places = (1 + num_bytes / BYTES_PER_PLACE).min(*NUM_PLACES) as u32;
    let place = tokio::select! {
        biased;
        () = sender.cancelled() => return None,
        place = Arc::clone(&PLACES).acquire_many_owned(num_places) => place.expect("it is never closed"),
    };
    let client = sender.clone();
    let done = runtime.spawn_blocking(move || {
        // Whoever asked may leave while the work waits for a thread, too. Then nobody sees what comes of it.
        let done = (!client.is_cancelled()).then(work);
        drop(place);
        if num_bytes >= LARGE_BYTES {
            ipc::give_memory_back();
        }
        done
    });
    match done.await {
        Ok(done) => Some(Ok(done?)),
        Err(_) => Some(Err(InferError::internal("encoding the request's text broke off"))),
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
        let all_places = Arc::clone(&PLACES).acquire_many_owned(*NUM_PLACES as u32).await.unwrap();
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
            assert!(stream.next_response().now_or_never().is_none(), "there is no place");
        }
        streams.truncate(20);
        drop(all_places);
        let responses = streams.iter_mut().map(ResponseStream::next_response);
        assert!(futures::future::join_all(responses).await.iter().all(|response| matches!(response, Some(Ok(_)))));
        assert_eq!(DONE.load(SeqCst), 20, "those who left are not worked for");
        assert!(MOST.load(SeqCst) <= *NUM_PLACES, "{MOST:?}");
    }
}
