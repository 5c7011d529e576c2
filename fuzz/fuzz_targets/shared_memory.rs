//! Registers, reads and writes regions of an object of 4096 bytes. Input: steps of 19 bytes.
#![no_main]

use std::path::PathBuf;
use std::sync::LazyLock;

use front::fuzz::Regions;
use libfuzzer_sys::fuzz_target;

const SIZE: u64 = 4096;
const NAMES: [&str; 4] = ["a", "b", "", "../c"];

static OBJECT: LazyLock<(PathBuf, String)> = LazyLock::new(|| {
    let name = format!("trireme_fuzz_{}_object", std::process::id());
    let path = PathBuf::from("/dev/shm").join(&name);
    std::fs::write(&path, vec![7; SIZE as usize]).expect("/dev/shm can be written");
    (path, name)
});

fuzz_target!(|data: &[u8]| {
    let (path, object) = &*OBJECT;
    let regions = Regions::default();
    for step in data.chunks_exact(19) {
        let [what, name, key] = [step[0], step[1], step[2]];
        let number = |at: usize| u64::from_le_bytes(step[at..at + 8].try_into().expect("8 bytes"));
        let (offset, byte_size) = (number(3), number(11));
        let name = NAMES[usize::from(name) % NAMES.len()];
        match what % 5 {
            0 | 1 => {
                let key = match key % 4 {
                    0 | 1 => format!("/{object}"),
                    2 => format!("/reserved_{object}"),
                    _ => String::from_utf8_lossy(&step[3..]).into_owned(),
                };
                if regions.register(name, &key, offset, byte_size).is_ok() {
                    assert!(offset.checked_add(byte_size).is_some_and(|end| end <= SIZE), "{offset} {byte_size}");
                }
            }
            2 => {
                if let Ok(bytes) = regions.read(name, offset, byte_size) {
                    assert!(bytes.len() as u64 == byte_size && byte_size <= SIZE);
                }
            }
            3 => {
                let _ = regions.write(name, offset, byte_size, &step[..usize::from(key) % 19]);
            }
            _ => regions.unregister(name),
        }
        assert_eq!(std::fs::metadata(path).expect("the object is there").len(), SIZE);
    }
});
