//! Computes the masks of constrained sequences on threads of their own, so that none blocks the step thread.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, LazyLock, Mutex};
use std::thread::available_parallelism;
use std::time::Duration;

use engine::{MaskJob, SampleMask};
use rayon::{ThreadPool, ThreadPoolBuilder};
use supervision::{MAX_MASK_WORDS, ToWorker};

use super::inbox::{Inbox, Message};
use super::worker_group::{WorkerGroup, WorkerLoss};

/// Maximum number of threads that compute masks. A mask takes tens of microseconds, so the masks of 128 rows take less time than a
/// step of a model that needs a GPU.
const MAX_THREADS: usize = 8;

/// The niceness of threads for sequences whose masks were late.
const NICENESS: i32 = 5;

/// The shortest time that a step waits for masks. Threads take part of it to wake up.
const MIN_WAIT: Duration = Duration::from_millis(1);

/// The longest time that a step waits for masks.
const MAX_WAIT: Duration = Duration::from_millis(50);

/// Part of the usual time of a step after which a mask is late.
const PART_OF_STEP: f32 = 0.75;

static POOL: LazyLock<Option<ThreadPool>> = LazyLock::new(|| pool("masks", 2, 0));

/// For sequences whose masks were late, so that the others do not wait behind them.
static SLOW_POOL: LazyLock<Option<ThreadPool>> = LazyLock::new(|| pool("slow-masks", 4, NICENESS));

/// `None` if the system gives no thread.
fn pool(name: &'static str, cores_each: usize, niceness: i32) -> Option<ThreadPool> {
    let threads = (available_parallelism().map_or(1, usize::from) / cores_each).clamp(1, MAX_THREADS);
    let be_nice = move |_| {
        let _ = rustix::process::nice(niceness); // Its failure costs other threads a little time.
    };
    let builder = ThreadPoolBuilder::new().num_threads(threads).start_handler(be_nice);
    builder.thread_name(move |index| format!("{name}-{index}")).build().ok()
}

/// Jobs that were started together.
struct Batch {
    state: Mutex<BatchState>,
    inbox: Inbox,
}

struct BatchState {
    waiting: Vec<MaskJob>,
    done: Vec<MaskJob>,
    /// Number of jobs that are waiting or being run.
    num_running: usize,
    /// Whether the step thread waits no longer for the whole batch.
    is_closed: bool,
}

/// The jobs of the step in flight. They come to the inbox of the step thread together, when all are done. After [`MaskJobs::close`] they
/// come one by one, as do those of slow sequences.
#[derive(Default)]
pub(super) struct MaskJobs {
    open: Vec<Arc<Batch>>,
}

impl MaskJobs {
    /// Starts jobs.
    pub(super) fn start(&mut self, jobs: Vec<MaskJob>, inbox: &Inbox) {
        let (slow, quick): (Vec<_>, Vec<_>) = jobs.into_iter().partition(MaskJob::is_slow);
        for (jobs, pool, is_closed) in [(slow, &SLOW_POOL, true), (quick, &POOL, false)] {
            if jobs.is_empty() {
                continue;
            }
            let num_jobs = jobs.len();
            let state =
                BatchState { waiting: jobs, done: Vec::with_capacity(num_jobs), num_running: num_jobs, is_closed };
            let batch = Arc::new(Batch { state: Mutex::new(state), inbox: inbox.clone() });
            if !is_closed {
                self.open.push(Arc::clone(&batch));
            }
            let Some(pool) = pool.as_ref() else {
                batch.run_waiting();
                continue;
            };
            // Each thread is woken once, and takes a job after the other.
            for _ in 0..pool.current_num_threads().min(num_jobs) {
                let batch = Arc::clone(&batch);
                pool.spawn(move || batch.run_waiting());
            }
        }
    }

    /// Returns the jobs that are done and not in the inbox. The others come one by one.
    pub(super) fn close(&mut self) -> Vec<MaskJob> {
        self.open.drain(..).flat_map(|batch| batch.close()).collect()
    }
}

impl Batch {
    fn run_waiting(&self) {
        loop {
            let Some(job) = ipc::lock(&self.state).waiting.pop() else { return };
            self.run(job);
        }
    }

    fn run(&self, mut job: MaskJob) {
        if catch_unwind(AssertUnwindSafe(|| job.run())).is_err() {
            job.fail("the computation of its mask failed".to_owned());
        }
        let mut state = ipc::lock(&self.state);
        state.num_running -= 1;
        state.done.push(job);
        if state.num_running == 0 || state.is_closed {
            self.inbox.send(Message::Masks(std::mem::take(&mut state.done)));
        }
    }

    fn close(&self) -> Vec<MaskJob> {
        let mut state = ipc::lock(&self.state);
        state.is_closed = true;
        std::mem::take(&mut state.done)
    }
}

/// How long a step waits for its masks: for about as long as the workers compute its logits, so that rows without a mask are not delayed.
pub(super) fn longest_wait(usual_step: Duration) -> Duration {
    usual_step.mul_f32(PART_OF_STEP).clamp(MIN_WAIT, MAX_WAIT)
}

/// Sends masks to the workers, in messages that fit their rings.
pub(super) fn send(masks: Vec<SampleMask>, group: &mut WorkerGroup) -> Result<(), WorkerLoss> {
    let mut batch: Vec<SampleMask> = Vec::new();
    let mut num_words = 0;
    for mask in masks {
        if num_words + mask.words.len() > MAX_MASK_WORDS && !batch.is_empty() {
            group.broadcast(&ToWorker::Masks(std::mem::take(&mut batch)))?;
            num_words = 0;
        }
        num_words += mask.words.len();
        batch.push(mask);
    }
    group.broadcast(&ToWorker::Masks(batch))
}
