//! Asks a client that has long been silent for a sign of life.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use h2::{Ping, PingPong};
use tokio::time::{Instant, Sleep};

/// When to ask, and when to give up.
#[derive(Debug, Clone, Copy)]
pub struct Patience {
    /// Silence before a client is asked.
    pub silence: Duration,
    /// Time in which it must say something then.
    pub answer: Duration,
    /// Time after which its calls look whether what they wait for is late.
    pub look: Duration,
}

/// Watches over one connection.
pub struct KeepAlive {
    patience: Patience,
    ping_pong: PingPong,
    /// Something has come since this was last looked at.
    heard: Arc<AtomicBool>,
    is_asked: bool,
    timer: Pin<Box<Sleep>>,
}

impl KeepAlive {
    /// `heard` is set whenever something comes.
    pub fn new(patience: Patience, ping_pong: PingPong, heard: Arc<AtomicBool>) -> Self {
        let timer = Box::pin(tokio::time::sleep(patience.silence));
        Self { patience, ping_pong, heard, is_asked: false, timer }
    }

    /// Ready when the client was asked and stayed silent.
    pub fn poll_silence(&mut self, context: &mut Context<'_>) -> Poll<()> {
        loop {
            ready!(self.timer.as_mut().poll(context));
            let has_spoken = self.heard.swap(false, Relaxed);
            if self.is_asked && !has_spoken {
                return Poll::Ready(());
            }
            // The answer is taken, or the next question could not be asked.
            let _ = self.ping_pong.poll_pong(context);
            self.is_asked = !has_spoken && self.ping_pong.send_ping(Ping::opaque()).is_ok();
            let next = if self.is_asked { self.patience.answer } else { self.patience.silence };
            self.timer.as_mut().reset(Instant::now() + next);
        }
    }
}
