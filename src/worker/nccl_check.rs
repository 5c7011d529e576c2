//! `trireme nccl-check`: one of the processes with which `launch doctor` measures NCCL.

use std::path::PathBuf;
use std::time::Duration;

use device::cuda::{FileExchange, NcclRate, nccl_rate};
use device::{DeviceError, TensorParallel};

/// How long the others may take to start.
const PATIENCE: Duration = Duration::from_secs(45);

/// One process of a measurement.
#[derive(Debug, Clone)]
pub struct NcclCheck {
    /// Its place, which is also its GPU.
    pub rank: u32,
    /// Processes in all.
    pub size: u32,
    /// Where they meet: a folder that is empty at first.
    pub folder: PathBuf,
    /// Where NVIDIA's libraries are looked for first.
    pub library_dirs: Vec<PathBuf>,
}

impl NcclCheck {
    /// Measures with the others; what was found, as JSON.
    ///
    /// # Errors
    /// Without the driver, the GPU or NCCL, or when another process does not take part.
    pub fn run(&self) -> Result<String, DeviceError> {
        let tp = TensorParallel { rank: self.rank, size: self.size };
        let exchange = FileExchange::new(self.folder.clone(), tp, PATIENCE);
        let rate = nccl_rate(self.rank as usize, tp, &exchange, &self.library_dirs)?;
        let NcclRate { small_seconds, bus_bytes_per_second } = rate;
        Ok(serde_json::json!({
            "small_seconds": small_seconds,
            "bus_bytes_per_second": bus_bytes_per_second,
        })
        .to_string())
    }
}
