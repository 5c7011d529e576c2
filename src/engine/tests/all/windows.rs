//! Sequences of models with sliding windows hold only the blocks that they can see. [`World`] compares each stream with
//! what its request generates alone, and each position that a step can see with what was written there.

use std::time::Duration;

use engine::{Engine, EngineConfig, Policy, Refused, Request, TokenId};

use crate::support::{Random, VOCAB_SIZE, World};

/// One group of layers without a window, and three with a window of 32 positions: 2 blocks, and parts of 2 more.
const WINDOWS: [Option<usize>; 4] = [None, Some(32), Some(32), Some(32)];

fn config() -> EngineConfig {
    EngineConfig {
        windows: WINDOWS.to_vec(),
        max_rows: 4,
        max_step_tokens: 64,
        max_sequence_len: 2048,
        ..EngineConfig::default()
    }
}

fn prompt(seed: u64, len: usize) -> Vec<TokenId> {
    let mut random = Random(seed);
    (0..len).map(|_| TokenId(random.below(VOCAB_SIZE))).collect()
}

fn request(seed: u64, len: usize, max_tokens: u32) -> Request {
    Request { prompt: prompt(seed, len), max_tokens, ..Request::default() }
}

/// Runs until the engine is idle. Returns the maximum number of blocks in use, while prompts are computed and after.
fn peaks(world: &mut World) -> (usize, usize) {
    let (mut prefill, mut decode) = (0, 0);
    while !world.engine.is_idle() {
        let is_prefilling = world.plan() && world.engine.stats().num_prefilling > 0;
        let peak = if is_prefilling { &mut prefill } else { &mut decode };
        *peak = world.engine.stats().num_blocks_used.max(*peak);
        world.settle();
    }
    world.run_to_idle();
    (prefill, decode)
}

#[test]
fn a_long_sequence_holds_only_the_blocks_that_it_can_see() {
    for policy in [Policy::GuaranteedNoEvict, Policy::MaxUtilization] {
        // 1000 positions are 63 blocks. A chunk of 64 positions and its window are at most 7 blocks in each group.
        let mut world = World::new(EngineConfig { policy, ..config() }, 1);
        world.submit(request(1, 1000, 1)).unwrap();
        assert_eq!(peaks(&mut world).0, 63 + 3 * 6, "{policy:?}");

        // The last of 200 positions are the 13th block. The window of a token is at most 3 blocks in each group.
        let mut world = World::new(EngineConfig { policy, ..config() }, 1);
        world.submit(request(1, 2, 199)).unwrap();
        assert_eq!(peaks(&mut world).1, 13 + 3 * 3, "{policy:?}");
    }
}

#[test]
fn a_text_longer_than_its_pool_without_windows_is_served() {
    let too_small = EngineConfig { num_blocks: 100, prefix_cache: false, ..config() };
    let full = EngineConfig { windows: vec![None; 4], ..too_small.clone() };
    let refused = Engine::new(full).unwrap().submit(request(1, 600, 300)).unwrap_err();
    assert_eq!(refused, Refused::NeverFits { needed: 4 * 57, num_blocks: 100 });
    for policy in [Policy::GuaranteedNoEvict, Policy::MaxUtilization] {
        let mut world = World::new(EngineConfig { policy, ..too_small.clone() }, 1);
        for seed in 0..3 {
            world.submit(request(seed, 600, 300)).unwrap();
        }
        world.run_to_idle();
        assert_eq!(world.num_finished, 3);
    }
}

/// A model that has a window in all layers: its sequences do not grow at all.
#[test]
fn a_model_without_full_layers_serves_a_text_of_any_length_from_a_few_blocks() {
    for windows in [vec![Some(32)], vec![Some(32), Some(50)]] {
        let mut world = World::new(EngineConfig { num_blocks: 20, windows, ..config() }, 1);
        world.submit(request(1, 700, 300)).unwrap();
        world.run_to_idle();
        assert_eq!(world.num_finished, 1);
    }
}

#[test]
fn a_common_prefix_is_found_after_its_window_has_passed() {
    let mut world = World::new(config(), 1);
    for tail in 0..5 {
        let prompt = [prompt(9, 160), prompt(tail, 300)].concat();
        world.submit(Request { prompt, max_tokens: 40, ..Request::default() }).unwrap();
        world.run_to_idle();
        // 10 blocks without a window, and those of the window before position 160: 2 in each group.
        assert_eq!(world.engine.stats().total_reused_blocks, tail * (10 + 3 * 2));
    }
}

#[test]
fn an_output_is_found_when_it_comes_back_as_a_prompt() {
    let mut world = World::new(config(), 1);
    let first = request(3, 200, 120);
    let (generated, ..) = crate::support::run_alone(&first, 2048);
    let second = Request { prompt: [first.prompt.clone(), generated, prompt(5, 30)].concat(), ..first.clone() };
    world.submit(first).unwrap();
    world.run_to_idle();
    world.submit(second).unwrap();
    world.run_to_idle();
    // The last token is never computed, so the block of positions 304..320 is not filled.
    assert_eq!(world.engine.stats().total_reused_blocks, 19 + 3 * 2);
}

/// Without full layers, the first blocks of a sequence are evicted before those that a prefix needs.
#[test]
fn a_prefix_is_found_after_its_first_blocks_were_evicted() {
    let mut world = World::new(EngineConfig { num_blocks: 40, windows: vec![Some(32)], ..config() }, 1);
    for (seed, len) in [(1, 501), (2, 300), (1, 501)] {
        world.submit(request(seed, len, 1)).unwrap();
        world.run_to_idle();
    }
    assert_eq!(world.engine.stats().total_reused_blocks, 2);
}

/// If the blocks of the window were evicted, the blocks of the other layers are of no use.
#[test]
fn a_prefix_whose_window_was_evicted_is_computed_again() {
    let mut world = World::new(EngineConfig { num_blocks: 80, ..config() }, 1);
    world.submit(request(1, 161, 1)).unwrap();
    world.run_to_idle();
    // Takes all blocks but a few.
    world.submit(request(2, 800, 1)).unwrap();
    world.run_to_idle();
    world.submit(request(1, 161, 1)).unwrap();
    world.run_to_idle();
    assert_eq!((world.engine.stats().total_reused_blocks, world.num_finished), (0, 3));
}

/// The chunk of a prompt cannot take the blocks of a sequence that this plan decodes, so it waits.
#[test]
fn a_chunk_waits_for_blocks_that_the_plan_uses() {
    let config = EngineConfig {
        windows: vec![None, Some(8)],
        block_size: 4,
        max_rows: 4,
        max_step_tokens: 10,
        max_inter_token: Some(Duration::from_secs(2)),
        min_prompt_tokens: 1,
        num_blocks: 23,
        policy: Policy::MaxUtilization,
        prefix_cache: false,
        ..EngineConfig::default()
    };
    let mut world = World::new(config, 1);
    for seed in 1..4 {
        world.submit(request(seed, 3, 20)).unwrap();
    }
    world.plan();
    world.settle();
    world.submit(Request { priority: 1, ..request(9, 40, 2) }).unwrap();
    // The long prompt joins and computes four positions. Then the others, which come after it, take the last blocks.
    let mut num_waiting = 0;
    for _ in 0..6 {
        world.plan();
        let is_full = world.engine.stats().num_blocks_used == 23;
        num_waiting += usize::from(is_full && world.engine.stats().num_prefilling == 1);
        world.settle();
    }
    assert!(num_waiting > 1, "no chunk waited");
    world.run_to_idle();
    assert_eq!(world.num_finished, 4);
    assert!(world.engine.stats().total_preempted > 0);
}
