//! Runs long work in place while another thread takes over the other tasks of the runtime.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::Semaphore;

/// Work on fewer bytes takes less time than the hand-over to another thread.
const MANY_BYTES: usize = 256 << 10;

/// Maximum concurrent calls of `block_in_place`. Each occupies one of the runtime's blocking threads, which other work needs.
const MAX_BLOCKING: usize = 128;

static NUM_BLOCKING: AtomicUsize = AtomicUsize::new(0);

/// Runs `work`, whose duration grows with `num_bytes`. If they are many, another thread takes over the other tasks.
pub fn block_in_place_if_large<T>(num_bytes: usize, work: impl FnOnce() -> T) -> T {
    let can_hand_over = || Handle::try_current().is_ok_and(|it| it.runtime_flavor() == RuntimeFlavor::MultiThread);
    if num_bytes < MANY_BYTES || !can_hand_over() {
        return work();
    }
    match BlockingSlot::new() {
        Some(_slot) => tokio::task::block_in_place(work),
        None => work(),
    }
}

/// As [`block_in_place_if_large`], with at most one call per core at a time. More calls would not finish earlier, and would
/// slow down requests that generate text.
pub async fn block_in_place_in_turn<T>(num_bytes: usize, work: impl FnOnce() -> T) -> T {
    static TURNS: OnceLock<Semaphore> = OnceLock::new();
    if num_bytes < MANY_BYTES {
        return work();
    }
    let num_cores = || std::thread::available_parallelism().map_or(1, usize::from);
    let turn = TURNS.get_or_init(|| Semaphore::new(num_cores().max(2))).acquire().await;
    let done = block_in_place_if_large(num_bytes, work);
    drop(turn);
    done
}

/// One of the [`MAX_BLOCKING`] concurrent calls of `block_in_place`.
struct BlockingSlot;

impl BlockingSlot {
    fn new() -> Option<Self> {
        let acquired = NUM_BLOCKING.fetch_update(Relaxed, Relaxed, |count| (count < MAX_BLOCKING).then_some(count + 1));
        match acquired {
            Ok(_) => Some(Self),
            Err(_) => None,
        }
    }
}

impl Drop for BlockingSlot {
    fn drop(&mut self) {
        NUM_BLOCKING.fetch_sub(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn other_tasks_run_during_the_work() {
        let (sender, receiver) = mpsc::channel();
        let long = tokio::spawn(async move {
            tokio::spawn(async move { sender.send(()) });
            block_in_place_if_large(MANY_BYTES, || receiver.recv_timeout(Duration::from_secs(60)))
        });
        long.await.unwrap().expect("another task waited for the work");
    }

    #[tokio::test]
    async fn a_current_thread_runtime_runs_the_work_directly() {
        assert_eq!(block_in_place_if_large(MANY_BYTES, || 7), 7);
        assert_eq!(block_in_place_in_turn(MANY_BYTES, || 7).await, 7);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn concurrent_work_leaves_blocking_threads_free() {
        let works = (0..2 * MAX_BLOCKING).map(|_| {
            tokio::spawn(async { block_in_place_if_large(MANY_BYTES, || std::thread::sleep(Duration::from_millis(5))) })
        });
        let works: Vec<_> = works.collect();
        tokio::task::spawn_blocking(|| ()).await.unwrap();
        for work in works {
            work.await.unwrap();
        }
    }
}
