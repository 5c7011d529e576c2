//! The host tier of the prefix cache: what is evicted from the device comes back from slots of the host. [`World`] checks at each step
//! that blocks and states hold what their positions need, and compares each stream with what its request generates alone.

use engine::{EngineConfig, EngineStats, Policy, Request, TokenId};

use crate::support::{World, computed, prompt, request};

const BLOCK_SIZE: usize = 16;

/// Room for one conversation on the device, and for several on the host.
fn config() -> EngineConfig {
    EngineConfig {
        max_rows: 4,
        max_step_tokens: 64,
        max_sequence_len: 512,
        block_size: BLOCK_SIZE,
        num_blocks: 20,
        num_host_blocks: 64,
        policy: Policy::MaxUtilization,
        ..EngineConfig::default()
    }
}

/// The text of a turn: its prompt and what it generates.
fn text(request: &Request) -> Vec<TokenId> {
    [request.prompt.clone(), crate::support::run_alone(request, config().max_sequence_len).0].concat()
}

/// Runs two conversations by turns, the first one three times. Returns what its last turn computes beyond its last full block,
/// and the counters.
fn third_turn(config: EngineConfig) -> (usize, EngineStats) {
    let mut world = World::new(config, 1);
    let mut turns = [1, 2].map(|seed| request(prompt(seed, 200), 20));
    for turn in 0..2 {
        for (seed, conversation) in (10 * (turn + 1)..).zip(&mut turns) {
            computed(&mut world, conversation.clone());
            *conversation = request([text(conversation), prompt(seed, 20)].concat(), 20);
        }
    }
    // The last token of an answer is never computed.
    let num_full = (turns[0].prompt.len() - 20 - 1) / BLOCK_SIZE * BLOCK_SIZE;
    let expected = turns[0].prompt.len() - num_full + 19;
    let computed = computed(&mut world, turns[0].clone());
    world.run_to_idle();
    assert!(computed >= expected, "{computed} positions, at least {expected}");
    (computed - expected, world.engine.stats())
}

#[test]
fn a_conversation_that_was_evicted_goes_on_from_its_last_full_block() {
    let (again, stats) = third_turn(config());
    assert_eq!(again, 0);
    assert!(stats.total_host_hit_blocks > 0 && stats.total_stored_blocks > 0 && stats.total_loaded_blocks > 0);
    let (again, stats) = third_turn(EngineConfig { num_host_blocks: 0, ..config() });
    assert!(again > 150, "{again} positions");
    assert_eq!((stats.total_stored_blocks, stats.total_loaded_blocks), (0, 0));
}

#[test]
fn a_conversation_with_a_recurrent_state_goes_on_from_a_snapshot_of_the_host() {
    let hybrid = EngineConfig { num_states: 3, state_interval: 4, num_host_states: 8, ..config() };
    let (again, stats) = third_turn(hybrid.clone());
    assert_eq!(again, 0);
    assert!(stats.total_stored_states > 0 && stats.total_loaded_states > 0);
    let (again, _) = third_turn(EngineConfig { num_host_states: 0, ..hybrid });
    assert!(again > 100, "{again} positions");
}

#[test]
fn a_conversation_with_windows_goes_on_from_the_blocks_that_it_sees() {
    for (windows, num_blocks) in [(vec![None, Some(40)], 30), (vec![Some(40), Some(24)], 16)] {
        let (again, stats) = third_turn(EngineConfig { windows, num_blocks, ..config() });
        assert_eq!(again, 0);
        assert!(stats.total_loaded_blocks > 0);
    }
}

#[test]
fn conversations_beyond_the_slots_of_the_host_are_forgotten_from_the_oldest_on() {
    let mut world = World::new(EngineConfig { num_host_blocks: 30, ..config() }, 1);
    for seed in 0..8 {
        computed(&mut world, request(prompt(seed, 200), 1));
        let stats = world.engine.stats();
        assert!(stats.num_host_blocks_used <= 30);
    }
    assert_eq!(world.engine.stats().num_host_blocks_used, 30);
    // Of 200 positions, 192 are full blocks. The newest is on the device, the two before it are on the host.
    assert_eq!(computed(&mut world, request(prompt(6, 200), 1)), 8);
    assert_eq!(computed(&mut world, request(prompt(5, 200), 1)), 8);
    assert_eq!(computed(&mut world, request(prompt(0, 200), 1)), 200);
}

#[test]
fn what_comes_back_is_not_stored_again() {
    let mut world = World::new(config(), 1);
    for seed in [1, 2] {
        computed(&mut world, request(prompt(seed, 200), 1));
    }
    let before = world.engine.stats().total_stored_blocks;
    for seed in [1, 2, 1, 2] {
        assert_eq!(computed(&mut world, request(prompt(seed, 200), 1)), 8);
    }
    let stats = world.engine.stats();
    assert!(stats.total_loaded_blocks > 12, "{} blocks", stats.total_loaded_blocks);
    // The rest of the second text, once.
    assert!(stats.total_stored_blocks - before <= 12, "{} blocks", stats.total_stored_blocks - before);
}

#[test]
fn a_sequence_waits_a_step_for_what_the_plan_stores() {
    let mut world = World::new(EngineConfig { num_blocks: 30, max_step_tokens: 512, ..config() }, 1);
    for seed in [1, 2] {
        computed(&mut world, request(prompt(seed, 200), 1));
    }
    // The first evicts blocks of the oldest in the plan that could admit it again.
    for (seed, len) in [(3, 150), (1, 200)] {
        world.submit(request(prompt(seed, len), 1)).unwrap();
    }
    assert_eq!([world.plan_tokens(), world.plan_tokens()], [150, 8]);
    world.run_to_idle();
    assert!(world.engine.stats().total_loaded_blocks > 0);
}

#[test]
fn a_reset_forgets_both_tiers() {
    let mut world = World::new(EngineConfig { num_states: 3, num_host_states: 8, ..config() }, 1);
    for seed in [1, 2] {
        computed(&mut world, request(prompt(seed, 200), 1));
    }
    assert!(world.engine.stats().num_host_blocks_used > 0);
    world.reset_prefix_cache();
    for seed in [1, 2] {
        assert_eq!(computed(&mut world, request(prompt(seed, 200), 1)), 200);
    }
}

#[test]
fn a_running_sequence_goes_on_after_a_reset_and_shares_nothing() {
    let mut world = World::new(config(), 1);
    world.submit(request(prompt(1, 200), 40)).unwrap();
    for _ in 0..8 {
        world.plan();
        world.settle();
    }
    world.reset_prefix_cache();
    world.run_to_idle();
    assert_eq!(computed(&mut world, request(prompt(1, 200), 1)), 200);
}

/// Two texts of 12 full blocks, of which the host has the first and the device the second. Returns the blocks on the host.
fn first_on_the_host(config: EngineConfig) -> (World, usize) {
    let mut world = World::new(config, 1);
    for seed in [1, 2] {
        // The last steps allocate no block, so they store nothing.
        computed(&mut world, request(prompt(seed, 200), 5));
    }
    let used = world.engine.stats().num_host_blocks_used;
    (world, used)
}

#[test]
fn lost_workers_leave_what_the_host_has() {
    // As many blocks as one text has, so that the other has none on the device.
    let small = EngineConfig { num_blocks: 13, ..config() };
    let hybrid = EngineConfig { num_states: 3, state_interval: 4, num_host_states: 8, ..small.clone() };
    for config in [small, hybrid] {
        let (mut world, used) = first_on_the_host(config);
        world.recover();
        let stats = world.engine.stats();
        assert_eq!((stats.num_host_blocks_used, stats.num_blocks_cached, stats.num_states_cached), (used, 0, 0));
        assert_eq!(computed(&mut world, request(prompt(1, 200), 1)), 8);
        assert!(world.engine.stats().total_host_hit_blocks >= 12);
        // The second was on the device alone.
        assert_eq!(computed(&mut world, request(prompt(2, 200), 1)), 200);
    }
}

#[test]
fn copies_of_the_last_plans_do_not_count_after_a_loss() {
    let mut world = World::new(EngineConfig { num_blocks: 14, max_step_tokens: 512, ..config() }, 1);
    computed(&mut world, request(prompt(1, 200), 1));
    // Its only step stores the blocks of the first.
    world.submit(request(prompt(2, 200), 3)).unwrap();
    world.plan();
    assert!(world.engine.stats().num_host_blocks_used > 10);
    world.recover();
    assert_eq!(world.engine.stats().num_host_blocks_used, 0);
    world.run_to_idle();
    assert_eq!(computed(&mut world, request(prompt(1, 200), 1)), 200);
}

#[test]
fn the_host_is_found_behind_a_beginning_that_was_lost() {
    // Both texts begin alike. The beginning stays on the device, because both use it.
    let text = |seed| [prompt(7, 64), prompt(seed, 136)].concat();
    let mut world = World::new(EngineConfig { num_blocks: 18, ..config() }, 1);
    for seed in [1, 2, 3] {
        computed(&mut world, request(text(seed), 10));
    }
    world.recover();
    // One of them computes the beginning again.
    assert_eq!(computed(&mut world, request(text(3), 1)), 200);
    assert_eq!(computed(&mut world, request(text(1), 1)), 8);
}

#[test]
fn new_host_memory_has_nothing() {
    let (mut world, used) = first_on_the_host(EngineConfig { num_blocks: 14, ..config() });
    assert!(used > 0);
    world.recover_without_host();
    assert_eq!(world.engine.stats().num_host_blocks_used, 0);
    assert_eq!(computed(&mut world, request(prompt(1, 200), 1)), 200);
}
