use std::path::Path;

use rustix::fs::Mode;

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

fn read(memory: &SharedMemory, slice: &RegionSlice) -> Result<Bytes, InferError> {
    memory.slice(slice)?.read()
}

fn slice(offset: u64, byte_size: u64) -> RegionSlice {
    RegionSlice { region: "r".into(), offset, byte_size }
}

#[test]
fn a_region_is_read_and_written_inside_its_bounds() {
    let object = Object::new("bounds", &[0, 1, 2, 3, 4, 5, 6, 7]);
    let memory = SharedMemory::new(true, ClientObjects::default());
    memory.register("r", &format!("/{}", object.0), 2, 4).unwrap();
    assert_eq!(read(&memory, &slice(1, 3)).unwrap(), Bytes::from_static(&[3, 4, 5]));
    memory.write(&slice(0, 2), "out", &[9]).unwrap();
    assert_eq!(read(&memory, &slice(0, 1)).unwrap(), Bytes::from_static(&[9]));
    assert!(read(&memory, &slice(1, 4)).unwrap_err().message.starts_with("Invalid offset + byte size"));
    assert!(read(&memory, &slice(u64::MAX, 4)).unwrap_err().message.starts_with("Invalid offset for"));
    assert!(memory.write(&slice(0, 1), "out", &[1, 2]).is_err());
    memory.unregister(MemoryKind::System, "r");
    assert_eq!(read(&memory, &slice(0, 1)).unwrap_err().kind, ErrorKind::NotFound);
}

/// A fake GPU in host memory.
#[derive(Debug)]
struct Fake(Mutex<Vec<u8>>);

impl ClientDevices for Arc<Fake> {
    fn open(&self, handle: &[u8; 64], device: u64, byte_size: u64) -> Result<Arc<dyn DeviceMemory>, String> {
        let fits = byte_size <= self.0.lock().unwrap().len() as u64;
        if handle[0] == b'h' && device == 0 && fits { Ok(self.clone()) } else { Err("cuIpcOpenMemHandle".into()) }
    }
}

impl DeviceMemory for Fake {
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), String> {
        into.copy_from_slice(&self.0.lock().unwrap()[offset as usize..][..into.len()]);
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), String> {
        self.0.lock().unwrap()[offset as usize..][..data.len()].copy_from_slice(data);
        Ok(())
    }
}

#[test]
fn device_memory_is_read_and_written_inside_its_bounds_and_released() {
    let gpu = Arc::new(Fake(Mutex::new(vec![0, 1, 2, 3, 4, 5, 6, 7])));
    let memory = SharedMemory::new(true, ClientObjects::default()).with_devices(Some(Arc::new(gpu.clone())));
    assert!(memory.register_cuda("r", &[b'h'; 63], 0, 8).is_err());
    assert!(memory.register_cuda("r", &[b'h'; 64], -1, 8).is_err());
    assert!(memory.register_cuda("r", &[b'h'; 64], 0, 0).is_err());
    let refused = memory.register_cuda("r", &[b'x'; 64], 0, 8).unwrap_err();
    assert!(refused.message.starts_with("failed to register shared memory region: invalid args"), "{refused}");
    memory.register_cuda("r", &[b'h'; 64], 0, 6).unwrap();
    assert_eq!(memory.register("r", "/x", 0, 1).unwrap_err().kind, ErrorKind::AlreadyExists);
    assert_eq!(read(&memory, &slice(1, 3)).unwrap(), Bytes::from_static(&[1, 2, 3]));
    let mut client_memory = ClientMemory::default();
    assert_eq!(memory.input(&slice(4, 2), "IN", DataType::Uint8, &mut client_memory).unwrap()[..], [4, 5]);
    assert!(client_memory.inputs.is_empty(), "no model maps device memory");
    memory.write(&slice(4, 2), "out", &[9, 9]).unwrap();
    assert_eq!(gpu.0.lock().unwrap()[..], [0, 1, 2, 3, 9, 9, 6, 7]);
    assert!(memory.write(&slice(0, 1), "out", &[1, 2]).is_err());
    assert!(read(&memory, &slice(5, 2)).unwrap_err().message.starts_with("Invalid offset + byte size"));
    assert!(memory.status("").unwrap().is_empty() && memory.status("r").is_err());
    let status = CudaRegionStatus { name: "r".into(), device: 0, byte_size: 6 };
    assert_eq!(memory.cuda_status("r").unwrap(), [status]);
    memory.unregister(MemoryKind::System, "");
    assert_eq!(memory.cuda_status("").unwrap().len(), 1);
    memory.unregister(MemoryKind::Cuda, "r");
    assert_eq!(memory.cuda_status("r").unwrap_err().kind, ErrorKind::NotFound);
    assert_eq!(Arc::strong_count(&gpu), 2, "what was opened is let go");
}

#[test]
fn a_truncated_object_is_an_error() {
    let object = Object::new("shrunk", &[0; 8]);
    let memory = SharedMemory::new(true, ClientObjects::default());
    memory.register("r", &object.0, 0, 8).unwrap();
    std::fs::write(format!("/dev/shm/{}", object.0), [0; 2]).unwrap();
    assert!(read(&memory, &slice(0, 8)).is_err());
    assert!(memory.write(&slice(0, 8), "out", &[0; 8]).is_err());
}

#[test]
fn reserved_names_are_refused() {
    let objects = ClientObjects { reserved_prefixes: vec!["prefix".into()], ..ClientObjects::default() };
    let memory = SharedMemory::new(true, objects);
    for key in ["/../etc/passwd", "..", "/", "/prefix0_ring", "a/b"] {
        assert!(memory.register("r", key, 0, 1).is_err(), "{key}");
    }
    for key in ["/vader_segment.host.0", "sm_segment.x", "/nccl-abc", "/psm2_shm.1", "/sem.lock", "/ucx_1"] {
        let error = memory.register("r", key, 0, 1).unwrap_err();
        assert!(error.message.contains("belongs to another program"), "{key}: {error}");
    }
    let off = SharedMemory::new(false, ClientObjects::default());
    assert_eq!(off.register("r", "/x", 0, 1).unwrap_err().kind, ErrorKind::Unsupported);
    let long = "n".repeat(5000);
    for (name, key) in [(long.as_str(), "/x"), ("r", long.as_str())] {
        let error = memory.register(name, key, 0, 1).unwrap_err();
        assert!(error.message.contains("--max-name-bytes"), "{error}");
    }
}

#[test]
fn objects_of_servers_links_and_pipes_are_refused_whatever_their_name() {
    let objects = ClientObjects { reserved_magic: b"trireme\x01".into(), ..ClientObjects::default() };
    let memory = SharedMemory::new(true, objects);
    let ring = Object::new("ring", b"trireme\x01 and more");
    let error = memory.register("r", &ring.0, 0, 8).unwrap_err();
    assert!(error.message.ends_with("belongs to the server"), "{error}");
    let shorter = Object::new("shorter", b"trireme");
    memory.register("shorter", &shorter.0, 0, 7).unwrap();
    let at = |name: &str| Path::new("/dev/shm").join(name);
    let link = Object(format!("{}_link", ring.0));
    std::os::unix::fs::symlink(at(&shorter.0), at(&link.0)).unwrap();
    assert!(memory.register("r", &link.0, 0, 1).is_err(), "a symbolic link");
    let hard_link = Object(format!("{}_hard", ring.0));
    std::fs::hard_link(at(&shorter.0), at(&hard_link.0)).unwrap();
    assert!(memory.register("r", &hard_link.0, 0, 1).is_err(), "a second name");
    let pipe = Object(format!("{}_pipe", ring.0));
    rustix::fs::mknodat(rustix::fs::CWD, at(&pipe.0), rustix::fs::FileType::Fifo, Mode::RWXU, 0).unwrap();
    assert!(memory.register("r", &pipe.0, 0, 1).is_err(), "a pipe");
}

#[test]
fn with_an_allow_list_other_names_are_refused() {
    let objects = ClientObjects { allowed_prefixes: vec!["front_test_".into()], ..ClientObjects::default() };
    let memory = SharedMemory::new(true, objects);
    let object = Object::new("allowed", &[0; 8]);
    memory.register("r", &object.0, 0, 8).unwrap();
    let error = memory.register("s", "/other", 0, 8).unwrap_err();
    assert!(error.message.ends_with("takes names that begin with `front_test_`"), "{error}");
}

#[test]
fn extreme_offsets_and_sizes_are_refused() {
    let object = Object::new("extremes", &[0; 8]);
    let memory = SharedMemory::new(true, ClientObjects::default());
    for (offset, byte_size) in [(0, 0), (0, 9), (8, 1), (u64::MAX, 1), (1, u64::MAX), (u64::MAX, u64::MAX), (9, 0)] {
        assert!(memory.register("r", &object.0, offset, byte_size).is_err(), "{offset}, {byte_size}");
    }
    memory.register("r", &object.0, 7, 1).unwrap();
    for (offset, byte_size) in [(0, 0), (0, 2), (1, 0), (1, 1), (u64::MAX, 1), (0, u64::MAX), (u64::MAX, u64::MAX)] {
        assert!(memory.check(&slice(offset, byte_size)).is_err(), "{offset}, {byte_size}");
    }
}

#[test]
fn a_sparse_object_is_limited_by_the_budget() {
    let object = Object::new("sparse", &[0; 8]);
    let path = Path::new("/dev/shm").join(&object.0);
    File::options().write(true).open(path).unwrap().set_len(1 << 40).unwrap();
    let budget = Budget::new(1000, crate::transport::budget::tests::NO_PROGRESS_LIMITS);
    let memory = SharedMemory::new(true, ClientObjects::default()).with_limits(8, Limits::default(), &budget);
    memory.register("r", &object.0, 0, 1 << 40).unwrap();
    let held = read(&memory, &slice(0, 600)).unwrap();
    for byte_size in [1 << 40, 600] {
        let error = read(&memory, &slice(0, byte_size)).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Unavailable, "{error}");
    }
    drop(held);
    assert_eq!(read(&memory, &slice(0, 600)).unwrap().len(), 600);
}

#[test]
fn the_number_of_regions_is_limited_and_regions_share_the_file_of_their_object() {
    let object = Object::new("many", &[0; 8]);
    let budget = Budget::new(1000, crate::transport::budget::tests::NO_PROGRESS_LIMITS);
    let memory = SharedMemory::new(true, ClientObjects::default()).with_limits(8, Limits::default(), &budget);
    (0..8).for_each(|count| memory.register(&count.to_string(), &object.0, 0, 8).unwrap());
    assert_eq!(memory.register("r", &object.0, 0, 8).unwrap_err().kind, ErrorKind::Unavailable);
    let regions = memory.regions();
    let files = regions.values().map(|region| match &region.backing {
        Backing::System { file, .. } => Arc::as_ptr(file),
        Backing::Cuda { .. } => std::ptr::null(),
    });
    assert_eq!(files.collect::<std::collections::BTreeSet<_>>().len(), 1);
}
