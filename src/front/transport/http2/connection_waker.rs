//! What wakes a connection.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::task::Wake;

use futures::task::AtomicWaker;

/// Wakes the task of a connection, unless that is at work and checks by itself.
#[derive(Default)]
pub struct ConnectionWaker {
    pub task: AtomicWaker,
    is_woken: AtomicBool,
    is_at_work: AtomicBool,
}

impl ConnectionWaker {
    /// Notes that there is something to do, and wakes the task unless it is at work.
    pub fn wake_connection(&self) {
        self.is_woken.store(true, SeqCst);
        if !self.is_at_work.load(SeqCst) {
            self.task.wake();
        }
    }

    /// Begins a round, which sees everything that woke it until now.
    pub fn begin(&self) {
        self.is_at_work.store(true, SeqCst);
        self.is_woken.store(false, SeqCst);
    }

    /// Ends the work; whether nothing woke it since the round began.
    pub fn end_round(&self) -> bool {
        self.is_at_work.store(false, SeqCst);
        !self.is_woken.load(SeqCst)
    }

    /// Ends the work; the task wakes itself.
    pub fn end(&self) {
        self.is_at_work.store(false, SeqCst);
    }
}

impl Wake for ConnectionWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.wake_connection();
    }
}
