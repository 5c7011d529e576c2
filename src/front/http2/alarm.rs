//! What wakes a connection.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::task::Wake;

use futures::task::AtomicWaker;

/// Wakes the task of a connection, unless it is at work: then it looks itself.
#[derive(Default)]
pub struct Alarm {
    pub task: AtomicWaker,
    is_rung: AtomicBool,
    is_at_work: AtomicBool,
}

impl Alarm {
    /// There is something to do.
    pub fn ring(&self) {
        self.is_rung.store(true, SeqCst);
        if !self.is_at_work.load(SeqCst) {
            self.task.wake();
        }
    }

    /// A round begins: it sees what rang until now.
    pub fn begin(&self) {
        self.is_at_work.store(true, SeqCst);
        self.is_rung.store(false, SeqCst);
    }

    /// Ends the work, unless it rang since the round began.
    pub fn rest(&self) -> bool {
        self.is_at_work.store(false, SeqCst);
        !self.is_rung.load(SeqCst)
    }

    pub fn end(&self) {
        self.is_at_work.store(false, SeqCst);
    }
}

impl Wake for Alarm {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.ring();
    }
}
