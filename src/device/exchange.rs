//! Exchange of bytes between the workers of a group before their first collective.

use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ops::{DeviceError, TensorParallel};

/// Passes bytes between the workers of a group at start-up.
pub trait Exchange: Send + Sync {
    /// Gathers every worker's bytes, in rank order. All workers must call it equally often; it returns after all have
    /// called it.
    ///
    /// # Errors
    /// Returns an error if a worker does not take part in time.
    fn gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, DeviceError>;
}

/// An exchange through files in a directory that all workers can access. It must be empty at first.
#[derive(Debug)]
pub struct FileExchange {
    folder: PathBuf,
    tensor_parallel: TensorParallel,
    timeout: Duration,
    round: AtomicU64,
}

impl FileExchange {
    /// An exchange among `tensor_parallel.size` workers, with this timeout for each round.
    pub fn new(folder: PathBuf, tensor_parallel: TensorParallel, timeout: Duration) -> Self {
        Self { folder, tensor_parallel, timeout, round: AtomicU64::new(0) }
    }

    fn path(&self, round: u64, rank: u32) -> PathBuf {
        self.folder.join(format!("round{round}.rank{rank}"))
    }
}

impl Exchange for FileExchange {
    fn gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, DeviceError> {
        let round = self.round.fetch_add(1, Ordering::Relaxed);
        let mine = self.path(round, self.tensor_parallel.rank);
        let temporary = mine.with_extension(format!("tmp{}", self.tensor_parallel.rank));
        fs::write(&temporary, bytes).and_then(|()| fs::rename(&temporary, &mine)).map_err(|error| {
            DeviceError::Call { call: format!("writing {}", mine.display()), reason: error.to_string() }
        })?;
        let start = Instant::now();
        let wait_for = |rank| loop {
            if let Ok(bytes) = fs::read(self.path(round, rank)) {
                return Ok(bytes);
            }
            if start.elapsed() > self.timeout {
                return Err(DeviceError::GroupTimeout {
                    tp_rank: self.tensor_parallel.rank,
                    waited_ms: start.elapsed().as_millis() as u64,
                    collective: format!("start-up exchange {round} with worker {rank}"),
                });
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        (0..self.tensor_parallel.size).map(wait_for).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_worker_gets_every_workers_bytes_in_each_round() {
        let folder = std::env::temp_dir().join(format!("exchange-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let workers: Vec<_> = (0..3)
            .map(|rank| {
                let tp = TensorParallel { rank, size: 3 };
                let exchange = FileExchange::new(folder.clone(), tp, Duration::from_secs(20));
                std::thread::spawn(move || {
                    let first = exchange.gather(&[rank as u8]).unwrap();
                    (first, exchange.gather(&[rank as u8 + 10; 2]).unwrap())
                })
            })
            .collect();
        for worker in workers {
            let (first, second) = worker.join().unwrap();
            assert_eq!(first, [[0], [1], [2]]);
            assert_eq!(second, [[10; 2], [11; 2], [12; 2]]);
        }
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn an_absent_worker_is_named() {
        let folder = std::env::temp_dir().join(format!("exchange-alone-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let exchange =
            FileExchange::new(folder.clone(), TensorParallel { rank: 0, size: 2 }, Duration::from_millis(20));
        let error = exchange.gather(b"x").unwrap_err();
        assert!(error.to_string().contains("with worker 1"), "{error}");
        fs::remove_dir_all(&folder).unwrap();
    }
}
