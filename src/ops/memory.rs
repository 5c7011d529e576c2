//! The memory of a worker: estimated before anything is loaded, and of the host.

use crate::DeviceError;

/// The kind of device to estimate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// The CPU.
    Cpu,
    /// A CUDA GPU.
    Cuda,
}

/// The estimated memory of a worker; [`crate::MemoryPlan`] has the values after loading.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryEstimate {
    /// Bytes of weights.
    pub weights_bytes: u64,
    /// Part of the weights that stays in the page cache, which workers share.
    pub mapped_bytes: u64,
    /// Bytes of activations and scratch buffers.
    pub workspace_bytes: u64,
    /// Part of the workspace that holds copies on their way to host memory and back.
    pub host_buffer_bytes: u64,
    /// Bytes of buffers for communication in a group.
    pub communicator_bytes: u64,
    /// Bytes left free for graphs and the driver.
    pub reserve_bytes: u64,
    /// Bytes of one KV block in all layers.
    pub block_bytes: u64,
    /// Bytes of one slot for the recurrent states of a sequence; 0 if the model has none.
    pub state_bytes: u64,
}

impl MemoryEstimate {
    /// Number of bytes that are needed besides KV blocks.
    pub fn fixed_bytes(&self) -> u64 {
        self.weights_bytes + self.workspace_bytes + self.communicator_bytes + self.reserve_bytes
    }

    /// Whether a tier in host memory of the default size is worth its buffers on a device with `free_bytes` before it loads: they
    /// take a sixteenth of the room for KV blocks at most.
    pub fn affords_host_buffers(&self, free_bytes: u64) -> bool {
        let without = self.without_host_buffers();
        let room = free_bytes.saturating_sub(without.fixed_bytes() - without.mapped_bytes);
        self.host_buffer_bytes <= room / 16
    }

    /// The same worker without a tier in host memory.
    pub fn without_host_buffers(self) -> Self {
        Self { workspace_bytes: self.workspace_bytes - self.host_buffer_bytes, host_buffer_bytes: 0, ..self }
    }
}

/// Host memory for [`HostSlots`]. Its bytes stay where they are when the owner moves. It may outlive the process.
pub type HostMemory = Box<dyn AsMut<[u8]> + Send>;

/// Slots in host memory for what is evicted from a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct HostSlots {
    /// For KV blocks.
    pub num_blocks: usize,
    /// For recurrent states.
    pub num_states: usize,
}

impl HostSlots {
    /// Checks that slots of these sizes, for a block and for a state, fit into memory.
    ///
    /// # Errors
    /// When they do not.
    pub fn check(self, [block_bytes, state_bytes]: [usize; 2], memory_bytes: usize) -> Result<(), DeviceError> {
        let blocks = self.num_blocks.checked_mul(block_bytes);
        let needed = blocks
            .zip(self.num_states.checked_mul(state_bytes))
            .and_then(|(blocks, states)| blocks.checked_add(states));
        match needed.is_some_and(|needed| needed <= memory_bytes) {
            true => Ok(()),
            false => Err(DeviceError::Call {
                call: "allocate_host".into(),
                reason: format!(
                    "{self:?} of {block_bytes} and {state_bytes} bytes do not fit into {memory_bytes} bytes"
                ),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_of_a_tier_take_a_sixteenth_of_the_room_for_blocks_at_most() {
        let estimate = MemoryEstimate {
            weights_bytes: 1000,
            mapped_bytes: 200,
            workspace_bytes: 140,
            host_buffer_bytes: 100,
            communicator_bytes: 30,
            reserve_bytes: 30,
            block_bytes: 1,
            state_bytes: 0,
        };
        assert!(estimate.affords_host_buffers(900 + 1600) && !estimate.affords_host_buffers(900 + 1599));
        assert_eq!(estimate.without_host_buffers().fixed_bytes(), 1100);
        assert!(estimate.without_host_buffers().affords_host_buffers(0));
    }
}
