//! Copies of KV blocks and recurrent states in slots of host memory.

use engine::HostCopies;
use ops::{DeviceError, HostMemory, HostSlots};

use super::{CpuDevice, out_of_range};

/// The slots. The system assigns memory to one when it is first written.
pub(super) struct HostTier {
    /// `[blocks, bytes of a block]`, then `[states, bytes of a state]`.
    memory: HostMemory,
    block_bytes: usize,
    state_bytes: usize,
    slots: HostSlots,
}

impl Default for HostTier {
    fn default() -> Self {
        Self { memory: Box::new(Vec::new()), block_bytes: 0, state_bytes: 0, slots: HostSlots::default() }
    }
}

impl CpuDevice {
    pub(super) fn take_host_memory(
        &mut self,
        slots: HostSlots,
        mut memory: HostMemory,
    ) -> Result<[usize; 2], DeviceError> {
        let parts = self.cache().buffers.iter().flat_map(|buffer| buffer.parts(0));
        let block_bytes = parts.map(<[u8]>::len).sum::<usize>();
        let state_bytes = self.states.slot_len() * size_of::<f32>();
        slots.check([block_bytes, state_bytes], (*memory).as_mut().len())?;
        self.host = HostTier { memory, block_bytes, state_bytes, slots };
        Ok([block_bytes, state_bytes])
    }

    pub(super) fn copy_host_slots(&mut self, copies: &HostCopies) -> Result<(), DeviceError> {
        self.check_host_copies(copies)?;
        let Self { cache, states, host, .. } = self;
        let HostTier { memory, block_bytes, state_bytes, slots } = host;
        let (blocks, slots) = (**memory).as_mut().split_at_mut(slots.num_blocks * *block_bytes);
        let mut buffers: Vec<_> = cache.iter_mut().flat_map(|cache| &mut cache.buffers).collect();
        for (block, slot) in &copies.stored {
            let mut to = &mut blocks[slot.0 as usize * *block_bytes..][..*block_bytes];
            for part in buffers.iter().flat_map(|buffer| buffer.parts(block.0 as usize)) {
                to.split_off_mut(..part.len()).expect("a slot holds a block").copy_from_slice(part);
            }
        }
        for (block, slot) in &copies.loaded {
            let mut from = &blocks[slot.0 as usize * *block_bytes..][..*block_bytes];
            for part in buffers.iter_mut().flat_map(|buffer| buffer.parts_mut(block.0 as usize)) {
                part.copy_from_slice(from.split_off(..part.len()).expect("a slot holds a block"));
            }
        }
        for (state, slot) in &copies.stored_states {
            let mut to = &mut slots[slot.0 as usize * *state_bytes..][..*state_bytes];
            for part in states.slot_mut(state.0)? {
                let part: &[u8] = bytemuck::cast_slice(part);
                to.split_off_mut(..part.len()).expect("a slot holds a state").copy_from_slice(part);
            }
        }
        for (state, slot) in &copies.loaded_states {
            let mut from = &slots[slot.0 as usize * *state_bytes..][..*state_bytes];
            for part in states.slot_mut(state.0)? {
                let part: &mut [u8] = bytemuck::cast_slice_mut(part);
                part.copy_from_slice(from.split_off(..part.len()).expect("a slot holds a state"));
            }
        }
        Ok(())
    }

    fn check_host_copies(&self, copies: &HostCopies) -> Result<(), DeviceError> {
        let num_blocks = self.cache.as_ref().map_or(0, |cache| cache.num_blocks);
        let bound = |what: &str, found: Option<u32>, bound: usize| match found {
            Some(found) if found as usize >= bound => Err(out_of_range(what, found, bound)),
            _ => Ok(()),
        };
        let blocks = || copies.stored.iter().chain(&copies.loaded);
        let states = || copies.stored_states.iter().chain(&copies.loaded_states);
        bound("block", blocks().map(|copy| copy.0.0).max(), num_blocks)?;
        bound("slot for a block on the host", blocks().map(|copy| copy.1.0).max(), self.host.slots.num_blocks)?;
        bound("slot for a state on the host", states().map(|copy| copy.1.0).max(), self.host.slots.num_states)
    }
}

#[cfg(test)]
mod tests {
    use engine::{BlockId, HostSlot, StateId};
    use ops::{AttentionSpec, Device, KvElements, LayerAttention, RecurrentShape, StepLimits};

    use super::*;
    use crate::cpu::CpuConfig;

    fn layer(kv_buffer: usize, num_kv_heads: usize) -> LayerAttention {
        LayerAttention {
            num_heads: 2 * num_kv_heads,
            num_kv_heads,
            head_dim: 16,
            has_shared_kv: false,
            scale: 0.25,
            rope: None,
            kv_group: 0,
            kv_buffer,
            latent: None,
            window: None,
            chunk: None,
            score_cap: None,
            sinks: Vec::new(),
            query_gains: Vec::new(),
            query_scale: None,
            alibi_slopes: Vec::new(),
        }
    }

    /// A device with two layers of attention, two with a recurrent state, and slots on the host.
    fn device(kv_elements: KvElements) -> CpuDevice {
        let state = |num_value_heads| RecurrentShape {
            rule: ops::RecurrentRule::GatedDelta { has_doubled_rates: false },
            num_key_heads: 1,
            num_value_heads,
            key_dim: 4,
            value_dim: 4,
            num_taps: 4,
        };
        let spec = AttentionSpec {
            block_size: 16,
            max_positions: 64,
            ropes: Vec::new(),
            layers: vec![layer(0, 1), layer(1, 2)],
            kv_windows: vec![None],
            kv_elements,
            states: vec![state(1), state(2)],
        };
        let limits = StepLimits { max_tokens: 16, max_rows: 2, max_sequence_len: 64, vocab_size: 8 };
        let config = CpuConfig { threads: 1, limits, kv_memory_bytes: Some(1 << 20), group: None };
        let mut device = CpuDevice::new(config).unwrap();
        device.allocate_cache(&spec, 3).unwrap();
        device.allocate_states(&spec, 3).unwrap();
        let slots = HostSlots { num_blocks: 2, num_states: 2 };
        let too_small = device.allocate_host(slots, Box::new(vec![0; 1000])).unwrap_err();
        assert!(too_small.to_string().contains("do not fit into 1000 bytes"), "{too_small}");
        device.allocate_host(slots, Box::new(vec![0; 1 << 20])).unwrap();
        device
    }

    /// Fills a block and a state with numbers that follow `seed`, and returns them.
    fn fill(device: &mut CpuDevice, place: u32, seed: u8) -> (Vec<u8>, Vec<f32>) {
        let mut next = seed;
        let buffers = &mut device.cache.as_mut().unwrap().buffers;
        for byte in buffers.iter_mut().flat_map(|buffer| buffer.parts_mut(place as usize)).flatten() {
            next = next.wrapping_mul(5).wrapping_add(3);
            *byte = next;
        }
        for value in device.states.slot_mut(place).unwrap().flatten() {
            next = next.wrapping_mul(5).wrapping_add(3);
            *value = f32::from(next);
        }
        content(device, place)
    }

    fn content(device: &mut CpuDevice, place: u32) -> (Vec<u8>, Vec<f32>) {
        let buffers = &device.cache.as_ref().unwrap().buffers;
        let bytes = buffers.iter().flat_map(|buffer| buffer.parts(place as usize)).flatten().copied().collect();
        (bytes, device.states.slot_mut(place).unwrap().flatten().map(|value| *value).collect())
    }

    #[test]
    fn what_is_stored_comes_back_to_any_place() {
        for kv_elements in [KvElements::Plain, KvElements::Fp8, KvElements::Int8] {
            let mut device = device(kv_elements);
            let [first, second] = [fill(&mut device, 0, 1), fill(&mut device, 1, 2)];
            assert!(first != second && first.0.len() > 3 * 16 * 16 * 2);
            let copies = HostCopies {
                stored: vec![(BlockId(0), HostSlot(1)), (BlockId(1), HostSlot(0))],
                stored_states: vec![(StateId(0), HostSlot(1)), (StateId(1), HostSlot(0))],
                ..HostCopies::default()
            };
            device.copy_with_host(&copies).unwrap();
            fill(&mut device, 0, 7);
            // A block that is stored may be loaded into by the same plan: stores come first.
            let copies = HostCopies {
                stored: vec![(BlockId(2), HostSlot(0))],
                loaded: vec![(BlockId(2), HostSlot(1))],
                loaded_states: vec![(StateId(2), HostSlot(1)), (StateId(0), HostSlot(0))],
                ..HostCopies::default()
            };
            device.copy_with_host(&copies).unwrap();
            assert_eq!(content(&mut device, 2), first);
            assert_eq!((content(&mut device, 1), content(&mut device, 0).1), (second.clone(), second.1));
        }
    }

    #[test]
    fn copies_beyond_the_last_place_or_slot_are_refused() {
        let mut device = device(KvElements::Plain);
        let refused = |copies: HostCopies, device: &mut CpuDevice| device.copy_with_host(&copies).is_err();
        for (block, slot) in [(3, 0), (0, 2)] {
            let stored = vec![(BlockId(block), HostSlot(slot))];
            assert!(refused(HostCopies { stored, ..HostCopies::default() }, &mut device), "{block}, {slot}");
            let loaded_states = vec![(StateId(block), HostSlot(slot))];
            assert!(refused(HostCopies { loaded_states, ..HostCopies::default() }, &mut device), "{block}, {slot}");
        }
    }
}
