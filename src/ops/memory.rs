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
