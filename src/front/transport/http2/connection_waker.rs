//! The waker of a connection.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::task::Wake;

use futures::task::AtomicWaker;

/// Wakes the task of a connection, unless the task is running and will check by itself.
#[derive(Default)]
pub struct ConnectionWaker {
    pub task: AtomicWaker,
    is_woken: AtomicBool,
    is_running: AtomicBool,
}

impl ConnectionWaker {
    /// Sets the wake-up flag, and wakes the task unless it is running.
    pub fn wake_connection(&self) {
        self.is_woken.store(true, SeqCst);
        if !self.is_running.load(SeqCst) {
            self.task.wake();
        }
    }

    /// Begins a round of polling, which handles all earlier wake-ups.
    pub fn begin(&self) {
        self.is_running.store(true, SeqCst);
        self.is_woken.store(false, SeqCst);
    }

    /// Ends polling. Returns whether there was no wake-up since the round began.
    pub fn finish_round(&self) -> bool {
        self.is_running.store(false, SeqCst);
        !self.is_woken.load(SeqCst)
    }

    /// Ends polling; the caller wakes the task.
    pub fn end(&self) {
        self.is_running.store(false, SeqCst);
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
