//! Files as memory.

use std::fs::File;
use std::io;
use std::path::Path;

/// Maps a file of weights read-only for the rest of the process.
///
/// It is never unmapped, for devices keep pointers into it: call it in processes that load one model and end with it, as
/// workers, `trireme plan` and `trireme lint` do, and never in rank 0, which would keep the address space of each load.
///
/// The file must not be shortened or rewritten while it serves: replace a checkpoint by a rename.
///
/// # Errors
/// When the file cannot be opened or mapped.
pub fn map_file(path: &Path) -> io::Result<&'static [u8]> {
    let file = File::open(path)?;
    if file.metadata()?.len() == 0 {
        return Ok(&[]);
    }
    // SAFETY: the mapping is private and read-only; that nobody shortens the file is the documented duty of
    // whoever puts checkpoints in place.
    let mapping = unsafe { memmap2::Mmap::map(&file)? };
    Ok(&*Box::leak(Box::new(mapping)))
}
