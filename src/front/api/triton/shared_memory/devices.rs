//! Device memory of clients: the interface that opens it.

use std::sync::Arc;

use serving::InferError;

/// Opens device memory of clients.
pub trait ClientDevices: std::fmt::Debug + Send + Sync {
    /// The first `byte_size` bytes of what `handle`, a `cudaIpcMemHandle_t`, names on GPU `device`.
    ///
    /// # Errors
    /// In words, when they cannot be had.
    fn open(&self, handle: &[u8; 64], device: u64, byte_size: u64) -> Result<Arc<dyn DeviceMemory>, String>;
}

/// A region of device memory of a client. It is closed when dropped.
pub trait DeviceMemory: std::fmt::Debug + Send + Sync {
    /// Copies bytes from `offset` on.
    ///
    /// # Errors
    /// In words, when they are not there any more.
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), String>;

    /// Copies `data` to the bytes from `offset` on.
    ///
    /// # Errors
    /// As [`DeviceMemory::read`].
    fn write(&self, offset: u64, data: &[u8]) -> Result<(), String>;
}

/// Runs what makes or ends a device context, which takes a driver a second, where no client waits for it.
///
/// # Errors
/// The work's own.
pub async fn query_devices(work: impl FnOnce() -> Result<(), InferError> + Send + 'static) -> Result<(), InferError> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| Err(InferError::internal(error.to_string())))
}
