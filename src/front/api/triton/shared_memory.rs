//! Named parts of POSIX shared memory, or of a GPU's memory, that clients register to pass tensors without sending them.

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

pub use self::devices::{ClientDevices, DeviceMemory, query_devices};
pub use self::objects::ClientObjects;
use self::slice::{Slice, unusable};
use crate::api::triton::output_request::{OutputRequest, RegionSlice};
use crate::transport::budget::{Budget, Charge};

/// Regions that may be registered at once.
pub const MAX_REGIONS: usize = 4096;

/// A registered region.
#[derive(Debug)]
struct Region {
    byte_size: u64,
    place: Place,
}

/// Where a region lies.
#[derive(Debug)]
enum Place {
    /// In the object `key`, from `offset` on.
    System { key: String, offset: u64, file: Arc<File>, object: (u64, u64) },
    /// On a GPU.
    Cuda { device: u64, memory: Arc<dyn DeviceMemory> },
}

/// What status answers about a region of system memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegionStatus {
    /// The client's name for it.
    pub name: String,
    /// The name of the shared-memory object.
    pub key: String,
    /// Where the region begins in the object.
    pub offset: u64,
    /// Its length.
    pub byte_size: u64,
}

/// What status answers about a region of device memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CudaRegionStatus {
    /// The client's name for it.
    pub name: String,
    /// The GPU.
    pub device: u64,
    /// Its length.
    pub byte_size: u64,
}

/// Which regions are meant. Their names are one name space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryKind {
    /// POSIX shared memory.
    System,
    /// Device memory.
    Cuda,
}

/// The regions of all clients.
///
/// An object is read and written as the file it is on Linux, so a client that truncates it gets an error, without harm to others.
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

/// Requests that are in flight pay for copies, as they do for bodies.
#[derive(Debug)]
struct OfRequests(Arc<Budget>);

impl CopyBudget for OfRequests {
    fn hold(&self, count: u64) -> Result<Box<dyn Any + Send + Sync>, InferError> {
        let charge: Charge = self.0.charge();
        charge.add(usize::try_from(count).unwrap_or(usize::MAX))?;
        Ok(Box::new(charge))
    }
}

impl SharedMemory {
    /// No regions, of `objects` that are a client's.
    pub fn new(is_allowed: bool, objects: ClientObjects) -> Self {
        let (limits, regions) = <(Limits, Mutex<_>)>::default();
        Self { is_allowed, objects, max_regions: MAX_REGIONS, limits, budget: None, devices: None, regions }
    }

    /// The same with at most `max_regions`, each of which keeps a file open; with limits on names, and copies paid from `budget`.
    pub fn within(self, max_regions: usize, limits: Limits, budget: &Arc<Budget>) -> Self {
        Self { max_regions, limits, budget: Some(Arc::new(OfRequests(budget.clone()))), ..self }
    }

    /// The same, with device memory through `devices`.
    pub fn with_devices(self, devices: Option<Arc<dyn ClientDevices>>) -> Self {
        Self { devices, ..self }
    }

    fn regions(&self) -> MutexGuard<'_, BTreeMap<String, Region>> {
        self.regions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers a part of the object `key`.
    ///
    /// # Errors
    /// When the name is taken, or the object cannot be opened or is too small.
    pub fn register(&self, name: &str, key: &str, offset: u64, byte_size: u64) -> Result<(), InferError> {
        let mut regions = self.room_for(name)?;
        let (file, length, object) = self.objects.open(key, &self.limits)?;
        if byte_size == 0 || offset.checked_add(byte_size).is_none_or(|end| end > length) {
            return Err(InferError::invalid(format!("failed to register shared memory region '{name}': invalid args")));
        }
        // Regions of one object keep one file open.
        let same = regions.values().find_map(|region| match &region.place {
            Place::System { file, object: known, .. } if *known == object => Some(file.clone()),
            _ => None,
        });
        let place = Place::System { key: key.to_owned(), offset, file: same.unwrap_or_else(|| file.into()), object };
        regions.insert(name.to_owned(), Region { byte_size, place });
        Ok(())
    }

    /// Registers device memory that `handle` names.
    ///
    /// # Errors
    /// When the name is taken, or the memory cannot be opened or is too small.
    pub fn register_cuda(&self, name: &str, handle: &[u8], device: i64, byte_size: u64) -> Result<(), InferError> {
        drop(self.room_for(name)?);
        let refused = |why: &str| {
            InferError::invalid(format!(
                "failed to register shared memory region: invalid args: region '{name}': {why}"
            ))
        };
        let handle = handle.try_into().map_err(|_| refused("a cudaIpcMemHandle_t has 64 bytes"))?;
        let device = u64::try_from(device).map_err(|_| refused("a device's number is not negative"))?;
        if byte_size == 0 {
            return Err(refused("it has no bytes"));
        }
        let devices = self.devices.as_ref().ok_or_else(|| refused("this server opens no device memory"))?;
        // A driver may take long: it runs without the lock.
        let memory = devices.open(handle, device, byte_size).map_err(|why| refused(&why))?;
        self.room_for(name)?.insert(name.to_owned(), Region { byte_size, place: Place::Cuda { device, memory } });
        Ok(())
    }

    /// The regions, to which one may be added under that name.
    fn room_for(&self, name: &str) -> Result<MutexGuard<'_, BTreeMap<String, Region>>, InferError> {
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

    /// Forgets a region of that kind; an unknown one is no error. An empty name forgets all of them.
    pub fn unregister(&self, kind: MemoryKind, name: &str) {
        let is_meant =
            |known: &String, region: &mut Region| region.place.kind() == kind && (name.is_empty() || known == name);
        let gone: Vec<(String, Region)> = self.regions().extract_if(.., is_meant).collect();
        drop(gone); // Not while others wait: it may end a device's context.
    }

    /// One region of system memory, or all when `name` is empty.
    ///
    /// # Errors
    /// When there is no such region.
    pub fn status(&self, name: &str) -> Result<Vec<RegionStatus>, InferError> {
        let status = |known: &String, region: &Region| match &region.place {
            Place::System { key, offset, .. } => Some(RegionStatus {
                name: known.clone(),
                key: key.clone(),
                offset: *offset,
                byte_size: region.byte_size,
            }),
            Place::Cuda { .. } => None,
        };
        self.statuses(name, "system", status)
    }

    /// One region of device memory, or all when `name` is empty.
    ///
    /// # Errors
    /// When there is no such region.
    pub fn cuda_status(&self, name: &str) -> Result<Vec<CudaRegionStatus>, InferError> {
        let status = |known: &String, region: &Region| match region.place {
            Place::Cuda { device, .. } => {
                Some(CudaRegionStatus { name: known.clone(), device, byte_size: region.byte_size })
            }
            Place::System { .. } => None,
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
            let words = match regions.get(name).map(|region| region.place.kind()) {
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

    /// Checks that a slice lies inside its region.
    ///
    /// # Errors
    /// When it does not, or there is no such region.
    pub fn check(&self, slice: &RegionSlice) -> Result<(), InferError> {
        self.slice(slice).map(drop)
    }

    /// The bytes of an input, or none and a note in `places` where the model may read them. Strings are read, for their
    /// lengths have to be checked, and so is device memory, which no model maps.
    ///
    /// # Errors
    /// When the slice is not in its region, or the object has shrunk.
    pub fn input(
        &self,
        slice: &RegionSlice,
        name: &str,
        datatype: DataType,
        places: &mut ClientMemory,
    ) -> Result<Bytes, InferError> {
        match self.slice(slice)? {
            Slice::System(place) if datatype != DataType::Bytes => {
                places.inputs.push((name.to_owned(), place));
                Ok(Bytes::new())
            }
            place => place.read(),
        }
    }

    /// Sets where the model puts outputs. Wrong places are found when the output is there.
    ///
    /// # Errors
    /// When inputs that are in the way cannot be read.
    pub fn place_outputs(&self, asks: &[OutputRequest], request: &mut InferRequest) -> Result<(), InferError> {
        for (ask, region) in asks.iter().filter_map(|ask| Some((ask, ask.region.as_ref()?))) {
            if let Ok(Slice::System(slice)) = self.slice(region) {
                request.client_memory.outputs.push((ask.name.clone(), slice));
            }
        }
        request.fetch_overwritten_inputs()
    }

    /// Writes an output into its slice.
    ///
    /// # Errors
    /// When the slice is too small, not in its region, or the object has shrunk.
    pub fn write(&self, slice: &RegionSlice, output: &str, data: &[u8]) -> Result<(), InferError> {
        if (slice.byte_size as usize) < data.len() {
            return Err(InferError::internal(format!(
                "shared memory size specified with the request for output '{output}' ({} bytes) \
                 should be at least {} bytes to hold the results",
                slice.byte_size,
                data.len()
            )));
        }
        let place = match self.slice(slice)? {
            Slice::System(place) => place,
            Slice::Cuda { memory, offset, .. } => {
                return memory.write(offset, data).map_err(|why| unusable(&slice.region, &why));
            }
        };
        let (file, at) = (&place.file, place.offset);
        let length = file.metadata().map_err(|error| place.lost(&error))?.len();
        if at + data.len() as u64 > length {
            return Err(InferError::invalid(format!("shared memory of region '{}' has shrunk", slice.region)));
        }
        file.write_all_at(data, at).map_err(|error| place.lost(&error))
    }

    /// The part of the region.
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
        Ok(match &region.place {
            Place::System { offset, file, object, .. } => Slice::System(ClientSlice {
                file: file.clone(),
                object: *object,
                offset: offset + slice.offset,
                byte_size,
                region: name.clone(),
                budget: self.budget.clone(),
            }),
            Place::Cuda { memory, .. } => Slice::Cuda {
                memory: memory.clone(),
                offset: slice.offset,
                byte_size,
                region: name.clone(),
                budget: self.budget.clone(),
            },
        })
    }
}

impl Place {
    fn kind(&self) -> MemoryKind {
        match self {
            Place::System { .. } => MemoryKind::System,
            Place::Cuda { .. } => MemoryKind::Cuda,
        }
    }
}

#[cfg(test)]
mod tests;
