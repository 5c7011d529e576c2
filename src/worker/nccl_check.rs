//! `trireme nccl-check`: one of the processes that measure NCCL for `launch doctor`.

use std::path::PathBuf;
use std::time::Duration;

use device::FileExchange;
use device::cuda::{NcclRate, nccl_rate};
use ops::{DeviceError, TensorParallel};

/// How long the other processes may take to start.
const START_TIMEOUT: Duration = Duration::from_secs(45);

/// One process of a measurement.
#[derive(Debug, Clone)]
pub struct NcclCheck {
    /// Its rank, which is also the ordinal of its GPU.
    pub rank: u32,
    /// Number of processes.
    pub size: u32,
    /// Folder through which the processes exchange ids; empty at first.
    pub folder: PathBuf,
    /// Directories that are searched first for NVIDIA's libraries.
    pub library_dirs: Vec<PathBuf>,
}

impl NcclCheck {
    /// Measures together with the other processes; returns the result as JSON.
    ///
    /// # Errors
    /// Without the driver, the GPU or NCCL, or when another process does not take part.
    pub fn run(&self) -> Result<String, DeviceError> {
        let tp = TensorParallel { rank: self.rank, size: self.size };
        let exchange = FileExchange::new(self.folder.clone(), tp, START_TIMEOUT);
        let rate = nccl_rate(self.rank as usize, tp, &exchange, &self.library_dirs)?;
        let NcclRate { small_seconds, bus_bytes_per_second } = rate;
        Ok(serde_json::json!({
            "small_seconds": small_seconds,
            "bus_bytes_per_second": bus_bytes_per_second,
        })
        .to_string())
    }
}
