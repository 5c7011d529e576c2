//! Sleep: KV blocks and recurrent states are freed. Weights are in host memory anyway.

use ops::{AttentionSpec, Device, DeviceError};

use super::CpuDevice;

/// What a sleep freed.
pub(super) struct Asleep {
    spec: AttentionSpec,
    num_blocks: usize,
    num_states: usize,
}

impl CpuDevice {
    pub(super) fn free_cache(&mut self) {
        if let Some(cache) = self.cache.take() {
            let num_states = std::mem::take(&mut self.states).num_slots();
            self.asleep = Some(Asleep { spec: cache.spec, num_blocks: cache.num_blocks, num_states });
        }
    }

    pub(super) fn restore_cache(&mut self) -> Result<(), DeviceError> {
        let Some(Asleep { spec, num_blocks, num_states }) = self.asleep.take() else { return Ok(()) };
        self.allocate_cache(&spec, num_blocks)?;
        match num_states {
            0 => Ok(()),
            num_states => self.take_states(&spec, num_states),
        }
    }
}
