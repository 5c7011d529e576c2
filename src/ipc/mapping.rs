//! Memory-mapped files.

use std::fs::File;
use std::io;
use std::path::Path;

use rustix::mm::{MapFlags, ProtFlags, mmap};

/// Maps a file read-only until the process ends. Processes that map the same file share its pages.
///
/// It is never unmapped, so pointers into it stay valid. Call it only in processes that load one model and then end,
/// such as workers, `trireme plan` and `trireme lint`. In rank 0 the address space of each load would never be
/// released.
///
/// The file must not be truncated or rewritten while it is in use: replace it by a rename.
///
/// # Errors
/// Returns an error if the file cannot be opened or mapped.
pub fn map_file(path: &Path) -> io::Result<&'static [u8]> {
    let file = File::open(path)?;
    let bytes = usize::try_from(file.metadata()?.len()).map_err(io::Error::other)?;
    if bytes == 0 {
        return Ok(&[]);
    }
    // SAFETY: a new mapping at an address the kernel chooses touches no existing memory.
    let base = unsafe { mmap(std::ptr::null_mut(), bytes, ProtFlags::READ, MapFlags::PRIVATE, &file, 0) }?;
    // SAFETY: `bytes` bytes are mapped from there and never unmapped. Nobody truncates or rewrites the file, as
    // documented.
    Ok(unsafe { std::slice::from_raw_parts(base.cast::<u8>(), bytes) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapped_file_outlives_its_name() {
        let path = std::env::temp_dir().join(format!("mapped_{}", std::process::id()));
        std::fs::write(&path, [7; 5000]).unwrap();
        let mapped = map_file(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(mapped, [7; 5000]);
        assert_eq!(map_file(&path).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn an_empty_file_is_an_empty_slice() {
        let path = std::env::temp_dir().join(format!("mapped_empty_{}", std::process::id()));
        File::create(&path).unwrap();
        let mapped = map_file(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert!(mapped.is_empty());
    }
}
