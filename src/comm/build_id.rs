//! Identifies the build of this program.

use std::fs::File;
use std::io::Read;

/// The length and a checksum of the program's file; zeros when it cannot be read.
pub(crate) fn current() -> [u8; 12] {
    let (mut hasher, mut len, mut id) = (crc32fast::Hasher::new(), 0u64, [0; 12]);
    let Ok(mut file) = File::open("/proc/self/exe") else { return id };
    let mut bytes = vec![0; 1 << 20];
    while let Ok(count @ 1..) = file.read(&mut bytes) {
        hasher.update(&bytes[..count]);
        len += count as u64;
    }
    id[..8].copy_from_slice(&len.to_le_bytes());
    id[8..].copy_from_slice(&hasher.finalize().to_le_bytes());
    id
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_id_of_a_program_does_not_change() {
        assert_eq!(super::current(), super::current());
        assert_ne!(super::current(), [0; 12]);
    }
}
