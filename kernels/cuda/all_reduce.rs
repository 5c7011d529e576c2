//! Sums over a tensor-parallel group through peer memory, for few rows. Kernel: `all_reduce.cu`.
//!
//! Each worker process creates a [`PeerBuffer`] and sends its handle to the others. With all handles it creates a
//! [`PeerGroup`].

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use cudarc::driver::sys;
use half::bf16;

use super::error::{check, ensure};
use super::{Arg, CudaError, DeviceBuffer, Gpu, Launch, PinnedBuffer, Queue, Span};

const OP: &str = "all_reduce";
/// Maximum number of ranks in a group.
pub const MAX_RANKS: usize = 8;
/// Maximum number of columns of a row.
pub const MAX_COLS: usize = 16_384;
/// Maximum number of blocks of a launch of [`super::owner_norm`]; each has its own flags and epoch.
pub(super) const MAX_FLAG_BLOCKS: usize = 512;
/// Number of columns that share an epoch, if epochs are counted by column instead of by row.
const COLS_OF_EPOCH: usize = 16;
/// Minimum size of an allocation. The driver gives larger allocations their own memory object, so that they can have a
/// handle.
const MIN_BYTES: usize = 2 << 20;

/// The data that another process needs to map a [`PeerBuffer`].
pub type PeerHandle = [u8; 64];

/// This worker's exchange buffer. The other workers write to it.
#[derive(Debug)]
pub struct PeerBuffer {
    buffer: DeviceBuffer,
    ranks: usize,
    max_rows: usize,
    max_cols: usize,
}

impl PeerBuffer {
    /// A buffer for sums of up to `max_rows` rows of `max_cols` columns over `ranks` ranks. It is zeroed when the call
    /// returns.
    pub fn new(gpu: &Arc<Gpu>, ranks: usize, max_rows: usize, max_cols: usize) -> Result<Self, CudaError> {
        ensure!(OP, (2..=MAX_RANKS).contains(&ranks), "{ranks} ranks; expected 2 to {MAX_RANKS}");
        let fits = max_rows > 0 && (8..=MAX_COLS).contains(&max_cols) && max_cols.is_multiple_of(8);
        ensure!(OP, fits, "{max_rows} rows of {max_cols} columns; a multiple of 8 to {MAX_COLS}");
        Self::zeroed(gpu, Self::bytes(ranks, max_rows, max_cols), [ranks, max_rows, max_cols])
    }

    /// Flags for [`super::owner_norm`], which transfers rows without packets.
    pub fn for_flags(gpu: &Arc<Gpu>, ranks: usize, max_rows: usize, max_cols: usize) -> Result<Self, CudaError> {
        ensure!(OP, (2..=MAX_RANKS).contains(&ranks), "{ranks} ranks; expected 2 to {MAX_RANKS}");
        Self::zeroed(gpu, Self::FLAG_BYTES, [ranks, max_rows, max_cols.min(MAX_COLS)])
    }

    /// Bytes that [`PeerBuffer::for_flags`] allocates.
    pub const FLAG_BYTES: usize = MIN_BYTES;

    fn zeroed(gpu: &Arc<Gpu>, bytes: usize, [ranks, max_rows, max_cols]: [usize; 3]) -> Result<Self, CudaError> {
        let buffer = DeviceBuffer::new(gpu, bytes)?;
        // SAFETY: the span is live, and the call returns when the stream has completed it.
        let code = unsafe { sys::cuMemsetD8_v2(buffer.span().address(), 0, bytes) };
        check(code, "cuMemsetD8")?;
        // SAFETY: waits for the null stream; no pointers.
        check(unsafe { sys::cuCtxSynchronize() }, "cuCtxSynchronize")?;
        Ok(Self { buffer, ranks, max_rows, max_cols })
    }

    /// Bytes that [`PeerBuffer::new`] allocates.
    pub fn bytes(ranks: usize, max_rows: usize, max_cols: usize) -> usize {
        (2 * (ranks + 1) * max_rows * max_cols * 4).max(MIN_BYTES)
    }

    /// The handle for the other processes of the group.
    pub fn handle(&self) -> Result<PeerHandle, CudaError> {
        handle_of(self.buffer.span())
    }
}

/// The handle, for other processes, of the allocation that starts at `span`.
pub(super) fn handle_of(span: Span) -> Result<PeerHandle, CudaError> {
    let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
    // SAFETY: `handle` is writable and the span is a live allocation of this process.
    check(unsafe { sys::cuIpcGetMemHandle(&mut handle, span.address()) }, "cuIpcGetMemHandle")?;
    Ok(handle.reserved.map(|byte| byte as u8))
}

/// Memory of another process, mapped into this one.
#[derive(Debug)]
pub(super) struct Mapped(u64);

impl Mapped {
    pub(super) fn address(&self) -> u64 {
        self.0
    }

    pub(super) fn open(handle: &PeerHandle) -> Result<Self, CudaError> {
        let handle = sys::CUipcMemHandle { reserved: handle.map(|byte| byte as _) };
        let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let mut address = 0;
        // SAFETY: `address` is writable; the handle came from `handle_of` in another process.
        check(unsafe { sys::cuIpcOpenMemHandle_v2(&mut address, handle, flags) }, "cuIpcOpenMemHandle")?;
        Ok(Self(address))
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: opened by `open`, closed once; after a failure (the peer died) nothing remains to be done.
        let _ = unsafe { sys::cuIpcCloseMemHandle(self.0) };
    }
}

/// A group whose ranks have mapped each other's exchange buffers. It is used either by this module, or by
/// [`super::linear_chain`], or by [`super::owner_norm`], because they count epochs differently.
#[derive(Debug)]
pub struct PeerGroup {
    own: PeerBuffer,
    peers: Vec<Option<Mapped>>,
    epochs: DeviceBuffer,
    status: PinnedBuffer,
    rank: usize,
    patience_ns: u64,
}

/// The algorithm of a sum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shots {
    /// Every rank sends to every other: lowest latency.
    One,
    /// Through the owner of each row: fewest bytes. The sum is rounded to bf16 before the next op.
    Two,
}

impl Shots {
    /// The faster algorithm for a message of `bytes`, by measurement on H200s (kernels/README.md).
    pub fn for_message(bytes: usize, ranks: usize) -> Self {
        let limit = if ranks <= 2 { 256 << 10 } else { 64 << 10 };
        if bytes <= limit { Shots::One } else { Shots::Two }
    }
}

impl PeerGroup {
    /// Maps the buffers of the others: `handles[r]` is rank `r`'s, and `own` is rank `rank`'s. A kernel that waits for
    /// a rank longer than `patience_ns` gives up; [`PeerGroup::missing_rank`] then returns the rank.
    ///
    /// No rank may reduce before all have called this. The caller's exchange of handles, or a barrier, guarantees it,
    /// because every buffer is zeroed before its handle is sent.
    pub fn new(
        gpu: &Arc<Gpu>,
        own: PeerBuffer,
        rank: usize,
        handles: &[PeerHandle],
        patience_ns: u64,
    ) -> Result<Self, CudaError> {
        ensure!(
            OP,
            handles.len() == own.ranks && rank < own.ranks,
            "{} handles for {} ranks",
            handles.len(),
            own.ranks
        );
        let map = |(r, handle): (usize, &PeerHandle)| (r != rank).then(|| Mapped::open(handle)).transpose();
        let peers = handles.iter().enumerate().map(map).collect::<Result<_, _>>()?;
        let num_epochs = own.max_rows.max(own.max_cols.div_ceil(COLS_OF_EPOCH)).max(MAX_FLAG_BLOCKS);
        let epochs = DeviceBuffer::from_slice(gpu, &vec![0u32; num_epochs])?;
        let status = PinnedBuffer::new(gpu, 256)?;
        Ok(Self { own, peers, epochs, status, rank, patience_ns })
    }

    /// Number of ranks in the group.
    pub fn ranks(&self) -> usize {
        self.own.ranks
    }

    /// This process's rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Maximum number of rows of a sum.
    pub fn max_rows(&self) -> usize {
        self.own.max_rows
    }

    /// The rank that a completed kernel waited for without success, if any; sums since then are wrong. Reads host
    /// memory only.
    pub fn missing_rank(&self) -> Option<usize> {
        // SAFETY: the buffer has 256 bytes at the start of a page and lives as long as `self`; kernels write the word
        // atomically.
        let word = unsafe { AtomicU32::from_ptr(self.status.as_ptr().cast_mut().cast()) };
        (word.load(Ordering::Acquire) as usize).checked_sub(1)
    }

    /// Maximum number of columns of a sum.
    pub fn max_cols(&self) -> usize {
        self.own.max_cols
    }

    /// `y [rows, cols]` = sum over the group of `partial [rows, cols]`, bf16; `y` may be `partial`. All ranks must call
    /// it with the same arguments.
    pub fn all_reduce(
        &self,
        q: &Queue,
        y: Span,
        partial: Span,
        rows: usize,
        cols: usize,
        shots: Shots,
    ) -> Result<(), CudaError> {
        let argument = self.argument(&[y, partial], rows, cols, shots)?;
        q.launch("all_reduce_bf16", launch(rows, cols), &[Arg::Bytes(&argument), y.into(), partial.into()])
    }

    /// `residual += sum over the group of partial`, then `y = rms_norm(residual)`; shapes `[rows, cols]`, weight
    /// `[cols]`, bf16. `y` may be `partial`, but not `residual`. All ranks must call it with the same arguments.
    #[allow(clippy::too_many_arguments)] // One op with its operands and its shape.
    pub fn all_reduce_add_norm(
        &self,
        q: &Queue,
        y: Span,
        residual: Span,
        partial: Span,
        weight: Span,
        rows: usize,
        cols: usize,
        eps: f32,
        shots: Shots,
    ) -> Result<(), CudaError> {
        let argument = self.argument(&[y, residual, partial], rows, cols, shots)?;
        ensure!(OP, y.address() != residual.address(), "y and residual are one buffer");
        let fits = weight.count::<bf16>() >= cols && weight.is_aligned(16);
        ensure!(OP, fits, "weight is shorter than {cols} or unaligned");
        let args = [Arg::Bytes(&argument), y.into(), residual.into(), partial.into(), weight.into(), eps.into()];
        q.launch("all_reduce_add_norm_bf16", launch(rows, cols), &args)
    }

    /// Gathers each rank's part into `z [ranks, rows, bytes]`; `bytes` must be a multiple of 16. All ranks must call it
    /// with the same arguments.
    pub fn all_gather(&self, q: &Queue, z: Span, rows: usize, bytes: usize) -> Result<(), CudaError> {
        ensure!(OP, bytes.is_multiple_of(16), "{bytes} bytes are not a multiple of 16");
        let cols = bytes / 2;
        let argument = self.argument(&[z], rows, cols, Shots::One)?;
        let found = z.bytes();
        ensure!(OP, found >= self.own.ranks * rows * bytes, "{found} bytes for {} parts", self.own.ranks);
        let launch = Launch::new(rows as u32, ((cols / 8).div_ceil(32) * 32).min(128) as u32);
        q.launch("all_gather_bf16", launch, &[Arg::Bytes(&argument), z.into(), (rows as u32).into()])
    }

    /// The kernel's `AllReduce`: eight peers, epochs, status, patience, six words.
    pub(super) fn argument(
        &self,
        buffers: &[Span],
        rows: usize,
        cols: usize,
        shots: Shots,
    ) -> Result<[u8; 112], CudaError> {
        let PeerBuffer { ranks, max_rows, max_cols, .. } = self.own;
        ensure!(OP, (1..=max_rows).contains(&rows), "{rows} rows; expected 1 to {max_rows}");
        ensure!(
            OP,
            cols.is_multiple_of(8) && (8..=max_cols).contains(&cols),
            "{cols} columns; a multiple of 8 to {max_cols}"
        );
        for span in buffers {
            ensure!(OP, span.count::<bf16>() >= rows * cols, "a buffer is shorter than {rows} x {cols}");
            ensure!(OP, span.is_aligned(16), "a buffer is not 16-byte aligned");
        }
        let mut longs = [0u64; MAX_RANKS + 3];
        for (rank, peer) in self.peers.iter().enumerate() {
            longs[rank] = peer.as_ref().map_or(self.own.buffer.span().address(), |mapped| mapped.0);
        }
        longs[MAX_RANKS] = self.epochs.span().address();
        longs[MAX_RANKS + 1] = self.status.span().address();
        longs[MAX_RANKS + 2] = self.patience_ns;
        let two_shots = u32::from(shots == Shots::Two);
        let words = [self.rank as u32, ranks as u32, max_rows as u32, cols as u32, two_shots, max_cols as u32];
        let mut argument = [0u8; 112];
        for (bytes, long) in argument.chunks_exact_mut(8).zip(longs) {
            bytes.copy_from_slice(&long.to_ne_bytes());
        }
        for (bytes, word) in argument[(MAX_RANKS + 3) * 8..].chunks_exact_mut(4).zip(words) {
            bytes.copy_from_slice(&word.to_ne_bytes());
        }
        Ok(argument)
    }
}

fn launch(rows: usize, cols: usize) -> Launch {
    Launch::new(rows as u32, ((cols / 8).div_ceil(32) * 32).min(1024) as u32)
}
