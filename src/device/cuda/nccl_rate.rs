//! Measures how fast NCCL sums over the GPUs of this machine, for reports before a model is loaded.

use std::path::PathBuf;
use std::time::Instant;

use kernels::cuda::{DeviceBuffer, Gpu, Queue};
use ops::{DeviceError, TensorParallel};

use super::device_error;
use super::nccl::Nccl;
use crate::Exchange;

/// Bytes of a sum in a decode step, and in a long prefill.
const SMALL_BYTES: usize = 8 << 10;
const LARGE_BYTES: usize = 64 << 20;
const WARM_UPS: usize = 5;
const REPEATS: usize = 20;

/// The measured rates, over all GPUs of the group.
#[derive(Debug, Clone, Copy)]
pub struct NcclRate {
    /// Time of a sum of 8 KiB, in seconds.
    pub small_seconds: f64,
    /// Bytes per second that each GPU sends and receives in a sum of 64 MiB: the bus bandwidth as defined by NCCL's own
    /// tests.
    pub bus_bytes_per_second: f64,
}

/// Joins the group as one of its workers and measures together with the others; all must call it at the same time.
///
/// # Errors
/// Returns an error without the driver, that GPU or NCCL, or if a worker does not take part.
pub fn nccl_rate(
    ordinal: usize,
    tp: TensorParallel,
    exchange: &dyn Exchange,
    library_dirs: &[PathBuf],
) -> Result<NcclRate, DeviceError> {
    let gpu = Gpu::open(ordinal).map_err(device_error)?;
    let queue = Queue::new(&gpu).map_err(device_error)?;
    let buffer = DeviceBuffer::new(&gpu, LARGE_BYTES).map_err(device_error)?;
    queue.fill(buffer.span(), 0).map_err(device_error)?;
    let nccl = Nccl::new(tp.rank, tp.size, exchange, library_dirs)?;
    let seconds_of = |bytes: usize| -> Result<f64, DeviceError> {
        let run = |times: usize| -> Result<(), DeviceError> {
            (0..times).try_for_each(|_| nccl.all_reduce(&queue, buffer.span().part(0, bytes)))?;
            queue.wait().map_err(device_error)
        };
        run(WARM_UPS)?;
        let started = Instant::now();
        run(REPEATS)?;
        Ok(started.elapsed().as_secs_f64() / REPEATS as f64)
    };
    let (small_seconds, large_seconds) = (seconds_of(SMALL_BYTES)?, seconds_of(LARGE_BYTES)?);
    // No worker may leave while another is still summing.
    exchange.gather(&[])?;
    let share = 2.0 * f64::from(tp.size - 1) / f64::from(tp.size);
    Ok(NcclRate { small_seconds, bus_bytes_per_second: LARGE_BYTES as f64 / large_seconds * share })
}
