//! GPU memory that clients register. Rank 0 opens it itself, without a worker.

use std::sync::Arc;

use device::cuda::ClientMemory;
use front::{ClientDevices, DeviceMemory};

/// The GPUs that the driver shows to this process. The driver is not used before a client registers memory.
#[derive(Debug)]
pub(crate) struct Gpus;

/// A registered region.
#[derive(Debug)]
struct Region(ClientMemory);

impl ClientDevices for Gpus {
    fn open(&self, handle: &[u8; 64], device: u64, byte_size: u64) -> Result<Arc<dyn DeviceMemory>, String> {
        let (device, bytes) = (number(device)?, number(byte_size)?);
        let memory = ClientMemory::open(handle, device, bytes).map_err(|error| error.to_string())?;
        Ok(Arc::new(Region(memory)))
    }
}

impl DeviceMemory for Region {
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), String> {
        self.0.read(number(offset)?, into).map_err(|error| error.to_string())
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), String> {
        self.0.write(number(offset)?, data).map_err(|error| error.to_string())
    }
}

fn number(number: u64) -> Result<usize, String> {
    usize::try_from(number).map_err(|error| error.to_string())
}
