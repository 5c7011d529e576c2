//! Sleep and wake: the device's memory is freed for a time, and the worker keeps its weights on the host.

use device::cpu::available_memory;
use ops::{Device, DeviceError};
use supervision::FromWorker;

use crate::adapters::ArrivingAdapters;
use crate::error::WorkerError;
use crate::run::{Rings, Steps};

/// The part of the free host memory that weights leave to others.
const LEFT_PART: u64 = 16;

impl<D: Device + 'static> Steps<'_, D> {
    /// Frees the device's memory, and reports it. Without enough host memory, reports why nothing has changed.
    pub(crate) fn sleep(&mut self, rings: &Rings) -> Result<(), WorkerError> {
        if self.is_busy() {
            return Err(WorkerError::Protocol { expected: "the end of all steps", found: "Sleep" });
        }
        let device = &mut self.worker.device;
        let needed = device.sleep_bytes();
        let refused = match lacks_memory(needed, self.worker.spec.num_local_workers, available_memory()) {
            Some(reason) => Some(reason),
            None => match device.sleep() {
                Ok(()) => None,
                Err(error @ DeviceError::OutOfMemory { .. }) => Some(error.to_string()),
                Err(error) => return Err(error.into()),
            },
        };
        self.is_asleep = refused.is_none();
        rings.send(&FromWorker::Slept { refused })
    }

    /// Takes the device's memory again. Rows and KV blocks are empty, as after a start.
    pub(crate) fn wake(&mut self, next_step: u64, rings: &Rings) -> Result<(), WorkerError> {
        if self.is_busy() {
            return Err(WorkerError::Protocol { expected: "the end of all steps", found: "Wake" });
        }
        self.worker.device.wake()?;
        self.is_asleep = false;
        self.rows = self.cache.empty_rows(self.worker.spec, next_step);
        self.adapters = ArrivingAdapters::default();
        rings.send(&FromWorker::Ready { slot_bytes: [0; 2] })
    }
}

/// Why the host cannot keep `needed` bytes for each of `num_workers` workers, of `free` bytes.
fn lacks_memory(needed: u64, num_workers: usize, free: u64) -> Option<String> {
    let all = needed.saturating_mul(num_workers as u64);
    let gib = |bytes: u64| format!("{:.2} GiB", bytes as f64 / f64::from(1 << 30));
    // 0 is unknown.
    (needed > 0 && free > 0 && all > free - free / LEFT_PART).then(|| {
        format!(
            "the weights of the workers of this node need {} of host memory, and {} are free; level 2 needs none",
            gib(all),
            gib(free)
        )
    })
}

#[cfg(test)]
mod tests {
    use super::lacks_memory;

    #[test]
    fn weights_leave_a_part_of_the_free_host_memory() {
        assert_eq!(lacks_memory(15 << 30, 1, 16 << 30), None);
        assert_eq!(lacks_memory(0, 8, 1), None);
        assert_eq!(lacks_memory(15 << 30, 1, 0), None, "the free memory is unknown");
        let reason = lacks_memory(8 << 30, 2, 16 << 30).unwrap();
        assert!(reason.contains("need 16.00 GiB of host memory, and 16.00 GiB are free"), "{reason}");
    }
}
