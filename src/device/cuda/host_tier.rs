//! Copies of KV blocks and recurrent states in slots of host memory, which a thread pins while steps run.
//!
//! Blocks and states are read and written on the stream of the steps alone, so their copies need no order beside it. Between them
//! and the host lies a buffer of the device: a block that is stored goes to the buffer at the speed of the device, and from there to
//! the host on another stream while the step runs. A block that is loaded goes to the buffer on a third stream, as soon as its plan
//! arrives, usually while the step before runs, and from there to its place when that step has ended.

use std::ops::Range;
use std::sync::Arc;

use engine::{BlockId, HostCopies, HostSlot, STORES_COMPLETE_AFTER, StateId};
use kernels::cuda::copy_blocks::AllBlocks;
use kernels::cuda::{CudaError, DeviceBuffer, Event, Gpu, PINNED_PORTION, PinnedMemory, Queue, Rows, Span};
use ops::{DeviceError, HostMemory, HostSlots};

use super::{CudaDevice, device_error};

/// Bytes of the buffer of one direction, unless a block or a state is larger than one of its parts.
const LANE_BYTES: usize = 256 << 20;
/// Parts of a buffer: one is filled while another is emptied.
const PARTS: usize = 4;

/// Bytes of a part of a buffer, for blocks and states of these sizes and all slots together.
fn part_bytes(sizes: [usize; 2], host_bytes: u64) -> usize {
    let wanted = (LANE_BYTES / PARTS).min(usize::try_from(host_bytes).unwrap_or(usize::MAX));
    wanted.max(sizes[0]).max(sizes[1]).next_multiple_of(256)
}

/// Bytes of device memory that the copies need, for blocks and states of these sizes; 0 without host memory.
pub fn buffer_bytes(sizes: [usize; 2], host_bytes: u64) -> usize {
    if host_bytes == 0 { 0 } else { 2 * PARTS * part_bytes(sizes, host_bytes) }
}

/// The slots, and the streams to and from them.
pub(super) struct HostTier {
    stores: Lane,
    loads: Lane,
    /// Passes work from one stream to another.
    handoff: Event,
    memory: PinnedMemory,
    blocks: Slots,
    states: Slots,
    /// The copies to the host of the last plans, and whether there are any. Plan `n` is at `n % len`.
    stored: [(Event, bool); STORES_COMPLETE_AFTER as usize],
    num_plans: usize,
}

/// Slots of one kind.
#[derive(Clone, Copy)]
struct Slots {
    /// Of the first slot in the memory.
    start: usize,
    bytes: usize,
    count: usize,
}

/// One direction.
struct Lane {
    queue: Queue,
    parts: Vec<Part>,
    next: usize,
    /// The last copy on `queue`.
    done: Event,
    _buffer: DeviceBuffer,
}

struct Part {
    buffer: Span,
    /// Its content is not needed any more.
    free: Event,
}

impl Slots {
    fn check(&self, kind: &str, slots: impl IntoIterator<Item = HostSlot>) -> Result<(), DeviceError> {
        match slots.into_iter().max().filter(|slot| slot.0 as usize >= self.count) {
            None => Ok(()),
            Some(slot) => Err(DeviceError::Call {
                call: "copy_with_host".into(),
                reason: format!("slot {} for a {kind}, of {}", slot.0, self.count),
            }),
        }
    }

    /// The first byte of a slot.
    fn start(&self, slot: HostSlot) -> usize {
        self.start + slot.0 as usize * self.bytes
    }
}

impl Lane {
    fn new(gpu: &Arc<Gpu>, part_bytes: usize) -> Result<Self, CudaError> {
        let buffer = DeviceBuffer::new(gpu, PARTS * part_bytes)?;
        let part =
            |index| Ok(Part { buffer: buffer.span().part(index * part_bytes, part_bytes), free: Event::new(false)? });
        let parts = (0..PARTS).map(part).collect::<Result<_, CudaError>>()?;
        Ok(Self { queue: Queue::new(gpu)?, parts, next: 0, done: Event::new(false)?, _buffer: buffer })
    }

    /// The part to use next.
    fn take(&mut self) -> usize {
        let part = self.next;
        self.next = (part + 1) % self.parts.len();
        part
    }

    /// Queues copies to slots. `read` queues a copy of a place of the device to a span on the stream of the steps.
    fn store<D: Copy>(
        &mut self,
        steps: &Queue,
        (memory, slots, handoff): (&mut PinnedMemory, Slots, &Event),
        copies: &[(D, HostSlot)],
        read: impl Fn(D, Span) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        let of_part = self.parts[0].buffer.bytes() / slots.bytes.max(1);
        for copies in copies.chunks(of_part) {
            let index = self.take();
            let Part { buffer, free } = &self.parts[index];
            let place = |index: usize| buffer.part(index * slots.bytes, slots.bytes);
            steps.wait_for(free)?;
            for (index, &(from, _)) in copies.iter().enumerate() {
                read(from, place(index))?;
            }
            handoff.record(steps)?;
            self.queue.wait_for(handoff)?;
            for (index, &(_, slot)) in copies.iter().enumerate() {
                for (piece, from) in pieces(memory, slots, slot, place(index)) {
                    let to = memory.address_mut(&piece);
                    // SAFETY: the piece has these bytes. Only later copies of this type read it: they wait for `done`.
                    unsafe { self.queue.download(to, from, piece.len())? };
                }
            }
            free.record(&self.queue)?;
        }
        self.done.record(&self.queue)
    }

    /// Queues copies from slots. `write` queues a copy of a span to a place of the device on the stream of the steps.
    fn load<D: Copy>(
        &mut self,
        steps: &Queue,
        (memory, slots, handoff): (&PinnedMemory, Slots, &Event),
        copies: &[(D, HostSlot)],
        write: impl Fn(D, Span) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        let of_part = self.parts[0].buffer.bytes() / slots.bytes.max(1);
        for copies in copies.chunks(of_part) {
            let index = self.take();
            let Part { buffer, free } = &self.parts[index];
            let place = |index: usize| buffer.part(index * slots.bytes, slots.bytes);
            self.queue.wait_for(free)?;
            for (index, &(_, slot)) in copies.iter().enumerate() {
                for (piece, to) in pieces(memory, slots, slot, place(index)) {
                    let from = memory.address(&piece);
                    // SAFETY: the piece has these bytes. Only later copies of this type write it: they wait for `done`.
                    unsafe { self.queue.upload(to, from, piece.len())? };
                }
            }
            handoff.record(&self.queue)?;
            steps.wait_for(handoff)?;
            for (index, &(to, _)) in copies.iter().enumerate() {
                write(to, place(index))?;
            }
            free.record(steps)?;
        }
        self.done.record(&self.queue)
    }
}

/// The bytes of a slot in host memory, once they are pinned if they can be, in pieces that can be copied, each with its part of `place`.
fn pieces(
    memory: &PinnedMemory,
    slots: Slots,
    slot: HostSlot,
    place: Span,
) -> impl Iterator<Item = (Range<usize>, Span)> + use<> {
    let range = slots.start(slot)..slots.start(slot) + slots.bytes;
    memory.wait_for(range.end);
    let start = range.start;
    let pieces = memory.pieces(range);
    pieces.map(move |piece| (piece.clone(), place.part(piece.start - start, piece.len())))
}

impl Drop for HostTier {
    fn drop(&mut self) {
        // After a fault nothing runs any more.
        let _ = (self.stores.queue.wait(), self.loads.queue.wait());
    }
}

impl HostTier {
    /// `slots` fit into `memory`, of which they are pinned in portions of `portion` bytes.
    fn new(
        gpu: &Arc<Gpu>,
        slots: HostSlots,
        sizes: [usize; 2],
        memory: HostMemory,
        portion: usize,
    ) -> Result<Self, CudaError> {
        let [block_bytes, state_bytes] = sizes;
        let for_blocks = slots.num_blocks * block_bytes;
        let host_bytes = for_blocks + slots.num_states * state_bytes;
        let part = part_bytes(sizes, host_bytes as u64);
        Ok(Self {
            stores: Lane::new(gpu, part)?,
            loads: Lane::new(gpu, part)?,
            handoff: Event::new(false)?,
            memory: PinnedMemory::new(gpu, memory, host_bytes, portion)?,
            blocks: Slots { start: 0, bytes: block_bytes, count: slots.num_blocks },
            states: Slots { start: for_blocks, bytes: state_bytes, count: slots.num_states },
            stored: [(Event::new(false)?, false), (Event::new(false)?, false)],
            num_plans: 0,
        })
    }

    /// Begins a plan: waits until the copies to the host of the plan [`STORES_COMPLETE_AFTER`] before it are complete.
    fn begin_plan(&mut self) -> Result<(), CudaError> {
        self.num_plans += 1;
        let (event, has_copies) = &mut self.stored[self.num_plans % STORES_COMPLETE_AFTER as usize];
        if std::mem::take(has_copies) { event.wait() } else { Ok(()) }
    }

    /// Queues the copies of a plan beside the stream of the steps. `parts` are the buffers of KV blocks, `state` finds a state.
    fn queue_copies(
        &mut self,
        steps: &Queue,
        parts: &[AllBlocks],
        state: impl Fn(StateId) -> Span,
        copies: &HostCopies,
    ) -> Result<(), CudaError> {
        self.begin_plan()?;
        let HostTier { stores, loads, handoff, memory, stored, num_plans, .. } = self;
        let (blocks, states) = (self.blocks, self.states);
        // A slot is filled once earlier plans have read it, and read once earlier plans have filled it. No slot is in two entries of
        // this plan, so its loads need not wait for its stores, which wait for the step before.
        stores.queue.wait_for(&loads.done)?;
        loads.queue.wait_for(&stores.done)?;
        stores.store(steps, (memory, blocks, handoff), &copies.stored, |block, to| {
            each_part(parts, block, to, |rows, slot| steps.copy_rows(slot, rows))
        })?;
        stores
            .store(steps, (memory, states, handoff), &copies.stored_states, |from, to| steps.copy(to, state(from)))?;
        if !copies.stored.is_empty() || !copies.stored_states.is_empty() {
            let (event, has_copies) = &mut stored[*num_plans % STORES_COMPLETE_AFTER as usize];
            event.record(&stores.queue)?;
            *has_copies = true;
        }
        loads.load(steps, (memory, blocks, handoff), &copies.loaded, |block, from| {
            each_part(parts, block, from, |rows, slot| steps.copy_rows(rows, slot))
        })?;
        loads.load(steps, (memory, states, handoff), &copies.loaded_states, |to, from| steps.copy(state(to), from))
    }
}

impl CudaDevice {
    pub(super) fn take_host_memory(
        &mut self,
        slots: HostSlots,
        mut memory: HostMemory,
    ) -> Result<[usize; 2], DeviceError> {
        let sizes = [self.block_parts().iter().map(slot_bytes).sum::<usize>(), self.states.bytes()];
        let bytes = (*memory).as_mut().len();
        slots.check(sizes, bytes)?;
        let tier = HostTier::new(&self.gpu, slots, sizes, memory, PINNED_PORTION).map_err(|error| {
            let reason = device_error(error).to_string();
            DeviceError::Call { call: format!("pinning {bytes} bytes (`kv_cache_host_memory_bytes`)"), reason }
        })?;
        self.host = Some(tier);
        Ok(sizes)
    }

    /// The layout of KV blocks; empty if this worker has no layer with attention.
    fn block_parts(&self) -> Vec<AllBlocks> {
        self.cache.as_ref().map_or_else(Vec::new, |cache| cache.all_blocks())
    }

    pub(super) fn copy_host_slots(&mut self, copies: &HostCopies) -> Result<(), DeviceError> {
        if copies.is_empty() {
            return self.host.as_mut().map_or(Ok(()), |tier| tier.begin_plan().map_err(device_error));
        }
        let missing = || DeviceError::Call {
            call: "copy_with_host".into(),
            reason: "slots are allocated before the first copy".into(),
        };
        let mut tier = self.host.take().ok_or_else(missing)?;
        let state = |state: StateId| self.states.slot(state.0).expect("states were checked");
        let copied = self
            .check_host_copies(&tier, copies)
            .and_then(|()| tier.queue_copies(&self.queue, &self.block_parts(), state, copies).map_err(device_error));
        self.host = Some(tier);
        copied
    }

    fn check_host_copies(&self, tier: &HostTier, copies: &HostCopies) -> Result<(), DeviceError> {
        let HostCopies { stored, loaded, stored_states, loaded_states } = copies;
        tier.blocks.check("block", stored.iter().chain(loaded).map(|copy| copy.1))?;
        tier.states.check("state", stored_states.iter().chain(loaded_states).map(|copy| copy.1))?;
        stored_states.iter().chain(loaded_states).try_for_each(|copy| self.states.slot(copy.0.0).map(drop))?;
        let num_blocks = self.bounds()?.num_blocks;
        let outside = stored.iter().chain(loaded).map(|copy| copy.0).find(|block| block.0 as usize >= num_blocks);
        outside.map_or(Ok(()), |block| {
            let reason = format!("block {} of {num_blocks}", block.0);
            Err(DeviceError::Call { call: "copy_with_host".into(), reason })
        })
    }
}

/// Bytes of a block in one part of the cache.
fn slot_bytes(part: &AllBlocks) -> usize {
    2 * part.num_layers * part.block_bytes
}

/// Calls `copy` for keys and values of a block in each part of the cache, as rows of the cache and rows of a slot, where they lie
/// one after the other.
fn each_part(
    parts: &[AllBlocks],
    block: BlockId,
    slot: Span,
    copy: impl Fn(Rows, Rows) -> Result<(), CudaError>,
) -> Result<(), CudaError> {
    let mut start = 0;
    for part in parts {
        let &AllBlocks { k, v, num_layers, num_blocks, block_bytes } = part;
        for cache in [k, v] {
            let pitch = num_blocks * block_bytes;
            let own = block.0 as usize * block_bytes;
            let memory = cache.part(own, (num_layers - 1) * pitch + block_bytes);
            let packed = slot.part(start, num_layers * block_bytes);
            let rows = |memory, pitch| Rows { memory, pitch, bytes: block_bytes, count: num_layers };
            copy(rows(memory, pitch), rows(packed, block_bytes))?;
            start += num_layers * block_bytes;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
