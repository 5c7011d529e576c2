//! Named parts of POSIX shared memory that clients register, to pass tensors without sending them.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use serving::{ClientMemory, ClientSlice, DataType, ErrorKind, InferError, InferRequest};

use crate::ask::{OutputAsk, RegionSlice};

/// A registered region.
#[derive(Debug)]
pub struct Region {
    /// The client's name for it.
    pub name: String,
    /// The name of the shared-memory object.
    pub key: String,
    /// Where the region begins in the object.
    pub offset: u64,
    /// Its length.
    pub byte_size: u64,
    file: Arc<File>,
    object: (u64, u64),
}

/// What status answers about a region.
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

/// The regions of all clients.
///
/// An object is read and written as the file it is on Linux, so a client that truncates it gets an error and harms nobody.
#[derive(Debug)]
pub struct SharedMemory {
    is_allowed: bool,
    reserved_prefixes: Vec<String>,
    regions: Mutex<BTreeMap<String, Region>>,
}

/// Regions that may be registered at once.
const MAX_REGIONS: usize = 4096;

impl SharedMemory {
    /// No regions. `reserved_prefixes` begin names that are not a client's.
    pub fn new(is_allowed: bool, reserved_prefixes: Vec<String>) -> Self {
        Self { is_allowed, reserved_prefixes, regions: Mutex::default() }
    }

    fn regions(&self) -> MutexGuard<'_, BTreeMap<String, Region>> {
        self.regions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers a part of the object `key`.
    ///
    /// # Errors
    /// When the name is taken, or the object cannot be opened or is too small.
    pub fn register(&self, name: &str, key: &str, offset: u64, byte_size: u64) -> Result<(), InferError> {
        if !self.is_allowed {
            return Err(InferError::new(
                ErrorKind::Unsupported,
                "client shared memory is off; start the server with --allow-client-shm=true",
            ));
        }
        let mut regions = self.regions();
        if regions.contains_key(name) {
            return Err(InferError::new(
                ErrorKind::AlreadyExists,
                format!("shared memory region '{name}' already in manager"),
            ));
        }
        if regions.len() == MAX_REGIONS {
            return Err(InferError::unavailable(format!("{MAX_REGIONS} shared memory regions are registered already")));
        }
        let file = self.open(key)?;
        let metadata = file.metadata().map_err(|error| cannot_open(key, &error))?;
        let (length, object) = (metadata.len(), (metadata.dev(), metadata.ino()));
        if byte_size == 0 || offset.checked_add(byte_size).is_none_or(|end| end > length) {
            return Err(InferError::invalid(format!("failed to register shared memory region '{name}': invalid args")));
        }
        let region =
            Region { name: name.to_owned(), key: key.to_owned(), offset, byte_size, file: file.into(), object };
        regions.insert(name.to_owned(), region);
        Ok(())
    }

    fn open(&self, key: &str) -> Result<File, InferError> {
        let object = key.strip_prefix('/').unwrap_or(key);
        if object.is_empty() || object.contains('/') || object == "." || object == ".." {
            return Err(InferError::internal(format!(
                "Unable to open shared memory region: '{key}' is not the name of an object"
            )));
        }
        if self.reserved_prefixes.iter().any(|prefix| object.starts_with(prefix.as_str())) {
            return Err(InferError::invalid(format!("shared memory object '{key}' belongs to the server")));
        }
        let path = PathBuf::from("/dev/shm").join(object);
        OpenOptions::new().read(true).write(true).open(path).map_err(|error| cannot_open(key, &error))
    }

    /// Forgets a region; an unknown one is no error. An empty name forgets all.
    pub fn unregister(&self, name: &str) {
        let mut regions = self.regions();
        if name.is_empty() {
            regions.clear();
        } else {
            regions.remove(name);
        }
    }

    /// One region, or all when `name` is empty.
    ///
    /// # Errors
    /// When there is no such region.
    pub fn status(&self, name: &str) -> Result<Vec<RegionStatus>, InferError> {
        let regions = self.regions();
        if !name.is_empty() && !regions.contains_key(name) {
            return Err(InferError::new(
                ErrorKind::NotFound,
                format!("Unable to find system shared memory region: '{name}'"),
            ));
        }
        let chosen = regions.values().filter(|region| name.is_empty() || region.name == name);
        Ok(chosen
            .map(|region| RegionStatus {
                name: region.name.clone(),
                key: region.key.clone(),
                offset: region.offset,
                byte_size: region.byte_size,
            })
            .collect())
    }

    /// Checks that a slice lies inside its region.
    ///
    /// # Errors
    /// When it does not, or there is no such region.
    pub fn check(&self, slice: &RegionSlice) -> Result<(), InferError> {
        self.slice(slice).map(drop)
    }

    /// The bytes of a slice.
    ///
    /// # Errors
    /// When the slice is not in its region, or the object has shrunk.
    pub fn read(&self, slice: &RegionSlice) -> Result<Bytes, InferError> {
        self.slice(slice)?.read()
    }

    /// The bytes of an input, or none and a note in `places` where the model may read them. Strings are read, for their
    /// lengths have to be checked.
    ///
    /// # Errors
    /// As [`SharedMemory::read`].
    pub fn input(
        &self,
        slice: &RegionSlice,
        name: &str,
        datatype: DataType,
        places: &mut ClientMemory,
    ) -> Result<Bytes, InferError> {
        if datatype == DataType::Bytes {
            return self.read(slice);
        }
        places.inputs.push((name.to_owned(), self.slice(slice)?));
        Ok(Bytes::new())
    }

    /// Tells the model where outputs shall go. Places that are wrong are found when the output is there.
    ///
    /// # Errors
    /// When inputs that are in the way cannot be read.
    pub fn place_outputs(&self, asks: &[OutputAsk], request: &mut InferRequest) -> Result<(), InferError> {
        for (ask, region) in asks.iter().filter_map(|ask| Some((ask, ask.region.as_ref()?))) {
            if let Ok(slice) = self.slice(region) {
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
        let place = self.slice(slice)?;
        let (file, at) = (&place.file, place.offset);
        let length = file.metadata().map_err(|error| place.lost(&error))?.len();
        if at + data.len() as u64 > length {
            return Err(InferError::invalid(format!("shared memory of region '{}' has shrunk", slice.region)));
        }
        file.write_all_at(data, at).map_err(|error| place.lost(&error))
    }

    /// The part of the object.
    fn slice(&self, slice: &RegionSlice) -> Result<ClientSlice, InferError> {
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
        Ok(ClientSlice {
            file: region.file.clone(),
            object: region.object,
            offset: region.offset + slice.offset,
            byte_size: slice.byte_size,
            region: name.clone(),
        })
    }
}

fn cannot_open(key: &str, error: &std::io::Error) -> InferError {
    InferError::internal(format!("Unable to open shared memory region: '{key}': {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Object(String);

    impl Object {
        fn new(name: &str, data: &[u8]) -> Self {
            let name = format!("front_test_{}_{name}", std::process::id());
            std::fs::write(format!("/dev/shm/{name}"), data).unwrap();
            Self(name)
        }
    }

    impl Drop for Object {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(format!("/dev/shm/{}", self.0));
        }
    }

    fn slice(offset: u64, byte_size: u64) -> RegionSlice {
        RegionSlice { region: "r".into(), offset, byte_size }
    }

    #[test]
    fn a_region_is_read_and_written_inside_its_bounds() {
        let object = Object::new("bounds", &[0, 1, 2, 3, 4, 5, 6, 7]);
        let memory = SharedMemory::new(true, Vec::new());
        memory.register("r", &format!("/{}", object.0), 2, 4).unwrap();
        assert_eq!(memory.read(&slice(1, 3)).unwrap(), Bytes::from_static(&[3, 4, 5]));
        memory.write(&slice(0, 2), "out", &[9]).unwrap();
        assert_eq!(memory.read(&slice(0, 1)).unwrap(), Bytes::from_static(&[9]));
        assert!(memory.read(&slice(1, 4)).unwrap_err().message.starts_with("Invalid offset + byte size"));
        assert!(memory.read(&slice(u64::MAX, 4)).unwrap_err().message.starts_with("Invalid offset for"));
        assert!(memory.write(&slice(0, 1), "out", &[1, 2]).is_err());
        memory.unregister("r");
        assert_eq!(memory.read(&slice(0, 1)).unwrap_err().kind, ErrorKind::NotFound);
    }

    #[test]
    fn an_object_that_shrank_is_an_error() {
        let object = Object::new("shrunk", &[0; 8]);
        let memory = SharedMemory::new(true, Vec::new());
        memory.register("r", &object.0, 0, 8).unwrap();
        std::fs::write(format!("/dev/shm/{}", object.0), [0; 2]).unwrap();
        assert!(memory.read(&slice(0, 8)).is_err());
        assert!(memory.write(&slice(0, 8), "out", &[0; 8]).is_err());
    }

    #[test]
    fn names_that_are_not_a_clients_are_refused() {
        let memory = SharedMemory::new(true, vec!["prefix".into()]);
        for key in ["/../etc/passwd", "..", "/", "/prefix0_ring"] {
            assert!(memory.register("r", key, 0, 1).is_err(), "{key}");
        }
        let off = SharedMemory::new(false, Vec::new());
        assert_eq!(off.register("r", "/x", 0, 1).unwrap_err().kind, ErrorKind::Unsupported);
    }
}
