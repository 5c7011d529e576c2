//! Collectives of a tensor-parallel group: peer memory for few rows, NCCL for the rest. With `batch_invariant`, every sum goes through
//! peer memory and adds in f32 in the order of the workers, whatever its number of rows.

use std::ops::Range;
use std::sync::Arc;

use half::bf16;
use kernels::cuda::all_reduce::{PeerBuffer, PeerGroup, PeerHandle, Shots};
use kernels::cuda::layer_norm::{LayerNormWeight, add_layer_norm};
use kernels::cuda::linear_chain;
use kernels::cuda::owner_norm::{OwnerNorm, SharedBuffer, owner_norm, owner_rows};
use kernels::cuda::rms_norm::add_rms_norm;
use kernels::cuda::sample::ARGMAX_CHUNKS;
use kernels::cuda::{CudaError, DeviceBuffer, Gpu, Queue, Span};
use ops::{DeviceError, TensorParallel};

use super::nccl::{CommunicatorKind, Joining, unlink_shared_memory};
use super::{CudaConfig, device_error};
use crate::Exchange;

/// Maximum number of rows of a sum through peer memory.
const MAX_PEER_ROWS: usize = 256;
/// Bytes of a sample's candidates, which are gathered through the same memory.
const CANDIDATE_BYTES: usize = ARGMAX_CHUNKS * 8;
/// Timeout of a kernel that waits for another worker.
const TIMEOUT_NS: u64 = 10_000_000_000;
/// Columns of the buffer that tests whether workers can map each other's memory.
const PROBE_COLS: usize = 1024;

/// A worker's access to its group; empty for a group of one.
pub(crate) struct Group {
    nccl: Option<Joining>,
    /// The buffer of the test whether workers can map each other's memory. It is kept, because there is no way to know
    /// when the others have unmapped it.
    probe: Option<PeerGroup>,
    peers: Option<PeerGroup>,
    /// For sums that are fused with products.
    fused: Option<PeerGroup>,
    /// For sums of many rows, with the activations that are summed.
    owners: Option<Owners>,
    exchange: Option<Arc<dyn Exchange>>,
    tp: TensorParallel,
    uses_peers: bool,
    /// Whether sums must not depend on the number of rows.
    is_invariant: bool,
}

/// The state of [`owner_norm`]: its flags, and buffers that every worker has mapped.
struct Owners {
    flags: PeerGroup,
    buffers: Vec<SharedBuffer>,
}

impl Owners {
    fn buffer(&self, span: Span) -> Option<&SharedBuffer> {
        self.buffers.iter().find(|buffer| buffer.own().address() == span.address())
    }
}

/// Operands of [`Group::reduce_add_norm`].
#[derive(Clone, Copy)]
pub(crate) struct ReduceAddNorm {
    pub(crate) out: Span,
    pub(crate) residual: Span,
    pub(crate) partial: Span,
    pub(crate) weight: Span,
    /// Used instead of `weight` for a layer norm.
    pub(crate) layer_norm: Option<LayerNormWeight>,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) eps: f32,
}

impl Group {
    pub(crate) fn new(config: &CudaConfig, gpu: &Arc<Gpu>) -> Result<Self, DeviceError> {
        let tp = config.tensor_parallel;
        let mut group = Self {
            nccl: None,
            probe: None,
            peers: None,
            fused: None,
            owners: None,
            exchange: None,
            tp,
            uses_peers: config.use_fast_kernels,
            is_invariant: config.batch_invariant,
        };
        if tp.size == 1 {
            return Ok(group);
        }
        let exchange = config.exchange.clone().ok_or_else(|| DeviceError::Unavailable {
            device: "cuda".into(),
            reason: format!("a group of {} workers needs a way to exchange NCCL's id", tp.size),
        })?;
        group.exchange = Some(exchange.clone());
        let purpose =
            if group.uses_peer_memory_only(config, gpu)? { CommunicatorKind::Small } else { CommunicatorKind::Bulk };
        group.nccl = Some(Joining::start(gpu, tp, exchange.as_ref(), &config.library_dirs, purpose)?);
        Ok(group)
    }

    /// Whether all sums use peer memory and there is only one stage. The result is the same on all workers.
    fn uses_peer_memory_only(&mut self, config: &CudaConfig, gpu: &Arc<Gpu>) -> Result<bool, DeviceError> {
        let Some(exchange) = self.exchange.clone().filter(|_| self.uses_peers) else { return Ok(false) };
        let probe = PeerBuffer::for_flags(gpu, self.size(), 1, PROBE_COLS);
        self.probe = self.peer_group(gpu, exchange.as_ref(), probe)?;
        Ok(self.probe.is_some() && self.size().is_power_of_two() && config.stage.count == 1)
    }

    pub(crate) fn size(&self) -> usize {
        self.tp.size as usize
    }

    pub(crate) fn rank(&self) -> usize {
        self.tp.rank as usize
    }

    /// Waits until NCCL is initialized and has allocated its memory.
    pub(crate) fn join(&self) -> Result<(), DeviceError> {
        self.nccl.as_ref().map_or(Ok(()), |nccl| nccl.wait().map(drop))
    }

    /// Bytes that [`Group::open_peers`] allocates.
    pub(crate) fn peer_bytes(&self, cols: usize) -> usize {
        if self.size() > 1 && self.uses_peers { peer_bytes(self.size(), cols) } else { 0 }
    }

    /// The group for [`kernels::cuda::linear_chain`].
    pub(crate) fn fused(&self) -> Option<&PeerGroup> {
        self.fused.as_ref()
    }

    /// Maps the workers' memory into each other, for sums of `cols` columns. If one worker cannot do this, NCCL is used
    /// for everything. `fuses`: whether this worker can fuse sums with products; they are fused only if all workers
    /// can.
    pub(crate) fn open_peers(&mut self, gpu: &Arc<Gpu>, cols: usize, fuses: bool) -> Result<(), DeviceError> {
        if let Some(exchange) = &self.exchange {
            self.join()?;
            exchange.gather(&[])?;
            unlink_shared_memory();
        }
        let Some(exchange) = self.exchange.clone().filter(|_| self.uses_peers) else { return Ok(()) };
        let buffer = PeerBuffer::new(gpu, self.size(), MAX_PEER_ROWS, peer_cols(cols));
        self.peers = self.peer_group(gpu, exchange.as_ref(), buffer)?;
        if all_have(exchange.as_ref(), fuses && self.peers.is_some())? {
            let buffer = PeerBuffer::new(gpu, self.size(), linear_chain::MAX_ROWS, cols);
            self.fused = self.peer_group(gpu, exchange.as_ref(), buffer)?;
        }
        Ok(())
    }

    /// Maps the activation buffers `[max_tokens, cols]` that are summed into all workers. The list must be the same on
    /// every worker.
    pub(crate) fn share(
        &mut self,
        gpu: &Arc<Gpu>,
        activations: &[&DeviceBuffer],
        max_tokens: usize,
        cols: usize,
    ) -> Result<(), DeviceError> {
        let Some(exchange) = self.exchange.clone().filter(|_| self.peers.is_some() && self.size().is_power_of_two())
        else {
            return Ok(());
        };
        let flags = PeerBuffer::for_flags(gpu, self.size(), max_tokens, cols);
        let Some(flags) = self.peer_group(gpu, exchange.as_ref(), flags)? else { return Ok(()) };
        let mut buffers = Vec::new();
        for buffer in activations {
            let handles = all_handles(exchange.as_ref(), SharedBuffer::handle(buffer).ok())?;
            let shared = handles.and_then(|handles| SharedBuffer::new(buffer, self.rank(), &handles).ok());
            let all_mapped = all_have(exchange.as_ref(), shared.is_some())?;
            buffers.extend(shared.filter(|_| all_mapped));
        }
        self.owners = Some(Owners { flags, buffers });
        Ok(())
    }

    /// A buffer of every worker, mapped by all; `None` if one of them cannot map it.
    fn peer_group(
        &self,
        gpu: &Arc<Gpu>,
        exchange: &dyn Exchange,
        buffer: Result<PeerBuffer, CudaError>,
    ) -> Result<Option<PeerGroup>, DeviceError> {
        let own = buffer.and_then(|buffer| buffer.handle().map(|handle| (buffer, handle))).ok();
        let handles = all_handles(exchange, own.as_ref().map(|(_, handle)| *handle))?;
        let peers = own.zip(handles).and_then(|((buffer, _), handles)| {
            PeerGroup::new(gpu, buffer, self.tp.rank as usize, &handles, TIMEOUT_NS).ok()
        });
        let all_mapped = all_have(exchange, peers.is_some())?;
        Ok(peers.filter(|_| all_mapped))
    }

    /// Sums bf16 `buffer [rows, cols]` over the group, in place.
    pub(crate) fn all_reduce(&self, q: &Queue, buffer: Span, rows: usize, cols: usize) -> Result<(), DeviceError> {
        let Some(nccl) = &self.nccl else { return Ok(()) };
        match self.peers.as_ref().filter(|peers| self.sums_by_peers(rows) && cols <= peers.max_cols()) {
            // Both algorithms add in the same order, and round once.
            Some(peers) => parts(rows).try_for_each(|Range { start, end }| {
                let shots = Shots::for_message(2 * (end - start) * cols, self.size());
                let part = buffer.elements::<bf16>(start * cols, (end - start) * cols);
                peers.all_reduce(q, part, part, end - start, cols, shots).map_err(device_error)
            }),
            None => nccl.wait()?.all_reduce(q, buffer.elements::<bf16>(0, rows * cols)),
        }
    }

    /// Whether the workers have mapped each other's memory.
    pub(crate) fn has_peers(&self) -> bool {
        self.peers.is_some()
    }

    /// Whether a sum of `rows` goes through peer memory, if the workers share some.
    fn sums_by_peers(&self, rows: usize) -> bool {
        rows <= MAX_PEER_ROWS || self.is_invariant
    }

    /// How a sum whose rows are normalized next is computed. With two shots it is rounded before the residual is added; the owners
    /// of many rows do not round it.
    fn shots_before_norm(&self, rows: usize, cols: usize) -> Shots {
        if self.is_invariant { Shots::One } else { Shots::for_message(2 * rows * cols, self.size()) }
    }

    /// `residual += sum over the group of partial; out = norm(residual)`. With many rows, each worker keeps the
    /// residual of a fixed subset of the rows.
    pub(crate) fn reduce_add_norm(&self, q: &Queue, x: ReduceAddNorm) -> Result<(), DeviceError> {
        let ReduceAddNorm { out, residual, partial, weight, layer_norm, rows, cols, eps } = x;
        if let Some(norm) = layer_norm {
            self.all_reduce(q, partial, rows, cols)?;
            return add_layer_norm(q, out, residual, partial, norm, rows, cols, eps).map_err(device_error);
        }
        if let Some(owners) = self.owners.as_ref().filter(|_| self.has_owners(rows, cols))
            && let (Some(y), Some(partial), Some(_)) =
                (owners.buffer(out), owners.buffer(partial), owners.buffer(residual))
        {
            let operands = OwnerNorm { y, partial, residual, weight, eps };
            return owner_norm(q, &owners.flags, operands, rows, cols).map_err(device_error);
        }
        let peers = self.peers.as_ref().filter(|_| self.sums_by_peers(rows));
        let done: Result<(), CudaError> = match peers {
            Some(peers) => parts(rows).try_for_each(|Range { start, end }| {
                let [out, residual, partial] =
                    [out, residual, partial].map(|span| span.elements::<bf16>(start * cols, (end - start) * cols));
                let shots = self.shots_before_norm(end - start, cols);
                peers.all_reduce_add_norm(q, out, residual, partial, weight, end - start, cols, eps, shots)
            }),
            None => {
                self.all_reduce(q, partial, rows, cols)?;
                add_rms_norm(q, out, residual, partial, weight, rows, cols, eps)
            }
        };
        done.map_err(device_error)
    }

    /// Whether rows of `cols` columns that are summed and normalized have owners, if the workers have mapped them.
    pub(crate) fn has_owners(&self, rows: usize, cols: usize) -> bool {
        self.owners.is_some() && 2 * rows * cols > max_packet_bytes(self.size())
    }

    /// Gives every worker the rows of a residual that the others own.
    pub(crate) fn make_whole(&self, q: &Queue, residual: Span, rows: usize, cols: usize) -> Result<(), DeviceError> {
        let Some(owners) = self.owners.as_ref().filter(|_| self.has_owners(rows, cols)) else { return Ok(()) };
        let Some(residual) = owners.buffer(residual) else { return Ok(()) };
        owner_rows(q, &owners.flags, residual, rows, cols).map_err(device_error)
    }

    /// Gathers every worker's part into `buffer`, in rank order.
    pub(crate) fn all_gather(&self, q: &Queue, buffer: Span) -> Result<(), DeviceError> {
        self.nccl.as_ref().map_or(Ok(()), |nccl| nccl.wait()?.all_gather(q, buffer, self.size()))
    }

    /// Gathers `pairs [group, count, ARGMAX_CHUNKS]`, the best tokens of each worker's share.
    pub(crate) fn gather_candidates(&self, q: &Queue, pairs: Span, count: usize) -> Result<(), DeviceError> {
        match self.peers.as_ref().filter(|_| count <= MAX_PEER_ROWS) {
            Some(peers) => peers.all_gather(q, pairs, count, CANDIDATE_BYTES).map_err(device_error),
            None => self.all_gather(q, pairs),
        }
    }

    /// Checks that all workers took part in every sum so far; cheap enough for every step.
    pub(crate) fn check(&self) -> Result<(), DeviceError> {
        let groups = self.peers.iter().chain(&self.fused).chain(self.owners.as_ref().map(|owners| &owners.flags));
        groups.filter_map(PeerGroup::missing_rank).next().map_or(Ok(()), |rank| {
            Err(DeviceError::GroupTimeout {
                tp_rank: self.tp.rank,
                waited_ms: TIMEOUT_NS / 1_000_000,
                collective: format!("a sum with worker {rank}"),
            })
        })
    }
}

/// `0..rows` in parts that the exchange buffer has room for.
fn parts(rows: usize) -> impl Iterator<Item = Range<usize>> {
    (0..rows).step_by(MAX_PEER_ROWS).map(move |start| start..rows.min(start + MAX_PEER_ROWS))
}

/// The handles of all workers, in order; `None` if one of them has none.
fn all_handles(exchange: &dyn Exchange, own: Option<PeerHandle>) -> Result<Option<Vec<PeerHandle>>, DeviceError> {
    let handles = exchange.gather(own.as_ref().map_or(&[], |handle| handle.as_slice()))?;
    Ok(handles.into_iter().map(|handle| handle.try_into().ok()).collect())
}

/// Whether `own` is true on every worker.
fn all_have(exchange: &dyn Exchange, own: bool) -> Result<bool, DeviceError> {
    Ok(exchange.gather(&[u8::from(own)])?.iter().all(|flag| flag == &[1]))
}

/// Bytes of the memory that workers map into each other, for sums of `cols` columns.
pub(crate) fn peer_bytes(group: usize, cols: usize) -> usize {
    PeerBuffer::bytes(group, MAX_PEER_ROWS, peer_cols(cols))
        + PeerBuffer::bytes(group, linear_chain::MAX_ROWS, cols)
        + PeerBuffer::FLAG_BYTES
}

/// Largest message for which packets are faster than reads and writes by the owners, by measurement
/// (kernels/README.md).
fn max_packet_bytes(group: usize) -> usize {
    if group <= 2 { 512 << 10 } else { 256 << 10 }
}

/// Columns of the exchange buffer for sums of `cols` columns; candidates fit as well.
fn peer_cols(cols: usize) -> usize {
    cols.max(CANDIDATE_BYTES / 2)
}
