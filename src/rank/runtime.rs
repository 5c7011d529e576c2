//! The runtimes of rank 0 and of the relay of its clients.

use tokio::runtime::Runtime;

use crate::error::RankError;

/// Default number of threads for HTTP: few threads share the work of a step without wake-ups between them.
const MAX_FRONT_THREADS: usize = 2;

/// A multi-thread runtime even for one thread, so that another thread can take over during `block_in_place`.
pub(crate) fn runtime_of(name: &str, threads: usize) -> Result<Runtime, RankError> {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.worker_threads(threads).thread_name(name).enable_all().build().map_err(RankError::Runtime)
}

/// The requested number of threads; for 0, one for each core, at most [`MAX_FRONT_THREADS`].
pub(crate) fn num_front_threads(requested: usize) -> usize {
    match requested {
        0 => std::thread::available_parallelism().map_or(1, usize::from).min(MAX_FRONT_THREADS),
        requested => requested,
    }
}
