//! Which build of this program runs here.

use std::fs::File;
use std::io::Read;

/// A checksum of the program's file and its length; zeros where it cannot be read.
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
    fn a_program_is_the_same_each_time_it_is_looked_at() {
        assert_eq!(super::current(), super::current());
        assert_ne!(super::current(), [0; 12]);
    }
}
