use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::{LENGTH_BYTES, Shared, default_spin, framed, spin_until};
use crate::error::{IpcError, RecvError};
use crate::prefix::Prefix;

/// How a wait for a message ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Received {
    /// A message was read.
    Message,
    /// A [`Doorbell`] rang. There may be messages as well.
    Woken,
    /// Neither happened within the timeout, and the sender runs.
    TimedOut,
}

/// The receiving end of a ring. It has one holder at a time; a new process may take it after the holder has ended.
#[derive(Debug)]
pub struct RingReceiver {
    shared: Arc<Shared>,
    /// Bytes received since the ring was created; equal to the published `head`.
    head: u64,
    /// The sender's `tail` when last read; a read costs a cache miss.
    seen_tail: u64,
    spin: Duration,
}

impl RingReceiver {
    /// Takes the receiving end of `<prefix><name>`.
    ///
    /// # Errors
    /// When a running process, this one included, holds it, or there is no such ring.
    pub fn open(prefix: &Prefix, name: &str) -> Result<Self, IpcError> {
        Self::attach(Shared::open(prefix, name)?)
    }

    pub(super) fn attach(shared: Arc<Shared>) -> Result<Self, IpcError> {
        let control = shared.control();
        control.receiver.take(&shared.region, "receiver")?;
        let head = control.head.0.load(Ordering::Acquire);
        Ok(Self { shared, head, seen_tail: head, spin: default_spin() })
    }

    /// How long an empty ring is polled before this thread sleeps. Default: 5 µs, and zero on up to two cores.
    pub fn set_spin(&mut self, spin: Duration) {
        self.spin = spin;
    }

    /// A handle with which any thread ends the current or the next wait of this receiver.
    pub fn doorbell(&self) -> Doorbell {
        Doorbell { shared: self.shared.clone() }
    }

    /// Reads the next message into `message`, replacing its content; false when there is none. Never waits.
    pub fn try_recv(&mut self, message: &mut Vec<u8>) -> Result<bool, RecvError> {
        if self.seen_tail == self.head {
            self.seen_tail = self.shared.control().tail.0.load(Ordering::Acquire);
            if self.seen_tail == self.head {
                return Ok(false);
            }
        }
        let len = self.next_len(message)?;
        // SAFETY: `next_len` checked that the message lies between `head` and a `tail` that was read with acquire order.
        unsafe { self.shared.read(self.head.wrapping_add(LENGTH_BYTES as u64), len, message) };
        self.head = self.head.wrapping_add(framed(len));
        self.shared.control().head.count();
        self.shared.control().head.0.store(self.head, Ordering::Release);
        self.shared.control().sender_wait.wake();
        Ok(true)
    }

    /// Reads the next message into `message`, replacing its content, waiting up to `timeout` for one.
    ///
    /// A doorbell has priority over messages. The close of the sender's end is detected at once, its death when `timeout` has
    /// passed; messages sent before are delivered first.
    ///
    /// # Errors
    /// When the sender has ended and all its messages were read, or the ring is corrupt.
    pub fn recv(&mut self, message: &mut Vec<u8>, timeout: Duration) -> Result<Received, RecvError> {
        if self.take_doorbell() {
            return Ok(Received::Woken);
        }
        if self.try_recv(message)? {
            return Ok(Received::Message);
        }
        self.wait(timeout);

        if self.take_doorbell() {
            return Ok(Received::Woken);
        }
        if self.try_recv(message)? {
            return Ok(Received::Message);
        }
        let Some(pid) = self.shared.control().sender.gone() else {
            return Ok(Received::TimedOut);
        };
        // The sender may have sent a message after the check above and before its end.
        if self.try_recv(message)? {
            return Ok(Received::Message);
        }
        Err(RecvError::PeerGone { ring: self.shared.name.clone(), pid })
    }

    /// Waits until there is a message, a doorbell or a closed sender, or until `timeout` has passed.
    fn wait(&self, timeout: Duration) {
        let control = self.shared.control();
        let ready = || {
            control.tail.0.load(Ordering::Acquire) != self.head
                || control.rung.load(Ordering::Acquire) == 1
                || control.sender.closed()
        };
        if !timeout.is_zero() && !spin_until(self.spin.min(timeout), ready) {
            control.receiver_wait.sleep_until(timeout, ready);
        }
    }

    fn take_doorbell(&self) -> bool {
        let rung = &self.shared.control().rung;
        rung.load(Ordering::Acquire) == 1 && rung.swap(0, Ordering::AcqRel) == 1
    }

    /// The length of the message at `head`, checked against the published bytes: the sender is another process and not trusted.
    fn next_len(&self, scratch: &mut Vec<u8>) -> Result<usize, RecvError> {
        let available = self.seen_tail.wrapping_sub(self.head);
        let corrupt = |len| RecvError::Corrupt { ring: self.shared.name.clone(), head: self.head, len, available };
        if available < framed(0) || available > self.shared.capacity as u64 {
            return Err(corrupt(0));
        }
        // SAFETY: at least `framed(0)` bytes, so `LENGTH_BYTES`, lie between `head` and a `tail` read with acquire order.
        unsafe { self.shared.read(self.head, LENGTH_BYTES, scratch) };
        let len = u32::from_ne_bytes(scratch[..].try_into().expect("read LENGTH_BYTES")) as usize;
        if framed(len) > available {
            return Err(corrupt(len as u64));
        }
        Ok(len)
    }
}

impl Drop for RingReceiver {
    fn drop(&mut self) {
        self.shared.control().receiver.close();
        self.shared.control().sender_wait.wake();
    }
}

/// Wakes a waiting receiver, so that other threads can give its thread work by other means, such as a channel.
///
/// Several calls of [`Doorbell::ring`] before the receiver returns count as one.
#[derive(Debug, Clone)]
pub struct Doorbell {
    shared: Arc<Shared>,
}

impl Doorbell {
    /// Makes the current or the next wait return [`Received::Woken`].
    pub fn ring(&self) {
        let control = self.shared.control();
        if control.rung.swap(1, Ordering::AcqRel) == 0 {
            control.receiver_wait.wake();
        }
    }
}
