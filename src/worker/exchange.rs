//! How the CUDA workers of a node tell each other what they need before their first collective: through shared memory.

use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use device::cuda::Exchange;
use device::{DeviceError, TensorParallel};
use ipc::{IpcError, Prefix, Region};

use crate::protocol::ShmName;

/// Most words a worker can say in one round: handles and ids are far smaller.
const MAX_WORDS: usize = 4096;
/// Two rounds fit, so that a worker may begin the next while others still read this one.
const NUM_HALVES: usize = 2;
/// Per worker and half: its length in bytes, then its words.
const SLOT_WORDS: usize = 1 + MAX_WORDS;

/// Rounds of [`Exchange::gather`] in a region that worker 0 makes.
///
/// The region holds a word per worker, the rounds it has said, then `[half, worker, SLOT_WORDS]`.
pub(crate) struct ShmExchange {
    region: Region,
    place: TensorParallel,
    timeout: Duration,
}

impl ShmExchange {
    pub(crate) fn open(name: &ShmName, place: TensorParallel, timeout: Duration) -> Result<Self, IpcError> {
        let prefix: Prefix = name.prefix.parse()?;
        let num_words = place.size as usize * (1 + NUM_HALVES * SLOT_WORDS);
        if place.rank == 0 {
            return Ok(Self { region: Region::create(&prefix, &name.name, num_words * 4)?, place, timeout });
        }
        let deadline = Instant::now() + timeout;
        loop {
            match Region::open(&prefix, &name.name) {
                Ok(region) => return Ok(Self { region, place, timeout }),
                Err(error) if Instant::now() > deadline => return Err(error),
                Err(_) => thread::sleep(Duration::from_millis(1)),
            }
        }
    }

    fn words(&self, first: usize, count: usize) -> Result<&[AtomicU32], DeviceError> {
        let failed =
            |error: IpcError| DeviceError::Call { call: "group exchange".to_owned(), reason: error.to_string() };
        self.region.atomics_u32(first * 4, count).map_err(failed)
    }

    fn slot(&self, round: u32, worker: u32) -> Result<&[AtomicU32], DeviceError> {
        let size = self.place.size as usize;
        let index = round as usize % NUM_HALVES * size + worker as usize;
        self.words(size + index * SLOT_WORDS, SLOT_WORDS)
    }

    fn wait(&self, said: &AtomicU32, round: u32, worker: u32) -> Result<(), DeviceError> {
        let start = Instant::now();
        while said.load(Ordering::Acquire) <= round {
            if start.elapsed() > self.timeout {
                return Err(DeviceError::GroupTimeout {
                    tp_rank: self.place.rank,
                    waited_ms: start.elapsed().as_millis() as u64,
                    collective: format!("start-up exchange {round} with worker {worker}"),
                });
            }
            thread::sleep(Duration::from_micros(100));
        }
        Ok(())
    }
}

impl Exchange for ShmExchange {
    fn gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, DeviceError> {
        assert!(bytes.len() <= MAX_WORDS * 4, "{} bytes are more than a round carries", bytes.len());
        let said = self.words(0, self.place.size as usize)?;
        let mine = &said[self.place.rank as usize];
        let round = mine.load(Ordering::Relaxed);
        let slot = self.slot(round, self.place.rank)?;
        slot[0].store(bytes.len() as u32, Ordering::Relaxed);
        for (word, chunk) in slot[1..].iter().zip(bytes.chunks(4)) {
            let mut padded = [0; 4];
            padded[..chunk.len()].copy_from_slice(chunk);
            word.store(u32::from_le_bytes(padded), Ordering::Relaxed);
        }
        mine.store(round + 1, Ordering::Release);
        let hear = |worker: u32| {
            self.wait(&said[worker as usize], round, worker)?;
            let slot = self.slot(round, worker)?;
            let len = (slot[0].load(Ordering::Relaxed) as usize).min(MAX_WORDS * 4);
            let words = slot[1..].iter().take(len.div_ceil(4));
            let mut bytes: Vec<u8> = words.flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes()).collect();
            bytes.truncate(len);
            Ok(bytes)
        };
        (0..self.place.size).map(hear).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_worker_hears_all_others_in_every_round() {
        let name = ShmName { prefix: format!("exchange{}_", std::process::id()), name: "group".to_owned() };
        let worker = |rank: u32| {
            let name = name.clone();
            thread::spawn(move || {
                let place = TensorParallel { rank, size: 3 };
                let exchange = ShmExchange::open(&name, place, Duration::from_secs(10)).unwrap();
                (0..5u8)
                    .map(|round| exchange.gather(&vec![rank as u8; round as usize * 7]).unwrap())
                    .collect::<Vec<_>>()
            })
        };
        let workers: Vec<_> = (0..3).map(worker).collect();
        let heard: Vec<_> = workers.into_iter().map(|worker| worker.join().unwrap()).collect();
        for (round, all) in heard[0].iter().enumerate() {
            let expected: Vec<_> = (0..3u8).map(|rank| vec![rank; round * 7]).collect();
            assert_eq!(*all, expected);
        }
        assert!(heard.iter().all(|other| *other == heard[0]));
    }
}
