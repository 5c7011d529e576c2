//! Work on many bytes, done so that others need not wait for its end.

use tokio::runtime::{Handle, RuntimeFlavor};

/// Work on fewer bytes takes less time than another thread needs to take over.
const MANY_BYTES: usize = 64 << 10;

/// Does work that takes time for each of `num_bytes`. Where they are many, another thread goes on with all other tasks
/// meanwhile.
pub fn aside<T>(num_bytes: usize, work: impl FnOnce() -> T) -> T {
    let can_hand_over = || Handle::try_current().is_ok_and(|it| it.runtime_flavor() == RuntimeFlavor::MultiThread);
    match num_bytes >= MANY_BYTES && can_hand_over() {
        true => tokio::task::block_in_place(work),
        false => work(),
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
    }
}
