//! A queue of byte messages in shared memory: one sender, one receiver.
//!
//! Bytes `head..tail` (both only grow; their place is the value modulo the capacity) hold messages of
//! `u32 length, bytes, padding to 8`. The sender publishes `tail` after a message is whole, so none is ever torn.

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
/// Before each message: its length.
const LENGTH_BYTES: usize = size_of::<u32>();
/// The control block's room before the message bytes.
const CONTROL_BYTES: usize = 512;

/// The owner's end: keeps the ring's name alive. Sender and receiver open it by name, here or in other processes.
#[derive(Debug)]
pub struct Ring {
    shared: Arc<Shared>,
}

impl Ring {
    /// Makes the ring `<prefix><name>` with room for `capacity` bytes of messages, each 4 bytes longer than its
    /// content and rounded up to 8. The capacity is rounded up to a power of two, at least 64.
    pub fn create(prefix: &Prefix, name: &str, capacity: usize) -> Result<Self, IpcError> {
        let capacity = capacity.max(64).next_power_of_two();
        let region = Region::create(prefix, name, CONTROL_BYTES + capacity)?;
        let shared = Shared::new(region, capacity)?;
        shared.control().capacity.store(capacity as u64, Ordering::Relaxed);
        // Last, and released: an `open` that sees the magic sees the rest.
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

/// One end of a ring, and which process holds it: 22 bits of pid, 41 of its start time, 1 that says it let go in
/// good order. One word, so that it changes hands in one step. 0: nobody yet.
#[repr(C, align(64))]
struct End(AtomicU64);

impl End {
    const PID_BITS: u32 = 22; // Linux gives no higher pids.
    const CLOSED: u64 = 1 << 63;

    /// Takes this end for the current process, from nobody or from a holder that is gone.
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

    /// The pid of a holder that closed its end or has ended. None while it lives, and before there was one.
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

/// A place to sleep for one end.
#[repr(C, align(64))]
struct Bed {
    /// Changes with every wake-up.
    word: AtomicU32,
    /// 1 while its end sleeps or is about to: only then a wake-up costs a system call.
    sleeping: AtomicU32,
}

impl Bed {
    /// Sleeps until `ready`, or until `timeout` has passed; true when ready.
    fn sleep_until(&self, timeout: Duration, mut ready: impl FnMut() -> bool) -> bool {
        let deadline = Instant::now().checked_add(timeout);
        self.sleeping.store(1, Ordering::Relaxed);
        let is_ready = loop {
            // Pairs with the fence in `wake`: either the waker sees `sleeping`, or we see what it did before.
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

    /// Wakes the end that sleeps here, if it does. Call it after making it ready.
    fn wake(&self) {
        fence(Ordering::SeqCst);
        if self.sleeping.load(Ordering::Relaxed) == 1 {
            self.word.fetch_add(1, Ordering::Release);
            futex::wake_one(&self.word);
        }
    }
}

/// What both ends share, each written by one of them on cache lines of its own.
#[repr(C)]
struct Control {
    magic: AtomicU64,
    capacity: AtomicU64,
    sender: End,
    receiver: End,
    /// Bytes ever sent.
    tail: Line,
    /// Bytes ever taken.
    head: Line,
    sender_bed: Bed,
    receiver_bed: Bed,
    /// 1 when a doorbell rang and nobody answered yet.
    rung: AtomicU32,
}
const _: () = assert!(size_of::<Control>() <= CONTROL_BYTES, "the control block outgrew its room");

/// A position, and how many messages lie before it; only one end writes both.
#[repr(C, align(64))]
struct Line(AtomicU64, AtomicU64);

impl Line {
    /// Counts a message. Nothing is read by it, so it need not come with the position.
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

    /// Where the message byte of `position` lies.
    fn byte_at(&self, position: u64) -> (NonNull<u8>, usize) {
        let offset = (position as usize) & (self.capacity - 1);
        let bytes = self.region.raw::<u8>(CONTROL_BYTES + offset, self.capacity - offset).expect("checked in `new`");
        (bytes.cast(), self.capacity - offset)
    }

    /// Copies `bytes` to `position..`, around the end when needed.
    ///
    /// # Safety
    /// The range is free: at most `capacity` long and not between the receiver's `head` and the published `tail`.
    unsafe fn write(&self, position: u64, bytes: &[u8]) {
        let (first, room) = self.byte_at(position);
        let (left, right) = bytes.split_at(bytes.len().min(room));
        // SAFETY: `room` bytes follow `first`, and the rest fits at the start as `bytes` is at most `capacity`
        // long; nobody else touches a free range (the caller's promise), and `bytes` is not shared memory.
        unsafe {
            first.copy_from_nonoverlapping(NonNull::from(left).cast(), left.len());
            self.byte_at(0).0.copy_from_nonoverlapping(NonNull::from(right).cast(), right.len());
        }
    }

    /// Puts `len` bytes from `position..` into `bytes` instead of its content, around the end when needed.
    ///
    /// No reference to the ring's memory is made: a sender that does not keep to the rules may write while this reads,
    /// and then the copy is nonsense, nothing worse.
    ///
    /// # Safety
    /// `len` is at most `capacity`. The bytes are a message only if the range is published and not yet taken: between
    /// `head` and `tail`.
    unsafe fn read(&self, position: u64, len: usize, bytes: &mut Vec<u8>) {
        let (first, room) = self.byte_at(position);
        let left = len.min(room);
        bytes.clear();
        bytes.reserve(len);
        // SAFETY: `room` bytes follow `first`, and the rest starts at the ring's first byte, as `len` is at most
        // `capacity`; `bytes` has room for `len`, is not shared memory, and all of `len` is set before its length says so.
        unsafe {
            first.as_ptr().copy_to_nonoverlapping(bytes.as_mut_ptr(), left);
            self.byte_at(0).0.as_ptr().copy_to_nonoverlapping(bytes.as_mut_ptr().add(left), len - left);
            bytes.set_len(len);
        }
    }
}

/// Bytes a message of `len` takes in the ring.
fn framed(len: usize) -> u64 {
    (LENGTH_BYTES + len).next_multiple_of(8) as u64
}

/// Spins until `ready` or until `duration` has passed; true when ready.
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

/// How long to spin when nobody said: not at all on a small machine, where the peer needs the core.
fn default_spin() -> Duration {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    if cores > 2 { Duration::from_micros(5) } else { Duration::ZERO }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A ring, and what its other end would write into it were it broken.
    fn ring(name: &str) -> Ring {
        let prefix = format!("ringtest{}_", std::process::id()).parse().unwrap();
        Ring::create(&prefix, name, 64).unwrap()
    }

    #[test]
    fn a_receiver_that_writes_nonsense_is_an_error_of_the_sender() {
        for head in [1, 8, 64, 65, 1 << 40, 1 << 63] {
            let ring = ring("sender");
            // Before the sender looks for the first time, and after.
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
    fn a_sender_that_writes_nonsense_is_an_error_of_the_receiver() {
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
            // SAFETY: nobody else uses this ring.
            unsafe { ring.shared.write(head, &u32::to_ne_bytes(length)) };
            let error = ring.receiver().unwrap().try_recv(&mut Vec::new()).unwrap_err();
            assert!(matches!(error, crate::RecvError::Corrupt { .. }), "{head} {tail} {length}: {error}");
        }
    }

    #[test]
    fn positions_go_on_past_the_last_number() {
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
