//! Computes the masks of constrained sequences on several threads, and sends them to the workers.

use std::sync::LazyLock;
use std::thread::available_parallelism;

use engine::{Engine, MaskJob, SampleMask};
use rayon::iter::{IntoParallelRefMutIterator, ParallelIterator};
use rayon::{ThreadPool, ThreadPoolBuilder};
use supervision::{MAX_MASK_WORDS, ToWorker};

use super::worker_group::{WorkerGroup, WorkerLoss};

/// Maximum number of threads that compute masks. A mask takes tens of microseconds, so the masks of 128 rows take less time than a
/// step of a model that needs a GPU.
const MAX_THREADS: usize = 8;

/// The step thread computes fewer masks than this itself.
const MIN_PARALLEL: usize = 4;

/// `None` on a machine with few cores, which the workers need.
static POOL: LazyLock<Option<ThreadPool>> = LazyLock::new(|| {
    let cores = available_parallelism().map_or(1, usize::from);
    let threads = (cores / 2).min(MAX_THREADS);
    let pool = || ThreadPoolBuilder::new().num_threads(threads).thread_name(|index| format!("masks-{index}")).build();
    (threads > 2).then(|| pool().ok()).flatten()
});

/// Computes and sends the masks that the oldest step in flight still needs.
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
