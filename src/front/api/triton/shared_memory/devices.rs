//! Device memory of clients: the interface that opens it.

use std::sync::Arc;

use serving::InferError;

/// Opens device memory of clients.
pub trait ClientDevices: std::fmt::Debug + Send + Sync {
    /// Opens the first `byte_size` bytes of the memory of `handle`, a `cudaIpcMemHandle_t`, on GPU `device`.
    ///
    /// # Errors
    /// With a message, when the memory cannot be opened.
    fn open(&self, handle: &[u8; 64], device: u64, byte_size: u64) -> Result<Arc<dyn DeviceMemory>, String>;
}

/// A region of device memory of a client. It is closed when dropped.
pub trait DeviceMemory: std::fmt::Debug + Send + Sync {
    /// Copies the bytes from `offset` to `into`.
    ///
    /// # Errors
    /// With a message, when the memory is no longer accessible.
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), String>;

    /// Copies `data` to `offset`.
    ///
    /// # Errors
    /// As [`DeviceMemory::read`].
    fn write(&self, offset: u64, data: &[u8]) -> Result<(), String>;
}

/// Runs work that creates or destroys a device context on a blocking thread, because the driver may take a second.
///
/// # Errors
/// The error of `work`.
pub async fn run_device_work(work: impl FnOnce() -> Result<(), InferError> + Send + 'static) -> Result<(), InferError> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| Err(InferError::internal(error.to_string())))
}
