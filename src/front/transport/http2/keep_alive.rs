//! HTTP/2 keep-alive: pings idle clients, and detects those that do not answer.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use h2::{Ping, PingPong};
use tokio::time::{Instant, Sleep};

/// Times of the keep-alive.
#[derive(Debug, Clone, Copy)]
pub struct KeepAliveConfig {
    /// Time without data after which a client is pinged.
    pub idle_time: Duration,
    /// Time in which the client must then send data.
    pub timeout: Duration,
    /// Interval at which calls check their timeouts.
    pub check_interval: Duration,
}

/// The keep-alive of one connection.
pub struct KeepAlive {
    config: KeepAliveConfig,
    ping_pong: PingPong,
    /// Whether data was received since the last check.
    received: Arc<AtomicBool>,
    is_pinged: bool,
    timer: Pin<Box<Sleep>>,
}

impl KeepAlive {
    /// `received` is set by each read with data.
    pub fn new(config: KeepAliveConfig, ping_pong: PingPong, received: Arc<AtomicBool>) -> Self {
        let timer = Box::pin(tokio::time::sleep(config.idle_time));
        Self { config, ping_pong, received, is_pinged: false, timer }
    }

    /// Ready when the client did not answer a ping in time.
    pub fn poll_timeout(&mut self, context: &mut Context<'_>) -> Poll<()> {
        loop {
            ready!(self.timer.as_mut().poll(context));
            let was_active = self.received.swap(false, Relaxed);
            if self.is_pinged && !was_active {
                return Poll::Ready(());
            }
            // The pong must be received before another ping can be sent.
            let _ = self.ping_pong.poll_pong(context);
            self.is_pinged = !was_active && self.ping_pong.send_ping(Ping::opaque()).is_ok();
            let next = if self.is_pinged { self.config.timeout } else { self.config.idle_time };
            self.timer.as_mut().reset(Instant::now() + next);
        }
    }
}
