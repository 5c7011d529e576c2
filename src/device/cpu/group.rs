//! A tensor-parallel group on one node: workers exchange partial results through shared memory.
//!
//! Every worker writes its part to its slot, says so, waits for the others' word and reads all slots in rank order,
//! so every worker adds the same numbers in the same order. Slots come in two halves used in turn: whoever writes
//! a half again knows by the exchange between that everyone has read it.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use ipc::{IpcError, Prefix, Region, futex};

use crate::{DeviceError, TensorParallel};

/// f32 numbers of one slot: 256 KiB stay in the second cache.
const SLOT: usize = 1 << 16;
/// Bytes between words that different workers write.
const LINE: usize = 128;
/// How long a worker spins for another before it sleeps, where each has a core.
const SPIN: Duration = Duration::from_micros(50);

/// Where the workers of a group meet.
#[derive(Debug, Clone)]
pub struct GroupConfig {
    /// Prefix of the shared-memory region.
    pub prefix: Prefix,
    /// Its name: the same for all workers of a group, and never used before by another group.
    pub name: String,
    /// This worker's place.
    pub tensor_parallel: TensorParallel,
    /// Longest wait for another worker, at start and in a step.
    pub timeout: Duration,
    /// Whether each worker has a core of its own to spin on.
    pub spin: bool,
}

/// One worker's end of its group.
pub(crate) struct Group {
    region: Region,
    config: GroupConfig,
    exchanges: u32,
}

impl Group {
    /// Joins the group: worker 0 makes the region, the others wait for it.
    pub(crate) fn join(config: GroupConfig) -> Result<Self, DeviceError> {
        let call = |error: IpcError| DeviceError::Call {
            call: format!("shared memory of the group `{}`", config.name),
            reason: error.to_string(),
        };
        let size = config.tensor_parallel.size as usize;
        let region = if config.tensor_parallel.rank == 0 {
            let bytes = 2 * size * LINE + 2 * size * SLOT * size_of::<f32>();
            Region::create(&config.prefix, &config.name, bytes).map_err(call)?
        } else {
            open_when_there(&config)?.map_err(call)?
        };
        Ok(Self { region, config, exchanges: 0 })
    }

    pub(crate) fn tensor_parallel(&self) -> TensorParallel {
        self.config.tensor_parallel
    }

    /// Calls `each(rows, parts)` for stretches of `rows` rows of `width`, where `parts[r]` is worker `r`'s part of
    /// those rows. `mine [rows, width]` is this worker's part.
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

    /// Gathers every worker's part into `out`, where worker `r`'s starts at `offsets[r]` and ends at `offsets[r + 1]`.
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

    /// Shows `mine` to all and returns everyone's part in rank order, valid until the exchange after the next.
    fn exchange(
        &mut self,
        collective: &str,
        mine: &[f32],
        len_of: Option<&dyn Fn(usize) -> usize>,
    ) -> Result<Vec<&[f32]>, DeviceError> {
        self.exchanges = self.exchanges.wrapping_add(1);
        let (rank, size) = (self.config.tensor_parallel.rank as usize, self.config.tensor_parallel.size as usize);
        let slot = self.slot(rank);
        // SAFETY: a slot's half is written by its worker alone, while nobody reads it: all have read its last
        // contents, since they took part in the exchange that followed.
        unsafe { std::ptr::copy_nonoverlapping(mine.as_ptr(), slot, mine.len()) };
        self.arrive(rank);
        for other in (0..size).filter(|other| *other != rank) {
            self.wait_for(other, collective)?;
        }
        let part = |rank: usize| {
            let len = len_of.map_or(mine.len(), |len_of| len_of(rank));
            // SAFETY: the worker wrote `len` numbers before it arrived, and writes this half again only after this
            // worker's next exchange, which needs `&mut self`.
            unsafe { std::slice::from_raw_parts(self.slot(rank), len) }
        };
        Ok((0..size).map(part).collect())
    }

    /// The half in use of a worker's slot.
    fn slot(&self, rank: usize) -> *mut f32 {
        let size = self.config.tensor_parallel.size as usize;
        let half = self.exchanges as usize % 2;
        let offset = 2 * size * LINE + (half * size + rank) * SLOT * size_of::<f32>();
        let slot = self.region.raw::<f32>(offset, SLOT).expect("the region has a slot for every worker");
        slot.as_ptr().cast()
    }

    fn word(&self, index: usize) -> &AtomicU32 {
        &self.region.atomics_u32(index * LINE, 1).expect("the region has two words for every worker")[0]
    }

    /// Counts the exchanges a worker has written.
    fn arrived(&self, rank: usize) -> &AtomicU32 {
        self.word(2 * rank)
    }

    /// Counts those who sleep until a worker arrives.
    fn sleepers(&self, rank: usize) -> &AtomicU32 {
        self.word(2 * rank + 1)
    }

    fn arrive(&self, rank: usize) {
        let arrived = self.arrived(rank);
        arrived.store(self.exchanges, Ordering::SeqCst);
        if self.sleepers(rank).load(Ordering::SeqCst) > 0 {
            futex::wake_all(arrived);
        }
    }

    fn wait_for(&self, other: usize, collective: &str) -> Result<(), DeviceError> {
        let arrived = self.arrived(other);
        let is_here = |count: u32| count.wrapping_sub(self.exchanges) as i32 >= 0;
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

/// Opens the region once worker 0 has made it.
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
