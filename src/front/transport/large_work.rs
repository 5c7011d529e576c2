//! Work on many bytes, done so that others need not wait for its end.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::Semaphore;

/// Work on fewer bytes takes less time than another thread needs to take over.
const MANY_BYTES: usize = 256 << 10;

/// Work that is done aside at once: each takes a thread of the runtime's blocking ones, which have to last for others too.
const MAX_ASIDE: usize = 128;

static NUM_ASIDE: AtomicUsize = AtomicUsize::new(0);

/// Does work that takes time for each of `num_bytes`. Where they are many, another thread goes on with all other tasks
/// meanwhile.
pub fn aside<T>(num_bytes: usize, work: impl FnOnce() -> T) -> T {
    let can_hand_over = || Handle::try_current().is_ok_and(|it| it.runtime_flavor() == RuntimeFlavor::MultiThread);
    if num_bytes < MANY_BYTES || !can_hand_over() {
        return work();
    }
    match Counted::new() {
        Some(_counted) => tokio::task::block_in_place(work),
        None => work(),
    }
}

/// As [`aside`], of which no more is done at once than there are cores: more would not be done earlier, and take the time of
/// those who generate text.
pub async fn aside_in_turn<T>(num_bytes: usize, work: impl FnOnce() -> T) -> T {
    static TURNS: OnceLock<Semaphore> = OnceLock::new();
    if num_bytes < MANY_BYTES {
        return work();
    }
    let num_cores = || std::thread::available_parallelism().map_or(1, usize::from);
    let turn = TURNS.get_or_init(|| Semaphore::new(num_cores().max(2))).acquire().await;
    let done = aside(num_bytes, work);
    drop(turn);
    done
}

/// One of those that are done aside.
struct Counted;

impl Counted {
    fn new() -> Option<Self> {
        let counted = NUM_ASIDE.fetch_update(Relaxed, Relaxed, |count| (count < MAX_ASIDE).then_some(count + 1));
        match counted {
            Ok(_) => Some(Self),
            Err(_) => None,
        }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        NUM_ASIDE.fetch_sub(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn one_thread_goes_on_with_other_tasks() {
        let (sender, receiver) = mpsc::channel();
        let long = tokio::spawn(async move {
            tokio::spawn(async move { sender.send(()) });
            aside(MANY_BYTES, || receiver.recv_timeout(Duration::from_secs(60)))
        });
        long.await.unwrap().expect("another task waited for the end of the work");
    }

    #[tokio::test]
    async fn without_another_thread_it_is_done_here() {
        assert_eq!(aside(MANY_BYTES, || 7), 7);
        assert_eq!(aside_in_turn(MANY_BYTES, || 7).await, 7);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn much_work_at_once_leaves_threads_to_others() {
        let works = (0..2 * MAX_ASIDE)
            .map(|_| tokio::spawn(async { aside(MANY_BYTES, || std::thread::sleep(Duration::from_millis(5))) }));
        let works: Vec<_> = works.collect();
        tokio::task::spawn_blocking(|| ()).await.unwrap();
        for work in works {
            work.await.unwrap();
        }
    }
}
