//! What the workers of a tensor-parallel group do together: few rows through peer memory, the rest through NCCL.

use std::sync::Arc;

use half::bf16;
use kernels::cuda::all_reduce::{PeerBuffer, PeerGroup, PeerHandle, Shots};
use kernels::cuda::layer_norm::{LayerNormWeight, add_layer_norm};
use kernels::cuda::linear_chain;
use kernels::cuda::owner_norm::{OwnerNorm, SharedBuffer, owner_norm};
use kernels::cuda::rms_norm::add_rms_norm;
use kernels::cuda::sample::ARGMAX_CHUNKS;
use kernels::cuda::{CudaError, DeviceBuffer, Gpu, Queue, Span};

use super::nccl::{Joining, Use, unlink_shared_memory};
use super::{CudaConfig, Exchange, device_error};
use crate::{DeviceError, TensorParallel};

/// Most rows of a sum through peer memory.
const MAX_PEER_ROWS: usize = 256;
/// Bytes of a sample's candidates, which are gathered through the same memory.
const CANDIDATE_BYTES: usize = ARGMAX_CHUNKS * 8;
/// How long a kernel waits for another worker before it gives up.
const PATIENCE_NS: u64 = 10_000_000_000;
/// Columns of the buffer that shows whether workers can map each other's memory.
const PROBE_COLS: usize = 1024;

/// A worker's reach to its group; a group of one has nobody to reach.
pub(crate) struct Group {
    nccl: Option<Joining>,
    /// Showed that workers can map each other's memory. Stays, for nobody knows when the others have let go of it.
    probe: Option<PeerGroup>,
    peers: Option<PeerGroup>,
    /// For sums inside the products that they are of.
    fused: Option<PeerGroup>,
    /// For sums of many rows, and the activations that they are of.
    owners: Option<Owners>,
    exchange: Option<Arc<dyn Exchange>>,
    tp: TensorParallel,
    uses_peers: bool,
}

/// What [`owner_norm`] needs: its flags, and buffers that every worker has mapped.
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
    /// In place of `weight`, where the norm has mean and bias.
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
        };
        if tp.size == 1 {
            return Ok(group);
        }
        let exchange = config.exchange.clone().ok_or_else(|| DeviceError::Unavailable {
            device: "cuda".into(),
            reason: format!("a group of {} workers needs a way to exchange NCCL's id", tp.size),
        })?;
        group.exchange = Some(exchange.clone());
        let purpose = if group.needs_little(config, gpu)? { Use::Rest } else { Use::Bulk };
        group.nccl = Some(Joining::start(gpu, tp, exchange.as_ref(), &config.library_dirs, purpose)?);
        Ok(group)
    }

    /// Whether sums of any size go through peer memory, and nothing goes to other stages. All workers find the same.
    fn needs_little(&mut self, config: &CudaConfig, gpu: &Arc<Gpu>) -> Result<bool, DeviceError> {
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

    /// Waits until NCCL stands, and so has taken its memory.
    pub(crate) fn join(&self) -> Result<(), DeviceError> {
        self.nccl.as_ref().map_or(Ok(()), |nccl| nccl.wait().map(drop))
    }

    /// Bytes that [`Group::open_peers`] takes.
    pub(crate) fn peer_bytes(&self, cols: usize) -> usize {
        if self.size() > 1 && self.uses_peers { peer_bytes(self.size(), cols) } else { 0 }
    }

    /// Of [`kernels::cuda::linear_chain`].
    pub(crate) fn fused(&self) -> Option<&PeerGroup> {
        self.fused.as_ref()
    }

    /// Maps the workers' memory into each other, for sums of `cols` columns. Where one of them cannot, NCCL does it all. `fuses`:
    /// whether this worker can sum inside products, which is done where all can.
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

    /// Maps the activations `[max_tokens, cols]` that are summed, which are the same on every worker, into all of them.
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

    /// A buffer of every worker, mapped by all; `None` where one of them cannot.
    fn peer_group(
        &self,
        gpu: &Arc<Gpu>,
        exchange: &dyn Exchange,
        buffer: Result<PeerBuffer, CudaError>,
    ) -> Result<Option<PeerGroup>, DeviceError> {
        let own = buffer.and_then(|buffer| buffer.handle().map(|handle| (buffer, handle))).ok();
        let handles = all_handles(exchange, own.as_ref().map(|(_, handle)| *handle))?;
        let peers = own.zip(handles).and_then(|((buffer, _), handles)| {
            PeerGroup::new(gpu, buffer, self.tp.rank as usize, &handles, PATIENCE_NS).ok()
        });
        let all_mapped = all_have(exchange, peers.is_some())?;
        Ok(peers.filter(|_| all_mapped))
    }

    /// Sums bf16 `buffer [rows, cols]` over the group, in place.
    pub(crate) fn all_reduce(&self, q: &Queue, buffer: Span, rows: usize, cols: usize) -> Result<(), DeviceError> {
        let Some(nccl) = &self.nccl else { return Ok(()) };
        match self.peers.as_ref().filter(|_| rows <= MAX_PEER_ROWS) {
            Some(peers) => {
                let shots = Shots::for_message(2 * rows * cols, self.size());
                peers.all_reduce(q, buffer, buffer, rows, cols, shots).map_err(device_error)
            }
            None => nccl.wait()?.all_reduce(q, buffer.elements::<bf16>(0, rows * cols)),
        }
    }

    /// `residual += sum over the group of partial; out = norm(residual)`. Of many rows, a worker keeps the residual of some only,
    /// always the same ones.
    pub(crate) fn reduce_add_norm(&self, q: &Queue, x: ReduceAddNorm) -> Result<(), DeviceError> {
        let ReduceAddNorm { out, residual, partial, weight, layer_norm, rows, cols, eps } = x;
        if let Some(norm) = layer_norm {
            self.all_reduce(q, partial, rows, cols)?;
            return add_layer_norm(q, out, residual, partial, norm, rows, cols, eps).map_err(device_error);
        }
        if let Some(owners) = self.owners.as_ref().filter(|_| 2 * rows * cols > max_packet_bytes(self.size()))
            && let (Some(y), Some(partial)) = (owners.buffer(out), owners.buffer(partial))
        {
            let operands = OwnerNorm { y, partial, residual, weight, eps };
            return owner_norm(q, &owners.flags, operands, rows, cols).map_err(device_error);
        }
        let peers = self.peers.as_ref().filter(|_| rows <= MAX_PEER_ROWS);
        let done: Result<(), CudaError> = match peers {
            Some(peers) => {
                let shots = Shots::for_message(2 * rows * cols, self.size());
                peers.all_reduce_add_norm(q, out, residual, partial, weight, rows, cols, eps, shots)
            }
            None => {
                self.all_reduce(q, partial, rows, cols)?;
                add_rms_norm(q, out, residual, partial, weight, rows, cols, eps)
            }
        };
        done.map_err(device_error)
    }

    /// Fills `buffer`, one part of each worker in rank order, from each worker's own part.
    pub(crate) fn all_gather(&self, q: &Queue, buffer: Span) -> Result<(), DeviceError> {
        self.nccl.as_ref().map_or(Ok(()), |nccl| nccl.wait()?.all_gather(q, buffer, self.size()))
    }

    /// Fills `pairs [group, count, ARGMAX_CHUNKS]`, the best tokens of each worker's share, from each worker's own part.
    pub(crate) fn gather_candidates(&self, q: &Queue, pairs: Span, count: usize) -> Result<(), DeviceError> {
        match self.peers.as_ref().filter(|_| count <= MAX_PEER_ROWS) {
            Some(peers) => peers.all_gather(q, pairs, count, CANDIDATE_BYTES).map_err(device_error),
            None => self.all_gather(q, pairs),
        }
    }

    /// Whether every sum so far had all workers; cheap enough for every step.
    pub(crate) fn check(&self) -> Result<(), DeviceError> {
        let groups = self.peers.iter().chain(&self.fused).chain(self.owners.as_ref().map(|owners| &owners.flags));
        groups.filter_map(PeerGroup::missing_rank).next().map_or(Ok(()), |rank| {
            Err(DeviceError::GroupTimeout {
                tp_rank: self.tp.rank,
                waited_ms: PATIENCE_NS / 1_000_000,
                collective: format!("a sum with worker {rank}"),
            })
        })
    }
}

/// The handles of all workers, in order; `None` where one of them has none.
fn all_handles(exchange: &dyn Exchange, own: Option<PeerHandle>) -> Result<Option<Vec<PeerHandle>>, DeviceError> {
    let handles = exchange.gather(own.as_ref().map_or(&[], |handle| handle.as_slice()))?;
    Ok(handles.into_iter().map(|handle| handle.try_into().ok()).collect())
}

/// Whether every worker has what this one says it has.
fn all_have(exchange: &dyn Exchange, own: bool) -> Result<bool, DeviceError> {
    Ok(exchange.gather(&[u8::from(own)])?.iter().all(|flag| flag == &[1]))
}

/// Bytes of the memory that workers map into each other, for sums of `cols` columns.
pub(crate) fn peer_bytes(group: usize, cols: usize) -> usize {
    PeerBuffer::bytes(group, MAX_PEER_ROWS, peer_cols(cols))
        + PeerBuffer::bytes(group, linear_chain::MAX_ROWS, cols)
        + PeerBuffer::FLAG_BYTES
}

/// Largest message whose packets are quicker than its owners' reads and writes, by measurement (kernels/README.md).
fn max_packet_bytes(group: usize) -> usize {
    if group <= 2 { 512 << 10 } else { 256 << 10 }
}

/// Columns of the exchange buffer for sums of `cols` columns: candidates fit, too.
fn peer_cols(cols: usize) -> usize {
    cols.max(CANDIDATE_BYTES / 2)
}
