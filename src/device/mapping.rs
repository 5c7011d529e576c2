//! Memory-mapped files.

use std::fs::File;
use std::io;
use std::path::Path;

/// Maps a file of weights read-only until the process ends.
///
/// It is never unmapped, because devices keep pointers into it. Call it only in processes that load one model and then
/// end, such as workers, `trireme plan` and `trireme lint`. In rank 0 the address space of each load would never be
/// released.
///
/// The file must not be truncated or rewritten while it is in use: replace a checkpoint by a rename.
///
/// # Errors
/// Returns an error if the file cannot be opened or mapped.
pub fn map_file(path: &Path) -> io::Result<&'static [u8]> {
    let file = File::open(path)?;
    if file.metadata()?.len() == 0 {
        return Ok(&[]);
    }
    // SAFETY: the mapping is private and read-only. Whoever installs checkpoints must not truncate the file, as
    // documented.
    let mapping = unsafe { memmap2::Mmap::map(&file)? };
    Ok(&*Box::leak(Box::new(mapping)))
}
