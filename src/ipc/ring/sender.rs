use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::{LENGTH_BYTES, Shared, default_spin, framed, spin_until};
use crate::error::{IpcError, SendError};
use crate::prefix::Prefix;

/// The sending end of a ring. It has one holder at a time; a new process may take it after the holder has ended.
#[derive(Debug)]
pub struct RingSender {
    shared: Arc<Shared>,
    /// Bytes sent since the ring was created; equal to the published `tail`.
    tail: u64,
    /// The receiver's `head` when last read; a read costs a cache miss.
    seen_head: u64,
    spin: Duration,
}

impl RingSender {
    /// Takes the sending end of `<prefix><name>`.
    ///
    /// # Errors
    /// When a running process, this one included, holds it, or there is no such ring.
    pub fn open(prefix: &Prefix, name: &str) -> Result<Self, IpcError> {
        Self::attach(Shared::open(prefix, name)?)
    }

    pub(super) fn attach(shared: Arc<Shared>) -> Result<Self, IpcError> {
        let control = shared.control();
        control.sender.take(&shared.region, "sender")?;
        let (tail, seen_head) = (control.tail.0.load(Ordering::Acquire), control.head.0.load(Ordering::Acquire));
        Ok(Self { shared, tail, seen_head, spin: default_spin() })
    }

    /// How long a full ring is polled before this thread sleeps. Default: 5 µs, and zero on up to two cores.
    pub fn set_spin(&mut self, spin: Duration) {
        self.spin = spin;
    }

    /// The longest message that fits, in bytes.
    pub fn max_len(&self) -> usize {
        (self.shared.capacity - 8).min(u32::MAX as usize)
    }

    /// A handle with which any thread reads the number of messages in this ring.
    pub fn backlog(&self) -> Backlog {
        Backlog { shared: self.shared.clone() }
    }

    /// Sends one message, waiting up to `timeout` for room.
    ///
    /// The close of the receiver's end is detected at once, its death when `timeout` has passed.
    ///
    /// # Errors
    /// When nothing was sent: the message is too long, the ring stays full or is corrupt, or the receiver has ended.
    pub fn send(&mut self, message: &[u8], timeout: Duration) -> Result<(), SendError> {
        if message.len() > self.max_len() {
            let (len, max) = (message.len(), self.max_len());
            return Err(SendError::TooLarge { ring: self.shared.name.clone(), len, max });
        }
        self.wait_for_room(framed(message.len()), timeout)?;

        let length = (message.len() as u32).to_ne_bytes();
        // SAFETY: `wait_for_room` checked that the receiver has taken everything up to `tail + framed - capacity`, and only this
        // sender, borrowed mutably, writes.
        unsafe {
            self.shared.write(self.tail, &length);
            self.shared.write(self.tail.wrapping_add(LENGTH_BYTES as u64), message);
        }
        self.tail = self.tail.wrapping_add(framed(message.len()));
        self.shared.control().tail.count();
        self.shared.control().tail.0.store(self.tail, Ordering::Release);
        self.shared.control().receiver_wait.wake();
        Ok(())
    }

    fn wait_for_room(&mut self, needed: u64, timeout: Duration) -> Result<(), SendError> {
        let Self { shared, tail, seen_head, spin } = self;
        let control = shared.control();
        let (tail, capacity) = (*tail, shared.capacity as u64);
        let used = |head: u64| tail.wrapping_sub(head);
        let has_room = |head: u64| used(head) <= capacity && capacity - used(head) >= needed;
        if !control.receiver.closed() && has_room(*seen_head) {
            return Ok(());
        }
        let mut ready = || {
            *seen_head = control.head.0.load(Ordering::Acquire);
            // A `head` past `tail` is corrupt: end the wait; the error follows below.
            control.receiver.closed() || has_room(*seen_head) || used(*seen_head) > capacity
        };
        let is_ready = spin_until((*spin).min(timeout), &mut ready)
            || (!timeout.is_zero() && control.sender_wait.sleep_until(timeout, ready));
        let ring = || shared.name.clone();
        if used(*seen_head) > capacity {
            return Err(SendError::Corrupt { ring: ring(), head: *seen_head, tail });
        }
        if is_ready && !control.receiver.closed() {
            return Ok(());
        }
        Err(match control.receiver.gone() {
            Some(pid) => SendError::PeerGone { ring: ring(), pid },
            None => SendError::Full { ring: ring(), waited: timeout },
        })
    }
}

impl Drop for RingSender {
    fn drop(&mut self) {
        self.shared.control().sender.close();
        self.shared.control().receiver_wait.wake();
    }
}

/// Counts the messages that the receiver of a ring has not taken yet.
#[derive(Debug, Clone)]
pub struct Backlog {
    shared: Arc<Shared>,
}

impl Backlog {
    /// Number of messages that were sent and not received.
    pub fn num_messages(&self) -> u64 {
        let control = self.shared.control();
        // The receiver's count is read first: it never exceeds the sender's, so the difference is not negative.
        let taken = control.head.1.load(Ordering::Relaxed);
        control.tail.1.load(Ordering::Relaxed).saturating_sub(taken)
    }
}
