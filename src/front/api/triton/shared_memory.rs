//! Shared memory of clients: named regions of POSIX shared memory or GPU memory through which tensors are passed.

mod devices;
mod objects;
mod slice;

use std::any::Any;
use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use serving::{ClientMemory, ClientSlice, CopyBudget, DataType, ErrorKind, InferError, InferRequest, Limit, Limits};

pub use self::devices::{ClientDevices, DeviceMemory, run_device_work};
pub use self::objects::ClientObjects;
use self::slice::{Slice, unusable};
use crate::api::triton::output_request::{OutputRequest, RegionSlice};
use crate::transport::budget::{Budget, Charge};

/// Default of the maximum registered regions.
pub const DEFAULT_MAX_REGIONS: usize = 4096;

/// A registered region.
#[derive(Debug)]
struct Region {
    byte_size: u64,
    backing: Backing,
}

/// The memory of a region.
#[derive(Debug)]
enum Backing {
    /// A part of the shared-memory object `key`; `object` is its device and inode.
    System { key: String, offset: u64, file: Arc<File>, object: (u64, u64) },
    /// GPU memory.
    Cuda { device: u64, memory: Arc<dyn DeviceMemory> },
}

/// The status of a region of system memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegionStatus {
    /// The name of the region.
    pub name: String,
    /// The name of the shared-memory object.
    pub key: String,
    /// Offset of the region in the object in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub byte_size: u64,
}

/// The status of a region of device memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CudaRegionStatus {
    /// The name of the region.
    pub name: String,
    /// The GPU.
    pub device: u64,
    /// Length in bytes.
    pub byte_size: u64,
}

/// The kind of a region. Names are unique over both kinds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryKind {
    /// POSIX shared memory.
    System,
    /// Device memory.
    Cuda,
}

/// The regions of all clients.
///
/// Objects are accessed by `read` and `write` calls instead of mappings, so that a client that truncates an object causes an error
/// and not a fault of the process.
#[derive(Debug)]
pub struct SharedMemory {
    is_allowed: bool,
    objects: ClientObjects,
    max_regions: usize,
    limits: Limits,
    budget: Option<Arc<dyn CopyBudget>>,
    devices: Option<Arc<dyn ClientDevices>>,
    regions: Mutex<BTreeMap<String, Region>>,
}

/// Charges copies of shared memory to the budget of requests.
#[derive(Debug)]
struct RequestCopyBudget(Arc<Budget>);

impl CopyBudget for RequestCopyBudget {
    fn hold(&self, count: u64) -> Result<Box<dyn Any + Send + Sync>, InferError> {
        let charge: Charge = self.0.charge();
        charge.add(usize::try_from(count).unwrap_or(usize::MAX))?;
        Ok(Box::new(charge))
    }
}

impl SharedMemory {
    /// An empty table. `objects` selects the objects that clients may register.
    pub fn new(is_allowed: bool, objects: ClientObjects) -> Self {
        let (limits, regions) = <(Limits, Mutex<_>)>::default();
        Self { is_allowed, objects, max_regions: DEFAULT_MAX_REGIONS, limits, budget: None, devices: None, regions }
    }

    /// Sets the maximum number of regions, each of which keeps a file open, the limits of names, and the budget of copies.
    pub fn with_limits(self, max_regions: usize, limits: Limits, budget: &Arc<Budget>) -> Self {
        Self { max_regions, limits, budget: Some(Arc::new(RequestCopyBudget(budget.clone()))), ..self }
    }

    /// Sets the interface to device memory.
    pub fn with_devices(self, devices: Option<Arc<dyn ClientDevices>>) -> Self {
        Self { devices, ..self }
    }

    fn regions(&self) -> MutexGuard<'_, BTreeMap<String, Region>> {
        self.regions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers a part of the shared-memory object `key`.
    ///
    /// # Errors
    /// When the name is in use, or the object cannot be opened or is too small.
    pub fn register(&self, name: &str, key: &str, offset: u64, byte_size: u64) -> Result<(), InferError> {
        let mut regions = self.lock_to_add(name)?;
        let (file, length, object) = self.objects.open(key, &self.limits)?;
        if byte_size == 0 || offset.checked_add(byte_size).is_none_or(|end| end > length) {
            return Err(InferError::invalid(format!("failed to register shared memory region '{name}': invalid args")));
        }
        // Regions of one object share an open file.
        let same = regions.values().find_map(|region| match &region.backing {
            Backing::System { file, object: known, .. } if *known == object => Some(file.clone()),
            _ => None,
        });
        let backing =
            Backing::System { key: key.to_owned(), offset, file: same.unwrap_or_else(|| file.into()), object };
        regions.insert(name.to_owned(), Region { byte_size, backing });
        Ok(())
    }

    /// Registers the device memory of `handle`, a `cudaIpcMemHandle_t`.
    ///
    /// # Errors
    /// When the name is in use, or the memory cannot be opened or is too small.
    pub fn register_cuda(&self, name: &str, handle: &[u8], device: i64, byte_size: u64) -> Result<(), InferError> {
        drop(self.lock_to_add(name)?);
        let invalid = |why: &str| {
            InferError::invalid(format!(
                "failed to register shared memory region: invalid args: region '{name}': {why}"
            ))
        };
        let handle = handle.try_into().map_err(|_| invalid("a cudaIpcMemHandle_t has 64 bytes"))?;
        let device = u64::try_from(device).map_err(|_| invalid("a device's number is not negative"))?;
        if byte_size == 0 {
            return Err(invalid("it has no bytes"));
        }
        let devices = self.devices.as_ref().ok_or_else(|| invalid("this server opens no device memory"))?;
        // The driver may be slow and is called without the lock.
        let memory = devices.open(handle, device, byte_size).map_err(|why| invalid(&why))?;
        self.lock_to_add(name)?
            .insert(name.to_owned(), Region { byte_size, backing: Backing::Cuda { device, memory } });
        Ok(())
    }

    /// Locks the table after checking that a region can be added under `name`.
    fn lock_to_add(&self, name: &str) -> Result<MutexGuard<'_, BTreeMap<String, Region>>, InferError> {
        if !self.is_allowed {
            return Err(InferError::new(
                ErrorKind::Unsupported,
                "client shared memory is off; start the server with --allow-client-shm=true",
            ));
        }
        self.limits.check(Limit::NameBytes, name.len())?;
        let regions = self.regions();
        if regions.contains_key(name) {
            let words = format!("shared memory region '{name}' already in manager");
            return Err(InferError::new(ErrorKind::AlreadyExists, words));
        }
        if regions.len() >= self.max_regions {
            let count = self.max_regions;
            return Err(InferError::unavailable(format!("{count} shared memory regions are registered already")));
        }
        Ok(regions)
    }

    /// Removes a region of this kind, or all of them if `name` is empty. An unknown region is not an error.
    pub fn unregister(&self, kind: MemoryKind, name: &str) {
        let is_selected =
            |known: &String, region: &mut Region| region.backing.kind() == kind && (name.is_empty() || known == name);
        let removed: Vec<(String, Region)> = self.regions().extract_if(.., is_selected).collect();
        drop(removed); // After the lock is released, because this may destroy a device context.
    }

    /// The status of a region of system memory, or of all if `name` is empty.
    ///
    /// # Errors
    /// When the region does not exist.
    pub fn status(&self, name: &str) -> Result<Vec<RegionStatus>, InferError> {
        let status = |known: &String, region: &Region| match &region.backing {
            Backing::System { key, offset, .. } => Some(RegionStatus {
                name: known.clone(),
                key: key.clone(),
                offset: *offset,
                byte_size: region.byte_size,
            }),
            Backing::Cuda { .. } => None,
        };
        self.statuses(name, "system", status)
    }

    /// The status of a region of device memory, or of all if `name` is empty.
    ///
    /// # Errors
    /// When the region does not exist.
    pub fn cuda_status(&self, name: &str) -> Result<Vec<CudaRegionStatus>, InferError> {
        let status = |known: &String, region: &Region| match region.backing {
            Backing::Cuda { device, .. } => {
                Some(CudaRegionStatus { name: known.clone(), device, byte_size: region.byte_size })
            }
            Backing::System { .. } => None,
        };
        self.statuses(name, "cuda", status)
    }

    fn statuses<S>(
        &self,
        name: &str,
        kind: &str,
        status: impl Fn(&String, &Region) -> Option<S>,
    ) -> Result<Vec<S>, InferError> {
        let regions = self.regions();
        let chosen = regions.iter().filter(|(known, _)| name.is_empty() || *known == name);
        let found: Vec<S> = chosen.filter_map(|(known, region)| status(known, region)).collect();
        if found.is_empty() && !name.is_empty() {
            let words = match regions.get(name).map(|region| region.backing.kind()) {
                None => format!("Unable to find {kind} shared memory region: '{name}'"),
                Some(MemoryKind::System) => {
                    format!("The region named '{name}' is registered as system shared memory, not CUDA shared memory")
                }
                Some(MemoryKind::Cuda) => {
                    format!("The region named '{name}' is registered as CUDA shared memory, not system shared memory")
                }
            };
            return Err(InferError::new(ErrorKind::NotFound, words));
        }
        Ok(found)
    }

    /// Checks that a slice is inside its region.
    ///
    /// # Errors
    /// When it is not, or the region does not exist.
    pub fn check(&self, slice: &RegionSlice) -> Result<(), InferError> {
        self.slice(slice).map(drop)
    }

    /// The data of an input, or no data and an entry in `client_memory`, from which the model reads it. Strings are read here because
    /// their lengths must be checked, and device memory because models cannot map it.
    ///
    /// # Errors
    /// When the slice is not in its region, or the object has been truncated.
    pub fn input(
        &self,
        slice: &RegionSlice,
        name: &str,
        datatype: DataType,
        client_memory: &mut ClientMemory,
    ) -> Result<Bytes, InferError> {
        match self.slice(slice)? {
            Slice::System(slice) if datatype != DataType::Bytes => {
                client_memory.inputs.push((name.to_owned(), slice));
                Ok(Bytes::new())
            }
            slice => slice.read(),
        }
    }

    /// Adds the destinations of outputs in system memory to the request. An invalid destination is reported when the output is
    /// written.
    ///
    /// # Errors
    /// When an input that overlaps an output cannot be read.
    pub fn set_output_destinations(
        &self,
        outputs: &[OutputRequest],
        request: &mut InferRequest,
    ) -> Result<(), InferError> {
        for (output, region) in outputs.iter().filter_map(|output| Some((output, output.region.as_ref()?))) {
            if let Ok(Slice::System(slice)) = self.slice(region) {
                request.client_memory.outputs.push((output.name.clone(), slice));
            }
        }
        request.fetch_overwritten_inputs()
    }

    /// Writes the data of an output into a slice.
    ///
    /// # Errors
    /// When the slice is too small or not in its region, or the object has been truncated.
    pub fn write(&self, slice: &RegionSlice, output: &str, data: &[u8]) -> Result<(), InferError> {
        if (slice.byte_size as usize) < data.len() {
            return Err(InferError::internal(format!(
                "shared memory size specified with the request for output '{output}' ({} bytes) \
                 should be at least {} bytes to hold the results",
                slice.byte_size,
                data.len()
            )));
        }
        let target = match self.slice(slice)? {
            Slice::System(target) => target,
            Slice::Cuda { memory, offset, .. } => {
                return memory.write(offset, data).map_err(|why| unusable(&slice.region, &why));
            }
        };
        let (file, offset) = (&target.file, target.offset);
        let length = file.metadata().map_err(|error| target.lost(&error))?.len();
        if offset + data.len() as u64 > length {
            return Err(InferError::invalid(format!("shared memory of region '{}' has shrunk", slice.region)));
        }
        file.write_all_at(data, offset).map_err(|error| target.lost(&error))
    }

    /// Resolves a slice.
    fn slice(&self, slice: &RegionSlice) -> Result<Slice, InferError> {
        let regions = self.regions();
        let name = &slice.region;
        let region = regions.get(name).ok_or_else(|| {
            InferError::new(ErrorKind::NotFound, format!("Unable to find shared memory region: '{name}'"))
        })?;
        if slice.offset >= region.byte_size {
            return Err(InferError::invalid(format!("Invalid offset for shared memory region: '{name}'")));
        }
        let fits = slice.offset.checked_add(slice.byte_size).is_some_and(|end| end <= region.byte_size);
        if !fits || slice.byte_size == 0 {
            return Err(InferError::invalid(format!("Invalid offset + byte size for shared memory region: '{name}'")));
        }
        let byte_size = slice.byte_size;
        Ok(match &region.backing {
            Backing::System { offset, file, object, .. } => Slice::System(ClientSlice {
                file: file.clone(),
                object: *object,
                offset: offset + slice.offset,
                byte_size,
                region: name.clone(),
                budget: self.budget.clone(),
            }),
            Backing::Cuda { memory, .. } => Slice::Cuda {
                memory: memory.clone(),
                offset: slice.offset,
                byte_size,
                region: name.clone(),
                budget: self.budget.clone(),
            },
        })
    }
}

impl Backing {
    fn kind(&self) -> MemoryKind {
        match self {
            Backing::System { .. } => MemoryKind::System,
            Backing::Cuda { .. } => MemoryKind::Cuda,
        }
    }
}

#[cfg(test)]
mod tests;
