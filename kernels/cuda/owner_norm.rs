//! Sums over a tensor-parallel group with residual add and RMSNorm, for many rows. Each rank computes the rows that it
//! owns: it reads them from the other ranks' memory and writes the results there. Kernel: `owner_norm.cu`.

use half::bf16;

use super::all_reduce::{MAX_FLAG_BLOCKS, MAX_RANKS, Mapped, PeerGroup, PeerHandle, Shots, handle_of};
use super::error::ensure;
use super::{Arg, CudaError, DeviceBuffer, Launch, Queue, Span};

const OP: &str = "owner_norm";
/// Minimum size of a shared allocation. The driver gives larger allocations their own memory object, so that they can
/// have a handle.
pub const MIN_SHARED_BYTES: usize = 2 << 20;

/// A buffer of every rank of a group, mapped into this process.
#[derive(Debug)]
pub struct SharedBuffer {
    own: Span,
    rank: usize,
    peers: Vec<Option<Mapped>>,
}

impl SharedBuffer {
    /// The handle that other processes need for [`SharedBuffer::new`], of a buffer of at least [`MIN_SHARED_BYTES`].
    pub fn handle(buffer: &DeviceBuffer) -> Result<PeerHandle, CudaError> {
        let bytes = buffer.span().bytes();
        ensure!(
            OP,
            bytes >= MIN_SHARED_BYTES,
            "a buffer of {bytes} bytes; at least {MIN_SHARED_BYTES} are mapped whole"
        );
        handle_of(buffer.span())
    }

    /// Maps the buffers of the others: `handles[r]` is rank `r`'s, and `own` is rank `rank`'s. All have the same size.
    pub fn new(own: &DeviceBuffer, rank: usize, handles: &[PeerHandle]) -> Result<Self, CudaError> {
        let ranks = handles.len();
        ensure!(OP, rank < ranks && ranks <= MAX_RANKS, "rank {rank} of {ranks}");
        let map = |(r, handle): (usize, &PeerHandle)| (r != rank).then(|| Mapped::open(handle)).transpose();
        let peers = handles.iter().enumerate().map(map).collect::<Result<_, _>>()?;
        Ok(Self { own: own.span(), rank, peers })
    }

    /// This rank's buffer.
    pub fn own(&self) -> Span {
        self.own
    }

    fn addresses(&self) -> [u64; MAX_RANKS] {
        let mut addresses = [0; MAX_RANKS];
        for (rank, peer) in self.peers.iter().enumerate() {
            addresses[rank] = peer.as_ref().map_or(self.own.address(), Mapped::address);
        }
        addresses
    }
}

/// Operands of [`owner_norm`]. A rank owns every `ranks`-th row.
#[derive(Debug, Clone, Copy)]
pub struct OwnerNorm<'a> {
    /// `[rows, cols]` bf16 of every rank: the result.
    pub y: &'a SharedBuffer,
    /// `[rows, cols]` bf16 of every rank: the summands.
    pub partial: &'a SharedBuffer,
    /// `[rows, cols]` bf16 of this rank; only its own rows are updated.
    pub residual: Span,
    /// `[cols]` bf16, the norm's weight.
    pub weight: Span,
    /// Epsilon of the norm.
    pub eps: f32,
}

/// `residual += sum over the group of partial` in the rows that a rank owns, then `y = rms_norm(residual)` on every
/// rank. All ranks must call it with the same arguments, and use `group`, created from
/// [`super::all_reduce::PeerBuffer::for_flags`], for nothing else.
pub fn owner_norm(q: &Queue, group: &PeerGroup, x: OwnerNorm<'_>, rows: usize, cols: usize) -> Result<(), CudaError> {
    let OwnerNorm { y, partial, residual, weight, eps } = x;
    let ranks = group.ranks();
    let head = group.argument(&[y.own, partial.own, residual], rows, cols, Shots::One)?;
    ensure!(OP, matches!(ranks, 2 | 4 | 8), "{ranks} ranks; expected 2, 4 or 8");
    ensure!(OP, y.peers.len() == ranks && partial.peers.len() == ranks, "buffers of another number of ranks");
    ensure!(OP, y.rank == group.rank() && partial.rank == group.rank(), "buffers of another rank");
    ensure!(OP, weight.count::<bf16>() >= cols && weight.is_aligned(16), "weight is shorter than {cols} or unaligned");
    let distinct = y.own != partial.own && y.own.address() != residual.address();
    ensure!(
        OP,
        distinct && partial.own.address() != residual.address(),
        "two of y, partial and residual are one buffer"
    );
    let spans = [residual.address(), weight.address(), rows as u64 | u64::from(eps.to_bits()) << 32];
    let longs = [&partial.addresses()[..], &y.addresses(), &spans].concat();
    let args = [Arg::Bytes(&head), Arg::Bytes(bytemuck::cast_slice(&longs))];
    q.launch(&format!("owner_norm_bf16_r{ranks}"), launch(ranks, rows, cols), &args)
}

/// Makes each row of `y` `[rows, cols]` bf16 on every rank that of the rank that owns it. All ranks must call it with the same
/// arguments; `group` is that of [`owner_norm`].
pub fn owner_rows(q: &Queue, group: &PeerGroup, y: &SharedBuffer, rows: usize, cols: usize) -> Result<(), CudaError> {
    let ranks = group.ranks();
    let head = group.argument(&[y.own], rows, cols, Shots::One)?;
    ensure!(OP, matches!(ranks, 2 | 4 | 8), "{ranks} ranks; expected 2, 4 or 8");
    ensure!(OP, y.peers.len() == ranks && y.rank == group.rank(), "a buffer of another rank or number of ranks");
    let longs = [&[0; MAX_RANKS][..], &y.addresses(), &[0, 0, rows as u64]].concat();
    let args = [Arg::Bytes(&head), Arg::Bytes(bytemuck::cast_slice(&longs))];
    q.launch(&format!("owner_rows_bf16_r{ranks}"), launch(ranks, rows, cols), &args)
}

/// The blocks of both kernels.
fn launch(ranks: usize, rows: usize, cols: usize) -> Launch {
    let threads = ((cols / 8).div_ceil(32) * 32).min(1024) as u32;
    Launch::new(rows.div_ceil(ranks).min(MAX_FLAG_BLOCKS) as u32, threads)
}
