//! A queue of byte messages in shared memory: one sender, one receiver.
//!
//! Bytes `head..tail` hold messages of `u32 length, bytes, padding to 8`. Both positions only grow; the offset in memory is the
//! position modulo the capacity. The sender publishes `tail` after it has written the whole message, so no message is torn.

mod receiver;
mod sender;

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

pub use receiver::{Doorbell, Received, RingReceiver};
pub use sender::{Backlog, RingSender};

use crate::error::IpcError;
use crate::futex;
use crate::prefix::Prefix;
use crate::process::ProcessId;
use crate::region::Region;

const MAGIC: u64 = u64::from_le_bytes(*b"ring\0\0\0\x01");
/// Size of the length before each message.
const LENGTH_BYTES: usize = size_of::<u32>();
/// Space for the control block before the message bytes.
const CONTROL_BYTES: usize = 512;

/// The owner of a ring, which keeps its name in existence. Sender and receiver open the ring by name, in any process.
#[derive(Debug)]
pub struct Ring {
    shared: Arc<Shared>,
}

impl Ring {
    /// Creates the ring `<prefix><name>` with room for `capacity` bytes of messages, each 4 bytes longer than its
    /// content and rounded up to 8. The capacity is rounded up to a power of two, at least 64.
    pub fn create(prefix: &Prefix, name: &str, capacity: usize) -> Result<Self, IpcError> {
        let capacity = capacity.max(64).next_power_of_two();
        let region = Region::create(prefix, name, CONTROL_BYTES + capacity)?;
        let shared = Shared::new(region, capacity)?;
        shared.control().capacity.store(capacity as u64, Ordering::Relaxed);
        // Written last and with release order: an `open` that reads the magic also reads the capacity.
        shared.control().magic.store(MAGIC, Ordering::Release);
        Ok(Self { shared: Arc::new(shared) })
    }

    /// The sending end, in this process.
    pub fn sender(&self) -> Result<RingSender, IpcError> {
        RingSender::attach(self.shared.clone())
    }

    /// The receiving end, in this process.
    pub fn receiver(&self) -> Result<RingReceiver, IpcError> {
        RingReceiver::attach(self.shared.clone())
    }

    /// Removes the name now, once both ends are open: see [`Region::unlink`].
    pub fn unlink(&self) {
        self.shared.region.unlink();
    }
}

/// The holder of one end of a ring: 22 bits of pid, 41 bits of its start time, 1 bit for an end that was closed. All in one
/// word, so that it changes atomically. 0: no holder yet.
#[repr(C, align(64))]
struct End(AtomicU64);

impl End {
    const PID_BITS: u32 = 22; // The largest pid of Linux.
    const CLOSED: u64 = 1 << 63;

    /// Takes this end for the current process if it has no holder, or one that has ended.
    fn take(&self, region: &Region, role: &'static str) -> Result<(), IpcError> {
        let previous = self.0.load(Ordering::Acquire);
        let taken = |word| IpcError::Taken { path: region.path().to_owned(), role, pid: Self::holder(word).pid };
        if previous != 0 && !Self::is_gone(previous) {
            return Err(taken(previous));
        }
        let me = ProcessId::current();
        let word = (me.start_time << Self::PID_BITS & !Self::CLOSED) | u64::from(me.pid);
        self.0.compare_exchange(previous, word, Ordering::AcqRel, Ordering::Acquire).map_err(taken)?;
        Ok(())
    }

    fn close(&self) {
        self.0.fetch_or(Self::CLOSED, Ordering::AcqRel);
    }

    fn closed(&self) -> bool {
        self.0.load(Ordering::Acquire) & Self::CLOSED != 0
    }

    /// The pid of a holder that has closed its end or has ended; `None` while it runs and before the first holder.
    fn gone(&self) -> Option<u32> {
        let word = self.0.load(Ordering::Acquire);
        (word != 0 && Self::is_gone(word)).then_some(Self::holder(word).pid)
    }

    fn is_gone(word: u64) -> bool {
        word & Self::CLOSED != 0 || !Self::holder(word).is_alive()
    }

    fn holder(word: u64) -> ProcessId {
        let pid = (word & ((1 << Self::PID_BITS) - 1)) as u32;
        ProcessId { pid, start_time: (word & !Self::CLOSED) >> Self::PID_BITS }
    }
}

/// A futex word on which one end waits for the other.
#[repr(C, align(64))]
struct WaitCell {
    /// Changes with every wake-up.
    word: AtomicU32,
    /// 1 while its end sleeps or is about to sleep. Only then a wake-up needs a system call.
    sleeping: AtomicU32,
}

impl WaitCell {
    /// Sleeps until `ready` returns true or `timeout` has passed; returns whether it is ready.
    fn sleep_until(&self, timeout: Duration, mut ready: impl FnMut() -> bool) -> bool {
        let deadline = Instant::now().checked_add(timeout);
        self.sleeping.store(1, Ordering::Relaxed);
        let is_ready = loop {
            // Pairs with the fence in `wake`: either the waker sees `sleeping`, or `ready` sees the waker's earlier writes.
            fence(Ordering::SeqCst);
            let word = self.word.load(Ordering::Acquire);
            if ready() {
                break true;
            }
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                break false;
            }
            futex::wait(&self.word, word, left);
        };
        self.sleeping.store(0, Ordering::Relaxed);
        is_ready
    }

    /// Wakes the end that sleeps on this cell, if it does. Call it after the write that makes the end ready.
    fn wake(&self) {
        fence(Ordering::SeqCst);
        if self.sleeping.load(Ordering::Relaxed) == 1 {
            self.word.fetch_add(1, Ordering::Release);
            futex::wake_one(&self.word);
        }
    }
}

/// The state that both ends share. Each field has cache lines of its own and, unless noted, one writer.
#[repr(C)]
struct Control {
    magic: AtomicU64,
    capacity: AtomicU64,
    sender: End,
    receiver: End,
    /// Bytes sent since the ring was created.
    tail: Line,
    /// Bytes received since the ring was created.
    head: Line,
    sender_wait: WaitCell,
    receiver_wait: WaitCell,
    /// 1 after a doorbell rang, until the receiver has returned from a wait. Any process writes it.
    rung: AtomicU32,
}
const _: () = assert!(size_of::<Control>() <= CONTROL_BYTES, "the control block outgrew its room");

/// A position, and the number of messages before it. Only one end writes both.
#[repr(C, align(64))]
struct Line(AtomicU64, AtomicU64);

impl Line {
    /// Counts a message. Relaxed: no access to the message bytes depends on the count.
    fn count(&self) {
        self.1.store(self.1.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }
}

/// A mapped ring.
#[derive(Debug)]
struct Shared {
    region: Region,
    name: String,
    capacity: usize,
}

impl Shared {
    fn new(region: Region, capacity: usize) -> Result<Self, IpcError> {
        region.raw::<u8>(0, CONTROL_BYTES + capacity)?;
        let name = region.path().file_name().unwrap_or_default().to_string_lossy().into_owned();
        Ok(Self { region, name, capacity })
    }

    fn open(prefix: &Prefix, name: &str) -> Result<Arc<Self>, IpcError> {
        let region = Region::open(prefix, name)?;
        let not_ring = || IpcError::NotRing { path: region.path().to_owned() };
        let words = region.atomics_u64(0, 2).map_err(|_| not_ring())?;
        let (magic, capacity) = (words[0].load(Ordering::Acquire), words[1].load(Ordering::Relaxed) as usize);
        if magic != MAGIC || !capacity.is_power_of_two() || capacity.checked_add(CONTROL_BYTES) != Some(region.len()) {
            return Err(not_ring());
        }
        Ok(Arc::new(Self::new(region, capacity)?))
    }

    fn control(&self) -> &Control {
        let start = self.region.raw::<u8>(0, CONTROL_BYTES).expect("checked in `new`");
        // SAFETY: inside the region, aligned to 128, all fields are atomics of which any bytes are a value, and the
        // reference lives no longer than the mapping in `self`.
        unsafe { start.cast::<Control>().as_ref() }
    }

    /// The address of the byte at `position`, and the number of bytes up to the end of the ring.
    fn byte_at(&self, position: u64) -> (NonNull<u8>, usize) {
        let offset = (position as usize) & (self.capacity - 1);
        let bytes = self.region.raw::<u8>(CONTROL_BYTES + offset, self.capacity - offset).expect("checked in `new`");
        (bytes.cast(), self.capacity - offset)
    }

    /// Copies `bytes` to `position..`, and wraps around at the end.
    ///
    /// # Safety
    /// The range is free: at most `capacity` long and outside the range from the receiver's `head` to the published `tail`.
    unsafe fn write(&self, position: u64, bytes: &[u8]) {
        let (first, room) = self.byte_at(position);
        let (left, right) = bytes.split_at(bytes.len().min(room));
        // SAFETY: `room` bytes follow `first`, and the rest fits at the start as `bytes` is at most `capacity`
        // long; no other thread or process accesses a free range (guaranteed by the caller), and `bytes` is not shared memory.
        unsafe {
            first.copy_from_nonoverlapping(NonNull::from(left).cast(), left.len());
            self.byte_at(0).0.copy_from_nonoverlapping(NonNull::from(right).cast(), right.len());
        }
    }

    /// Replaces the content of `bytes` by `len` bytes from `position..`, and wraps around at the end.
    ///
    /// Creates no reference to the memory of the ring: a faulty sender may write during the copy, which then has arbitrary
    /// content but is no undefined behaviour of this process.
    ///
    /// # Safety
    /// `len` is at most `capacity`. The bytes are part of a message only if the range lies between `head` and the published `tail`.
    unsafe fn read(&self, position: u64, len: usize, bytes: &mut Vec<u8>) {
        let (first, room) = self.byte_at(position);
        let left = len.min(room);
        bytes.clear();
        bytes.reserve(len);
        // SAFETY: `room` bytes follow `first`, and the rest starts at the ring's first byte, as `len` is at most
        // `capacity`; `bytes` has room for `len`, is not shared memory, and all `len` bytes are set before `set_len`.
        unsafe {
            first.as_ptr().copy_to_nonoverlapping(bytes.as_mut_ptr(), left);
            self.byte_at(0).0.as_ptr().copy_to_nonoverlapping(bytes.as_mut_ptr().add(left), len - left);
            bytes.set_len(len);
        }
    }
}

/// Number of bytes that a message of `len` bytes takes in the ring.
fn framed(len: usize) -> u64 {
    (LENGTH_BYTES + len).next_multiple_of(8) as u64
}

/// Spins until `ready` returns true or `duration` has passed; returns whether it is ready.
fn spin_until(duration: Duration, mut ready: impl FnMut() -> bool) -> bool {
    if ready() {
        return true;
    }
    if duration.is_zero() {
        return false;
    }
    let start = Instant::now();
    loop {
        for _ in 0..16 {
            std::hint::spin_loop();
            if ready() {
                return true;
            }
        }
        if start.elapsed() >= duration {
            return false;
        }
    }
}

/// Default time to spin: none on a machine of one or two cores, where the peer needs the core.
fn default_spin() -> Duration {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    if cores > 2 { Duration::from_micros(5) } else { Duration::ZERO }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A ring of 64 bytes.
    fn ring(name: &str) -> Ring {
        let prefix = format!("ringtest{}_", std::process::id()).parse().unwrap();
        Ring::create(&prefix, name, 64).unwrap()
    }

    #[test]
    fn an_invalid_head_is_an_error_of_the_sender() {
        for head in [1, 8, 64, 65, 1 << 40, 1 << 63] {
            let ring = ring("sender");
            // Before the sender reads the position for the first time, and after.
            ring.shared.control().head.0.store(head, Ordering::Release);
            let error = ring.sender().unwrap().send(b"message", Duration::from_millis(1)).unwrap_err();
            assert!(matches!(error, crate::SendError::Corrupt { .. }), "{head}: {error}");
            ring.shared.control().head.0.store(0, Ordering::Release);
            let mut sender = ring.sender().unwrap();
            sender.send(&[1; 56], Duration::ZERO).unwrap();
            ring.shared.control().head.0.store(head.wrapping_add(64), Ordering::Release);
            let error = sender.send(b"message", Duration::from_millis(1)).unwrap_err();
            assert!(matches!(error, crate::SendError::Corrupt { .. }), "{head}: {error}");
        }
    }

    #[test]
    fn an_invalid_tail_or_length_is_an_error_of_the_receiver() {
        for (head, tail, length) in [
            (0, 8, 5),
            (0, 16, u32::MAX),
            (0, 64, 61),
            (0, 65, 1),
            (0, 7, 0),
            (0, u64::MAX, 1),
            (u64::MAX - 7, 0, 5),
            (u64::MAX - 7, 1 << 40, 4),
        ] {
            let ring = ring("receiver");
            let control = ring.shared.control();
            control.head.0.store(head, Ordering::Release);
            control.tail.0.store(tail, Ordering::Release);
            // SAFETY: no other thread or process uses this ring.
            unsafe { ring.shared.write(head, &u32::to_ne_bytes(length)) };
            let error = ring.receiver().unwrap().try_recv(&mut Vec::new()).unwrap_err();
            assert!(matches!(error, crate::RecvError::Corrupt { .. }), "{head} {tail} {length}: {error}");
        }
    }

    #[test]
    fn positions_wrap_around_at_the_largest_number() {
        let ring = ring("wrap");
        let control = ring.shared.control();
        control.head.0.store(u64::MAX - 7, Ordering::Release);
        control.tail.0.store(u64::MAX - 7, Ordering::Release);
        let (mut sender, mut receiver) = (ring.sender().unwrap(), ring.receiver().unwrap());
        let mut message = Vec::new();
        for number in 0..20_u8 {
            sender.send(&[number; 13], Duration::ZERO).unwrap();
            assert!(receiver.try_recv(&mut message).unwrap());
            assert_eq!(message, [number; 13]);
        }
    }
}
