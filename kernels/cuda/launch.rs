//! What a launch and a copy of rows consist of.

use std::ffi::c_void;

use super::Span;

/// A kernel argument.
#[derive(Debug, Clone, Copy)]
pub enum Arg<'a> {
    /// A device pointer.
    Pointer(u64),
    /// An unsigned integer.
    U32(u32),
    /// A wide integer.
    U64(u64),
    /// A float.
    F32(f32),
    /// A structure by value, as the kernel declares it.
    Bytes(&'a [u8]),
}

impl From<Span> for Arg<'_> {
    fn from(span: Span) -> Self {
        Arg::Pointer(span.address())
    }
}

impl From<u32> for Arg<'_> {
    fn from(value: u32) -> Self {
        Arg::U32(value)
    }
}

impl From<u64> for Arg<'_> {
    fn from(value: u64) -> Self {
        Arg::U64(value)
    }
}

impl From<f32> for Arg<'_> {
    fn from(value: f32) -> Self {
        Arg::F32(value)
    }
}

impl Arg<'_> {
    pub(super) fn pointer(&self) -> *mut c_void {
        match self {
            Arg::Pointer(value) | Arg::U64(value) => std::ptr::from_ref(value).cast_mut().cast(),
            Arg::U32(value) => std::ptr::from_ref(value).cast_mut().cast(),
            Arg::F32(value) => std::ptr::from_ref(value).cast_mut().cast(),
            Arg::Bytes(value) => value.as_ptr().cast_mut().cast(),
        }
    }
}

/// Geometry of a launch.
#[derive(Debug, Clone, Copy)]
pub struct Launch {
    /// Number of thread blocks.
    pub grid: [u32; 3],
    /// Number of threads in a block.
    pub block: [u32; 3],
    /// Dynamic shared memory of a block, in bytes.
    pub shared_bytes: u32,
    /// Number of thread blocks in a cluster along x; 1 means no cluster.
    pub cluster: u32,
    /// Whether the kernel may start before its predecessor has ended; it must then call `pdl_wait`.
    pub early: bool,
}

impl Launch {
    /// `grid` blocks of `block` threads, without dynamic shared memory, with permission to start early.
    pub fn new(grid: u32, block: u32) -> Self {
        Self { grid: [grid, 1, 1], block: [block, 1, 1], shared_bytes: 0, cluster: 1, early: true }
    }

    /// The same with another shape of the grid.
    pub fn grid(self, x: u32, y: u32, z: u32) -> Self {
        Self { grid: [x, y, z], ..self }
    }

    /// The same with dynamic shared memory.
    pub fn shared(self, bytes: u32) -> Self {
        Self { shared_bytes: bytes, ..self }
    }

    /// The same with clusters of `blocks` along x.
    pub fn cluster(self, blocks: u32) -> Self {
        Self { cluster: blocks, ..self }
    }
}

/// Rows of equal size in device memory.
#[derive(Debug, Clone, Copy)]
pub struct Rows {
    /// From the first row to the end of the last.
    pub memory: Span,
    /// Distance in bytes from one row to the next; at least `bytes`.
    pub pitch: usize,
    /// Bytes of a row.
    pub bytes: usize,
    /// Number of rows.
    pub count: usize,
}

impl Rows {
    pub(super) fn check(&self) {
        let &Self { memory, pitch, bytes, count } = self;
        assert!(pitch >= bytes, "rows of {bytes} bytes start every {pitch}");
        let needed = count.saturating_sub(1) * pitch + if count > 0 { bytes } else { 0 };
        assert!(needed <= memory.bytes(), "{count} rows need {needed} bytes of {}", memory.bytes());
    }

    pub(super) fn row(&self, index: usize) -> Span {
        self.memory.part(index * self.pitch, self.bytes)
    }
}
