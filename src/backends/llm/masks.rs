//! The masks of constrained sequences: computed on several threads, sent to the workers.

use std::sync::LazyLock;
use std::thread::available_parallelism;

use engine::{Engine, MaskJob, SampleMask};
use rayon::iter::{IntoParallelRefMutIterator, ParallelIterator};
use rayon::{ThreadPool, ThreadPoolBuilder};
use supervision::{MAX_MASK_WORDS, ToWorker};

use super::worker_group::{WorkerGroup, WorkerLoss};

/// Threads that compute masks, beside the step thread of each model. Some tens of microseconds a mask and 128 rows are then less
/// than a step of a model of the size that needs a GPU.
const MAX_THREADS: usize = 8;

/// Fewer jobs than this are done by the step thread itself.
const MIN_PARALLEL: usize = 4;

/// `None` on a machine whose few cores the workers need.
static POOL: LazyLock<Option<ThreadPool>> = LazyLock::new(|| {
    let cores = available_parallelism().map_or(1, usize::from);
    let threads = (cores / 2).min(MAX_THREADS);
    let pool = || ThreadPoolBuilder::new().num_threads(threads).thread_name(|index| format!("masks-{index}")).build();
    (threads > 2).then(|| pool().ok()).flatten()
});

/// Computes the masks that the workers need for the oldest step in flight, and sends them, if that was not done yet.
pub(super) fn send_masks(engine: &mut Engine, group: &mut WorkerGroup) -> Result<(), WorkerLoss> {
    let mut jobs = engine.mask_jobs();
    if jobs.is_empty() {
        return Ok(());
    }
    match POOL.as_ref().filter(|_| jobs.len() >= MIN_PARALLEL) {
        Some(pool) => pool.install(|| jobs.par_iter_mut().for_each(MaskJob::run)),
        None => jobs.iter_mut().for_each(MaskJob::run),
    }
    let mut batch: Vec<SampleMask> = Vec::new();
    let mut num_words = 0;
    for mask in engine.finish_masks(jobs) {
        if num_words + mask.words.len() > MAX_MASK_WORDS && !batch.is_empty() {
            group.broadcast(&ToWorker::Masks(std::mem::take(&mut batch)))?;
            num_words = 0;
        }
        num_words += mask.words.len();
        batch.push(mask);
    }
    group.broadcast(&ToWorker::Masks(batch))
}
