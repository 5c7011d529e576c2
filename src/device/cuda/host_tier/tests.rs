use std::time::Instant;

use ipc::SharedMemory;

use super::*;

const NUM_BLOCKS: usize = 96;
const NUM_STATES: usize = 5;

/// Device memory as a worker has it: two parts of KV blocks, and states.
struct Memory {
    parts: Vec<AllBlocks>,
    states: Span,
    state_bytes: usize,
    _buffers: Vec<DeviceBuffer>,
}

impl Memory {
    /// `shapes` are the layers and the bytes of a block of each part.
    fn new(gpu: &Arc<Gpu>, shapes: [[usize; 2]; 2], state_bytes: usize) -> Self {
        let mut buffers = Vec::new();
        let mut buffer = |bytes: usize| {
            let seed = buffers.len() as u32;
            let values: Vec<u32> =
                (0..bytes as u32 / 4).map(|i| (i ^ seed << 29).wrapping_mul(2_654_435_761)).collect();
            buffers.push(DeviceBuffer::from_slice(gpu, &values).unwrap());
            buffers.last().unwrap().span()
        };
        let parts = shapes.map(|[num_layers, block_bytes]| {
            let [k, v] = [(); 2].map(|()| buffer(num_layers * NUM_BLOCKS * block_bytes));
            AllBlocks { k, v, num_layers, num_blocks: NUM_BLOCKS, block_bytes }
        });
        let states = buffer(NUM_STATES * state_bytes);
        Self { parts: parts.to_vec(), states, state_bytes, _buffers: buffers }
    }

    /// Slots for blocks and states, and the bytes of those for blocks.
    fn tier(&self, gpu: &Arc<Gpu>, slots: HostSlots) -> (HostTier, usize) {
        let block_bytes: usize = self.parts.iter().map(slot_bytes).sum();
        let bytes = slots.num_blocks * block_bytes + slots.num_states * self.state_bytes;
        (self.tier_in(gpu, slots, Box::new(vec![0; bytes]), SMALL_PORTION), slots.num_blocks * block_bytes)
    }

    fn tier_in(&self, gpu: &Arc<Gpu>, slots: HostSlots, memory: HostMemory, portion: usize) -> HostTier {
        let block_bytes = self.parts.iter().map(slot_bytes).sum();
        HostTier::new(gpu, slots, [block_bytes, self.state_bytes], memory, portion).unwrap()
    }

    fn state(&self, state: StateId) -> Span {
        self.states.part(state.0 as usize * self.state_bytes, self.state_bytes)
    }

    /// The words of a block.
    fn block(&self, block: usize) -> Vec<u32> {
        let mut words = Vec::new();
        for &AllBlocks { k, v, num_layers, num_blocks, block_bytes } in &self.parts {
            for (buffer, layer) in [k, v].into_iter().flat_map(|buffer| (0..num_layers).map(move |it| (buffer, it))) {
                let own = buffer.part((layer * num_blocks + block) * block_bytes, block_bytes);
                words.extend(own.read::<u32>(block_bytes / 4).unwrap());
            }
        }
        words
    }

    fn words_of_state(&self, state: u32) -> Vec<u32> {
        self.state(StateId(state)).read(self.state_bytes / 4).unwrap()
    }
}

/// Slots reach over the ends of portions.
const SMALL_PORTION: usize = 3 * 4096;

fn pairs(blocks: impl IntoIterator<Item = u32>, slots: impl IntoIterator<Item = u32>) -> Vec<(BlockId, HostSlot)> {
    blocks.into_iter().zip(slots).map(|(block, slot)| (BlockId(block), HostSlot(slot))).collect()
}

#[test]
fn what_is_stored_comes_back_to_any_place_while_slots_are_used_again() {
    let Ok(gpu) = Gpu::open(0) else { return println!("skipped: no CUDA device") };
    let steps = Queue::new(&gpu).unwrap();
    let memory = Memory::new(&gpu, [[3, 4096], [2, 512]], 4000);
    let (mut tier, _) = memory.tier(&gpu, HostSlots { num_blocks: 40, num_states: 2 });
    let before: Vec<_> = (0..NUM_BLOCKS).map(|block| memory.block(block)).collect();
    let states: Vec<_> = (0..NUM_STATES as u32).map(|state| memory.words_of_state(state)).collect();
    let mut queue = |copies: HostCopies| {
        tier.queue_copies(&steps, &memory.parts, |state| memory.state(state), &copies).unwrap();
    };
    queue(HostCopies {
        stored: pairs(0..40, 0..40),
        stored_states: vec![(StateId(0), HostSlot(1)), (StateId(1), HostSlot(0))],
        ..HostCopies::default()
    });
    // Blocks that are stored are overwritten by loads of the same plan.
    queue(HostCopies {
        stored: pairs(50..60, 0..10),
        loaded: pairs(50..70, 20..40),
        loaded_states: vec![(StateId(0), HostSlot(0)), (StateId(3), HostSlot(1))],
        ..HostCopies::default()
    });
    queue(HostCopies { loaded: pairs(80..90, 0..10), ..HostCopies::default() });
    steps.wait().unwrap();
    for (block, from) in (50..70).zip(20..40).chain((80..90).zip(50..60)) {
        assert!(memory.block(block) == before[from], "block {block} is block {from}");
    }
    assert!(memory.block(70) == before[70] && memory.block(49) == before[49], "others keep their content");
    assert!(memory.words_of_state(0) == states[1] && memory.words_of_state(3) == states[0]);
    assert!(memory.words_of_state(2) == states[2]);
}

/// Memory that lives until the process ends, for several owners.
struct Lasting(usize, usize);

impl AsMut<[u8]> for Lasting {
    fn as_mut(&mut self) -> &mut [u8] {
        // SAFETY: leaked memory; the tests access it through one owner at a time.
        unsafe { std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut(self.0), self.1) }
    }
}

/// The driver pins no memory twice.
#[test]
fn memory_that_cannot_be_pinned_is_used_as_it_is() {
    let Ok(gpu) = Gpu::open(0) else { return println!("skipped: no CUDA device") };
    let steps = Queue::new(&gpu).unwrap();
    let memory = Memory::new(&gpu, [[3, 4096], [2, 512]], 4000);
    let slots = HostSlots { num_blocks: 40, num_states: 0 };
    let bytes = 40 * memory.parts.iter().map(slot_bytes).sum::<usize>();
    let lasting = Vec::leak(vec![0; bytes]).as_mut_ptr().expose_provenance();
    let first = PinnedMemory::new(&gpu, Box::new(Lasting(lasting, bytes)), bytes / 2, SMALL_PORTION).unwrap();
    first.wait_for(bytes / 2);
    let mut tier = memory.tier_in(&gpu, slots, Box::new(Lasting(lasting, bytes)), SMALL_PORTION);
    let before: Vec<_> = (0..40).map(|block| memory.block(block)).collect();
    let mut queue = |copies: HostCopies| {
        tier.queue_copies(&steps, &memory.parts, |state| memory.state(state), &copies).unwrap();
    };
    queue(HostCopies { stored: pairs(0..40, 0..40), ..HostCopies::default() });
    queue(HostCopies { loaded: pairs(50..90, 0..40), ..HostCopies::default() });
    steps.wait().unwrap();
    assert!((50..90).zip(&before).all(|(block, before)| memory.block(block) == *before));
}

/// A worker that starts again maps the memory of the one before it.
#[test]
fn memory_that_is_passed_on_has_the_copies_of_all_plans_but_the_last() {
    let Ok(gpu) = Gpu::open(0) else { return println!("skipped: no CUDA device") };
    let steps = Queue::new(&gpu).unwrap();
    let memory = Memory::new(&gpu, [[3, 4096], [2, 512]], 4000);
    let slots = HostSlots { num_blocks: 40, num_states: 2 };
    let shared = SharedMemory::new("host-tier-test", 4 << 20).unwrap();
    let before: Vec<_> = (0..NUM_BLOCKS).map(|block| memory.block(block)).collect();
    let state = memory.words_of_state(1);
    let mut tier = memory.tier_in(&gpu, slots, Box::new(shared.map().unwrap()), SMALL_PORTION);
    let mut queue = |copies: HostCopies| {
        tier.queue_copies(&steps, &memory.parts, |state| memory.state(state), &copies).unwrap();
    };
    queue(HostCopies {
        stored: pairs(0..30, 0..30),
        stored_states: vec![(StateId(1), HostSlot(1))],
        ..HostCopies::default()
    });
    queue(HostCopies { stored: pairs(30..40, 30..40), ..HostCopies::default() });
    queue(HostCopies::default());
    // The copies of the first plan are complete now, whatever the streams do.
    let mut bytes = shared.map().unwrap();
    let size = 4 * before[0].len();
    for (block, words) in before.iter().enumerate().take(30) {
        let start = block * size;
        assert!(bytes.as_mut()[start..start + size] == *bytemuck::cast_slice::<u32, u8>(words), "block {block}");
    }
    steps.wait().unwrap();
    drop(tier);
    let mut tier = memory.tier_in(&gpu, slots, Box::new(shared.map().unwrap()), SMALL_PORTION);
    let loads = HostCopies {
        loaded: pairs(50..90, 0..40),
        loaded_states: vec![(StateId(4), HostSlot(1))],
        ..HostCopies::default()
    };
    tier.queue_copies(&steps, &memory.parts, |state| memory.state(state), &loads).unwrap();
    steps.wait().unwrap();
    for (block, words) in before.iter().enumerate().take(40) {
        assert!(memory.block(50 + block) == *words, "block {block}");
    }
    assert!(memory.words_of_state(4) == state);
}

/// Prints the rates of copies of blocks of Llama 3 8B's size: 32 layers, 8 KV heads of 128, 64 positions.
#[test]
fn copies_of_large_blocks_are_exact_and_timed() {
    let Ok(gpu) = Gpu::open(0) else { return println!("skipped: no CUDA device") };
    let steps = Queue::new(&gpu).unwrap();
    let memory = Memory::new(&gpu, [[32, 8 * 128 * 64 * 2], [1, 16]], 64);
    let slots = HostSlots { num_blocks: NUM_BLOCKS, num_states: 1 };
    let bytes = NUM_BLOCKS * memory.parts.iter().map(slot_bytes).sum::<usize>();
    let shared = SharedMemory::new("host-tier-test", bytes + 64).unwrap();
    // The pages exist the second time.
    for _ in 0..2 {
        let started = Instant::now();
        let tier = memory.tier_in(&gpu, slots, Box::new(shared.map().unwrap()), PINNED_PORTION);
        let ready = started.elapsed();
        tier.memory.wait_for(bytes);
        let (gb, pinned) = (bytes as f64 / 1e9, started.elapsed());
        println!("{gb:.2} GB of shared memory: in use after {ready:.2?}, pinned after {pinned:.2?}");
        drop(tier);
    }
    let mut tier = memory.tier_in(&gpu, slots, Box::new(shared.map().unwrap()), PINNED_PORTION);
    tier.memory.wait_for(bytes);
    let before = memory.block(5);
    let all = || pairs(0..NUM_BLOCKS as u32, 0..NUM_BLOCKS as u32);
    for _ in 0..3 {
        let stores = HostCopies { stored: all(), ..HostCopies::default() };
        let loads = HostCopies { loaded: all(), ..HostCopies::default() };
        for (name, copies) in [("stored", stores), ("loaded", loads)] {
            let started = Instant::now();
            tier.queue_copies(&steps, &memory.parts, |state| memory.state(state), &copies).unwrap();
            let queued = started.elapsed();
            steps.wait().unwrap();
            let waited = started.elapsed();
            tier.stores.queue.wait().unwrap();
            tier.loads.queue.wait().unwrap();
            let whole = started.elapsed();
            let rate = bytes as f64 / 1e9 / whole.as_secs_f64();
            println!("{name}: queued in {queued:.1?}, steps wait {waited:.1?}, all {whole:.1?}: {rate:.1} GB/s");
        }
    }
    assert!(memory.block(5) == before);
}
