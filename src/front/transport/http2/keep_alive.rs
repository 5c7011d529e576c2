//! Pings clients that have been silent, and gives up those that do not answer.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use h2::{Ping, PingPong};
use tokio::time::{Instant, Sleep};

/// When to ping a client, and when to give it up.
#[derive(Debug, Clone, Copy)]
pub struct KeepAliveConfig {
    /// Silence before a client is pinged.
    pub silence: Duration,
    /// Time in which it must send something then.
    pub answer: Duration,
    /// Interval in which its calls check whether what they wait for is late.
    pub check_interval: Duration,
}

/// The keep-alive of one connection.
pub struct KeepAlive {
    config: KeepAliveConfig,
    ping_pong: PingPong,
    /// Something was received since this was last checked.
    received: Arc<AtomicBool>,
    is_pinged: bool,
    timer: Pin<Box<Sleep>>,
}

impl KeepAlive {
    /// `received` is set whenever something is received.
    pub fn new(config: KeepAliveConfig, ping_pong: PingPong, received: Arc<AtomicBool>) -> Self {
        let timer = Box::pin(tokio::time::sleep(config.silence));
        Self { config, ping_pong, received, is_pinged: false, timer }
    }

    /// Ready when the client was pinged and stayed silent.
    pub fn poll_silence(&mut self, context: &mut Context<'_>) -> Poll<()> {
        loop {
            ready!(self.timer.as_mut().poll(context));
            let was_active = self.received.swap(false, Relaxed);
            if self.is_pinged && !was_active {
                return Poll::Ready(());
            }
            // The pong is taken, or no further ping could be sent.
            let _ = self.ping_pong.poll_pong(context);
            self.is_pinged = !was_active && self.ping_pong.send_ping(Ping::opaque()).is_ok();
            let next = if self.is_pinged { self.config.answer } else { self.config.silence };
            self.timer.as_mut().reset(Instant::now() + next);
        }
    }
}
