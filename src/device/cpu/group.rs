//! A tensor-parallel group of CPU workers, which exchange partial results through shared memory.
//!
//! Every worker writes its part to its slot, increments its counter, waits for the counters of the others and reads all
//! slots in rank order. So every worker adds the same numbers in the same order. A slot has two halves that are used
//! alternately: the exchange between two uses of a half guarantees that everyone has read it.
//!
//! A group on several nodes has such a region on each node, with slots for all workers. Every worker also sends its
//! part to one worker of each other node. A thread there writes it to the sender's slot and increments the sender's
//! counter. So all workers add the same numbers in the same order, and tokens do not depend on how ranks are placed on
//! nodes.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use ipc::{IpcError, Prefix, Region, futex};
use ops::{DeviceError, TensorParallel};

use super::streams::Streams;

/// f32 numbers in half a slot: 256 KiB stay in the L2 cache.
const SLOT: usize = 1 << 16;
/// Distance in bytes between counters that different workers write.
const LINE: usize = 128;
/// How long a worker spins before it sleeps, if each worker has its own core.
const SPIN: Duration = Duration::from_micros(50);

/// How the workers of a group find each other.
#[derive(Debug, Clone)]
pub struct GroupConfig {
    /// Prefix of the shared-memory region.
    pub prefix: Prefix,
    /// Name of the region: the same for all workers of a group, and never used by another group.
    pub name: String,
    /// This worker's rank in the group.
    pub tensor_parallel: TensorParallel,
    /// Maximum time to wait for another worker, at start and in a step.
    pub timeout: Duration,
    /// Whether each worker has its own core to spin on.
    pub spin: bool,
}

/// Header of a part sent to another node: the number of the exchange and the length in numbers.
const FRAME_BYTES: usize = 8;

/// A worker's access to its group.
pub(crate) struct Group {
    shared: Arc<SharedSlots>,
    exchanges: u32,
    /// Streams to one worker of each other node.
    outgoing: Vec<TcpStream>,
    frame: Vec<u8>,
    /// Copies of the others' parts. Shared memory is never borrowed, because another process writes it.
    parts: Vec<Vec<f32>>,
}

/// The mapped memory that the workers of a node share.
struct SharedSlots {
    region: Region,
    config: GroupConfig,
}

impl Group {
    /// Joins a group on one node: worker 0 creates the region, the others wait for it.
    pub(crate) fn join(config: GroupConfig) -> Result<Self, DeviceError> {
        let is_first = config.tensor_parallel.rank == 0;
        Self::join_node(config, is_first, Streams::default(), 0)
    }

    /// Joins a group on several nodes: the first worker of each node creates the region there. `streams` carry parts to
    /// and from other nodes; worker 0 of this group has the number `first` in `streams`.
    pub(crate) fn join_node(
        config: GroupConfig,
        is_first: bool,
        streams: Streams,
        first: u32,
    ) -> Result<Self, DeviceError> {
        let call = |error: IpcError| DeviceError::Call {
            call: format!("shared memory of the group `{}`", config.name),
            reason: error.to_string(),
        };
        let size = config.tensor_parallel.size as usize;
        let region = if is_first {
            let bytes = 2 * size * LINE + 2 * size * SLOT * size_of::<f32>();
            Region::create(&config.prefix, &config.name, bytes).map_err(call)?
        } else {
            open_when_there(&config)?.map_err(call)?
        };
        let timeout = config.timeout;
        let shared = Arc::new(SharedSlots { region, config });
        for (stream, socket) in streams.incoming {
            let (shared, from) = (Arc::clone(&shared), (stream.from - first) as usize);
            // The thread ends with its stream. A worker that waits for the sender then runs into the timeout, or has
            // ended before.
            let mut part = vec![0.0; SLOT];
            thread::spawn(move || while shared.take_part(&socket, from, &mut part).is_ok() {});
        }
        let outgoing: Vec<TcpStream> = streams.outgoing.into_iter().map(|(_, socket)| socket).collect();
        for socket in &outgoing {
            let set = socket.set_write_timeout(Some(timeout));
            set.map_err(|error| DeviceError::Call { call: "setting a timeout".into(), reason: error.to_string() })?;
        }
        let own = shared.config.tensor_parallel.rank as usize;
        let parts = (0..size).map(|rank| vec![0.0; if rank == own { 0 } else { SLOT }]).collect();
        Ok(Self { shared, exchanges: 0, outgoing, frame: Vec::new(), parts })
    }

    pub(crate) fn tensor_parallel(&self) -> TensorParallel {
        self.shared.config.tensor_parallel
    }

    /// Calls `each(rows, parts)` for blocks of `rows` rows of `width`, where `parts[r]` is worker `r`'s part of those
    /// rows. `mine [rows, width]` is this worker's part.
    pub(crate) fn exchange_rows(
        &mut self,
        collective: &str,
        mine: &[f32],
        width: usize,
        mut each: impl FnMut(Range<usize>, &[&[f32]]),
    ) -> Result<(), DeviceError> {
        if width > SLOT {
            return Err(DeviceError::Unsupported {
                what: "width of a sum over a group".into(),
                found: width.to_string(),
                expected: format!("at most {SLOT}"),
            });
        }
        let (rows, per_slot) = (mine.len() / width, SLOT / width);
        for start in (0..rows).step_by(per_slot) {
            let range = start..rows.min(start + per_slot);
            let parts = self.exchange(collective, &mine[range.start * width..range.end * width], None)?;
            each(range, &parts);
        }
        Ok(())
    }

    /// Gathers every worker's part into `out`: worker `r`'s part is `offsets[r]..offsets[r + 1]`.
    pub(crate) fn gather(
        &mut self,
        collective: &str,
        mine: &[f32],
        offsets: &[usize],
        out: &mut [f32],
    ) -> Result<(), DeviceError> {
        let longest = offsets.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or(0);
        for start in (0..longest).step_by(SLOT) {
            let len_of = |rank: usize| (offsets[rank + 1] - offsets[rank]).saturating_sub(start).min(SLOT);
            let mine = &mine[start.min(mine.len())..(start + SLOT).min(mine.len())];
            let parts = self.exchange(collective, mine, Some(&len_of))?;
            for (rank, part) in parts.iter().enumerate() {
                out[offsets[rank] + start.min(offsets[rank + 1] - offsets[rank])..][..part.len()].copy_from_slice(part);
            }
        }
        Ok(())
    }

    /// Shares `mine` (at most half a slot) with all workers and returns everyone's part in rank order.
    fn exchange<'a>(
        &'a mut self,
        collective: &str,
        mine: &'a [f32],
        len_of: Option<&dyn Fn(usize) -> usize>,
    ) -> Result<Vec<&'a [f32]>, DeviceError> {
        assert!(mine.len() <= SLOT, "callers cut parts to slots");
        self.exchanges = self.exchanges.wrapping_add(1);
        let TensorParallel { rank, size } = self.tensor_parallel();
        let (rank, size) = (rank as usize, size as usize);
        let slot = self.shared.slot(self.exchanges, rank);
        // SAFETY: half a slot has room for `SLOT` numbers, and no reference to it is ever made. Only its worker writes
        // it, and nobody reads it now: all have read its last contents, since they took part in the exchange that
        // followed.
        unsafe { std::ptr::copy_nonoverlapping(mine.as_ptr(), slot, mine.len()) };
        self.shared.arrive(self.exchanges, rank);
        self.send(collective, mine)?;
        for other in (0..size).filter(|other| *other != rank) {
            self.shared.wait_for(self.exchanges, other, collective)?;
        }
        let mut parts = Vec::with_capacity(size);
        for (other, copy) in self.parts.iter_mut().enumerate() {
            if other == rank {
                parts.push(mine);
                continue;
            }
            let len = len_of.map_or(mine.len(), |len_of| len_of(other)).min(SLOT);
            let slot = self.shared.slot(self.exchanges, other);
            // SAFETY: slot and copy have room for `SLOT` numbers. The worker wrote `len` of them before it incremented
            // its counter, and writes this half again only after this worker's next exchange. A worker that violates
            // this corrupts the numbers, nothing else.
            unsafe { std::ptr::copy_nonoverlapping(slot, copy.as_mut_ptr(), len) };
            parts.push(&copy[..len]);
        }
        Ok(parts)
    }

    /// Sends this worker's part to the other nodes.
    fn send(&mut self, collective: &str, mine: &[f32]) -> Result<(), DeviceError> {
        if self.outgoing.is_empty() {
            return Ok(());
        }
        self.frame.clear();
        self.frame.extend_from_slice(&self.exchanges.to_le_bytes());
        self.frame.extend_from_slice(&(mine.len() as u32).to_le_bytes());
        self.frame.extend_from_slice(bytemuck::cast_slice(mine));
        for socket in &mut self.outgoing {
            socket.write_all(&self.frame).map_err(|error| DeviceError::Call {
                call: format!("sending to another node while {collective}"),
                reason: error.to_string(),
            })?;
        }
        Ok(())
    }
}

impl SharedSlots {
    /// Receives a part of worker `from`, which is on another node, and writes it to the slot where the workers of this
    /// node read it.
    fn take_part(&self, mut socket: &TcpStream, from: usize, part: &mut [f32]) -> std::io::Result<()> {
        let mut frame = [0; FRAME_BYTES];
        socket.read_exact(&mut frame)?;
        let word = |at: usize| u32::from_le_bytes(frame[at..at + 4].try_into().expect("four bytes"));
        let (exchange, len) = (word(0), word(4) as usize);
        if len > SLOT || exchange != self.arrived(from).load(Ordering::Relaxed).wrapping_add(1) {
            return Err(std::io::Error::other("a part out of turn"));
        }
        let part = &mut part[..len];
        socket.read_exact(bytemuck::cast_slice_mut(part))?;
        // SAFETY: half a slot has room for `SLOT` numbers. Only this thread writes the slots of `from` on this node.
        // The half is free: `from` sends a part only after all have reached the exchange before, and so have read the
        // one before that.
        unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), self.slot(exchange, from), len) };
        self.arrive(exchange, from);
        Ok(())
    }

    /// The half of a worker's slot that `exchange` uses.
    fn slot(&self, exchange: u32, rank: usize) -> *mut f32 {
        let size = self.config.tensor_parallel.size as usize;
        let half = exchange as usize % 2;
        let offset = 2 * size * LINE + (half * size + rank) * SLOT * size_of::<f32>();
        let slot = self.region.raw::<f32>(offset, SLOT).expect("the region has a slot for every worker");
        slot.as_ptr().cast()
    }

    fn word(&self, index: usize) -> &AtomicU32 {
        &self.region.atomics_u32(index * LINE, 1).expect("the region has two words for every worker")[0]
    }

    /// The counter of the exchanges that a worker has written.
    fn arrived(&self, rank: usize) -> &AtomicU32 {
        self.word(2 * rank)
    }

    /// The number of workers that sleep until this worker's counter changes.
    fn sleepers(&self, rank: usize) -> &AtomicU32 {
        self.word(2 * rank + 1)
    }

    fn arrive(&self, exchange: u32, rank: usize) {
        let arrived = self.arrived(rank);
        arrived.store(exchange, Ordering::SeqCst);
        if self.sleepers(rank).load(Ordering::SeqCst) > 0 {
            futex::wake_all(arrived);
        }
    }

    fn wait_for(&self, exchange: u32, other: usize, collective: &str) -> Result<(), DeviceError> {
        let arrived = self.arrived(other);
        let is_here = |count: u32| count.wrapping_sub(exchange) as i32 >= 0;
        if is_here(arrived.load(Ordering::Acquire)) {
            return Ok(());
        }
        let start = Instant::now();
        while self.config.spin && start.elapsed() < SPIN {
            for _ in 0..64 {
                if is_here(arrived.load(Ordering::Acquire)) {
                    return Ok(());
                }
                std::hint::spin_loop();
            }
        }
        let sleepers = self.sleepers(other);
        sleepers.fetch_add(1, Ordering::SeqCst);
        let result = loop {
            let count = arrived.load(Ordering::SeqCst);
            if is_here(count) {
                break Ok(());
            }
            let waited = start.elapsed();
            if waited >= self.config.timeout {
                break Err(DeviceError::GroupTimeout {
                    tp_rank: self.config.tensor_parallel.rank,
                    waited_ms: waited.as_millis() as u64,
                    collective: collective.into(),
                });
            }
            futex::wait(arrived, count, Some(self.config.timeout - waited));
        };
        sleepers.fetch_sub(1, Ordering::SeqCst);
        result
    }
}

/// Opens the region after the first worker of this node has created it.
fn open_when_there(config: &GroupConfig) -> Result<Result<Region, IpcError>, DeviceError> {
    let start = Instant::now();
    loop {
        match Region::open(&config.prefix, &config.name) {
            Err(IpcError::Missing { .. }) if start.elapsed() < config.timeout => {
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(IpcError::Missing { .. }) => {
                return Err(DeviceError::GroupTimeout {
                    tp_rank: config.tensor_parallel.rank,
                    waited_ms: start.elapsed().as_millis() as u64,
                    collective: "joining".into(),
                });
            }
            other => return Ok(other),
        }
    }
}

#[cfg(test)]
mod tests;
