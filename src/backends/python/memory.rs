//! Blocks of shared memory for tensors too large for a message.
//!
//! A region is divided into blocks. A header of 64 bytes precedes each block, and its first word says whether the block is in
//! use. The writer sets that word, and the reader clears it, so that freeing a block needs no message. Bytes are copied through
//! the file of the region, so that no reference to memory exists that the other process may change.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use ipc::{IpcError, Prefix, Region};
use rustix::buffer::spare_capacity;

/// Size of the header before each block. Sizes of blocks are multiples of it.
pub(super) const HEADER: usize = 64;

/// The location of a tensor in shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Block {
    pub region: usize,
    pub offset: usize,
    pub len: usize,
}

/// A region of shared memory, and its file.
#[derive(Debug)]
pub(super) struct Shared {
    region: Region,
    file: File,
    /// Offset of the region's contents in the file.
    start: u64,
}

impl Shared {
    /// Makes a region of at least `bytes`.
    pub fn create(prefix: &Prefix, name: &str, bytes: usize) -> Result<Self, IpcError> {
        let region = Region::create(prefix, name, bytes.next_multiple_of(HEADER))?;
        let os = |source| IpcError::Os { action: "open", path: region.path().to_owned(), source };
        let file = File::options().read(true).write(true).open(region.path()).map_err(os)?;
        let size = file.metadata().map_err(os)?.len();
        Ok(Self { start: size - region.len() as u64, region, file })
    }

    pub fn path(&self) -> PathBuf {
        self.region.path().to_owned()
    }

    pub fn start(&self) -> u64 {
        self.start
    }

    pub fn len(&self) -> usize {
        self.region.len()
    }

    /// Removes its name after both processes have opened it, so that it does not outlive them.
    pub fn unlink(&self) {
        self.region.unlink();
    }

    /// Frees a block.
    pub fn release(&self, offset: usize) {
        let _ = self.mark(offset.saturating_sub(HEADER), false);
    }

    fn is_in_use(&self, header: usize) -> bool {
        self.region.atomics_u32(header, 1).is_ok_and(|flag| flag[0].load(Ordering::Acquire) != 0)
    }

    fn mark(&self, header: usize, in_use: bool) -> Result<(), IpcError> {
        self.region.atomics_u32(header, 1)?[0].store(u32::from(in_use), Ordering::Release);
        Ok(())
    }

    /// Copies the bytes of a block, and frees the block.
    pub fn take(&self, offset: usize, len: usize) -> Result<Bytes, IpcError> {
        let range = || IpcError::Range { path: self.path(), offset, len, size: self.len(), align: HEADER };
        let end = offset.checked_add(len).ok_or_else(range)?;
        let header = offset.checked_sub(HEADER).filter(|_| end <= self.len()).ok_or_else(range)?;
        let mut bytes = Vec::with_capacity(len);
        let os = |source| IpcError::Os { action: "read", path: self.path(), source };
        while bytes.len() < len {
            let at = self.start + (offset + bytes.len()) as u64;
            // Spare capacity need not be filled with zeros first. There may be more of it than requested.
            let read =
                rustix::io::pread(&self.file, spare_capacity(&mut bytes), at).map_err(|errno| os(errno.into()))?;
            if read == 0 {
                return Err(os(std::io::ErrorKind::UnexpectedEof.into()));
            }
        }
        bytes.truncate(len);
        self.mark(header, false)?;
        Ok(bytes.into())
    }

    fn fill(&self, offset: usize, bytes: &[u8]) -> Result<(), IpcError> {
        let os = |source| IpcError::Os { action: "write", path: self.path(), source };
        self.file.write_all_at(bytes, self.start + offset as u64).map_err(os)
    }
}

/// Regions that the server writes to.
#[derive(Debug, Default)]
pub(super) struct Arena {
    regions: Vec<(Shared, Blocks)>,
}

impl Arena {
    /// Copies `bytes` into a free block. `None` when no region has room for them.
    pub fn put(&mut self, bytes: &[u8]) -> Result<Option<Block>, IpcError> {
        for (number, (shared, blocks)) in self.regions.iter_mut().enumerate() {
            let Some(header) = blocks.claim(shared.len(), Self::needed(bytes.len()), |at| shared.is_in_use(at)) else {
                continue;
            };
            shared.mark(header, true)?;
            shared.fill(header + HEADER, bytes)?;
            return Ok(Some(Block { region: number, offset: header + HEADER, len: bytes.len() }));
        }
        Ok(None)
    }

    /// Size of a block, with its header, for a tensor of `len` bytes.
    pub fn needed(len: usize) -> usize {
        HEADER + len.next_multiple_of(HEADER)
    }

    /// Adds a region; returns its number.
    pub fn add(&mut self, shared: Shared) -> usize {
        self.regions.push((shared, Blocks::default()));
        self.regions.len() - 1
    }

    /// The region with this number.
    pub fn region(&self, number: usize) -> Option<&Shared> {
        self.regions.get(number).map(|(shared, _)| shared)
    }

    /// Number of regions.
    pub fn len(&self) -> usize {
        self.regions.len()
    }
}

/// Blocks of a region that were in use at the last check: start and end, sorted by start.
#[derive(Debug, Default)]
struct Blocks(Vec<(usize, usize)>);

impl Blocks {
    /// Claims the first gap of at least `needed` bytes, and returns its start.
    fn claim(&mut self, size: usize, needed: usize, is_in_use: impl Fn(usize) -> bool) -> Option<usize> {
        self.0.retain(|&(start, _)| is_in_use(start));
        let mut free = 0;
        let gap = self.0.iter().position(|&(start, end)| {
            let fits = start - free >= needed;
            free = if fits { free } else { end };
            fits
        });
        if gap.is_none() && size - free < needed {
            return None;
        }
        self.0.insert(gap.unwrap_or(self.0.len()), (free, free + needed));
        Some(free)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prefix() -> Prefix {
        format!("pymem{}_", std::process::id()).parse().unwrap()
    }

    #[test]
    fn a_block_is_free_again_once_it_was_read() {
        let mut arena = Arena::default();
        arena.add(Shared::create(&prefix(), "reuse", 512).unwrap());
        let first = arena.put(&[1; 100]).unwrap().unwrap();
        let second = arena.put(&[2; 100]).unwrap().unwrap();
        assert_eq!(arena.put(&[3; 200]).unwrap(), None, "the region is full");

        let region = arena.region(0).unwrap();
        assert_eq!(region.take(first.offset, first.len).unwrap(), vec![1; 100]);
        let third = arena.put(&[3; 90]).unwrap().unwrap();
        assert_eq!(third.offset, first.offset);
        let region = arena.region(0).unwrap();
        assert_eq!(region.take(second.offset, second.len).unwrap(), vec![2; 100]);
        assert_eq!(region.take(third.offset, third.len).unwrap(), vec![3; 90]);
    }

    #[test]
    fn a_block_outside_its_region_is_refused() {
        let shared = Shared::create(&prefix(), "outside", 256).unwrap();
        for (offset, len) in [(0, 8), (64, 1 << 20), (usize::MAX, 2), (32, 8)] {
            assert!(shared.take(offset, len).is_err(), "{len} bytes at {offset} were read");
        }
    }
}
